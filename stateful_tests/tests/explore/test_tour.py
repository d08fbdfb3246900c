"""Tours: every transition of a small scope on the reference and on torch, and faults."""

from dataclasses import replace

import pytest

from impl.adapter import Capabilities, UnusableImplementation
from reference.commands import Abort, Done, Mode, Reason, Refused, Retract, SpecDecode
from reference.geometry import Geometry
from stateful_tests.generate.exploration_scope import Scope
from stateful_tests.explore.tour import live
from stateful_tests.lockstep.reference_system import ReferenceSystem
from stateful_tests.lockstep.system_names import resolve
from stateful_tests.tests.support.closing import WaitsForEver

TINY = Scope(
    "tiny",
    "",
    Geometry(page_size=1, window=1, full_pages=3, swa_pages=3, rows=1, width=3),
    sessions=1,
    submits=(1,),
    ahead=2,
    invalid=False,
    marked=False,
)
SHORT = replace(
    TINY,
    name="short",
    geometry=Geometry(page_size=1, window=1, full_pages=2, swa_pages=2, rows=1, width=2),
)
TREE = Scope(
    "tiny-tree",
    "",
    Geometry(page_size=1, window=1, full_pages=2, swa_pages=2, rows=1, width=2, tree=True),
    lock_holders=1,
    texts="a",
    prompts=("a1", "a2"),
    invalid=False,
)


@pytest.mark.parametrize(
    "impl, scope",
    [("reference", replace(TINY, mode=Mode.FAITHFUL)), ("torch", SHORT), ("torch", TREE)],
    ids=lambda x: getattr(x, "name", x),
)
def test_every_transition_is_run(impl, scope):
    tour = live(resolve(impl), scope)
    assert tour.complete, tour.lost
    assert not tour.findings
    assert tour.transitions > 50


def test_a_fault_is_reported_by_its_smallest_trace():
    tour = live(resolve("torch+pr22862-tail"), SHORT)
    finding = next(f for f in tour.findings if f.clause == "LEN-3")
    assert finding.run.violation is not None
    assert len(finding.run.trace.commands) < 10
    assert not tour.complete
    assert any(reason == "violates the specification" for _, reason in tour.lost)


def test_a_close_that_never_happens_is_checked_past_what_ends_a_walk():
    tour = live(WaitsForEver(), replace(SHORT, mode=Mode.FAITHFUL))
    violations = {f.clause: f.run.violation for f in tour.findings}
    assert violations["SES-2"].first_violation is None
    assert violations["SES-4"].first_violation is not None
    assert len(violations) == 2


class _Other(ReferenceSystem):
    """A server that never retracts, has no abort, and does not mix the kinds of decode."""

    name = "other"
    capabilities = replace(
        Capabilities(),
        commands=Capabilities().commands - {"Abort"},
        mixed_decode=False,
        exact_reasons=False,
        may_refuse=frozenset({Reason.WRONG_PHASE}),
    )

    def apply(self, command):
        assert not isinstance(command, Abort)
        if isinstance(command, Retract):
            return Refused(Reason.WRONG_PHASE)
        outcome = super().apply(command)
        assert isinstance(outcome, (Done, Refused))
        return outcome


def assert_all_accounted_for(tour):
    """Each transition was followed, refused or lost."""
    assert tour.followed + tour.refused + sum(tour.lost.values()) == tour.transitions + tour.refusals


def test_transitions_that_a_system_cannot_follow_are_listed():
    tour = live(_Other(), TINY)
    assert not tour.findings
    assert ("abort", "it does not offer that") in tour.lost
    assert ("retract", "refused by policy: wrong_phase") in tour.lost
    assert_all_accounted_for(tour)
    assert tour.followed > 100


def test_mostly_violating_transitions_are_left_out_and_the_rest_is_run():
    scope = replace(TINY, mode=Mode.FAITHFUL)
    tour = live(resolve("torch+pr22862-tail"), scope)
    beyond = "nothing that it follows leads there"  # states behind a violating admission alone
    assert {lost_state for lost_state in tour.lost if lost_state[1] != beyond} == {
        ("admit", "violates the specification"),
        ("admit", "left out: steps of its situation violate"),
    }
    assert_all_accounted_for(tour)
    assert tour.followed > 800


class _Unmixed(ReferenceSystem):
    """A server that decodes one way or the other from the start on, and never two tokens ahead."""

    name = "unmixed"
    capabilities = replace(Capabilities(), mixed_decode=False)
    kinds: frozenset[str]

    def reset(self, geometry):
        self.kinds = frozenset()
        super().reset(geometry)

    def apply(self, command):
        self.kinds |= {type(command).__name__}
        if {"Decode", "SpecDecode"} <= self.kinds:
            raise UnusableImplementation("cannot mix")
        if isinstance(command, SpecDecode) and command.lanes[0].allocate > 1:
            return Refused(Reason.WRONG_PHASE)
        return super().apply(command)


def test_the_path_to_a_fault_keeps_to_batches_that_the_system_takes():
    tour = live(_Unmixed(), replace(TINY, mode=Mode.FAITHFUL))
    assert [f.clause for f in tour.findings] == ["OUT-1"]
