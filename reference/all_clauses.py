"""The clauses of every kind of system, in the order in which they are evaluated."""

from __future__ import annotations

from reference.blocks.clauses import BLOCK_CLAUSES
from reference.clauses import CLAUSES
from reference.pairs.clauses import PAIR_CLAUSES
from reference.tiers.clauses import TIER_CLAUSES

# Some clauses of tiers are also those of blocks, at whose place they stand.
ALL_CLAUSES = CLAUSES | BLOCK_CLAUSES | TIER_CLAUSES | PAIR_CLAUSES
