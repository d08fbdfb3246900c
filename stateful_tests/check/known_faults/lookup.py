"""Look-up of what is NEW against a base: whether a release of the engine shows it, as a known fault or not.

The smallest trace of a finding is replayed on the releases that are driven in the same ways, the nearest
first, up to the first that shows a known fault, or until the time for it is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import NamedTuple

from impl.adapter import AnySystem, UnusableImplementation
from impl.engines import driven_releases
from impl.loading.nearest import release_lines
from impl.process.remote_system import LIMITS, Limits
from impl.system_spec import ENGINES, SystemSpec, release_name, system_spec
from stateful_tests.check.trees.base_selection import Base, BaseKind, lies_between, lines_of
from stateful_tests.check.trees.changed_functions import Changes
from stateful_tests.check.executors import SERIAL, Executor
from stateful_tests.check.known_faults.explanation import known_fault
from stateful_tests.check.known_faults.masks import masks_of_violation, masks, release_of
from stateful_tests.lockstep import system_names
from stateful_tests.lockstep.known_faults import KnownFault, known_faults
from stateful_tests.lockstep.replays import replay
from stateful_tests.lockstep.check_results import Finding, LookedUp
from stateful_tests.lockstep.run_results import Trace

MOST_TRACES = 6  # in a check, of which no release shows a known fault
_AT_A_TIME = 4  # releases, before it is seen what they have shown
_FEW_LINES = 20  # by which a tree differs from a base that is driven alike
MOST_S = 90  # seconds in which a check looks traces up


class Shows(StrEnum):
    """The ways in which a release may behave in a trace."""

    CONFORMS = "conforms"
    FAULT = "known fault"
    CLAUSE = "the clause"  # and no known fault explains it
    OTHER = "another clause"
    UNDRIVEN = "undriven"


class SeenOnRelease(NamedTuple):
    """The behaviour of a release in a trace.

    fault: the id of a known fault, with FAULT.
    """

    release: str
    what: Shows
    fault: str = ""


@dataclass(slots=True)
class Lookup:
    """Looks up traces that are new against a base."""

    base: Base
    system: AnySystem
    #: replays them on several releases at once
    executor: Executor = SERIAL
    limits: Limits = LIMITS
    #: called with a message before releases are replayed, which takes a while
    say: Callable[[str], None] = lambda _: None
    #: functions that changed in the tree, if its history tells
    changed: Changes | None = None
    _shown_by_trace: dict[Trace, list[SeenOnRelease]] = field(default_factory=dict)
    _releases_left_out: dict[Trace, int] = field(default_factory=dict)  # releases for which there was no time
    _shared: dict[Trace, bool] = field(default_factory=dict)  # the base has the fault that it shows
    _seconds: float = 0.0

    @property
    def may_excuse(self) -> bool:
        """Whether a known fault of another release may be the tree's as well, and no finding. A base
        from the tree's history, and one that the user has named, has the fix."""
        return self.base.kind is BaseKind.RELEASE

    def look_up(self, findings: Sequence[Finding]) -> list[Finding]:
        """Return the findings; new ones with the observations on the releases."""
        new = [finding.run.trace for finding in findings if not (finding.old or finding.flaky)]
        self._replay(new)
        told = []
        for finding in findings:
            if finding.run.trace in self._shown_by_trace and not finding.old:
                looked_up = self._observations(finding.run.trace)
                looked_up = looked_up._replace(
                    changed=self._changed_cause(finding), near_base=self._is_base_near
                )
                finding = replace(finding, looked_up=looked_up)
            told.append(finding)
        return told

    @property
    def _is_base_near(self) -> bool:
        """Whether the base is the tree but for a few lines: then the adapter drives both alike."""
        lines = self.base.lines
        return self.base.kind is BaseKind.HISTORY or (lines is not None and lines <= _FEW_LINES)

    def note_interrupt(self, findings: Sequence[Finding]) -> list[Finding]:
        """Return the findings of an interrupted check; new ones say that no release was replayed."""
        left = LookedUp(left=len(self._releases()))
        told = []
        for finding in findings:
            trace = finding.run.trace
            if left.left and not (finding.old or finding.flaky):
                observations = self._observations(trace) if self._shown_by_trace.get(trace) else left
                told.append(replace(finding, looked_up=observations))
            else:
                told.append(finding)
        return told

    def _releases(self) -> list[str]:
        """Return the releases to look traces up in, the nearest first; none for a tree of no release."""
        spec = system_spec(self.system)
        release = release_of(self.system)
        if spec.engine not in ENGINES or not release:
            return []
        own = {self.system.name, self.base.name}
        return [n for n in nearest_first(spec.engine, release, spec.ways) if n not in own]

    def _changed_cause(self, finding: Finding) -> str:
        """Return the changed function that runs in the command with which a trace fails: the last that
        is called in the file in which it fails, or else in any."""
        return "" if self.changed is None else _changed_cause(finding, self.changed)

    def known_elsewhere(self, traces: Mapping[str, Trace]) -> set[str]:
        """Return the names of the traces that show a known fault of the base, or of a release such that
        the tree lies between it and the base."""
        self._replay([*traces.values()])
        observations = {
            name: self._observations(trace)
            for name, trace in traces.items()
            if self._shown_by_trace.get(trace)
        }
        return {name for name, each in observations.items() if each.between or each.shared}

    def _replay(self, traces: Sequence[Trace]) -> None:
        """Look traces up. Those on which a release shows a known fault make room for others: a tree
        between two releases may show many clauses of one fault."""
        left = [*dict.fromkeys(traces)]
        while left := [trace for trace in left if trace not in self._shown_by_trace]:
            unknown = [trace for trace, shown in self._shown_by_trace.items() if not _fault_shown(shown)]
            wanted = left[: max(0, MOST_TRACES - len(unknown))]
            if not wanted or not self._replay_all(wanted):
                return

    def _replay_all(self, wanted: Sequence[Trace]) -> bool:
        """Replay traces on the releases, the nearest first, until each has shown a known fault. False where
        the tree is of no release."""
        if not (names := self._releases()):
            return False
        self._shown_by_trace |= {trace: [] for trace in wanted}
        several = "s" if len(wanted) > 1 else ""
        engine = system_spec(self.system).engine
        self.say(f"looks {len(wanted)} trace{several} up in {len(names)} releases of {engine}")
        for index in range(0, len(names), _AT_A_TIME):
            unknown = [trace for trace in wanted if not _fault_shown(self._shown_by_trace[trace])]
            if not unknown:
                break
            if index and self._seconds >= MOST_S:
                self._releases_left_out |= dict.fromkeys(unknown, len(names) - index)
                break
            began = time.monotonic()
            replayed = self.executor.map(
                partial(behaviours_by_name, unknown, self.limits), names[index : index + _AT_A_TIME]
            )
            with closing(replayed) as shown:
                for of_release in shown:
                    for trace, seen in zip(unknown, of_release, strict=True):
                        self._shown_by_trace[trace].append(seen)
            self._seconds += time.monotonic() - began
        return True

    def _observations(self, trace: Trace) -> LookedUp:
        """Return the observations of a trace on the releases, the nearest first."""
        shown = self._shown_by_trace[trace]
        told = LookedUp(
            conform=sum(behaviour.what is Shows.CONFORMS for behaviour in shown),
            violate=tuple(behaviour.release for behaviour in shown if behaviour.what is Shows.CLAUSE),
            driven=sum(behaviour.what is not Shows.UNDRIVEN for behaviour in shown),
            left=self._releases_left_out.get(trace, 0),
        )
        faulty = next((behaviour for behaviour in shown if behaviour.what is Shows.FAULT), None)
        if faulty is None:
            return told._replace(alike=self._fault_of_tree_and_base(trace))
        fault = known_faults()[faulty.fault]
        engine = system_spec(self.system).engine
        having = [version for version in driven_releases(engine, ()) if fault.is_in(version)]
        return told._replace(
            fault=fault.id,
            first=having[0] if having else fault.first,
            last=having[-1] if having else fault.first,
            fixed=fault.fixed or "",
            seen_in=faulty.release,
            older=self.base.kind is not BaseKind.HISTORY and fault.is_in(release_of(self.system)),
            between=self.may_excuse and self._lies_between(SystemSpec.parse(faulty.release)),
            shared=self._is_shared(trace, fault),
        )

    def _is_shared(self, trace: Trace, fault: KnownFault) -> bool:
        """Return whether tree and base share a known fault: the tree shows it in this trace, and the
        base in the fault's own. The two may evict or admit differently."""
        if trace not in self._shared:
            self._shared[trace] = self._fault_of_tree_and_base(trace) == fault.id
        return self._shared[trace]

    def _fault_of_tree_and_base(self, trace: Trace) -> str:
        """Return the known fault that explains what the tree does in a trace, and that the base has, with the
        same text if both break; "" for none."""
        run = replay(self.system, trace)
        fault = known_fault(self.system, run)
        if fault is None or run.violation is None:
            return ""
        of_base = [*masks(self.base.system, clause=trace.clause)]
        held = masks_of_violation(of_base, run.violation, run.violation.clause)
        return fault.id if any(mask.fault == fault for mask in held) else ""

    def _lies_between(self, faulty: SystemSpec) -> bool:
        """Return whether the tree lies between its base and a release that shows a known fault."""
        tree = lines_of(self.system)
        before = lines_of(self.base.system)
        if tree is None or before is None or faulty.version is None:
            return False
        return lies_between(tree, release_lines(faulty.engine, faulty.version), before)


def name_causes(findings: Sequence[Finding], differing: Changes) -> list[Finding]:
    """Return the findings, each with the function that differs from the base in the file in which it fails.

    differing: functions that differ from a release, which a tree may leave in many places: other files say
        nothing.
    """
    named = []
    for finding in findings:
        looked_up = finding.looked_up
        if (
            looked_up is not None
            and not looked_up.changed
            and (cause := _changed_cause(finding, differing, near=True))
        ):
            finding = replace(finding, looked_up=looked_up._replace(changed=cause))
        named.append(finding)
    return named


def _changed_cause(finding: Finding, changed: Changes, near: bool = False) -> str:
    """Return the changed function that runs in the failing command, "" for none.

    near: only one of the file in which it fails; else one of that file goes before others.
    """
    violation = finding.run.violation
    called = finding.run.called
    if violation is None or violation.step >= len(called):
        return ""
    frame = violation.failure.observed.rpartition(" at ")[2].partition(":")[0]
    every = changed.callers([called[violation.step]])
    running = [function for function in every if function.file == frame or not near]
    if not running:
        return ""
    return str(max(reversed(running), key=lambda function: function.file == frame))


def _fault_shown(seen: Sequence[SeenOnRelease]) -> bool:
    """Return whether a release has shown a known fault."""
    return any(finding.fault for finding in seen)


def nearest_first(engine: str, release: str, ways: Sequence[str]) -> list[str]:
    """Return the names of the releases that are driven in these ways, those next to `release` first."""
    versions = list(driven_releases(engine, ways))
    release_index = versions.index(release) if release in versions else len(versions) - 1
    order = sorted(versions, key=lambda version: abs(versions.index(version) - release_index))
    return [release_name(engine, version, ways) for version in order]


def behaviours_by_name(traces: Sequence[Trace], limits: Limits, name: str) -> list[SeenOnRelease]:
    """Return the behaviour of a release, by name, in each trace."""
    try:
        system = system_names.resolve(name, limits=limits)
    except UnusableImplementation:  # such as a wheel that cannot be fetched
        return [SeenOnRelease(name, Shows.UNDRIVEN)] * len(traces)
    try:
        return [behaviour_on(system, trace) for trace in traces]
    finally:
        system.close()


def behaviour_on(system: AnySystem, trace: Trace) -> SeenOnRelease:
    """Return the behaviour of a system in a trace that violates `trace.clause` elsewhere."""
    clause = trace.clause or ""
    nothing = SeenOnRelease(system.name, Shows.UNDRIVEN)
    try:
        run = replay(system, trace)
        if run.violation is None:
            return nothing._replace(what=Shows.CONFORMS)
        if clause not in run.violation.clauses:
            return nothing._replace(what=Shows.OTHER)
        headed = (
            run.violation.with_headline(clause),
            run.violation,
        )  # what comes with a known fault is a part of it
        faults = (known_fault(system, replace(run, violation=violation)) for violation in headed)
        fault = next(filter(None, faults), None)
    except UnusableImplementation:
        return nothing
    if fault is None:
        return nothing._replace(what=Shows.CLAUSE)
    return nothing._replace(what=Shows.FAULT, fault=fault.id)
