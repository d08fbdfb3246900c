"""Who has locked what in the radix tree, from facts alone: the model's own ledger of locks is not asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from reference.clauses.facts import Facts, TreeFacts
from reference.commands import Command, Insert, Match, Unlock, UnlockSwa, tree_key
from reference.prefix_cache import key_of
from reference.tree import Key, Tree


class Locked(NamedTuple):
    """A locked prefix. Its SWA KV is pinned from `pinned_from` on, and nothing before `reaches` is: the two
    differ where facts do not tell how far up the lock went when it was taken."""

    key: Key
    pinned_from: int
    reaches: int


Locks = Mapping[str, Locked]  # by holder: a session, a request or a lock holder


def locks_of(tree: Tree | None) -> Locks:
    """The locks that the reference keeps, for a step that stands by itself."""
    return {k.holder: Locked(k.key, k.swa_from, k.swa_from) for k in tree.locks if k.key} if tree else {}


def locks_after(
    before: Locks, was: Facts, facts: Facts, command: Command, again: str | None, *,
    window: int | None, bigram: bool, policy_is_free: bool,
) -> Locks:  # fmt: skip
    """The locks after a command that led from the facts `was` to `facts`.

    Sessions and requests have locked what they protect, lock holders what the command has given them.
    Whoever has another length than before has taken a new lock; so has `again`, who was matched again.
    """
    tree = facts.tree
    assert tree is not None and was.tree is not None
    lengths = {n: s.slot.cache_protected_len for n, s in facts.sessions.items() if s.slot is not None}
    for name, request in facts.requests.items():
        if request.cursors is not None:
            lengths[request.session or name] = request.cursors.cache_protected_len
    lengths.update((name, len(before[name].key)) for name in was.tree.lock_holders if name in before)
    if isinstance(command, Match) or (isinstance(command, Insert) and command.chunked):
        lengths[command.holder] = len(tree.lock_holders.get(command.holder, ()))
    elif isinstance(command, (Unlock, Insert)):
        lengths.pop(command.holder, None)
    locks = {n: k for n, k in before.items() if n != again and len(k.key) == lengths.get(n)}
    taken: dict[str, Key] = {}
    if new := [n for n, length in lengths.items() if length and n not in locks]:
        texts: dict[str, Sequence[int]] = {name: s.history for name, s in facts.sessions.items()}
        texts |= {r.session or name: r.text for name, r in facts.requests.items()}
        if isinstance(command, (Match, Insert)):
            texts[command.holder] = key_of(command.prompt)
        taken = {n: tree_key(texts[n][: lengths[n] + bigram], bigram) for n in new}
    for name, key in taken.items():
        # One that another prompt of the same batch has split since may have pinned more than is seen now.
        split = any(n != name and other[:1] == key[:1] for n, other in taken.items())
        if window is None or (isinstance(command, Match) and command.full_only):
            locks[name] = Locked(key, len(key), len(key))
        elif policy_is_free:
            locks[name] = Locked(key, max(0, len(key) - window), 0)
        else:
            start = _node_start(tree, key, len(key) - window)
            locks[name] = Locked(key, start, 0 if split else start)
    if isinstance(command, UnlockSwa):
        asking = facts.requests.get(command.holder)
        holder = asking.session or command.holder if asking is not None else command.holder
        locks |= {n: Locked(k.key, len(k.key), len(k.key)) for n, k in locks.items() if n == holder}
    if window is not None and policy_is_free:  # what its holder's window has left behind it may give back
        for name, request in facts.requests.items():
            lock, c = locks.get(request.session or name), request.cursors
            if lock is not None and c is not None and c.kv_committed_len - window >= len(lock.key):
                locks[request.session or name] = lock._replace(pinned_from=len(lock.key))
    return locks


def _node_start(tree: TreeFacts, key: Key, position: int) -> int:
    """Where the node of a path begins that holds a position: nodes are pinned whole."""
    ends = (len(n.path) for n in tree.nodes if n.path == key[: len(n.path)])
    return max((end for end in ends if end <= position), default=0)
