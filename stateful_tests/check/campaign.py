"""A check: many runs of the lockstep on one system, and what they found.

`run` carries a plan out: lines of the directed corpus and runs with fresh decisions, in turns, the first
violation of every clause shrunk to its smallest trace. Runs may execute in other processes; their results
are taken in the order of the plan.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, product, tee

from impl.adapter import AnySystem, UnusableImplementation
from reference.blocks.clauses import EVERY_CLAUSE
from reference.clauses.base import CONCERNS
from reference.commands import Mode, kind_name
from reference.geometry import GeometryError
from stateful_tests.check.driving import Configuration, Driven, Named, RunBatch, drive, drive_named, lines_of
from stateful_tests.check.executors import SERIAL, Executor
from stateful_tests.check.masks import Mask, Standing, beside, counted_under, holding, unexplained
from stateful_tests.check.tiers import CORPUS, Plan, check_machine, for_system, sizes_for
from stateful_tests.check.ways import Needs, lacks, needs
from stateful_tests.check.corpus import FIXTURE
from stateful_tests.generate.run_profile import MACHINES
from stateful_tests.lockstep.lockstep import new_tallies, rejected_turns, replay, with_calls
from stateful_tests.lockstep.results import (
    CheckResult, Finding, MachineResult, Run, Trace, Violation, add_tallies, finding_name,
)  # fmt: skip
from stateful_tests.shrink.minimise import Allowed, failing_prefix, minimise, violated
from stateful_tests.shrink.passes import BUDGET

Progress = Callable[[str, int, int], None]
Found = Callable[[dict[str, Trace]], None]  # is given the traces of all violated clauses, as they are now

FLAKY = "(not in every replay: the system is not deterministic, or keeps something over reset)"
_REPLAYS = 3  # that must all show a violation
_SHORT = 8  # commands that fit a screen: a longer trace is worth another try
_RETRIES = 4
# Candidates for a clause that another one's trace shows already: it came up at the same step.
_BESIDE_BUDGET = 200
# Of one clause: traces that need different things, violations in which another is looked for, and candidates.
MAX_TRACES_PER_CLAUSE, MAX_ALTERNATIVE_SEARCHES, ALTERNATIVE_SHRINK_BUDGET = 3, 12, 300
_RUNS = 3  # runs of one configuration before the next has its turn
_LINES = 24  # of the corpus, before runs have their turn: about as many commands


def run(
    system: AnySystem,
    plan: Plan,
    progress: Progress | None = None,
    base: AnySystem | None = None,
    *,
    executor: Executor = SERIAL,
    named: Named | None = None,
    found: Found | None = None,
    masks: Sequence[Mask] = (),
) -> CheckResult:
    """Carry the plan out on `system`.

    The configurations of the plan take turns, a few runs each, so that every kind of fault comes up early.
    base: what was there before; what it violates too ends nothing, and of each clause a trace is looked for
    in which it conforms.
    masks: known faults; what they explain is counted, neither shrunk nor a finding; one that is fixed in part
    is a finding.
    executor: where runs execute, on systems that are made from `named`; without that all is done on `system`
    itself.
    found: is called with a violation before it is shrunk, and with each smaller trace.
    An interrupt ends the check with what was found until then. Raises UnusableImplementation when no
    configuration fits.
    """
    plan = for_system(plan, system)
    work: Callable[[RunBatch], Driven] = partial(drive, system, plan)
    if named is None:
        executor = SERIAL
    elif executor is not SERIAL:
        work = partial(drive_named, named, plan)
    return _Campaign(system, plan, progress, base, found, masks).run(executor, work)


def first_violation(system: AnySystem, plan: Plan) -> tuple[Violation, int] | None:
    """The first that the plan's runs find, and the commands up to its end. Nothing is shrunk."""
    plan = for_system(plan, system)
    campaign, commands = _Campaign(system, plan, None, None), 0
    for batch in campaign.batches(campaign.configs()):
        for done, violations in drive(system, plan, batch).runs:
            commands += done
            if violations:
                return violations[0][0], commands
    return None


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
    stands: Standing = Standing.NEW  # what the base says of this trace
    retries: int = 0
    number: int = 1  # of the traces of its clause
    without: Needs = ()
    fixed_in_part: str = ""  # the known fault of which this is what is left
    needs: Needs | None = None  # of the trace, once determined


@dataclass(slots=True)
class _Campaign:
    system: AnySystem
    plan: Plan
    progress: Progress | None
    base: AnySystem | None
    found: Found | None = None
    masks: Sequence[Mask] = ()
    masked: Counter[tuple[str, ...]] = field(default_factory=Counter)  # violations, by the known faults
    shrinking: dict[str, _Caught] = field(default_factory=dict)  # what is not in `caught` yet
    started: float = field(default_factory=time.monotonic)
    caught: dict[str, _Caught] = field(default_factory=dict)  # by the name of the finding
    looks: Counter[str] = field(default_factory=Counter)  # for another way, by clause
    last_new: int = 0  # commands before the last new finding
    commands: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    situations: Counter[str] = field(default_factory=Counter)
    unfit: dict[str, str] = field(default_factory=dict)  # situation -> why its line could not be driven

    def run(self, executor: Executor, work: Callable[[RunBatch], Driven]) -> CheckResult:
        result = CheckResult(self.system.name, self.plan.tier, self.plan.seed)
        can = self.system.capabilities
        machines = {config: MachineResult(*config, tallies=new_tallies(can)) for config in self.configs()}
        result.machines = list(machines.values())
        result.planned = sum(map(self._planned, machines))
        ahead, now = tee(self.batches(tuple(machines)))
        try:
            self._fixed_in_part()
            with closing(executor.map(work, ahead)) as driven:
                for batch in now:
                    if self._over(result):
                        break
                    self._take(machines[batch.config], next(driven))
        except KeyboardInterrupt:
            result.interrupted = True
            self.caught = self.shrinking | self.caught
        except UnusableImplementation as error:  # what was found until then is reported all the same
            self.caught = self.shrinking | self.caught
            if not self.caught:
                raise
            result.broke_off = str(error)
        result.masked = dict(self.masked)
        result.refusals = dict(self.refusals.most_common())
        result.commands_by_kind = dict(self.kinds.most_common())
        result.situations = dict(sorted(self.situations.items()))
        result.required, result.unfit = self._required(machines), self.unfit
        result.never_done = self._never_done(machines)
        refused = sum(self.refusals.values())
        result.carried_out = self.commands - refused
        result.findings = [self._finding(name) for name in sorted(self.caught, key=report_order)]
        for machine in result.machines:
            add_tallies(result.tallies, machine.tallies)
        result.unreached = tuple(c for c, t in result.tallies.items() if not t.reached)
        result.seconds = time.monotonic() - self.started
        return result

    def configs(self) -> list[Configuration]:
        """Machines, presets and modes in turns, so that the first few cover each of them."""
        modes = self.plan.modes or self.system.capabilities.modes
        reason: Exception = UnusableImplementation("no machine was named")
        candidates = []
        for turn, name in product(range(len(self.plan.machines) * len(modes)), self.plan.presets):
            at = turn + self.plan.presets.index(name)
            mode = modes[at // len(self.plan.machines) % len(modes)]
            candidates.append(Configuration(self.plan.machines[at % len(self.plan.machines)], name, mode))
        configs = []
        for config in candidates:
            try:
                check_machine(self.system, config.machine, sizes_for(config.machine, config.preset))
            except (UnusableImplementation, GeometryError) as error:
                reason = error
            else:
                configs.append(config)
        if not configs:
            raise UnusableImplementation(str(reason))
        corpus = [Configuration(CORPUS, "-", mode) for mode in modes] if self.plan.corpus else []
        return [*corpus, *configs]

    def _planned(self, config: Configuration) -> int:
        """Runs of a configuration; of the corpus, its lines."""
        if config.machine == CORPUS:
            return len(lines_of(self.system, self.plan, config.mode))
        return self.plan.examples[config.machine]

    def batches(self, configs: Sequence[Configuration]) -> Iterator[RunBatch]:
        """The runs of the plan, one of each configuration first; lines of the corpus in turns with them."""
        lines = self._turns([config for config in configs if config.machine == CORPUS], _LINES, _LINES)
        for runs in self._turns([config for config in configs if config.machine != CORPUS], 1, _RUNS):
            yield from islice(lines, 1)
            yield runs
        yield from lines

    def _turns(self, configs: Sequence[Configuration], first: int, size: int) -> Iterator[RunBatch]:
        most, start, stop = max(map(self._planned, configs), default=0), 0, first
        while start < most:
            for config in configs:
                if start < (end := min(stop, self._planned(config))):
                    yield RunBatch(config, range(start, end))
            start, stop = stop, stop + size

    def _required(self, configs: Iterable[Configuration]) -> tuple[str, ...]:
        """The situations of the corpus that the system can be driven into."""
        of = [config for config in configs if config.machine == CORPUS]
        lines = (line for config in of for line in lines_of(self.system, self.plan, config.mode))
        texts = {line.situation for line in lines if line.origin != FIXTURE}
        return tuple(sorted(text for text in texts if text in self.situations or text not in self.unfit))

    def _never_done(self, configs: Iterable[Configuration]) -> tuple[str, ...]:
        """Commands that the system offers and that it carried out in no run of a plan with the corpus."""
        if self.system.capabilities.judged_alone or not self.plan.corpus:
            return ()
        machines = {config.machine for config in configs} - {CORPUS}
        offered = {kind for machine in machines for kind in MACHINES[machine]}
        done = {text.partition(",")[0] for text in self.situations if ", refused: " not in text}
        names = {kind_name(k) for k in offered if k.__name__ in self.system.capabilities.commands}
        return tuple(sorted(names - done))

    def _over(self, result: CheckResult) -> bool:
        """The time limit was reached, or nothing new came up for long enough after a finding."""
        limit = self.plan.time_limit_s
        result.timed_out = limit is not None and time.monotonic() - self.started > limit
        new = any(known.stands is not Standing.KNOWN for known in self.caught.values())
        result.stopped = new and self.commands - self.last_new > self.plan.after_finding
        return result.timed_out or result.stopped

    def _take(self, result: MachineResult, driven: Driven) -> None:
        """Enter the results of a batch, and shrink what it violated."""
        self.refusals += driven.refusals
        self.kinds += driven.kinds
        add_tallies(result.tallies, driven.tallies)
        result.seconds += driven.seconds
        for commands, violations in driven.runs:
            result.examples += 1
            result.commands += commands
            self.commands += commands
            for violation, trace in violations:
                result.violated.update(violation.clauses)
                masks = counted_under(self.system, self.base, self.masks, trace, violation)
                if masks:
                    self.masked[tuple(mask.fault.id for mask in masks)] += 1
                elif not self._another_way(violation, trace):
                    self._catch(violation, trace)
        self.situations += driven.situations
        self.unfit |= driven.unfit
        if self.progress is not None:
            sized = "directed corpus" if result.name == CORPUS else f"{result.name} on {result.preset}"
            where = f"{sized}, mode {result.mode.value}"
            self.progress(where, self.commands, len(self.caught))

    def _fixed_in_part(self) -> None:
        """What is left of known faults that were fixed in part is found already."""
        for mask in self.masks:
            for trace, _ in mask.there if mask.fixed else ():
                clause, seen = trace.clause or "", replay(self.system, trace).violation
                if seen is not None and clause not in self.caught:
                    self.caught[clause] = _Caught(
                        trace, trace, seen, {trace.mode}, 1, 0.0, 0, fixed_in_part=mask.fault.id
                    )
        self._tell()

    def _catch(self, violation: Violation, trace: Trace) -> None:
        """Count a violation; shrink the first of its kind in each mode."""
        smallest: Trace | None = None
        shown: tuple[str, ...] = ()
        after = time.monotonic() - self.started
        for clause in violation.clauses:
            if clause not in self.caught:
                caught = _Caught(trace, trace, violation, {trace.mode}, 1, after, self.commands)
                self.shrinking[clause] = caught
        self._tell()
        for clause in violation.clauses:
            known = self.caught.get(clause)
            stands, under = beside(self.base, self.masks, trace, violation, clause)
            if stands is Standing.KNOWN and under:
                self.shrinking.pop(clause, None)  # known, and comes beside what is new
                continue
            allowed = self._as_new(violation, clause, stands)
            if known is not None:
                known.times += 1
                another = known.stands < stands  # than the one that was there before
                if not another and trace.mode in known.modes and not self._may_get_smaller(known, trace.mode):
                    continue
            if smallest is None or clause not in shown or not self._shows(smallest, clause, allowed):
                budget = BUDGET if smallest is None else _BESIDE_BUDGET
                smallest = minimise(self.system, trace, clause, budget=budget, allowed=allowed)
                shown = violated(self.system, smallest, clause) or ()
                if clause not in shown:  # it comes and goes
                    smallest, shown = trace, ()
            modes = {trace.mode}
            faithful = replace(smallest, mode=Mode.FAITHFUL)
            free = trace.mode is Mode.FREE
            if free and failing_prefix(self.system, clause, faithful, None, allowed) == smallest.commands:
                modes.add(Mode.FAITHFUL)  # a scheduler could do the very same
                smallest, shown = faithful, violated(self.system, faithful, clause) or ()
            if known is None or known.stands < stands:
                known = _Caught(smallest, trace, violation, set(), 1, after, self.commands, stands)
                self.caught[clause] = known
                self.last_new = self.commands
                self.shrinking.pop(clause, None)
            if stands < known.stands:
                continue
            known.modes |= modes
            # A trace that a faithful scheduler can produce says more than a shorter free one.
            # It may be smaller as it shows another fault, which has a trace of its own by then.
            if known.trace is not smallest and len(self._ways(clause)) < 2:
                known.trace = min(known.trace, smallest, key=self._rank)
            self._tell()

    def _shows(self, trace: Trace, clause: str, allowed: Allowed | None) -> bool:
        return allowed is None or failing_prefix(self.system, clause, trace, None, allowed) is not None

    def _as_new(self, was: Violation, clause: str, stands: Standing) -> Allowed | None:
        """Smaller traces that stand as the finding does; where no base is asked, those that do not show the
        clause of a known fault in its place."""
        base, masks = self.base, self.masks
        if base is not None:
            return None if stands is Standing.KNOWN else lambda trace, violation: (
                beside(base, masks, trace, violation, clause).stands >= stands
            )
        known = {each for mask in masks if mask.holds for each in mask.fault.clauses}.difference(was.clauses)
        return (lambda _, violation: violation.clause not in known) if known else None

    def _ways(self, clause: str) -> list[_Caught]:
        return [caught for name, caught in self.caught.items() if name.split()[0] == clause]

    def _another_way(self, violation: Violation, trace: Trace) -> bool:
        """Whether the trace violates a clause that is known without what each trace of it needs; the smallest
        such trace is another finding."""
        clause = violation.clause
        known = self._ways(clause)
        masks = holding(self.masks, violation, clause)
        if not (known or masks) or self.base is not None or len(known) == MAX_TRACES_PER_CLAUSE:
            return False
        if known and self.looks[clause] == MAX_ALTERNATIVE_SEARCHES:
            return False
        self.looks[clause] += bool(known)
        system, looked = self.system, time.monotonic() - self.started
        for each in known:
            each.needs = needs(system, each.trace, clause) if each.needs is None else each.needs
        ways = [each.needs or () for each in known] + [way for mask in masks for way in mask.ways(clause)]
        found = None if clause == "BROKEN" else unexplained(system, trace, clause, ways)
        if found is None:
            return False
        without, candidate = found
        still_new = self._as_new(violation, clause, Standing.NEW)

        def allowed(smaller: Trace, seen: Violation) -> bool:
            return (still_new is None or still_new(smaller, seen)) and lacks(system, without, smaller)

        smallest = minimise(system, candidate, clause, budget=ALTERNATIVE_SHRINK_BUDGET, allowed=allowed)
        number = 1 + len(known)
        self.caught[finding_name(clause, number)] = _Caught(
            smallest, candidate, violation, {trace.mode}, 1, looked, self.commands,
            number=number, without=without,
        )  # fmt: skip
        self.last_new = self.commands
        self._tell()
        return True

    def _tell(self) -> None:
        if self.found is not None:
            together = self.shrinking | self.caught
            self.found({name: together[name].trace for name in sorted(together, key=report_order)})

    def _may_get_smaller(self, known: _Caught, mode: Mode) -> bool:
        """Another violation of the clause is worth shrinking: the trace is long, or a client is impatient."""
        known.retries += 1
        if known.retries > _RETRIES:
            return False
        free, impatient, length = self._rank(known.trace)
        return (impatient or length > _SHORT) and free == (mode is Mode.FREE)

    def _rank(self, trace: Trace) -> tuple[bool, bool, int]:
        """The smallest is the best one, of a faithful scheduler and clients that wait before all others."""
        return trace.mode is Mode.FREE, bool(rejected_turns(replay(self.system, trace))), len(trace.commands)

    def _finding(self, name: str) -> Finding:
        caught, clause = self.caught[name], name.split()[0]
        run, flaky = self._shown(caught, clause)
        seen = run.violation or caught.violation
        seen = seen.headed(clause) if clause in seen.clauses else seen
        run = with_calls(self.system, replace(run, violation=seen.noted(FLAKY) if flaky else seen))
        modes = tuple(m for m in Mode if m in caught.modes)
        return Finding(
            clause, run, modes, caught.times, caught.after_s, caught.after_commands,
            number=caught.number, without=caught.without, old=caught.stands is Standing.KNOWN,
            fixed_in_part=caught.fixed_in_part, flaky=flaky,
        )  # fmt: skip

    def _shown(self, caught: _Caught, clause: str) -> tuple[Run, bool]:
        """A replay that shows a violation, and whether not every one does. It is reported all the same, as it
        was found where none does: a fault that comes and goes is one, and so is a reset that forgets."""
        times = 1 if clause == "BROKEN" else _REPLAYS  # a crash takes a new worker, a hang its time
        shown: list[Run] = []
        try:
            for trace in (caught.trace, caught.first):
                runs = [replay(self.system, replace(trace, clause=clause)) for _ in range(times)]
                shows = [run for run in runs if run.violation is not None and clause in run.violation.clauses]
                if len(shows) == times:
                    return shows[0], False
                shown += shows
        except UnusableImplementation:  # it cannot be driven any more
            return Run(replace(caught.trace, clause=clause), self.system.name, (), caught.violation), False
        return (shown or [replace(runs[0], violation=caught.violation, history=())])[0], True


def report_order(name: str) -> tuple[int, int]:
    """Where a finding comes in a report: as its clause would be among the failures of one step."""
    order, clause = list(EVERY_CLAUSE), name.split()[0]
    if clause not in order:
        return len(CONCERNS), 0
    return CONCERNS.index(EVERY_CLAUSE[clause].concerns), order.index(clause)
