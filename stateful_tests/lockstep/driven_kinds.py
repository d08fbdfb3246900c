"""Runs of systems of every kind: which class runs one, whether it can, and what is counted of it."""

from __future__ import annotations

from typing import Any

from impl.adapter import AnySystem, Capabilities, UnusableImplementation
from reference.clauses import CLAUSES
from reference.commands import COMMANDS, Mode
from reference.geometry import Geometry
from reference.system_kinds import (
    BLOCKS,
    PAIRS,
    ROWS,
    TIERS,
    AnyCommand,
    JudgedConfig,
    Kind,
    kind_of_config,
)  # fmt: skip
from stateful_tests.lockstep.any_lockstep import AnyLockstep
from stateful_tests.lockstep.check_results import Tally
from stateful_tests.lockstep.engine_lockstep import EngineLockstep
from stateful_tests.lockstep.lockstep import Lockstep
from stateful_tests.lockstep.pair_lockstep import PairLockstep
from stateful_tests.lockstep.tier_lockstep import TierLockstep

_LOCKSTEPS: dict[str, Any] = {
    kind.name: lockstep
    for kind, lockstep in (
        (ROWS, Lockstep), (BLOCKS, EngineLockstep), (TIERS, TierLockstep), (PAIRS, PairLockstep),
    )
}  # fmt: skip


def lockstep_of(kind: Kind) -> type[AnyLockstep]:
    """Return the class of a run of a system of this kind."""
    run: type[AnyLockstep] = _LOCKSTEPS[kind.name]
    return run


def lockstep_on(
    system: AnySystem,
    geometry: Geometry | JudgedConfig,
    mode: Mode,
    clause: str | None = None,
    **counts: Any,
) -> AnyLockstep:
    """Start a run of any system. clause, counts (tallies, refusals): as in AnyLockstep."""
    run: AnyLockstep = _LOCKSTEPS[kind_of_config(geometry).name](
        system, geometry, mode, clause=clause, **counts
    )
    return run


def check_fits(
    system: AnySystem, geometry: Geometry | JudgedConfig, commands: tuple[AnyCommand, ...] = ()
) -> None:
    """Raise UnusableImplementation when the system cannot run these sizes and commands."""
    can = system.capabilities
    kind = kind_of_config(geometry)
    run = lockstep_of(kind)
    if can.system_kind is not kind:
        needs = f": the trace needs {kind.noun}, such as {run.suitable_option(geometry)}"
        raise UnusableImplementation(f"{system.name} {can.system_kind.words}{needs}")
    if lacks := run.unsupported(can, geometry, commands):
        raise UnusableImplementation(f"{system.name} {lacks}")


def new_tallies(can: Capabilities | None = None) -> dict[str, Tally]:
    """Return one empty tally per clause.

    can: only clauses that such a system can violate.
    """
    if can is None:
        return {name: Tally() for name in CLAUSES}
    capabilities = {
        "tree": can.tree,
        "window": can.swa,
        "states": can.recurrent or can.tracks,
        "tracks": can.tracks,
        "lazy": can.lazy,
        "tier": can.connects,
        "keys": "LoadAdapter" in can.commands,
        "images": can.encodes,
        "drafter": can.drafter,
    }
    kind = can.system_kind
    met = kind.meets | {need for need, is_met in capabilities.items() if is_met}
    return {
        name: Tally()
        for name, clause in lockstep_of(kind).clauses.items()
        if met.issuperset(clause.needs)
        and (clause.of >= {*COMMANDS} or any(kind.__name__ in can.commands for kind in clause.of))
    }
