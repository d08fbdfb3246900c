"""Breadth first over `model.step` from the empty state: every state of a scope, or as many as asked for.

Commands about one unit read of the others only what they leave free (`ledger.free`). So without a radix
tree the results of the commands about a unit are kept by unit and free pages, and those of batches by
both units; each result is made by `model.step` on a whole state, where it is asserted that nobody
else has changed. With a tree every step is made.
"""

from __future__ import annotations

import resource
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from reference import model
from reference.commands import Command, Done, Mode, Outcome
from reference.ledger import Free, State
from stateful_tests import moves
from stateful_tests.campaign import minimise
from stateful_tests.lockstep import replay
from stateful_tests.placed import Checker
from stateful_tests.quotient import Quotient, spoken
from stateful_tests.reference_system import ReferenceSystem
from stateful_tests.results import Finding, Tally, Trace, Violation
from stateful_tests.scopes import Scope
from stateful_tests.situations import catalogue, situation

Progress = Callable[[str, int, int], None]
MEMORY_MB = 4096  # of the process, where nothing else is asked for


@dataclass(slots=True)
class Exploration:
    """What an exploration has seen.

    transitions: commands that were carried out, from every state that was expanded; refused: those that
    were not. depth: of the deepest state, in commands. complete: a fixed point, nothing is left;
    stopped: why it is over, in words. memory_mb: the most that the process has had; grown_mb: since the
    search began. situations: how often each was met; missing: the others.
    """

    scope: Scope
    states: int
    expanded: int
    transitions: int
    refused: int
    depth: int
    complete: bool
    stopped: str
    seconds: float
    memory_mb: float
    grown_mb: float
    situations: dict[str, int]
    missing: list[str]
    tallies: dict[str, Tally] | None
    finding: Finding | None = None


@dataclass(slots=True)
class Group:
    """What the commands about a group lead to. done: (number of the command, what replaces the units)."""

    size: int = 0
    done: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    situations: Counter[str] = field(default_factory=Counter)
    used: int = 0


class Graph:
    """The states of a scope and what leads from one to another, by key."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.quotient = Quotient(scope)
        self.root = self.quotient.key(self.quotient.initial)
        self.counted: Counter[str] = Counter()
        self._groups: dict[object, Group] = {}
        self._owned: dict[tuple[int, bool], Free] = {}

    def moves(self, key: int) -> Iterator[tuple[Command, Outcome, State]]:
        """Every command in the state of a key, one by one."""
        state = self.quotient.state(key)
        for command in self.quotient.commands(key):
            now, outcome = model.step(state, command)
            yield command, outcome, now

    def targets(self, key: int) -> Iterator[tuple[int, int]]:
        """(number of the command among `quotient.commands`, key it leads to), of those carried out."""
        if self.scope.geometry.tree:
            yield from self._stepped(key)
            return
        first = 0
        quotient = self.quotient
        numbers, _ = quotient.unpack(key)
        for places in quotient.groups(key):
            group = self._group(key, numbers, places)
            group.used += 1
            for command, new in group.done:
                yield first + command, self._replaced(numbers, places, new)
            first += group.size

    def situations(self) -> Counter[str]:
        """How often each situation was met in what `targets` gave."""
        total = Counter(self.counted)
        for group in self._groups.values():
            for text, times in group.situations.items():
                total[text] += times * group.used
        return total

    def _stepped(self, key: int) -> Iterator[tuple[int, int]]:
        quotient = self.quotient
        state = quotient.state(key)
        for number, command in enumerate(quotient.commands(key)):
            now, outcome = model.step(state, command)
            self.counted[situation(state, command, outcome, now)] += 1
            if isinstance(outcome, Done):
                yield number, key if now is state else quotient.key(now)

    def _group(self, key: int, numbers: list[list[int]], places: tuple[int, ...]) -> Group:
        flat = self._flat(numbers)
        left = self._free(numbers)
        if places:
            known: object = (*(flat[p] for p in places), *(p < self.scope.sessions for p in places), left)
        elif self.scope.checks:
            known = key
        else:
            known = (len(numbers[0]), len(numbers[1]))
        group = self._groups.get(known)
        if group is None:
            group = self._groups[known] = self._made(key, places)
        return group

    def _flat(self, numbers: list[list[int]]) -> dict[int, int]:
        flat = dict(enumerate(numbers[0]))
        flat.update(enumerate(numbers[1], self.scope.sessions))
        return flat

    def _free(self, numbers: list[list[int]]) -> Free:
        """What all units together leave free."""
        geometry = self.scope.geometry
        full, swa, rows = geometry.full_pages, geometry.swa_pages, geometry.rows
        for kind, units in enumerate(numbers[:2]):
            for number in units:
                owned = self._owned.get((number, kind == 0)) or self._own(number, kind)
                full, swa, rows = full - owned.full, swa - owned.swa, rows - owned.rows
        return Free(full, swa, rows)

    def _own(self, number: int, kind: int) -> Free:
        groups: list[list[int]] = [[], [], []]
        groups[kind] = [number]
        g, left = self.scope.geometry, self.quotient.free(self.quotient.pack(groups, 0))
        owned = Free(g.full_pages - left.full, g.swa_pages - left.swa, g.rows - left.rows)
        self._owned[number, kind == 0] = owned
        return owned

    def _made(self, key: int, places: tuple[int, ...]) -> Group:
        """The results of the commands about some units, by stepping the whole state."""
        state, group = self.quotient.state(key), Group()
        for command in self.quotient.about(key, places):
            now, outcome = model.step(state, command)
            group.situations[situation(state, command, outcome, now)] += 1
            if isinstance(outcome, Done):
                group.done.append((group.size, self._units(state, now, places)))
            group.size += 1
        return group

    def _units(self, was: State, now: State, places: tuple[int, ...]) -> tuple[int, ...]:
        """What the units in some places have become (0: gone), or the unit that has come."""
        quotient, sessions = self.quotient, self.scope.sessions
        names = {f"s{p + 1}" if p < sessions else f"r{p + 1}" for p in places}
        old = {s.name: s for s in was.sessions} | {r.name: r for r in was.requests if r.session is None}
        has = {s.name: s for s in now.sessions} | {r.name: r for r in now.requests if r.session is None}
        others = old.keys() - names
        assert all(has.get(name) is old[name] for name in others), "a command has changed somebody else"
        found = {}
        for session in now.sessions:
            if session.name not in others:
                found[session.name] = quotient.number(
                    quotient.session_unit(session, now.request(session.turn or ""))
                )
        for request in now.requests:
            if request.session is None and request.name not in others:
                found[request.name] = quotient.number(quotient.request_unit(request))
        if places:
            return tuple(found.get(f"s{p + 1}" if p < sessions else f"r{p + 1}", 0) for p in places)
        (name,) = found or ("",)
        return (0, 0) if not name else (found[name], 0) if name.startswith("s") else (0, found[name])

    def _replaced(self, numbers: list[list[int]], places: tuple[int, ...], new: tuple[int, ...]) -> int:
        sessions, ordinary = numbers[0], numbers[1]
        first = self.scope.sessions
        if not places:
            come, other = new
            if come:
                sessions = sorted([*sessions, come], reverse=True)
            elif other:
                ordinary = sorted([*ordinary, other], reverse=True)
        else:
            sessions, ordinary = list(sessions), list(ordinary)
            for place, number in zip(places, new):
                if place < first:
                    sessions[place] = number
                else:
                    ordinary[place - first] = number
            sessions = sorted(filter(None, sessions), reverse=True)
            ordinary = sorted(filter(None, ordinary), reverse=True)
        return self.quotient.pack([sessions, ordinary, []], 0)


class Explorer:
    """A search that can be stopped, kept and taken up again.

    keys: of the states in the order in which they were found; expanded: how many of them have been.
    """

    def __init__(self, scope: Scope, *, clauses: bool | None = None) -> None:
        self.scope = scope
        self.graph = Graph(scope)
        self.checker = Checker() if (scope.clauses if clauses is None else clauses) else None
        self.keys: list[int] = [self.graph.root]
        self.seen: dict[int, int] = {self.graph.root: 0}
        self.parents = array("I", [0])
        self.via = array("H", [0])
        self.levels = [0]  # where each depth begins in keys
        self.expanded = 0
        self.transitions = 0
        self.seconds = 0.0
        self.violated: tuple[int, Command, Violation] | None = None
        self._memory = memory()

    def run(
        self,
        *,
        states: int | None = None,
        depth: int | None = None,
        memory_mb: float = MEMORY_MB,
        progress: Progress | None = None,
        pause: Callable[[], bool] = lambda: False,
    ) -> str:
        """Go on until nothing is left, or to a bound; says which. pause: asked between states."""
        began = time.monotonic()
        try:
            return self._run(states, depth, memory_mb, progress, pause)
        finally:
            self.seconds += time.monotonic() - began

    def _run(
        self,
        states: int | None,
        depth: int | None,
        memory_mb: float,
        progress: Progress | None,
        pause: Callable[[], bool],
    ) -> str:
        keys, seen, parents, via = self.keys, self.seen, self.parents, self.via
        while self.expanded < len(keys):
            at = self.expanded
            here = self._depth_of(at)
            if depth is not None and here >= depth:
                return f"depth {depth}"
            if states is not None and len(keys) >= states:
                return f"{states} states"
            if pause():
                return "paused"
            if at % 256 == 0:
                if memory() > memory_mb:
                    return f"{memory_mb:g} MB of memory"
                if progress is not None:
                    where = f"{self.scope.name}, depth {here}, {len(keys)} states, {len(keys) - at} waiting"
                    progress(where, self.transitions, int(self.violated is not None))
            key = keys[at]
            if self.checker is not None:
                self._check(at)
            for number, target in self.graph.targets(key):
                self.transitions += 1
                if target not in seen:
                    seen[target] = len(keys)
                    if here + 1 == len(self.levels):
                        self.levels.append(len(keys))
                    keys.append(target)
                    parents.append(at)
                    via.append(number)
            self.expanded += 1
            if self.violated is not None:
                return "a clause was violated"
        return "fixed point"

    def _depth_of(self, at: int) -> int:
        """Depth of the state that is expanded next: levels are begun in order."""
        depth = len(self.levels) - 1
        while self.levels[depth] > at:
            depth -= 1
        return depth

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
            real = spoken(command, quotient.renaming(state), state)
            said.append(real)
            state, _ = model.step(state, real)
        return tuple(said)

    def result(self, stopped: str) -> Exploration:
        """What there is to tell."""
        met = self.graph.situations()
        thinkable = catalogue(self.scope.geometry, moves.kinds(self.scope), moves.absent(self.scope))
        refused = sum(n for text, n in met.items() if ", refused: " in text)
        return Exploration(
            self.scope, len(self.keys), self.expanded, self.transitions, refused, len(self.levels) - 1,
            stopped == "fixed point", stopped, self.seconds, memory(), memory() - self._memory,
            dict(sorted(met.items())), [text for text in thinkable if text not in met],
            self.checker.tallies if self.checker is not None else None,
            self._finding(),
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


def memory() -> float:
    """The most memory that the process has had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
