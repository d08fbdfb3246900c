"""`make bench`: what a command costs, part by part.

The same seeded runs are generated once for each machine and replayed through each part alone, so that
the rows add up to what a step of the lockstep costs. Everything runs in one process; compare the ratios.
"""

import gc
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import click

from ci import cli
from ci.bench import check_costs, watcher_costs
from ci.commands.shared import SystemSelector, ReportOut, json_option
from ci.report import text_output
from impl.adapter import Capabilities, System
from impl.system_spec import SystemSpec
from reference import model
from reference.commands import Command, Mode
from reference.geometry import Geometry
from stateful_tests.check.check_plans import sizes_for
from impl.choices import RandomChoices
from stateful_tests.generate.next_command import propose
from stateful_tests.generate.run_profile import MACHINES, draw_profile
from stateful_tests.lockstep import system_names as registry
from stateful_tests.lockstep.abstraction import facts_of
from stateful_tests.lockstep.driven_kinds import new_tallies
from stateful_tests.lockstep.lockstep import Lockstep

STEPS = 50
Run = tuple[Geometry, list[Command]]


def _common_capabilities(systems: Iterable[System]) -> Capabilities:
    """Return the capabilities that all systems share."""
    can: Capabilities = registry.resolve("reference").capabilities
    for capabilities in (system.capabilities for system in systems):
        can = replace(
            can,
            commands=can.commands & capabilities.commands,
            mixed_decode=can.mixed_decode and capabilities.mixed_decode,
            swa_tail=can.swa_tail and capabilities.swa_tail,
            recurrent=can.recurrent and capabilities.recurrent,
        )
    return can


def _generate(machine: str, runs: int, can: Capabilities) -> list[Run]:
    """Draw runs over the presets of systems with `can`, by the generator that `kvspec check` uses, on the
    reference only."""
    generated = []
    for number in range(runs):
        for name in Lockstep.presets_for(can):
            geometry = sizes_for(machine, name)
            source = RandomChoices(f"bench/{name}/{number}")
            profile = draw_profile(source, can, machine)
            state = model.initial(geometry)
            commands = []
            for _ in range(STEPS):
                commands.append(propose(state, source, profile))
                state, _ = model.step(state, commands[-1])
            generated.append((geometry, commands))
    return generated


def _reference(runs: list[Run]) -> None:
    for geometry, commands in runs:
        state = model.initial(geometry)
        for command in commands:
            state, _ = model.step(state, command)


def _apply(system: System, runs: list[Run], *, view: bool = False, facts: bool = False) -> None:
    for geometry, commands in runs:
        system.reset(geometry)
        for command in commands:
            system.apply(command)
            if view:
                seen = system.view()
                if facts:
                    facts_of(seen, geometry)


def _lockstep(system: System, runs: list[Run]) -> None:
    tallies = new_tallies()
    for geometry, commands in runs:
        lockstep = Lockstep(system, geometry, Mode.FREE, tallies=tallies)
        for command in commands:
            lockstep.do(command)
            if lockstep.violation is not None:
                break  # releases have faults; `kvspec check` is for these


def _best_seconds(work: Callable[[], object]) -> float:
    """Return the better time of two runs: the first warms caches up."""
    best = float("inf")
    for _ in range(2):
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best


def _cost_row(machine: str, command: str, seconds: float) -> dict[str, Any]:
    """Return one line: the cost of a command."""
    return {
        "machine": machine,
        "what": command,
        "us_per_command": round(seconds * 1e6, 1),
        "commands_per_s": round(1 / seconds),
    }


@click.group(invoke_without_command=True)
@click.option("--impl", "impls", multiple=True, default=["reference", "torch"], show_default=True)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option(
    "--runs", type=click.IntRange(1), default=10, show_default=True, help="Runs for each preset."
)
@json_option
@click.pass_context
def bench(
    context: click.Context, out: ReportOut, impls: tuple[str, ...], device: str, runs: int
) -> None:
    """Measure what a command costs, part by part."""
    if context.invoked_subcommand is not None:
        return
    rows: list[dict[str, Any]] = []
    systems = {
        impl: cast(System, SystemSelector(SystemSpec.parse(impl), device=device).resolve())
        for impl in impls
    }
    can = _common_capabilities(systems.values())
    for machine in MACHINES:
        generated = _generate(machine, runs, can)
        commands = sum(len(c) for _, c in generated)
        parts: dict[str, Callable[[], object]] = {
            "reference alone": partial(_reference, generated),
            "generator and reference": partial(_generate, machine, runs, can),
        }
        for impl, system in systems.items():
            gc.freeze()  # as a check does when its system is there
            parts |= {
                f"{impl}: apply": partial(_apply, system, generated),
                f"{impl}: apply, view": partial(_apply, system, generated, view=True),
                f"{impl}: apply, view, abstraction": partial(
                    _apply, system, generated, view=True, facts=True
                ),
                f"{impl}: lockstep, all clauses": partial(_lockstep, system, generated),
            }
        rows += [_cost_row(machine, name, _best_seconds(part) / commands) for name, part in parts.items()]
    headings = ("machine", "what", "us/command", "commands/s")
    text_output.listing(out.console, rows, dict(zip(rows[0], headings)))
    out.end(rows)


bench.add_command(check_costs.check)
bench.add_command(watcher_costs.watcher)


if __name__ == "__main__":
    sys.exit(cli.run(command=bench, name="bench"))
