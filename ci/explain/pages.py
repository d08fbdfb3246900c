"""Explanations for pages, rows, the mapping and what is read through it."""

from collections.abc import Callable

from ci.compare.differences import POOL, spans
from ci.explain.history import History
from ci.explain.places import entry, is_odd, slot_of, story
from reference.clauses.contents import misread, stamp_text
from reference.clauses.freed import wrongly_freed
from reference.failures import AtEntry, AtPage, Place
from stateful_tests.lockstep.results import Moment


def _place(past: History) -> str | None:
    """OWN-1 to OWN-4: the page or row that is not free or owned, once."""
    at = past.violation.failure.at
    return story(past, at[0]) + _twice(past, at[0]) if at else None


def _lost(past: History) -> str | None:
    """END-1: what is not given back although nobody holds anything."""
    told = _place(past)
    return f"nobody holds anything after {past.here}, but {told}" if told is not None else None


def _twice(past: History, place: Place) -> str:
    """Why a page is a row's and the tree's: the row's prefix ends before it."""
    if not isinstance(place, AtPage):
        return ""
    owners = [o for o in past.now.facts.pools[place.pool].owned if o.page == place.page]
    for owned in owners:
        holder = past.now.facts.holders.get(owned.holder)
        if holder is not None and any(o.holder.startswith("tree ") and o.at == owned.at for o in owners):
            prefix = holder.cursors.cache_protected_len
            return f"; {owned.holder} owns its row from \0R\0 on, which is {prefix}"
    return ""


def _torn(past: History) -> str | None:
    """OWN-5, MAP-1: slots of a page that are not in order."""
    for name in ("torn", "torn_swa") if past.violation.clause == "OWN-5" else ("torn_swa",):
        for torn in getattr(past.now.facts, name):
            told = f"{torn.where} are {list(torn.slots)}"
            since = past.first_since(told, lambda m, said, where: said in getattr(m.facts, where), torn, name)
            return f"a page is {past.page_size} slots in a row, but the {told} {since}"
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
    page = past.violation.failure.at[0]
    return f"{past.here} must free {must} and frees {spans(got, size)}: {story(past, page)}"


# Mapping and reads.


def _leads(m: Moment, full: int, swa: int) -> bool:
    return entry(m, full) == swa


def _unmapped(past: History) -> str | None:
    """MAP-2: a live position without an SWA slot."""
    holder, position = past.now.facts.unmapped[0]
    slot = slot_of(past.now, holder, position)
    names = past.first_since(f"{holder} has slot {slot}", lambda m: slot_of(m, holder, position) == slot)
    entry = past.first_since(f"entry {slot} is 0", _leads, slot, 0)
    frontier = past.now.facts.holders[holder].cursors.swa_evicted_seqlen
    return (
        f"{holder} has full slot {slot} at position {position} {names}, whose mapping entry is 0 {entry}: the"
        f" position has no SWA slot, and \0E\0 is {frontier}, so nothing there counts as swept"
    )


def _stale(past: History) -> str | None:
    """MAP-3, MAP-4: an entry that should be 0, and the page that made it so."""
    place, size = past.violation.failure.at[0], past.page_size
    if not isinstance(place, AtEntry):
        return None
    page = AtPage("swa", entry(past.now, place.slot) // size)
    if past.violation.clause == "MAP-4":
        page = AtPage("full", place.slot // size)
        if page.page not in past.now.facts.pools["full"].free:
            return f"{story(past, place)}, and full slot {place.slot} is past kv_allocated_len"
    return f"{story(past, place)}; {story(past, page)}"


def _read(past: History) -> str | None:
    """READ: a position that reads what is not its token's."""
    pool = "full" if past.violation.clause == "READ-1" else "swa"
    found = misread(past.step, pool)
    if found is None:
        return None
    holder, start, tokens, stamps = found
    at = next(i for i, (a, b) in enumerate(zip(tokens, stamps)) if a != b)
    position = start + at
    full = slot_of(past.now, holder, position)
    slot = full if pool == "full" else entry(past.now, full)

    def reads(m: Moment) -> bool:
        return slot_of(m, holder, position) == full and (pool == "full" or _leads(m, full, slot))

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
    page = AtPage(pool, slot // past.page_size)
    return f"{told}; {story(past, page)}" if is_odd(page, past.now) else told


RULES: dict[str, Callable[[History], str | None]] = {
    "OWN-1": _place, "OWN-2": _place, "OWN-3": _place, "OWN-4": _place, "OWN-5": _torn,
    "FREE-1": _freed, "FREE-2": _freed, "END-1": _lost,
    "MAP-1": _torn, "MAP-2": _unmapped, "MAP-3": _stale, "MAP-4": _stale, "READ-1": _read, "READ-2": _read,
}  # fmt: skip
