"""The measurement of ways.json: which functions of an engine run in which ways, on which configurations.

A plan is driven in each way on the newest release that has it, and in the same ways on each release that is
the newest of another way; the called functions are recorded, with their runs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from impl import engines
from impl.adapter import AnySystem
from impl.process.remote_system import WorkerSystem
from impl.process.system_functions import SystemFunction
from impl.system_spec import ways_in
from stateful_tests.check.check_plans import CORPUS, Plan, for_system, plan
from stateful_tests.check.plan_order import batches, configurations
from stateful_tests.check.run_driver import drive
from stateful_tests.lockstep import system_names

COMMANDS = 4_000  # of a plan that is measured, lines of the corpus among them
_RARE = 3  # at most one in so many of the configurations calls a rare function


class FunctionCallers(NamedTuple):
    """The ways and configurations that call a function.

    way_bits: a bit for each way that calls it.
    callers: names of the configurations that call it.
    configurations: names of all configurations in the plans of these ways.
    """

    way_bits: int = 0
    callers: frozenset[str] = frozenset()
    configurations: frozenset[str] = frozenset()

    def add_way(
        self, way_index: int, callers: Collection[str], configurations: Collection[str]
    ) -> FunctionCallers:
        """Return these callers with those of another way."""
        return FunctionCallers(
            self.way_bits | 1 << way_index,
            self.callers.union(callers),
            self.configurations.union(configurations),
        )

    @property
    def few(self) -> tuple[str, ...]:
        """The configurations that call the function, if it is rare; else none."""
        rare = len(self.callers) * _RARE <= len(self.configurations)
        return tuple(sorted(self.callers)) if rare else ()


def measure_ways(engine: str) -> dict[str, Any]:
    """Measure the map of an engine anew, as JSON.

    functions: a bit for each way.
    rare: functions that few configurations call, each with the number of these among `sets`.
    """
    ways = engines.engine(engine).ways
    callers_of = dict[SystemFunction, FunctionCallers]()
    for release, way_index in measured_releases(engine):
        name = release_name(engine, ways[way_index], release)
        called, configuration_names = functions_of_release(name, COMMANDS)
        for function, callers in called.items():
            earlier = callers_of.get(function, FunctionCallers())
            callers_of[function] = earlier.add_way(way_index, callers, configuration_names)
    sets = sorted({callers.few for callers in callers_of.values()} - {()})
    functions = _by_file({each: callers.way_bits for each, callers in callers_of.items()})
    rare = {each: callers.few for each, callers in callers_of.items() if callers.few}
    return {
        "ways": list(ways),
        "cut": [file for file in functions if not _is_loaded(engine, file)],
        "functions": functions,
        "rare": _by_file({each: sets.index(few) for each, few in rare.items()}),
        "sets": [", ".join(few) for few in sets],
    }


def _by_file(numbers: Mapping[SystemFunction, int]) -> dict[str, dict[str, int]]:
    """Return numbers of functions by file and name, sorted."""
    by_file: dict[str, dict[str, int]] = {}
    for (file, name), number in sorted(numbers.items()):
        by_file.setdefault(file, {})[name] = number
    return by_file


def measured_releases(engine: str) -> list[tuple[str, int]]:
    """Return releases with the indices of the ways in which they are measured: the newest of each way, in
    all its ways. A way that has ended is that of a tree whose other ways call functions that have ended
    as well."""
    record = engines.engine(engine)
    drivable = [record.driven_releases(ways_in(way)) for way in record.ways]
    newest = dict.fromkeys(releases[-1] for releases in drivable)
    return [
        (release, index)
        for release in newest
        for index, releases in enumerate(drivable)
        if release in releases
    ]


def _is_loaded(engine: str, file: str) -> bool:
    """Return whether an adapter loads a file whole; otherwise it cuts functions out of it."""
    module = file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    return engines.engine(engine).loads(module)


def release_name(engine: str, way: str, release: str) -> str:
    """Return the name of a release in a way, as `--impl` takes it."""
    return "+".join(filter(None, (f"{engine}=={release}", way)))


def functions_of_release(
    name: str, commands: int
) -> tuple[dict[SystemFunction, set[str]], set[str]]:
    """Return the functions of a release that a plan calls, each with the names of the configurations that
    call it, and the names of all configurations."""
    system = system_names.resolve(name)
    try:
        smoke = plan("smoke")
        configs = configurations(system, for_system(smoke, system))
        names = {config.name for config in configs if config.machine != CORPUS}
        return functions_of_plan(system, smoke, commands), names
    finally:
        system.close()


def functions_of_plan(
    system: AnySystem, plan: Plan, commands: int, wanted: Collection[SystemFunction] | None = None
) -> dict[SystemFunction, set[str]]:
    """Return the functions of a system that the first runs of a plan call: lines of the corpus and runs in
    turns. Each function has the names of the configurations that call it.

    commands: no more are driven.
    wanted: no more is driven when all of these were called.
    """
    if not isinstance(system, WorkerSystem):
        return {}
    fitted = for_system(plan, system)
    command_count = 0
    callers_of: dict[SystemFunction, set[str]] = {}
    for batch in batches(system, fitted, configurations(system, fitted)):
        with system.noting_calls() as calls:
            command_count += sum(count for count, _ in drive(system, fitted, batch).runs)
        for function in calls:
            callers = callers_of.setdefault(function, set())
            if batch.config.machine != CORPUS:
                callers.add(batch.config.name)
        if command_count >= commands or (wanted is not None and callers_of.keys() >= {*wanted}):
            break
    return callers_of
