"""Exported tests and bug reports at the command line."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from ci.commands import trace_export
from ci.export import unit_test as export
from ci.export.recorded_run import NotExportable
from ci.export.template_parts import SHARED
from impl.process import run_test
from impl.sglang.parts.fetch import release_root
from reference.all_clauses import ALL_CLAUSES
from stateful_tests.lockstep import system_names as registry
from stateful_tests.tests.support.night import at_night
from stateful_tests.traces.trace_files import load, save
from stateful_tests.tests.export.test_export import BUG, FIXTURES, OVERSHOOT


@pytest.fixture
def ends_by_version(monkeypatch):
    """The command without releases, with given outcomes."""
    ends = {"0.5.10": (run_test.FAILS, ""), "0.5.13": (0, "")}
    monkeypatch.setattr(export, "unit_test", lambda *_: "# the test\n")
    monkeypatch.setattr(export, "shared_module", lambda *_: "# the server\n")
    monkeypatch.setattr(export, "release_root", Path)
    monkeypatch.setattr(
        run_test, "outcomes", lambda *runs, hook: [ends[version] for _, version, _ in runs]
    )
    root_of_release = "impl.sglang.process.system.release_root"
    monkeypatch.setattr(root_of_release, Path)
    return ends


def test_a_test_is_run_before_it_is_written(kvspec, ends_by_version):
    options = (
        "export",
        str(OVERSHOOT),
        "--as",
        "pytest",
        "--impl",
        "sglang==0.5.10",
        "--fixed",
        "0.5.13",
    )
    code, out, err = kvspec(*options)
    assert (code, out) == (0, "# the test\n")
    assert err.splitlines() == [
        "sglang==0.5.10: the test fails, as it should",
        "sglang==0.5.13: the test passes, as it should",
        f"kvspec: {OVERSHOOT}: its bug has another trace: @overshoot_stays_in_the_history;"
        " --out DIR/ writes a test of each",
    ]
    code, _, err = kvspec(*options, "--out", "t.py")
    assert code == 0
    assert "kvspec: again: kvspec run-test t.py --impl sglang==0.5.10\n" in err
    assert "upstream in test/registered/unit" in err
    assert Path("t.py").read_text() == "# the test\n"
    assert kvspec(*options, "--out", "t.py")[0] == 2


def test_tests_in_a_folder_share_one_module(kvspec, ends_by_version, monkeypatch):
    options = (
        "export",
        str(OVERSHOOT),
        "--as",
        "pytest",
        "--impl",
        "sglang==0.5.10",
        "--out",
        "tests/",
    )
    monkeypatch.setattr(trace_export, "_other_traces", lambda *_: [])
    for name in ("test_a", "test_b"):
        monkeypatch.setattr(export, "unit_test", lambda *_, name=name: f"def {name}(self): ...\n")
        assert kvspec(*options)[0] == 0, name
    assert sorted(p.name for p in Path("tests").iterdir()) == [
        f"{SHARED}.py",
        "test_a.py",
        "test_b.py",
    ]
    assert Path("tests", f"{SHARED}.py").read_text() == "# the server\n"
    assert "test_b.py: exists already; --force overwrites it" in kvspec(*options)[2]

    monkeypatch.setattr(export, "unit_test", lambda *_: "def test_c(self): ...\n")
    monkeypatch.setattr(export, "shared_module", lambda *_: "# another server\n")
    code, _, err = kvspec(*options)
    assert (code, f"--out tests/{SHARED}.py: is for other releases: another folder, or" in err) == (
        2,
        True,
    )
    assert not Path("tests/test_c.py").exists()
    assert kvspec(*options, "--force")[0] == 0
    code, _, err = kvspec("export", str(BUG), "--as", "story", "--out", "tests")
    assert (code, "--out tests: is a folder; a bug report is one file" in err) == (2, True)


def test_a_folder_gets_a_test_of_each_trace_of_a_bug(kvspec, ends_by_version, monkeypatch):
    """A trace without a test has a line that says why; --name is of the first."""
    exports = []
    refused = set()

    def unit_test(trace, file, system, fixed, titles, beside):
        exports.append((file, titles.name))
        if file in refused:
            raise NotExportable("nothing of the release shows it")
        return "def test_a(self): ...\n"

    monkeypatch.setattr(export, "unit_test", unit_test)
    options = ("export", str(OVERSHOOT), "--as", "pytest", "--impl", "sglang==0.5.10", "--name", "a")
    other = "@overshoot_stays_in_the_history"
    code, _, err = kvspec(*options, "--out", "both/")
    assert code == 0 and exports == [(str(OVERSHOOT), "a"), (other, None)]
    assert f"{other}: sglang==0.5.10: the test fails, as it should" in err
    names = {path.name for path in Path("both").iterdir()}
    assert names == {f"{SHARED}.py", "test_a.py", "test_a_2.py"}
    refused |= {other}
    _, _, err = kvspec(*options, "--out", "one/")
    assert f"{other}, of the same bug: no test is made: nothing of the release shows it" in err
    assert {path.name for path in Path("one").iterdir()} == {f"{SHARED}.py", "test_a.py"}
    refused ^= {other, str(OVERSHOOT)}
    code, _, err = kvspec(*options, "--out", "its/")
    assert code == 0 and f"{OVERSHOOT}: no test is made: nothing of the release shows it" in err
    assert exports[-1] == (other, "a")
    refused |= {other}
    code, _, err = kvspec(*options, "--out", "none/")
    assert code == 2
    assert "Nor of 1 other trace of this bug." in err
    assert not Path("none").exists()


@pytest.mark.parametrize(
    ("version", "end", "says"),
    [
        ("0.5.10", (0, ""), "no test is made: it passes on sglang==0.5.10: what shows"),
        ("0.5.13", (run_test.FAILS, "AssertionError: 1"), "it fails on sglang==0.5.13 as well: the bug"),
        ("0.5.13", (1, "ImportError: no"), "it cannot be run on sglang==0.5.13: ImportError: no"),
        (
            "0.5.10", (run_test.STOPS, "AssertionError: its row"),
            "it stops before its own assertion on sglang==0.5.10: AssertionError: its row",
        ),
    ],
)  # fmt: skip
def test_a_test_that_shows_nothing_is_not_written(kvspec, ends_by_version, version, end, says):
    ends_by_version[version] = end
    options = ("--impl", "sglang==0.5.10", "--fixed", "0.5.13", "--out", "t.py")
    code, _, err = kvspec("export", str(OVERSHOOT), "--as", "pytest", *options)
    assert (code, Path("t.py").exists()) == (2, False)
    assert says in err


def test_the_next_trace_of_a_bug_makes_the_test(kvspec, ends_by_version, monkeypatch):
    """This holds for a finding, whose traces lie beside each other, and for a known fault."""
    ends_by_version["0.5.10"] = (run_test.FAILS, "")

    def unit_test(trace, file, *_):
        if file in refused:
            raise NotExportable("nothing of the release shows it")
        return f"# {file}\n"

    monkeypatch.setattr(export, "unit_test", unit_test)
    for number in ("", "2-"):
        save(load(OVERSHOOT), f"len-2-{number}sglang-0.5.10.json")
    options = "--as", "pytest", "--impl", "sglang==0.5.10"
    refused = ["len-2-sglang-0.5.10.json", f"@{OVERSHOOT.stem}"]
    code, out, err = kvspec("export", refused[0], *options)
    assert (code, out) == (0, "# len-2-2-sglang-0.5.10.json\n"), err
    assert "nothing of the release shows it. The test is of another trace of the same bug" in err
    code, out, err = kvspec("export", refused[1], *options)
    assert (code, out) == (0, "# @overshoot_stays_in_the_history\n"), err


@pytest.mark.parametrize(
    ("trace", "impl", "says"),
    [
        ("a_mixed_batch_forgets_which_state_to_keep", "sglang==0.5.22", "recurrent state is no part of"),
        ("a_server_that_slept_names_lost_kv", "lmdeploy==0.18.0", "classes of SGLang and vLLM, not of"),
        ("two_readers_of_an_answer_and_the_first_frees_it", "vllm==0.33.0+pair", "this trace has two"),
        (
            "a_prompt_of_one_token_is_padded_and_runs_as_a_prompt", "vllm==0.33.0+v2",
            "recurrent state is the worker's, and the test has a scheduler alone",
        ),
        (
            "a_reset_of_host_memory_keeps_the_record_of_a_finished_request", "vllm==0.22.0+offload",
            "Nor of 1 other trace of this bug.",
        ),
    ],
)  # fmt: skip
def test_export_without_a_test_says_why_and_offers_a_bug_report(kvspec, trace, impl, says):
    code, out, err = kvspec("export", f"@{trace}", "--as", "pytest", "--impl", impl)
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert says in err and "Ran 1 test" not in err
    assert err.endswith(f"The text of a bug report: kvspec export @{trace} --as story --impl {impl}\n")


BY_HAND = trace_export.REPORTS / "test_retried_turn_resumes_where_its_state_is.py"


@pytest.mark.parametrize("saved", [False, True])
def test_a_handwritten_test_replaces_one_that_no_trace_makes(kvspec, saved):
    """A finding of the user's is no file of a known fault: its replay names the fault."""
    trace = "@a_retracted_turn_goes_on_below_its_state"
    if saved:
        [path] = (FIXTURES / "releases").rglob(f"{trace[1:]}.json")
        save(load(path), trace := "sta-2-sglang-0.5.23.json")
    options = "--as", "pytest", "--impl", "sglang==0.5.23+overlap"
    code, out, err = kvspec("export", trace, *options)
    assert (code, out) == (0, BY_HAND.read_text())
    assert "sglang==0.5.23+overlap: the test fails, as it should" in err
    assert f"The test is the one of this bug that was written by hand: {BY_HAND}" in err


def test_a_handwritten_test_is_written_to_out_and_checked(kvspec):
    trace = "@a_retracted_turn_goes_on_below_its_state"
    options = "--as", "pytest", "--impl", "sglang==0.5.23+overlap"
    code, _, _ = kvspec("export", trace, *options, "--out", "tests/")
    [file] = Path("tests").iterdir()
    assert code == 0
    assert file.name == "test_the_match_of_a_retry_goes_no_further_back_than_the_state.py"
    code, out, err = kvspec("export", trace, *options, "--fixed", "0.5.22")
    assert (code, out) == (2, "")
    assert f"{BY_HAND}, which was written by hand: it fails on sglang==0.5.22+overlap as well" in err


SESSIONS = Path("sglang/srt/session/streaming_session.py")


def git(folder, *arguments):
    """Return what git prints; a commit is its first nine digits."""
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()[:9]


@pytest.fixture
def clone(tmp_path):
    """A clone whose only commit has the files of 0.5.23."""
    folder = tmp_path / "clone"
    shutil.copytree(release_root("0.5.23"), folder, ignore=shutil.ignore_patterns("__pycache__"))
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "as released")
    return folder


LENDS = "        # Lend the record; the slot keeps the tree lock."
SHRINKS = "if slot.kv.holds_mamba and len(params.key) < slot.kv.kv_committed_len:"


@pytest.mark.parametrize(
    ("trace", "way", "was", "becomes"),
    [
        ("@a_slot_keeps_a_token_that_nobody_computed", "",
         "= min(target, slot.kv.kv_allocated_len)", "= min(target, slot.kv.kv_committed_len)"),
        ("@a_retracted_turn_goes_on_below_its_state", "+overlap",
         LENDS, f"        {SHRINKS}\n            return None\n{LENDS}"),
    ],
    ids=["exported", "written by hand"],
)  # fmt: skip
@at_night
def test_the_mended_side_is_a_commit_of_the_checkout(kvspec, clone, trace, way, was, becomes):
    released = git(clone, "rev-parse", "HEAD")
    text = (clone / SESSIONS).read_text()
    assert was in text
    (clone / SESSIONS).write_text(text.replace(was, becomes))
    git(clone, "commit", "-qam", "mended")
    mended = git(clone, "rev-parse", "HEAD")
    git(clone, "checkout", "-q", released)
    options = "--as", "pytest", "--impl", f"sglang{way}", "--sglang-path", str(clone)
    code, _, err = kvspec("export", trace, *options, "--fixed", f"git:{mended}")
    assert code == 0 and f"git:{mended}: the test passes, as it should" in err, err


def test_a_commit_that_mends_nothing_or_does_not_exist_is_refused(kvspec, clone):
    trace = "@a_slot_keeps_a_token_that_nobody_computed"
    released = git(clone, "rev-parse", "HEAD")
    options = "--as", "pytest", "--impl", "sglang", "--sglang-path", str(clone)
    code, _, err = kvspec("export", trace, *options, "--fixed", "git:HEAD")
    assert code == 2 and f"it fails on git:{released} as well" in err
    code, _, err = kvspec("export", trace, *options, "--fixed", "git:no-branch")
    assert code == 2 and "--fixed git:no-branch: " in err


def test_a_commit_goes_with_a_checkout(kvspec):
    options = "--as", "pytest", "--impl", "sglang==0.5.10", "--fixed", "git:HEAD"
    code, _, err = kvspec("export", str(OVERSHOOT), *options)
    assert (code, "--fixed git:HEAD: goes with a checkout, such as --sglang-path" in err) == (2, True)


@pytest.mark.parametrize("fixed", ["0.5.13+overlap", "vllm==0.33.0", "sglang==0.5.13+unified"])
def test_the_fixed_release_runs_in_the_ways_of_the_test(kvspec, ends_by_version, fixed):
    options = "--as", "pytest", "--impl", "sglang==0.5.10"
    code, _, err = kvspec("export", str(OVERSHOOT), *options, "--fixed", fixed)
    assert code == 2 and f"--fixed {fixed}: the test is run as --impl is: sglang==VERSION" in err
    assert kvspec("export", str(OVERSHOOT), *options, "--fixed", "sglang==0.5.13")[0] == 0


@pytest.mark.parametrize(
    ("end", "says"),
    [
        ((0, "OK"), "the test passes on sglang==0.5.10"),
        ((run_test.FAILS, "AssertionError: 1"), "the test fails on sglang==0.5.10: AssertionError: 1"),
        ((run_test.STOPS, "KeyError: 'x'"), "the test stops before its own assertion on sglang==0.5.10: K"),
    ],
)
def test_an_exported_test_is_run_here(kvspec, ends_by_version, end, says):
    ends_by_version["0.5.10"] = end
    Path("test_a.py").write_text("# Made by kvspec\n")
    code, out, _ = kvspec("run-test", "test_a.py", "--impl", "sglang==0.5.10")
    assert out.startswith(f"test_a.py: {says}")
    assert code == {0: 0, run_test.FAILS: 1, run_test.STOPS: 3}[end[0]]
    assert kvspec("run-test", "no.py", "--impl", "sglang==0.5.10")[0] == 2
    assert "runs on a release or a checkout" in kvspec("run-test", "test_a.py", "--impl", "torch")[2]


def test_run_test_runs_a_test_in_the_shape_of_upstream(kvspec):
    """It fails on the release, at its own assertion."""
    report = FIXTURES / "releases" / "reports" / "test_finish_commits_only_what_has_kv.py"
    code, out, _ = kvspec("run-test", str(report), "--impl", "sglang==0.5.23")
    assert code == 1 and "the test fails on sglang==0.5.23: TestAssertionError: 5 != 4" in out


def test_names_and_titles_without_folders_of_this_machine(kvspec, monkeypatch, tmp_path):
    """By clause and command, where the file's name says nothing; Markdown shows the story as it is."""
    story = "A <b>story</b> | with *stars*, [links](http://x) and s_evicted.\n# None is a heading."
    save(replace(load(BUG), story=story), "len-3-torch.json")
    code, out, _ = kvspec("export", "len-3-torch.json", "--as", "story")
    assert (code, out.split("\n")[0]) == (0, "# Admit: restore caps at the prefix (LEN-3)")
    assert r"A \<b>story\</b> \| with \*stars\*, [links\](http://x) and s_evicted. # None is" in out
    assert f"> Why it matters: {ALL_CLAUSES['LEN-3'].why}\n" in out and "pip install" in out
    out = kvspec("export", f"@{BUG.stem}", "--as", "story")[1]
    assert f"Save this as `{BUG.name}`" in out
    out = kvspec("export", "len-3-torch.json", "--as", "story", "--title", "So it is")[1]
    assert out.startswith("# So it is (LEN-3)\n")
    code, _, err = kvspec("export", "len-3-torch.json", "--as", "story", "--name", "a-b")
    assert (code, "--name: 'a-b' is no name of a test" in err) == (2, True)

    for command in (
        "init -q",
        "-c user.name=a -c user.email=a@b commit -q --allow-empty -m x",
        "tag v1.2",
    ):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True)
    resolve = "ci.commands.shared.SystemSelector.resolve"
    monkeypatch.setattr(resolve, lambda _: registry.resolve("torch+pr22862-tail"))
    path = str(tmp_path)
    out = kvspec(
        "export", "len-3-torch.json", "--as", "story", "--impl", "sglang", "--sglang-path", path
    )[1]
    assert "--impl sglang --sglang-path CHECKOUT\n" in out and path not in out
    assert "* torch+pr22862-tail (v1.2)\n" in out


def test_other_implementations_are_refused(kvspec):
    code, _, err = kvspec("export", str(OVERSHOOT), "--as", "pytest", "--impl", "torch")
    assert (code, "--impl sglang==VERSION, not torch" in err) == (2, True)


def test_a_story_is_the_text_of_a_bug_report(kvspec):
    code, out, _ = kvspec("export", str(BUG), "--as", "story")
    assert code == 0
    assert out.startswith("# Retract then retry frees the reserved token (LEN-3)\n")
    for part in (
        "the key is one shorter than committed",
        "\n\nCommand 6 (admit r1) must resume at 10, the smaller of kv_committed_len 11 and a",
        "> LEN-3: After admit, request and slot hold the same cursors",
        "| LEN-3 | request and slot both at prefix 10: kv_committed_len 10",
        "| **6** | **admit r1** | **done** | **s1 kv_committed_len 11 -> 10;",
        "Sizes: page_size 1, window 3, full_pages 40,",
        f"kvspec replay {BUG.name} --impl torch+pr22862-tail",
        "* torch+pr22862-tail\n",
    ):
        assert part in out
    [text] = re.findall(r"```json\n(.*?)```", out, re.DOTALL)
    assert json.loads(text) == json.loads(BUG.read_text())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--impl", "torch"], "conforms on torch: there is nothing to report; try another --impl"),
        (["--fixed", "0.5.13"], "--fixed goes with --as pytest"),
    ],
)
def test_a_trace_that_shows_nothing_gives_no_bug_report(kvspec, options, says):
    code, out, err = kvspec("export", str(BUG), "--as", "story", *options)
    assert (code, out, says in err) == (2, "", True)
