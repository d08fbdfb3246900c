"""The clauses of a block-pool engine, in the order in which they are asked: the first that fails names the
violation."""

from __future__ import annotations

from collections.abc import Container

# isort: off
from reference.blocks.clauses import texts, runs, blocks, windows

# isort: on
from reference.blocks.clauses.step import BLOCK_CLAUSES, BlockStep
from reference.clauses import CLAUSES, Clause, by_cause
from reference.failures import Failure

__all__ = ["BLOCK_CLAUSES", "EVERY_CLAUSE", "BlockStep", "broken"]
_MODULES = (texts, runs, blocks, windows)
EVERY_CLAUSE = CLAUSES | BLOCK_CLAUSES  # of all kinds of systems, in the order of asking


def broken(step: BlockStep, waived: Container[str] = ()) -> list[tuple[Clause, Failure]]:
    """All clauses but the waived that fail at this step, the headline first (by_cause)."""
    found = []
    for each in BLOCK_CLAUSES.values():
        if each.id not in waived and (failure := each.check(step)) is not None:
            found.append((each, failure))
    return by_cause(found)
