"""Locks in the radix tree, from facts alone: the model's own locks are not read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from reference.clauses.facts import Facts, TreeFacts
from reference.commands import Command, Insert, Match, Unlock, UnlockSwa
from reference.geometry import Geometry
from reference.prefix_cache import key_of
from reference.radix_tree import Key, Tree
from reference.token_ids import tree_key


class Locked(NamedTuple):
    """A locked prefix.

    pinned_from: its SWA KV is pinned from this position on.
    reaches: no SWA KV before this position is pinned. The two differ where facts do not tell how far up
        the lock went when it was taken.
    state: it pins the recurrent state at its end, on a recurrent model.
    """

    key: Key
    pinned_from: int
    reaches: int
    state: bool = True


Locks = Mapping[str, Locked]  # by holder: a session, a request or a lock owner


def locks_of(tree: Tree | None) -> Locks:
    """Return the reference's locks, for a step that has no step before it."""
    if tree is None:
        return {}
    return {k.holder: Locked(k.key, k.swa_from, k.swa_from, k.state) for k in tree.locks if k.key}


def locks_after(
    before: Locks,
    was: Facts,
    facts: Facts,
    command: Command,
    again: str | None,
    geometry: Geometry,
    policy_is_free: bool,
) -> Locks:
    """Return the locks after a command that led from the facts `was` to `facts`.

    Sessions and requests have locked their protected prefix, lock owners what the command gave them. A
    holder whose length has changed has taken a new lock, and so has `again`, which was matched again.
    policy_is_free: the tree splits nodes by rules of its own.
    """
    assert facts.tree is not None
    lengths = _protected_lengths(facts) | _lock_owner_lengths(before, was, facts, command)
    locks = {n: k for n, k in before.items() if n != again and len(k.key) == lengths.get(n)}
    new = {name: length for name, length in lengths.items() if length and name not in locks}
    keys = _new_lock_keys(new, facts, command, geometry.bigram) if new else {}
    for name, key in keys.items():
        if isinstance(command, Match) and command.full_only:
            locks[name] = _full_kv_lock(key)._replace(state=False)
        elif geometry.window is None:
            locks[name] = _full_kv_lock(key)
        elif policy_is_free:
            locks[name] = Locked(key, max(0, len(key) - geometry.window), 0)
        else:
            start = _node_start(facts.tree, key, len(key) - geometry.window)
            # A prompt of the same batch that has split it since may have pinned more than is seen now.
            split = any(n != name and other[:1] == key[:1] for n, other in keys.items())
            locks[name] = Locked(key, start, 0 if split else start)
    if isinstance(command, UnlockSwa):
        asking = facts.requests.get(command.holder)
        holder = asking.session or command.holder if asking is not None else command.holder
        if holder in locks:
            locks[holder] = _full_kv_lock(locks[holder].key)._replace(state=locks[holder].state)
    if geometry.window is not None and policy_is_free:
        _release_swa_behind_window(locks, facts, geometry.window)
    return locks


def _full_kv_lock(key: Key) -> Locked:
    """Return a lock that pins no SWA KV."""
    return Locked(key, len(key), len(key))


def _protected_lengths(facts: Facts) -> dict[str, int]:
    """Return cache_protected_len by session and request; a lent slot has that of its request."""
    lengths = {
        name: session.slot.cache_protected_len
        for name, session in facts.sessions.items()
        if session.slot is not None
    }
    for name, request in facts.requests.items():
        if request.cursors is not None:
            lengths[request.session or name] = request.cursors.cache_protected_len
    return lengths


def _lock_owner_lengths(before: Locks, was: Facts, facts: Facts, command: Command) -> dict[str, int]:
    """Return the locked length of each lock owner (tokens)."""
    assert was.tree is not None and facts.tree is not None
    lengths = {name: len(before[name].key) for name in was.tree.lock_holders if name in before}
    if isinstance(command, Match) or (isinstance(command, Insert) and command.chunked):
        lengths[command.holder] = len(facts.tree.lock_holders.get(command.holder, ()))
    elif isinstance(command, (Unlock, Insert)):
        lengths.pop(command.holder, None)
    return lengths


def _new_lock_keys(new: dict[str, int], facts: Facts, command: Command, bigram: bool) -> dict[str, Key]:
    """Return the key that each new lock holder has locked."""
    texts: dict[str, Sequence[int]] = {name: s.history for name, s in facts.sessions.items()}
    texts |= {r.session or name: r.text for name, r in facts.requests.items()}
    if isinstance(command, (Match, Insert)):
        texts[command.holder] = key_of(command.prompt)
    return {n: tree_key(texts[n][: length + bigram], bigram) for n, length in new.items()}


def _release_swa_behind_window(locks: dict[str, Locked], facts: Facts, window: int) -> None:
    """Drop the SWA part of locks that their owner's window has passed: a tree with rules of its own may
    release it."""
    for name, request in facts.requests.items():
        owner = request.session or name
        cursors = request.cursors
        if owner in locks and cursors is not None:
            lock = locks[owner]
            if cursors.kv_committed_len - window >= len(lock.key):
                locks[owner] = lock._replace(pinned_from=len(lock.key))


def _node_start(tree: TreeFacts, key: Key, position: int) -> int:
    """Return the start of the node that holds a position of a path: nodes are pinned whole."""
    ends = (len(n.path) for n in tree.nodes if n.path == key[: len(n.path)])
    return max((end for end in ends if end <= position), default=0)
