"""The common part of every run of a system, whoever picks its batches."""

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

    facts: the system's, now. step: the last command with what clauses check of it; None at the start, where
    the system did not run the command, and where it broke. violation: the first step that left the
    specification; nothing may be done after it. first_violation: the one before, where one clause alone is
    checked past it. tallies (shared between runs) count evaluations and situations. clause: checked even if
    the system is known to violate it.
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
    def lacking(can: Capabilities, config: Any, commands: Sequence[Any]) -> str:
        """Say what a system of this kind lacks for a run with these sizes and commands, in words such as
        "has no SWA pool"; "" where it lacks nothing."""

    @staticmethod
    @abstractmethod
    def presets_for(can: Capabilities) -> tuple[str, ...]:
        """The presets that are meant for a system of this kind, by name."""

    @property
    @abstractmethod
    def config(self) -> tuple[AnyConfig, Mode]:
        """The configuration of the run and its mode, as its trace states them."""

    @abstractmethod
    def do(self, command: Any) -> Outcome:
        """Run one command; sets `violation` if it leaves the specification."""

    @abstractmethod
    def moment(self) -> AnyMoment:
        """The run as it is now, for a report."""

    @abstractmethod
    def row(self, command: Any, outcome: Outcome, before: Any) -> Row:
        """Return the changes of a command since the moment before it."""

    def in_words(self, outcome: Outcome) -> str:
        """An outcome, as far as a trace can state it. Here whether it was done: who is judged by facts alone
        refuses for reasons of its own."""
        return type(outcome).__name__.lower()

    def _start(self, config: Any) -> None:
        """Have the empty system; where there is none, the first command meets why."""
        try:
            with failing_as(RESET):
                self.system.reset(config)
            with failing_as(FIRST_VIEW):
                self._look()
        except SystemFailed as error:
            self._unstarted = Broken(str(error))

    @abstractmethod
    def _look(self) -> None:
        """Take the system's facts."""

    def _begin(self) -> None:
        """Another command."""
        assert self.violation is None, "the run has ended with a violation"
        self.steps += 1
        self.step = None

    def _carried_out(self, command: Any) -> Outcome:
        """The system's outcome, and its facts after it; Broken where it fails or cannot be looked at."""
        try:
            outcome = self._unstarted or checked_outcome(self.system.apply(command))
            if not isinstance(outcome, Broken):
                with failing_as(VIEW):
                    self._look()
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
        """The system has failed. What it has left in its pages, if it still shows them, says more."""
        before = self.facts
        if self._unstarted is None:
            with suppress(Exception, SystemExit):
                self._look()
        step = step_after()
        found = broken_off(step, self.waived) if self.facts != before else []
        if not found:
            return Violation("BROKEN", self.steps - 1, failure)
        self.step = step
        return violation_of(found, self.steps - 1).with_break(failure)

    def _judge(
        self, step: AnyStep, failures: Failures, clauses: Iterable[Clause], *, comparable: bool = True
    ) -> None:
        """Take over which clauses a step violates, and count those that could have been. comparable: its
        outcome is of the kind that was expected; else no situation counts as reached."""
        if self._tallies is not None:
            tally_up(self._tallies, clauses, step, self._reached if comparable else None)
        if failures:
            self.violation = violation_of(failures, self.steps - 1)

    def _count(self, outcome: Outcome) -> Outcome:
        if self._refusals is not None and isinstance(outcome, Refused):
            self._refusals[outcome.reason.value] += 1
        return outcome
