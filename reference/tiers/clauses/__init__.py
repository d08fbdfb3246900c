"""The clauses of a second tier, in the order in which they are checked. Those of HOST and XFER up to XFER-3
hold of vLLM's connector too, each with its own facts."""

from __future__ import annotations

from collections.abc import Collection

from reference.clauses.registry import Clause, by_cause, in_order
from reference.clauses.disaggregation import HANDED_OVER
from reference.clauses.progress import PROGRESS
from reference.failures import Failure
from reference.tiers.clauses import host_memory, reads, storage, transfers
from reference.tiers.clauses.registry import REGISTERED
from reference.tiers.step import TierStep

__all__ = ["OF_CONNECTORS", "TIER_CLAUSES", "TierStep", "failed_clauses"]
TIER_CLAUSES = (
    in_order(REGISTERED, (host_memory, transfers, reads, storage))
    | HANDED_OVER
    | {"PRO-1": PROGRESS["PRO-1"]}
)
OF_CONNECTORS = ("HOST-1", "HOST-2", "HOST-3", "HOST-4", "XFER-1", "XFER-2", "XFER-3")


def failed_clauses(step: TierStep, waived: Collection[str] = ()) -> list[tuple[Clause, Failure]]:
    """Return all clauses that fail at this step, without the waived ones, the headline first
    (by_cause)."""
    found = []
    for clause in TIER_CLAUSES.values():
        if clause.id not in waived and (failure := clause.check(step)) is not None:
            found.append((clause, failure))
    return by_cause(found)
