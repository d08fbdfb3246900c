"""Pages that a command must free, and pages that the system freed, by holder and pool.

A command must free the pages behind the position at which a turn is trimmed, the pages that a window eviction
passes, duplicates of pages that the tree already has, and the pages that the tree evicts. A page is freed if
it had an owner before the step and is in a free list or has another owner after it. FREE-1 and FREE-2 compare
the two sets.
"""

from __future__ import annotations

from reference.clauses.step import PagesByHolder, Step
from reference.commands import (
    Abort, Admit, Close, Decode, Evict, Extend, Finish, Insert, Launch, Retract, SpecDecode, UnlockSwa,
)  # fmt: skip
from reference.prefix_cache import page_name
from reference.memoization import memoized
from reference.state import Cursors, text_tokens
from reference.token_ids import tree_key

_ENDINGS = Close, Finish, Retract, Abort, Admit, Extend  # see `ended_holder`, `cut_at` and `_ranges_for_tree`
_TREE_GIVES_UP = Extend, Decode, SpecDecode, Launch, Finish, Abort, UnlockSwa, Insert, Evict


@memoized
def pages_freed(step: Step) -> dict[str, PagesByHolder]:
    """Return the pages that had an owner before the step and that the system freed, by pool."""
    return {pool: _freed_pages(step, pool) for pool in step.after.pools}


@memoized
def pages_owed(step: Step) -> dict[str, PagesByHolder]:
    """Return the pages that the command must free, by pool."""
    goes = None
    if isinstance(step.command, _ENDINGS):
        goes = step.cut_at if step.ended_holder is None else (*step.ended_holder, 0)
    some = step.done and (goes is not None or step.after.tree is not None or _window_evictions(step))
    return {pool: _owed_pages(step, pool, goes) if some else {} for pool in step.after.pools}


def _freed_pages(step: Step, pool: str) -> PagesByHolder:
    before = step.before.pools[pool]
    after = step.after.pools[pool]
    freed: PagesByHolder = {}
    free = after.free_pages
    others = after.owner_of
    once = len(before.owner_of) == len(before.owned)
    if once and before.owner_of.items() <= others.items() and free.isdisjoint(others):
        return freed
    owned_after = after.owned_once
    for owned in before.owned:
        holder, index, page = owned
        is_freed = owned not in owned_after and page in others
        if page in free or (is_freed and others[page].holder != _name_in_tree(step, holder, index)):
            freed.setdefault(holder, []).append(index)
    return freed


def _name_in_tree(step: Step, holder: str, index: int) -> str | None:
    """Return the name of a row's page after adoption by the tree, None for a holder without a key in the
    tree."""
    if holder not in _tree_keys(step):
        return None
    return page_name(_tree_keys(step)[holder][: (index + 1) * step.config.geometry.page_size])


@memoized
def _tree_keys(step: Step) -> dict[str, tuple[int, ...]]:
    """Return the tree key of each holder's text, including accepted tokens that only the device knows."""
    bigram = step.config.geometry.bigram
    texts = {r.holder: r.computed_text for r in step.was.requests if r.in_flight}
    return {
        h.name: tree_key(text_tokens(texts.get(h.name, h.text)), bigram)
        for h in (*step.holders_now, *step.holders_before)
    }


@memoized
def _window_evictions(step: Step) -> list[tuple[str, Cursors, int]]:
    """Return (holder, cursors before, swa_evicted_seqlen now) for each request with a window eviction."""
    evicted = []
    for request in step.was.requests:
        c = request.cursors
        now = step.after.requests.get(request.name)
        if c is not None and now is not None and now.cursors is not None:
            if now.cursors.swa_evicted_seqlen > c.swa_evicted_seqlen:
                evicted.append((request.holder, c, now.cursors.swa_evicted_seqlen))
    return evicted


def _owed_pages(step: Step, pool: str, goes: tuple[str, Cursors, int] | None) -> PagesByHolder:
    size = step.config.geometry.page_size
    swa = pool == "swa"
    owed: dict[str, set[int]] = {}
    if goes is not None:  # its own pages from target on
        holder, c, target = goes
        start = max(target, c.cache_protected_len, c.swa_evicted_seqlen if swa else 0)
        owed[holder] = {*range(-(-start // size), -(-c.kv_allocated_len // size))}
    if swa:
        for holder, c, frontier in _window_evictions(step):
            start = max(c.cache_protected_len, c.swa_evicted_seqlen)
            end = min(frontier, c.kv_allocated_len)
            owed[holder] = {p // size for p in range(start, end, size)}
    if step.after.tree is not None:
        _add_tree_handovers(step, pool, owed)
    return {holder: sorted(pages) for holder, pages in owed.items() if pages} if owed else {}


def _add_tree_handovers(step: Step, pool: str, owed: dict[str, set[int]]) -> None:
    """Update `owed` for the pages that rows insert into the tree. A page that the tree lacked is adopted
    from the first request of the batch that has it, and must not be freed; a duplicate must be. Pages
    that the tree evicts must be freed too."""
    before = step.before.pools[pool]
    after = step.after.pools[pool]
    size = step.config.geometry.page_size
    own = before.places
    owned_before = before.owned_once
    has = after.owned_once
    handed_over = {o.holder for o in has - owned_before} if _ranges_for_tree(step) else set()
    for holder, start, end, frontier in _ranges_for_tree(step):
        for index in range(start // size, -(-end // size)):
            name = _name_in_tree(step, holder, index)
            if pool == "swa" and index * size < frontier:
                continue
            if name in handed_over:
                handed_over.remove(name)
                owed.get(holder, set()).discard(index)
            elif (holder, index) in own:
                owed.setdefault(holder, set()).add(index)
    admits = isinstance(step.command, Admit) and step.config.geometry.states  # room for a state
    if isinstance(step.command, _TREE_GIVES_UP) or admits:
        for gone in owned_before - has:
            if gone.holder.startswith("tree "):
                owed.setdefault(gone.holder, set()).add(gone.at)


@memoized
def _ranges_for_tree(step: Step) -> list[tuple[str, int, int, int]]:
    """Return (holder, start, end, swa_evicted_seqlen) for each range that a row inserts into the tree, in
    order."""
    if isinstance(step.command, Finish) and step.ended_holder is not None:
        holder, c = step.ended_holder
        return [(holder, c.cache_protected_len, c.kv_allocated_len, c.swa_evicted_seqlen)]
    handed = []
    if isinstance(step.command, Extend):
        for name in step.progress:
            was = step.was.request(name)
            now = step.after.requests.get(name)
            assert was is not None and was.cursors is not None
            if now is not None and now.cursors is not None:
                start = was.cursors.cache_protected_len
                end = now.cursors.cache_protected_len
                handed.append((was.holder, start, end, now.cursors.swa_evicted_seqlen))
    return handed
