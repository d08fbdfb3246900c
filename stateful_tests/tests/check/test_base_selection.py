"""The base of a checkout comes out of its own history; how near a base is."""

import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from ci.commands import base_choice as commands
from ci.commands.shared import SystemSelector, Unusable
from impl.loading import nearest
from impl.loading.fetch import cache_folder
from impl.system_spec import SystemSpec
from stateful_tests.check.trees import base_selection, tree_history
from stateful_tests.check.trees.base_selection import Base, BaseKind

SCHEDULER = "sglang/srt/managers/scheduler.py"  # a driven file


def git(folder, *arguments):
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always")
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)
    return done.stdout.decode().strip()


def commit(folder, text):
    (folder / "python" / SCHEDULER).write_text(text)
    git(folder, "add", ".")
    git(folder, "commit", "-m", "a change")
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def clone(tmp_path):
    """A clone of a repository with two commits; its main is that of origin."""
    origin = tmp_path / "origin"
    (origin / "python" / SCHEDULER).parent.mkdir(parents=True)
    git(tmp_path, "init", "-b", "main", "origin")
    commit(origin, "number one\n")
    commit(origin, "number one\nnumber two\n")
    git(tmp_path, "clone", f"file://{origin}", "clone")
    return tmp_path / "clone"


def own_base(clone, since=None):
    return tree_history.own_base(clone / "python", since)


@pytest.fixture
def feature(clone):
    """The fork point of the branch that the clone is on, which has a commit of its own."""
    fork_point = git(clone, "rev-parse", "HEAD")
    git(clone, "switch", "-c", "feature")
    commit(clone, "number one\nnumber two\nnumber three\n")
    return fork_point


def test_the_base_is_the_merge_base_with_the_main_of_origin(clone, feature):
    assert own_base(clone) == (feature, "merge base with origin/main", False)


def test_the_base_is_the_merge_base_with_the_upstream_branch(clone, feature):
    git(clone, "branch", "--set-upstream-to=origin/main")
    assert own_base(clone) == (feature, "merge base with origin/main", False)


def test_a_branch_that_was_pushed_as_it_is_has_the_same_base(clone, feature):
    git(clone, "push", "-u", "origin", "feature")
    assert own_base(clone).commit == feature


def test_a_base_that_is_named_is_taken(clone, feature):
    assert own_base(clone, "main~1").commit == git(clone, "rev-parse", "main~1")


def test_a_clean_clone_has_nothing_of_its_own(clone):
    assert own_base(clone) is None


def test_the_base_of_a_new_file_is_head(clone):
    (clone / "python" / "new.py").write_text("")
    head = git(clone, "rev-parse", "HEAD")
    assert own_base(clone) == (head, "HEAD, before what is not committed", True)


def test_the_base_of_an_edit_is_head(clone):
    (clone / "python" / SCHEDULER).write_text("number one\n")
    assert own_base(clone).commit == git(clone, "rev-parse", "HEAD") == own_base(clone, "main").commit


def test_a_tree_without_an_upstream_has_its_edits_alone(clone):
    git(clone, "remote", "remove", "origin")
    assert own_base(clone) is None
    (clone / "python" / SCHEDULER).write_text("number one\n")
    assert own_base(clone).commit == git(clone, "rev-parse", "HEAD")


def test_the_base_without_a_remote_is_the_merge_base_with_the_local_main(clone):
    fork_point = git(clone, "rev-parse", "HEAD")
    git(clone, "remote", "remove", "origin")
    git(clone, "switch", "-c", "feature")
    commit(clone, "number one\nnumber two\nnumber three\n")
    assert own_base(clone) == (fork_point, "merge base with main", False)


def test_a_local_main_that_is_behind_the_upstream_branch_is_no_base(clone):
    git(clone, "switch", "--detach")
    git(clone, "branch", "-f", "main", "HEAD~1")
    assert own_base(clone) is None


@pytest.fixture
def fork(clone, tmp_path):
    """The clone of a fork whose main is behind; its remote "upstream" is two commits ahead."""
    git(tmp_path, "clone", "--bare", f"file://{tmp_path / 'origin'}", "upstream")
    git(clone, "remote", "add", "upstream", f"file://{tmp_path / 'upstream'}")
    git(clone, "switch", "--detach")
    commit(clone, "number one\nnumber two\nnumber three\n")
    commit(clone, "number one\nnumber two\nnumber three\nnumber four\n")
    git(clone, "push", "upstream", "HEAD:main")
    git(clone, "fetch", "upstream")
    return clone


def test_a_state_of_upstream_has_nothing_of_its_own(fork):
    assert own_base(fork) is None


def test_the_base_in_a_fork_is_the_latest_merge_base(fork):
    """A tree of August was compared with the fork's main of spring: all of upstream since was its own."""
    fork_point = git(fork, "rev-parse", "HEAD")
    commit(fork, "number one\nnumber three\nnumber four\n")
    assert own_base(fork) == (fork_point, "merge base with upstream/main", False)
    git(fork, "update-ref", "refs/remotes/origin/main", "HEAD~2")
    assert own_base(fork) == (fork_point, "merge base with upstream/main", False)


def test_the_base_of_a_branch_that_was_pushed_to_the_fork_is_its_pushed_state(fork):
    commit(fork, "number one\nnumber three\nnumber four\n")
    git(fork, "switch", "-c", "feature")
    git(fork, "push", "-u", "origin", "feature")
    pushed = git(fork, "rev-parse", "HEAD")
    commit(fork, "number three\nnumber four\n")
    assert own_base(fork) == (pushed, "merge base with origin/feature", False)


def test_the_base_of_a_branch_is_the_fork_s_main_where_that_is_ahead(fork):
    commit(fork, "number one\nnumber three\nnumber four\n")
    git(fork, "update-ref", "refs/remotes/origin/main", "HEAD")
    fork_point = git(fork, "rev-parse", "HEAD")
    commit(fork, "number three\nnumber four\n")
    assert own_base(fork) == (fork_point, "merge base with origin/main", False)


def test_a_shallow_clone_says_that_history_is_missing(clone, tmp_path):
    origin = tmp_path / "origin"
    git(origin, "switch", "-c", "other", "main~1")
    commit(origin, "number one\nother\n")
    depth = ("--depth", "1", "--no-single-branch")
    git(tmp_path, "clone", *depth, "--branch", "other", f"file://{origin}", "shallow")
    shallow = tmp_path / "shallow"
    says = r"no merge base with origin/main .a shallow clone"
    with pytest.raises(ValueError, match=says):
        own_base(shallow, "origin/main")
    git(shallow, "remote", "set-head", "origin", "main")
    with pytest.raises(ValueError, match=says.replace("main", "HEAD")):
        own_base(shallow)  # the branch was pushed as it is, which says nothing


def test_a_folder_inside_of_another_clone_has_no_history(clone):
    assert tree_history.has_history(clone / "python", "sglang")
    assert not tree_history.has_history(clone / "python", "vllm")
    assert not tree_history.has_history(clone.parent, "sglang")


@pytest.fixture
def with_core(clone):
    """The clone with two built files that git ignores: a compiled core and the version."""
    package = clone / "python" / "sglang"
    (package / "_version.py").write_text("version = '0.5.23'")
    (package / "core.so").write_text("compiled")
    (clone / ".gitignore").write_text("*.so\n_version.py\n")
    return clone


def extract_revision(clone, revision, into):
    tree_history.extract(clone / "python", revision, "sglang", into)
    return into


def test_extract_adds_built_files_to_the_files_of_a_commit(with_core, tmp_path):
    past = extract_revision(with_core, "HEAD~1", tmp_path / "past")
    assert (past / SCHEDULER).read_text() == "number one\n"
    assert (past / "sglang/_version.py").is_file() and (past / "sglang/core.so").is_file()


def test_extract_leaves_out_a_core_whose_sources_changed(with_core, tmp_path):
    (with_core / "core.rs").write_text("")
    git(with_core, "add", ".")
    assert not (extract_revision(with_core, "HEAD", tmp_path / "past") / "sglang/core.so").exists()


def test_extract_takes_a_core_that_is_committed(with_core, tmp_path):
    git(with_core, "add", "--force", "python/sglang/core.so")
    git(with_core, "commit", "-m", "a core")
    (with_core / "python/sglang/core.so").write_text("compiled anew")
    past = extract_revision(with_core, "HEAD", tmp_path / "past")
    assert (past / "sglang/core.so").read_text() == "compiled"


class Past:
    """Stand-in for a resolved checkout: its root, its release, and whether it was closed."""

    spec = SystemSpec("sglang", ways=("overlap",), checkout=True)
    name = str(spec)
    release = "0.5.23"
    capabilities = None

    def __init__(self, root):
        self.root = root
        self.closed = False

    def close(self):
        self.closed = True


@pytest.fixture
def resolved_selectors(clone, monkeypatch):
    """Checkouts resolve to Past, releases to a name; says what was resolved."""
    specs = []

    def resolve(selector, *, quiet=False):
        specs.append(selector)
        if selector.checkout is None:
            return SimpleNamespace(name=str(selector.spec), close=lambda: None)
        return Past(Path(selector.checkout) / "python")

    monkeypatch.setattr(SystemSelector, "resolve", resolve)
    monkeypatch.setattr(commands, "_start_once", lambda system: None)
    return specs


def base_of_check(clone, named=None, since=None):
    with ExitStack() as opened:
        base, _ = commands.with_system(
            named,
            SystemSelector(SystemSpec("sglang", ways=("overlap",)), str(clone)),
            since,
            opened,
        )
        return base


def test_the_base_of_an_edit_is_head_and_is_shown_by_its_revision(clone, resolved_selectors):
    (clone / "python" / SCHEDULER).write_text("number one\nnumber two\nnumber three\n")
    base = base_of_check(clone)
    head = git(clone, "rev-parse", "HEAD")[:9]
    assert (base.kind, base.name, base.lines) == (BaseKind.HISTORY, f"git:{head}", 1)
    assert base.text == f"git:{head} (HEAD, before what is not committed), 1 line differs"
    assert str(resolved_selectors[-1].spec) == "sglang+overlap" and base.system.closed
    assert not Path(resolved_selectors[-1].checkout).exists(), "its files are removed"
    assert (
        base_of_check(clone, "git:HEAD~1").text
        == f"git:{short_commit(clone, 'HEAD~1')} (HEAD~1), 2 lines differ"
    )


def test_a_commit_of_the_same_lines_has_no_distance(clone, resolved_selectors):
    """A line that stands there twice counts once: its removal is no distance."""
    (clone / "python" / SCHEDULER).write_text("number one\nnumber two\nnumber two\n")
    base = base_of_check(clone)
    assert base.lines == 0 and base.text.endswith("(HEAD, before what is not committed)")


def short_commit(clone, revision):
    return git(clone, "rev-parse", revision)[:9]


def test_a_base_that_cannot_be_driven_falls_back_to_a_release(clone, resolved_selectors, monkeypatch, capsys):
    (clone / "python" / SCHEDULER).write_text("number one\n")

    def lacks(_):
        raise Unusable("Req has no prefix_len")

    monkeypatch.setattr(commands, "_start_once", lacks)
    base = base_of_check(clone)
    assert (base.kind, base.name) == (BaseKind.RELEASE, "sglang==0.5.23+overlap")
    errors = capsys.readouterr().err
    assert "cannot be driven: Req has no prefix_len. The base is a release" in errors
    with pytest.raises(Unusable, match="--base git:HEAD~1: Req has no prefix_len"):
        base_of_check(clone, "git:HEAD~1")
    with pytest.raises(Unusable, match="--base git:nothing: bad revision 'nothing'"):
        base_of_check(clone, "git:nothing")


@pytest.mark.parametrize("edited", [True, False])
def test_a_revision_that_is_none_is_refused(clone, resolved_selectors, edited):
    if edited:
        (clone / "python" / SCHEDULER).write_text("number one\n")
    with pytest.raises(Unusable, match="--since nothing: bad revision 'nothing'"):
        base_of_check(clone, since="nothing")


def test_a_clean_tree_is_compared_with_a_release(clone, resolved_selectors):
    assert base_of_check(clone).kind is BaseKind.RELEASE


@pytest.mark.usefixtures("resolved_selectors")
def test_the_base_is_the_nearest_release_that_is_driven_in_the_way(clone, monkeypatch, capsys):
    """A tree before the first release of vLLM as a pair had no base, and known faults were NEW."""
    resolve = SystemSelector.resolve

    def too_old(selector, **how):
        if selector.spec.version in ("0.5.23", "0.5.22"):
            raise Unusable(f"{selector.spec.version} has no such way")
        return resolve(selector, **how)

    monkeypatch.setattr(SystemSelector, "resolve", too_old)
    monkeypatch.setattr(nearest, "distances", lambda *_: {"0.5.21": 9, "0.5.22": 2, "0.5.23": 5})
    selector = SystemSelector(SystemSpec("sglang", ways=("overlap",)), str(clone))
    with ExitStack() as opened:
        base, system = commands.with_system(None, selector, None, opened)
    assert base.name == "sglang==0.5.21+overlap"
    assert system.release == "0.5.21", "its known faults are asked for"
    note = "kvspec: 0.5.23 is not driven in this way: the base is 0.5.21, the nearest that is\n"
    assert capsys.readouterr().err == note


@pytest.mark.parametrize(("lines", "is_release"), [(1, True), (2, False), (3, False)])
def test_a_release_that_is_twice_as_near_as_the_merge_base_is_the_base(
    clone, resolved_selectors, monkeypatch, capsys, lines, is_release
):
    """An old branch of a fork was the base of a tree of upstream: a known fault of the release was NEW."""
    monkeypatch.setattr(nearest, "nearest", lambda *_: nearest.Nearest("0.5.23", lines))
    git(clone, "switch", "-c", "feature")
    commit(clone, "number one\nnumber two\nnumber three\nnumber four\nnumber five\n")
    base = base_of_check(clone)
    assert (base.kind is BaseKind.RELEASE) is is_release
    point = f"git:{short_commit(clone, 'main')}"
    text = (
        f"kvspec: {point} (merge base with origin/main), 3 lines differ; sglang==0.5.23 is nearer (1 line"
        f" differs): the base is that release. --base {point} compares with the commit\n"
    )
    assert capsys.readouterr().err == (text if is_release else "")
    assert base_of_check(clone, since="main").kind is BaseKind.HISTORY
    assert base_of_check(clone, "git:main").kind is BaseKind.STATED
    git(clone, "reset", "--mixed", "main")
    assert base_of_check(clone).kind is BaseKind.HISTORY, "edits are the tree's own"


def test_a_revision_goes_with_a_checkout(kvspec):
    code, _, err = kvspec("check", "--base", "git:HEAD")
    assert code == 2 and "--base git:HEAD: goes with a checkout" in err


@pytest.fixture
def write_tree(tmp_path, monkeypatch):
    """Writes a tree of one file."""
    monkeypatch.setattr(nearest, "read", lambda _: SimpleNamespace(files=("a.py",), releases=()))

    def write(name, lines):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.py").write_text("\n".join(lines))
        return SimpleNamespace(name="sglang@checkout", root=tmp_path / name)

    return write


def numbered_lines(first, end):
    return [f"line number {number}" for number in range(first, end)]


def test_lines_that_one_has_and_the_other_has_not_differ(write_tree):
    first_tree = write_tree("one", ["the first", "the second", "  the third", "# what was said"])
    two = write_tree("two", ["the first", "another second", "the third", "", "# what was told"])
    assert base_selection.lines_between(first_tree, two) == base_selection.lines_between(two, first_tree) == 2
    more = write_tree("more", ["the first", "the second", "the third", "the fourth", "the first"])
    assert base_selection.lines_between(first_tree, more) == 1
    assert base_selection.lines_between(first_tree, SimpleNamespace(name="torch")) is None


def test_a_tree_is_as_far_from_its_base_as_from_the_release_it_is_taken_for(tmp_path):
    """A tree of 2026-06-10 was "taken for 0.23.0 (1,987 lines differ)", its base "3250 lines away"."""
    release = nearest.read("vllm").releases[-1]
    if not (root := cache_folder() / f"vllm-{release}").is_dir():
        pytest.skip(f"vLLM {release} is not in the cache")
    scheduler = "vllm/v1/core/sched/scheduler.py"
    shutil.copytree(root / "vllm/v1/core", tmp_path / "vllm/v1/core")
    (tmp_path / scheduler).write_text("a_line_of_the_fork = 1\n" * 2)
    nearest_release = nearest.nearest("vllm", tmp_path)
    tree = SimpleNamespace(name="vllm@checkout", root=tmp_path)
    # The folder of the base in the cache counts for nothing.
    base = SimpleNamespace(name=f"vllm=={nearest_release.release}+async", root=tmp_path)
    assert nearest_release.lines and base_selection.lines_between(tree, base) == nearest_release.lines
    distance = Base(base, BaseKind.RELEASE, lines=nearest_release.lines)
    assert distance.text.endswith(f", {nearest.differing(nearest_release.lines)}")


@pytest.mark.parametrize(
    ("count", "says"),
    [(0, "no new line of code"), (1, "1 line differs"), (2638, "2,638 lines differ")],
)
def test_a_distance_is_told_in_lines(count, says):
    assert nearest.differing(count) == says


@pytest.mark.parametrize(
    ("own_lines", "share", "between"),
    [(0, 0.0, False), (9, 0.09, False), (10, 0.1, True), (100, 1.0, True)],
)
def test_a_tree_between_two_releases_has_much_of_the_other(write_tree, own_lines, share, between):
    base = write_tree("base", numbered_lines(0, 50))
    release = write_tree("release", numbered_lines(50, 150))
    tree = write_tree("tree", numbered_lines(0, 50) + numbered_lines(50, 50 + own_lines))
    lines = [*map(base_selection.lines_of, (tree, release, base))]
    assert base_selection.share_of_lines(*lines) == pytest.approx(share)
    assert base_selection.lies_between(*lines) is between


def test_a_small_share_is_a_coincidence(write_tree):
    base = write_tree("base", [])
    release = write_tree("release", numbered_lines(0, 1000))
    tree = write_tree("tree", numbered_lines(0, 20))
    assert not base_selection.lies_between(*map(base_selection.lines_of, (tree, release, base)))


def test_a_base_without_files_has_no_distance():
    assert Base(SimpleNamespace(name="torch"), BaseKind.STATED).text == "torch"
