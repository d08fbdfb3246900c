"""Pages have one owner (OWN)."""

from __future__ import annotations

from reference.clauses.base import Failure, clause
from reference.clauses.step import Step, span


@clause(
    "OWN-2",
    "free lists are sets",
    "A free list holds no page twice, never the padding page, nothing that does not exist.",
    about="state",
    why="A page handed out twice has two owners; padding takes everybody's dummy writes.",
    rule="ledger.free",
    source="kvspec",
    situation=lambda s: s.freed_something,
)
def _free_is_set(step: Step) -> Failure | None:
    for name, pool in step.after.pools.items():
        free = set(pool.free)
        if len(free) != len(pool.free):
            twice = sorted({p for p in free if list(pool.free).count(p) > 1})
            return f"each page once in the {name} free list", f"pages {twice} twice or more"
        wrong = sorted(p for p in free if not 1 <= p <= pool.size)
        if wrong:
            return f"pages 1 to {pool.size} in the {name} free list", f"pages {wrong}"
    return None


@clause(
    "OWN-1",
    "one owner",
    "No page is owned twice, and no owned page is free.",
    about="state",
    why="Two owners overwrite each other's KV: wrong text, hours later.",
    rule="ledger.full_pages, ledger.swa_pages",
    source="kvspec",
    situation=lambda s: len(s.after.holders) > 1,
)
def _one_owner(step: Step) -> Failure | None:
    for name, pool in step.after.pools.items():
        free = set(pool.free)
        owner: dict[int, tuple[str, int]] = {}
        for holder, index, page in pool.owned:
            if page in free:
                at = span([index], step.config.geometry.page_size)
                return f"{name} page of {holder} at {at} is not free", f"page {page} is in the free list"
            if page in owner:
                return (
                    f"{name} page {page} belongs to {owner[page][0]} alone",
                    f"{holder} has it too",
                )
            owner[page] = (holder, index)
    return None


@clause(
    "OWN-3",
    "no page is lost",
    "Every page is free or owned.",
    about="state",
    why="What nobody owns, nobody will ever give back.",
    rule="ledger.free",
    source="#22862",
    situation=lambda s: s.freed_something and bool(s.after.holders),
)
def _none_lost(step: Step) -> Failure | None:
    for name, pool in step.after.pools.items():
        known = set(pool.free)
        known.update(o.page for o in pool.owned)
        lost = [p for p in range(1, pool.size + 1) if p not in known]
        if lost:
            return f"every {name} page free or owned", f"pages {lost} are neither"
    return None
