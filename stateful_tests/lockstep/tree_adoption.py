"""For systems whose radix tree has rules of its own: the reference adopts the shape of their tree."""

from __future__ import annotations

from collections.abc import Sequence

from reference import radix_tree as radix
from reference.clauses.facts import Facts, TreeFacts
from reference.commands import Command, Decode, Extend, Insert, Launch, SpecDecode
from reference.state import State, text_tokens
from reference.prefix_cache import key_of, lock_holders
from reference.token_ids import tree_key


def requests_of_batch(command: Command) -> Sequence[str]:
    """Return the requests of a command's batch, () for a command without one."""
    if isinstance(command, (Extend, SpecDecode, Launch)):
        return [lane.request for lane in command.lanes]
    if isinstance(command, Decode):
        return command.requests
    return ()


def adopt_tree_shape(was: State, state: State, command: Command, facts: Facts) -> State:
    """Return the state with the shape of the system's tree, and with as much of each prompt in the
    tree.

    The part of its text that a prefill, or a continuing lock owner, inserts is the system's choice as
    well: any whole pages between its prefix in the tree and what it has computed, with the prefill or
    with the first round after it. Up to there its swa_evicted_seqlen says nothing (lost_below).
    """
    assert state.tree is not None and facts.tree is not None
    shape = [(n.path, n.start, n.live, n.state is not None) for n in facts.tree.nodes]
    tree = radix.reshape(state.tree, shape)
    state = state._replace(tree=_widen_new_locks(was, tree))
    for name in requests_of_batch(command):
        state = _adopt_prompt(was, state, command, name, facts)
    if isinstance(command, Insert) and command.chunked:
        state = _adopt_insert(was, state, command, facts.tree)
    return _drop_returned_locks(state, facts.tree)


def with_locks_as_taken(was: State) -> State:
    """Return the state with locks that pin as much SWA KV as when they were taken.

    A lock pins whole nodes. If one of them was split since, its part outside of the window stays pinned
    too.
    """
    if was.tree is None:
        return was
    locks = tuple(lock._replace(swa_from=lock.whole) for lock in was.tree.locks)
    return was._replace(tree=was.tree._replace(locks=locks))


def _widen_new_locks(was: State, tree: radix.Tree) -> radix.Tree:
    """Return the tree in which each lock that the command has taken covers whole nodes of this tree.

    The reference took it on a tree of its own shape, where the nodes may have been shorter.
    """
    assert was.tree is not None
    earlier = {(lock.holder, lock.key) for lock in was.tree.locks}

    def widened(lock: radix.Lock) -> radix.Lock:
        if (lock.holder, lock.key) in earlier or lock.whole == len(lock.key):
            return lock
        return lock._replace(whole=min(lock.whole, radix.swa_lock_start(tree, lock.key)))

    return tree._replace(locks=tuple(widened(lock) for lock in tree.locks))


def _adopt_prompt(was: State, state: State, command: Command, name: str, facts: Facts) -> State:
    """Return the state with as much of a request's text in the tree as the system's tree has."""
    before = was.request(name)
    request = state.request(name)
    request_facts = facts.requests.get(name)
    assert state.tree is not None and before is not None and request is not None
    session = state.session(request.session)
    has_slot = session is not None and session.slot is not None
    if request_facts is None or request_facts.cursors is None or has_slot:
        return state
    assert before.cursors is not None and request.cursors is not None
    tree = state.tree
    cursors = request.cursors
    length = request_facts.cursors.cache_protected_len
    computed = (cursors if isinstance(command, Extend) else before.cursors).kv_committed_len
    ends_a_page = length % tree.page_size == 0
    taken = before.cursors.cache_protected_len <= length <= computed
    if ends_a_page and taken:
        key = tree_key(text_tokens(request.text), state.config.geometry.bigram)[:length]
        state = state._replace(tree=_lock_at(tree, was, request.holder, key))
        cursors = cursors._replace(cache_protected_len=length)
    evicted = request_facts.cursors.swa_evicted_seqlen
    if max(evicted, cursors.swa_evicted_seqlen) <= cursors.cache_protected_len:
        cursors = cursors._replace(swa_evicted_seqlen=evicted)
    if cursors != request.cursors:
        state = state.with_request(request._replace(cursors=cursors))
    return state


def _adopt_insert(was: State, state: State, command: Insert, tree_facts: TreeFacts) -> State:
    """Return the state in which a continuing lock owner locks as much as in the system."""
    assert state.tree is not None
    locked = lock_holders(was).get(command.holder, ())
    length = len(tree_facts.lock_holders.get(command.holder, ()))
    if len(locked) > length or length % state.tree.page_size:
        return state
    key = key_of(command.prompt, state.config.geometry.bigram)[:length]
    return state._replace(tree=_lock_at(state.tree, was, command.holder, key))


def _drop_returned_locks(state: State, tree_facts: TreeFacts) -> State:
    """Return the state without the SWA part of locks that the system has released because the holder's
    window has passed it, and without the state of such a lock if that is released as well."""
    tree = state.tree
    assert tree is not None
    if tree.window is None:
        return state
    window_starts = {
        r.holder: r.settled_len - tree.window for r in state.requests if r.cursors
    }
    pins = {n.path: n.swa_locks for n in tree_facts.nodes}
    state_pins = {n.path: n.state_locks for n in tree_facts.nodes}
    for lock in tree.locks:
        end = len(lock.key)
        pinning = sum(
            other.swa_from < end and other.key[:end] == lock.key for other in tree.locks
        )
        if (
            lock.holder in window_starts
            and window_starts[lock.holder] >= end
            and pinning > pins.get(lock.key, pinning)
        ):
            tree = radix.unlock_swa(tree, lock.holder)
            pinning_state = sum(other.state and other.key == lock.key for other in tree.locks)
            if pinning_state > state_pins.get(lock.key, pinning_state):
                tree = radix.unlock_state(tree, lock.holder)
    return state._replace(tree=tree)


def _lock_at(tree: radix.Tree, was: State, holder: str, key: radix.Key) -> radix.Tree:
    """Return the tree in which the holder's lock ends with `key`.

    A lock that ended there before is kept as it was: its SWA part may have been released.
    """
    assert was.tree is not None
    without = radix.unlock(tree, holder)
    for earlier in (tree, was.tree):
        held = radix.lock_of(earlier, holder)
        if held is not None and held.key == key:
            return without._replace(locks=tuple(sorted((*without.locks, held))))
    return radix.lock(without, holder, key)
