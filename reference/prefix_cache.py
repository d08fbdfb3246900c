"""Requests and lock owners on the radix tree: names, room by eviction, matching, unlocking.

What is inserted is in `tree_insertion.py`; the rules of the tree itself are in `radix_tree.py`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from reference import radix_tree as radix
from reference.commands import Freed, Prompt, Reason
from reference.cursors import page_ends
from reference.state import State, Text, free, text_len, text_tokens
from reference.memoization import memoized
from reference.radix_tree import Key, Tree
from reference.token_ids import (
    SHARED, is_bigram, second_of, serial_of, shared_serial, shared_text, token_of, tree_key,
)  # fmt: skip
from reference.tree_eviction import evict, evictable_states


class Effects(NamedTuple):
    """Pages that changed owners in one command, per pool, as (holder, page index in its sequence).

    gone: pages that the tree gave back; the holder is the page's name.
    adopted: pages of a row that the tree adopted.
    """

    gone: dict[str, set[tuple[str, int]]]
    adopted: dict[str, set[tuple[str, int]]]


def no_effects() -> Effects:
    """Return effects without any page."""
    return Effects({"full": set(), "swa": set()}, {"full": set(), "swa": set()})


# Names. Whoever owns the page that holds the KV of the last tokens of a path in the tree, is called by
# that path: so the name stays when nodes are split.


@lru_cache(maxsize=1 << 16)
def page_name(path: Key) -> str:
    """Return the tree's name as the owner of the page at the end of `path`, such as "tree a8b4"."""
    return f"tree {path_text(path)}"


def path_text(path: Key) -> str:
    """Return tokens as runs of their texts, such as a8b4, or #3:5 for five tokens of the third Submit.
    Bigrams are a8+b, where b follows."""
    parts: list[tuple[int, int]] = []
    for token in map(token_of, path):
        serial = serial_of(token)
        if parts and parts[-1][0] == serial:
            parts[-1] = (serial, parts[-1][1] + 1)
        else:
            parts.append((serial, 1))
    text = " ".join(f"{_text_name(serial)}{count}" for serial, count in parts)
    after = serial_of(second_of(path[-1])) if path and is_bigram(path[-1]) else 0
    return f"{text}+{_text_name(after).rstrip(':')}" if after else text


def _text_name(serial: int) -> str:
    return shared_text(serial) if serial >= SHARED else f"#{serial}:"


Pages = dict[str, frozenset[tuple[str, int]]]
NO_PAGES: Pages = {"full": frozenset(), "swa": frozenset()}


@memoized
def pages_of(tree: Tree) -> Pages:
    """Return every page that the tree owns, per pool, by name. Callers must not change the result,
    which is shared."""
    owned: dict[str, set[tuple[str, int]]] = {"full": set(), "swa": set()}
    size = tree.page_size
    for placed in radix.nodes(tree):
        for end in page_ends(placed.end, size, placed.start):
            page = page_name(placed.path[:end]), end // size - 1
            owned["full"].add(page)
            if placed.node.live and tree.window is not None:
                owned["swa"].add(page)
    return {pool: frozenset(pages) for pool, pages in owned.items()}


def extend_text(text: Text, prompt: Prompt) -> Text:
    """Return `text` with the pieces of a prompt appended."""
    runs = list(text)
    end = text_len(text)
    for piece in prompt:
        serial = shared_serial(piece.text)
        end += piece.tokens
        if runs and runs[-1][0] == serial:
            runs.pop()
        runs.append((serial, end))
    return tuple(runs)


def well_formed(prompt: Prompt) -> bool:
    """Return whether each piece has a token at least, and names a shared text."""
    return all(p.tokens >= 1 and is_text(p.text) for p in prompt)


def is_text(name: str) -> bool:
    """Return whether this names a shared text."""
    return len(name) == 1 and "a" <= name <= "z"


@lru_cache(maxsize=1 << 12)
def key_of(prompt: Prompt, bigram: bool = False) -> Key:
    """Return the tree's key for a prompt."""
    return tree_key(text_tokens(extend_text((), prompt)), bigram)


# -- room -----------------------------------------------------------------------------------------

_EMPTY = Tree(1, None)  # nothing to evict


def with_room(
    state: State, pages: int, swa_pages: int, effects: Effects, states: int = 0
) -> State | Reason:
    """Return the state with that many free pages in each pool, and free slots of recurrent state: exactly
    what is missing is evicted. Returns the reason where that is impossible.

    Whatever no lock pins is evictable: a node without a lock has none below it.
    """
    left = free(state)
    geometry = state.config.geometry
    size = geometry.page_size
    missing_full = max(0, pages - left.full) * size
    missing_swa = max(0, swa_pages - left.swa) * size if geometry.window is not None else 0
    missing_states = max(0, states - left.states)
    if not missing_full and not missing_swa and not missing_states:
        return state
    tree = state.tree or _EMPTY
    sizes = radix.sizes(tree)
    if missing_full > sizes.full_evictable:
        return Reason.OUT_OF_FULL
    if missing_swa > sizes.swa_evictable:
        return Reason.OUT_OF_SWA
    if missing_states > evictable_states(tree):
        return Reason.OUT_OF_STATES
    return evict_from_cache(state, missing_full, missing_swa, effects, missing_states)[0]


def evict_from_cache(
    state: State, full: int, swa: int, effects: Effects, states: int = 0
) -> tuple[State, Freed]:
    """Evict tokens of each pool and states from the tree."""
    assert state.tree is not None
    before = pages_of(state.tree)
    tree, freed = evict(state.tree, full, swa, states)
    after = pages_of(tree)
    for pool in effects.gone:
        effects.gone[pool] |= before[pool] - after[pool]
    return state._replace(tree=tree), freed


# -- locks ----------------------------------------------------------------------------------------


def unlock_holder(state: State, holder: str) -> State:
    """Return the state without the holder's lock."""
    if state.tree is None:
        return state
    return state._replace(tree=radix.unlock(state.tree, holder))


def match_and_lock(state: State, holder: str, key: Key, full_only: bool = False) -> tuple[State, int]:
    """Lock the longest usable prefix of `key` for the holder, in the place of its lock; also return the
    length."""
    assert state.tree is not None
    tree, length = radix.match(radix.unlock(state.tree, holder), key, full_only)
    return state._replace(tree=radix.lock(tree, holder, key[:length], full_only)), length


def lock_holders(state: State) -> dict[str, Key]:
    """Return the prefixes locked by lock owners that are neither session nor request, by name."""
    if state.tree is None:
        return {}
    others = {s.name for s in state.sessions} | {r.name for r in state.requests}
    return {lock.holder: lock.key for lock in state.tree.locks if lock.holder not in others}


def shares_lock(state: State, holder: str) -> bool:
    """Return whether another holder has locked a part of the holder's prefix."""
    locked = {lock.holder: lock.key for lock in state.tree.locks} if state.tree is not None else {}
    page = locked.pop(holder, ())[: state.config.geometry.page_size]
    return bool(page) and any(key[: len(page)] == page for key in locked.values())
