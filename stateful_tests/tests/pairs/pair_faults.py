"""Faults of vLLM 0.33.0 as a pair (faults.toml): which lines become which, what sees each first.

`python -m stateful_tests.tests.pairs.pair_faults [NAME...]` looks for each with random runs of three seeds
and prints clause, commands until then, and the shortest commands; it exits with 1 if a fault survives.
`--replay` runs the commands of all, and prints as JSON what sees each.
"""

import json
import logging
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from impl.vllm.fetch import release_root
from impl.vllm.pair.driver import PairDriver
from impl.vllm.system import VLLMSystem
from reference.commands import Mode
from reference.pairs.config import PAIR_PRESETS
from stateful_tests.check import driving, tiers
from stateful_tests.lockstep.lockstep import replay
from stateful_tests.lockstep.results import Trace, Violation
from stateful_tests.shrink.minimise import failing_prefix
from stateful_tests.shrink.passes import shrink
from stateful_tests.tests.support.patched_code import patched
from stateful_tests.traces.notation import PAIR_KINDS, format_command, parse

VERSION = "0.33.0"


@dataclass(frozen=True)
class PairFault:
    """A table of faults.toml, which says what its fields are."""

    file: str
    old: str
    new: str
    clause: str
    preset: str
    commands: str

    def trace(self) -> Trace:
        """Its commands on the sizes of its preset."""
        return pair_trace(self.commands, self.preset)


def pair_trace(commands: str, preset: str = "pair") -> Trace:
    """A trace of a pair from text, commands between semicolons."""
    lines = (line for line in commands.split(";") if line.strip())
    parsed = tuple(parse(line, PAIR_KINDS) for line in lines)
    return Trace(PAIR_PRESETS[preset], Mode.FAITHFUL, parsed)


def _read() -> Iterator[tuple[str, PairFault]]:
    text = Path(__file__).with_name("faults.toml").read_text(encoding="utf-8")
    for name, row in tomllib.loads(text).items():
        yield name, PairFault(**row)


PAIR_FAULTS = dict(_read())


class Loaded(PairDriver):
    """The release in this process, into which a fault can be put."""

    def __init__(self) -> None:
        logging.disable(logging.CRITICAL)
        self.root = release_root(VERSION, pair=True)
        super().__init__(self.root)
        self.name = f"vllm=={VERSION}+pair"
        self.capabilities = VLLMSystem(VERSION, pair=True).capabilities

    @contextmanager
    def faulty(self, fault: PairFault) -> Iterator[None]:
        """With the fault."""
        module = f"vllm.{fault.file.removesuffix('.py').replace('/', '.')}"
        with patched(self.root / "vllm" / fault.file, module, fault.old, fault.new):
            yield


@cache
def loaded() -> Loaded:
    return Loaded()


def look_for(
    system: Loaded, fault: PairFault, seed: int, runs: int = 60
) -> tuple[Trace | None, Violation | None, int]:
    """The first run on the preset of a fault that violates what the release does not; commands until then."""
    plan, commands = tiers.plan("smoke", examples=runs, seed=seed), 0
    config = driving.unfitted("pairs", fault.preset, Mode.FAITHFUL)
    for example in range(runs):
        batch = driving.RunBatch(config, range(example, example + 1))
        with system.faulty(fault):
            [(count, violations)] = driving.drive(system, plan, batch).runs
        commands += count
        for violation, trace in violations:
            if trace.geometry == config.sizes and replay(system, trace).violation is None:
                return trace, violation, commands
    return None, None, commands


def shortest(system: Loaded, fault: PairFault, trace: Trace, clause: str) -> Trace:
    """The fewest commands that show a fault on these sizes, and conform without it."""

    def still_fails(commands: Any) -> Any:
        candidate = replace(trace, commands=commands)
        with system.faulty(fault):
            return failing_prefix(system, clause, candidate)

    return replace(trace, commands=shrink(trace.commands, still_fails, budget=500))


def replayed() -> dict[str, list[str | None]]:
    """What sees each fault in its commands, and what is seen of them without it."""
    found, system = {}, loaded()
    for name, fault in PAIR_FAULTS.items():
        with system.faulty(fault):
            seen = replay(system, fault.trace()).violation
        healthy = replay(system, fault.trace()).violation
        found[name] = [each and each.clause for each in (seen, healthy)]
    return found


def main(names: list[str]) -> int:
    if names == ["--replay"]:
        print(json.dumps(replayed()))
        return 0
    survivors, system = 0, loaded()
    for name in names or PAIR_FAULTS:
        fault, verdicts = PAIR_FAULTS[name], []
        for seed in range(3):
            trace, violation, commands = look_for(system, fault, seed)
            if trace is None or violation is None:
                survivors += 1
                verdicts.append(f"survives {commands}")
                continue
            verdicts.append(f"{violation.clause} after {commands}")
            if seed == 0:
                small = shortest(system, fault, trace, violation.clause)
                print(
                    name, "; ".join(map(format_command, small.commands)), sep=" | ", file=sys.stderr
                )
                verdicts[-1] += f", {len(small.commands)} commands"
        print(f"| {name} | {' | '.join(verdicts)} |", flush=True)
    return min(1, survivors)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
