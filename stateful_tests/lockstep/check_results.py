"""The results of a check as data, the only input of the report, the JSON output and the tests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from reference.clauses import Clause
from reference.commands import Mode
from reference.failures import count_text
from stateful_tests.lockstep.exit_codes import Ending, ending
from stateful_tests.lockstep.run_results import Run

SHORTEST = 4  # mean commands of a run; runs that violations end earlier reach nothing else
FEW = 100  # commands; a check of chosen runs that executes fewer gives no verdict
OWN = ("reference", "torch")  # in other systems, policy decides which situations can be reached
_NAMED = 5  # most changed functions, or places, that a verdict names


class LookedUp(NamedTuple):
    """The replays of a finding's trace on the releases of an engine."""

    #: the known fault that a release shows, "" for none
    fault: str = ""
    #: the first and the last release with the fault
    first: str = ""
    last: str = ""
    #: the release that fixed the fault, "" for none
    fixed: str = ""
    #: the nearest release to the tree that shows the fault
    seen_in: str = ""
    #: the tree may be older than the fix: it is taken for a release with the fault, and its base is
    #: no commit before it
    older: bool = False
    #: the tree has a part of a release with the fault that the base lacks, and has the fault from
    #: it
    between: bool = False
    #: the base has the fault too, and conforms in this trace for another reason
    shared: bool = False
    #: number of releases that conform
    conform: int = 0
    #: releases that violate the clause without a known fault that explains it
    violate: tuple[str, ...] = ()
    #: number of releases that could be driven
    driven: int = 0
    #: number of releases that were not replayed for lack of time
    left: int = 0
    #: a function that changed in the tree and runs in the failing command
    changed: str = ""
    #: the base is the tree but for a few lines, and plays the trace to its end
    near_base: bool = False
    #: a known fault of tree and base that explains the violation on the tree, where no release shows one
    alike: str = ""

    def text(self, clause: str, observed: str) -> str:
        """Return the look-up in words.

        observed: the observed behaviour of the finding.
        """
        if self.fault:
            having = self.first if self.first == self.last else f"{self.first} to {self.last}"
            fixed = f"fixed in {self.fixed}" if self.fixed else f"in {having}"
            violates = f"{self.seen_in} violates it in this trace too (known: {self.fault}, {fixed})"
            return f"{violates}: {self._your_tree}"
        if self.left and not self.driven:
            return f"the check was interrupted before {self.left} releases could be replayed"
        later = f" ({self.left} more were not replayed for want of time)" if self.left else ""
        if not self.driven:
            return "no release can be driven through this trace"
        if self.violate:
            return f"{', '.join(self.violate)} violate it as well, and no known fault explains it"
        breaks = "breaks" if clause == "BROKEN" else "violates it"
        replayed = f"none of {self.driven} releases {breaks}{later}"
        if clause == "BROKEN" and self.conform == self.driven:
            _, _, frame = observed.rpartition(" at ")
            if self.changed:
                end = f" and at {frame}" if frame else ""
                return f"{replayed}. {self.changed} changed and runs in this command: look there first{end}."
            hint = f" Look at {frame}." if frame else ""
            if self.near_base:
                return f"first seen here: {replayed}, nor does the base.{hint}"
            return f"{replayed}: kvspec's adapter may be the cause.{hint}"
        if self.alike:
            return f"{replayed}; {self.alike}, which tree and base have, violates {clause} likewise"
        return f"first seen here: {replayed}"

    @property
    def _your_tree(self) -> str:
        """The meaning of the release's fault for the tree, in words. Only `between` and `shared` are
        observations of the tree: a new fault of the same function may violate the clause in the same
        trace."""
        if self.between:
            return "your tree lies between such a release and the base"
        if self.shared:
            return "the base has it too, and does something else in this trace"
        if self.older and self.fixed:
            return "your tree may be older than that fix, or this is a fault of its own"
        if self.fixed:
            return "your tree may have lost that fix, or this is a fault of its own"
        return "your tree may have what brought it, or this is a fault of its own"


@dataclass(frozen=True, slots=True)
class Finding:
    """A distinct violated clause with its smallest trace (run.violation names it)."""

    clause: str
    run: Run
    #: the modes in which the violation was reached
    modes: tuple[Mode, ...]
    #: number of violations before shrinking
    times: int
    #: time of the check until the first violation (s)
    found_after_s: float
    #: commands of the check until the first violation
    found_after_commands: int
    #: its number among the traces of its clause, from 1
    number: int = 1
    #: needs of earlier traces of its clause that this trace does not have
    without: tuple[str, ...] = ()
    #: the base shows it too, or violates another clause in all its traces
    old: bool = False
    #: why no trace shows it on the tree alone
    no_witness: str = ""
    #: no replay of its trace shows it again
    flaky: bool = False
    #: the replays of its trace on releases, None if it is not new
    looked_up: LookedUp | None = None

    @property
    def known_elsewhere(self) -> bool:
        """Whether it is a known fault of the base, or of a release that the tree has a part of."""
        return self.looked_up is not None and (self.looked_up.between or self.looked_up.shared)

    @property
    def name(self) -> str:
        return finding_name(self.clause, self.number)


def finding_name(clause: str, number: int) -> str:
    """Return the name of a trace of a clause. The first trace has the name of the clause."""
    return f"{clause} ({number})" if number > 1 else clause


@dataclass(slots=True)
class Tally:
    """Numbers of evaluations of a clause, and of runs in which its trigger was true."""

    evaluated: int = 0
    reached: int = 0


def tally_up(
    tallies: dict[str, Tally], clauses: Iterable[Clause], step: object, reached: set[str] | None
) -> None:
    """Count the checks of clauses after a step that the system can violate.

    reached: clauses with a trigger that was true before in this run; None if the step cannot reach any,
    because system and reference are not compared.
    """
    for clause in clauses:
        if (tally := tallies.get(clause.id)) is None:
            continue
        tally.evaluated += 1
        if reached is not None and clause.id not in reached and clause.trigger(step):
            tally.reached += 1
            reached.add(clause.id)


def add_tallies(totals: dict[str, Tally], more: dict[str, Tally]) -> None:
    """Add the counts in `more` to those in `totals`."""
    for clause, tally in more.items():
        total = totals.setdefault(clause, Tally())
        total.evaluated += tally.evaluated
        total.reached += tally.reached


@dataclass(slots=True)
class MachineResult:
    """One machine (or engine) of a check on one preset in one mode."""

    name: str
    preset: str
    mode: Mode
    examples: int = 0
    commands: int = 0
    #: duration of its runs (s)
    seconds: float = 0.0
    #: its own tallies, by clause
    tallies: dict[str, Tally] = field(default_factory=dict)
    #: clauses that were violated in its runs
    violated: set[str] = field(default_factory=set)
    #: the sizes of the preset, fitted to the system; None for the corpus
    sizes: Any = None


@dataclass(slots=True)
class CheckResult:
    """The results of a whole check."""

    system: str
    tier: str
    seed: int
    machines: list[MachineResult] = field(default_factory=list)
    tallies: dict[str, Tally] = field(default_factory=dict)
    #: number of times that each was reached
    refusals: dict[str, int] = field(default_factory=dict)
    situations: dict[str, int] = field(default_factory=dict)
    #: driven commands, refused ones included, by kind
    commands_by_kind: dict[str, int] = field(default_factory=dict)
    #: commands that were not refused, by kind
    carried_out: dict[str, int] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    #: known faults and clause -> number of violations that one of the faults explains
    masked: dict[tuple[tuple[str, ...], str], int] = field(default_factory=dict)
    #: clauses with a trigger that was never true
    unreached: tuple[str, ...] = ()
    #: clauses in `unreached` that the plan has to trigger
    untriggered: tuple[str, ...] = ()
    #: the time limit ended the check, which is no evidence about the system
    timed_out: bool = False
    #: the rest of the plan was skipped because nothing new was found for a while after a finding
    stopped: bool = False
    #: a signal ended the check
    interrupted: bool = False
    #: why the system could not be driven further after a finding
    broke_off: str = ""
    #: commands that the plan has the system execute; 0 for a plan of `planned` runs
    asked: int = 0
    #: runs of the plan; 0 for a plan of commands
    planned: int = 0
    #: commands that the system offers and never executed
    never_done: tuple[str, ...] = ()
    #: kind -> the command since which the system has refused everything that the rules would do
    declined: dict[str, int] = field(default_factory=dict)
    #: reached clauses that the `known` or `waived` of the system exclude, if these are the majority
    excused: tuple[str, ...] = ()
    #: situations that the corpus drives the system into
    required: tuple[str, ...] = ()
    #: situation -> why its line could not be driven
    unfit: dict[str, str] = field(default_factory=dict)
    #: part that runs on the base but not on the system -> why not
    left_out: dict[str, str] = field(default_factory=dict)
    #: sentences about rules that the adapter copies and that differ in the system
    doubts: tuple[str, ...] = ()
    #: changed functions that no run called
    uncalled: tuple[str, ...] = ()
    #: other way to run the system -> the result of its check
    ways: dict[str, str] = field(default_factory=dict)
    #: way in which changed functions run -> the command that drives it, or why it was not driven
    not_driven: dict[str, str] = field(default_factory=dict)
    #: number of runs that did not end because a request got no answer
    unanswered: int = 0
    #: duration (s)
    seconds: float = 0.0

    @property
    def commands(self) -> int:
        """The number of driven commands, refused ones included."""
        return sum(m.commands for m in self.machines)

    @property
    def examples(self) -> int:
        """The number of driven runs."""
        return sum(m.examples for m in self.machines)

    @property
    def executed_count(self) -> int:
        """The number of commands that were executed."""
        return sum(self.carried_out.values())

    @property
    def new(self) -> list[Finding]:
        """The findings that neither the base nor a release explains."""
        return [finding for finding in self.findings if not (finding.old or finding.known_elsewhere)]

    @property
    def known_elsewhere(self) -> list[Finding]:
        """The findings that are known faults of releases which the tree has a part of."""
        return [finding for finding in self.findings if finding.known_elsewhere and not finding.old]

    @property
    def exit_code(self) -> Ending:
        """The ending of the check. Findings that are not new do not count."""
        return ending(
            broke=any(finding.clause == "BROKEN" for finding in self.new),
            violated=bool(self.new),
            interrupted=self.interrupted,
            incomplete=bool(self.incomplete),
        )

    @property
    def so_far(self) -> str:
        """The executed part of the plan, in words."""
        if self.asked:
            return f"{self.executed_count:,} of {self.asked:,} commands"
        return f"{self.examples:,} of {self.planned:,} runs"

    @property
    def incomplete(self) -> list[str]:
        """The reasons why there is no full verdict, in words."""
        reasons = []
        if self.timed_out:
            reasons.append(f"the time limit came after {self.so_far}")
        elif self.executed_count < self.asked and not self.stopped and not self.interrupted:
            reasons.append(f"only {self.so_far} were carried out")
        elif self.executed_count < FEW:
            reasons.append(f"only {self.executed_count} commands were carried out")
        reasons += self._ended_early()
        since: dict[int, list[str]] = {}
        for kind, command in self.declined.items():
            since.setdefault(command, []).append(kind)
        for command, kinds in since.items():
            when = f"from command {command:,} on" if command else "every time"
            reasons.append(f"refused {when}: {', '.join(kinds)}")
        if self.never_done:
            reasons.append(f"never carried out: {', '.join(self.never_done)}")
        if self.excused:
            came_up = len(self.tallies) - len(self.unreached)
            reasons.append(
                f"known or waived are {len(self.excused)} of the {came_up} clauses that came up"
            )
        missed = len({*self.required} - self.situations.keys())
        if self.system in OWN and missed and not self.stopped:
            reasons.append(f"{missed} of {len(self.required)} situations were not met")
        if self.unanswered:
            runs = count_text(self.unanswered, "run")
            reasons.append(f"{runs} never came to an end: somebody who waits got no answer")
        if self.uncalled:
            more = f" and {len(self.uncalled) - _NAMED} more" if len(self.uncalled) > _NAMED else ""
            reasons.append(f"no run calls {', '.join(self.uncalled[:_NAMED])}{more}, which changed")
        for part, reason in self.left_out.items():
            reasons.append(f"left out: {part}: on the base and not here: {reason}")
        reasons += self.doubts
        if self.untriggered:
            reasons.append(f"never triggered {', '.join(self.untriggered)}")
        return reasons

    def _ended_early(self) -> list[str]:
        """Return the machines and presets with runs that known violations end early, in words."""
        early: dict[str, dict[str, None]] = {}
        for machine in self.machines:
            of_corpus = machine.sizes is None
            short = machine.commands < SHORTEST * machine.examples
            if machine.violated and short and not of_corpus:
                clauses = ", ".join(sorted(machine.violated))
                early.setdefault(clauses, {})[f"{machine.name} on {machine.preset}"] = None
        reasons = []
        for clauses, where in early.items():
            more = f" and {len(where) - _NAMED} more" if len(where) > _NAMED else ""
            places = ", ".join([*where][:_NAMED])
            reasons.append(
                f"runs end in the first {SHORTEST} commands, by {clauses}: {places}{more}"
            )
        return reasons
