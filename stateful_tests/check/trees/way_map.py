"""The map of an engine's functions to the ways and configurations that call them: ways.json.

`python -m ci.ways` measures it (way_measurement.py) and writes it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from impl import engines
from impl.process.system_functions import SystemFunction
from impl.system_spec import ways_in

FILE = Path(__file__).with_name("ways.json")
_MOST_NAMES = 3  # configurations that the text of a function names; more are counted
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
    functions: dict[SystemFunction, frozenset[str]]
    cut: frozenset[str] = frozenset()
    rare: dict[SystemFunction, frozenset[str]] = {}  # noqa: RUF012

    @property
    def files(self) -> frozenset[str]:
        """The files of which a function runs in some way."""
        return frozenset(file for file, _ in self.functions)

    def loads(self, function: SystemFunction) -> bool:
        """Return whether a function, as it is in a tree, is loaded."""
        file = function.file
        return function in self.functions or (file in self.files and file not in self.cut)

    def runs(self, function: SystemFunction, way: str) -> bool:
        """Return whether a function is known to run in a way."""
        return way in self.functions.get(function, ())

    def rest_loaded_in(
        self, functions: Collection[SystemFunction], ways: Collection[str]
    ) -> set[SystemFunction]:
        """Return the functions that are the rest of a file which one of these ways loads: it has run."""
        return {
            function
            for function in functions
            if function.name == OUTSIDE and any(self.runs(function, way) for way in ways)
        }

    def by_way(self, functions: Collection[SystemFunction]) -> dict[str, set[SystemFunction]]:
        """Return those of the functions that run in each way."""
        return {
            way: {function for function in functions if way in self.functions.get(function, ())}
            for way in self.ways
        }

    def own_files(self, files: Collection[str], own_way: str) -> dict[str, int]:
        """Return for each way how many of the files are its own.

        A file is a way's own if more than a third of its functions that run at all run in that way and not
        in `own_way`. Ways that combine several have none.
        """
        counts = dict.fromkeys(self.ways, 0)
        single_ways = [way for way in self.ways if "+" not in way]
        for file in files:
            ways_of_functions = [
                ways
                for function, ways in self.functions.items()
                if function.file == file and function.name != OUTSIDE
            ]
            for way in single_ways:
                apart = [ways for ways in ways_of_functions if way in ways and own_way not in ways]
                if 3 * len(apart) > len(ways_of_functions):
                    counts[way] += 1
        return counts

    def calls_rarely(self, functions: Collection[SystemFunction]) -> frozenset[str]:
        """Return the names of the few configurations that call some of these functions."""
        return frozenset().union(*(self.rare.get(function, ()) for function in functions))

    def function_text(
        self,
        function: SystemFunction,
        own_way: str,
        undriven: Mapping[str, str],
        driven: Mapping[str, Collection[str]] = NO_RUNS,
    ) -> str:
        """Return a function that no run has called as text, with the way in which it runs, if not in
        `own_way`, and the configurations that call it, where few do.

        undriven: ways in which the tree's release is not driven, each with the releases that are.
        driven: ways that were driven, each with the names of the configurations of its runs.
        """
        running = [way for way in self.ways if self.runs(function, way)]
        hints: list[str] = []
        way = own_way
        if running and own_way not in running:
            way = next((way for way in running if way not in undriven), running[0])
            name = f"+{way}" if way else "the plain way"
            if way in undriven:
                return f"{function} (in {name}, which is driven {undriven[way]})"
            hints.append(f"in {name}")
        if few := sorted(self.rare.get(function, ())):
            more = f" and {len(few) - _MOST_NAMES} more" if len(few) > _MOST_NAMES else ""
            configurations = driven.get(way)
            unfit = bool(configurations) and {*few}.isdisjoint(configurations or ())
            reason = ", which no run on this tree had" if unfit else ""
            hints.append(f"on {', '.join(few[:_MOST_NAMES])}{more}{reason}")
        return f"{function} ({', '.join(hints)})" if hints else str(function)

    def undriven(self, engine: str, release: str) -> dict[str, str]:
        """Return the ways in which a release is not driven, each with the releases that are, in words."""
        reasons: dict[str, str] = {}
        order = [*engines.driven_releases(engine, ())] if self.ways else []
        for way in self.ways:
            driven = engines.driven_releases(engine, ways_in(way))
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
    measured = maps[engine]
    ways = tuple(measured["ways"])
    cut = frozenset(measured["cut"])
    configurations = [frozenset(names.split(", ")) for names in measured["sets"]]
    functions = {
        function: frozenset(way for index, way in enumerate(ways) if way_bits >> index & 1)
        for function, way_bits in _numbered_functions(measured["functions"])
    }
    rare = {
        function: configurations[index]
        for function, index in _numbered_functions(measured["rare"])
    }
    outside: dict[SystemFunction, frozenset[str]] = {}
    for (file, _), ways_of_function in functions.items():
        if file not in cut:
            rest = SystemFunction(file, OUTSIDE)
            outside[rest] = outside.get(rest, frozenset()) | ways_of_function
    return WayMap(ways, functions | outside, cut, rare)


def _numbered_functions(
    by_file: Mapping[str, Mapping[str, int]],
) -> Iterator[tuple[SystemFunction, int]]:
    """Yield each function with its number, from numbers by file and name."""
    for file, names in by_file.items():
        for name, number in names.items():
            yield SystemFunction(file, name), number
