"""Breadth-first search over the states of a scope modulo symmetry, with every clause checked at every step.

States are expanded in batches of one level. What a batch finds depends only on the batch, and batches are
taken in their order: so where they run, and how many at a time, changes nothing.
"""

from __future__ import annotations

import gc
import resource
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

from reference import model
from reference.clauses import CLAUSES
from reference.commands import Command, Done, Outcome
from reference.state import State
from stateful_tests.check import corpus
from stateful_tests.check.executors import SERIAL, Executor
from stateful_tests.generate.exploration_scope import Scope
from stateful_tests.coverage.situations import kind_name, situation
from stateful_tests.explore import enumeration
from stateful_tests.explore.representative import Representatives, relabel
from stateful_tests.explore.inductive_check import InductiveStepCheck, ReferenceInState
from stateful_tests.check.finder import Finder
from stateful_tests.lockstep.replays import replay
from stateful_tests.lockstep.reference_system import ReferenceSystem
from stateful_tests.lockstep.check_results import Finding
from stateful_tests.lockstep.run_results import Trace, Violation

Progress = Callable[[str, int, int], None]
MEMORY_MB = 4096  # of the process, where no other bound is given
BATCH = 16  # states
SPREAD = 8  # batches of a level that are worth other processes
INTERRUPTED = "an interrupt"  # why a search is over, as others are

# States to expand, and clauses whose situations need not be looked for.
_Task = tuple[list[State], frozenset[str]]


@dataclass(slots=True)
class Exploration:
    """The result of an exploration."""

    scope: Scope
    states: int
    expanded: int
    #: commands that were carried out, and commands that were refused, in all expanded states
    transitions: int
    refused: int
    #: depth of the deepest state (commands)
    depth: int
    #: no state is left to expand
    complete: bool
    #: why the exploration is over, in words
    stopped: str
    seconds: float
    #: most memory that the process has had (MB)
    memory_mb: float
    #: number of times that each situation was reached
    situations: dict[str, int]
    #: situations of the corpus that the scope's kinds of commands meet, and the exploration has not
    missing: list[str]
    #: clauses whose trigger came up
    reached: set[str]
    finding: Finding | None = None


@dataclass(slots=True)
class Expansion:
    """The states that commands in some states lead to.

    targets: of each state, (number of the first command that leads there, representative).
    violated: the place of the state among them, the number of the command, and what it violates; nothing
        after it was looked at.
    """

    targets: list[list[tuple[int, State]]] = field(default_factory=list)
    transitions: int = 0
    refused: int = 0
    situations: Counter[str] = field(default_factory=Counter)
    reached: set[str] = field(default_factory=set)
    violated: tuple[int, int, Violation] | None = None


class Expander:
    """Expands states, one by one.

    check: None checks no clause.
    """

    def __init__(self, scope: Scope, check: InductiveStepCheck | None) -> None:
        self.states = Representatives(scope)
        self.check = check

    def expand(self, task: _Task) -> Expansion:
        """Run every command in some states."""
        expansion = Expansion()
        states, reached = task
        if self.check is not None:
            tree = self.states.scope.geometry.tree
            self.check.look_for(
                {*reached, *(c for c in CLAUSES if c.startswith("TREE-") and not tree)}
            )
        for place, state in enumerate(states):
            expansion.targets.append([])
            number, violation = self._expand(state, expansion)
            if violation is not None:
                expansion.violated = place, number, violation
                break
        if self.check is not None:
            expansion.reached = self.check.reached
        return expansion

    def _expand(self, state: State, expansion: Expansion) -> tuple[int, Violation | None]:
        """Execute each command of the scope in a state, and add what follows to `expansion`. Return the
        number of the last command, and the violation that ended the expansion, if any."""
        check = self.check
        number = 0
        # equal states are one: it remembers for all
        representatives = dict[State, State]()
        states_seen = set[State]()
        targets = expansion.targets[-1]
        situations = expansion.situations
        if check is not None:
            check.start_in(state)
        for number, command in enumerate(self.states.commands(state)):
            now, outcome, effects = model.step_with_effects(state, command)
            situations[situation(state, command, outcome, now)] += 1
            if isinstance(outcome, Done):
                expansion.transitions += 1
                if now not in representatives and (target := self.states.of(now)) not in states_seen:
                    states_seen.add(target)
                    targets.append((number, target))
                now = representatives.setdefault(now, now)
            else:
                expansion.refused += 1
                if check is None or (now is state and not check.seeks_refusals):
                    continue
            if check is not None:
                violation = check.violation(command, now, outcome, effects)
                if violation is not None:
                    return number, violation
        return number, None


@lru_cache(maxsize=2)
def _expander(scope: Scope, clauses: bool, search: float) -> Expander:  # noqa: ARG001 (one for each search)
    return Expander(scope, InductiveStepCheck() if clauses else None)


def _expand(scope: Scope, clauses: bool, search: float, task: _Task) -> Expansion:
    """Return the expansion of a task, by the Expander that this process has for the search."""
    # a search leaves few cycles, and makes many objects; a process beside this one ends with it
    gc.disable()
    return _expander(scope, clauses, search).expand(task)


class Explorer:
    """A search that can be stopped.

    queue: representatives in the order in which they came up.
    seen: where.
    clauses: False for a caller that needs only the states.
    system: in place of the reference's own; then everything runs in this process.
    """

    def __init__(
        self,
        scope: Scope,
        *,
        clauses: bool = True,
        executor: Executor = SERIAL,
        system: ReferenceInState | None = None,
    ) -> None:
        """Begin at the initial state.

        clauses: check them at each step.
        system: check its facts as well, in this process.
        """
        self.scope = scope
        self.states = Representatives(scope)
        self.queue: list[State] = [self.states.of(self.states.initial)]
        self.seen: dict[State, int] = {self.queue[0]: 0}
        self.levels = [0]  # where each depth begins in the queue
        self.expanded = 0
        self.found = Expansion()
        self.seconds = 0.0
        self._parents = array("I", [0])
        self._via = array("H", [0])
        self._executor = executor
        self._work: Callable[[_Task], Expansion] = partial(
            _expand, scope, clauses, time.monotonic()
        )
        if system is not None:
            mine = Expander(scope, InductiveStepCheck(system))
            self._work = mine.expand
            self._executor = SERIAL
        self._violated: tuple[int, Command, Violation] | None = None

    def moves(self, state: State) -> Iterator[tuple[Command, Outcome, State]]:
        """Return every command in a representative, what becomes of it, and the state it leads to."""
        for command in self.states.commands(state):
            now, outcome = model.step(state, command)
            yield command, outcome, now

    def run(
        self,
        *,
        states: int | None = None,
        depth: int | None = None,
        memory_mb: float = MEMORY_MB,
        progress: Progress | None = None,
    ) -> str:
        """Search until nothing is left, to a bound, or to an interrupt; says which."""
        began = time.monotonic()
        try:
            while (level_begin := self.levels[-1]) < (end := len(self.queue)):
                if depth is not None and len(self.levels) > depth:
                    return f"depth {depth}"
                self.levels.append(end)
                starts = range(level_begin, end, BATCH)
                reached = frozenset(self.found.reached)
                tasks = [(self.queue[start : min(start + BATCH, end)], reached) for start in starts]
                executor = self._executor if len(tasks) >= SPREAD else SERIAL
                with closing(executor.map(self._work, tasks)) as results:
                    for start, result in zip(starts, results):
                        self._take(start, result)
                        if self._violated is not None:
                            return "a clause was violated"
                        if states is not None and len(self.queue) >= states:
                            return f"{states} states"
                        if memory() > memory_mb:
                            return f"{memory_mb:g} MB of memory"
                        if progress is not None:
                            waiting = f"{len(self.queue)} states, {len(self.queue) - self.expanded} waiting"
                            where = f"{self.scope.name}, depth {len(self.levels) - 2}, {waiting}"
                            progress(where, self.found.transitions, 0)
            self.levels.pop()
            return "fixed point"
        except KeyboardInterrupt:  # what was entered until then is reported
            return INTERRUPTED
        finally:
            gc.enable()
            self.seconds += time.monotonic() - began

    def _take(self, start: int, result: Expansion) -> None:
        """Enter what a batch that begins at `start` has found."""
        mine = self.found
        mine.transitions += result.transitions
        mine.refused += result.refused
        mine.situations.update(result.situations)
        mine.reached |= result.reached
        for parent, targets in enumerate(result.targets, start):
            for number, target in targets:
                if target not in self.seen:
                    self.seen[target] = len(self.queue)
                    self.queue.append(target)
                    self._parents.append(parent)
                    self._via.append(number)
        self.expanded = start + len(result.targets)
        if result.violated is not None:
            place, number, violation = result.violated
            parent = start + place
            self._violated = parent, self.states.commands(self.queue[parent])[number], violation

    def path(self, at: int, last: Command | None = None) -> tuple[Command, ...]:
        """Return the shortest path to a state (and one command more), in names that stay what they are."""
        steps = []
        while at:
            steps.append((self.queue[self._parents[at]], self._via[at]))
            at = self._parents[at]
        states = self.states
        state = self.states.initial
        path = list[Command]()
        commands = [states.commands(before)[number] for before, number in reversed(steps)]
        if last is not None:
            commands.append(last)
        for command in commands:
            path.append(relabel(command, states.renaming(state), state))
            state, _ = model.step(state, path[-1])
        return tuple(path)

    def result(self, stopped: str) -> Exploration:
        """Return everything that was seen."""
        scope = self.scope
        expansion = self.found
        its = {kind_name(kind) for kind in enumeration.kinds(scope)}
        depth = len(self.levels) - 1
        if len(self.queue) == self.levels[-1]:  # the last level is empty
            depth -= 1
        others = [text for text in sorted(corpus.situations()) if text.partition(",")[0] in its]
        return Exploration(
            scope=scope,
            states=len(self.queue),
            expanded=self.expanded,
            transitions=expansion.transitions,
            refused=expansion.refused,
            depth=depth,
            complete=stopped == "fixed point",
            stopped=stopped,
            seconds=self.seconds,
            memory_mb=memory(),
            situations=dict(sorted(expansion.situations.items())),
            missing=[text for text in others if text not in expansion.situations],
            reached=expansion.reached,
            finding=self._finding(),
        )

    def _finding(self) -> Finding | None:
        """Return the violation at the end of its shortest path, as a check reports it."""
        if self._violated is None:
            return None
        number, command, violation = self._violated
        commands = self.path(number, command)
        scope = self.scope
        system = ReferenceSystem()
        trace = Trace(scope.geometry, scope.mode, commands, "exhaustive", clause=violation.clause)
        run = replay(system, trace)
        if run.violation is None:
            noted = violation.with_note(
                "(not from the empty state: the start in this state is at fault)"
            )
            run = replace(run, violation=replace(noted, step=len(commands) - 1))
            return Finding(
                violation.clause, run, (scope.mode,), 1, self.seconds, self.found.transitions
            )
        finder = Finder(system, once=True)
        finder.started = time.monotonic() - self.seconds
        finder.commands = self.found.transitions
        finder.take(run.violation, trace)
        finding = finder.findings()[0]
        return replace(
            finding, run=replace(finding.run, trace=replace(finding.run.trace, origin="exhaustive"))
        )


def memory() -> float:
    """Return the most memory that the process has had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run(
    scope: Scope,
    *,
    states: int | None = None,
    depth: int | None = None,
    memory_mb: float = MEMORY_MB,
    progress: Progress | None = None,
    executor: Executor = SERIAL,
) -> Exploration:
    """Explore a scope to a fixed point, a bound or an interrupt."""
    explorer = Explorer(scope, executor=executor)
    return explorer.result(
        explorer.run(states=states, depth=depth, memory_mb=memory_mb, progress=progress)
    )
