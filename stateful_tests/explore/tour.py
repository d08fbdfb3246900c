"""Tours: walks that together run every transition of a scope, in lockstep, on any system.

The scope is explored first. From where the system really is, the nearest transition that was not run yet
comes next.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from impl.adapter import System
from reference.commands import Command, Decode, Done, Mode, Outcome, Reason, Refused, SpecDecode
from reference.geometry import Geometry
from stateful_tests.check.finder import Finder, Found
from stateful_tests.generate.exploration_scope import Scope
from stateful_tests.coverage.situations import kind_name, situation
from reference.state import State
from stateful_tests.explore.representative import relabel
from stateful_tests.explore.search import INTERRUPTED, Explorer, Progress
from stateful_tests.generate.run_profile import LATE
from stateful_tests.lockstep.driven_kinds import check_fits
from stateful_tests.lockstep.lockstep import Lockstep
from stateful_tests.lockstep.replays import replay
from stateful_tests.lockstep.final_closes import violations
from stateful_tests.lockstep.check_results import Finding
from stateful_tests.lockstep.run_results import Trace, Violation

WALK = 400  # commands after which a walk ends: what a violation is shrunk from
PATIENCE = 20  # commands for each transition, before a tour gives up
MAX_VIOLATIONS = 400  # steps that violate before a tour gives up
TRIES = 5  # steps of one situation that violate before the rest of it is left out


@dataclass(slots=True)
class Tour:
    """The result of a tour."""

    scope: str
    geometry: Geometry
    mode: Mode
    system: str
    states: int = 0
    #: totals of the scope
    transitions: int = 0
    refusals: int = 0
    #: how many of each the system ran with the outcome that the rules give
    followed: int = 0
    refused: int = 0
    commands: int = 0
    walks: int = 0
    #: steps that left the specification, each the end of a walk
    violations: int = 0
    #: the number of the others, by kind of command and reason
    lost: Counter[tuple[str, str]] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    stopped: str = ""
    seconds: float = 0.0

    @property
    def complete(self) -> bool:
        """Every transition and every refusal was run."""
        return (self.followed, self.refused) == (self.transitions, self.refusals)


def kinds_of(system: System) -> tuple[frozenset[str], ...]:
    """Return the names of the kinds of commands that may meet in one run, for each pass that is needed."""
    can = system.capabilities
    if can.mixed_decode:
        return (can.commands,)
    return can.commands - {SpecDecode.__name__, *LATE}, can.commands - {Decode.__name__}


class _Runner:
    """A system in lockstep, walk after walk; violations are caught and shrunk."""

    lockstep: Lockstep

    def __init__(self, system: System, tour: Tour, found: Found | None) -> None:
        self.system = system
        self.tour = tour
        self.finder = Finder(system, found=found, once=True)
        self.done: list[Command] = []
        self.begin()

    def begin(self) -> None:
        """Begin a walk at the empty state."""
        if self.done or not self.tour.walks:
            self.tour.walks += 1
        self.lockstep = Lockstep(self.system, self.tour.geometry, self.tour.mode)
        self.done = []

    def do(self, command: Command) -> Outcome:
        """Carry out one command. `current_violation` may be set afterwards."""
        self.done.append(command)
        self.tour.commands += 1
        return self.lockstep.do(command)

    @property
    def current_violation(self) -> Violation | None:
        return self.lockstep.violation

    def catch(self, shortest: tuple[Command, ...] | None) -> frozenset[type]:
        """Report the violation by its smallest trace.

        shortest: the path to the step that violates. If that path alone violates nothing, an earlier command
        has left something behind. Returns the kinds of commands of the smallest trace that the path lacks.
        """
        violation = self.lockstep.violation
        tour = self.tour
        assert violation is not None
        tour.violations += 1
        self.finder.commands = tour.commands
        alone = None
        whole = Trace(tour.geometry, tour.mode, tuple(self.done), "exhaustive")
        if shortest is not None:
            direct = replace(whole, commands=shortest)
            alone = replay(self.system, direct).violation
        if alone is not None and {*violation.clauses} <= {*alone.clauses}:
            self.finder.take(alone, direct)
        else:
            self.finder.take(violation, whole)
        for beyond, trace in violations(self.lockstep, self.done, "exhaustive")[1:]:
            self.finder.take(beyond, trace)
        self.lockstep.violation = violation
        if shortest is None or alone is not None:
            return frozenset()
        needed = {type(c) for c in self.finder.trace(violation.clause).commands}
        return frozenset(needed - {type(c) for c in shortest})

    def finish(self) -> Tour:
        """Return the result, with its findings."""
        tour = self.tour
        tour.findings = self.finder.findings()
        tour.seconds = time.monotonic() - self.finder.started
        return tour


@dataclass(slots=True)
class _Place:
    """A state of the graph, whose commands are numbered.

    situations: the situation of each command, by the rules.
    pending: commands that were not run yet.
    pending_here: pending commands that do not leave the state.
    successors: for each command that is carried out, the state that it leads to.
    refused: commands that the rules refuse.
    """

    situations: list[str] = field(default_factory=list)
    pending: set[int] = field(default_factory=set)
    pending_here: set[int] = field(default_factory=set)
    successors: dict[int, int] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)


class _TourRun:
    kinds: frozenset[str]
    allowed: list[list[bool]]

    def __init__(
        self, system: System, explorer: Explorer, progress: Progress | None, found: Found | None
    ) -> None:
        scope = explorer.scope
        self.explorer = explorer
        self.states = explorer.states
        self.tour = Tour(scope.name, scope.geometry, scope.mode, system.name, len(explorer.queue))
        self.progress = progress
        self.places = [self._place(state) for state in explorer.queue]
        self.runner = _Runner(system, self.tour, found)
        self.at = 0
        self.walk_ending_kinds: set[type] = set()
        # steps by situation
        self.right = Counter[str]()
        self.wrong = Counter[str]()

    def _place(self, state: State) -> _Place:
        place = _Place()
        tour = self.tour
        known_place = self.explorer.seen[state]
        for number, (command, outcome, now) in enumerate(self.explorer.moves(state)):
            place.situations.append(situation(state, command, outcome, now))
            if isinstance(outcome, Done):
                tour.transitions += 1
                place.successors[number] = self.explorer.seen[self.states.of(now)]
            # UNFAITHFUL is left out: no scheduler gives such a command, so the system is not given it either
            elif isinstance(outcome, Refused) and outcome.reason is not Reason.UNFAITHFUL:
                tour.refusals += 1
                place.refused.add(number)
        place.pending = {*place.successors, *place.refused}
        place.pending_here = {*place.refused, *(n for n, to in place.successors.items() if to == known_place)}
        return place

    def run(self, kinds: frozenset[str]) -> bool:
        """Make one pass with these kinds of commands. Returns False where it was given up."""
        self.kinds = kinds
        self.allowed = [
            [type(c).__name__ in kinds for c in self.states.commands(state)]
            for state in self.explorer.queue
        ]
        self._begin()
        while True:
            if self.tour.violations >= MAX_VIOLATIONS:
                self.tour.stopped = f"given up after {MAX_VIOLATIONS} steps that violate"
                return False
            if self.tour.commands > PATIENCE * (self.tour.transitions + self.tour.refusals + WALK):
                self.tour.stopped = "given up: the same commands lead here and there"
                return False
            number = self._next()
            if number is not None and len(self.runner.done) < WALK:
                self._follow_command(number)
                continue
            route = self._route() if len(self.runner.done) < WALK else None
            if route is None:
                if not self.runner.done:
                    return True
                self._begin()
                route = [] if self._next() is not None else self._route()
                if route is None:
                    return True
            for step in route:
                if not self._follow_command(step):
                    break

    def _begin(self) -> None:
        self.runner.begin()
        self.at = 0

    def _usable(self, at: int) -> Iterator[int]:
        """Return the commands not run yet that may be run here: first those that stay, then those that lead
        on."""
        place = self.places[at]
        allowed = self.allowed[at]
        for number in sorted(place.pending, key=lambda n: (n not in place.pending_here, n)):
            if allowed[number] and not self._is_left_out(place, number):
                yield number

    def _is_left_out(self, place: _Place, number: int) -> bool:
        """Return whether to leave out a command in a situation that mostly violates: one more says nothing
        new."""
        like = place.situations[number]
        return self.wrong[like] >= max(TRIES, self.right[like])

    def _next(self) -> int | None:
        """Return a command to run here: one that stays, else the first that leads to more to be run."""
        first_open = None
        for number in self._usable(self.at):
            to = self.places[self.at].successors.get(number, self.at)
            if to == self.at or self.places[to].pending:
                return number
            if first_open is None:
                first_open = number
        return first_open

    def _route(self) -> list[int] | None:
        """Return the shortest route to a state where something is left to be run: commands by number."""
        came: dict[int, tuple[int, int]] = {self.at: (-1, -1)}
        queue = deque([self.at])
        while queue:
            place = queue.popleft()
            if place != self.at and any(True for _ in self._usable(place)):
                steps = []
                while place != self.at:
                    place, number = came[place]
                    steps.append(number)
                return steps[::-1]
            for number, to in self.places[place].successors.items():
                usable = self.allowed[place][number] and not self._is_left_out(self.places[place], number)
                if to not in came and usable and not self._ends(place, number):
                    came[to] = (place, number)
                    queue.append(to)
        return None

    def _ends(self, place: int, number: int) -> bool:
        """Return a command after which a walk is over, as it may leave something behind."""
        return (
            bool(self.walk_ending_kinds)
            and type(self.states.commands(self.explorer.queue[place])[number]) in self.walk_ending_kinds
        )

    def _follow_command(self, number: int) -> bool:
        """Run a command where the system is. True: it is where the rules lead."""
        place = self.places[self.at]
        tour = self.tour
        current = self.at
        state = self.runner.lockstep.state
        listed = self.states.commands(self.explorer.queue[current])[number]
        command = relabel(listed, self.states.renaming(state), state)
        new = number in place.pending
        place.pending.discard(number)
        place.pending_here.discard(number)
        outcome = self.runner.do(command)
        if self.progress is not None:
            where = f"{tour.scope}: {tour.followed + tour.refused} of {tour.transitions + tour.refusals}"
            self.progress(where, tour.commands, len(self.runner.finder))
        kind = kind_name(type(listed))
        tally = self.right if self.runner.current_violation is None else self.wrong
        tally[place.situations[number]] += 1
        if self.runner.current_violation is not None:
            path = self.explorer.path(current, listed)
            mixes = not {type(c).__name__ for c in path} <= self.kinds
            before = self.runner.catch(None if mixes else path)
            tour.lost[kind, "violates the specification"] += new
            if not before:
                place.successors.pop(number, None)
            self.walk_ending_kinds |= before
            self._begin()
            return False
        followed = self._follow(place, number, new, kind, outcome)
        if type(listed) in self.walk_ending_kinds:
            self._begin()
            return False
        return followed

    def _follow(self, place: _Place, number: int, new: bool, kind: str, outcome: Outcome) -> bool:
        """Note where a command has led. True: where the rules lead."""
        tour = self.tour
        if number in place.refused:
            if new and isinstance(outcome, Refused):
                tour.refused += 1
            return True
        reached = self.states.of(self.runner.lockstep.state)
        now = self.explorer.seen.get(reached)
        due = place.successors.get(number)
        if now is not None and now == due:
            tour.followed += new
            self.at = now
            return True
        reason = "its choice leads elsewhere"
        if isinstance(outcome, Refused):
            reason = f"refused by policy: {outcome.reason.value}"
        tour.lost[kind, reason] += new
        if now is None:
            place.successors.pop(number, None)
            self._begin()
        else:
            place.successors[number] = self.at = now
        return False

    def finish(self) -> Tour:
        tour = self.runner.finish()
        for state, place in zip(self.explorer.queue, self.places):
            commands = self.states.commands(state) if place.pending else []
            for number in place.pending:
                kind = type(commands[number])
                offered = kind.__name__ in self.runner.system.capabilities.commands
                reason = tour.stopped or "nothing that it follows leads there"
                if self._is_left_out(place, number):
                    reason = "left out: steps of its situation violate"
                tour.lost[kind_name(kind), reason if offered else "it does not offer that"] += 1
        return tour


def live(
    system: System, scope: Scope, *, progress: Progress | None = None, found: Found | None = None
) -> Tour:
    """Explore a scope and run every transition of it on a system. An interrupt ends the walks.

    Raises UnusableImplementation where the system cannot be built with these sizes.
    """
    check_fits(system, scope.geometry)
    explorer = Explorer(scope, clauses=False)
    if explorer.run(progress=progress) == INTERRUPTED:
        raise KeyboardInterrupt
    tour = _TourRun(system, explorer, progress, found)
    try:
        for kinds in kinds_of(system):
            if not tour.run(kinds):
                break
    except KeyboardInterrupt:
        tour.tour.stopped = INTERRUPTED
        tour.runner.finder.give_up()
    return tour.finish()
