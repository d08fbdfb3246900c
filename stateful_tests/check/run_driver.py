"""Runs of a check: what a few of them do on a system. All follows from the seed and the run's number."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain
from multiprocessing.util import Finalize
from operator import attrgetter
from typing import Any, NamedTuple, cast

from impl.adapter import AnySystem, Capabilities, Misfit, UnusableImplementation
from impl.engines import DriveOptions
from reference import model
from reference.clauses.step import Step
from reference.commands import (
    Command, Done, Extend, Mode, Outcome, Reason, Refused, SpecDecode,
)  # fmt: skip
from reference.geometry import Geometry
from reference.state import State
from reference.system_kinds import BLOCKS, PAIRS, TIERS, AnyCommand, AnyConfig, kind_of_config
from reference.token_ids import SHARED
from stateful_tests.check.check_plans import CORPUS, Plan, fit_sizes
from stateful_tests.check import corpus
from stateful_tests.check.corpus import FIXTURE, CorpusLine
from stateful_tests.check.run_batches import (
    HANG, HANGS, BatchResult, Configuration, Named, RunBatch, failure_text,
)  # fmt: skip
from stateful_tests.coverage.situations import situations
from impl.choices import Choices, RandomChoices, pick
from stateful_tests.generate.engine_commands import engine_finale, propose_engine_command
from stateful_tests.generate.engine_profile import (
    draw_engine_config,
    draw_engine_profile,
    fit_config,
)
from stateful_tests.generate.next_command import finale, propose
from stateful_tests.generate.pair_commands import (
    draw_pair_config,
    draw_pair_profile,
    pair_finale,
    propose_pair_command,
)
from stateful_tests.generate.tier_commands import (
    draw_tier_config,
    propose_tier_command,
    tier_finale,
)
from stateful_tests.generate.tier_profile import draw_tier_profile
from stateful_tests.generate.run_profile import RunProfile, draw_geometry, draw_profile, with_settings
from stateful_tests.lockstep import system_names
from stateful_tests.lockstep.any_lockstep import AnyLockstep
from stateful_tests.lockstep.driven_kinds import check_fits, lockstep_on, new_tallies
from stateful_tests.lockstep.lockstep import Lockstep
from stateful_tests.lockstep.final_closes import violations


# Commands more than a run had: a run that has not ended by then never will. Chunks of two tokens, one request
# at a time, take some 700 of them.
_LAST = 1_000


def drive(system: AnySystem, plan: Plan, batch: RunBatch) -> BatchResult:
    """Run a batch on a system."""
    record = BatchResult(new_tallies(system.capabilities))
    began = time.monotonic()
    machines: dict[str, Any] = {**dict.fromkeys(_DRAWS, _run_judged_example), CORPUS: _run_line}
    for example in batch.examples:
        machines.get(batch.config.machine, _run_example)(system, plan, batch.config, example, record)
        if (
            sum(broke.startswith(HANG) for _, found in record.runs for broke in map(failure_text, found))
            == HANGS
        ):
            break  # each takes its time
    record.seconds = time.monotonic() - began
    return record


def drive_named(named: Named, plan: Plan, batch: RunBatch) -> BatchResult:
    """Drive a batch of runs on a system of this process, given by its name."""
    return drive(_system(named), plan, batch)


@lru_cache(maxsize=1)
def _system(named: Named) -> AnySystem:
    """Return the system of this process, which is closed when the process ends. Its objects stay out of
    garbage collection: torch has many."""
    options = DriveOptions(named.checkout, named.device, limits=named.limits)
    system: AnySystem = system_names.driven_system(named.spec, options, named.in_process)
    check_also(system, named.also_checked)
    Finalize(None, partial(_close, system), exitpriority=1)
    gc.freeze()
    return system


def _close(system: AnySystem) -> None:
    # whoever started this process closes a system too, and says why it cannot
    with suppress(Exception):
        system.close()


def check_also(system: Any, clauses: frozenset[str]) -> None:
    """Check a system for clauses that its release is known to violate."""
    can = system.capabilities
    if clauses & can.known.keys():
        known = {clause: reason for clause, reason in can.known.items() if clause not in clauses}
        system.capabilities = replace(can, known=known)


class StartedRun(NamedTuple):
    """A run before its first command: its sizes, its choices and its profile."""

    geometry: Geometry
    source: RandomChoices
    profile: RunProfile


def start_run(system: AnySystem, plan: Plan, config: Configuration, example: int) -> StartedRun:
    """Return a run by its number."""
    machine = config.machine
    seed = f"{plan.seed}/{config.preset}/{config.mode}/{example}"
    source = RandomChoices(seed if machine == "sessions" else f"{seed}/{machine}")
    profile = draw_profile(source, system.capabilities, machine)
    geometry = config.sizes
    assert isinstance(geometry, Geometry)
    if example % 4 == 3:  # the presets are eight points; the specification is for all sizes
        with suppress(UnusableImplementation):
            geometry = fit_sizes(system, machine, draw_geometry(source, geometry))
    geometry = with_settings(RandomChoices(f"{seed}/settings"), geometry, system.capabilities)
    return StartedRun(geometry, source, profile)


def lines_of(system: AnySystem, plan: Plan, mode: Mode) -> list[CorpusLine]:
    """Return the lines of the corpus that a plan drives in a mode."""
    return _lines(plan.machines, plan.modes or system.capabilities.modes, mode, plan.first)


_lines = lru_cache(maxsize=4)(corpus.select_lines)


def _run_line(
    system: AnySystem, plan: Plan, config: Configuration, example: int, driven: BatchResult
) -> None:
    """Run a line of the corpus, by its number. Every other line of a system with a reference model is
    closed at its end."""
    line = lines_of(system, plan, config.mode)[example]
    if line.origin == FIXTURE and kind_of_config(line.geometry).modelled:
        sizes = line.trace.sizes(Geometry)
        if sizes.tracks and not system.capabilities.keeps_states(sizes):
            return  # of a release that tracks states: no situation that others lack
    try:
        check_fits(system, line.geometry, line.commands)
        lockstep = _start_lockstep(system, line.geometry, config, driven)
        commands_run: list[AnyCommand] = []
        can = system.capabilities
        offered = line.commands
        if can.system_kind.schedules:
            offered = tuple(filter(can.offers, offered))
        _carry_out(lockstep, offered, commands_run, driven)
        if example % 2:
            _end_run(lockstep, commands_run, driven)
        new_violations = violations(lockstep, commands_run, "generated")
    except Misfit:
        raise
    except UnusableImplementation as error:
        driven.unfit[line.situation] = str(error).removeprefix(system.name).lstrip(": ")
    else:
        driven.runs.append((len(commands_run), new_violations))


def _start_lockstep(
    system: AnySystem, geometry: AnyConfig, config: Configuration, driven: BatchResult
) -> AnyLockstep:
    return lockstep_on(
        system, geometry, config.mode, tallies=driven.tallies, refusals=driven.refusals
    )


def _carry_out(
    lockstep: AnyLockstep, commands: Iterable[AnyCommand], commands_run: list[AnyCommand], driven: BatchResult
) -> None:
    """Run commands up to a violation; with a reference model, count the situations that they meet."""
    for command in commands:
        was = lockstep.state if isinstance(lockstep, Lockstep) else None
        outcome = lockstep.do(command)
        commands_run.append(command)
        driven.count(command, outcome, _is_declined(lockstep.system, was, command, outcome))
        if lockstep.violation is not None:
            return
        if isinstance(lockstep, Lockstep) and was is not None:
            driven.situations.update(situations(was, cast(Command, command), outcome, lockstep.state))


def _end_run(lockstep: AnyLockstep, commands_run: list[AnyCommand], driven: BatchResult) -> None:
    """End everything that runs; systems without a reference model end by last commands of their own."""
    if lockstep.violation is None and isinstance(lockstep, Lockstep):
        _carry_out(
            lockstep, finale(lockstep.state, lockstep.system.capabilities), commands_run, driven
        )


def _is_declined(system: AnySystem, was: State | None, command: AnyCommand, outcome: Outcome) -> bool:
    """Return whether the rules would carry the command out and the system refuses, as it may. Without a
    reference model, any refusal of an offered command counts."""
    if not isinstance(outcome, Refused):
        return False
    if was is None:
        return type(command).__name__ in system.capabilities.commands
    if (
        isinstance(command, SpecDecode)
        and outcome.reason is Reason.UNFAITHFUL
        and was.config.geometry.states
    ):
        return was.config.geometry.tracks  # else a server has no drafts on such a model
    may = outcome.reason in system.capabilities.on(was.config.geometry).may_refuse
    return may and isinstance(model.step(was, cast(Command, command))[1], Done)


def _propose_commands(run: StartedRun, lockstep: Lockstep, plan: Plan, example: int) -> Iterator[Command]:
    """Yield the commands of a run. One run in 32 is long: some faults build up over many turns."""
    last: type | None = None
    for _ in range(plan.steps * (8 if example % 32 == 8 else 1)):
        command = propose(lockstep.state, run.source, run.profile, last)
        last = type(command)
        yield command
        if lockstep.state.serial == SHARED - 1:
            return


def _continue_line(
    system: AnySystem, config: Configuration, run: StartedRun
) -> tuple[StartedRun, tuple[Command, ...]]:
    """Return a run that begins with a line of the corpus, in the line's sizes, and the line's commands."""
    line = pick(run.source, corpus.beginnings(config.machine, config.mode))
    try:
        check_fits(system, line.geometry, line.commands)
        fit_sizes(system, config.machine, line.geometry, exactly=True)
    except UnusableImplementation:
        return run, ()
    commands = line.trace.row_commands
    if _round_kinds(commands) & run.profile.disabled and not system.capabilities.mixed_decode:
        return run, ()
    return run._replace(geometry=line.trace.sizes(Geometry)), commands


def _round_kinds(commands: tuple[Command, ...]) -> set[str]:
    """Return the kinds of rounds in a line. A mixed batch has decodes as well."""
    kinds = {type(command).__name__ for command in commands}
    if any(isinstance(command, Extend) and len(command.lanes) > 1 for command in commands):
        kinds.add("Decode")
    return kinds & {"Decode", "SpecDecode", "Launch"}


def _run_example(
    system: AnySystem, plan: Plan, config: Configuration, example: int, driven: BatchResult
) -> None:
    if example % 4 == 2 and plan.corpus:  # what is rare by itself has a sequel
        run, number = _continue_line(system, config, start_run(system, plan, config, example))
        if number:
            with suppress(UnusableImplementation):  # else it cannot be driven through the line
                _run(system, plan, config, example, driven, run, number)
                return
    _run(system, plan, config, example, driven, start_run(system, plan, config, example))


def _run(
    system: AnySystem,
    plan: Plan,
    config: Configuration,
    example: int,
    driven: BatchResult,
    run: StartedRun,
    first_commands: tuple[Command, ...] = (),
) -> None:
    """Carry out one run.

    first_commands: its first commands.
    """
    commands_run = list[AnyCommand]()
    lockstep = _start_lockstep(system, run.geometry, config, driven)
    assert isinstance(lockstep, Lockstep)
    _carry_out(
        lockstep,
        chain(first_commands, _propose_commands(run, lockstep, plan, example)),
        commands_run,
        driven,
    )
    if example % 4 != 1:  # else the next run starts on what this one leaves
        _end_run(lockstep, commands_run, driven)
    driven.runs.append((len(commands_run), violations(lockstep, commands_run, "generated")))


class _Draws(NamedTuple):
    """The generators for a kind of system without a reference model.

    record: returns the record of a run, which the commands are drawn from.
    profile: draws a profile.
    sizes: draws a configuration.
    fitted: fits it to the profile.
    propose: draws the next command.
    finale: returns the next of those that end a run.
    """

    record: Callable[[Any], Any]
    profile: Callable[[Choices, Capabilities], Any]
    sizes: Any
    fitted: Callable[[Any, Any], Any]
    propose: Any
    finale: Any


_DRAWS = {
    BLOCKS.machine: _Draws(
        attrgetter("texts"), draw_engine_profile, draw_engine_config, fit_config, propose_engine_command,
        engine_finale,
    ),
    TIERS.machine: _Draws(
        attrgetter("users"), lambda source, _: draw_tier_profile(source), draw_tier_config,
        lambda sizes, _: sizes, propose_tier_command, tier_finale,
    ),
    PAIRS.machine: _Draws(
        attrgetter("record"), draw_pair_profile, draw_pair_config, lambda sizes, _: sizes,
        propose_pair_command, pair_finale,
    ),
}  # fmt: skip


def _run_judged_example(
    system: AnySystem, plan: Plan, config: Configuration, example: int, driven: BatchResult
) -> None:
    """Drive one run of a kind that is judged only by clauses, and add it to `driven`. Every fourth example
    has drawn sizes."""
    source = RandomChoices(f"{plan.seed}/{config.preset}/{example}/{config.machine}")
    draws = _DRAWS[config.machine]
    commands_run = list[AnyCommand]()
    profile = draws.profile(source, system.capabilities)
    sizes = config.sizes
    assert sizes is not None
    drawn = draws.sizes(source, sizes) if example % 4 == 3 else sizes
    try:
        lockstep = _start_lockstep(system, draws.fitted(drawn, profile), config, driven)
    except Misfit:
        raise
    except UnusableImplementation:  # a release need not take every configuration
        lockstep = _start_lockstep(system, sizes, config, driven)
    record = draws.record(lockstep)
    steps = plan.steps * (8 if example % 32 == 8 else 1)

    def propose_commands() -> Iterator[AnyCommand]:
        for _ in range(steps):
            yield draws.propose(record, lockstep.facts, source, profile)
        for _ in range(steps + _LAST):
            if (command := draws.finale(record, lockstep.facts)) is None:
                return
            yield command
        if lockstep.step is not None and not isinstance(lockstep.step, Step):
            if lockstep.step.unanswered:
                driven.unanswered += 1

    _carry_out(lockstep, propose_commands(), commands_run, driven)
    driven.runs.append((len(commands_run), violations(lockstep, commands_run, "generated")))
