"""Requests and lock holders on the radix tree: room by eviction, matching, inserting, letting go.

`Effects` notes which pages changed hands on the way: what the tree gave back and what it took over.
The rules of the tree itself are in `tree.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from reference import tree as radix
from reference.commands import (
    POSITION_BITS,
    SHARED,
    Prompt,
    Reason,
    shared_serial,
)  # fmt: skip
from reference.cursors import ceil_page, floor_page
from reference.ledger import Cursors, Request, State, Text, free, text_len, text_tokens
from reference.tree import Insertion, Key, Tree


@dataclass(slots=True)
class Effects:
    """Pages that changed hands in one command, per pool, as (holder, page index in its sequence).

    gone: of the tree, given back; the holder is the page's name. adopted: of a row, the tree's now.
    """

    gone: dict[str, set[tuple[str, int]]] = field(default_factory=lambda: {"full": set(), "swa": set()})
    adopted: dict[str, set[tuple[str, int]]] = field(default_factory=lambda: {"full": set(), "swa": set()})


# Names. Whoever owns the page that holds the KV of the last tokens of a path in the tree, is called by
# that path: so the name stays when nodes are split.


@lru_cache(maxsize=1 << 16)
def page_name(path: Key) -> str:
    """The tree as the owner of the page at the end of `path`, such as "tree a8b4"."""
    return f"tree {path_text(path)}"


def path_text(path: Key) -> str:
    """Tokens as runs of the texts they are from: a8b4, or #3:5 for five that the third Submit brought."""
    parts: list[tuple[int, int]] = []
    for token in path:
        serial = token >> POSITION_BITS
        if parts and parts[-1][0] == serial:
            parts[-1] = (serial, parts[-1][1] + 1)
        else:
            parts.append((serial, 1))
    return " ".join(f"{_text_name(serial)}{count}" for serial, count in parts)


def _text_name(serial: int) -> str:
    return chr(ord("a") + serial - SHARED) if serial >= SHARED else f"#{serial}:"


Pages = dict[str, frozenset[tuple[str, int]]]
NO_PAGES: Pages = {"full": frozenset(), "swa": frozenset()}


@lru_cache(maxsize=64)
def pages_of(tree: Tree) -> Pages:
    """Every page that the tree owns, per pool, by name. Not to be changed: it is handed out again."""
    owned: dict[str, set[tuple[str, int]]] = {"full": set(), "swa": set()}
    size = tree.page_size
    for placed in radix.nodes(tree):
        for end in range(placed.start + size, placed.end + 1, size):
            page = page_name(placed.path[:end]), end // size - 1
            owned["full"].add(page)
            if placed.node.live and tree.window is not None:
                owned["swa"].add(page)
    return {pool: frozenset(pages) for pool, pages in owned.items()}


def extended(text: Text, prompt: Prompt) -> Text:
    """`text` and then the pieces of a prompt."""
    runs, end = list(text), text_len(text)
    for piece in prompt:
        serial, end = shared_serial(piece.text), end + piece.tokens
        if runs and runs[-1][0] == serial:
            runs.pop()
        runs.append((serial, end))
    return tuple(runs)


def well_formed(prompt: Prompt) -> bool:
    """Each piece has a token at least, and a text that there is."""
    return all(p.tokens >= 1 and len(p.text) == 1 and "a" <= p.text <= "z" for p in prompt)


def key_of(prompt: Prompt) -> Key:
    """The tokens of a prompt."""
    return tuple(text_tokens(extended((), prompt)))


# Room.


def with_room(state: State, pages: int, effects: Effects) -> State | Reason:
    """The state with `pages` pages free in both pools: what is missing is evicted, just that, or nothing.

    Whatever no lock pins can be had: a node without a lock has none below it.
    """
    left, geometry = free(state), state.config.geometry
    size = geometry.page_size
    missing_full = max(0, pages - left.full) * size
    missing_swa = max(0, pages - left.swa) * size if geometry.window is not None else 0
    if not missing_full and not missing_swa:
        return state
    sizes = radix.sizes(state.tree) if state.tree is not None else radix.Sizes(0, 0, 0, 0)
    if missing_full > sizes.full_evictable:
        return Reason.OUT_OF_FULL
    if missing_swa > sizes.swa_evictable:
        return Reason.OUT_OF_SWA
    return evicted(state, missing_full, missing_swa, effects)[0]


def evicted(state: State, full: int, swa: int, effects: Effects) -> tuple[State, radix.Evicted]:
    """The tree evicts, in tokens."""
    assert state.tree is not None
    before = pages_of(state.tree)
    tree, freed = radix.evict(state.tree, full, swa)
    after = pages_of(tree)
    for pool in effects.gone:
        effects.gone[pool] |= before[pool] - after[pool]
    return state._replace(tree=tree), freed


# Requests.


def unlocked(state: State, holder: str) -> State:
    """The holder's lock, if it has one, is given back."""
    if state.tree is None:
        return state
    return state._replace(tree=radix.unlock(state.tree, holder))


def matched(state: State, holder: str, key: Key) -> tuple[State, int]:
    """The holder has the longest usable prefix of `key` locked, and no other; its length."""
    assert state.tree is not None
    tree, length = radix.match(radix.unlock(state.tree, holder), key)
    return state._replace(tree=radix.lock(tree, holder, key[:length])), length


def prompt_kept(state: State, request: Request, effects: Effects) -> State:
    """The prompt so far goes into the tree, whose lock then reaches to its end (R), and the request on."""
    assert state.tree is not None and request.cursors is not None
    c = request.cursors
    end = floor_page(c.kv_committed_len, state.tree.page_size)
    if end == c.cache_protected_len:
        return state
    key = tuple(text_tokens(request.text, end))
    kept = radix.kept(state.tree, request.holder, key, max(c.swa_evicted_seqlen, c.cache_protected_len))
    if kept is None:
        return state
    tree, insertion = kept
    _note(request.holder, key, c, insertion, state.tree, effects)
    state = state._replace(tree=tree)
    return state.with_request(request._replace(cursors=c._replace(cache_protected_len=end)))


def text_left(state: State, request: Request, length: int, effects: Effects) -> State:
    """A request has ended: the first `length` tokens of its text go into the tree, its lock goes."""
    assert state.tree is not None and request.cursors is not None
    c, tree = request.cursors, state.tree
    key = radix.whole_pages(tree, tuple(text_tokens(request.text, length)))
    if len(key) > c.cache_protected_len:
        tree, insertion = radix.insert(tree, key, max(c.swa_evicted_seqlen, c.cache_protected_len))
        _note(request.holder, key, c, insertion, state.tree, effects)
    return unlocked(state._replace(tree=tree), request.holder)


def _note(
    holder: str, key: Key, c: Cursors | None, insertion: Insertion, before: Tree, effects: Effects
) -> None:
    """Which pages an insertion took over, and which of its own the tree gave back for them.

    c: cursors of the inserter's row, None for a lock holder, which has none.
    """
    size = before.page_size
    swa_from = ceil_page(max(c.swa_evicted_seqlen, c.cache_protected_len), size) if c is not None else 0
    ranges = [*insertion.recovered, (insertion.matched, insertion.end)]
    for start, end in ranges:
        for at in range(start // size, end // size):
            if start < insertion.matched:
                effects.gone["full"].add((page_name(key[: (at + 1) * size]), at))
            if c is not None:
                effects.adopted["full"].add((holder, at))
                if before.window is not None and at * size >= swa_from:
                    effects.adopted["swa"].add((holder, at))


# Lock holders.


def lock_holders(state: State) -> dict[str, Key]:
    """Who has locked a prefix, and is neither session nor request; and the prefix."""
    if state.tree is None:
        return {}
    others = {s.name for s in state.sessions} | {r.name for r in state.requests}
    return {lock.holder: lock.key for lock in state.tree.locks if lock.holder not in others}


def inserted(
    state: State, holder: str, key: Key, prefix: int, swept: int, chunked: bool, effects: Effects
) -> State:
    """A lock holder that has computed `key`, and has its first `prefix` tokens locked, hands it to the
    tree."""
    assert state.tree is not None
    tree = state.tree
    key = radix.whole_pages(tree, key)
    if len(key) > prefix and not chunked:
        tree, insertion = radix.insert(tree, key, max(swept, prefix))
        _note(holder, key, None, insertion, state.tree, effects)
    elif len(key) > prefix and (kept := radix.kept(tree, holder, key, max(swept, prefix))) is not None:
        tree, insertion = kept
        _note(holder, key, None, insertion, state.tree, effects)
    if not chunked:
        tree = radix.unlock(tree, holder)
    elif radix.lock_of(tree, holder) is None:
        tree = radix.lock(tree, holder, ())
    return state._replace(tree=tree)
