"""Findings: each clause that a system violates, with its smallest trace.

A violation that a known fault explains is only counted. With a base, a finding has the best standing of all
violations of its clause. A NEW finding has a witness, a trace on which the base conforms, and shrinking keeps
that.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from impl.adapter import AnySystem
from reference.commands import Mode
from stateful_tests.check.caught_violations import Caught, finding_of
from stateful_tests.check.finding_order import is_milder, report_order
from stateful_tests.check.known_faults.causes import has_none_of, needs
from stateful_tests.check.known_faults.explanation import (
    Explained, clauses_of, explaining_masks, needs_of, unexplained_needs,
)  # fmt: skip
from stateful_tests.check.known_faults.masks import (
    Mask, Standing, compare_with_base, do_the_same, masks_of_violation, how_it_breaks,
)  # fmt: skip
from stateful_tests.lockstep.check_results import Finding, finding_name
from stateful_tests.lockstep.replays import rejected_turns, replay
from stateful_tests.lockstep.run_results import Trace, Violation
from stateful_tests.shrink.minimise import Allowed, failing_prefix, minimise
from stateful_tests.shrink.shrink_passes import BUDGET

# Called with the current trace of each finding and, if there is a base, with their standings, both by name.
Found = Callable[[dict[str, Trace], dict[str, Standing]], None]

_SHORT = 8  # commands that fit on a screen; a longer trace is shrunk again from another violation
_RETRIES = 4  # such attempts for one clause
# Candidates for shrinking a clause whose violation already has a small trace of another clause.
_BESIDE_BUDGET = 200
MAX_TRACES_PER_CLAUSE = 3  # traces of one clause that have different causes
MAX_ALTERNATIVE_SEARCHES = 12  # violations of one clause that are searched for another cause
ALTERNATIVE_SHRINK_BUDGET = 300  # candidates for shrinking a trace of another cause


@dataclass(slots=True)
class Finder:
    """Collects violations and makes findings of them."""

    system: AnySystem
    #: the system before the change
    base: AnySystem | None = None
    #: known faults
    masks: Sequence[Mask] = ()
    #: called with a violation before it is shrunk, and with each smaller trace
    found: Found | None = None
    #: only the first violation of each clause is shrunk, and no trace of another cause is searched
    #: for
    once: bool = False
    #: start of the check (s, monotonic clock)
    started: float = field(default_factory=time.monotonic)
    #: commands carried out so far; the caller counts them
    commands: int = 0
    #: value of `commands` at the last new finding
    last_new: int = 0
    #: names of findings that are known faults of other releases, for which a check goes on
    elsewhere: set[str] = field(default_factory=set)
    #: number of violations by (known faults one of which explains them, clause)
    masked: Counter[tuple[tuple[str, ...], str]] = field(default_factory=Counter)
    _caught_by_name: dict[str, Caught] = field(default_factory=dict)  # by name of the finding
    _shrinking: dict[str, Caught] = field(default_factory=dict)  # not in `_caught_by_name` yet
    _searches: Counter[str] = field(default_factory=Counter)  # searches for another cause, by clause
    _explained: Explained = field(default_factory=Explained)

    def __len__(self) -> int:
        return len(self._caught_by_name)

    @property
    def has_new(self) -> bool:
        """Whether there is a finding that neither the base nor another release shows."""
        return bool(self.new)

    @property
    def new(self) -> dict[str, Trace]:
        """Traces of the findings that neither the base nor another release shows, by name."""
        return {
            name: replace(known.trace, clause=name.split()[0])
            for name, known in self._caught_by_name.items()
            if known.is_new and name not in self.elsewhere
        }

    def take(self, violation: Violation, trace: Trace) -> None:
        """Count a violation, and shrink it if it may be a new finding or give a smaller trace."""
        masks = explaining_masks(self.system, self.base, self.masks, trace, violation, self._explained)
        if masks:
            self.masked[tuple(mask.fault.id for mask in masks), violation.clause] += 1
        elif not self._finds_another_cause(violation, trace):
            self._catch(violation, trace)

    def give_up(self) -> None:
        """Make findings of the violations that were not shrunk: the system can no longer be driven."""
        self._caught_by_name = self._shrinking | self._caught_by_name

    def trace(self, clause: str) -> Trace:
        """Return the smallest trace of a clause so far."""
        return self._caught_by_name[clause].trace

    def findings(self) -> list[Finding]:
        """Return the findings in the order of a report.

        A finding without a witness is counted under the known faults that the base shows on its trace.
        """
        for name, caught in list(self._caught_by_name.items()):
            candidates = caught.compared.candidates
            if caught.stands is Standing.UNTOLD and candidates:
                faults = tuple(mask.fault.id for mask in candidates)
                self.masked[faults, name.split()[0]] += caught.times
                del self._caught_by_name[name]
        for name, caught in self._caught_by_name.items():
            self._prefer_faithful(caught, name.split()[0])
        return [
            finding_of(name, self._caught_by_name[name], self.system, self.base, self.masks)
            for name in sorted(self._caught_by_name, key=report_order)
        ]

    def _catch(self, violation: Violation, trace: Trace) -> None:
        """Shrink a violation for each of its clauses that is worth it."""
        found_at = (time.monotonic() - self.started, self.commands)
        self._shrinking = {
            clause: Caught(trace, trace, violation, {trace.mode}, 1, *found_at)
            for clause in violation.clauses
            if clause not in self._caught_by_name
        }
        self._report_traces()
        compared_by = {
            clause: compare_with_base(self.base, self.masks, trace, violation, clause, self.system)
            for clause in violation.clauses
        }
        if self.base is not None:
            for clause, caught in self._shrinking.items():
                caught.compared = compared_by[clause]
                caught.is_compared = True
            self._report_traces()
        smallest: Trace | None = None
        # The worst clause is shrunk first: other clauses that its trace shows need no trace of their own.
        for clause in sorted(violation.clauses, key=is_milder):
            compared = compared_by[clause]
            stands = compared.stands
            is_known = bool(compared.candidates) and stands is Standing.KNOWN
            if is_known or not self._is_worth_shrinking(clause, stands, trace.mode):
                self._shrinking.pop(clause, None)
                continue
            alike = stands is Standing.NEW and do_the_same(self.system, self.base, trace, violation)
            allowed = self._allowed_shrinks(violation, clause, stands, alike=alike)
            others = self._traces_of_other_clauses(violation, clause)
            smallest = self._smallest(trace, clause, allowed, smallest, others)
            caught = Caught(smallest, trace, violation, {trace.mode}, 1, *found_at, compared)
            caught.is_compared = self.base is not None
            self._keep_if_best(clause, caught, allowed)

    def _is_worth_shrinking(self, clause: str, stands: Standing, mode: Mode) -> bool:
        """Return whether to shrink a violation of a clause. Count it if the clause has a trace already."""
        best = self._caught_by_name.get(clause)
        if best is None:
            return True
        best.times += 1
        if self.once or stands is not best.stands:
            return stands > best.stands
        return mode not in best.modes or self._may_get_smaller(best, mode)

    def _smallest(
        self,
        trace: Trace,
        clause: str,
        allowed: Allowed | None,
        other: Trace | None,
        earlier: Sequence[Trace],
    ) -> Trace:
        """Return the smallest trace of a clause.

        other: the smallest trace of another clause of the same violation.
        earlier: traces of its other clauses that were found before. One of these is returned if it violates
            this clause too.
        """
        for each in filter(None, (other, *earlier)):
            if each is not trace and self._failing_commands(each, clause, allowed) is not None:
                return each
        budget = BUDGET if other is None else _BESIDE_BUDGET
        smallest = minimise(self.system, trace, clause, budget=budget, allowed=allowed)
        # A flaky violation may be missing from its smallest trace.
        return trace if self._failing_commands(smallest, clause) is None else smallest

    def _traces_of_other_clauses(self, violation: Violation, clause: str) -> list[Trace]:
        """Return the known traces of the other clauses of a violation, in its mode; none if its clause has
        a trace already."""
        if clause in self._caught_by_name:
            return []  # its own trace may get smaller than these
        by_name = self._caught_by_name
        others = [by_name[clause] for clause in violation.clauses if clause in by_name]
        mode = self._shrinking[clause].trace.mode
        return [caught.trace for caught in others if caught.trace.mode is mode]

    def _prefer_faithful(self, caught: Caught, clause: str, allowed: Allowed | None = None) -> None:
        """Make the trace a faithful one if a faithful scheduler runs the same commands into the violation."""
        if caught.trace.mode is not Mode.FREE:
            return
        faithful = replace(caught.trace, mode=Mode.FAITHFUL)
        if self._failing_commands(faithful, clause, allowed) == faithful.commands:
            caught.modes.add(Mode.FAITHFUL)
            caught.trace = faithful

    def _keep_if_best(self, clause: str, caught: Caught, allowed: Allowed | None) -> None:
        """Keep a trace of a clause if it is the best one so far."""
        self._prefer_faithful(caught, clause, allowed)
        best = self._caught_by_name.get(clause)
        if best is None or best.stands < caught.stands:
            self._caught_by_name[clause] = caught
            self.last_new = self.commands
            self._shrinking.pop(clause, None)
        else:
            best.modes |= caught.modes
            # A faithful scheduler's trace is better evidence than a shorter one of a free scheduler.
            # With several traces of the clause, a smaller one may have the cause of another.
            if len(self._catches_of(clause)) < 2:
                best.trace = min(best.trace, caught.trace, key=self._rank)
        self._report_traces()

    def _failing_commands(
        self, trace: Trace, clause: str, allowed: Allowed | None = None
    ) -> tuple[object, ...] | None:
        """Return the commands of a trace up to the violation of a clause, None if it does not violate the
        clause."""
        return failing_prefix(self.system, clause, trace, None, allowed)

    def _allowed_shrinks(
        self, was: Violation, clause: str, stands: Standing, *, alike: bool = False
    ) -> Allowed | None:
        """Return the condition that a smaller trace must meet, None if there is no condition.

        With a base, the smaller trace must have the standing of the finding. Without one, it must not show
        the clause of a known fault instead, nor break as a known fault does.

        alike: system and base execute the same commands, and must do so on the smaller trace too.
        """
        system = self.system
        base = self.base
        masks = self.masks
        if base is not None:
            if stands is Standing.KNOWN:
                return None

            def keeps_standing(trace: Trace, violation: Violation) -> bool:
                compared = compare_with_base(base, masks, trace, violation, clause, system)
                if compared.stands < stands:
                    return False
                return not alike or do_the_same(system, base, trace, violation)

            return keeps_standing
        known_clauses = clauses_of(masks, was)
        breaks: set[str] = set()
        if clause == "BROKEN":
            breaks = {how for mask in masks for how in mask.breaks}
        if not known_clauses and not breaks:
            return None

        def shows_no_known_fault(_: Trace, violation: Violation) -> bool:
            if violation.clause in known_clauses:
                return False
            return violation.clause != clause or how_it_breaks(violation.observed) not in breaks

        return shows_no_known_fault

    def _catches_of(self, clause: str) -> list[Caught]:
        return [caught for name, caught in self._caught_by_name.items() if name.split()[0] == clause]

    def _finds_another_cause(self, violation: Violation, trace: Trace) -> bool:
        """Search for a violation with another cause, if its clause has traces or known faults: one without
        the needs of each of them. Make its smallest trace a finding, and return whether there is one."""
        clause = violation.clause
        if self.once or self.base is not None:
            return False
        earlier_catches = self._catches_of(clause)
        masks = masks_of_violation(self.masks, violation, clause)
        if not (earlier_catches or masks) or len(earlier_catches) == MAX_TRACES_PER_CLAUSE:
            return False
        if earlier_catches and self._searches[clause] == MAX_ALTERNATIVE_SEARCHES:
            return False
        if earlier_catches:
            self._searches[clause] += 1
        system = self.system
        found_after_s = time.monotonic() - self.started
        for catch in earlier_catches:
            if catch.needs is None:
                catch.needs = needs(system, catch.trace, clause)
        needed = [catch.needs or () for catch in earlier_catches] + needs_of(masks, clause)
        still_new = self._allowed_shrinks(violation, clause, Standing.NEW)
        as_new = (lambda _: True) if still_new is None else partial(still_new, trace)
        prefix = None if clause == "BROKEN" else unexplained_needs(system, trace, clause, needed, as_new)
        if prefix is None:
            return False
        without, candidate = prefix

        def may_shrink_to(smaller: Trace, violation: Violation) -> bool:
            if still_new is not None and not still_new(smaller, violation):
                return False
            return has_none_of(system, without, smaller)

        smallest = minimise(
            system, candidate, clause, budget=ALTERNATIVE_SHRINK_BUDGET, allowed=may_shrink_to
        )
        number = 1 + len(earlier_catches)
        self._caught_by_name[finding_name(clause, number)] = Caught(
            smallest,
            first=candidate,
            violation=violation,
            modes={trace.mode},
            times=1,
            after_s=found_after_s,
            after_commands=self.commands,
            number=number,
            without=without,
        )
        self.last_new = self.commands
        self._report_traces()
        return True

    def _report_traces(self) -> None:
        """Call `found` with the traces so far."""
        if self.found is not None:
            together = self._shrinking | self._caught_by_name
            names = sorted(together, key=report_order)
            standings = {name: each.stands for name, each in together.items() if each.is_compared}
            self.found({name: together[name].trace for name in names}, standings)

    def _may_get_smaller(self, best: Caught, mode: Mode) -> bool:
        """Return whether to shrink another violation of a clause, because its trace is long or has an
        impatient client."""
        best.retries += 1
        if best.retries > _RETRIES:
            return False
        free, impatient, length = self._rank(best.trace)
        return (impatient or length > _SHORT) and free == (mode is Mode.FREE)

    def _rank(self, trace: Trace) -> tuple[bool, bool, int]:
        """Return a sort key, the best trace first: faithful before free, then patient clients, then short."""
        return (
            trace.mode is Mode.FREE,
            bool(rejected_turns(replay(self.system, trace))),
            len(trace.commands),
        )
