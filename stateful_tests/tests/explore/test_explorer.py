"""The explorer: its counts, its canonical states, bounds."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from reference import model
from reference.clauses import CLAUSES, Failure
from reference.clauses.step import Step
from reference.commands import COMMANDS, Done, Evict, Finish, Insert, Mode, Open, Piece, Refused
from reference.geometry import Geometry
from stateful_tests.coverage import required as coverage
from stateful_tests.coverage.scopes import SCOPES, Scope, spelt_in
from stateful_tests.coverage.situations import catalogue, situation
from stateful_tests.explore import canonical_state as quotient
from stateful_tests.explore import runner as search
from stateful_tests.explore.canonical_state import relabel
from stateful_tests.explore.inductive_check import Checker
from stateful_tests.explore.stepwise import Explorer, Graph

# Scope -> states, transitions, refused commands, depth. A changed rule shows here; so does a changed scope.
COUNTS = {
    "session-tiny": (906, 7448, 32404, 17),
    "session-tiny-faithful": (719, 5695, 26977, 17),
    "session-no-window": (647, 3634, 23262, 15),
    "checks": (998, 11531, 41416, 18),
    "ordinary": (535, 4592, 19620, 14),
    "batches": (55, 919, 2518, 6),
    "tree-tiny": (99, 4009, 843, 7),
    "tree-page2-long": (229, 9040, 1950, 9),
    "both-session": (696, 12885, 18312, 24),
    "both-ordinary-page2": (677, 10885, 17004, 17),
}

SMALL = Scope(
    "small", "", Geometry(1, 1, 3, 3, 2, 3), sessions=1, ordinary=1, submits=(1,), ahead=2, chunks=1
)
TREE = Scope(
    "small-tree", "", Geometry(1, 2, 2, 2, 1, 2, True), lock_holders=1, texts="ab", prompts=spelt_in("ab", 2),
    evicts=False,
)  # fmt: skip
BOTH = Scope(
    "small-both", "", Geometry(1, 1, 2, 2, 1, 2, True), Mode.FAITHFUL, sessions=1, ordinary=1, lock_holders=1,
    submits=(1,), prompts=("a1", "b1"), texts="ab", retracts=False,
)  # fmt: skip


@pytest.mark.parametrize("name", COUNTS)
def test_counts(name: str) -> None:
    result = search.run(SCOPES[name])
    assert result.complete
    assert (result.states, result.transitions, result.refused, result.depth) == COUNTS[name]
    listed = {text for text, scopes in coverage.load().situations.items() if name in scopes}
    assert result.situations.keys() == listed, "kvspec explore --situations"


@pytest.mark.parametrize(
    "scope", [SMALL, replace(SMALL, name="faithful", mode=Mode.FAITHFUL), TREE, BOTH], ids=lambda s: s.name
)
def test_equal_keys_lead_to_equal_keys(scope: Scope) -> None:
    """What a quotient leaves out leads nowhere: every command, in states as runs leave them (names as they
    came, serials and moments that only grow), leads where it leads in the state that stands for its key."""
    graph, draw = Graph(scope), random.Random(0)
    q = graph.quotient
    for _ in range(5):
        state = q.initial
        for _ in range(20):
            key = q.key(state)
            assert q.key(q.state(key)) == key
            said, leads = q.commands(key), dict(graph.targets(key))
            real = [relabel(command, q.renaming(state), state) for command in said]
            for number in draw.sample(range(len(said)), min(12, len(said))):
                now, outcome = model.step(state, real[number])
                assert isinstance(outcome, Done) == (number in leads), real[number]
                assert q.key(now) == leads.get(number, key), real[number]
                alone, same = model.step(q.state(key), said[number])
                assert type(same) is type(outcome)
                assert situation(q.state(key), said[number], same, alone) == situation(
                    state, real[number], outcome, now
                )
            state, _ = model.step(state, real[draw.choice(list(leads))])


def test_letters_are_alike() -> None:
    """Two nodes were never used at one moment unless one is above the other: no letter decides."""
    geometry = Geometry(1, 1, 6, 6, 1, 3, True)
    scope = Scope("letters", "", geometry, lock_holders=1, texts="ab", prompts=spelt_in("ab", 3))
    q, keys = quotient.Quotient(scope), []
    for first, then in ("ab", "ba"):
        state = q.initial
        for command in (Insert("h1", (Piece(first, 2),)), Insert("h1", (Piece(then, 3),)), Evict(0, 2)):
            state, outcome = model.step(state, command)
            assert isinstance(outcome, Done)
        keys.append(q.key(state))
    assert keys[0] == keys[1]


@pytest.mark.parametrize("scope", [SMALL, TREE], ids=lambda s: s.name)
def test_every_way_told_leads_there(scope: Scope) -> None:
    explorer = Explorer(scope)
    explorer.run(states=300)
    for at in range(0, len(explorer.keys), 17):
        state = explorer.graph.quotient.initial
        commands = explorer.path(at)
        for command in commands:
            state, outcome = model.step(state, command)
            assert isinstance(outcome, Done)
        assert explorer.graph.quotient.key(state) == explorer.keys[at]
        assert explorer.levels[len(commands)] <= at, "a shortest way"


def test_bounds_are_said() -> None:
    by_depth, by_states = Explorer(SMALL), Explorer(SMALL)
    assert by_depth.run(depth=4) == "depth 4"
    assert len(by_depth.levels) == 5
    assert by_states.run(states=50) == "50 states"
    result = by_states.result("50 states")
    assert not result.complete
    assert result.states >= 50 > result.expanded
    assert Explorer(SMALL).run(memory_mb=1) == "1 MB of memory"


def test_clauses_hold_and_are_asked_at_every_step() -> None:
    tiny = replace(SMALL, ordinary=0, geometry=Geometry(1, 1, 2, 2, 1, 2))
    result = search.run(tiny)
    assert result.finding is None
    assert result.complete
    assert result.tallies is not None
    assert result.tallies["OUT-1"].evaluated == result.transitions + result.refused
    assert result.tallies["READ-1"].reached > 0


def test_a_violation_is_told_by_a_shortest_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clause that nothing keeps: finishes with all outputs are violations."""

    def never(step: Step) -> Failure | None:
        return ("no finish", "one") if isinstance(step.command, Finish) and step.done else None

    monkeypatch.setitem(CLAUSES, "REF-1", replace(CLAUSES["REF-1"], check=never))
    result = search.run(SMALL)
    assert result.stopped == "a clause was violated"
    assert result.finding is not None
    run = result.finding.run
    assert result.finding.clause == "REF-1"
    assert run.violation is not None
    assert run.trace.origin == "exhaustive"
    assert len(run.trace.commands) == 4, "submit, admit, extend, finish"


def test_a_placement_shows_what_a_run_shows() -> None:
    """Facts in a placed state: contents of committed positions, and nothing else is promised."""
    explorer, checker = Explorer(SMALL), Checker()
    explorer.run(states=200)
    for key in explorer.keys[::9]:
        checker.begin(explorer.graph.quotient.state(key))
        for command in explorer.graph.quotient.commands(key):
            assert checker.failures(command) == []


def test_situations_are_those_of_the_catalogue() -> None:
    for scope in (SMALL, TREE, BOTH):
        explorer = Explorer(scope)
        result = explorer.result(explorer.run(states=400))
        known = catalogue(scope.geometry, COMMANDS)
        assert len(set(known)) == len(known)
        assert result.situations.keys() <= set(known)
        assert not result.situations.keys() & set(result.missing)
    state = model.initial(SMALL.geometry)
    now, outcome = model.step(state, Open("s1"))
    assert situation(state, Open("s1"), outcome, now) == "open"
    again, refused = model.step(now, Open("s1"))
    assert isinstance(refused, Refused)
    assert situation(now, Open("s1"), refused, again) == "open, refused: session_exists"
