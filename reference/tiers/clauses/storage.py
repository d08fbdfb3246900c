"""A storage behind the host: what is written to it (STORE)."""

from __future__ import annotations

from reference.failures import AtSlot, Failure, failure
from reference.prefix_cache import path_text
from reference.tiers.clauses.base import clause
from reference.tiers.step import TierStep


@clause(
    "STORE-1",
    "a stored page is that of its hash",
    "What is written to a storage under the hash of a page holds KV of the tokens that the hash stands for,"
    " in the namespace that it stands for.",
    why="Whoever has the hash, on any server, reads that KV as its own.",
    rule="tiers.facts",
    source="sglang HiCacheController._page_backup, sglang#38480, sglang#38577",
    scope="Trees with a host tier and a storage.",
    trigger=lambda s: bool(s.after.stored),
)
def _stored(step: TierStep) -> Failure | None:
    for page in step.after.stored:
        at = next((i for i, (a, b) in enumerate(zip(page.found, page.wanted)) if a != b), None)
        if at is None and len(page.found) == len(page.wanted):
            continue
        want = f"hash {page.key} is that of the {page.pool} KV that is stored under it"
        if at is None:
            got = f"it is of {len(page.wanted)} tokens, and {len(page.found)} are stored"
            return failure(want, got)
        kv = f"KV of {path_text(page.found[at : at + 1])}" if page.found[at] else "nothing"
        got = f"it stands for {path_text(page.wanted[at : at + 1])}; host slot {page.slots[at]} holds {kv}"
        return failure(want, got, AtSlot(page.pool, page.slots[at], host=True))
    return None
