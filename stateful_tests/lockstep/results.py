"""A trace, its run on a system, and what it violates, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar, cast

from reference.clauses import Clause
from reference.commands import Account, Command, Mode, Outcome
from reference.failures import Failure
from reference.geometry import Geometry
from reference.kinds import AnyCommand, AnyConfig
from stateful_tests.lockstep.moments import AnyMoment

KEPT = 2000  # moments of a replayed trace: what its end is explained from
_Sizes = TypeVar("_Sizes", bound=AnyConfig)
_Moment = TypeVar("_Moment", bound=AnyMoment)


@dataclass(frozen=True, slots=True)
class Trace:
    """A sequence of commands with everything that is needed to repeat it.

    geometry: a Geometry, or the configuration of its kind of system, such as EngineConfig; `sizes` has its
        type. bug, clause: the named bug that the trace shows, and the clause that the bug violates.
    expected: outcome stated for a step (by index), where one is stated.
    """

    geometry: AnyConfig
    mode: Mode
    commands: tuple[AnyCommand, ...]
    origin: str = "hand-written"  # or generated, minimised, recorded
    bug: str | None = None
    clause: str | None = None
    story: str = ""
    expected: tuple[tuple[int, Outcome], ...] = ()

    def sizes(self, of: type[_Sizes]) -> _Sizes:
        """Its geometry, which is of this class: a reader of one kind of system asks for that."""
        assert isinstance(self.geometry, of)
        return self.geometry

    @property
    def of_rows(self) -> tuple[Command, ...]:
        """Its commands, where a system is given each batch: those that the reference model runs."""
        self.sizes(Geometry)
        return cast("tuple[Command, ...]", self.commands)


@dataclass(frozen=True, slots=True)
class Violation:
    """One step at which a system left the specification.

    clause: id of the headline (see by_cause in reference/clauses), or "BROKEN" where the system itself
        failed and no clause did. also: further clauses broken at the same step.
    failure: of that clause, with the places that it is about; others: of each of `also`.
    since: the first step after which this very check, had it run there, fails as well.
    first_violation: the one before, where this clause was checked alone past it.
    """

    clause: str
    step: int
    failure: Failure
    also: tuple[str, ...] = ()
    others: tuple[Failure, ...] = ()
    since: int | None = None
    first_violation: Violation | None = None

    @property
    def clauses(self) -> tuple[str, ...]:
        return (self.clause, *self.also)

    @property
    def failures(self) -> tuple[Failure, ...]:
        """One for each of `clauses`."""
        return (self.failure, *self.others)

    def failure_of(self, clause: str) -> Failure:
        """That of one of `clauses`."""
        return self.failures[self.clauses.index(clause)]

    @property
    def expected(self) -> str:
        return self.failure.expected

    @property
    def observed(self) -> str:
        return self.failure.observed

    def headed(self, clause: str) -> Violation:
        """The same, with one of `clauses` as the headline."""
        at = self.clauses.index(clause)
        (first, *also), (failure, *others) = (
            (each[at], *each[:at], *each[at + 1 :]) for each in (self.clauses, self.failures)
        )
        return replace(self, clause=first, failure=failure, also=tuple(also), others=tuple(others))

    def only(self, clause: str) -> Violation:
        """One of `clauses`, without what else came up at its step."""
        return replace(self.headed(clause), also=(), others=())

    def noted(self, note: str) -> Violation:
        """The same, with a note behind what was observed."""
        return replace(self, failure=replace(self.failure, observed=f"{self.observed} {note}"))

    def with_break(self, failure: Failure) -> Violation:
        """The same, found in what a system has left that broke: BROKEN comes last."""
        return replace(self, also=(*self.also, "BROKEN"), others=(*self.others, failure))

    @property
    def details(self) -> tuple[tuple[str, str], ...]:
        """Expected and observed of each of `also`."""
        return tuple((failure.expected, failure.observed) for failure in self.others)


def violation_of(failures: Sequence[tuple[Clause, Failure]], index: int) -> Violation:
    """The first clause that fails at a step, and what else does."""
    first, *more = [failure for _, failure in failures]
    clause, *also = [clause.id for clause, _ in failures]
    return Violation(clause, index, first, tuple(also), tuple(more))


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a replayed trace: the command and what changed, ready to print.

    cursors: (holder, "kv_committed_len", before, after) for cursors that changed; reference side.
    freed: (holder, pool, first position, end position) in tokens, page-aligned; reference side.
    accounts: what a memory check counts; reference side.
    tree: what changed in the radix tree, a sentence each; reference side. Of an engine that schedules by
    itself: what
        it ran, gave out and changed.
    """

    command: AnyCommand
    outcome: Outcome
    cursors: tuple[tuple[str, str, int, int], ...] = ()
    freed: tuple[tuple[str, str, int, int], ...] = ()
    accounts: tuple[Account, ...] = ()
    tree: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Run:
    """A trace replayed on a system: its rows, up to and including the violation if there is one.

    history: the start, then the moment after each row; of long runs the end alone. `moments` has their type.
    waived: clauses that were not checked. called: what each command calls in files of the system,
    "FILE: FUNCTION, ..." each.
    """

    trace: Trace
    system: str
    rows: tuple[Row, ...]
    violation: Violation | None
    history: tuple[AnyMoment, ...] = field(default=(), compare=False, repr=False)
    waived: frozenset[str] = frozenset()
    called: tuple[tuple[str, ...], ...] = field(default=(), compare=False)

    @property
    def first(self) -> int:
        """Index of the row that led to history[0]; -1 for the start."""
        return len(self.rows) - len(self.history)

    def moments(self, of: type[_Moment]) -> Sequence[_Moment]:
        """Its history, which is of this class: a reader of one kind of system asks for that."""
        assert all(isinstance(moment, of) for moment in self.history[-1:])
        return cast("tuple[_Moment, ...]", self.history)
