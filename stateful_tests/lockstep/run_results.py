"""A trace, its run on a system, and what it violates, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar, cast

from impl.process.system_functions import SystemFunction
from reference.clauses import Clause
from reference.commands import Account, Command, Mode, Outcome
from reference.failures import Failure
from reference.geometry import Geometry
from reference.system_kinds import AnyCommand, AnyConfig
from stateful_tests.lockstep.run_moments import AnyMoment

HISTORY_LIMIT = 2000  # moments that a Run keeps: the last ones, which explain its end
_Sizes = TypeVar("_Sizes", bound=AnyConfig)
_Moment = TypeVar("_Moment", bound=AnyMoment)


@dataclass(frozen=True, slots=True)
class Trace:
    """A sequence of commands with everything that is needed to repeat it."""

    #: a Geometry, or the configuration of its kind of system, such as EngineConfig; `sizes` has its
    #: type
    geometry: AnyConfig
    mode: Mode
    commands: tuple[AnyCommand, ...]
    origin: str = "hand-written"  # or generated, minimised, recorded
    #: the named bug that the trace shows, and the clause that the bug violates
    bug: str | None = None
    clause: str | None = None
    story: str = ""
    #: stated outcome of a step (by index), where one is stated
    expected: tuple[tuple[int, Outcome], ...] = ()

    def sizes(self, kind: type[_Sizes]) -> _Sizes:
        """Return the geometry, typed as `kind`. Raises AssertionError for another kind of system."""
        assert isinstance(self.geometry, kind)
        return self.geometry

    @property
    def row_commands(self) -> tuple[Command, ...]:
        """The commands of a system that is given each batch: those that the reference model runs."""
        self.sizes(Geometry)
        return cast("tuple[Command, ...]", self.commands)


@dataclass(frozen=True, slots=True)
class Violation:
    """One step at which a system left the specification.

    clause: id of the headline (see by_cause in reference/clauses), or "BROKEN" where the system itself failed
        and no clause did.
    also: further clauses broken at the same step.
    failure: of that clause, with the places that it is about.
    others: of each of `also`.
    since: index of the first step after which the failing command would have failed with this clause.
    first_violation: the first of the run, which went on past it to check only this clause.
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
        """The failures, one for each of `clauses`."""
        return (self.failure, *self.others)

    def failure_of(self, clause: str) -> Failure:
        """Return the failure of `clause`, one of `clauses`."""
        return self.failures[self.clauses.index(clause)]

    @property
    def expected(self) -> str:
        return self.failure.expected

    @property
    def observed(self) -> str:
        return self.failure.observed

    def with_headline(self, clause: str) -> Violation:
        """Return this violation with one of `clauses` as the headline."""
        index = self.clauses.index(clause)
        rest = [other for other in range(len(self.clauses)) if other != index]
        return replace(
            self,
            clause=clause,
            failure=self.failures[index],
            also=tuple(self.clauses[other] for other in rest),
            others=tuple(self.failures[other] for other in rest),
        )

    def only(self, clause: str) -> Violation:
        """Return this violation as one of only `clauses`."""
        return replace(self.with_headline(clause), also=(), others=())

    def with_note(self, note: str) -> Violation:
        """Return this violation with a note behind what was observed."""
        return replace(self, failure=replace(self.failure, observed=f"{self.observed} {note}"))

    def with_break(self, failure: Failure) -> Violation:
        """Return this violation with BROKEN added last: the system broke, and left the state that
        violates it."""
        return replace(self, also=(*self.also, "BROKEN"), others=(*self.others, failure))

    @property
    def details(self) -> tuple[tuple[str, str], ...]:
        """Expected and observed of each of `also`."""
        return tuple((failure.expected, failure.observed) for failure in self.others)


def violation_of(failures: Sequence[tuple[Clause, Failure]], index: int) -> Violation:
    """Return the violation of a step: the first clause that fails, and the others."""
    headline, *more = [failure for _, failure in failures]
    clause, *also = [clause.id for clause, _ in failures]
    return Violation(clause, index, headline, tuple(also), tuple(more))


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a replayed trace: the command and its changes, ready to print.

    cursors: (holder, "kv_committed_len", before, after) for cursors that changed; reference side.
    freed: (holder, pool, first position, end position) in tokens, page-aligned; reference side.
    accounts: accounts of a memory check; reference side.
    tree: a sentence for each change in the radix tree (reference side), or of an engine that schedules
        by itself.
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

    history: the start, then the moment after each row; of long runs only the end. `moments` has their
        type.
    waived: clauses that were not checked.
    called: the functions of the system that each command calls.
    """

    trace: Trace
    system: str
    rows: tuple[Row, ...]
    violation: Violation | None
    history: tuple[AnyMoment, ...] = field(default=(), compare=False, repr=False)
    waived: frozenset[str] = frozenset()
    called: tuple[tuple[SystemFunction, ...], ...] = field(default=(), compare=False)

    @property
    def history_start(self) -> int:
        """Index of the row that led to history[0]; -1 for the start."""
        return len(self.rows) - len(self.history)

    def moments(self, kind: type[_Moment]) -> Sequence[_Moment]:
        """Return the history, typed as `kind`. Raises AssertionError for another kind of system."""
        assert all(isinstance(moment, kind) for moment in self.history[-1:])
        return cast("tuple[_Moment, ...]", self.history)
