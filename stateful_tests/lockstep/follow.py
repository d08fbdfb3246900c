"""Systems whose tree has rules of its own: the reference takes over its shape."""

from __future__ import annotations

from collections.abc import Sequence

from reference import radix_tree as radix
from reference.clauses.facts import Facts, TreeFacts
from reference.commands import Command, Decode, Extend, Insert, Launch, SpecDecode, tree_key
from reference.state import State, text_tokens
from reference.prefix_cache import key_of, lock_holders


def launched(command: Command) -> Sequence[str]:
    """The requests of a batch."""
    if isinstance(command, (Extend, SpecDecode, Launch)):
        return [lane.request for lane in command.lanes]
    return command.requests if isinstance(command, Decode) else ()


def followed(was: State, state: State, command: Command, facts: Facts) -> State:
    """The state with the shape of the system's tree, and with as much of each prompt in it as that has taken.

    How far a prefill, or a lock holder that goes on, hands its text over is then the system's choice too: any
    whole pages from what it had in the tree to what it has computed, with the prefill or with the first round
    after it. Inside of that its swa_evicted_seqlen says nothing (lost_below).
    """
    assert state.tree is not None and facts.tree is not None
    shape = [(n.path, n.start, n.live, n.state is not None) for n in facts.tree.nodes]
    tree = radix.reshaped(state.tree, shape)
    state = state._replace(tree=tree)
    for name in launched(command):
        state = _handed_over(was, state, command, name, facts)
    if isinstance(command, Insert) and command.chunked:
        state = _inserted(was, state, command, facts.tree)
    return _swa_unlocked(state, facts.tree)


def pinned(was: State) -> State:
    """The state with locks that pin as much SWA KV as when they were taken: a lock takes whole nodes,
    and where one of them is split since, the part outside of the window stays pinned as well."""
    if was.tree is None:
        return was
    locks = tuple(lock._replace(swa_from=lock.whole) for lock in was.tree.locks)
    return was._replace(tree=was.tree._replace(locks=locks))


def _handed_over(was: State, state: State, command: Command, name: str, facts: Facts) -> State:
    """With as much of a request's text in the tree as the system's has taken of it."""
    before = was.request(name)
    request = state.request(name)
    seen = facts.requests.get(name)
    assert state.tree is not None and before is not None and request is not None
    session = state.session(request.session)
    outside = session is not None and session.slot is not None
    if seen is None or seen.cursors is None or outside:
        return state
    assert before.cursors is not None and request.cursors is not None
    tree = state.tree
    cursors = request.cursors
    length = seen.cursors.cache_protected_len
    computed = (cursors if isinstance(command, Extend) else before.cursors).kv_committed_len
    whole = length % tree.page_size == 0
    taken = before.cursors.cache_protected_len <= length <= computed
    if whole and taken:
        key = tree_key(text_tokens(request.text), state.config.geometry.bigram)[:length]
        state = state._replace(tree=_relocked(tree, was, request.holder, key))
        cursors = cursors._replace(cache_protected_len=length)
    evicted = seen.cursors.swa_evicted_seqlen
    if max(evicted, cursors.swa_evicted_seqlen) <= cursors.cache_protected_len:
        cursors = cursors._replace(swa_evicted_seqlen=evicted)
    if cursors != request.cursors:
        state = state.with_request(request._replace(cursors=cursors))
    return state


def _inserted(was: State, state: State, command: Insert, shown: TreeFacts) -> State:
    """With the lock of a holder that goes on as far as the system's tree has it."""
    assert state.tree is not None
    locked = lock_holders(was).get(command.holder, ())
    length = len(shown.lock_holders.get(command.holder, ()))
    if len(locked) > length or length % state.tree.page_size:
        return state
    key = key_of(command.prompt, state.config.geometry.bigram)[:length]
    return state._replace(tree=_relocked(state.tree, was, command.holder, key))


def _swa_unlocked(state: State, shown: TreeFacts) -> State:
    """Without the SWA part of locks that the system has given back, where the holder's window is past it, and
    without the state of such a lock where that is given back as well."""
    tree = state.tree
    assert tree is not None
    if tree.window is None:
        return state
    past = {r.holder: r.settled_len - tree.window for r in state.requests if r.cursors}
    pins = {n.path: n.swa_locks for n in shown.nodes}
    state_pins = {n.path: n.state_locks for n in shown.nodes}
    for lock in tree.locks:
        end = len(lock.key)
        pinning = sum(o.swa_from < end and o.key[:end] == lock.key for o in tree.locks)
        if (
            lock.holder in past
            and past[lock.holder] >= end
            and pinning > pins.get(lock.key, pinning)
        ):
            tree = radix.unlock_swa(tree, lock.holder)
            pinning_state = sum(o.state and o.key == lock.key for o in tree.locks)
            if pinning_state > state_pins.get(lock.key, pinning_state):
                tree = radix.unlock_state(tree, lock.holder)
    return state._replace(tree=tree)


def _relocked(tree: radix.Tree, was: State, holder: str, key: radix.Key) -> radix.Tree:
    """The holder's lock ends with `key`. Where it did so before it is that lock, whose SWA part may have
    been given back."""
    assert was.tree is not None
    without = radix.unlock(tree, holder)
    for earlier in (tree, was.tree):
        held = radix.lock_of(earlier, holder)
        if held is not None and held.key == key:
            return without._replace(locks=tuple(sorted((*without.locks, held))))
    return radix.lock(without, holder, key)
