"""What is new against a base is looked up in the releases of its engine."""

import io
from dataclasses import replace

import pytest
from msgspec.structs import replace as replace_fields

from ci.report.check_data import check_data
from ci.report import text_output, check_text
from ci.report.junit import text_of
from impl.adapter import UnusableImplementation
from impl.loading.nearest import release_lines
from impl.torch_kv import TorchKV
from impl.process.system_functions import SystemFunction
from reference.commands import Mode
from reference.failures import Failure
from reference.geometry import PRESETS
from stateful_tests.check import campaign, check_plans
from stateful_tests.check.known_faults import lookup
from stateful_tests.check.trees.base_selection import Base, BaseKind
from stateful_tests.check.trees.changed_functions import Changes
from stateful_tests.check.known_faults.lookup import Lookup
from stateful_tests.check.known_faults.masks import Mask
from stateful_tests.lockstep.known_faults import known_faults
from stateful_tests.lockstep.check_results import LookedUp
from stateful_tests.lockstep.run_results import Run, Trace, Violation
from stateful_tests.tests.support.closing import KeepsOnThreeWays

PLAN = check_plans.plan("smoke", presets=["page1"], machines=["sessions"], modes=[Mode.FAITHFUL], seed=5)
PLAN = replace(PLAN, examples=13, after_finding=0)


def named_faults(kind, name, **more):
    return type(kind.__name__, (kind,), {"name": name, **more})()


class Releases:
    """Releases of SGLang by version.

    asked: which were replayed on.
    """

    def __init__(self, monkeypatch, **kinds):
        self.asked = []
        self.kinds = kinds
        monkeypatch.setattr(lookup.system_names, "resolve", self.resolve)
        monkeypatch.setattr(
            lookup, "driven_releases", lambda *_: ["0.5.20", "0.5.21", "0.5.22", "0.5.23"]
        )

    def resolve(self, name, **_):
        self.asked.append(name)
        kind = self.kinds.get(name.rpartition(".")[2], TorchKV)
        if kind is None:
            raise UnusableImplementation(f"{name}: not in the cache")
        return named_faults(kind, name)


def check_tree(tree, kind, base=TorchKV):
    system = named_faults(tree, "sglang==0.5.21")
    before = named_faults(base, "sglang==0.5.23")
    chosen = Base(before, kind)
    result = campaign.run(system, PLAN, base=before, lookup=Lookup(chosen, system))
    data = check_data(result, PLAN, capabilities=system.capabilities, base=chosen)
    for finding in data["findings"]:
        finding["not_saved"] = "not saved"
    out = text_output.console(io.StringIO())
    check_text.check(out, data)
    return result, data, " ".join(out.file.getvalue().split())


@pytest.mark.parametrize(
    ("kind", "between"), [*((kind, True) for kind in BaseKind), (BaseKind.RELEASE, False)]
)
def test_a_known_fault_of_another_release_is_named(monkeypatch, kind, between):
    """It is no finding only beside a release that was guessed, and of a tree between the two."""
    releases = Releases(monkeypatch, **{"22": KeepsOnThreeWays})
    compared = []
    monkeypatch.setattr(lookup, "lies_between", lambda *trees: compared.append(trees) or between)
    result, data, text = check_tree(KeepsOnThreeWays, kind)
    excused = between and kind is BaseKind.RELEASE
    assert {*releases.asked} == {"sglang==0.5.20", "sglang==0.5.22"}, (
        "neither the base nor the tree"
    )
    assert (result.exit_code == 0) is excused and result.stopped is not excused
    assert {found.clause for found in result.findings} == {"SES-2"}
    fault = (
        "retract-ends-turn" if excused else "rejection-ends-turn"
    )  # the plan goes on: a smaller trace
    report_line = (
        f"nothing new; known in other releases: {fault};"
        if excused
        else f"SES-2; like known: {fault};"
    )
    assert report_line in data["verdict"]
    ends = "lies between such a release and the base" if excused else "may have what brought it, or"
    seen_line = f"sglang==0.5.22 violates it in this trace too (known: {fault}, in 0.5.20 to 0.5.23)"
    assert f"{seen_line}: your tree {ends}" in text
    tree, faulty, before = (release_lines("sglang", f"0.5.{number}") for number in (21, 22, 23))
    is_release = kind is BaseKind.RELEASE
    assert (compared != []) is is_release and all(trees == (tree, faulty, before) for trees in compared)
    skipped = f'<skipped message="{seen_line}'.encode()
    assert (skipped in text_of(data)) is excused


@pytest.mark.parametrize(
    ("kind", "tree", "older"),
    [
        (BaseKind.STATED, "0.5.21", True),
        (BaseKind.RELEASE, "0.5.21", True),
        (BaseKind.HISTORY, "0.5.21", False),
        (BaseKind.RELEASE, "0.5.22", False),
    ],
)
def test_only_a_tree_of_a_faulty_release_may_be_older_than_the_fix(monkeypatch, kind, tree, older):
    """A tree that comes behind a commit without the fault is not older than the fix, whatever it states."""
    fault = replace_fields(known_faults()["rejection-ends-turn"], fixed="0.5.22")
    monkeypatch.setattr(lookup, "known_faults", lambda: {fault.id: fault})
    monkeypatch.setattr(lookup, "driven_releases", lambda *_: ["0.5.20", "0.5.21", "0.5.22", "0.5.23"])
    system = named_faults(TorchKV, f"sglang=={tree}", release=tree)
    finder = Lookup(Base(named_faults(TorchKV, "sglang==0.5.23"), kind), system)
    trace = Trace(PRESETS["page1"], Mode.FREE, ())
    seen_on_release = lookup.SeenOnRelease("sglang==0.5.20", lookup.Shows.FAULT, fault.id)
    finder._shown_by_trace[trace] = [seen_on_release]
    text = finder._observations(trace)
    assert (text.seen_in, text.fixed, text.older) == ("sglang==0.5.20", "0.5.22", older)


class ClosesLateInManyRows(KeepsOnThreeWays):
    """Has the fault, but not with the sizes of the plan."""

    def reset(self, geometry):
        super().reset(geometry)
        self.rows = geometry.rows

    def must_defer_close(self, session):
        if self.rows == PRESETS["page1"].rows:
            self.has_rejected = False
        return super().must_defer_close(session)


def test_a_known_fault_that_the_base_has_in_other_traces_is_not_new(monkeypatch):
    """The two part in the trace, for another reason."""
    Releases(monkeypatch, **{"22": KeepsOnThreeWays})
    result, _, text = check_tree(KeepsOnThreeWays, BaseKind.HISTORY, ClosesLateInManyRows)
    assert result.exit_code == 0
    assert not result.new
    assert not result.stopped
    assert "the base has it too, and does something else in this trace" in text


def test_a_known_fault_of_tree_and_base_that_no_release_shows_is_named_and_new(monkeypatch):
    """A new fault may violate the clause likewise: the reader decides."""
    Releases(monkeypatch)
    result, data, text = check_tree(KeepsOnThreeWays, BaseKind.RELEASE, ClosesLateInManyRows)
    assert result.exit_code == 1
    alike = result.new[0].looked_up.alike
    says = f"{alike}, which tree and base have, violates SES-2 likewise"
    assert f"none of 2 releases violates it; {says}" in text
    assert f"like known: {alike}" in data["verdict"]


@pytest.mark.parametrize(("breaks", "alike"), [("KeyError: N", True), ("IndexError: none", False)])
def test_a_failure_is_like_a_known_one_that_breaks_the_base_with_the_same_text(breaks, alike, monkeypatch):
    fault = next(known_fault for known_fault in known_faults().values() if "BROKEN" in known_fault.clauses)
    trace = Trace(PRESETS["page1"], Mode.FREE, (), clause="BROKEN")
    failed = Violation("BROKEN", 0, Failure("done", "KeyError: 7 at a.py:3"))
    monkeypatch.setattr(lookup, "replay", lambda *_: Run("tree", trace, (), failed))
    monkeypatch.setattr(lookup, "known_fault", lambda *_: fault)
    mask = Mask(fault, there=((trace, ()),), breaks=frozenset({breaks}))
    monkeypatch.setattr(lookup, "masks", lambda *_, **__: [mask])
    looked_up = Lookup(Base(TorchKV(), BaseKind.RELEASE), TorchKV())
    assert looked_up._fault_of_tree_and_base(trace) == (fault.id if alike else "")


def test_a_finding_that_no_release_shows_is_first_seen_here(monkeypatch):
    releases = Releases(monkeypatch, **{"20": None})
    result, data, text = check_tree(KeepsOnThreeWays, BaseKind.RELEASE)
    assert result.exit_code == 1
    assert releases.asked == ["sglang==0.5.20", "sglang==0.5.22"]
    assert "looked up first seen here: none of 1 releases violates it" in text
    assert data["findings"][0]["looked_up"]["conform"] == 1


def test_an_interrupted_check_says_that_no_release_was_replayed(monkeypatch):
    """The finding may be a known fault of a release."""
    releases = Releases(monkeypatch)

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(lookup.Lookup, "_replay", interrupt)
    result, _, text = check_tree(KeepsOnThreeWays, BaseKind.STATED)
    assert result.interrupted and releases.asked == []
    assert "looked up the check was interrupted before 2 releases could be replayed" in text


class BreaksOnRetract(TorchKV):
    def retract(self, command):
        raise KeyError("prefix_len at sglang/srt/managers/schedule_batch.py:12")


def test_a_lookup_without_time_for_all_releases_says_so(monkeypatch):
    releases = Releases(monkeypatch)
    monkeypatch.setattr(lookup, "driven_releases", lambda *_: [f"0.5.{minor}" for minor in range(14, 24)])
    monkeypatch.setattr(lookup, "MOST_S", 0.0)
    _, data, text = check_tree(KeepsOnThreeWays, BaseKind.STATED)
    assert len(releases.asked) == 4  # of the eight that are neither the base nor the tree
    [finding] = data["findings"]
    assert (finding["looked_up"]["driven"], finding["looked_up"]["left"]) == (4, 4)
    assert "none of 4 releases violates it (4 more were not replayed for want of time)" in text


def test_a_break_of_only_this_tree_may_be_caused_by_the_adapter(monkeypatch):
    Releases(monkeypatch)
    result, _, text = check_tree(BreaksOnRetract, BaseKind.RELEASE)
    assert result.exit_code == 3
    assert "none of 2 releases breaks: kvspec's adapter may be the cause." in text


def test_a_break_that_a_near_base_does_not_show_is_not_laid_to_the_adapter(monkeypatch):
    """The adapter drives the tree and its own commit alike."""
    Releases(monkeypatch)
    _, _, text = check_tree(BreaksOnRetract, BaseKind.HISTORY)
    assert "first seen here: none of 2 releases breaks, nor does the base." in text


@pytest.mark.parametrize(("fault", "looked_up"), [("f", 9), ("", lookup.MOST_TRACES)])
def test_known_faults_leave_room_for_other_traces(monkeypatch, fault, looked_up):
    behaviour = lookup.Shows.FAULT if fault else lookup.Shows.CONFORMS
    monkeypatch.setattr(
        lookup,
        "behaviours_by_name",
        lambda traces, _, name: [lookup.SeenOnRelease(name, behaviour, fault) for _ in traces],
    )
    system = named_faults(TorchKV, "sglang==0.5.21", release="0.5.21")
    looked = Lookup(Base(named_faults(TorchKV, "sglang==0.5.23"), BaseKind.RELEASE), system)
    sizes = PRESETS["page1"]
    traces = [Trace(replace(sizes, rows=rows), Mode.FREE, ()) for rows in range(1, 10)]
    looked._replay(traces)
    assert len(looked._shown_by_trace) == looked_up


def test_an_interrupt_during_replays_on_releases_reports_all_findings(monkeypatch):
    Releases(monkeypatch)

    def interrupt(name, **_):
        raise KeyboardInterrupt

    monkeypatch.setattr(lookup.system_names, "resolve", interrupt)
    result, _, _ = check_tree(KeepsOnThreeWays, BaseKind.HISTORY)
    assert result.interrupted and result.exit_code == 1


def test_nothing_is_replayed_for_an_engine_without_releases(monkeypatch):
    releases = Releases(monkeypatch)
    system = named_faults(KeepsOnThreeWays, "torch+x")
    before = TorchKV()
    looked_up = Lookup(Base(before, BaseKind.STATED), system)
    assert campaign.run(system, PLAN, base=before, lookup=looked_up).exit_code == 1
    assert not releases.asked


@pytest.mark.parametrize(
    ("told", "clause", "says"),
    [
        (LookedUp("f", "1.0", "1.0", "1.1", "x==1.0"), "MAP-1",
         "x==1.0 violates it in this trace too (known: f, fixed in 1.1): your tree may have lost that fix,"
         " or this is a fault of its own"),
        (LookedUp("f", "1.0", "1.0", "1.1", "x==1.0", older=True), "MAP-1",
         "x==1.0 violates it in this trace too (known: f, fixed in 1.1): your tree may be older than that"
         " fix, or this is a fault of its own"),
        (LookedUp(), "MAP-1", "no release can be driven through this trace"),
        (LookedUp(violate=("sglang==1.0",), driven=2), "MAP-1",
         "sglang==1.0 violate it as well, and no known fault explains it"),
        (LookedUp(conform=2, driven=2), "BROKEN",
         "none of 2 releases breaks: kvspec's adapter may be the cause. Look at sglang/a.py:3."),
        (LookedUp(conform=2, driven=2, changed="a.py: free"), "BROKEN",
         "none of 2 releases breaks. a.py: free changed and runs in this command: look there first and at"
         " sglang/a.py:3."),
        (LookedUp(conform=1, driven=2), "BROKEN", "first seen here: none of 2 releases breaks"),
        (LookedUp(conform=2, driven=2, near_base=True), "BROKEN",
         "first seen here: none of 2 releases breaks, nor does the base. Look at sglang/a.py:3."),
    ],
)  # fmt: skip
def test_each_outcome_of_a_lookup_has_a_sentence(told, clause, says):
    assert told.text(clause, "KeyError: 'x' at sglang/a.py:3") == says


def test_a_changed_function_of_the_failing_command_is_the_first_cause(monkeypatch):
    Releases(monkeypatch)
    result, _, _ = check_tree(BreaksOnRetract, BaseKind.HISTORY)
    [finding] = result.findings
    schedule = "sglang/srt/managers/schedule_batch.py"
    cache = "sglang/cache.py"
    insert, free, evict = (SystemFunction(cache, name) for name in ("insert", "free", "evict"))
    release = SystemFunction(schedule, "release_req")
    called = ((insert,), (release, free, evict))
    failure = Failure("done", f"KeyError: 'x' at {schedule}:12 in release_req")
    violation = replace(finding.run.violation, step=1, failure=failure)
    finding = replace(finding, run=replace(finding.run, called=called, violation=violation))

    def cause(*functions):
        changed = Changes("HEAD", frozenset(), dict.fromkeys(functions, 1), ())
        return Lookup(Base(TorchKV(), BaseKind.HISTORY), TorchKV(), changed=changed)._changed_cause(finding)

    assert cause(free, release) == f"{schedule}: release_req"
    assert cause(evict, free) == f"{cache}: evict", "the last that is called"
    assert cause(insert) == "", "it runs in another command"

    def beside_a_release(*functions):
        differing = Changes("", frozenset(), dict.fromkeys(functions, 1), ())
        [named] = lookup.name_causes([replace(finding, looked_up=LookedUp())], differing)
        return named.looked_up.changed

    assert beside_a_release(free, release) == f"{schedule}: release_req"
    assert beside_a_release(free) == "", "much may differ from a release"


@pytest.mark.parametrize(
    ("clause", "what"),
    [
        ("TREE-3", lookup.Shows.FAULT),
        ("READ-2", lookup.Shows.FAULT),
        ("SES-2", lookup.Shows.OTHER),
    ],
)
def test_a_clause_that_comes_with_a_known_fault_is_a_part_of_it(monkeypatch, clause, what):
    fault = known_faults()["session-forgets-namespace"]
    trace = Trace(PRESETS["page1"], Mode.FREE, (), clause=clause)
    failure = Failure("a", "b")
    violation = Violation("TREE-3", 0, failure, ("READ-2",), (failure,))
    monkeypatch.setattr(lookup, "replay", lambda *_: Run(trace, "x", (), violation))
    monkeypatch.setattr(
        lookup, "known_fault", lambda _, run: fault if run.violation.clause == "TREE-3" else None
    )
    assert lookup.behaviour_on(named_faults(TorchKV, "sglang==0.5.10"), trace).what is what


def test_the_nearest_releases_come_first():
    order = lookup.nearest_first("sglang", "0.5.22", ["overlap"])
    assert order[:3] == [f"sglang==0.5.{n}+overlap" for n in (22, 21, 23)]
    assert lookup.nearest_first("vllm", "9.9.9", [])[0] == "vllm==0.33.0"
