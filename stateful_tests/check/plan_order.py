"""The order of a plan's work on a system: configurations that fit, and batches of their runs.

Nothing here depends on what the runs find, so all of it follows from the plan.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import islice, product
from typing import Any

from impl.adapter import AnySystem, Misfit, UnusableImplementation
from reference.geometry import GeometryError
from stateful_tests.check.run_driver import lines_of
from stateful_tests.check.run_batches import Configuration, RunBatch
from stateful_tests.check.check_plans import CORPUS, Plan, fit_sizes, sizes_for

# runs of one configuration before the next has its turn; of other machines 3
_RUNS = {"sessions": 4, "both": 5}
_LINES = 24  # of the corpus, before runs have their turn: about as many commands


def configurations(system: AnySystem, plan: Plan) -> list[Configuration]:
    """Return machines, presets and modes in turns, so that the first few cover each of them; the corpus
    comes first.

    Raises UnusableImplementation when none fits.
    """
    modes = plan.modes or system.capabilities.modes
    reason: Exception = UnusableImplementation("no machine was named")
    sizes: dict[tuple[str, str], Any] = {}
    for machine, name in product(plan.machines, plan.presets):
        try:
            fit = fit_sizes(system, machine, sizes_for(machine, name))
        except Misfit:
            raise
        except (UnusableImplementation, GeometryError) as error:
            reason = error
            continue
        if fit not in (sizes.get((machine, other)) for other in plan.presets):
            sizes[machine, name] = fit  # two presets may differ in what the system does not have
    configs = []
    for turn, name in product(range(len(plan.machines) * len(modes)), plan.presets):
        position = turn + plan.presets.index(name)
        mode = modes[position // len(plan.machines) % len(modes)]
        machine = plan.machines[position % len(plan.machines)]
        if (machine, name) in sizes:
            configs.append(Configuration(machine, name, mode, sizes[machine, name]))
    if not configs:
        raise UnusableImplementation(str(reason))
    corpus = [Configuration(CORPUS, "-", mode) for mode in modes] if plan.corpus else []
    return [*corpus, *configs]


def planned_runs(system: AnySystem, plan: Plan, config: Configuration) -> int:
    """Return the most runs of a configuration; for the corpus, its lines."""
    if config.machine == CORPUS:
        return len(lines_of(system, plan, config.mode))
    return sys.maxsize if plan.examples is None else plan.examples


def times_favoured(plan: Plan, configs: Sequence[Configuration]) -> int:
    """Return by how much a favoured configuration gets more runs than another: all favoured ones
    together get as many as all others."""
    own = [config for config in configs if config.machine != CORPUS]
    favoured = sum(config.name in plan.favoured for config in own)
    return max(1, (len(own) - favoured) // favoured) if favoured else 1


def batches(system: AnySystem, plan: Plan, configs: Sequence[Configuration]) -> Iterator[RunBatch]:
    """Yield the runs of the plan, one of each configuration first; lines of the corpus in turns with
    them. A plan that counts commands has runs without end."""
    times = times_favoured(plan, configs)

    def in_turns(configs: list[Configuration]) -> Iterator[RunBatch]:
        waiting = {config: (0, planned_runs(system, plan, config)) for config in configs}
        while waiting:
            for config, (start, end) in list(waiting.items()):
                if config.machine == CORPUS:
                    size = _LINES
                else:
                    size = _RUNS.get(config.machine, 3) if start else 1
                if config.name in plan.favoured:
                    size *= times
                yield RunBatch(config, range(start, min(end, start + size)))
                waiting[config] = start + size, end
            waiting = {
                config: (start, end) for config, (start, end) in waiting.items() if start < end
            }

    lines = in_turns([config for config in configs if config.machine == CORPUS])
    for runs in in_turns([config for config in configs if config.machine != CORPUS]):
        yield from islice(lines, 1)
        yield runs
    yield from lines
