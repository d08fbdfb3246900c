"""A check: many runs of the lockstep on one system, and what they found.

`plan` says what a tier does, `run` does it: runs with fresh decisions until the plan is done or the time is
up, the first violation of every clause shrunk to its smallest trace. What a run does follows from the seed
and its number alone. Runs may execute in other processes; their results are taken in the order of the plan.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import count
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

from impl.adapter import AnySystem, UnusableImplementation
from impl.process.system import LIMITS, Limits
from reference.blocks.clauses import EVERY_CLAUSE
from reference.blocks.config import ENGINE_PRESETS, EngineConfig, engine_preset
from reference.commands import Abort, Close, Command, Mode
from reference.geometry import PRESETS, GeometryError, preset
from stateful_tests.check.executors import SERIAL, Executor
from stateful_tests.coverage.situations import situation
from stateful_tests.generate.choice_source import RandomChoices
from stateful_tests.generate.engine_commands import (
    draw_engine_config, draw_engine_profile, engine_finale, propose_engine_command,
)  # fmt: skip
from stateful_tests.generate.next_command import finale, propose
from stateful_tests.generate.run_profile import MACHINES, draw_geometry, draw_profile
from stateful_tests.lockstep import systems
from stateful_tests.lockstep.engine import EngineLockstep
from stateful_tests.lockstep.lockstep import Lockstep, check_fits, new_tallies, polite, replay
from stateful_tests.lockstep.results import (
    CheckResult, Finding, MachineResult, Tally, Trace, Violation, add_tallies,
)  # fmt: skip
from stateful_tests.shrink.minimise import failing_prefix, minimise, violated
from stateful_tests.shrink.passes import BUDGET

Progress = Callable[[str, int, int], None]
CLIENTS = "clients"  # the machine that drives engines which schedule by themselves
Found = Callable[[dict[str, Trace]], None]  # is given the traces of all violated clauses, as they are now


@dataclass(frozen=True, slots=True)
class Plan:
    """What a check does.

    modes: none stands for the system's own. examples: machine -> its runs per preset and mode, of up to
    `steps` commands each; every fourth has drawn sizes, one in 32 is eight times as long.
    after_finding: commands after the last new finding that end the check. time_limit_s: when to leave the
    rest of the plan. goes_on: a plan that is done soon, as a system offers little, is followed by more runs.
    """

    tier: str
    presets: tuple[str, ...]
    modes: tuple[Mode, ...]
    examples: Mapping[str, int]
    steps: int
    seed: int
    time_limit_s: float
    after_finding: int
    machines: tuple[str, ...] = tuple(MACHINES)
    goes_on: bool = False


def _runs(sessions: int, tree: int, both: int, clients: int) -> dict[str, int]:
    return {"sessions": sessions, "tree": tree, "both": both, CLIENTS: clients}


def _tier(name: str, examples: dict[str, int], steps: int, time_limit_s: float, after_finding: int) -> Plan:
    return Plan(name, tuple(PRESETS), (), examples, steps, 0, time_limit_s, after_finding)


_TIERS = {
    "smoke": replace(_tier("smoke", _runs(13, 8, 8, 40), 40, 60, 4_000), goes_on=True),
    "pr": _tier("pr", _runs(75, 60, 60, 250), 50, 300, 15_000),
    "nightly": _tier("nightly", _runs(1200, 1200, 1200, 8000), 80, 7200, 1_000_000),
}
TIERS = tuple(_TIERS)


def plan(
    tier: str,
    *,
    presets: Sequence[str] | None = None,
    modes: Sequence[Mode] | None = None,
    examples: int | None = None,
    steps: int | None = None,
    seed: int | None = None,
    machines: Sequence[str] | None = None,
) -> Plan:
    """The tier's plan with what was asked for instead. Raises ValueError with a one-line reason."""
    if tier not in _TIERS:
        raise ValueError(f"tier: unknown {tier!r}; one of {', '.join(TIERS)}")
    for name in presets or ():
        if name not in PRESETS and name not in ENGINE_PRESETS:
            raise ValueError(f"preset: unknown {name!r}; one of {', '.join((*PRESETS, *ENGINE_PRESETS))}")
    for name in machines or ():
        if name not in (*MACHINES, CLIENTS):
            raise ValueError(f"machine: unknown {name!r}; one of {', '.join(MACHINES)}")
    for what, value in (("examples", examples), ("steps", steps)):
        if value is not None and not 1 <= value <= 10**7:
            raise ValueError(f"{what}: must be between 1 and 10000000, not {value}")
    base = _TIERS[tier]
    if seed is None:
        seed = time.time_ns() % 10**9 if tier == "nightly" else base.seed
    return replace(
        base,
        presets=tuple(presets) if presets else base.presets,
        modes=tuple(modes) if modes else base.modes,
        examples=base.examples if examples is None else dict.fromkeys((*MACHINES, CLIENTS), examples),
        steps=base.steps if steps is None else steps,
        seed=seed,
        machines=tuple(machines) if machines else base.machines,
        goes_on=base.goes_on and examples is None,
    )


def for_system(plan: Plan, system: AnySystem) -> Plan:
    """The plan for this kind of system: others' machines and presets are left out of what was not asked
    for."""
    machines, presets = (tuple(MACHINES), tuple(PRESETS))
    if system.capabilities.schedules:
        machines, presets = (CLIENTS,), tuple(ENGINE_PRESETS)
    if plan.presets == tuple(PRESETS):
        plan = replace(plan, presets=presets)
    return replace(plan, machines=machines) if plan.machines == tuple(MACHINES) else plan


def sizes_for(machine: str, name: str) -> Any:
    """The preset called `name`, with a radix tree for the machines that drive one; of engines their own."""
    if machine == CLIENTS:
        return engine_preset(name)
    return replace(preset(name), tree=machine != "sessions")


def check_machine(system: AnySystem, machine: str, geometry: Any) -> None:
    """Raise UnusableImplementation when this machine cannot drive the system."""
    check_fits(system, geometry)
    if isinstance(geometry, EngineConfig):
        system.reset(geometry)  # type: ignore[arg-type]
        return
    missing = {"Match", "Insert"} - system.capabilities.commands
    if machine == "tree" and missing:
        raise UnusableImplementation(f"{system.name} does not offer {', '.join(sorted(missing))}")


class Named(NamedTuple):
    """A system by name, as `systems.resolve` takes it: what every process can make for itself."""

    impl: str
    device: str = "cpu"
    sglang_path: str | None = None
    limits: Limits = LIMITS
    in_process: bool = True


class Cell(NamedTuple):
    """One machine on one preset in one mode."""

    machine: str
    preset: str
    mode: Mode


class Stint(NamedTuple):
    """A few runs of one cell, by their numbers."""

    cell: Cell
    examples: range


@dataclass(slots=True)
class Driven:
    """What a stint met. runs: of each its commands and the violation that it ended with, if it did, with its
    trace; after that the one that came up when all was closed."""

    tallies: dict[str, Tally]
    runs: list[tuple[int, list[tuple[Violation, Trace]]]] = field(default_factory=list)
    refusals: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    situations: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


ONCE = "(did not show again: the system is not deterministic, or keeps something over reset)"
_SHORT = 8  # commands that fit a screen: a longer trace is worth another try
_RETRIES = 4
# Candidates for a clause that another one's trace shows already: it came up at the same step.
_BESIDE = 200
_CLOSED = "SES-4"  # asked after any other violation, once all is closed
_STINT = 3  # runs of one cell before the next has its turn
# A plan that goes on ends when no new situation has come up for _QUIET commands; at the latest after _FULL
# commands, about the plan for a system that offers everything, or _MORE_S seconds from its start.
_QUIET, _FULL, _MORE_S = 4_000, 20_000, 10


def run(
    system: AnySystem,
    plan: Plan,
    progress: Progress | None = None,
    base: AnySystem | None = None,
    *,
    executor: Executor = SERIAL,
    named: Named | None = None,
    found: Found | None = None,
) -> CheckResult:
    """Carry the plan out on `system`.

    The cells of the plan take turns, a few runs each, so that every kind of fault comes up early. base: what
    was there before; what it violates too ends nothing, and of each clause a trace is looked for in which it
    conforms. executor: where runs execute, on systems that are made from `named`; without that all is done
    on `system` itself. found: is told of a violation before it is shrunk, and of each smaller trace. An
    interrupt ends the check with what was found until then. Raises UnusableImplementation when no cell fits.
    """
    plan = for_system(plan, system)
    work: Callable[[Stint], Driven] = partial(drive, system, plan)
    if named is None:
        executor = SERIAL
    elif executor is not SERIAL:
        work = partial(_drive_named, named, plan)
    return _Campaign(system, plan, progress, base, found).run(executor, work)


def drive(system: AnySystem, plan: Plan, stint: Stint) -> Driven:
    """A few runs on a system."""
    driven, began = Driven(new_tallies(stint.cell.machine == CLIENTS)), time.monotonic()
    one = _engine_example if stint.cell.machine == CLIENTS else _example
    for example in stint.examples:
        one(system, plan, stint.cell, example, driven)
    driven.seconds = time.monotonic() - began
    return driven


def _drive_named(named: Named, plan: Plan, stint: Stint) -> Driven:
    return drive(_system(named), plan, stint)


@lru_cache(maxsize=1)
def _system(named: Named) -> Any:
    """The system of this process, which is closed when it ends."""
    system = systems.resolve(
        named.impl, device=named.device, sglang_path=named.sglang_path, limits=named.limits,
        in_process=named.in_process,
    )  # fmt: skip
    Finalize(None, system.close, exitpriority=1)
    return system


def _example(system: Any, plan: Plan, cell: Cell, example: int, driven: Driven) -> None:
    machine = cell.machine
    seed = f"{plan.seed}/{cell.preset}/{cell.mode}/{example}"
    source = RandomChoices(seed if machine == "sessions" else f"{seed}/{machine}")
    profile = draw_profile(source, system.capabilities, machine)
    geometry = sizes_for(machine, cell.preset)
    if example % 4 == 3:  # the presets are eight points; the specification is for all sizes
        geometry = draw_geometry(source, geometry)
    lockstep = Lockstep(system, geometry, cell.mode, tallies=driven.tallies, refusals=driven.refusals)
    done: list[Command] = []

    def do(command: Command) -> None:
        done.append(command)
        driven.kinds[type(command).__name__] += 1
        was = lockstep.state
        outcome = lockstep.do(command)
        if lockstep.violation is None:
            driven.situations[situation(was, command, outcome, lockstep.state)] += 1

    # Now and then a long life: what builds up over many turns shows in no short one.
    for _ in range(plan.steps * (8 if example % 32 == 8 else 1)):
        do(propose(lockstep.state, source, profile))
        if lockstep.violation is not None:
            break
    else:
        for command in finale(lockstep.state, system.capabilities):
            if lockstep.violation is None:
                do(command)
    commands, met = len(done), []
    if lockstep.violation is not None:
        met.append((lockstep.violation, Trace(geometry, cell.mode, tuple(done), "generated")))
        done += _all_closed(lockstep)
        if lockstep.violation is not None:
            met.append((lockstep.violation, Trace(geometry, cell.mode, tuple(done), "generated")))
    driven.runs.append((commands, met))


def _all_closed(lockstep: Lockstep) -> list[Command]:
    """After a violation: end every turn that the system shows, then close its sessions, and ask whether they
    are gone. A fault that is known must not hide this one."""
    violation, facts = lockstep.violation, lockstep.moment().facts
    ends: list[Command] = []
    if violation is not None and not {"BROKEN", _CLOSED} & {*violation.clauses, *lockstep.waived}:
        ends += [Abort(name) for name in sorted(facts.requests)]
        ends += [Close(name) for name, session in sorted(facts.sessions.items()) if not session.closing]
    offered = lockstep.system.capabilities.commands
    ends = [command for command in ends if type(command).__name__ in offered]
    lockstep.go_on(_CLOSED)
    for command in ends:
        if lockstep.violation is None:
            lockstep.do(command)
    if lockstep.violation is lockstep.parted:  # it broke on the way
        lockstep.violation = None
    return ends


def _engine_example(system: Any, plan: Plan, cell: Cell, example: int, driven: Driven) -> None:
    source = RandomChoices(f"{plan.seed}/{cell.preset}/{example}/{cell.machine}")
    profile, config = draw_engine_profile(source), engine_preset(cell.preset)
    tallied = partial(EngineLockstep, tallies=driven.tallies, refusals=driven.refusals)
    try:
        lockstep = tallied(system, draw_engine_config(source, config) if example % 4 == 3 else config)
    except UnusableImplementation:  # a release need not take every configuration
        lockstep = tallied(system, config)
    config = lockstep.ledger.config
    done: list[Any] = []
    steps = plan.steps * (8 if example % 32 == 8 else 1)
    while lockstep.violation is None and len(done) < 2 * steps + 100:
        facts = lockstep.facts
        if len(done) < steps:
            command = propose_engine_command(lockstep.ledger, facts.results_due, source, profile)
        else:
            ending = engine_finale(lockstep.ledger, facts.results_due, facts.steps_in_flight > 0)
            if ending is None:
                break
            command = ending
        done.append(command)
        driven.kinds[type(command).__name__] += 1
        lockstep.do(command)
    trace = Trace(config, cell.mode, tuple(done), "generated")
    driven.runs.append((len(done), [(lockstep.violation, trace)] if lockstep.violation is not None else []))


@dataclass(slots=True)
class _Caught:
    """Violations of one clause so far."""

    trace: Trace
    first: Trace  # as it was met
    violation: Violation
    modes: set[Mode]
    times: int
    after_s: float
    after_commands: int
    old: bool  # the base violates it in this trace as well
    retries: int = 0


@dataclass(slots=True)
class _Campaign:
    system: AnySystem
    plan: Plan
    progress: Progress | None
    base: AnySystem | None
    found: Found | None = None
    shrinking: dict[str, _Caught] = field(default_factory=dict)  # what is not in `caught` yet
    started: float = field(default_factory=time.monotonic)
    caught: dict[str, _Caught] = field(default_factory=dict)
    last_new: int = 0  # commands before the last new finding
    last_situation: int = 0  # commands before the last new situation
    commands: int = 0

    def run(self, executor: Executor, work: Callable[[Stint], Driven]) -> CheckResult:
        plan, result = self.plan, CheckResult(self.system.name, self.plan.tier, self.plan.seed)
        engine = self.system.capabilities.schedules
        machines = {cell: MachineResult(*cell, tallies=new_tallies(engine)) for cell in self._cells()}
        result.machines = list(machines.values())
        result.planned = sum(plan.examples[cell.machine] for cell in machines)
        refusals, kinds, situations = Counter[str](), Counter[str](), Counter[str]()
        try:
            with closing(executor.map(work, self._stints(tuple(machines)))) as driven:
                for stint in self._stints(tuple(machines)):
                    if self._over(result):
                        break
                    seen = next(driven)
                    refusals += seen.refusals
                    kinds += seen.kinds
                    self._take(machines[stint.cell], seen)
                    if not seen.situations.keys() <= situations.keys():
                        self.last_situation = self.commands
                    situations += seen.situations
        except KeyboardInterrupt:
            result.interrupted = True
            self.caught = self.shrinking | self.caught
        result.refusals = dict(refusals.most_common())
        result.commands_by_kind = dict(kinds.most_common())
        result.situations = dict(sorted(situations.items()))
        result.findings = [self._finding(c) for c in sorted(self.caught, key=evaluation_order)]
        for machine in result.machines:
            add_tallies(result.tallies, machine.tallies)
        result.unreached = tuple(c for c, t in result.tallies.items() if not t.reached)
        result.seconds = time.monotonic() - self.started
        return result

    def _cells(self) -> list[Cell]:
        cells = []
        for name in self.plan.presets:
            for mode in self.plan.modes or self.system.capabilities.modes:
                for machine in self.plan.machines:
                    try:
                        check_machine(self.system, machine, sizes_for(machine, name))
                    except (UnusableImplementation, GeometryError) as error:
                        reason = error
                        continue
                    cells.append(Cell(machine, name, mode))
        if not cells:
            raise UnusableImplementation(str(reason))
        return cells

    def _stints(self, cells: Sequence[Cell]) -> Iterator[Stint]:
        """The runs of the plan, and without end those after it if it goes on."""
        most = max(self.plan.examples[cell.machine] for cell in cells)
        for start in range(0, most, _STINT):
            for cell in cells:
                stop = min(start + _STINT, self.plan.examples[cell.machine])
                if start < stop:
                    yield Stint(cell, range(start, stop))
        for more in count(step=_STINT) if self.plan.goes_on else ():
            for cell in cells:
                start = self.plan.examples[cell.machine] + more
                yield Stint(cell, range(start, start + _STINT))

    def _over(self, result: CheckResult) -> bool:
        """The time limit was met, or nothing new came up for long enough after a finding or the plan."""
        seconds = time.monotonic() - self.started
        if result.examples >= result.planned:
            if self.caught:
                result.went_on = "until something was found"
            elif self.commands - self.last_situation >= _QUIET:
                result.went_on = f"until {_QUIET} commands had brought no new situation"
            elif self.commands >= _FULL:
                result.went_on = f"until {_FULL} commands were done"
            elif seconds > _MORE_S:
                result.went_on = f"until {_MORE_S} s were up"
            return bool(result.went_on)
        result.timed_out = seconds > self.plan.time_limit_s
        new = any(not known.old for known in self.caught.values())
        result.stopped = new and self.commands - self.last_new > self.plan.after_finding
        return result.timed_out or result.stopped

    def _take(self, result: MachineResult, driven: Driven) -> None:
        """Enter what a stint met, and shrink what it violated."""
        add_tallies(result.tallies, driven.tallies)
        result.seconds += driven.seconds
        for commands, met in driven.runs:
            result.examples += 1
            result.commands += commands
            self.commands += commands
            for violation, trace in met:
                result.violated.update(violation.clauses)
                self._catch(violation, trace)
        if self.progress is not None:
            where = f"{result.name} on {result.preset}, {result.mode.value}"
            self.progress(where, self.commands, len(self.caught))

    def _catch(self, violation: Violation, trace: Trace) -> None:
        """Count a violation; shrink the first of its kind in each mode."""
        smallest: Trace | None = None
        shown: tuple[str, ...] = ()
        after = time.monotonic() - self.started
        for clause in violation.clauses:
            if clause not in self.caught:
                met = _Caught(trace, trace, violation, {trace.mode}, 1, after, self.commands, False)
                self.shrinking[clause] = met
        self._tell()
        for clause in violation.clauses:
            known = self.caught.get(clause)
            base = None
            if known is not None:
                known.times += 1
                if known.old and self.base is not None and violated(self.base, trace, clause) == ():
                    base = self.base  # another fault than the one that was there before
                elif trace.mode in known.modes and not self._may_get_smaller(known, trace.mode):
                    continue
            if smallest is None or clause not in shown or base is not None:
                budget = BUDGET if smallest is None else _BESIDE
                smallest = minimise(self.system, trace, clause, budget=budget, base=base)
                shown = violated(self.system, smallest, clause) or ()
                if clause not in shown:  # it comes and goes
                    smallest, shown = trace, ()
            modes = {trace.mode}
            faithful = replace(smallest, mode=Mode.FAITHFUL)
            free = trace.mode is Mode.FREE
            if free and failing_prefix(self.system, clause, base, faithful) == smallest.commands:
                modes.add(Mode.FAITHFUL)  # a scheduler could do the very same
                smallest, shown = faithful, violated(self.system, faithful, clause) or ()
            old = self.base is not None and clause in (violated(self.base, smallest, clause) or ())
            if known is None or (known.old and not old):
                known = _Caught(smallest, trace, violation, set(), 1, after, self.commands, old)
                self.caught[clause] = known
                self.last_new = self.commands
                self.shrinking.pop(clause, None)
            if old and not known.old:
                continue
            known.modes |= modes
            # A trace that a faithful scheduler can produce says more than a shorter free one.
            if rank(smallest) < rank(known.trace):
                known.trace = smallest
            self._tell()

    def _tell(self) -> None:
        if self.found is not None:
            together = self.shrinking | self.caught
            self.found({clause: together[clause].trace for clause in sorted(together, key=evaluation_order)})

    def _may_get_smaller(self, known: _Caught, mode: Mode) -> bool:
        """Another violation of the same clause is worth shrinking: the trace is long or impolite."""
        known.retries += 1
        long = len(known.trace.commands) > _SHORT or not polite(known.trace)
        return long and rank(known.trace)[0] == (mode is Mode.FREE) and known.retries <= _RETRIES

    def _finding(self, clause: str) -> Finding:
        caught = self.caught[clause]
        run = replay(self.system, replace(caught.trace, clause=clause))
        if run.violation is None:
            run = replay(self.system, replace(caught.first, clause=clause))
        if run.violation is None:
            # Reported all the same: a fault that comes and goes is one, and so is a reset that forgets.
            told = replace(caught.violation, observed=f"{caught.violation.observed} {ONCE}")
            run = replace(run, violation=told)
        modes = tuple(m for m in Mode if m in caught.modes)
        return Finding(clause, run, modes, caught.times, caught.after_s, caught.after_commands)


def rank(trace: Trace) -> tuple[bool, bool, int]:
    """The smallest trace is the best one, of a faithful scheduler and polite clients before all others."""
    return trace.mode is Mode.FREE, not polite(trace), len(trace.commands)


def evaluation_order(clause: str) -> int:
    """Where a clause comes in a report."""
    order = list(EVERY_CLAUSE)
    return order.index(clause) if clause in order else -1
