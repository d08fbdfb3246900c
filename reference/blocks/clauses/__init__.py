"""The clauses of a block-pool engine, in the order in which they are checked: the first that fails names the
violation."""

from __future__ import annotations

from collections.abc import Collection

from reference.blocks.clauses import (
    batches, block_pool, draft_kv, encoder_cache, kv_reads, outputs, recurrent_states,
)  # fmt: skip
from reference.blocks.clauses.step import REGISTERED, BlockStep
from reference.blocks.commands import Schedule
from reference.clauses import Clause, by_cause
from reference.clauses.registry import in_order
from reference.clauses.progress import PROGRESS
from reference.failures import Failure
from reference.tiers.clauses import OF_CONNECTORS, TIER_CLAUSES

__all__ = ["BLOCK_CLAUSES", "BlockStep", "broken_off", "failed_clauses"]
_MODULES = outputs, batches, recurrent_states, block_pool, kv_reads, draft_kv, encoder_cache
BLOCK_CLAUSES = (
    in_order(REGISTERED, _MODULES)
    | {name: TIER_CLAUSES[name] for name in OF_CONNECTORS}
    | PROGRESS
)


def failed_clauses(step: BlockStep, waived: Collection[str] = ()) -> list[tuple[Clause, Failure]]:
    """Return all clauses that fail at this step, without the waived ones, the headline first
    (by_cause)."""
    failures = []
    for clause in BLOCK_CLAUSES.values():
        if clause.id not in waived and (failure := clause.check(step)) is not None:
            failures.append((clause, failure))
    return by_cause(failures)


# They hold wherever a command breaks off, but for what a batch publishes before it writes.
_WHEREVER_IT_ENDS = "PUB-1", "PUB-2", "BLK-3", "STA-3"


def broken_off(step: BlockStep, waived: Collection[str] = ()) -> list[tuple[Clause, Failure]]:
    """Return the clauses that fail in the facts left by an engine that has failed, the headline first."""
    spared = BLOCK_CLAUSES.keys() - {*_WHEREVER_IT_ENDS}
    if isinstance(step.command, Schedule):
        spared |= {"PUB-1", "STA-3"}
    return failed_clauses(step, {*spared, *waived})
