"""Pages: rows are whole pages, the full-to-SWA mapping, and one owner for each page (OWN, MAP)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from reference.clauses.registry import clause
from reference.clauses.facts import Torn
from reference.clauses.step import Step, span
from reference.failures import (
    AtCursor, AtEntry, AtPage, AtPosition, AtRow, AtTreePage, Failure, Place, failure,
)  # fmt: skip


@clause(
    "OWN-5",
    "rows fill whole pages",
    "The full slots of a row are whole pages, in order; only the last may be open.",
    why=(
        "A page is freed by any of its slots, so two half pages of one row cannot be freed "
        "separately."
    ),
    rule="state.full_pages",
    source="#22862 review",
    trigger=lambda s: (
        bool(s.progress)
        and any(
            r is not None
            and r.cursors is not None
            and r.cursors.kv_allocated_len % s.config.geometry.page_size
            for r in map(s.was.request, s.progress)
        )
    ),
)
def _rows_fill_whole_pages(step: Step) -> Failure | None:
    return _torn_page("slots", step.after.torn[0]) if step.after.torn else None


def _torn_page(slots: str, torn: Torn) -> Failure:
    place: Place = AtPosition(torn.holder, torn.pool, torn.start)
    if torn.path:
        place = AtTreePage(torn.path, torn.start)
    head = f"leaves the {torn.slots_text} at {list(torn.slots)}, which are no page in order"
    return failure(f"{slots} of a page, in order", str(torn), place, head=head)


@clause(
    "OWN-4",
    "rows",
    "Every row of req_to_token is free or held by one session or request.",
    why="A row given back twice is lent twice.",
    rule="state.holders",
    source="#22790",
    trigger=lambda s: len(s.after.free_rows) > len(s.before.free_rows),
)
def _one_row_each(step: Step) -> Failure | None:
    rows_in_use = [h.row for h in step.after.holders.values()]
    all_rows = [*step.after.free_rows, *rows_in_use]
    if len(all_rows) == step.after.rows and len(set(all_rows)) == len(all_rows):
        return None
    wrong = [row for row in sorted({*all_rows, *range(step.after.rows)}) if all_rows.count(row) != 1]
    return failure(
        f"{step.after.rows} rows, each free or held once",
        f"free {sorted(step.after.free_rows)}, held {sorted(rows_in_use)}",
        *map(AtRow, wrong),
    )


@clause(
    "MAP-1",
    "mapping is one to one",
    "No two positions are mapped to the same SWA slot, and the slots of a page to those of one page in"
    " order.",
    why="Two tokens would write their SWA KV over each other.",
    rule="state.swa_pages",
    source="kvspec",
    scope="Models with SWA.",
    needs=("window",),
    trigger=lambda s: (
        "swa" in s.after.pools
        and bool(owned := s.after.pools["swa"].owned)
        and owned[0].holder != owned[-1].holder
    ),
)
def _mapping_is_one_to_one(step: Step) -> Failure | None:
    if step.after.torn_swa:
        return _torn_page("SWA slots", step.after.torn_swa[0])
    if not step.after.shared:
        return None
    shared = sorted({swa for _, swa in step.after.shared})
    return failure(
        "each SWA slot mapped from one full slot",
        f"SWA slots {shared} from several",
        *(AtEntry(slot) for slot, _ in step.after.shared),
    )


@clause(
    "MAP-2",
    "live positions are mapped",
    "Every position from swa_evicted_seqlen to kv_allocated_len has an SWA slot.",
    why="Its KV would be written to padding, over everybody else's.",
    rule="state.swa_pages",
    source="kvspec (page_size > 1, window 1)",
    scope="Models with SWA.",
    needs=("window",),
    trigger=lambda s: "swa" in s.after.pools and bool(s.progress) and s.evicted_any,
)
def _live_positions_mapped(step: Step) -> Failure | None:
    if not step.after.unmapped:
        return None
    holder, position = step.after.unmapped[0]
    return failure(
        f"position {position} of {holder} has an SWA slot",
        "its mapping entry is 0",
        AtPosition(holder, "swa", position),
        AtCursor(step.name_of_cursors(holder), "swa_evicted_seqlen"),
    )


@clause(
    "MAP-3",
    "evicted positions are unmapped",
    "The entry of a position below swa_evicted_seqlen is 0.",
    why="Freeing its full slot would free another owner's SWA slot.",
    rule="state.swa_pages",
    source="kvspec",
    scope="Models with SWA.",
    needs=("window",),
    trigger=lambda s: "swa" in s.after.pools and s.evicted_any,
)
def _evicted_positions_unmapped(step: Step) -> Failure | None:
    return _stale_entry(step, "evicted position", "swa", step.after.evicted_mapped)


@clause(
    "MAP-4",
    "unused slots are unmapped",
    "The entry of a full slot that is free, or past kv_allocated_len in its page, leads to no "
    "other owner's slot.",
    why="The next owner of the full slot would inherit it.",
    decision="SGLang frees a row up to kv_allocated_len and leaves the entries of the rest of the last"
    " page; it waives this.",
    assumption=(
        "If every allocation overwrites an entry before its use, a stale entry does no harm."
    ),
    rule="state.swa_pages",
    source="kvspec",
    scope="Models with SWA. Systems that overwrite an entry before anything reads it may waive this.",
    needs=("window",),
    trigger=lambda s: "swa" in s.after.pools and s.freed_something,
)
def _unused_slots_unmapped(step: Step) -> Failure | None:
    return _stale_entry(step, "unused full slot", "full", step.after.unused_mapped)


def _stale_entry(step: Step, problem: str, pool: str, entries: Sequence[tuple[int, int]]) -> Failure | None:
    """Return the failure of a mapping entry that should be gone.

    pool: pool of the page whose freeing made it stale.
    """
    if not entries:
        return None
    slot = entries[0][0 if pool == "full" else 1]
    return failure(
        f"entry of every {problem} is 0",
        f"{len(entries)} lead on, one to SWA slot {entries[0][1]}",
        *(AtEntry(slot) for slot, _ in entries),
        AtPage(pool, slot // step.config.geometry.page_size),
    )


@clause(
    "OWN-2",
    "free lists are sets",
    "A free list holds no page twice, never the padding page, nothing that does not exist.",
    why="A page handed out twice has two owners; padding takes everybody's dummy writes.",
    rule="state.free",
    source="kvspec",
    trigger=lambda s: s.freed_something,
)
def _free_list_is_set(step: Step) -> Failure | None:
    for name, pool in step.after.pools.items():
        free = pool.free_pages
        if len(free) != len(pool.free):
            twice = sorted({p for p in free if list(pool.free).count(p) > 1})
            expected = f"each page once in the {name} free list"
            return failure(expected, f"pages {twice} twice or more", *_page_list(name, twice))
        if wrong := sorted(page for page in free if not 1 <= page <= pool.size):
            expected = f"pages 1 to {pool.size} in the {name} free list"
            return failure(expected, f"pages {wrong}", *_page_list(name, wrong))
    return None


def _page_list(pool: str, pages: Iterable[int]) -> list[AtPage]:
    return [AtPage(pool, page) for page in pages]


@clause(
    "OWN-1",
    "one owner",
    "No page is owned twice, and no owned page is free.",
    why="Two owners overwrite each other's KV: wrong text, hours later.",
    rule="state.full_pages, state.swa_pages",
    source="kvspec",
    trigger=lambda s: len(s.after.holders) > 1,
)
def _one_owner(step: Step) -> Failure | None:
    """Return the failure of the first page that is owned and free, or owned twice."""
    for name, pool in step.after.pools.items():
        free = pool.free_pages
        if len(pool.owner_of) == len(pool.owned) and free.isdisjoint(pool.owner_of):
            continue
        owner: dict[int, tuple[str, int]] = {}
        for holder, index, page in pool.owned:
            if page in free:
                positions = span([index], step.config.geometry.page_size)
                return failure(
                    f"{name} page of {holder} at {positions} is not free",
                    f"page {page} is in the free list",
                    AtPage(name, page),
                )
            if page in owner:
                return failure(
                    f"{name} page {page} belongs to {owner[page][0]} alone",
                    f"{holder} has it too",
                    AtPage(name, page),
                    *_first_own_positions(step, owner[page][0], holder),
                )
            owner[page] = (holder, index)
    return None


def _first_own_positions(step: Step, *holders: str) -> list[AtCursor]:
    """Return the places at which rows begin to own pages, for a page that both a row and the tree have."""
    rows = [name for name in holders if name in step.after.holders]
    if len(rows) == len(holders):
        return []
    return [AtCursor(step.name_of_cursors(name), "cache_protected_len") for name in rows]


@clause(
    "OWN-3",
    "no page is lost",
    "Every page is free or owned.",
    why="Nobody will ever free it.",
    rule="state.free",
    source="#22862",
    trigger=lambda s: s.freed_something and bool(s.after.holders),
)
def _no_page_lost(step: Step) -> Failure | None:
    for name, pool in step.after.pools.items():
        accounted = pool.free_pages | pool.owner_of.keys()
        lost = [page for page in range(1, pool.size + 1) if page not in accounted]
        if lost:
            expected = f"every {name} page free or owned"
            return failure(expected, f"pages {lost} are neither", *_page_list(name, lost))
    return None
