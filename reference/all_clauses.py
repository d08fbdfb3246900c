"""The clauses of all kinds of systems, in the order of asking."""

from __future__ import annotations

from reference.blocks.clauses import BLOCK_CLAUSES
from reference.clauses import CLAUSES
from reference.pairs.clauses import PAIR_CLAUSES
from reference.tiers.clauses import TIER_CLAUSES

ALL_CLAUSES = CLAUSES | BLOCK_CLAUSES | TIER_CLAUSES | PAIR_CLAUSES
