"""Findings: each clause that a system violates, with its smallest trace.

A violation that a known fault explains is counted, neither shrunk nor a finding. Beside a base a finding has
the best standing that any violation of its clause has had: what is NEW has a witness, and shrinking keeps it.
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
from stateful_tests.check.causes import Needs, lacks, needs
from stateful_tests.check.explanation import (
    Explained, clauses_of, counted_under, needs_of, unexplained,
)  # fmt: skip
from stateful_tests.check.masks import (
    Compared, Mask, Standing, beside, do_the_same, holding, how_it_breaks,
)  # fmt: skip
from stateful_tests.lockstep.lockstep import rejected_turns, replay, with_calls
from stateful_tests.lockstep.check_results import Finding, finding_name
from stateful_tests.lockstep.results import Row, Run, Trace, Violation
from stateful_tests.shrink.minimise import Allowed, failing_prefix, minimise
from stateful_tests.shrink.passes import BUDGET

# is given the traces of all violated clauses, as they are now, and what the base says of those that were
# compared with one
Found = Callable[[dict[str, Trace], dict[str, Standing]], None]

NOT_REPLAYED = "no replay came to this command"
FLAKY = "(not in every replay: the system is not deterministic, or keeps something over reset)"
_SHORT = 8  # commands that fit a screen: a longer trace is worth another try
_RETRIES = 4
_REPLAYS = 3  # that must all show a violation
# Candidates for a clause that another one's trace shows already: it came up at the same step.
_BESIDE_BUDGET = 200
# Of one clause: traces that need different things, violations in which another is looked for, and candidates.
MAX_TRACES_PER_CLAUSE, MAX_ALTERNATIVE_SEARCHES, ALTERNATIVE_SHRINK_BUDGET = 3, 12, 300


# Clauses that say of KV that it is not what a request reads, or will read, there: a wrong answer that nobody
# notices. In a report they lead, and what else violates at the same step is folded into them.
WRONG_KV = frozenset((
    "READ-1", "READ-2", "READ-3", "READ-4", "PUB-1", "KEY-1", "HIT-1", "TREE-3", "TREE-4", "TREE-5",
    "TREE-15", "STA-1", "STA-2", "STA-3", "HOST-2", "LOAD-1", "STORE-1",
))  # fmt: skip

_NO_BASE = Compared(Standing.NEW)


@dataclass(slots=True)
class _Caught:
    """Violations of one clause so far; without: of those that need none of this."""

    trace: Trace
    first: Trace  # as it was found
    violation: Violation
    modes: set[Mode]
    times: int
    after_s: float
    after_commands: int
    compared: Compared = _NO_BASE  # what the base says of this trace
    retries: int = 0
    number: int = 1  # of the traces of its clause
    without: Needs = ()
    needs: Needs | None = None  # of the trace, once determined
    is_compared: bool = False  # with the base

    @property
    def stands(self) -> Standing:
        return self.compared.stands

    @property
    def is_new(self) -> bool:
        """It has a witness, or no base can say that it has none."""
        return self.stands is Standing.NEW or (
            self.stands is Standing.UNTOLD and self.compared.undriven
        )


@dataclass(slots=True)
class Finder:
    """Takes violations, and has the findings.

    base: what was there before; masks: known faults.
    found: is called with a violation before it is shrunk, and with each smaller trace.
    once: of each clause the first violation alone is shrunk, and no trace looked for that needs other things.
    started: by the monotonic clock. commands: carried out so far, as whoever drives counts them; last_new:
    those before the last finding. elsewhere: names of findings that are known faults of other releases, so
    the plan goes on. masked: violations, by the known faults one of which they show and the clause.
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
    _caught: dict[str, _Caught] = field(default_factory=dict)  # by the name of the finding
    _shrinking: dict[str, _Caught] = field(default_factory=dict)  # what is not in `_caught` yet
    _looks: Counter[str] = field(default_factory=Counter)  # for another cause, by clause
    _explained: Explained = field(default_factory=Explained)

    def __len__(self) -> int:
        return len(self._caught)

    @property
    def has_new(self) -> bool:
        """A run found something that is not the base's as well, nor another release's."""
        return bool(self.new)

    @property
    def new(self) -> dict[str, Trace]:
        """The traces of such findings, by name."""
        return {
            name: replace(known.trace, clause=name.split()[0])
            for name, known in self._caught.items()
            if known.is_new and name not in self.elsewhere
        }

    def take(self, violation: Violation, trace: Trace) -> None:
        """Count a violation; shrink the first of its kind in each mode."""
        masks = counted_under(self.system, self.base, self.masks, trace, violation, self._explained)
        if masks:
            self.masked[tuple(mask.fault.id for mask in masks), violation.clause] += 1
        elif not self._another_cause(violation, trace):
            self._catch(violation, trace)

    def give_up(self) -> None:
        """No more can be driven: what was not shrunk is a finding as it is."""
        self._caught = self._shrinking | self._caught

    def trace(self, clause: str) -> Trace:
        """The smallest of a clause so far."""
        return self._caught[clause].trace

    def findings(self) -> list[Finding]:
        """In the order of a report. What has no witness by then is counted under the known faults that its
        base shows in its trace."""
        for name, caught in list(self._caught.items()):
            under = caught.compared.under if caught.stands is Standing.UNTOLD else ()
            if under:
                self.masked[tuple(mask.fault.id for mask in under), name.split()[0]] += caught.times
                del self._caught[name]
        for name, caught in self._caught.items():
            self._as_a_scheduler(caught, name.split()[0])
        return [self._finding(name) for name in sorted(self._caught, key=_report_order)]

    def _catch(self, violation: Violation, trace: Trace) -> None:
        at = time.monotonic() - self.started, self.commands
        self._shrinking = {
            clause: _Caught(trace, trace, violation, {trace.mode}, 1, *at)
            for clause in violation.clauses
            if clause not in self._caught
        }
        self._tell()
        compared_by = {
            clause: beside(self.base, self.masks, trace, violation, clause, self.system)
            for clause in violation.clauses
        }
        if self.base is not None:
            for clause, caught in self._shrinking.items():
                caught.compared, caught.is_compared = compared_by[clause], True
            self._tell()
        smallest: Trace | None = None
        # The trace of the worst is shrunk first: where it shows the others, they need no trace of their own.
        for clause in sorted(violation.clauses, key=_is_milder):
            compared = compared_by[clause]
            stands = compared.stands
            if (compared.under and stands is Standing.KNOWN) or not self._wanted(
                clause, stands, trace.mode
            ):
                self._shrinking.pop(clause, None)  # known, and comes beside what is new
                continue
            alike = stands is Standing.NEW and do_the_same(self.system, self.base, trace, violation)
            allowed = self._as_new(violation, clause, stands, alike=alike)
            smallest = self._smallest(trace, clause, allowed, smallest, self._beside(violation, clause))
            self._enter(
                clause,
                _Caught(
                    smallest, trace, violation, {trace.mode}, 1, *at, compared,
                    is_compared=self.base is not None,
                ),
                allowed,
            )  # fmt: skip

    def _wanted(self, clause: str, stands: Standing, mode: Mode) -> bool:
        """Whether a violation is worth shrinking."""
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
            if each is not trace and self._fails(each, clause, allowed) is not None:
                return each
        budget = BUDGET if other is None else _BESIDE_BUDGET
        smallest = minimise(self.system, trace, clause, budget=budget, allowed=allowed)
        return trace if self._fails(smallest, clause) is None else smallest  # it may come and go

    def _beside(self, violation: Violation, clause: str) -> list[Trace]:
        """The traces of other clauses of a violation, in its mode, where its clause was not found yet."""
        if clause in self._caught:
            return []  # it may get smaller than these
        found = [self._caught[each] for each in violation.clauses if each in self._caught]
        mode = self._shrinking[clause].trace.mode
        return [caught.trace for caught in found if caught.trace.mode is mode]

    def _as_a_scheduler(self, caught: _Caught, clause: str, allowed: Allowed | None = None) -> None:
        """Say so where a real scheduler could do what the trace does."""
        faithful = replace(caught.trace, mode=Mode.FAITHFUL)
        if (
            caught.trace.mode is Mode.FREE
            and self._fails(faithful, clause, allowed) == faithful.commands
        ):
            caught.modes.add(Mode.FAITHFUL)
            caught.trace = faithful

    def _enter(self, clause: str, caught: _Caught, allowed: Allowed | None) -> None:
        """Keep a trace of a clause, if it is the best."""
        self._as_a_scheduler(caught, clause, allowed)
        known = self._caught.get(clause)
        if known is None or known.stands < caught.stands:
            self._caught[clause] = caught
            self.last_new = self.commands
            self._shrinking.pop(clause, None)
        else:
            known.modes |= caught.modes
            # A trace that a faithful scheduler can produce says more than a shorter free one.
            # It may be smaller as it shows another fault, which has a trace of its own by then.
            if len(self._of(clause)) < 2:
                known.trace = min(known.trace, caught.trace, key=self._rank)
        self._tell()

    def _fails(
        self, trace: Trace, clause: str, allowed: Allowed | None = None
    ) -> tuple[object, ...] | None:
        return failing_prefix(self.system, clause, trace, None, allowed)

    def _as_new(
        self, was: Violation, clause: str, stands: Standing, *, alike: bool = False
    ) -> Allowed | None:
        """Smaller traces that stand as the finding does; where no base is asked, those that do not show the
        clause of a known fault in its place, nor break as one does. alike: system and base do the same."""
        system, base, masks = self.system, self.base, self.masks
        if base is not None:
            return (
                None
                if stands is Standing.KNOWN
                else lambda trace, violation: (
                    beside(base, masks, trace, violation, clause, system).stands >= stands
                    and (not alike or do_the_same(system, base, trace, violation))
                )
            )
        known = clauses_of(masks, was)
        breaks = {how for mask in masks for how in mask.breaks} if clause == "BROKEN" else set()
        if not known and not breaks:
            return None
        return lambda _, violation: (
            violation.clause not in known
            and (violation.clause != clause or how_it_breaks(violation.observed) not in breaks)
        )

    def _of(self, clause: str) -> list[_Caught]:
        return [caught for name, caught in self._caught.items() if name.split()[0] == clause]

    def _another_cause(self, violation: Violation, trace: Trace) -> bool:
        """Whether the trace violates a clause that is known without what each trace of it needs; the smallest
        such trace is another finding."""
        clause = violation.clause
        if self.once or self.base is not None:
            return False
        known, masks = self._of(clause), holding(self.masks, violation, clause)
        if not (known or masks) or len(known) == MAX_TRACES_PER_CLAUSE:
            return False
        if known and self._looks[clause] == MAX_ALTERNATIVE_SEARCHES:
            return False
        self._looks[clause] += bool(known)
        system, looked = self.system, time.monotonic() - self.started
        for each in known:
            each.needs = needs(system, each.trace, clause) if each.needs is None else each.needs
        needed = [each.needs or () for each in known] + needs_of(masks, clause)
        still_new = self._as_new(violation, clause, Standing.NEW)
        as_new = (lambda _: True) if still_new is None else partial(still_new, trace)
        found = None if clause == "BROKEN" else unexplained(system, trace, clause, needed, as_new)
        if found is None:
            return False
        without, candidate = found

        def allowed(smaller: Trace, seen: Violation) -> bool:
            return (still_new is None or still_new(smaller, seen)) and lacks(
                system, without, smaller
            )

        smallest = minimise(
            system, candidate, clause, budget=ALTERNATIVE_SHRINK_BUDGET, allowed=allowed
        )
        number = 1 + len(known)
        self._caught[finding_name(clause, number)] = _Caught(
            smallest, candidate, violation, {trace.mode}, 1, looked, self.commands,
            number=number, without=without,
        )  # fmt: skip
        self.last_new = self.commands
        self._tell()
        return True

    def _tell(self) -> None:
        if self.found is not None:
            together = self._shrinking | self._caught
            names = sorted(together, key=_report_order)
            standings = {name: each.stands for name, each in together.items() if each.is_compared}
            self.found({name: together[name].trace for name in names}, standings)

    def _may_get_smaller(self, known: _Caught, mode: Mode) -> bool:
        """Another violation of the clause is worth shrinking: the trace is long, or a client is impatient."""
        known.retries += 1
        if known.retries > _RETRIES:
            return False
        free, impatient, length = self._rank(known.trace)
        return (impatient or length > _SHORT) and free == (mode is Mode.FREE)

    def _rank(self, trace: Trace) -> tuple[bool, bool, int]:
        """The smallest is the best one, of a faithful scheduler and clients that wait before all others."""
        return (
            trace.mode is Mode.FREE,
            bool(rejected_turns(replay(self.system, trace))),
            len(trace.commands),
        )

    def _finding(self, name: str) -> Finding:
        caught, clause = self._caught[name], name.split()[0]
        run, flaky = self._shown(caught, clause)
        seen = run.violation or caught.violation
        seen = seen.with_headline(clause) if clause in seen.clauses else seen
        run = with_calls(self.system, replace(run, violation=seen.with_note(FLAKY) if flaky else seen))
        modes = tuple(m for m in Mode if m in caught.modes)
        return Finding(
            clause, run, modes, caught.times, caught.after_s, caught.after_commands,
            number=caught.number, without=caught.without, old=not caught.is_new,
            no_witness=self._no_witness(caught, run.trace, seen, clause),
            flaky=flaky,
        )  # fmt: skip

    def _no_witness(self, caught: _Caught, trace: Trace, seen: Violation, clause: str) -> str:
        """Why a finding has none, of the trace that it has now; "" where it has one or needs none."""
        if caught.stands is not Standing.UNTOLD:
            return ""
        return beside(self.base, self.masks, trace, seen, clause).why

    def _shown(self, caught: _Caught, clause: str) -> tuple[Run, bool]:
        """A replay that shows a violation, and whether not every one does. It is reported all the same, as it
        was found where none does: a fault that comes and goes is one, and so is a reset that forgets."""
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
            return _as_found(
                Run(replace(caught.trace, clause=clause), self.system.name, (), None), caught
            ), False
        return (shown or [_as_found(runs[0], caught)])[0], True


def _as_found(run: Run, caught: _Caught) -> Run:
    """The run as one that ends with the violation, which it does not show. Commands to which it did not come
    have rows that say so: whatever names the command of a step finds it."""
    last = min(caught.violation.step, len(run.trace.commands) - 1)
    left = run.trace.commands[len(run.rows) : last + 1]
    rows = run.rows[: last + 1] + tuple(Row(command, Broken(NOT_REPLAYED)) for command in left)
    return replace(run, rows=rows, violation=replace(caught.violation, step=last), history=())


def _is_milder(clause: str) -> bool:
    """Whether no KV is wrong because of it."""
    return clause not in WRONG_KV


def _report_order(name: str) -> tuple[bool, int, int]:
    """Order a finding in a report: wrong KV first, then as its clause is ordered among the failures of one
    step."""
    order, clause = list(EVERY_CLAUSE), name.split()[0]
    if clause not in order:
        return True, len(CONCERNS), 0
    concern = CONCERNS.index(EVERY_CLAUSE[clause].concerns)
    return _is_milder(clause), concern, order.index(clause)
