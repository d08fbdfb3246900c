"""Findings: each clause that a system violates, with its smallest trace.

A violation that a known fault explains is counted; it is neither shrunk nor a finding. With a base, a finding
has the best standing of all violations of its clause. A NEW finding has a witness, a trace on which the base
conforms, and shrinking keeps that.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from dataclasses import dataclass, field, replace

from impl.adapter import AnySystem, UnusableImplementation
from reference.every_clause import EVERY_CLAUSE
from reference.clauses.base import CONCERNS
from reference.commands import Broken, Mode
from stateful_tests.check.known_faults.causes import Needs, lacks, needs
from stateful_tests.check.known_faults.explanation import (
    Explained, clauses_of, counted_under, needs_of, unexplained,
)  # fmt: skip
from stateful_tests.check.known_faults.masks import (
    Compared, Mask, Standing, beside, do_the_same, holding, how_it_breaks,
)  # fmt: skip
from stateful_tests.lockstep.lockstep import rejected_turns, replay, with_calls
from stateful_tests.lockstep.check_results import Finding, finding_name
from stateful_tests.lockstep.results import Row, Run, Trace, Violation
from stateful_tests.shrink.minimise import Allowed, failing_prefix, minimise
from stateful_tests.shrink.passes import BUDGET

# Called with the current trace of each finding, by name, and what the base says of those that were compared
# with one.
Found = Callable[[dict[str, Trace], dict[str, Standing]], None]

NOT_REPLAYED = "no replay came to this command"
FLAKY = "(not in every replay: the system is not deterministic, or keeps something over reset)"
_SHORT = 8  # commands that fit on a screen; a longer trace is shrunk again from another violation
_RETRIES = 4  # such attempts for one clause
_REPLAYS = 3  # replays that must all show a violation
# Candidates for shrinking a clause whose violation already has a small trace of another clause.
_BESIDE_BUDGET = 200
MAX_TRACES_PER_CLAUSE = 3  # traces of one clause that have different causes
MAX_ALTERNATIVE_SEARCHES = 12  # violations of one clause that are searched for another cause
ALTERNATIVE_SHRINK_BUDGET = 300  # candidates for shrinking a trace of another cause

# Clauses that say of KV that it is not what a request reads, or will read, there: a wrong answer that nobody
# notices. In a report they lead, and what else violates at the same step is folded into them.
WRONG_KV = frozenset((
    "READ-1", "READ-2", "READ-3", "READ-4", "PUB-1", "KEY-1", "HIT-1", "TREE-3", "TREE-4", "TREE-5",
    "TREE-15", "STA-1", "STA-2", "STA-3", "HOST-2", "LOAD-1", "STORE-1",
))  # fmt: skip

_NO_BASE = Compared(Standing.NEW)


@dataclass(slots=True)
class _Caught:
    """The violations of one clause, or of one cause of it, so far.

    trace: the smallest trace.
    first: the trace as it was found.
    times: number of violations.
    after_s, after_commands: time (s) and commands until the first violation.
    compared: what the base shows on the trace.
    retries: attempts to get a smaller trace from another violation.
    number: number of the trace among those of its clause, from 1.
    without: what the traces of other causes need and this one does not.
    needs: what this trace needs; None before it is determined.
    is_compared: the base was driven through the trace.
    """

    trace: Trace
    first: Trace
    violation: Violation
    modes: set[Mode]
    times: int
    after_s: float
    after_commands: int
    compared: Compared = _NO_BASE
    retries: int = 0
    number: int = 1
    without: Needs = ()
    needs: Needs | None = None
    is_compared: bool = False

    @property
    def stands(self) -> Standing:
        return self.compared.stands

    @property
    def is_new(self) -> bool:
        """Whether the finding has a witness, or no base can be driven to find one."""
        if self.stands is Standing.UNTOLD:
            return self.compared.undriven
        return self.stands is Standing.NEW


@dataclass(slots=True)
class Finder:
    """Collects violations and makes findings of them.

    base: the system before the change.
    masks: known faults.
    found: called with a violation before it is shrunk, and with each smaller trace.
    once: only the first violation of each clause is shrunk, and no trace of another cause is searched for.
    started: start of the check (s, monotonic clock).
    commands: commands carried out so far; the caller counts them.
    last_new: value of `commands` at the last new finding.
    elsewhere: names of findings that are known faults of other releases, for which a check goes on.
    masked: number of violations by (known faults one of which explains them, clause).
    """

    system: AnySystem
    base: AnySystem | None = None
    masks: Sequence[Mask] = ()
    found: Found | None = None
    once: bool = False
    started: float = field(default_factory=time.monotonic)
    commands: int = 0
    last_new: int = 0
    elsewhere: set[str] = field(default_factory=set)
    masked: Counter[tuple[tuple[str, ...], str]] = field(default_factory=Counter)
    _caught: dict[str, _Caught] = field(default_factory=dict)  # by name of the finding
    _shrinking: dict[str, _Caught] = field(default_factory=dict)  # not in `_caught` yet
    _searches: Counter[str] = field(default_factory=Counter)  # searches for another cause, by clause
    _explained: Explained = field(default_factory=Explained)

    def __len__(self) -> int:
        return len(self._caught)

    @property
    def has_new(self) -> bool:
        """Whether there is a finding that neither the base nor another release shows."""
        return bool(self.new)

    @property
    def new(self) -> dict[str, Trace]:
        """Traces of the findings that neither the base nor another release shows, by name."""
        return {
            name: replace(known.trace, clause=name.split()[0])
            for name, known in self._caught.items()
            if known.is_new and name not in self.elsewhere
        }

    def take(self, violation: Violation, trace: Trace) -> None:
        """Take a violation: count it, and shrink it if it may give a finding or a smaller trace."""
        masks = counted_under(self.system, self.base, self.masks, trace, violation, self._explained)
        if masks:
            self.masked[tuple(mask.fault.id for mask in masks), violation.clause] += 1
        elif not self._finds_another_cause(violation, trace):
            self._catch(violation, trace)

    def give_up(self) -> None:
        """The system cannot be driven any more: make findings of violations that were not shrunk."""
        self._caught = self._shrinking | self._caught

    def trace(self, clause: str) -> Trace:
        """The smallest trace of a clause so far."""
        return self._caught[clause].trace

    def findings(self) -> list[Finding]:
        """The findings in the order of a report.

        A finding without a witness is counted under the known faults that the base shows on its trace.
        """
        for name, caught in list(self._caught.items()):
            under = caught.compared.under
            if caught.stands is Standing.UNTOLD and under:
                faults = tuple(mask.fault.id for mask in under)
                self.masked[faults, name.split()[0]] += caught.times
                del self._caught[name]
        for name, caught in self._caught.items():
            self._prefer_faithful(caught, name.split()[0])
        return [self._finding(name) for name in sorted(self._caught, key=_report_order)]

    def _catch(self, violation: Violation, trace: Trace) -> None:
        found_at = (time.monotonic() - self.started, self.commands)
        self._shrinking = {
            clause: _Caught(trace, trace, violation, {trace.mode}, 1, *found_at)
            for clause in violation.clauses
            if clause not in self._caught
        }
        self._report_traces()
        compared_by = {
            clause: beside(self.base, self.masks, trace, violation, clause, self.system)
            for clause in violation.clauses
        }
        if self.base is not None:
            for clause, caught in self._shrinking.items():
                caught.compared, caught.is_compared = compared_by[clause], True
            self._report_traces()
        smallest: Trace | None = None
        # The trace of the worst is shrunk first: where it shows the others, they need no trace of their own.
        for clause in sorted(violation.clauses, key=_is_milder):
            compared = compared_by[clause]
            stands = compared.stands
            is_known = bool(compared.under) and stands is Standing.KNOWN
            if is_known or not self._is_worth_shrinking(clause, stands, trace.mode):
                self._shrinking.pop(clause, None)
                continue
            alike = stands is Standing.NEW and do_the_same(self.system, self.base, trace, violation)
            allowed = self._allowed_shrinks(violation, clause, stands, alike=alike)
            smallest = self._smallest(trace, clause, allowed, smallest, self._beside(violation, clause))
            caught = _Caught(smallest, trace, violation, {trace.mode}, 1, *found_at, compared)
            caught.is_compared = self.base is not None
            self._keep_if_best(clause, caught, allowed)

    def _is_worth_shrinking(self, clause: str, stands: Standing, mode: Mode) -> bool:
        """Whether to shrink a violation of a clause. Counts it if the clause has a trace already."""
        known = self._caught.get(clause)
        if known is None:
            return True
        known.times += 1
        if self.once or stands is not known.stands:
            return stands > known.stands
        return mode not in known.modes or self._may_get_smaller(known, mode)

    def _smallest(
        self,
        trace: Trace,
        clause: str,
        allowed: Allowed | None,
        other: Trace | None,
        known: Sequence[Trace],
    ) -> Trace:
        """The smallest trace of a clause. other: that of another clause of the same violation; known: those
        of its clauses that were found before. One that shows both is good enough."""
        for each in filter(None, (other, *known)):
            if each is not trace and self._failing_commands(each, clause, allowed) is not None:
                return each
        budget = BUDGET if other is None else _BESIDE_BUDGET
        smallest = minimise(self.system, trace, clause, budget=budget, allowed=allowed)
        # A violation that comes and goes may be gone.
        return trace if self._failing_commands(smallest, clause) is None else smallest

    def _beside(self, violation: Violation, clause: str) -> list[Trace]:
        """The traces of other clauses of a violation, in its mode, where its clause was not found yet."""
        if clause in self._caught:
            return []  # it may get smaller than these
        found = [self._caught[each] for each in violation.clauses if each in self._caught]
        mode = self._shrinking[clause].trace.mode
        return [caught.trace for caught in found if caught.trace.mode is mode]

    def _prefer_faithful(self, caught: _Caught, clause: str, allowed: Allowed | None = None) -> None:
        """Make the trace a faithful one if it fails as well with the commands of a faithful scheduler."""
        if caught.trace.mode is not Mode.FREE:
            return
        faithful = replace(caught.trace, mode=Mode.FAITHFUL)
        if self._failing_commands(faithful, clause, allowed) == faithful.commands:
            caught.modes.add(Mode.FAITHFUL)
            caught.trace = faithful

    def _keep_if_best(self, clause: str, caught: _Caught, allowed: Allowed | None) -> None:
        """Keep a trace of a clause if it is the best one."""
        self._prefer_faithful(caught, clause, allowed)
        known = self._caught.get(clause)
        if known is None or known.stands < caught.stands:
            self._caught[clause] = caught
            self.last_new = self.commands
            self._shrinking.pop(clause, None)
        else:
            known.modes |= caught.modes
            # A trace that a faithful scheduler can produce says more than a shorter free one.
            # With several traces of the clause a smaller one may show the cause of another.
            if len(self._caught_of(clause)) < 2:
                known.trace = min(known.trace, caught.trace, key=self._rank)
        self._report_traces()

    def _failing_commands(
        self, trace: Trace, clause: str, allowed: Allowed | None = None
    ) -> tuple[object, ...] | None:
        return failing_prefix(self.system, clause, trace, None, allowed)

    def _allowed_shrinks(
        self, was: Violation, clause: str, stands: Standing, *, alike: bool = False
    ) -> Allowed | None:
        """The condition that a smaller trace must meet; None if any may take the place of the first.

        With a base, the smaller trace must have the standing of the finding. Without one, it must not show
        the clause of a known fault instead, nor break as a known fault does.
        alike: system and base carry out the same commands, and must do so on the smaller trace as well.
        """
        system = self.system
        base = self.base
        masks = self.masks
        if base is not None:
            if stands is Standing.KNOWN:
                return None

            def keeps_standing(trace: Trace, violation: Violation) -> bool:
                compared = beside(base, masks, trace, violation, clause, system)
                if compared.stands < stands:
                    return False
                return not alike or do_the_same(system, base, trace, violation)

            return keeps_standing
        known = clauses_of(masks, was)
        breaks: set[str] = set()
        if clause == "BROKEN":
            breaks = {how for mask in masks for how in mask.breaks}
        if not known and not breaks:
            return None

        def shows_no_known_fault(_: Trace, violation: Violation) -> bool:
            if violation.clause in known:
                return False
            return violation.clause != clause or how_it_breaks(violation.observed) not in breaks

        return shows_no_known_fault

    def _caught_of(self, clause: str) -> list[_Caught]:
        return [caught for name, caught in self._caught.items() if name.split()[0] == clause]

    def _finds_another_cause(self, violation: Violation, trace: Trace) -> bool:
        """Look for another cause of a clause that has traces or known faults: a violation without what
        each of them needs. Its smallest trace becomes a finding. Returns whether there is one."""
        clause = violation.clause
        if self.once or self.base is not None:
            return False
        known = self._caught_of(clause)
        masks = holding(self.masks, violation, clause)
        if not (known or masks) or len(known) == MAX_TRACES_PER_CLAUSE:
            return False
        if known and self._searches[clause] == MAX_ALTERNATIVE_SEARCHES:
            return False
        if known:
            self._searches[clause] += 1
        system = self.system
        found_after_s = time.monotonic() - self.started
        for each in known:
            if each.needs is None:
                each.needs = needs(system, each.trace, clause)
        needed = [each.needs or () for each in known] + needs_of(masks, clause)
        still_new = self._allowed_shrinks(violation, clause, Standing.NEW)
        as_new = (lambda _: True) if still_new is None else partial(still_new, trace)
        found = None if clause == "BROKEN" else unexplained(system, trace, clause, needed, as_new)
        if found is None:
            return False
        without, candidate = found

        def allowed(smaller: Trace, seen: Violation) -> bool:
            if still_new is not None and not still_new(smaller, seen):
                return False
            return lacks(system, without, smaller)

        smallest = minimise(
            system, candidate, clause, budget=ALTERNATIVE_SHRINK_BUDGET, allowed=allowed
        )
        number = 1 + len(known)
        self._caught[finding_name(clause, number)] = _Caught(
            smallest, candidate, violation, {trace.mode}, 1, found_after_s, self.commands,
            number=number, without=without,
        )  # fmt: skip
        self.last_new = self.commands
        self._report_traces()
        return True

    def _report_traces(self) -> None:
        if self.found is not None:
            together = self._shrinking | self._caught
            names = sorted(together, key=_report_order)
            standings = {name: each.stands for name, each in together.items() if each.is_compared}
            self.found({name: together[name].trace for name in names}, standings)

    def _may_get_smaller(self, known: _Caught, mode: Mode) -> bool:
        """Whether to shrink another violation of a clause: its trace is long or has an impatient client."""
        known.retries += 1
        if known.retries > _RETRIES:
            return False
        free, impatient, length = self._rank(known.trace)
        return (impatient or length > _SHORT) and free == (mode is Mode.FREE)

    def _rank(self, trace: Trace) -> tuple[bool, bool, int]:
        """A sort key, the best trace first: faithful before free, then patient clients, then the shortest."""
        return (
            trace.mode is Mode.FREE,
            bool(rejected_turns(replay(self.system, trace))),
            len(trace.commands),
        )

    def _finding(self, name: str) -> Finding:
        caught = self._caught[name]
        clause = name.split()[0]
        run, flaky = self._replayed(caught, clause)
        seen = run.violation or caught.violation
        if clause in seen.clauses:
            seen = seen.with_headline(clause)
        noted = seen.with_note(FLAKY) if flaky else seen
        run = with_calls(self.system, replace(run, violation=noted))
        modes = tuple(m for m in Mode if m in caught.modes)
        return Finding(
            clause, run, modes, caught.times, caught.after_s, caught.after_commands,
            number=caught.number, without=caught.without, old=not caught.is_new,
            no_witness=self._no_witness(caught, run.trace, seen, clause),
            flaky=flaky,
        )  # fmt: skip

    def _no_witness(self, caught: _Caught, trace: Trace, seen: Violation, clause: str) -> str:
        """Why the trace of a finding is no witness; "" if it is one, or none is needed."""
        if caught.stands is not Standing.UNTOLD:
            return ""
        return beside(self.base, self.masks, trace, seen, clause).why

    def _replayed(self, caught: _Caught, clause: str) -> tuple[Run, bool]:
        """A replay that shows the violation, and whether it is flaky: not every replay shows it.

        A flaky violation is reported too. If no replay shows it, the run is reported as it was found.
        """
        times = 1 if clause == "BROKEN" else _REPLAYS  # a crash takes a new worker, a hang its time
        shown: list[Run] = []
        try:
            for trace in (caught.trace, caught.first):
                runs = [replay(self.system, replace(trace, clause=clause)) for _ in range(times)]
                shows = [
                    run
                    for run in runs
                    if run.violation is not None and clause in run.violation.clauses
                ]
                if len(shows) == times:
                    return shows[0], False
                shown += shows
        except UnusableImplementation:  # it cannot be driven any more
            not_run = Run(replace(caught.trace, clause=clause), self.system.name, (), None)
            return _as_found(not_run, caught), False
        return (shown[0] if shown else _as_found(runs[0], caught)), True


def _as_found(run: Run, caught: _Caught) -> Run:
    """The run with the violation as it was found, for a run that does not show it.

    Commands that the run did not reach get rows that say so, so that every step has a row.
    """
    last = min(caught.violation.step, len(run.trace.commands) - 1)
    left = run.trace.commands[len(run.rows) : last + 1]
    rows = run.rows[: last + 1] + tuple(Row(command, Broken(NOT_REPLAYED)) for command in left)
    return replace(run, rows=rows, violation=replace(caught.violation, step=last), history=())


def _is_milder(clause: str) -> bool:
    """Whether no KV is wrong because of it."""
    return clause not in WRONG_KV


def _report_order(name: str) -> tuple[bool, tuple[int, int]]:
    """A sort key for findings in a report: wrong KV first, then causes before what they lead to."""
    clause = name.split()[0]
    return _is_milder(clause), cause_order(clause)


def cause_order(clause: str) -> tuple[int, int]:
    """A sort key for clauses that fail at one step: what is the cause comes first."""
    order = list(EVERY_CLAUSE)
    if clause not in order:
        return len(CONCERNS), 0
    return CONCERNS.index(EVERY_CLAUSE[clause].concerns), order.index(clause)
