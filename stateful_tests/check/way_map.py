"""Which functions of an engine run in which ways: ways.json, measured by `python -m ci.ways`.

A short plan is driven in each way on the newest release that has it, and what it calls is noted.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from impl import engines
from impl.process.remote_system import WorkerSystem
from stateful_tests.check.driving import drive
from stateful_tests.check.tiers import Plan, for_system, plan
from stateful_tests.check.turns import batches, configurations
from stateful_tests.lockstep import systems

FILE = Path(__file__).with_name("ways.json")
COMMANDS = 2_000  # of a plan that is measured; no function more is called by as many again

Function = tuple[str, str]  # file, qualified name
OUTSIDE = "outside of functions"  # the rest of a file: it runs when the file is loaded


class WayMap(NamedTuple):
    """ways: of the engine, "" for none. functions: what runs, and in which of the ways. cut: files that are
    not loaded; functions are cut out of them."""

    ways: tuple[str, ...]
    functions: dict[Function, frozenset[str]]
    cut: frozenset[str] = frozenset()

    @property
    def files(self) -> frozenset[str]:
        """The files of which something runs in some way."""
        return frozenset(file for file, _ in self.functions)

    def loads(self, function: Function) -> bool:
        """Whether a function, as it is in a tree, is loaded."""
        file, _ = function
        return function in self.functions or (file in self.files and file not in self.cut)

    def runs(self, function: Function, way: str) -> bool:
        """Whether a function is known to run in a way."""
        return way in self.functions.get(function, ())

    def calling(self, functions: Collection[Function]) -> dict[str, set[Function]]:
        """Of some functions, those that run in each way."""
        return {
            way: {each for each in functions if way in self.functions.get(each, ())}
            for way in self.ways
        }


NOTHING = WayMap((), {})


@lru_cache(maxsize=4)
def way_map(engine: str) -> WayMap:
    """The map of an engine; NOTHING where none was measured."""
    maps = json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {}
    if engine not in maps:
        return NOTHING
    ways = tuple(maps[engine]["ways"])
    functions = {
        (file, name): frozenset(way for at, way in enumerate(ways) if bits >> at & 1)
        for file, names in maps[engine]["functions"].items()
        for name, bits in names.items()
    }
    rest: dict[Function, frozenset[str]] = {}
    cut = frozenset(maps[engine].get("cut", ()))
    for (file, _), having in functions.items():
        if file in cut:
            continue
        rest[file, OUTSIDE] = rest.get((file, OUTSIDE), frozenset()) | having
    return WayMap(ways, functions | rest, cut)


def measured(engine: str) -> dict[str, Any]:
    """The map of an engine as JSON, measured anew: of each function a bit for each way."""
    functions: dict[str, dict[str, int]] = {}
    for at, way in enumerate(engines.engine(engine).ways):
        for file, name in called_in(newest(engine, way), COMMANDS):
            names = functions.setdefault(file, {})
            names[name] = names.get(name, 0) | 1 << at
    sorted_names = {file: dict(sorted(functions[file].items())) for file in sorted(functions)}
    cut = [file for file in sorted_names if not _is_loaded(engine, file)]
    return {"ways": list(engines.engine(engine).ways), "cut": cut, "functions": sorted_names}


def _is_loaded(engine: str, file: str) -> bool:
    """Whether an adapter loads a file whole; else it cuts functions out of it."""
    module = file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    return engines.engine(engine).loads(module)


def newest(engine: str, way: str) -> str:
    """The newest release of an engine that is driven in a way, by name."""
    return str(engines.engine(engine).newest(way))


def called_in(name: str, commands: int) -> set[Function]:
    """What a short plan calls in the files of a release."""
    system = systems.resolve(name)
    try:
        return called_by_plan(system, plan("smoke"), commands)
    finally:
        system.close()


def called_by_plan(
    system: Any, asked: Plan, commands: int, wanted: Collection[Function] | None = None
) -> set[Function]:
    """What the first runs of a plan call in the files of a system, by their name: lines of the corpus and
    runs in turns. wanted: no more is driven when all these were called."""
    if not isinstance(system, WorkerSystem):
        return set()
    fitted, done = for_system(asked, system), 0
    found: set[Function] = set()
    with system.noting_calls() as calls:
        for batch in batches(system, fitted, configurations(system, fitted)):
            done += sum(count for count, _ in drive(system, fitted, batch).runs)
            found = {*functions_of(calls)}
            if done >= commands or (wanted is not None and found.issuperset(wanted)):
                break
    return found


def functions_of(called: Iterable[str]) -> Iterator[Function]:
    """The functions that texts such as "FILE: FUNCTION, ..." name."""
    for text in called:
        file, _, names = text.partition(": ")
        yield from ((file, name) for name in names.split(", "))
