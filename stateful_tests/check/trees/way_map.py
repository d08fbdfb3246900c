"""The map of an engine's functions to the ways and configurations that call them: ways.json.

`python -m ci.ways` writes it. A plan is driven in each way on the newest release that has it, and in the same
ways on each release that is the newest of another way; the called functions are recorded, with their runs.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from impl import engines
from impl.adapter import AnySystem
from impl.system_spec import ways_in
from impl.process.remote_system import WorkerSystem
from stateful_tests.check.run_driver import drive
from stateful_tests.check.check_plans import CORPUS, Plan, for_system, plan
from stateful_tests.check.plan_order import batches, configurations
from stateful_tests.lockstep import system_names

FILE = Path(__file__).with_name("ways.json")
COMMANDS = 4_000  # of a plan that is measured, lines of the corpus among them
_NAMED = 3  # configurations of a function; more are counted
FEW = 3  # a function is of few presets if at most one in so many of the configurations calls it

Function = tuple[str, str]  # file, qualified name
NO_RUNS: Mapping[str, Collection[str]] = {}
OUTSIDE = "outside of functions"  # the rest of a file: it runs when the file is loaded


class WayMap(NamedTuple):
    """The functions of an engine, each with the ways in which it runs.

    ways: the engine's, "" for none.
    functions: function -> the ways in which it runs.
    cut: files that are not loaded; functions are cut out of them.
    rare: functions that few configurations call, with the names of these.
    """

    ways: tuple[str, ...]
    functions: dict[Function, frozenset[str]]
    cut: frozenset[str] = frozenset()
    rare: dict[Function, frozenset[str]] = {}  # noqa: RUF012

    @property
    def files(self) -> frozenset[str]:
        """The files of which a function runs in some way."""
        return frozenset(file for file, _ in self.functions)

    def loads(self, function: Function) -> bool:
        """Return whether a function, as it is in a tree, is loaded."""
        file, _ = function
        return function in self.functions or (file in self.files and file not in self.cut)

    def runs(self, function: Function, way: str) -> bool:
        """Return whether a function is known to run in a way."""
        return way in self.functions.get(function, ())

    def loaded_in(self, functions: Collection[Function], ways: Collection[str]) -> set[Function]:
        """Return the functions that are the rest of a file which one of these ways loads: it has run."""
        return {
            function
            for function in functions
            if function[1] == OUTSIDE and any(self.runs(function, way) for way in ways)
        }

    def calling(self, functions: Collection[Function]) -> dict[str, set[Function]]:
        """Return the functions that run in each way, by way."""
        return {
            way: {function for function in functions if way in self.functions.get(function, ())}
            for way in self.ways
        }

    def homes(self, files: Collection[str], own: str) -> dict[str, int]:
        """Return for each way the number of these files that are its own: more than a third of their
        functions that run in some way run in it, and not in the way `own`. Several ways at once have
        none."""
        homes = dict.fromkeys(self.ways, 0)
        single = [way for way in self.ways if "+" not in way]
        for file in files:
            runs = [ways for (of, name), ways in self.functions.items() if of == file and name != OUTSIDE]
            for way in single:
                alone = sum(way in ways and own not in ways for ways in runs)
                if 3 * alone > len(runs):
                    homes[way] += 1
        return homes

    def calls_rarely(self, functions: Collection[Function]) -> frozenset[str]:
        """Return the names of the few configurations that call some of these functions."""
        return frozenset().union(*(self.rare.get(function, ()) for function in functions))

    def told(
        self,
        function: Function,
        own: str,
        undriven: Mapping[str, str],
        had: Mapping[str, Collection[str]] = NO_RUNS,
    ) -> str:
        """Return a function that no run has called as text, with the way in which it runs, if not in
        the way `own`, and the configurations that call it, where few do.

        undriven: ways in which the tree's release is not driven, each with the releases that are.
        had: ways that were driven, each with the names of the configurations of its runs.
        """
        text = ": ".join(function)
        running = [way for way in self.ways if self.runs(function, way)]
        hints: list[str] = []
        way = own
        if running and own not in running:
            way = next((way for way in running if way not in undriven), running[0])
            name = f"+{way}" if way else "the plain way"
            if way in undriven:
                return f"{text} (in {name}, which is driven {undriven[way]})"
            hints.append(f"in {name}")
        if few := sorted(self.rare.get(function, ())):
            more = f" and {len(few) - _NAMED} more" if len(few) > _NAMED else ""
            unfit = way in had and had[way] and {*few}.isdisjoint(had[way])
            reason = ", which no run on this tree had" if unfit else ""
            hints.append(f"on {', '.join(few[:_NAMED])}{more}{reason}")
        return f"{text} ({', '.join(hints)})" if hints else text

    def undriven(self, engine: str, release: str) -> dict[str, str]:
        """Return the ways in which a release is not driven, each with the releases that are, in words."""
        reasons: dict[str, str] = {}
        order = [*engines.driven_in(engine, ())] if self.ways else []
        for way in self.ways:
            driven = engines.driven_in(engine, ways_in(way))
            if release in order and release not in driven:
                before = order.index(release) < order.index(driven[0])
                reasons[way] = f"from {driven[0]} on" if before else f"up to {driven[-1]}"
        return reasons


NOTHING = WayMap((), {})


@lru_cache(maxsize=4)
def way_map(engine: str) -> WayMap:
    """Return the map of an engine; NOTHING where none was measured."""
    maps = json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {}
    if engine not in maps:
        return NOTHING
    of_engine = maps[engine]
    ways = tuple(of_engine["ways"])
    sets = [frozenset(few.split(", ")) for few in of_engine["sets"]]
    functions = {
        each: frozenset(way for index, way in enumerate(ways) if bits >> index & 1)
        for each, bits in _numbered_functions(of_engine["functions"])
    }
    rare = {each: sets[number] for each, number in _numbered_functions(of_engine["rare"])}
    rest: dict[Function, frozenset[str]] = {}
    cut = frozenset(of_engine["cut"])
    for (file, _), having in functions.items():
        if file in cut:
            continue
        rest[file, OUTSIDE] = rest.get((file, OUTSIDE), frozenset()) | having
    return WayMap(ways, functions | rest, cut, rare)


class Measured(NamedTuple):
    """The measurement of a function.

    ways: a bit for each way that calls it.
    by: names of the configurations that call it.
    of: names of all configurations in the plans of these ways.
    """

    ways: int = 0
    by: frozenset[str] = frozenset()
    of: frozenset[str] = frozenset()

    def also(self, way: int, by: Collection[str], ways: Collection[str]) -> Measured:
        """Return the measurement together with that of another way that calls the function."""
        return Measured(self.ways | 1 << way, self.by.union(by), self.of.union(ways))

    @property
    def few(self) -> tuple[str, ...]:
        """The configurations that call it, where they are few."""
        return tuple(sorted(self.by)) if len(self.by) * FEW <= len(self.of) else ()


def measure_ways(engine: str) -> dict[str, Any]:
    """Measure the map of an engine anew, as JSON. functions: a bit for each way. rare: functions that
    few configurations call, each with the number of these among `sets`."""
    ways = engines.engine(engine).ways
    measurements = dict[Function, Measured]()
    for release, way_index in measured_in(engine):
        called, of = called_in(release_in_way(engine, ways[way_index], release), COMMANDS)
        for function, by in called.items():
            measurements[function] = measurements.get(function, Measured()).also(way_index, by, of)
    sets = sorted({each.few for each in measurements.values()} - {()})
    functions = _by_file({each: of.ways for each, of in measurements.items()})
    return {
        "ways": list(ways),
        "cut": [file for file in functions if not _is_loaded(engine, file)],
        "functions": functions,
        "rare": _by_file({each: sets.index(of.few) for each, of in measurements.items() if of.few}),
        "sets": [", ".join(few) for few in sets],
    }


def _by_file(numbers: Mapping[Function, int]) -> dict[str, dict[str, int]]:
    """Return numbers of functions by file and name, sorted."""
    by_file: dict[str, dict[str, int]] = {}
    for (file, name), number in sorted(numbers.items()):
        by_file.setdefault(file, {})[name] = number
    return by_file


def _numbered_functions(by_file: Mapping[str, Mapping[str, int]]) -> Iterator[tuple[Function, int]]:
    """Yield each function with its number, from numbers by file and name."""
    for file, names in by_file.items():
        yield from (((file, name), number) for name, number in names.items())


def measured_in(engine: str) -> list[tuple[str, int]]:
    """Return releases with the numbers of ways in which they are measured: the newest of each way, in
    all its ways. A way that has ended is that of a tree whose other ways call functions that have ended
    as well."""
    record = engines.engine(engine)
    drivable = [record.driven_in(ways_in(way)) for way in record.ways]
    releases = dict.fromkeys(of_way[-1] for of_way in drivable)
    return [
        (release, index)
        for release in releases
        for index, of_way in enumerate(drivable)
        if release in of_way
    ]


def _is_loaded(engine: str, file: str) -> bool:
    """Return whether an adapter loads a file whole; otherwise it cuts functions out of it."""
    module = file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    return engines.engine(engine).loads(module)


def release_in_way(engine: str, way: str, release: str) -> str:
    """Return the name of a release in a way."""
    return "+".join(filter(None, (f"{engine}=={release}", way)))


def called_in(name: str, commands: int) -> tuple[dict[Function, set[str]], set[str]]:
    """Return the functions of a release that a plan calls, each with the names of the configurations that
    call it, and the names of all configurations."""
    system = system_names.resolve(name)
    try:
        asked = plan("smoke")
        configs = configurations(system, for_system(asked, system))
        return called_by_plan(system, asked, commands), {
            each.name for each in configs if each.machine != CORPUS
        }
    finally:
        system.close()


def called_by_plan(
    system: AnySystem, asked: Plan, commands: int, wanted: Collection[Function] | None = None
) -> dict[Function, set[str]]:
    """Return the functions of a system that the first runs of a plan call, by their name: lines of the
    corpus and runs in turns. Each function has the names of the configurations that call it. wanted: no
    more is driven when all these were called."""
    if not isinstance(system, WorkerSystem):
        return {}
    fitted = for_system(asked, system)
    done = 0
    plans: dict[Function, set[str]] = {}
    for batch in batches(system, fitted, configurations(system, fitted)):
        with system.noting_calls() as calls:
            done += sum(count for count, _ in drive(system, fitted, batch).runs)
        for function in functions_of(calls):
            by = plans.setdefault(function, set())
            if batch.config.machine != CORPUS:
                by.add(batch.config.name)
        if done >= commands or (wanted is not None and plans.keys() >= {*wanted}):
            break
    return plans


def functions_of(called: Iterable[str]) -> Iterator[Function]:
    """Return the functions that texts such as "FILE: FUNCTION, ..." name."""
    for text in called:
        file, _, names = text.partition(": ")
        yield from ((file, name) for name in names.split(", "))
