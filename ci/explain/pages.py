"""Explanations for pages, rows, the mapping and what is read through it."""

from collections.abc import Callable

from ci.compare.differences import POOL, spans
from ci.explain.history import History, troubled
from reference.clauses.contents import misread, stamp_text
from reference.clauses.freed import wrongly_freed
from stateful_tests.lockstep.results import Moment


def _page(past: History) -> str | None:
    """OWN-1 to OWN-3: the page that is not free or owned, once."""
    for pool, page in troubled(past.now):
        facts = past.now.facts.pools[pool]
        fits = {
            "OWN-2": list(facts.free).count(page) > 1 or not 1 <= page <= facts.size,
            "OWN-1": any(o.page == page for o in facts.owned),
            "OWN-3": page not in facts.free,
        }
        if fits[past.violation.clause]:
            return past.page(pool, page)
    return None


def _lost(past: History) -> str | None:
    """END-1: what is not given back although nobody holds anything."""
    if past.violation.expected.startswith("all "):
        return _row(past)
    head = f"nobody holds anything after {past.here}, but"
    for pool, page in troubled(past.now):
        return f"{head} {past.page(pool, page)}"
    for pool, facts in past.now.facts.pools.items():
        for owned in facts.owned:
            if not owned.holder.startswith("tree "):
                return f"{head} {POOL[pool]} page {owned.page} is not free: {past.having(pool, owned)}"
    return None


def _holding(m: Moment, row: int) -> list[str]:
    return [name for name, h in m.facts.holders.items() if h.row == row]


def _row(past: History) -> str | None:
    """OWN-4: a row of req_to_token that is not free or held, once."""
    facts = past.now.facts
    for row in sorted({*facts.free_rows, *range(facts.rows), *(h.row for h in facts.holders.values())}):
        times = list(facts.free_rows).count(row)
        if len(_holding(past.now, row)) + times != 1:
            return _of_row(past, row, times)
    return None


def _of_row(past: History, row: int, times: int) -> str:
    names = _holding(past.now, row)
    having = [
        f"{n} holds it {past.first_since(f'row {row}: {n}', lambda m, who: who in _holding(m, row), n)}"
        for n in names
    ]
    if times:
        free = past.first_since(f"row {row} is free", lambda m: list(m.facts.free_rows).count(row) >= times)
        often = f" {times} times" if times > 1 else ""
        return ", and ".join([f"row {row} is in the list of free rows{often} {free}", *having])
    if having:
        return f"row {row} is held {len(names)} times: {' and '.join(having)}"
    since = past.first_since(
        f"row {row} is lost", lambda m: not _holding(m, row) and row not in m.facts.free_rows
    )
    was = past.last_before(lambda m: bool(_holding(m, row)))
    then = f"; until then {_holding(was, row)[0]} held it" if was is not None else ""
    return f"row {row} is neither free nor held {since}{then}"


def _torn(past: History) -> str | None:
    """OWN-5, MAP-1: slots of a page that are not in order."""
    for name in ("torn", "torn_swa") if past.violation.clause == "OWN-5" else ("torn_swa",):
        for torn in getattr(past.now.facts, name):
            told = str(torn)
            since = past.first_since(told, lambda m, said, where: said in getattr(m.facts, where), torn, name)
            slots = told.replace("swa slots", "SWA slots").replace(": [", " are [")
            return f"a page is {past.page_size} slots in a row, but the {slots} {since}"
    return None


def _freed(past: History) -> str | None:
    """FREE: pages that were owed and not freed, or freed and not owed."""
    pool = "full" if past.violation.clause == "FREE-1" else "swa"
    found, size = wrongly_freed(past.step, pool), past.page_size
    if found is None:
        return None
    holder, want, got = found
    tree = holder.removeprefix("tree ")
    whose = f"of the tree at the end of {tree}" if tree != holder else f"of {holder}"
    pages = f"{POOL[pool]} page"
    must = f"the {pages}s {whose} at {spans(want, size)}" if want else f"no {pages} {whose}"
    key = holder, min({*want} ^ {*got})
    page = next(o.page for o in past.before.facts.pools[pool].owned if (o.holder, o.at) == key)
    return f"{past.here} must free {must} and frees {spans(got, size)}: {_now(past, pool, page)}"


def _now(past: History, pool: str, page: int) -> str:
    """Where a page is now; that something is wrong with it first."""
    if (pool, page) in troubled(past.now):
        return past.page(pool, page)
    name = f"{POOL[pool]} page {page}"
    owned = next((o for o in past.now.facts.pools[pool].owned if o.page == page), None)
    if owned is not None:
        return f"{name} is not free, {past.having(pool, owned)}"
    since = past.first_since(f"{name} is free", lambda m: page in m.facts.pools[pool].free)
    return f"{name} is in the free list {since}"


# Mapping and reads.


def _slot(m: Moment, holder: str, position: int) -> int:
    """The full slot that a row names; 0 for none."""
    facts = m.facts.holders.get(holder)
    cells = m.view.rows.get(facts.row, ()) if facts is not None else ()
    return cells[position] if position < len(cells) else 0


def _mapped(m: Moment, slot: int) -> int:
    return m.view.full_to_swa[slot] if 0 <= slot < len(m.view.full_to_swa) else 0


def _leads(m: Moment, full: int, swa: int) -> bool:
    return _mapped(m, full) == swa


def _is_free(m: Moment, pool: str, page: int) -> bool:
    return page in m.facts.pools[pool].free


def _shared(past: History) -> str | None:
    """MAP-1: an SWA slot that several positions lead to."""
    if past.now.facts.torn_swa:
        return _torn(past)
    for _, swa in past.now.facts.shared:
        slots = [s for s, to in enumerate(past.now.view.full_to_swa) if to == swa]
        each = [f"full slot {s} {past.first_since(f'{s} leads to {swa}', _leads, s, swa)}" for s in slots]
        return f"two tokens write to SWA slot {swa}: it is mapped from {' and from '.join(each)}"
    return None


def _unmapped(past: History) -> str | None:
    """MAP-2: a live position without an SWA slot."""
    holder, position = past.now.facts.unmapped[0]
    slot = _slot(past.now, holder, position)
    names = past.first_since(f"{holder} has slot {slot}", lambda m: _slot(m, holder, position) == slot)
    entry = past.first_since(f"entry {slot} is 0", _leads, slot, 0)
    frontier = past.now.facts.holders[holder].cursors.swa_evicted_seqlen
    return (
        f"{holder} has full slot {slot} at position {position} {names}, whose mapping entry is 0 {entry}: the"
        f" position has no SWA slot, and \0E\0 is {frontier}, so nothing there counts as swept"
    )


def _stale(past: History) -> str:
    """MAP-3, MAP-4: an entry that should be 0."""
    facts, swept = past.now.facts, past.violation.clause == "MAP-3"
    full, swa = (facts.swept_mapped if swept else facts.unused_mapped)[0]
    page, full_page = swa // past.page_size, full // past.page_size
    leads = past.first_since(f"{full} leads to {swa}", _leads, full, swa)
    told = f"full slot {full} is mapped to SWA slot {swa} {leads}"
    whose = next((o for o in facts.pools["swa"].owned if o.page == page), None)
    if whose is not None:
        told += f"; of SWA page {page}, {past.having('swa', whose)}"
    elif _is_free(past.now, "swa", page):
        free = past.first_since(f"SWA page {page} is free", _is_free, "swa", page)
        told += f", though SWA page {page} is free {free}"
    if swept:
        return told
    if not _is_free(past.now, "full", full_page):
        return f"full slot {full} is past kv_allocated_len, but {told}"
    free = past.first_since(f"full page {full_page} is free", _is_free, "full", full_page)
    return f"full page {full_page} is free {free}, but {told}"


def _read(past: History) -> str | None:
    """READ: a position that reads what is not its token's."""
    pool = "full" if past.violation.clause == "READ-1" else "swa"
    found = misread(past.step, pool)
    if found is None:
        return None
    holder, start, tokens, stamps = found
    at = next(i for i, (a, b) in enumerate(zip(tokens, stamps)) if a != b)
    position = start + at
    full = _slot(past.now, holder, position)
    slot = full if pool == "full" else _mapped(past.now, full)

    def reads(m: Moment) -> bool:
        return _slot(m, holder, position) == full and (pool == "full" or _leads(m, full, slot))

    def stamp(m: Moment) -> int:
        return (m.view.full_stamps if pool == "full" else m.view.swa_stamps)[slot]

    names = past.first_since(f"{holder} reads {pool} slot {slot}", reads)
    if not slot:
        return f"{holder} must read {POOL[pool]} KV at position {position} and finds no slot there {names}"
    is_now = stamp(past.now)
    holds = past.first_since(f"slot {slot} holds {is_now}", lambda m: stamp(m) == is_now)
    what = stamp_text(is_now) if is_now else "no committed token"
    told = (
        f"{holder} reads position {position} in {POOL[pool]} slot {slot} {names}, which holds"
        f" {what}, {holds}; it must be {stamp_text(tokens[at])}"
    )
    page = slot // past.page_size
    return f"{told}; {past.page(pool, page)}" if (pool, page) in troubled(past.now) else told


RULES: dict[str, Callable[[History], str | None]] = {
    "OWN-1": _page, "OWN-2": _page, "OWN-3": _page, "OWN-4": _row, "OWN-5": _torn,
    "FREE-1": _freed, "FREE-2": _freed, "END-1": _lost,
    "MAP-1": _shared, "MAP-2": _unmapped, "MAP-3": _stale, "MAP-4": _stale, "READ-1": _read, "READ-2": _read,
}  # fmt: skip
