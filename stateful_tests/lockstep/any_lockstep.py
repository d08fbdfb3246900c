"""The common part of every run of a system, whether kvspec or the system picks its batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar

from impl.adapter import AnySystem, Capabilities, UnusableImplementation
from impl.process.failures import FIRST_VIEW, RESET, VIEW, SystemFailed, describe_error, failing_as
from impl.process.wire import checked_outcome
from reference.clauses import Clause
from reference.commands import Broken, Mode, Outcome, Refused
from reference.failures import Failure
from reference.system_kinds import AnyConfig
from stateful_tests.lockstep.run_moments import AnyFacts, AnyMoment, AnyStep
from stateful_tests.lockstep.check_results import Tally, tally_up
from stateful_tests.lockstep.run_results import Row, Violation, violation_of

Failures = list[tuple[Clause, Failure]]


class AnyLockstep(ABC):
    """One run of a system, from the empty state.

    facts: the system's, now.
    step: the last command with its clause inputs; None at the start, where the system did not run the
        command, and where it broke.
    violation: the first step that left the specification; no command may follow.
    first_violation: the violation before that one, in a run that went on past it to check one clause.
    tallies: counts of evaluations and situations, which runs may share.
    clause: checked even if the system is known to violate it.
    """

    system: AnySystem
    facts: AnyFacts
    step: AnyStep | None
    judge: ClassVar[str]  # who says what the outcome of a command is
    clauses: ClassVar[Mapping[str, Clause]]  # that judge a step

    def __init__(
        self,
        system: AnySystem,
        tallies: dict[str, Tally] | None,
        refusals: Counter[str] | None,
        clause: str | None,
    ) -> None:
        self.system = system
        self.steps = 0
        self.step = None
        self.violation: Violation | None = None
        self.first_violation: Violation | None = None
        self._tallies = tallies
        self._refusals = refusals
        self._reached: set[str] = set()  # clauses whose trigger has come up
        can = self._can = system.capabilities
        self.waived = frozenset(can.waived) | (frozenset(can.known) - {clause})
        # why there is no empty system, as the first command meets it
        self._unstarted: Broken | None = None

    @staticmethod
    @abstractmethod
    def unsupported(can: Capabilities, config: Any, commands: Sequence[Any]) -> str:
        """Say what a system of this kind lacks for a run with these sizes and commands, such as "has no
        SWA pool"; "" where it lacks nothing."""

    @staticmethod
    @abstractmethod
    def presets_for(can: Capabilities) -> tuple[str, ...]:
        """Return the names of the presets for a system of this kind."""

    @staticmethod
    def suitable_option(config: Any) -> str:
        """Return an option that names a system of this kind for these sizes."""
        del config
        return "--impl module:factory"

    @property
    @abstractmethod
    def config(self) -> tuple[AnyConfig, Mode]:
        """The configuration of the run and its mode, as its trace states them."""

    @abstractmethod
    def do(self, command: Any) -> Outcome:
        """Run one command; sets `violation` if it leaves the specification."""

    @abstractmethod
    def moment(self) -> AnyMoment:
        """Return the run as it is now, for a report."""

    @abstractmethod
    def row(self, command: Any, outcome: Outcome, before: Any) -> Row:
        """Return the changes of a command since the moment before it."""

    def in_words(self, outcome: Outcome) -> str:
        """Return an outcome as a trace states it: whether the command was done. A system that facts
        alone judge refuses for reasons of its own."""
        return type(outcome).__name__.lower()

    def _start(self, config: Any) -> None:
        """Reset the system; where that fails, the first command returns the error."""
        try:
            with failing_as(RESET):
                self.system.reset(config)
            with failing_as(FIRST_VIEW):
                self._read_facts()
        except SystemFailed as error:
            self._unstarted = Broken(str(error))

    @abstractmethod
    def _read_facts(self) -> None:
        """Read the system's facts."""

    def _begin(self) -> None:
        """Begin another command."""
        assert self.violation is None, "the run has ended with a violation"
        self.steps += 1
        self.step = None

    def _carry_out(self, command: Any) -> Outcome:
        """Return the system's outcome and read its facts; Broken where either fails."""
        try:
            outcome = self._unstarted or checked_outcome(self.system.apply(command))
            if not isinstance(outcome, Broken):
                with failing_as(VIEW):
                    self._read_facts()
        except UnusableImplementation:  # the adapter's own fault, or nothing that the system offers
            raise
        except (Exception, SystemExit) as error:
            outcome = Broken(describe_error(error))
        return outcome

    def _break(
        self,
        failure: Failure,
        step_after: Callable[[], AnyStep],
        broken_off: Callable[[Any, frozenset[str]], Failures],
    ) -> Violation:
        """Return the violation of a system that has failed. Facts that it still shows may name the
        cause."""
        before = self.facts
        if self._unstarted is None:
            with suppress(Exception, SystemExit):
                self._read_facts()
        step = step_after()
        failures = broken_off(step, self.waived) if self.facts != before else []
        if not failures:
            return Violation("BROKEN", self.steps - 1, failure)
        self.step = step
        return violation_of(failures, self.steps - 1).with_break(failure)

    def _judge(
        self, step: AnyStep, failures: Failures, clauses: Iterable[Clause], *, comparable: bool = True
    ) -> None:
        """Record the clauses that a step violates, and count those that it could have.

        comparable: its outcome is of the expected kind; otherwise no situation counts as reached.
        """
        if self._tallies is not None:
            tally_up(self._tallies, clauses, step, self._reached if comparable else None)
        if failures:
            self.violation = violation_of(failures, self.steps - 1)

    def _count(self, outcome: Outcome) -> Outcome:
        if self._refusals is not None and isinstance(outcome, Refused):
            self._refusals[outcome.reason.value] += 1
        return outcome
