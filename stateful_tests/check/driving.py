"""Runs of a check: what a few of them do on a system. All follows from the seed and the run's number."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

from impl.adapter import AnySystem, Capabilities, UnusableImplementation
from impl.process.system import LIMITS, Limits
from reference import model
from reference.blocks.config import engine_preset
from reference.commands import SHARED, Command, Mode, Outcome
from reference.geometry import Geometry
from stateful_tests.check.tiers import CLIENTS, Plan, sizes_for
from stateful_tests.coverage.situations import situation
from stateful_tests.generate.choice_source import RandomChoices
from stateful_tests.generate.engine_commands import (
    draw_engine_config, draw_engine_profile, engine_finale, propose_engine_command,
)  # fmt: skip
from stateful_tests.generate.next_command import finale, propose
from stateful_tests.generate.run_profile import RunProfile, draw_geometry, draw_profile, with_settings
from stateful_tests.lockstep import systems
from stateful_tests.lockstep.engine import EngineLockstep
from stateful_tests.lockstep.lockstep import Lockstep, new_tallies
from stateful_tests.lockstep.past import violations
from stateful_tests.lockstep.results import Tally, Trace, Violation


class Named(NamedTuple):
    """A system by name, as `systems.resolve` takes it: what every process can make for itself."""

    impl: str
    device: str = "cpu"
    checkout: str | None = None
    limits: Limits = LIMITS
    in_process: bool = True


class Cell(NamedTuple):
    """One machine on one preset in one mode."""

    machine: str
    preset: str
    mode: Mode


class Stint(NamedTuple):
    """A few runs of one cell, by their numbers. wanted: of them those alone that meet one of these situations
    on the reference, which tells it in a quarter of the time."""

    cell: Cell
    examples: range
    wanted: frozenset[str] = frozenset()


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


def drive(system: AnySystem, plan: Plan, stint: Stint) -> Driven:
    """A few runs on a system."""
    driven, began = Driven(new_tallies(stint.cell.machine == CLIENTS)), time.monotonic()
    one = _engine_example if stint.cell.machine == CLIENTS else _example
    for example in stint.examples:
        if not stint.wanted or _foreseen(system, plan, stint, example):
            one(system, plan, stint.cell, example, driven)
    driven.seconds = time.monotonic() - began
    return driven


def drive_named(named: Named, plan: Plan, stint: Stint) -> Driven:
    """The same on a system of this process."""
    return drive(_system(named), plan, stint)


@lru_cache(maxsize=1)
def _system(named: Named) -> Any:
    """The system of this process, which is closed when it ends. What it has loaded stays: torch's objects are
    not looked through for garbage again and again."""
    system = systems.resolve(
        named.impl, device=named.device, checkout=named.checkout, limits=named.limits,
        in_process=named.in_process,
    )  # fmt: skip
    Finalize(None, system.close, exitpriority=1)
    gc.freeze()
    return system


class Begun(NamedTuple):
    """A run before its first command: its sizes, who decides, and what it is like."""

    geometry: Geometry
    source: RandomChoices
    profile: RunProfile


def begun(system: AnySystem, plan: Plan, cell: Cell, example: int) -> Begun:
    """A run by its number."""
    machine, seed = cell.machine, f"{plan.seed}/{cell.preset}/{cell.mode}/{example}"
    source = RandomChoices(seed if machine == "sessions" else f"{seed}/{machine}")
    profile, geometry = draw_profile(source, system.capabilities, machine), sizes_for(machine, cell.preset)
    if example % 4 == 3:  # the presets are eight points; the specification is for all sizes
        geometry = draw_geometry(source, geometry)
    geometry = with_settings(RandomChoices(f"{seed}/settings"), geometry, system.capabilities)
    return Begun(geometry, source, profile)


class _Alone:
    """The reference, with no system beside it."""

    violation = None

    def __init__(self, geometry: Geometry, mode: Mode) -> None:
        self.state = model.initial(geometry, mode)

    def do(self, command: Command) -> Outcome:
        self.state, outcome = model.step(self.state, command)
        return outcome


def _carried_out(
    run: Begun, on: Lockstep | _Alone, plan: Plan, example: int, capabilities: Capabilities
) -> Iterator[tuple[Command, str]]:
    """The commands of a run, each with the situation that it met; none where it ended with a violation."""

    def do(command: Command) -> tuple[Command, str]:
        was = on.state
        outcome = on.do(command)
        return command, "" if on.violation is not None else situation(was, command, outcome, on.state)

    # Now and then a long life: what builds up over many turns shows in no short one.
    for _ in range(plan.steps * (8 if example % 32 == 8 else 1)):
        yield do(propose(on.state, run.source, run.profile))
        if on.violation is not None or on.state.serial == SHARED - 1:
            break
    if example % 4 != 1:  # else the next run starts on what this one leaves
        for command in finale(on.state, capabilities):
            if on.violation is None:
                yield do(command)


def _foreseen(system: Any, plan: Plan, stint: Stint, example: int) -> bool:
    run = begun(system, plan, stint.cell, example)
    alone = _Alone(run.geometry, stint.cell.mode)
    commands = _carried_out(run, alone, plan, example, system.capabilities)
    return any(met in stint.wanted for _, met in commands)


def _example(system: Any, plan: Plan, cell: Cell, example: int, driven: Driven) -> None:
    run = begun(system, plan, cell, example)
    lockstep = Lockstep(system, run.geometry, cell.mode, tallies=driven.tallies, refusals=driven.refusals)
    done: list[Command] = []
    for command, met in _carried_out(run, lockstep, plan, example, system.capabilities):
        done.append(command)
        driven.kinds[type(command).__name__] += 1
        if met:
            driven.situations[met] += 1
    driven.runs.append((len(done), violations(lockstep, done, "generated")))


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
            command = propose_engine_command(lockstep.ledger, facts, source, profile)
        else:
            ending = engine_finale(lockstep.ledger, facts)
            if ending is None:
                break
            command = ending
        done.append(command)
        driven.kinds[type(command).__name__] += 1
        lockstep.do(command)
    trace = Trace(config, cell.mode, tuple(done), "generated")
    driven.runs.append((len(done), [(lockstep.violation, trace)] if lockstep.violation is not None else []))
