"""Faults of vLLM 0.33.0 (faults.toml): which lines become which, what sees it first, in which commands.

A fault is put into the code of one function of the release that this process has loaded, and taken out again.
`python -m stateful_tests.tests.vllm.vllm_faults [NAME...]` looks for each with random runs, and prints
clauses, runs, commands, seconds, and exits with 1 if one survives; `--replay` runs the commands of all, and
the unit tests that they export as.
"""

import json
import logging
import sys
import tempfile
import time
import tomllib
import unittest
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from ci.export import engine_test
from ci.export.recorded_run import NotExportable
from impl.vllm.driver import EngineDriver
from impl.vllm.fetch import release_root
from impl.vllm.modules import RUNNER, runner_methods
from impl.vllm.sources import CORE, reset_caches
from impl.vllm.system import VLLMSystem
from reference.blocks.config import EngineConfig, LayerGroup
from reference.commands import Mode
from stateful_tests.check import driving, tiers
from stateful_tests.lockstep.lockstep import replay
from stateful_tests.lockstep.results import Trace
from stateful_tests.shrink.minimise import minimise, violated
from stateful_tests.tests.support.patched_code import patched, replaced
from stateful_tests.traces.notation import ENGINE_KINDS, format_command, parse

VERSION = "0.33.0"


@dataclass(frozen=True)
class ReleaseFault:
    """A table of faults.toml, which says what its fields are."""

    file: str
    old: str
    new: str
    clause: str
    sizes: EngineConfig
    commands: str
    presets: Sequence[str] = ("hybrid", "drafts")
    overlap: bool = False
    v2: bool = False

    def trace(self) -> Trace:
        commands = tuple(parse(line, ENGINE_KINDS) for line in self.commands.split(";"))
        return Trace(self.sizes, Mode.FAITHFUL, commands)


def _read() -> Iterator[tuple[str, ReleaseFault]]:
    text = Path(__file__).with_name("faults.toml").read_text(encoding="utf-8")
    for name, row in tomllib.loads(text).items():
        groups = tuple(_group(*group) for group in row.pop("groups"))
        yield name, ReleaseFault(**row | {"sizes": EngineConfig(groups, **row["sizes"])})


def _group(size: int, window: int = 0, state: bool = False) -> LayerGroup:
    return LayerGroup(size, window or None, state)


RELEASE_FAULTS = dict(_read())


class Loaded(EngineDriver):
    """The release in this process, into which a fault can be put."""

    name = f"vllm=={VERSION}"
    capabilities = replace(
        VLLMSystem.capabilities,
        recurrent=True,
        commands=frozenset(kind.__name__ for kind in ENGINE_KINDS.values()),
    )

    @contextmanager
    def faulty(self, fault: ReleaseFault) -> Iterator[None]:
        """With the fault."""
        path = self.root / fault.file
        if fault.file in (RUNNER, CORE):  # of which functions are cut out
            was = self._methods, self._reset_caches
            with tempfile.TemporaryDirectory() as folder:
                (file := Path(folder, fault.file)).parent.mkdir(parents=True)
                file.write_text(replaced(path, fault.old, fault.new), encoding="utf-8")
                if fault.file == RUNNER:
                    self._methods = runner_methods(Path(folder), {})
                else:
                    self._reset_caches = reset_caches(Path(folder))
            yield
            self._methods, self._reset_caches = was
            return
        with patched(path, fault.file.removesuffix(".py").replace("/", "."), fault.old, fault.new):
            yield


def look_for(system: Loaded, fault: ReleaseFault, runs: int = 60) -> tuple[Trace | None, int, int]:
    """The first run of the fault's presets that violates what the release does not; runs and commands."""
    plan, ran, commands = tiers.plan("smoke", presets=fault.presets, examples=runs), 0, 0
    for example in range(runs):
        for preset in fault.presets:
            config = driving.unfitted(tiers.CLIENTS, preset, Mode.FAITHFUL)
            with system.faulty(fault):
                driven = driving.drive(
                    system, plan, driving.RunBatch(config, range(example, example + 1))
                )
            [(count, violations)] = driven.runs
            ran, commands = ran + 1, commands + count
            for violation, trace in violations:
                if violated(system, trace, violation.clause) == ():
                    return trace, ran, commands
    return None, ran, commands


def replayed() -> dict[str, Any]:
    """What sees each fault in its commands, what is seen of them without it, and what its unit test comes to:
    how it ends with the fault and without, or why there is none."""
    found = {}
    for name, fault in RELEASE_FAULTS.items():
        system, trace = _loaded(fault.overlap, fault.v2), fault.trace()
        with system.faulty(fault):
            seen = replay(system, trace).violation
            text, ends = _exported(system, trace), []
            ends += [_tested(text)]
        healthy = replay(system, trace).violation
        found[name] = (
            *(v and [*v.clauses, v.observed] for v in (seen, healthy)),
            [*ends, _tested(text)],
        )
    return found


def _exported(system: Any, trace: Trace) -> str:
    try:
        return engine_test.unit_test(trace, "trace.json", system)
    except NotExportable as why:
        return f"# {why}"


def _tested(text: str) -> str:
    """How an exported test ends in this process."""
    if text.startswith("#"):
        return text
    space: dict[str, Any] = {"__name__": "exported"}
    exec(compile(text, "exported.py", "exec"), space)
    case = next(
        kind
        for kind in space.values()
        if isinstance(kind, type)
        and kind.__module__ == "exported"
        and issubclass(kind, unittest.TestCase)
    )
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    if result.errors:
        return result.errors[0][1]
    return "fails" if result.failures else "passes"


@cache
def _loaded(overlap: bool, v2: bool) -> Loaded:
    logging.disable(logging.CRITICAL)
    return Loaded(release_root(VERSION, v2=True, offloads=True), overlap, v2, offloads=True)


def main(names: list[str]) -> int:
    if names == ["--replay"]:
        print(json.dumps(replayed()))
        return 0
    survivors = 0
    for name in names or RELEASE_FAULTS:
        fault, began = RELEASE_FAULTS[name], time.monotonic()
        system = _loaded(fault.overlap, fault.v2)
        trace, ran, commands = look_for(system, fault)
        verdict, smallest = "survives", trace
        if trace is None:
            survivors += 1
        else:
            with system.faulty(fault):
                first = replay(system, trace).violation
                assert first is not None
                verdict = ", ".join(first.clauses)
                smallest = minimise(system, trace, first.clause, budget=300)
        took = time.monotonic() - began
        print(f"| {name} | {verdict} | {ran} | {commands} | {took:.1f} |", flush=True)
        if smallest is not None and smallest is not trace:
            shown = "; ".join(map(format_command, smallest.commands))
            print(name, first.clause, smallest.geometry, shown, sep=" | ", file=sys.stderr)
    return min(1, survivors)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
