"""Known faults as masks: a violation is known only where the fault is still there and explains it."""

import io
from contextlib import closing
from dataclasses import replace

import msgspec
import pytest

from ci.report.check_data import check_data
from ci.report import text_output, check_text
from impl.adapter import UnusableImplementation
from impl.bugs import BUGS
from impl.process.remote_system import DoesNotStart
from impl.system_spec import SystemSpec
from impl.torch_kv import TorchKV
from reference.commands import (
    Broken, CheckIdle, Close, Extend, Mode, Open, Retract,
)  # fmt: skip
from reference.failures import Failure
from reference.geometry import preset

from stateful_tests.check import finder
from stateful_tests.check.known_faults import explanation, masks as masking
from stateful_tests.check.campaign import run
from stateful_tests.check.run_driver import check_also
from stateful_tests.check.run_batches import Named
from stateful_tests.check.known_faults.explanation import explaining_masks, known_fault
from stateful_tests.check.finder import Finder
from stateful_tests.check.known_faults.masks import (
    Standing, also_checked, how_it_breaks, masks,
)  # fmt: skip
from stateful_tests.check.check_plans import plan
from stateful_tests.check.known_faults.causes import without_needs
from stateful_tests.lockstep.known_faults import FOLDER, skipped_clauses
from stateful_tests.lockstep.replays import replay, rejected_turns
from stateful_tests.lockstep.run_results import Trace, Violation
from stateful_tests.lockstep.system_names import resolve
from stateful_tests.tests.support.closing import (
    KeepsOnThreeWays, WaitsForEver, as_release, named_base,
)  # fmt: skip
from stateful_tests.traces.trace_files import load


PLAN = plan(
    "smoke", presets=["page1"], machines=["sessions"], modes=[Mode.FAITHFUL], seed=5, examples=13
)


class ClosesAtOnce(KeepsOnThreeWays):
    """And on a fourth: from its second turn on a session is closed at once."""

    def must_defer_close(self, session):
        return super().must_defer_close(session) and not session.history


THREE = as_release(KeepsOnThreeWays)
KEEPS = ["retract-ends-turn", "rejection-ends-turn"]
KNOWN = [mask for mask in masks(THREE) if mask.holds]


def by_id(system, base=None):
    return {mask.fault.id: mask for mask in masks(system, base)}


def test_a_known_fault_is_reported_first_and_explains_its_consequences():
    known_masks = list(masks(THREE))
    lines = [mask.line for mask in known_masks if not mask.fault.only.startswith("recurrent state")]
    assert lines[0].startswith(
        "known: last-token (LEN-2, READ-1), not there any more on this tree: "
    )
    summary = "(OUT-1, SES-1, SES-2, SES-4), still there: A retract counts as the end of the turn"
    assert lines[1] == f"known: retract-ends-turn {summary}"
    result = run(THREE, PLAN, masks=known_masks)
    assert not result.findings
    assert result.exit_code == 0
    assert not result.stopped
    assert {ids for ids, _ in result.masked} == {("retract-ends-turn",), ("rejection-ends-turn",)}
    data = check_data(result, PLAN, capabilities=THREE.capabilities, masks=known_masks)
    holding = "retract-ends-turn, rejection-ends-turn"
    assert data["verdict"].startswith(f"sglang==0.5.23: nothing new; known faults: {holding} (")
    [first] = [known for known in data["known"] if known["id"] == "retract-ends-turn"]
    assert first["masked"]
    assert first["times"]
    assert first["state"] == "still there"
    assert "#40252" in first["upstream"]
    out = text_output.console(io.StringIO())
    check_text.check(out, data)
    assert "known: last-token (LEN-2, READ-1), not there any more" in out.file.getvalue()


def test_another_cause_of_a_clause_that_a_known_fault_violates_is_new():
    system = as_release(ClosesAtOnce)
    at_once = replace(PLAN, after_finding=0)
    [finding] = run(system, at_once, masks=list(masks(system))).findings
    assert (finding.name, finding.old) == ("SES-2", False)
    kinds = [type(command) for command in finding.run.trace.commands]
    assert kinds[-1] is Close
    assert Retract not in kinds
    assert not rejected_turns(finding.run)
    assert known_fault(system, finding.run) is None
    clauses_found = run(system, at_once, base=THREE, masks=list(masks(system, THREE))).findings
    assert [clause.name for clause in clauses_found] == ["SES-2"] and not clauses_found[0].old
    assert replay(THREE, clauses_found[0].run.trace).violation is None  # a smaller trace keeps the witness


def test_a_trace_that_gets_smaller_does_not_become_one_of_a_known_fault():
    finder = Finder(THREE, masks=list(masks(THREE)))
    read = Violation("READ-1", 1, Failure("x", "y"))
    known = replace(read, clause="SES-2", also=("READ-1",), others=(read.failure,))
    trace = load(FOLDER / "sglang-0.5.11" / "a_retract_counts_as_a_finish.json")
    assert finder._allowed_shrinks(read, "READ-1", Standing.NEW)(trace, read)
    assert not finder._allowed_shrinks(read, "READ-1", Standing.NEW)(trace, known)
    assert finder._allowed_shrinks(known, "READ-1", Standing.NEW)(trace, known)


@pytest.mark.parametrize("where", [explanation, finder])
def test_a_trace_without_a_need_does_not_become_one_of_a_known_fault(where, monkeypatch):
    """Without drafts, a text that is not the client's may be that of a turn which ends too early."""
    questions = []
    trace = KNOWN[0].there[0][0]
    monkeypatch.setattr(where, "unexplained_needs", lambda *arguments: questions.append(arguments[-1]))
    begins = Violation("LEN-4", 1, Failure("x", "y"))
    if where is explanation:
        explaining_masks(THREE, None, KNOWN, trace, begins)
    else:
        assert not Finder(THREE, masks=KNOWN)._finds_another_cause(begins, trace)
    assert questions[0](begins) and not questions[0](replace(begins, clause="SES-2", also=("LEN-4",)))


def test_a_break_that_gets_smaller_does_not_become_one_of_a_known_fault():
    """BROKEN is one clause for all that can break."""

    def broken(failure):
        return Violation("BROKEN", 1, Failure("done", f"{failure} at a.py:7"))

    known = replace(KNOWN[0], breaks=frozenset({"KeyError: N"}))
    allowed = Finder(THREE, masks=[known])._allowed_shrinks(broken("IndexError: 2"), "BROKEN", Standing.NEW)
    trace = KNOWN[0].there[0][0]
    assert allowed(trace, broken("IndexError: 1")) and not allowed(trace, broken("KeyError: 5"))


def test_a_violation_of_the_base_is_known_by_its_fault_or_listed():
    again = as_release(KeepsOnThreeWays)
    same = run(again, PLAN, base=THREE, masks=list(masks(again, THREE)))
    assert not same.findings
    same.masked[("retract-ends-turn", "rejection-ends-turn"), "FREE-1"] = 1
    data = check_data(
        same, PLAN, capabilities=again.capabilities, base=named_base("b"), masks=list(KNOWN)
    )
    for one, two in (KEEPS, KEEPS[::-1]):  # the base shows either
        [known] = [fault for fault in data["known"] if fault["id"] == one]
        assert known["times"] == sum(same.masked.values()) and known["among"] == [two], one
    out = text_output.console(io.StringIO())
    check_text.check(out, data)
    may_be = "times (some of them may be rejection-ends-turn)"
    text = " ".join(out.file.getvalue().split())
    assert f"{may_be}; where the base shows it, this tree violates FREE-1" in text
    [finding] = run(again, PLAN, base=THREE).findings
    assert finding.old


def test_a_fault_that_is_fixed_on_one_path_and_not_on_the_other_is_told_and_is_not_new(monkeypatch):
    before = as_release(WaitsForEver)
    half = as_release(BUGS["abort-keeps-retracted-kv"].system)
    mask = by_id(half, before)["retract-ends-turn"]
    path = "a_close_after_a_retract_and_an_abort_never_happens"
    assert mask.in_part
    assert mask.state == f"fixed in part: {path} conforms, and another trace violates SES-2"
    result = run(half, replace(PLAN, after_finding=0), base=before, masks=[mask])
    assert not result.new
    assert result.exit_code == 0
    assert not result.stopped
    data = check_data(
        result, PLAN, capabilities=half.capabilities, base=named_base("before"), masks=[mask]
    )
    assert "nothing new; fixed in part: retract-ends-turn" in data["verdict"]
    out = text_output.console(io.StringIO())
    check_text.check(out, data)
    assert mask.state in " ".join(out.file.getvalue().split())
    # It may be the other's mend.
    fault = msgspec.structs.replace(mask.fault, with_another=mask.fixed)
    monkeypatch.setattr(masking, "of_system", lambda *_: [fault])
    assert by_id(half, before)["retract-ends-turn"].state == "still there"
    monkeypatch.undo()
    fixed = by_id(as_release(TorchKV), before)["retract-ends-turn"]
    assert fixed.state == "not there any more on this tree"
    neither = by_id(as_release(TorchKV), as_release(TorchKV))["retract-ends-turn"]
    assert neither.state == "not there on this tree, nor on its base", "a base before the fault"
    assert by_id(before, before)["retract-ends-turn"].holds


def test_a_trace_shows_its_fault_by_another_of_its_clauses():
    """In the unified tree the counters of a lock show first what SWA-2 shows in the other."""
    try:
        system = resolve("sglang==0.5.15+unified+overlap")
    except UnusableImplementation as error:
        pytest.skip(str(error))
    with closing(system):
        [(trace, _)] = by_id(system)["lock-let-go-a-round-early"].there
    assert trace.clause == "TREE-6"


def test_traces_of_another_way_to_run_do_not_say_that_a_fault_is_gone():
    state = by_id(as_release(TorchKV, "0.5.23+overlap"))["last-token"].state
    assert state == "not shown by its traces, which are of another way to run"


def test_a_clause_is_passed_over_only_where_its_fault_is_still_there():
    known = skipped_clauses("sglang", "0.5.13") | {"LEN-1": "a stranger's own"}
    can = replace(as_release(TorchKV).capabilities, known=known)
    system, again = (as_release(TorchKV, "0.5.13", capabilities=can) for _ in range(2))
    assert also_checked(system, list(masks(system))) == {"TREE-7", "MAP-4"}
    assert system.capabilities.known.keys() == {"LEN-1"}
    check_also(again, Named(SystemSpec("x"), also_checked=frozenset({"MAP-4"})).also_checked)
    assert again.capabilities.known.keys() == {"TREE-7", "LEN-1"}


class TakesNoExtend(TorchKV):
    """Its adapter lacks what a prefill takes."""

    def apply(self, command):
        if isinstance(command, Extend):
            raise UnusableImplementation("there is no alloc_for_extend")
        return super().apply(command)


def test_a_fault_whose_trace_could_not_be_replayed_does_not_count_as_gone():
    known = skipped_clauses("sglang", "0.5.13")
    system = as_release(
        TakesNoExtend, "0.5.13", capabilities=replace(TorchKV().capabilities, known=known)
    )
    masks_found = by_id(system)
    pinned = masks_found["lock-pins-a-whole-leaf"]
    ends = masks_found["retract-ends-turn"]
    assert ends.state == "could not be replayed on this tree (there is no alloc_for_extend)"
    assert not (ends.holds or ends.gone) and pinned.state.startswith("could not be replayed")
    assert "TREE-7" not in also_checked(system, list(masks_found.values()))
    assert by_id(as_release(TorchKV))["retract-ends-turn"].gone


def test_a_tree_that_does_not_load_has_no_masks():
    def reset(self, geometry):
        raise DoesNotStart("SyntaxError")

    with pytest.raises(DoesNotStart):
        list(masks(as_release(TorchKV, reset=reset)))


def test_two_failures_of_a_system_are_alike_but_for_lines_and_numbers():
    one, two = (
        f"ValueError: Cannot get {number} free blocks at a.py:{number}" for number in (4, 17)
    )
    assert (
        how_it_breaks(one) == how_it_breaks(two) != how_it_breaks("ValueError: no block at a.py:4")
    )


def test_a_system_that_is_no_release_has_no_known_faults():
    assert not list(masks(TorchKV()))


def test_a_trace_that_cannot_run_without_a_need_is_kept(monkeypatch):
    """A release decodes plainly or in verify rounds; a run without some of its turns may have both."""
    system = TorchKV()

    def mix_batch(_):
        raise UnusableImplementation("a run cannot mix Decode and SpecDecode")

    monkeypatch.setattr(system, "apply", mix_batch)
    trace = Trace(preset("page1"), Mode.FAITHFUL, (Open("s1"),))
    assert without_needs(system, trace, ("a rejected turn",)) == trace


class BreaksInTwoWays(TorchKV):
    def apply(self, command):
        if isinstance(command, Close | CheckIdle):
            return Broken(f"AssertionError: {type(command).__name__} at here.py:1")
        return super().apply(command)


def test_a_run_that_breaks_in_another_way_without_a_need_tells_nothing():
    system = BreaksInTwoWays()
    trace = Trace(preset("page1"), Mode.FAITHFUL, (Open("s1"), Close("s1"), CheckIdle()))

    def alike(seen):
        return how_it_breaks(seen.observed) == "AssertionError: Close"

    assert explanation.unexplained_needs(system, trace, "BROKEN", [("a close",)]) is not None
    assert explanation.unexplained_needs(system, trace, "BROKEN", [("a close",)], alike) is None
