"""A row's pages go into the radix tree: who owns them afterwards, and what is freed for it.

Whoever inserts a text brings its whole pages past the prefix that it has locked. Of each of them:

    the tree has there            | it has SWA KV                            | it was evicted
    nothing                       | the tree takes it, live                  | the tree takes it, a tombstone
    a live page                   | freed: a duplicate                       | freed: a duplicate
    a tombstone under a lock      | freed: a duplicate                       | freed: a duplicate
    a tombstone, no lock there    | the tree takes it, and frees its own     | freed: a duplicate

A lock keeps a tombstone as it is, because whoever holds it reads the tombstone's full slots. Whoever goes on
hands pages over only if it can match all of them again (TREE-12): a duplicate's SWA KV is freed with it, and
would be missed. Formulas of the same table are with `insert` in rules/tree.py; tests evaluate them.
"""

from __future__ import annotations

from reference import radix_tree as radix
from reference.cursors import floor_page
from reference.state import Cursors, Request, State, text_tokens
from reference.prefix_cache import Effects, page_name, unlock_holder
from reference.radix_tree import Key
from reference.token_ids import tree_key


def insert_prompt(state: State, request: Request, effects: Effects) -> State:
    """Insert the prompt so far of a request that goes on; its lock then reaches to its end (R)."""
    assert state.tree is not None and request.cursors is not None
    c = request.cursors
    bigram = state.config.geometry.bigram
    end = floor_page(max(0, c.kv_committed_len - bigram), state.tree.page_size)
    if end == c.cache_protected_len:
        return state
    key = tree_key(text_tokens(request.text, end + bigram), bigram)
    now = _insert_key(state, request.holder, key, _own_swa_start(c), effects, goes_on=True, row=True)
    if now is state:
        return state
    return now.with_request(request._replace(cursors=c._replace(cache_protected_len=end)))


def insert_on_finish(state: State, request: Request, length: int, effects: Effects) -> State:
    """Insert the first `length` tokens of a request that has ended, and drop its lock."""
    assert state.tree is not None and request.cursors is not None
    c = request.cursors
    key = tree_key(text_tokens(request.text, length), state.config.geometry.bigram)
    key = radix.whole_pages(state.tree, key)
    if len(key) > c.cache_protected_len:
        state = _insert_key(
            state, request.holder, key, _own_swa_start(c), effects, goes_on=False, row=True
        )
    return unlock_holder(state, request.holder)


def insert_by_lock_holder(
    state: State, holder: str, key: Key, evicted: int, effects: Effects, *, goes_on: bool
) -> State:
    """Insert the part of `key` behind the prefix that a lock owner has locked and computed on."""
    assert state.tree is not None
    lock = radix.lock_of(state.tree, holder)
    prefix = len(lock.key) if lock is not None else 0
    if len(key) > prefix:
        state = _insert_key(
            state, holder, key, max(evicted, prefix), effects, goes_on=goes_on, row=False
        )
    if not goes_on:
        return unlock_holder(state, holder)
    assert state.tree is not None
    if radix.lock_of(state.tree, holder) is None:  # it stays, with nothing locked
        return state._replace(tree=radix.lock(state.tree, holder, ()))
    return state


def _own_swa_start(c: Cursors) -> int:
    """Return the position below which the inserter has no SWA KV of its own."""
    return max(c.swa_evicted_seqlen, c.cache_protected_len)


def _insert_key(
    state: State, holder: str, key: Key, evicted: int, effects: Effects, *, goes_on: bool, row: bool
) -> State:
    """Insert `key`, whole pages, by the table above; return the very same state where nothing can be
    inserted.

    row: the pages are those of the holder's row; a lock owner has none.
    """
    assert state.tree is not None
    if not goes_on:
        tree, insertion = radix.insert(state.tree, key, evicted)
    elif (done := radix.insert_and_continue(state.tree, holder, key, evicted)) is not None:
        tree, insertion = done
    else:
        return state
    size = tree.page_size
    for start, end in (*insertion.recovered, (insertion.matched, insertion.end)):
        for page in range(start // size, end // size):
            if start < insertion.matched:
                effects.gone["full"].add((page_name(key[: (page + 1) * size]), page))
            if row:
                effects.adopted["full"].add((holder, page))
                if tree.window is not None and page * size >= evicted:
                    effects.adopted["swa"].add((holder, page))
    return state._replace(tree=tree)
