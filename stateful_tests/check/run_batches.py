"""Batches of runs: which runs they are, of which system and configuration, and the results of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from impl.process.remote_system import LIMITS, Limits
from impl.system_spec import SystemSpec
from reference.commands import Mode, Outcome, Refused, kind_name
from reference.system_kinds import AnyConfig
from stateful_tests.check.check_plans import sizes_for
from stateful_tests.lockstep.check_results import Tally
from stateful_tests.lockstep.run_results import Trace, Violation


class Named(NamedTuple):
    """A system by name, as `system_names.driven_system` takes it: every process can make it for itself.

    also_checked: clauses that are checked although its release is known to violate them.
    """

    spec: SystemSpec
    device: str = "cpu"
    checkout: str | None = None
    limits: Limits = LIMITS
    in_process: bool = True
    also_checked: frozenset[str] = frozenset()


class Configuration(NamedTuple):
    """One machine on one preset in one mode.

    sizes: those of the preset, fitted to the system; None for the corpus, whose lines have their own.
    """

    machine: str
    preset: str
    mode: Mode
    sizes: AnyConfig | None = None

    @property
    def name(self) -> str:
        """Its name, such as "both page2"; the mode does not matter."""
        return f"{self.machine} {self.preset}"


def with_stated_sizes(machine: str, preset: str, mode: Mode) -> Configuration:
    """Return the configuration with the sizes that the preset states."""
    return Configuration(machine, preset, mode, sizes_for(machine, preset))


class RunBatch(NamedTuple):
    """A few runs of one configuration, or lines of the corpus, by their numbers."""

    config: Configuration
    examples: range


@dataclass(slots=True)
class DeclinedCommands:
    """Commands of a kind that a system refuses.

    since: commands before the first.
    runs: number of runs with one.
    """

    name: str
    since: int
    runs: set[int] = field(default_factory=set)


@dataclass(slots=True)
class BatchResult:
    """The results of a batch."""

    tallies: dict[str, Tally]
    #: for each its number of commands and the violation that ended it, if any, with its trace; then
    #: the one that came up when all was closed
    runs: list[tuple[int, list[tuple[Violation, Trace]]]] = field(default_factory=list)
    refusals: Counter[str] = field(default_factory=Counter)
    #: commands by kind
    kinds: Counter[str] = field(default_factory=Counter)
    #: without refused ones
    carried_out: Counter[str] = field(default_factory=Counter)
    #: kinds that the system, unlike the reference, refuses since it last carried one out
    declined: dict[str, DeclinedCommands] = field(default_factory=dict)
    #: kind -> the runs that had one, and whether a run carried one out
    runs_of: dict[str, dict[int, bool]] = field(default_factory=dict)
    situations: Counter[str] = field(default_factory=Counter)
    #: situation -> why its line could not be driven
    unfit: dict[str, str] = field(default_factory=dict)
    #: runs that never ended, because a request waits
    unanswered: int = 0
    seconds: float = 0.0

    def count(self, command: object, outcome: Outcome, declined: bool) -> None:
        """Count a command of the run that comes next in `runs`.

        declined: the system refused it, and the reference did not.
        """
        kind = type(command).__name__
        if not isinstance(outcome, Refused):
            self.carried_out[kind] += 1
            self.declined.pop(kind, None)
            self.runs_of.setdefault(kind, {})[len(self.runs)] = True
        elif declined:
            self.runs_of.setdefault(kind, {}).setdefault(len(self.runs), False)
            since = self.declined.setdefault(
                kind, DeclinedCommands(kind_name(type(command)), self.kinds.total())
            )
            since.runs.add(len(self.runs))
        self.kinds[kind] += 1


HANG = "hang:"  # begins the failure of a system that hangs
HANGS = 2  # after so many a batch ends, because each takes its time


def failure_text(violated: tuple[Violation, Trace]) -> str:
    """Return the failure of a system at a violation; "" where it did not fail."""
    violation, _ = violated
    return violation.failure_of("BROKEN").observed if "BROKEN" in violation.clauses else ""
