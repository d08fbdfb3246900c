"""A fault that is found hides no other one: of its clause, beside it, behind it."""

from dataclasses import replace

import pytest

from impl.adapter import UnusableImplementation
from reference.commands import (
    Abort, Decode, Done, Mode, Open, Reason, Refused, Retract,
)  # fmt: skip
from reference.geometry import preset
from stateful_tests.check import finder
from stateful_tests.check.campaign import run
from stateful_tests.check.check_plans import plan
from stateful_tests.check.known_faults.causes import needs, needs_to_avoid
from stateful_tests.lockstep.final_closes import violations
from stateful_tests.lockstep.lockstep import Lockstep
from stateful_tests.lockstep.replays import replay, rejected_turns
from stateful_tests.lockstep.reference_system import ReferenceSystem
from stateful_tests.lockstep.run_results import Trace
from stateful_tests.lockstep.system_names import resolve
from stateful_tests.shrink.shrink_passes import BUDGET
from stateful_tests.tests.support.closing import KeepsOnThreeWays, WaitsForEver
from stateful_tests.tests.support.commands import script
from stateful_tests.tests.support.night import at_night


def test_a_clause_that_comes_beside_another_is_shrunk_with_less_effort(monkeypatch):
    budgets: dict[str, int] = {}

    def minimise(system, trace, clause, *, budget, base=None, **_):
        budgets.setdefault(clause, budget)
        return trace

    monkeypatch.setattr(finder, "minimise", minimise)
    monkeypatch.setattr(finder, "failing_prefix", lambda *_: None)
    run(resolve("torch+pr22900"), replace(plan("smoke", machines=["sessions"]), after_finding=0))
    first, *others = budgets.values()
    assert first == BUDGET
    assert others
    assert set(others) == {finder._BESIDE_BUDGET}


RETRACTED_ABORTED_CLOSED = script(
    "open s1; submit r1 in s1 +2; admit r1; extend r1 +2; retract r1; abort r1; close s1"
)


@at_night
def test_a_fault_that_comes_first_does_not_hide_a_close_that_never_happens():
    small_plan = plan(
        "smoke", presets=["page1"], machines=["sessions"], modes=[Mode.FAITHFUL], examples=40
    )
    result = run(WaitsForEver(), small_plan)
    closed = next(f.run for f in result.findings if f.clause == "SES-4")
    violation = closed.violation
    assert (violation.clauses, violation.first_violation.clause) == (("SES-4",), "SES-2")
    assert [type(c) for c in closed.trace.commands] == [type(c) for c in RETRACTED_ABORTED_CLOSED]
    another = run(resolve("torch+abort-keeps-retracted-kv"), small_plan)
    assert [f.clause for f in another.findings] == ["SES-2"]


@pytest.mark.parametrize(
    ("system", "clause", "ends"),
    [
        (WaitsForEver(), None, ("SES-2", 5)),
        (WaitsForEver(), "SES-1", ("SES-2", 5)),
        (WaitsForEver(), "SES-4", ("SES-4", 6)),
        (resolve("torch+abort-keeps-retracted-kv"), "SES-4", ("SES-2", 5)),
        (resolve("torch"), "SES-4", None),
    ],
)
def test_a_trace_of_a_close_that_never_happens_is_replayed_past_other_violations(
    system, clause, ends
):
    trace = Trace(preset("page1"), Mode.FAITHFUL, RETRACTED_ABORTED_CLOSED, clause=clause)
    violation = replay(system, trace)
    assert violation.trace == trace
    assert ends == (
        None if violation.violation is None else (violation.violation.clause, violation.violation.step)
    )
    assert len(violation.rows) == (7 if ends is None else ends[1] + 1)


@pytest.mark.parametrize(
    ("commands", "needed"),
    [
        (RETRACTED_ABORTED_CLOSED[:-1], ("a retract", "an abort")),
        (
            script("open s1; submit r1 in s1 +1; submit r2 in s1 +1; close s1"),
            ("a close", "a rejected turn"),
        ),
        (
            script("open s1; submit r1 in s1 +24; admit r1; extend r1 +24; abort r1"),
            ("an abort", "pools that run full"),
        ),
    ],
)
def test_the_needs_of_a_trace_are_stated(commands, needed):
    geometry = replace(preset("page1"), full_pages=24, width=24)
    trace = Trace(geometry, Mode.FAITHFUL, commands)
    assert needs(KeepsOnThreeWays(), trace, "SES-2") == needed


def test_of_known_traces_one_need_each_is_avoided():
    assert needs_to_avoid([("a retract", "an abort")]) == [("a retract",), ("an abort",)]
    known = [("a retract", "an abort"), ("an abort", "pools that run full")]
    assert needs_to_avoid(known) == [("an abort",), ("a retract", "pools that run full")]
    assert needs_to_avoid([("an abort",), ()]) == [], "one that needs nothing cannot be avoided"


def test_a_fault_hides_no_other_of_its_clause(monkeypatch):
    small_plan = plan(
        "smoke",
        presets=["page1", "tight"],
        machines=["sessions"],
        modes=[Mode.FAITHFUL],
        seed=1,
        examples=13,
    )
    close, abort = run(KeepsOnThreeWays(), small_plan).findings
    assert (close.name, abort.name) == ("SES-2", "SES-2 (2)")
    assert abort.without == ("a close",)
    assert rejected_turns(close.run) and not rejected_turns(abort.run)
    assert [type(c) for c in abort.run.trace.commands][-2:] == [Retract, Abort]
    monkeypatch.setattr(finder, "MAX_TRACES_PER_CLAUSE", 1)
    assert [f.name for f in run(KeepsOnThreeWays(), small_plan).findings] == ["SES-2"]


class RefusesDecode(ReferenceSystem):
    """Refuses to decode: always, or while no session is open."""

    def __init__(self, always):
        super().__init__()
        self.always = always

    def apply(self, command):
        outcome = super().apply(command)
        wrong = isinstance(command, Decode) and isinstance(outcome, Done)
        return (
            Refused(Reason.NO_ROW)
            if wrong and (self.always or not self.view().sessions)
            else outcome
        )


def test_a_fault_of_the_base_hides_no_other_of_its_clause_and_ends_no_run(monkeypatch):
    monkeypatch.setattr(finder, "_SHORT", 0)  # all traces are shrunk, also after the best is found
    small_plan = plan(
        "smoke", presets=["page2"], machines=["sessions"], modes=[Mode.FAITHFUL], examples=13
    )
    change = RefusesDecode(always=True)
    base = RefusesDecode(always=False)
    for before, kinds in ((None, []), (base, [Open])):
        [finding] = run(change, small_plan, base=before).findings
        assert finding.clause == "OUT-1", before
        assert [type(c) for c in finding.run.trace.commands if isinstance(c, Open)] == kinds
    same = run(base, replace(small_plan, after_finding=0), base=RefusesDecode(always=False))
    assert len(same.findings) == 1 and not same.stopped


class CannotEnd(WaitsForEver):
    """Its adapter cannot drive an abort in the state that a fault leaves."""

    def apply(self, command):
        if isinstance(command, Abort) and command.request == "r2":
            raise UnusableImplementation("r2 has no row, in the adapter")
        return super().apply(command)


def test_an_adapter_that_fails_behind_a_violation_ends_that_run_alone():
    lockstep = Lockstep(CannotEnd(), preset("page1"), Mode.FAITHFUL)
    first_commands = script(
        "open s1; submit r1 in s1 +2; admit r1; extend r1 +2; retract r1;"
        " submit r2 (no session) +2; admit r2; abort r1"
    )
    for command in first_commands:
        lockstep.do(command)
    first = lockstep.violation
    assert first is not None
    assert [found for found, _ in violations(lockstep, first_commands, "")] == [first]
