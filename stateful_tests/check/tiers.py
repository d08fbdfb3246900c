"""What a check does: its tiers, and plans for systems that offer less or are driven in another way."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from impl.adapter import AnySystem, UnusableImplementation
from reference.blocks.config import ENGINE_PRESETS
from reference.commands import Mode
from reference.geometry import PRESETS, GeometryError, preset
from reference.kinds import JUDGED_PRESETS, JudgedConfig
from reference.tiers.config import TIER_PRESETS
from stateful_tests.check.corpus import CorpusLine
from stateful_tests.generate.run_profile import MACHINES
from stateful_tests.lockstep.lockstep import check_fits

CLIENTS = "clients"  # the machine that drives engines which schedule by themselves
TIERED = "tiers"  # the one that drives trees with a host tier
CORPUS = "corpus"  # the lines of the directed corpus, in the place of a machine


@dataclass(frozen=True, slots=True)
class Plan:
    """What a check does.

    modes: none stands for the system's own. examples: machine -> its runs per preset and mode, of up to
    `steps` commands each; every fourth has drawn sizes, one in 32 is eight times as long.
    after_finding: commands after the last new finding that end the check. corpus: with the lines of the
    directed corpus. whole: it has all that its tier does. time_limit_s: when to leave the rest of the plan,
    if one was given. first: lines of the corpus that are driven before others.
    """

    tier: str
    examples: Mapping[str, int]
    steps: int
    after_finding: int
    corpus: bool = True
    whole: bool = True
    time_limit_s: float | None = None
    presets: tuple[str, ...] = tuple(PRESETS)
    modes: tuple[Mode, ...] = ()
    machines: tuple[str, ...] = tuple(MACHINES)
    seed: int = 0
    first: frozenset[CorpusLine] = frozenset()


def _runs(*each: int) -> dict[str, int]:
    return dict(zip((*MACHINES, CLIENTS, TIERED), each, strict=True))


_TIERS = {
    "smoke": Plan("smoke", _runs(13, 8, 8, 40, 40), 40, 4_000),
    "pr": Plan("pr", _runs(75, 60, 60, 250, 250), 50, 15_000),
    "nightly": Plan("nightly", _runs(1200, 1200, 1200, 8000, 8000), 80, 1_000_000),
}
TIERS = tuple(_TIERS)


def plan(
    tier: str,
    *,
    presets: Sequence[str] | None = None,
    modes: Sequence[Mode] | None = None,
    examples: int | None = None,
    steps: int | None = None,
    seed: int | None = None,
    machines: Sequence[str] | None = None,
    time_limit_s: float | None = None,
) -> Plan:
    """The tier's plan with the options that are given instead. Raises ValueError with a one-line reason."""
    if tier not in _TIERS:
        raise ValueError(f"tier: unknown {tier!r}; one of {', '.join(TIERS)}")
    for name in presets or ():
        if name not in PRESETS and name not in JUDGED_PRESETS:
            raise ValueError(f"preset: unknown {name!r}; one of {', '.join((*PRESETS, *JUDGED_PRESETS))}")
    for name in machines or ():
        if name not in (*MACHINES, CLIENTS, TIERED):
            raise ValueError(f"machine: unknown {name!r}; one of {', '.join(MACHINES)}")
    for what, value in (("examples", examples), ("steps", steps)):
        if value is not None and not 1 <= value <= 10**7:
            raise ValueError(f"{what}: must be between 1 and 10000000, not {value}")
    base = _TIERS[tier]
    if seed is None:
        seed = time.time_ns() % 10**9 if tier == "nightly" else base.seed
    if examples is not None:
        base = replace(base, examples=dict.fromkeys(base.examples, examples))
    half = modes is not None and {*modes} != {*Mode}
    return replace(
        base,
        corpus=not any((presets, examples, steps)),
        whole=not any((presets, half, examples, steps, machines, time_limit_s)),
        time_limit_s=time_limit_s,
        presets=tuple(presets or base.presets),
        modes=tuple(modes or base.modes),
        steps=steps or base.steps,
        seed=seed,
        machines=tuple(machines or base.machines),
    )


def for_system(plan: Plan, system: AnySystem) -> Plan:
    """The plan for this kind of system, without the machines and presets of others that nobody named."""
    machines, presets = (tuple(MACHINES), tuple(PRESETS))
    if system.capabilities.schedules:
        machines, can = (CLIENTS,), system.capabilities
        presets = tuple(
            name
            for name, config in ENGINE_PRESETS.items()
            if config.connects == ("Copy" in can.commands) and (can.recurrent or not config.recurrent)
        )
    if system.capabilities.tiers:
        machines, presets = (TIERED,), tuple(TIER_PRESETS)
    if plan.presets == tuple(PRESETS):
        plan = replace(plan, presets=presets)
    return replace(plan, machines=machines) if plan.machines == tuple(MACHINES) else plan


def sizes_for(machine: str, name: str) -> Any:
    """The preset called `name`, with a radix tree for the machines that drive one; of engines their own."""
    if machine in (CLIENTS, TIERED):
        if name not in JUDGED_PRESETS:
            raise GeometryError("preset", f"{name} is of another kind of system")
        return JUDGED_PRESETS[name]
    return replace(preset(name), tree=machine != "sessions")


def check_machine(system: AnySystem, machine: str, geometry: Any) -> None:
    """Raise UnusableImplementation when this machine cannot drive the system."""
    check_fits(system, geometry)
    if isinstance(geometry, JudgedConfig):
        system.reset(geometry)  # type: ignore[arg-type]
        return
    missing = {"Match", "Insert"} - system.capabilities.commands
    if machine == "tree" and missing:
        raise UnusableImplementation(f"{system.name} does not offer {', '.join(sorted(missing))}")
