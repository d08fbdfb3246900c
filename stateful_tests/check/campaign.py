"""A check: many runs of the lockstep on one system, and what they found.

`run` carries a plan out: lines of the directed corpus and runs with fresh decisions, in turns, the first
violation of every clause shrunk to its smallest trace. Runs may execute in other processes; their results
are taken in the order of the plan.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import tee

from impl.adapter import AnySystem, UnusableImplementation
from impl.process.failures import fails_at_start
from impl.system_spec import system_spec
from stateful_tests.check.run_counts import Counted
from stateful_tests.check.run_driver import drive, drive_named
from stateful_tests.check.run_batches import (
    HANG, HANGS, BatchResult, Configuration, Named, RunBatch, failure_text,
)  # fmt: skip
from stateful_tests.check.executors import SERIAL, Executor
from stateful_tests.check.finder import Finder, Found
from stateful_tests.check.undriven_parts import parts_left_out
from stateful_tests.check.known_faults.lookup import Lookup
from stateful_tests.check.known_faults.masks import Mask
from stateful_tests.check.check_plans import CORPUS, Plan, for_system
from stateful_tests.check.plan_order import batches, configurations, planned_runs
from stateful_tests.lockstep.driven_kinds import new_tallies
from stateful_tests.lockstep.check_results import CheckResult, MachineResult, add_tallies
from stateful_tests.lockstep.run_results import Run, Violation

Progress = Callable[[str, int, int], None]
_UNSTARTED = 8  # runs, of several sizes: none starts


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
    early: Sequence[Run] = (),
    interrupted: bool = False,
    began: float | None = None,
    lookup: Lookup | None = None,
) -> CheckResult:
    """Carry the plan out on `system`.

    The configurations of the plan take turns, a few runs each, so that every kind of fault comes up
    early. An interrupt ends the check with the findings until then. Raises UnusableImplementation when no
    configuration fits.

    base: the system before the change; violations that it shows as well end nothing, and for each clause a
        trace is searched in which it conforms.
    masks: known faults; violations that they explain are counted, and neither shrunk nor a finding.
    executor: where runs execute, on systems that are made from `named`; without one, all runs use `system`
        itself.
    found: called with a violation before it is shrunk, and with each smaller trace.
    early: earlier runs, each with a violation.
    interrupted: report these, and drive no more.
    began: `time.monotonic()` when the check began; its seconds and time limit count from there.
    lookup: looks findings up in other releases.
    """
    plan_asked = plan
    plan = for_system(plan, system)
    work: Callable[[RunBatch], BatchResult] = partial(drive, system, plan)
    if named is None:
        executor = SERIAL
    elif executor is not SERIAL:
        work = partial(drive_named, named, plan)
    finder = Finder(system, base, masks, found)
    started = time.monotonic() if began is None else began
    campaign = _Campaign(system, plan, finder, progress, started, lookup)
    result = campaign.run(executor, work, early, interrupted=interrupted)
    result.doubts = getattr(system, "doubts", ())  # a stranger's system has none
    comparable = system_spec(system).checkout and type(base) is type(system)
    if base is not None and comparable and not result.new and not result.interrupted:
        guessed = lookup is not None and lookup.may_excuse
        result.left_out = parts_left_out(system, base, plan_asked, result.unfit, guessed=guessed)
    return result


def first_violation(system: AnySystem, plan: Plan) -> tuple[Violation, int] | None:
    """Return the first violation of the plan's runs, and the commands up to its end. Nothing is shrunk."""
    plan = for_system(plan, system)
    commands = 0
    for batch in batches(system, plan, configurations(system, plan)):
        for done, violations in drive(system, plan, batch).runs:
            commands += done
            if violations:
                return violations[0][0], commands
        if commands >= plan.commands:
            return None
    return None


@dataclass(slots=True)
class _Campaign:
    system: AnySystem
    plan: Plan
    finder: Finder
    progress: Progress | None
    started: float
    lookup: Lookup | None = None
    lines: int = 0  # of the corpus, which wait
    counted: Counted = field(default_factory=Counted)
    # how the system failed, "" where it did not
    broke: Counter[str] = field(default_factory=Counter)

    def run(
        self,
        executor: Executor,
        work: Callable[[RunBatch], BatchResult],
        early: Sequence[Run],
        *,
        interrupted: bool,
    ) -> CheckResult:
        """Drive all batches of runs and return the result of the check.

        work: drives a batch.
        early: runs with violations that came before.
        interrupted: the user ended the check before this began.
        """
        result = CheckResult(self.system.name, self.plan.tier, self.plan.seed)
        can = self.system.capabilities
        machines = {
            config: MachineResult(*config[:3], tallies=new_tallies(can), sizes=config.sizes)
            for config in configurations(self.system, self.plan)
        }
        result.machines = list(machines.values())
        self.lines = sum(
            planned_runs(self.system, self.plan, planned) for planned in machines if planned.machine == CORPUS
        )
        if self.plan.examples is None:
            result.asked = self.plan.commands
        try:
            for each in early:
                assert each.violation is not None
                self.finder.take(each.violation, each.trace)
            if interrupted:
                raise KeyboardInterrupt
            self._drive_batches(executor, work, machines, result)
        except KeyboardInterrupt:
            result.interrupted = True
            self.finder.give_up()
        except UnusableImplementation as error:
            # What was found until then is reported all the same.
            self.finder.give_up()
            if not len(self.finder):
                raise
            result.broke_off = str(error)
        if self.plan.examples is not None:
            result.planned = self.plan.examples * sum(
                config.machine != CORPUS for config in machines
            )
        result.findings = self.finder.findings()
        if self.lookup is not None:
            self._look_up(self.lookup, result)
        result.masked = dict(self.finder.masked)
        for machine in result.machines:
            add_tallies(result.tallies, machine.tallies)
        self.counted.enter(result, self.system, self.plan, tuple(machines))
        result.seconds = time.monotonic() - self.started
        return result

    def _drive_batches(
        self,
        executor: Executor,
        work: Callable[[RunBatch], BatchResult],
        machines: Mapping[Configuration, MachineResult],
        result: CheckResult,
    ) -> None:
        """Drive the batches of the plan, until they or the check are over."""
        ahead, now = tee(batches(self.system, self.plan, tuple(machines)))
        with closing(executor.map(work, ahead)) as results:
            for batch in now:
                if self._is_over(result):
                    break
                if batch.config.machine == CORPUS:
                    self.lines -= len(batch.examples)
                self._add_batch(machines[batch.config], next(results))

    def _look_up(self, lookup: Lookup, result: CheckResult) -> None:
        """Look the findings up in other releases, unless the user ends the check."""
        try:
            if not result.interrupted:
                result.findings = lookup.look_up(result.findings)
        except KeyboardInterrupt:
            result.interrupted = True
        if result.interrupted:
            result.findings = lookup.note_interrupt(result.findings)

    def _is_over(self, result: CheckResult) -> bool:
        """Return whether the commands of the plan were carried out, the time limit was reached, or
        nothing new was found for long enough after a finding."""
        if (
            self.plan.examples is None
            and not self.lines
            and self.counted.enough(self.plan.commands)
        ):
            return True
        limit = self.plan.time_limit_s
        result.timed_out = limit is not None and time.monotonic() - self.started > limit
        since = self.finder.commands - self.finder.last_new
        result.stopped = (
            self.finder.has_new
            and (since > self.plan.after_finding or self._makes_no_progress())
            and self._has_unexplained_finding()
        )
        return result.timed_out or result.stopped

    def _has_unexplained_finding(self) -> bool:
        """Return whether a new finding remains that no other release explains. Checked before a finding
        ends the check."""
        if self.lookup is not None:
            self.finder.elsewhere |= self.lookup.known_elsewhere(self.finder.new)
        return self.finder.has_new

    def _makes_no_progress(self) -> bool:
        """Return whether no run has carried out a command, or runs hang at the same place again: more
        of them show the same."""
        unstarted = sum(times for broke, times in self.broke.items() if fails_at_start(broke))
        hangs = [times for broke, times in self.broke.items() if broke.startswith(HANG)]
        return max(hangs, default=0) >= HANGS or self.counted.runs == unstarted >= _UNSTARTED

    def _add_batch(self, result: MachineResult, driven: BatchResult) -> None:
        """Add the results of a batch, and shrink its violations."""
        self.counted.add(driven)
        add_tallies(result.tallies, driven.tallies)
        result.seconds += driven.seconds
        for commands, violations in driven.runs:
            result.examples += 1
            result.commands += commands
            self.counted.count_run(commands, directed=result.name == CORPUS)
            self.finder.commands = self.counted.commands
            for violation, trace in violations:
                result.violated.update(violation.clauses)
                self.broke[failure_text((violation, trace))] += 1
                self.finder.take(violation, trace)
        if self.progress is not None:
            sized = (
                "directed corpus" if result.name == CORPUS else f"{result.name} on {result.preset}"
            )
            where = f"{sized}, mode {result.mode.value}"
            self.progress(where, self.finder.commands, len(self.finder))
