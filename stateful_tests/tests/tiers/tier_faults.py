"""Faults of SGLang 0.5.23 with its host tier (faults.toml): which lines become which, what sees it first.

A fault is put into the code of one function of the release that this process has loaded, and taken out again.
`python -m stateful_tests.tests.tiers.tier_faults [NAME...]` looks for each with random runs of three seeds,
prints clauses, commands and trace lengths, and exits with 1 if one survives; `--replay` runs the commands of
all; `--rust`: those of a tree with its core in Rust.
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

from impl.sglang.parts.fetch import release_root
from impl.sglang.tiers.driver import TierDriver
from impl.sglang.tiers.loading import tiered
from impl.sglang.tiers.system import TierSystem
from reference.commands import Mode
from reference.tiers.config import TIER_PRESETS, tier_preset
from stateful_tests.check import driving, tiers
from stateful_tests.lockstep.lockstep import replay
from stateful_tests.lockstep.results import Trace
from stateful_tests.shrink.minimise import minimise, violated
from stateful_tests.tests.support.patched_code import patched
from stateful_tests.traces.notation import TIER_KINDS, format_command, parse

VERSION = "0.5.23"


@dataclass(frozen=True)
class TierFault:
    """A table of faults.toml, which says what its fields are."""

    file: str
    old: str
    new: str
    clause: str
    preset: str
    commands: str
    host: int = 0

    def is_in(self, core: str) -> bool:
        """Whether a tree has the code, whose core is in Rust where `core` is "rust"."""
        return ("unified_cache/" if core else "rust_tree_core/") not in self.file

    def trace(self) -> Trace:
        commands = tuple(parse(line, TIER_KINDS) for line in self.commands.split(";"))
        sizes = tier_preset(self.preset)
        if self.host:
            sizes = replace(
                sizes, host_pages=self.host, host_swa_pages=min(self.host, sizes.host_swa_pages)
            )
        return Trace(sizes, Mode.FAITHFUL, commands)


def _read() -> Iterator[tuple[str, TierFault]]:
    text = Path(__file__).with_name("faults.toml").read_text(encoding="utf-8")
    for name, row in tomllib.loads(text).items():
        yield name, TierFault(**row)


TIER_FAULTS = dict(_read())


class Loaded(TierDriver):
    """The release in this process, into which a fault can be put."""

    name, capabilities = f"sglang=={VERSION}+hicache", TierSystem.capabilities

    @contextmanager
    def faulty(self, fault: TierFault) -> Iterator[None]:
        """With the fault."""
        module = f"sglang.srt.{fault.file.removesuffix('.py').replace('/', '.')}"
        with patched(self.root / "sglang/srt" / fault.file, module, fault.old, fault.new):
            yield


def look_for(
    system: Loaded, fault: TierFault, seed: int, runs: int = 40
) -> tuple[Trace | None, int]:
    """The first run of a smoke plan that violates what the release does not; commands until then. Only
    servers of the fault's kind are driven: with a storage, or which only decode."""
    kind = tier_preset(fault.preset)
    presets = [
        name
        for name, sizes in TIER_PRESETS.items()
        if (bool(sizes.storage), sizes.decode) == (bool(kind.storage), kind.decode)
    ]
    plan, commands = tiers.plan("smoke", presets=presets, examples=runs, seed=seed), 0
    for example in range(runs):
        for preset in presets:
            config = driving.unfitted(tiers.TIERED, preset, Mode.FAITHFUL)
            with system.faulty(fault):
                driven = driving.drive(
                    system, plan, driving.RunBatch(config, range(example, example + 1))
                )
            [(count, violations)] = driven.runs
            commands += count
            for violation, trace in violations:
                if violated(system, trace, violation.clause) == ():
                    return trace, commands
    return None, commands


def replayed(core: str) -> dict[str, Any]:
    """What sees each fault in its commands, and what is seen of them without it."""
    found, system = {}, loaded(core)
    for name, fault in TIER_FAULTS.items():
        if not fault.is_in(core):
            continue
        with system.faulty(fault):
            seen = replay(system, fault.trace()).violation
        healthy = replay(system, fault.trace()).violation
        found[name] = [v and [*v.clauses, v.observed] for v in (seen, healthy)]
    return found


@cache
def loaded(core: str) -> Loaded:
    logging.disable(logging.CRITICAL)
    root = release_root(VERSION)
    return Loaded(tiered(VERSION, core)(root), root)


def main(names: list[str]) -> int:
    core = "rust" if "--rust" in names else ""
    names = [name for name in names if name != "--rust"]
    if names == ["--replay"]:
        print(json.dumps(replayed(core)))
        return 0
    survivors, system = 0, loaded(core)
    for name in names or [name for name, fault in TIER_FAULTS.items() if fault.is_in(core)]:
        fault, verdicts = TIER_FAULTS[name], []
        for seed in range(3):
            trace, commands = look_for(system, fault, seed)
            if trace is None:
                survivors += 1
                verdicts.append(f"survives {commands}")
                continue
            with system.faulty(fault):
                first = replay(system, trace).violation
                assert first is not None
                smallest = trace
                if seed == 0:
                    smallest = minimise(system, trace, first.clause, budget=300)
            verdicts.append(f"{first.clause} after {commands}, {len(smallest.commands)} commands")
            if seed == 0:
                shown = "; ".join(map(format_command, smallest.commands))
                print(
                    name,
                    first.clause,
                    smallest.geometry,
                    shown,
                    sep=" | ",
                    file=sys.stderr,
                    flush=True,
                )
        print(f"| {name} | {' | '.join(verdicts)} |", flush=True)
    return min(1, survivors)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
