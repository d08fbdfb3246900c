"""A check: many runs of the lockstep on one system, and what they found.

`plan` says what a tier does, `run` does it: runs with fresh decisions until the plan is done or the
time is up, the first violation of every clause shrunk to its smallest trace.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from impl.adapter import System, UnusableImplementation
from reference.clauses import CLAUSES
from reference.commands import Command, Mode
from reference.geometry import PRESETS, Geometry, preset
from stateful_tests.coverage.situations import situation
from stateful_tests.generate.choice_source import RandomChoices
from stateful_tests.generate.next_command import finale, propose
from stateful_tests.generate.run_profile import MACHINES, draw_geometry, draw_profile
from stateful_tests.lockstep.lockstep import Lockstep, check_fits, new_tallies, replay
from stateful_tests.lockstep.results import CheckResult, Finding, MachineResult, Trace, Violation, add_tallies
from stateful_tests.shrink.minimise import failing_prefix, minimise, violated
from stateful_tests.shrink.passes import BUDGET

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a check does.

    modes: none stands for the system's own. examples: machine -> its runs per preset and mode, of up to
    `steps` commands each; every fourth has drawn sizes, one in 32 is eight times as long.
    after_finding_s: how long to go on after the last new finding. time_limit_s: when to leave
    the rest of the plan.
    """

    tier: str
    presets: tuple[str, ...]
    modes: tuple[Mode, ...]
    examples: Mapping[str, int]
    steps: int
    seed: int
    machines: tuple[str, ...] = tuple(MACHINES)
    time_limit_s: float = 300.0
    after_finding_s: float = 10.0


def _runs(sessions: int, tree: int, both: int) -> dict[str, int]:
    return {"sessions": sessions, "tree": tree, "both": both}


_ALL = tuple(PRESETS)
_TIERS = {
    "smoke": Plan("smoke", _ALL, (), _runs(13, 8, 8), 40, 0, time_limit_s=60, after_finding_s=3),
    "pr": Plan("pr", _ALL, (), _runs(75, 60, 60), 50, 0, time_limit_s=300, after_finding_s=10),
    "nightly": Plan(
        "nightly", _ALL, (), _runs(1200, 1200, 1200), 80, 0, time_limit_s=7200, after_finding_s=600
    ),
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
        if name not in PRESETS:
            raise ValueError(f"preset: unknown {name!r}; one of {', '.join(PRESETS)}")
    for name in machines or ():
        if name not in MACHINES:
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
        examples=base.examples if examples is None else dict.fromkeys(MACHINES, examples),
        steps=base.steps if steps is None else steps,
        seed=seed,
        machines=tuple(machines) if machines else base.machines,
    )


def sizes_for(machine: str, name: str) -> Geometry:
    """The preset called `name`, with a radix tree for the machines that drive one."""
    return replace(preset(name), tree=machine != "sessions")


def check_machine(system: System, machine: str, geometry: Geometry) -> None:
    """Raise UnusableImplementation when this machine cannot drive the system."""
    check_fits(system, geometry)
    missing = {"Match", "Insert"} - system.capabilities.commands
    if machine == "tree" and missing:
        raise UnusableImplementation(f"{system.name} does not offer {', '.join(sorted(missing))}")


def run(
    system: System, plan: Plan, progress: Progress | None = None, base: System | None = None
) -> CheckResult:
    """Carry the plan out on `system`.

    The cells of the plan (machine, preset, mode) take turns, a few runs each, so that every kind of
    fault comes up early. base: what was there before; what it violates too ends nothing, and of each clause
    a trace is looked for in which it conforms. Raises UnusableImplementation when no cell fits the system.
    """
    return _Campaign(system, plan, progress, base).run()


@dataclass(slots=True)
class _Cell:
    """One machine on one preset in one mode."""

    preset: str
    mode: Mode
    result: MachineResult


@dataclass(slots=True)
class _Caught:
    """Violations of one clause so far."""

    trace: Trace
    violation: Violation
    modes: set[Mode]
    times: int
    after_s: float
    after_commands: int
    old: bool  # the base violates it in this trace as well
    retries: int = 0


ONCE = "(did not show again: the system is not deterministic, or keeps something over reset)"
_SHORT = 8  # commands that fit a screen: a longer trace is worth another try
_RETRIES = 4
# Candidates for a clause that another one's trace tells of already: it came up at the same step.
_BESIDE = 200
_TURN = 3  # runs of one cell before the next has its turn


@dataclass(slots=True)
class _Campaign:
    system: System
    plan: Plan
    progress: Progress | None
    base: System | None
    started: float = field(default_factory=time.monotonic)
    caught: dict[str, _Caught] = field(default_factory=dict)
    last_new: float = 0.0
    commands: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    situations: Counter[str] = field(default_factory=Counter)

    def run(self) -> CheckResult:
        plan = self.plan
        result = CheckResult(self.system.name, plan.tier, plan.seed)
        cells = self._cells()
        result.machines = [c.result for c in cells]
        for machine in result.machines:
            machine.tallies = new_tallies()
        for start in range(0, max(plan.examples[c.result.name] for c in cells), _TURN):
            for cell in cells:
                for example in range(start, min(start + _TURN, plan.examples[cell.result.name])):
                    if self._over(result):
                        break
                    self._example(cell, example)
            if self._over(result):
                break
        result.refusals = dict(self.refusals.most_common())
        result.commands_by_kind = dict(self.kinds.most_common())
        result.situations = dict(sorted(self.situations.items()))
        result.findings = [self._finding(c) for c in sorted(self.caught, key=evaluation_order)]
        for machine in result.machines:
            add_tallies(result.tallies, machine.tallies)
        result.unreached = tuple(c for c, t in result.tallies.items() if not t.reached)
        result.seconds = time.monotonic() - self.started
        return result

    def _cells(self) -> list[_Cell]:
        cells = []
        for name in self.plan.presets:
            for mode in self.plan.modes or self.system.capabilities.modes:
                for machine in self.plan.machines:
                    try:
                        check_machine(self.system, machine, sizes_for(machine, name))
                    except UnusableImplementation as error:
                        reason = error
                        continue
                    cells.append(_Cell(name, mode, MachineResult(machine, name, mode)))
        if not cells:
            raise reason
        return cells

    def _over(self, result: CheckResult) -> bool:
        """The time limit was met, or nothing new came up for long enough after a finding."""
        now = time.monotonic()
        if now - self.started > self.plan.time_limit_s:
            result.timed_out = True
        new = any(not known.old for known in self.caught.values())
        result.stopped = new and now - self.last_new > self.plan.after_finding_s
        return result.timed_out or result.stopped

    def _example(self, cell: _Cell, example: int) -> None:
        machine = cell.result.name
        seed = f"{self.plan.seed}/{cell.preset}/{cell.mode}/{example}"
        source = RandomChoices(seed if machine == "sessions" else f"{seed}/{machine}")
        profile = draw_profile(source, self.system.capabilities, machine)
        began = time.monotonic()
        geometry = sizes_for(machine, cell.preset)
        if example % 4 == 3:  # the presets are eight points; the specification is for all sizes
            geometry = draw_geometry(source, geometry)
        lockstep = Lockstep(
            self.system, geometry, cell.mode, tallies=cell.result.tallies, refusals=self.refusals
        )
        done: list[Command] = []

        def do(command: Command) -> None:
            done.append(command)
            self.kinds[type(command).__name__] += 1
            was = lockstep.state
            outcome = lockstep.do(command)
            if lockstep.violation is None:
                self.situations[situation(was, command, outcome, lockstep.state)] += 1

        # Now and then a long life: what builds up over many turns shows in no short one.
        for _ in range(self.plan.steps * (8 if example % 32 == 8 else 1)):
            do(propose(lockstep.state, source, profile))
            if lockstep.violation is not None:
                break
        else:
            for command in finale(lockstep.state, self.system.capabilities):
                if lockstep.violation is None:
                    do(command)
        cell.result.examples += 1
        cell.result.commands += len(done)
        cell.result.seconds += time.monotonic() - began
        self.commands += len(done)
        if lockstep.violation is not None:
            cell.result.violated.update(lockstep.violation.clauses)
            self._catch(lockstep.violation, Trace(geometry, cell.mode, tuple(done), "generated"))
        if self.progress is not None:
            where = f"{cell.result.name} on {cell.preset}, {cell.mode.value}"
            self.progress(where, self.commands, len(self.caught))

    def _catch(self, violation: Violation, trace: Trace) -> None:
        """Count a violation; shrink the first of its kind in each mode."""
        smallest: Trace | None = None
        shown: tuple[str, ...] = ()
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
                shown = self._shown(smallest)
            modes = {trace.mode}
            faithful = replace(smallest, mode=Mode.FAITHFUL)
            failing = failing_prefix(self.system, clause, base, faithful)
            if trace.mode is Mode.FREE and failing == smallest.commands:
                modes.add(Mode.FAITHFUL)  # a scheduler could do the very same
                smallest, shown = faithful, self._shown(faithful)
            old = self.base is not None and clause in (violated(self.base, smallest, clause) or ())
            if known is None or (known.old and not old):
                after = time.monotonic() - self.started
                known = _Caught(smallest, violation, set(), 1, after, self.commands, old)
                self.caught[clause] = known
                self.last_new = time.monotonic()
            if old and not known.old:
                continue
            known.modes |= modes
            # A trace that a faithful scheduler can produce says more than a shorter free one.
            if rank(smallest) < rank(known.trace):
                known.trace = smallest

    def _shown(self, trace: Trace) -> tuple[str, ...]:
        """The clauses that a trace violates at its last step."""
        seen = replay(self.system, trace).violation
        return seen.clauses if seen is not None else ()

    def _may_get_smaller(self, known: _Caught, mode: Mode) -> bool:
        """Another violation of the same clause is worth shrinking: the trace is still long."""
        known.retries += 1
        long = len(known.trace.commands) > _SHORT and rank(known.trace)[0] == (mode is Mode.FREE)
        return long and known.retries <= _RETRIES

    def _finding(self, clause: str) -> Finding:
        caught = self.caught[clause]
        run = replay(self.system, replace(caught.trace, clause=clause))
        if run.violation is None:
            # Told all the same: a fault that comes and goes is one, and so is a reset that forgets.
            told = replace(caught.violation, observed=f"{caught.violation.observed} {ONCE}")
            run = replace(run, violation=told)
        modes = tuple(m for m in Mode if m in caught.modes)
        return Finding(clause, run, modes, caught.times, caught.after_s, caught.after_commands)


def rank(trace: Trace) -> tuple[bool, int]:
    """The smallest trace is the best one, one of a faithful scheduler before all others."""
    return trace.mode is Mode.FREE, len(trace.commands)


def evaluation_order(clause: str) -> int:
    """Where a clause comes in a report."""
    order = list(CLAUSES)
    return order.index(clause) if clause in order else -1
