"""Known faults as masks: the faults that a tree still has, and the violations that they explain.

A mask holds while a trace of its fault fails on the tree. The report names a change that fixes one path of a
fault but not another; a trace that needs two faults is no evidence for that.
With a base, a known fault explains a violation of its clause unless the trace is a witness (see Standing).
Without a base, and for an engine that schedules by itself, it explains the violation if the run conforms
without one of the things that the fault's own trace needs (see causes.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from impl.adapter import AnySystem, Misfit, UnusableImplementation
from impl.process.failures import kind_of_failure
from impl.process.remote_system import DoesNotStart
from impl.system_spec import system_spec
from reference.commands import Reason, Refused
from reference.geometry import Geometry
from reference.system_kinds import kind_of_config
from stateful_tests.check.run_driver import check_also
from stateful_tests.check.known_faults.causes import Needs, needs
from stateful_tests.lockstep.known_faults import FOLDER, KnownFault, of_system, ways_of
from stateful_tests.lockstep.replays import replay
from stateful_tests.lockstep.run_results import Run, Trace, Violation
from stateful_tests.traces.trace_files import load


@dataclass(frozen=True, slots=True)
class Mask:
    """A known fault on a tree."""

    fault: KnownFault
    #: its traces that fail on the tree, by their own or another clause of the fault, each with its
    #: needs
    there: tuple[tuple[Trace, Needs], ...]
    #: files of traces that conform on the tree and fail on the base
    fixed: tuple[str, ...] = ()
    #: clauses that the tree violates in them, with those that the fault is not known by
    violated: frozenset[str] = frozenset()
    #: texts of the failures by which the tree breaks in them (see how_it_breaks)
    breaks: frozenset[str] = frozenset()
    #: other behaviour of the tree in its traces, in words
    instead: tuple[str, ...] = ()
    #: why one of its traces could not be replayed, "" if all could
    unplayed: str = ""
    #: the base does not show it either, for example because the base is older than the fault
    absent_from_base: bool = False
    #: its traces are of other ways than that of the tree, such as `+overlap`
    otherwise: bool = False

    @property
    def state(self) -> str:
        """The state of the fault on the tree, in words."""
        if self.fixed and self.there:
            fixed = [Path(name).stem for name in self.fixed]
            conform = "conforms" if len(fixed) == 1 else "conform"
            violated = ", ".join(dict.fromkeys(trace.clause or "" for trace, _ in self.there))
            return (
                f"fixed in part: {', '.join(fixed)} {conform}, and another trace violates {violated}"
            )
        if self.there:
            return "still there"
        if self.unplayed:
            return f"could not be replayed on this tree ({self.unplayed})"
        if self.instead:
            return f"on this tree its trace {' and '.join(self.instead)} instead"
        if self.elsewhere:
            return "not shown by its traces, which are of another way to run"
        if self.absent_from_base:
            return "not there on this tree, nor on its base"
        return "not there any more on this tree"

    @property
    def elsewhere(self) -> bool:
        """Whether its traces are of other ways, and so no evidence about this tree."""
        return self.otherwise and not (self.there or self.unplayed or self.instead)

    @property
    def holds(self) -> bool:
        return bool(self.there)

    @property
    def in_part(self) -> bool:
        """Whether the tree has the fault on only some of its paths."""
        return self.holds and bool(self.fixed)

    @property
    def gone(self) -> bool:
        """Whether the tree no longer has the fault, or no longer on all of its paths."""
        return bool(self.fixed) or not (self.there or self.unplayed)

    @property
    def line(self) -> str:
        """The fault as a line of text, such as "known: split-leaf (TREE-4), still there: A leaf that is
        split ..."."""
        says = self.fault.says.partition(". ")[0].rstrip(".")
        return f"known: {self.fault.id} ({', '.join(self.fault.clauses)}), {self.state}: {says}"

    def traces_of(self, clause: str) -> Sequence[tuple[Trace, Needs]]:
        """Return its traces of a clause, each with its needs, or all its traces if none is of that clause."""
        return [each for each in self.there if each[0].clause == clause] or self.there

    def needs_of_traces(self, clause: str) -> list[Needs]:
        """Return the needs of its traces of a clause (see `traces_of`)."""
        return [needed for _, needed in self.traces_of(clause)]


def masks(system: AnySystem, base: AnySystem | None = None, clause: str | None = None) -> Iterator[Mask]:
    """Yield the known faults of the release that a system is, or was taken for, with the results of their
    traces on the system.

    clause: only faults with this clause. Needs are omitted with a base, which decides about violations
    then.

    Raises DoesNotStart if the system does not load.
    """
    spec = system_spec(system)
    release = release_of(system)
    if not release:
        return
    for fault in of_system(spec.engine, release, spec.ways):
        if clause not in (None, *fault.clauses):
            continue
        loaded = {file: load(FOLDER / file) for file in fault.traces}
        sizes = [t.sizes(Geometry) for t in loaded.values() if kind_of_config(t.geometry).modelled]
        if sizes and not any(map(system.capabilities.keeps_states, sizes)):
            continue  # its traces need recurrent states, which the release lacks in this way
        masking = _Masking(fault, system, base)
        for file, trace in loaded.items():
            shown = fault.clause_shown(trace.clause or "", release)
            if shown is not None:
                masking.replay(file, replace(trace, clause=shown), shown)
        yield masking.mask(otherwise=all({*ways_of(file)} != {*spec.ways} for file in fault.traces))


@dataclass(slots=True)
class _Masking:
    """Replays the traces of a fault on a system, one after the other; see Mask."""

    fault: KnownFault
    system: AnySystem
    base: AnySystem | None
    there: list[tuple[Trace, Needs]] = field(default_factory=list)
    fixed: list[str] = field(default_factory=list)
    violated: set[str] = field(default_factory=set)
    breaks: set[str] = field(default_factory=set)
    instead: dict[str, None] = field(default_factory=dict)
    unplayed: str = ""
    on_base: bool = False

    def replay(self, file: str, trace: Trace, shown: str) -> None:
        """Replay a trace of the fault. Raises DoesNotStart and Misfit.

        shown: the clause by which the release shows the fault.
        """
        try:
            seen = replay(self.system, trace).violation
        except (DoesNotStart, Misfit):
            raise
        except UnusableImplementation as error:
            self.unplayed = str(error)
            return
        by = _showing_clause(self.fault, shown, seen)
        before = _violation_of(self.base, trace) if self.base is not None and by != shown else None
        self.on_base |= before is not None and shown in before.clauses
        if _is_fixed(before, seen, shown):
            self.fixed += [file] if file not in self.fault.with_another else []
        elif seen is not None:
            self._note_violation(trace, seen, by, shown)

    def _note_violation(self, trace: Trace, seen: Violation, by: str | None, shown: str) -> None:
        """Record a violation.

        by: the clause by which it shows the fault, None if it does not show the fault.
        shown: the clause by which the release shows the fault.
        """
        if by == "BROKEN" and _breaks_otherwise(self.base, trace, seen):
            self.instead["breaks the system otherwise"] = None
        elif by is not None:
            judged = self.base is not None and not self.system.capabilities.system_kind.schedules
            needed = () if judged else self._trace_needs(trace, by, shown)
            self.there.append((replace(trace, clause=by), needed))
            self.violated.update(seen.clauses)
            if by == "BROKEN":
                self.breaks.add(how_it_breaks(seen.observed))
        else:
            instead = {"BROKEN": "breaks the system", "TRACE": "comes to other outcomes"}
            self.instead[instead.get(seen.clause, f"violates {seen.clause}")] = None

    def _trace_needs(self, trace: Trace, by: str, shown: str) -> Needs:
        """Return the needs of a trace on the base if the base shows the fault, otherwise on the tree. A
        violation of the tree without the base's needs may be another fault, which is the tree's own."""
        before = None if self.base is None else _violation_of(self.base, trace)
        for clause in (by, shown):
            if self.base is not None and before is not None and clause in before.clauses:
                return needs(self.base, replace(trace, clause=clause), clause)
        return needs(self.system, replace(trace, clause=by), by)

    def mask(self, *, otherwise: bool) -> Mask:
        """Return the fault on the system."""
        return Mask(
            fault=self.fault,
            there=tuple(self.there),
            fixed=tuple(self.fixed),
            violated=frozenset(self.violated),
            breaks=frozenset(self.breaks),
            instead=tuple(self.instead),
            unplayed=self.unplayed,
            absent_from_base=self.base is not None and not self.on_base,
            otherwise=otherwise,
        )


def release_of(system: AnySystem) -> str:
    """Return the release that a system is. For a checkout, or for a version that no table has, return the
    release that it was taken for; "" for no release."""
    taken = getattr(system, "release", None)  # the built-in implementation has a method of this name
    return taken if isinstance(taken, str) else system_spec(system).version or ""


def also_checked(system: AnySystem, masks: Sequence[Mask]) -> frozenset[str]:
    """Return the clauses that a check skips because of faults which the tree no longer has, and enable
    their checks."""
    gone = [mask.fault for mask in masks if mask.fault.passed_over and mask.gone]
    clauses = frozenset(clause for fault in gone for clause in fault.clauses)
    check_also(system, clauses)
    return clauses


def _showing_clause(fault: KnownFault, clause: str, seen: Violation | None) -> str | None:
    """Return the clause by which a trace shows its fault: `clause`, or in another way another clause of the
    fault; None if it does not show the fault."""
    if seen is None:
        return None
    if clause in seen.clauses:
        return clause
    return seen.clause if seen.clause in fault.clauses else None


def _is_fixed(was: Violation | None, now: Violation | None, clause: str) -> bool:
    """Return whether a tree fixes the violation of its base: it conforms, or shows only the violation that
    the base shows first."""
    if was is None or clause not in was.clauses:
        return False
    return now is None or (
        was.first_violation is not None and now.clause == was.first_violation.clause
    )


def _violation_of(system: AnySystem, trace: Trace) -> Violation | None:
    try:
        return replay(system, trace).violation
    except UnusableImplementation:
        return None


def _breaks_otherwise(base: AnySystem | None, trace: Trace, seen: Violation) -> bool:
    """Return whether a trace of a known failure fails on the base with another kind of exception."""
    known = None if base is None else _violation_of(base, trace)
    if known is None or known.clause != "BROKEN":
        return False
    return kind_of_failure(known.observed) != kind_of_failure(seen.observed)


def how_it_breaks(observed: str) -> str:
    """Return the common text of equal failures of a system, without line numbers and numbers of the run."""
    return re.sub(r"\b[A-Z]\d+\b|\d+", "N", observed.partition(" at ")[0])


def masks_of_violation(masks: Sequence[Mask], violation: Violation, clause: str) -> list[Mask]:
    """Return the known faults of the tree that may explain the violation of a clause."""
    held = [mask for mask in masks if mask.holds and clause in mask.fault.clauses]
    if clause != "BROKEN":
        return held
    how = how_it_breaks(violation.failure_of(clause).observed)
    return [mask for mask in held if how in mask.breaks]


class Standing(IntEnum):
    """The standing of a tree's violation beside a base.

    KNOWN: the base violates the clause, or the violation has no witness and a known fault shows in the trace.
    UNTOLD: it has no witness yet, and no known fault has its clause: the base violates other clauses at that
        step, or cannot be driven.
    NEW: it has a witness, a trace in which the tree violates the clause and the base, run up to that step,
        conforms and has refused no command that the tree executed. The base may violate clauses at that very
        step if the tree violates them too.
    """

    KNOWN = 0
    UNTOLD = 1
    NEW = 2


class Compared(NamedTuple):
    """A violation of one clause beside a base.

    under: the known faults that the violation is counted under if it has no witness in the end.
    why: why the trace is no witness.
    undriven: the trace is no witness because the base cannot be driven through it.
    """

    stands: Standing
    candidates: Sequence[Mask] = ()
    why: str = ""
    undriven: bool = False


def compare_with_base(
    base: AnySystem | None,
    masks: Sequence[Mask],
    trace: Trace,
    violation: Violation,
    clause: str,
    system: AnySystem | None = None,
) -> Compared:
    """Return the standing of a violation beside a base; without a base it is NEW.

    system: the system with the violation. A trace in which base and system differ earlier is no witness
    against a known fault.
    """
    if base is None:
        return Compared(Standing.NEW)
    candidates = masks_of_violation(masks, violation, clause)
    unseen = Compared(Standing.KNOWN if candidates else Standing.UNTOLD, candidates)
    commands = trace.commands[: violation.step + 1]
    try:
        run = replay(base, replace(trace, commands=commands, clause=clause))
    except UnusableImplementation as error:
        return unseen._replace(
            why=f"{base.name} cannot be driven through the trace: {error}", undriven=True
        )
    seen = run.violation
    if seen is None:
        if run.rows and run.rows[-1].outcome == Refused(Reason.UNFAITHFUL):
            no_step = f"{base.name} has come to a state in which no scheduler runs the last command"
            return unseen._replace(why=no_step)
        if candidates and system is not None and _outcomes_differ(system, run):
            return unseen
        return Compared(Standing.NEW)
    if clause in seen.clauses and fails_alike(seen, violation, clause):
        return Compared(Standing.KNOWN, candidates)
    first_violation = violation.first_violation or violation
    if candidates:
        return unseen
    shown = [mask for mask in masks if {*mask.fault.clauses} & {*seen.clauses}]
    reason = f"{base.name} violates {', '.join(seen.clauses)} in the trace as well"
    if seen.step == first_violation.step and {*seen.clauses} <= {*first_violation.clauses}:
        is_new = first_violation is violation and clause not in seen.clauses
        return Compared(Standing.NEW if is_new else Standing.UNTOLD, shown, reason)
    # The tree passes the step that the base violates, and cannot be compared from there on.
    return Compared(Standing.KNOWN if shown else Standing.UNTOLD, shown, reason)


def _refusals(run: Run) -> list[bool]:
    """Return whether each command before the last was refused."""
    return [isinstance(row.outcome, Refused) for row in run.rows[:-1]]


def _outcomes_differ(system: AnySystem, run: Run) -> bool:
    """Return whether the base has refused a command that the system executed. An engine that schedules by
    itself may differ."""
    if system.capabilities.system_kind.schedules:
        return False
    try:
        pairs = zip(_refusals(replay(system, run.trace)), _refusals(run))
    except UnusableImplementation:
        return False
    return any(was and not now for now, was in pairs)


def fails_alike(one: Violation, two: Violation, clause: str) -> bool:
    """Return whether two violations of a clause are alike. For BROKEN, the one clause of all failures,
    their texts decide."""
    first, second = (how_it_breaks(each.failure_of(clause).observed) for each in (one, two))
    return clause != "BROKEN" or first == second


def do_the_same(
    system: AnySystem, base: AnySystem | None, trace: Trace, violation: Violation
) -> bool:
    """Return whether an engine that schedules by itself and its base run, output and publish the same in
    each command of a trace, up to a violation. The violation then is not caused by another schedule.
    Stores to a host, and what the servers of a pair tell each other, may differ: too many stores and a
    message too few are faults only of the engine."""
    if base is None or not system.capabilities.system_kind.schedules:
        return False
    ends = replace(trace, commands=trace.commands[: violation.step + 1])
    try:
        return _schedule(replay(system, ends)) == _schedule(replay(base, ends))
    except UnusableImplementation:
        return False


_NO_SCHEDULE = re.compile(r"([PD]: )?(store|chunks|storage) |a message to |P gives back ")


def _schedule(run: Run) -> list[list[str]]:
    """Return what each command of a run has changed, without stores to a host, messages and what these
    free."""
    return [[line for line in row.tree if not _NO_SCHEDULE.match(line)] for row in run.rows]
