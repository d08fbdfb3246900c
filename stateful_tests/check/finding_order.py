"""Order of findings in a report: wrong KV first, then causes before what they lead to."""

from __future__ import annotations

from reference.clauses.registry import CONCERNS
from reference.all_clauses import ALL_CLAUSES

# Clauses that say of KV that it is not what a request reads, or will read, there: a wrong answer that nobody
# notices. In a report they lead, and what else violates at the same step is folded into them.
WRONG_KV = frozenset((
    "READ-1", "READ-2", "READ-3", "READ-4", "PUB-1", "KEY-1", "HIT-1", "TREE-3", "TREE-4", "TREE-5",
    "TREE-15", "STA-1", "STA-2", "STA-3", "HOST-2", "LOAD-1", "STORE-1",
))  # fmt: skip


def is_milder(clause: str) -> bool:
    """Return whether a clause does not concern wrong KV."""
    return clause not in WRONG_KV


def report_order(name: str) -> tuple[bool, tuple[int, int]]:
    """Return a sort key for findings in a report: wrong KV first, then causes before their
    consequences."""
    clause = name.split()[0]
    return is_milder(clause), cause_order(clause)


def cause_order(clause: str) -> tuple[int, int]:
    """Return a sort key for clauses that fail at one step: the cause comes first."""
    order = list(ALL_CLAUSES)
    if clause not in order:
        return len(CONCERNS), 0
    return CONCERNS.index(ALL_CLAUSES[clause].concerns), order.index(clause)
