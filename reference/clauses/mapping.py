"""The full-to-SWA mapping (MAP)."""

from __future__ import annotations

from collections.abc import Sequence

from reference.clauses.base import Failure, clause
from reference.clauses.step import Step


@clause(
    "MAP-1",
    "mapping is one to one",
    "No two positions are mapped to the same SWA slot, and the slots of a page to those of one page in"
    " order.",
    about="state",
    why="Two tokens would write their SWA KV over each other.",
    rule="ledger.swa_pages",
    source="kvspec",
    scope="Models with SWA.",
    situation=lambda s: len({o.holder for o in s.after.pools["swa"].owned}) > 1
    if "swa" in s.after.pools
    else False,
)
def _one_to_one(step: Step) -> Failure | None:
    if step.after.torn_swa:
        return "SWA slots of a page, in order", step.after.torn_swa[0]
    if not step.after.shared:
        return None
    return "each SWA slot mapped from one full slot", f"SWA slots {list(step.after.shared)} from several"


@clause(
    "MAP-2",
    "live positions are mapped",
    "Every position from swa_evicted_seqlen to kv_allocated_len has an SWA slot.",
    about="state",
    why="Its KV would be written to padding, over everybody else's.",
    rule="ledger.swa_pages",
    source="kvspec (page_size > 1, window 1)",
    scope="Models with SWA.",
    situation=lambda s: "swa" in s.after.pools and bool(s.progress) and s.swept_any,
)
def _mapped(step: Step) -> Failure | None:
    if not step.after.unmapped:
        return None
    holder, position = step.after.unmapped[0]
    return f"position {position} of {holder} has an SWA slot", "its mapping entry is 0"


@clause(
    "MAP-3",
    "swept positions are unmapped",
    "The entry of a position below swa_evicted_seqlen is 0.",
    about="state",
    why="Freeing its full slot would free an SWA slot that is somebody else's by now.",
    rule="ledger.swa_pages",
    source="kvspec",
    scope="Models with SWA.",
    situation=lambda s: "swa" in s.after.pools and s.swept_any,
)
def _swept(step: Step) -> Failure | None:
    return _stale("swept position", step.after.swept_mapped)


@clause(
    "MAP-4",
    "unused slots are unmapped",
    "The entry of a full slot that is free, or past kv_allocated_len in its page, leads to nobody else.",
    about="state",
    why="Whoever gets the full slot next would inherit it, unless every allocation overwrites it.",
    settled="SGLang frees a row up to kv_allocated_len and leaves the entries of the rest of the last page;"
    " it waives this.",
    assumption="If every allocation overwrites an entry before anything reads or frees through it, a stale"
    " one does no harm.",
    rule="ledger.swa_pages",
    source="kvspec",
    scope="Models with SWA. Systems that overwrite an entry before anything reads it may waive this.",
    situation=lambda s: "swa" in s.after.pools and s.freed_something,
)
def _unused(step: Step) -> Failure | None:
    return _stale("unused full slot", step.after.unused_mapped)


def _stale(what: str, entries: Sequence[tuple[int, int]]) -> Failure | None:
    if not entries:
        return None
    return f"entry of every {what} is 0", f"{len(entries)} lead on, one to SWA slot {entries[0][1]}"
