"""Breadth first over `model.step` from the empty state, every clause asked at every step."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from reference import model
from reference.commands import Command, Done, Mode, Outcome
from reference.ledger import State
from stateful_tests.coverage.scopes import Scope
from stateful_tests.coverage.situations import situation
from stateful_tests.explore.canonical_state import Quotient, relabel
from stateful_tests.explore.inductive_check import Checker
from stateful_tests.explore.search_base import Exploration, Search, explored, memory
from stateful_tests.lockstep.lockstep import replay
from stateful_tests.lockstep.reference_system import ReferenceSystem
from stateful_tests.lockstep.results import Finding, Trace, Violation
from stateful_tests.shrink.minimise import minimise


class Graph:
    """The states of a scope and what leads from one to another, by key. situations: what `targets` met."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.quotient = Quotient(scope)
        self.root = self.quotient.key(self.quotient.initial)
        self.situations: Counter[str] = Counter()

    def moves(self, key: int) -> Iterator[tuple[Command, Outcome, State]]:
        """Every command in the state of a key, one by one."""
        state = self.quotient.state(key)
        for command in self.quotient.commands(key):
            now, outcome = model.step(state, command)
            yield command, outcome, now

    def targets(self, key: int) -> Iterator[tuple[int, int]]:
        """(number of the command among `quotient.commands`, key it leads to), of those carried out."""
        quotient = self.quotient
        state = quotient.state(key)
        for number, command in enumerate(quotient.commands(key)):
            now, outcome = model.step(state, command)
            self.situations[situation(state, command, outcome, now)] += 1
            if isinstance(outcome, Done):
                yield number, key if now is state else quotient.key(now)


class Explorer(Search):
    """A search that can be stopped. keys: of the states as they were found."""

    look = 256
    transitions = 0

    def __init__(self, scope: Scope, *, clauses: bool = True) -> None:
        self.scope = scope
        self.graph = Graph(scope)
        self.checker = Checker() if clauses else None
        self.keys: list[int] = [self.graph.root]
        self.seen: dict[int, int] = {self.graph.root: 0}
        self.parents = array("I", [0])
        self.via = array("H", [0])
        self.levels = [0]  # where each depth begins in keys
        self.violated: tuple[int, Command, Violation] | None = None
        self._memory = memory()

    @property
    def states(self) -> int:
        return len(self.keys)

    @property
    def depth(self) -> int:
        depth = len(self.levels) - 1  # levels are begun in order
        while self.levels[depth] > self.expanded:
            depth -= 1
        return depth

    def advance(self, most: int | None = None) -> str | None:  # noqa: ARG002 (one state is the least)
        at, depth = self.expanded, self.depth
        if self.checker is not None:
            self._check(at)
        for number, target in self.graph.targets(self.keys[at]):
            self.transitions += 1
            if target not in self.seen:
                self.seen[target] = len(self.keys)
                if depth + 1 == len(self.levels):
                    self.levels.append(len(self.keys))
                self.keys.append(target)
                self.parents.append(at)
                self.via.append(number)
        self.expanded += 1
        return "a clause was violated" if self.violated is not None else None

    def _check(self, at: int) -> None:
        """Ask the clauses about every step from a state."""
        assert self.checker is not None
        key, begun = self.keys[at], False
        for command in self.graph.quotient.commands(key):
            if not begun:
                self.checker.begin(self.graph.quotient.state(key))
                begun = True
            violation = self.checker.violation(command)
            if violation is not None:
                self.violated = (at, command, violation)
                return

    def path(self, at: int, last: Command | None = None) -> tuple[Command, ...]:
        """The shortest way to a state (and one command more), in names that stay what they are."""
        steps = []
        while at:
            steps.append((self.keys[self.parents[at]], self.via[at]))
            at = self.parents[at]
        quotient, state, said = self.graph.quotient, self.graph.quotient.initial, []
        commands = [quotient.commands(key)[number] for key, number in reversed(steps)]
        for command in [*commands, last] if last is not None else commands:
            real = relabel(command, quotient.renaming(state), state)
            said.append(real)
            state, _ = model.step(state, real)
        return tuple(said)

    def result(self, stopped: str) -> Exploration:
        """What there is to tell."""
        return explored(
            self.scope, "one step after the other", states=len(self.keys), expanded=self.expanded,
            transitions=self.transitions, depth=len(self.levels) - 1, stopped=stopped, seconds=self.seconds,
            had_mb=self._memory, situations=self.graph.situations,
            tallies=self.checker.tallies if self.checker is not None else None, finding=self._finding(),
        )  # fmt: skip

    def _finding(self) -> Finding | None:
        if self.violated is None:
            return None
        at, command, violation = self.violated
        return finding_of(self.scope, self.path(at, command), violation, self.seconds, self.transitions)


def finding_of(
    scope: Scope, commands: tuple[Command, ...], violation: Violation, seconds: float, transitions: int
) -> Finding:
    """A violation at the end of its shortest way, as a check would tell it."""
    trace = Trace(scope.geometry, scope.mode, commands, "exhaustive", clause=violation.clause)
    system = ReferenceSystem()
    run = replay(system, trace)
    if run.violation is not None:
        smallest = minimise(system, trace, run.violation.clause)
        run = replay(system, replace(smallest, origin="exhaustive", clause=run.violation.clause))
    else:
        told = f"{violation.observed} (not from the empty state: the placement of this state is at fault)"
        run = replace(run, violation=replace(violation, step=len(commands) - 1, observed=told))
    modes = (Mode.FREE,) if scope.mode is Mode.FREE else tuple(Mode)
    assert run.violation is not None
    return Finding(run.violation.clause, run, modes, 1, seconds, transitions)

