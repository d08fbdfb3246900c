"""--since REV: what changed in a checkout is driven first, and what nothing drives is reported."""

import subprocess
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ci.commands import system_check
from ci.commands.system_check import InterruptGuard
from ci.commands.shared import SystemSelector
from ci.report import report_data as report
from ci.report.verdict import check_verdict
from impl.adapter import UnusableImplementation
from impl.process.system_functions import SystemFunction
from impl.system_spec import SystemSpec
from reference.commands import Finish, Mode
from stateful_tests.check import campaign, corpus, run_driver, check_plans
from stateful_tests.check.trees import changed_functions, tree_history
from stateful_tests.check.trees.base_selection import Base, BaseKind
from stateful_tests.check.trees.way_map import OUTSIDE, WayMap
from stateful_tests.lockstep.reference_system import ReferenceSystem
from stateful_tests.lockstep.check_results import CheckResult
from stateful_tests.lockstep.system_names import resolve

BEFORE = """
LIMIT = 1

class Cache:
    def free(self):
        return 1

    @property
    def size(self):
        def inner():
            return 2
        return inner()

def gone():
    return 3
"""

FREE = SystemFunction("cache.py", "Cache.free")
SIZE = SystemFunction("cache.py", "Cache.size")
GONE = SystemFunction("cache.py", "gone")
REST = SystemFunction("cache.py", OUTSIDE)


@pytest.fixture
def root(tmp_path):
    def git(*arguments):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    (tmp_path / "python").mkdir()
    (tmp_path / "python" / "cache.py").write_text(BEFORE)
    git("init")
    git("add", ".")
    git("commit", "-m", "before")
    return tmp_path / "python"


@pytest.mark.parametrize(
    "old, new, found",
    [
        ("return 1", "return 4", {"Cache.free"}),
        ("        return inner()\n", "", {"Cache.size"}),
        ("@property", "@staticmethod", {"Cache.size"}),
        ("LIMIT = 1", "LIMIT = 2", {"outside of functions"}),
        ("def gone():\n    return 3\n", "", set()),
        ("\nclass", "\n\nclass", set()),
        ("        return 1", '        """One."""\n        return 1  # one', set()),
        ("def free(self)", "def free(self) -> int", set()),
        ("LIMIT", "LIMIT = (", {"cannot be parsed"}),
    ],
)
def test_a_changed_function_is_named(root, old, new, found):
    (root / "cache.py").write_text(BEFORE.replace(old, new))
    assert {*changed_functions.changed_functions(root, "HEAD")} == {
        SystemFunction("cache.py", name) for name in found
    }


def test_differences_to_a_base_without_history_are_named_for_called_files(tmp_path):
    folders = tmp_path / "tree", tmp_path / "base"
    for folder in folders:
        folder.mkdir()
        (folder / "cache.py").write_text(BEFORE)
        (folder / "other.py").write_text(BEFORE)
    for name in ("cache.py", "other.py", "new.py"):
        (folders[0] / name).write_text(BEFORE.replace("return 1", "return 4"))
    tree, release = (SimpleNamespace(root=folder, name=folder.name) for folder in folders)
    base = Base(release, BaseKind.RELEASE)
    called = [SIZE, FREE, SystemFunction("gone.py", "f")]
    differ = changed_functions.differences_from_base(base, tree, called)
    assert set(differ.called) == {FREE}
    assert differ.callers([[SIZE], [FREE]]) == {FREE: [1]}
    called = [SystemFunction("new.py", "Cache.free")]
    differences = changed_functions.differences_from_base(base, tree, called)
    assert SystemFunction("new.py", "Cache.size") in differences.called
    for pair in ((base, release), (Base(ReferenceSystem(), BaseKind.STATED), tree)):
        assert changed_functions.differences_from_base(*pair, called).called == {}, pair


def test_every_function_of_a_new_file_has_changed(root):
    (root / "new.py").write_text("def one(): ...")
    assert [*changed_functions.changed_functions(root, "HEAD")] == [SystemFunction("new.py", "one")]


class Checkout(ReferenceSystem):
    """Says that a finish calls Cache.free."""

    def functions_called(self, geometry, commands):
        return [(FREE, SIZE) if isinstance(command, Finish) else () for command in commands]


@pytest.fixture
def two_changes(root):
    """A checkout in which Cache.free and gone have changed, of which the corpus calls the first. Returns it,
    the changes, and the lines that call one as they were found."""
    (root / "cache.py").write_text(
        BEFORE.replace("return 1", "return 4").replace("return 3", "return 5")
    )
    system = Checkout()
    system.root = root
    lines = []
    return system, changed_functions.changes(system, "HEAD", corpus.load(), lines.append), lines


def test_corpus_lines_that_call_a_changed_function_are_found(two_changes):
    _, changes, lines = two_changes
    assert {*lines} == changes.first
    assert len(lines) == changed_functions.ENOUGH_LINES
    assert {line.machine for line in lines[:10]} >= {"sessions", "both"}, "in turns"


def test_a_changed_function_that_nothing_calls_is_missed(two_changes):
    system, changes, _ = two_changes
    assert changes.missed == (GONE,)
    assert (
        f"{changed_functions.ENOUGH_LINES} directed runs come first, which call 1 of 2 changes; none calls"
        in changes.text
    )
    assert changes.also_called({GONE}).missed == ()
    result = CheckResult("checkout", "smoke", 0, uncalled=("cache.py: gone",))
    verdict = check_verdict(result, (), system.capabilities, None)
    assert "no run calls cache.py: gone, which changed" in verdict
    assert result.exit_code == 4


def test_the_commands_that_call_a_changed_function_are_numbered(two_changes):
    _, changes, _ = two_changes
    called = [(), (FREE, GONE, SystemFunction("other.py", "gone")), (SIZE, FREE)]
    assert changes.callers(called) == {FREE: [1, 2], GONE: [1]}


def test_corpus_lines_that_call_a_changed_function_come_first(two_changes):
    system, changes, _ = two_changes
    plan = replace(check_plans.plan("smoke"), first=changes.first)
    most = changed_functions.ENOUGH_LINES
    first_lines = [
        line for mode in Mode for line in run_driver.lines_of(system, plan, mode)[:most]
    ]
    assert changes.first < {*first_lines}
    assert {
        *run_driver.lines_of(system, check_plans.plan("smoke"), Mode.FREE)
    } == {*run_driver.lines_of(system, plan, Mode.FREE)}


FAULTY = "torch+free-repeats-a-page"


@pytest.mark.parametrize("base, new", [("reference", True), (None, True), (FAULTY, False)])
def test_a_fault_in_a_changed_function_is_printed_at_once(base, new):
    """What the base shows too is not new, nor is a known fault without a base."""
    before = base and resolve(base)
    [line] = (
        n for n in corpus.fault_lines() if n.situation == "a_capped_frontier_counts_whole_pages"
    )
    line = line._replace(origin="hand" if base is None else line.origin)
    run = changed_functions.new_fault(resolve(FAULTY), before, line)
    assert (run is not None) is new
    assert changed_functions.new_fault(resolve("torch"), before, line) is None
    if run is not None:
        assert len(run.trace.commands) == run.violation.step + 1
        word = report.violation_line(run, base or "")
        assert word.startswith(f"NEW against {base}: FREE-1" if base else "violation: FREE-1"), word
    else:
        assert changed_functions.new_fault(resolve(FAULTY), None, line) is None


class CannotMix(ReferenceSystem):
    """Says in the middle of a run that it cannot be driven on."""

    def apply(self, command):
        raise UnusableImplementation("a run cannot mix Decode and SpecDecode")


def test_a_line_that_the_system_cannot_be_driven_through_shows_nothing():
    line = corpus.fault_lines()[0]
    assert changed_functions.new_fault(CannotMix(), ReferenceSystem(), line) is None


def test_a_finding_printed_at_once_is_in_the_report():
    """Also where the runs of the plan do not come to it."""
    system = resolve(FAULTY)
    before = resolve("reference")
    [line] = (
        n for n in corpus.fault_lines() if n.situation == "a_capped_frontier_counts_whole_pages"
    )
    plan = check_plans.plan("smoke", presets=("page1",), examples=1, steps=1)
    assert not campaign.run(system, plan, base=before).findings
    run = changed_functions.new_fault(system, before, line)
    result = campaign.run(system, plan, base=before, early=[run])
    assert tuple(finding.clause for finding in result.findings) == run.violation.clauses
    assert not result.findings[0].old


def test_an_interrupt_reports_findings_printed_at_once():
    """And nothing is driven."""
    line = next(n for n in corpus.fault_lines() if "capped_frontier" in n.situation)
    run = changed_functions.new_fault(resolve(FAULTY), resolve("reference"), line)
    guard = InterruptGuard({})
    with pytest.raises(KeyboardInterrupt), guard:
        raise KeyboardInterrupt
    guard.reported = [run]
    with guard:
        raise KeyboardInterrupt
    result = campaign.run(
        resolve(FAULTY), check_plans.plan("smoke"), early=guard.reported, interrupted=guard.interrupted
    )
    assert result.findings[0].clause == "FREE-1"
    assert result.interrupted
    assert not result.commands


def test_an_edit_that_is_not_committed_is_seen(root, tmp_path_factory):
    assert tree_history.edited_files(root) == []
    (root / "cache.py").write_text(BEFORE.replace("return 1", "return 4"))
    assert tree_history.edited_files(root) == ["cache.py"]
    assert tree_history.edited_files(tmp_path_factory.mktemp("elsewhere")) == []


def test_a_failure_of_git_is_one_line(root, kvspec):
    with pytest.raises(ValueError, match="bad revision 'nothing'"):
        [*changed_functions.changed_functions(root, "nothing")]
    code, _, err = kvspec("check", "--since", "HEAD")
    assert code == 2 and "--since goes with a checkout" in err


def test_without_since_the_changes_are_those_since_the_base(root):
    (root / "cache.py").write_text(BEFORE.replace("return 1", "return 4"))
    system = Checkout()
    options = system_check.CheckOptions(lambda: None, "traces", None, None, html=False)
    system.root = root
    selector = SystemSelector(SystemSpec("sglang"), str(root))
    plan = check_plans.plan("smoke")

    def change_log(base):
        return system_check._find_changes(system, selector, base, plan, options, {}, InterruptGuard({}))

    result = change_log(Base(resolve("reference"), BaseKind.HISTORY, commit="HEAD"))
    assert {*result.called} == {FREE} and result.revision == "reference"
    assert change_log(Base(resolve("reference"), BaseKind.RELEASE)) is None, "a base of no history"
    (root / "cache.py").write_text(BEFORE)
    text = change_log(Base(resolve("reference"), BaseKind.HISTORY, commit="HEAD")).text
    assert text == "since reference: no function that kvspec drives changed"


def test_files_that_no_run_loads_are_left_to_others(root):
    (root / "cache.py").write_text(
        BEFORE.replace("return 1", "return 4").replace("LIMIT = 1", "LIMIT = 2")
    )
    (root / "other.py").write_text("def one(): ...")
    system = Checkout()
    lines = [line for line in corpus.load()[:40] if line.geometry.tree]
    system.root = root

    def changes_in_way(way, ways):
        way_map_of = WayMap(
            ("", "hicache"), {FREE: frozenset({""}), REST: frozenset(ways)}
        )
        return changed_functions.changes(system, "HEAD", lines, None, way_map_of, way)

    here = changes_in_way("", {"", "hicache"})
    assert here.ignored == (SystemFunction("other.py", "one"),) and "does not load other.py: one" in here.text
    assert here.missed == () and {*here.called} == {FREE}, (
        "the rest of a file runs when it is loaded"
    )
    assert changes_in_way("", {"hicache"}).missed == (REST,), "which it is not in this way"


def test_files_beside_driven_ones_are_named_before_others_and_tests_last(root):
    """A fork changed a memory pool and forty kernels, and the report named two kernels."""
    for file in ("b/kernel.py", "srt/pool.py", "srt/test_pool.py", "test/unit.py"):
        (root / file).parent.mkdir(exist_ok=True)
        (root / file).write_text("def one(): ...")
    system = Checkout()
    system.root = root
    way_map_of = WayMap(("",), {SystemFunction("srt/cache.py", "free"): frozenset({""})})
    changes = changed_functions.changes(system, "HEAD", [], None, way_map_of)
    files = [function.file for function in changes.ignored]
    assert files == ["srt/pool.py", "b/kernel.py", "srt/test_pool.py", "test/unit.py"]
    result = CheckResult("checkout", "smoke", 0)

    def verdict(changed):
        return check_verdict(result, (), system.capabilities, None, changed)

    text = "changed: no function that kvspec drives, only srt/pool.py and 3 more files"
    assert f"; {text} (" in verdict(changes), "green, and nothing of the change was driven"
    assert "and 1 more file (" in verdict(changes._replace(ignored=changes.ignored[:2]))
    assert "only srt/pool.py (" in verdict(changes._replace(ignored=changes.ignored[:1]))
    for driven in (changes._replace(missed=(FREE,)), changes._replace(called={FREE: 1})):
        assert "no function that kvspec" not in verdict(driven), driven


def test_functions_that_no_run_calls_are_not_searched_without_end(root, monkeypatch):
    """What a run is known to call is."""
    monkeypatch.setattr(changed_functions, "MOST_TRIES", 3)
    (root / "cache.py").write_text(BEFORE.replace("return 3", "return 5"))
    system = Checkout()
    lines = corpus.load()[:20]
    traces_tried = []
    system.root = root
    monkeypatch.setattr(system, "functions_called", lambda *trace: traces_tried.append(trace) or [])

    def count_traces(way):
        traces_tried.clear()
        changed_functions.changes(system, "HEAD", lines, None, WayMap(("",), {GONE: frozenset({""})}), way)
        return len(traces_tried)

    assert (count_traces("overlap"), count_traces("")) == (3, 20)
