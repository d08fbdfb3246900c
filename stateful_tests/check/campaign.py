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
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, product, tee

from impl.adapter import AnySystem, UnusableImplementation
from reference.commands import kind_name
from reference.geometry import GeometryError
from stateful_tests.check.driving import Configuration, Driven, Named, RunBatch, drive, drive_named, lines_of
from stateful_tests.check.executors import SERIAL, Executor
from stateful_tests.check.finder import Finder, Found
from stateful_tests.check.masks import Mask
from stateful_tests.check.tiers import CORPUS, Plan, check_machine, for_system, sizes_for
from stateful_tests.check.corpus import FIXTURE
from stateful_tests.generate.run_profile import MACHINES
from stateful_tests.lockstep.lockstep import new_tallies
from stateful_tests.lockstep.results import (
    CheckResult, MachineResult, Violation, add_tallies,
)  # fmt: skip

Progress = Callable[[str, int, int], None]

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
    finder = Finder(system, base, masks, found)
    return _Campaign(system, plan, finder, progress).run(executor, work)


def first_violation(system: AnySystem, plan: Plan) -> tuple[Violation, int] | None:
    """The first that the plan's runs find, and the commands up to its end. Nothing is shrunk."""
    plan = for_system(plan, system)
    campaign, commands = _Campaign(system, plan, Finder(system)), 0
    for batch in campaign.batches(campaign.configs()):
        for done, violations in drive(system, plan, batch).runs:
            commands += done
            if violations:
                return violations[0][0], commands
    return None


@dataclass(slots=True)
class _Campaign:
    system: AnySystem
    plan: Plan
    finder: Finder
    progress: Progress | None = None
    started: float = field(default_factory=time.monotonic)
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
            self.finder.find_what_is_left()
            with closing(executor.map(work, ahead)) as driven:
                for batch in now:
                    if self._over(result):
                        break
                    self._take(machines[batch.config], next(driven))
        except KeyboardInterrupt:
            result.interrupted = True
            self.finder.give_up()
        except UnusableImplementation as error:  # what was found until then is reported all the same
            self.finder.give_up()
            if not len(self.finder):
                raise
            result.broke_off = str(error)
        result.masked = dict(self.finder.masked)
        result.refusals = dict(self.refusals.most_common())
        result.commands_by_kind = dict(self.kinds.most_common())
        result.situations = dict(sorted(self.situations.items()))
        result.required, result.unfit = self._required(machines), self.unfit
        result.never_done = self._never_done(machines)
        refused = sum(self.refusals.values())
        result.carried_out = self.finder.commands - refused
        result.findings = self.finder.findings()
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
        since = self.finder.commands - self.finder.last_new
        result.stopped = self.finder.has_new and since > self.plan.after_finding
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
            self.finder.commands += commands
            for violation, trace in violations:
                result.violated.update(violation.clauses)
                self.finder.take(violation, trace)
        self.situations += driven.situations
        self.unfit |= driven.unfit
        if self.progress is not None:
            sized = "directed corpus" if result.name == CORPUS else f"{result.name} on {result.preset}"
            where = f"{sized}, mode {result.mode.value}"
            self.progress(where, self.finder.commands, len(self.finder))
