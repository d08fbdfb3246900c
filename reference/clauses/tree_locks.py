"""The radix tree: what a match hands out, what locks keep, and their counters (TREE)."""

from __future__ import annotations

from reference.clauses.registry import clause
from reference.clauses.facts import NodeFacts
from reference.clauses.lock_facts import Locked, Locks
from reference.clauses.step import Step
from reference.clauses.tree_shape import WITH_TREE, gave_up_states, shrank, node_text
from reference.commands import Admit, Match
from reference.cursors import page_ends
from reference.failures import AtLock, AtNode, AtPosition, AtTreePage, Failure, count_text, failure
from reference.state import text_tokens
from reference.prefix_cache import key_of, path_text
from reference.radix_tree import Key
from reference.token_ids import tree_key


def locks_anything(step: Step) -> bool:
    return bool(step.locks)


@clause(
    "TREE-5",
    "a match can be resumed from",
    "A match returns the longest prefix that ends with a node, or where the key leaves the tree, "
    "and has live SWA KV for one window behind its end or for its whole length; on a recurrent model it ends "
    "with a node that has a state. A reader of full KV alone gets the longest prefix.",
    why="A longer match reads a window that is not there; a shorter one wastes the cache.",
    rule="radix_tree.usable_length",
    source="#22470",
    scope=f"{WITH_TREE} Admissions of requests without a slot, and Match.",
    of=(Match, Admit),
    needs=("tree",),
    trigger=lambda s: (m := match_of(s)) is not None and m[2] > 0,
)
def _match_is_usable(step: Step) -> Failure | None:
    """Return the failure of a match that is longer or shorter than the prefix from which a request can be
    resumed."""
    match = match_of(step)
    if match is None:
        return None
    holder, key, length = match
    usable = usable_length(step, key)
    if length == usable:
        return None
    expected = f"{holder}: {usable} tokens of {path_text(key)} to resume from"
    hands = f"hands {count_text(length, 'token')} to {holder} and must hand {usable}"
    if length > len(key):
        head = f"{hands}: the last token is computed again"
        return failure(expected, f"{length}", AtLock(holder), head=head)
    page = _deciding_page(step, key, length, usable)
    reason = ""
    window = step.config.geometry.window
    if length > usable and window is not None:
        reason = f", as the next token reads a window of {window} behind it"
    lock = [AtLock(holder)] if length else []
    return failure(expected, f"{length}", *page, *lock, head=hands + reason)


def _deciding_page(step: Step, key: Key, length: int, usable: int) -> list[AtTreePage]:
    """Return the last page to be handed out; for a match that is too long, the last page without KV."""
    assert step.before.tree is not None
    size = step.config.geometry.page_size
    pages = step.before.tree.pages
    if length < usable:
        return [AtTreePage(key[:usable], usable - size)]
    ends = page_ends(length, size)
    lost_ends = [end for end in ends if key[:end] not in pages or not pages[key[:end]].has_swa]
    return [AtTreePage(key[:end], end - size) for end in lost_ends[-1:]]


@clause(
    "TREE-8",
    "what is locked stays",
    "Every page of a locked prefix is in the tree, and has SWA KV from where its lock needs it. On a"
    " recurrent model the state at its end stays as well.",
    why="The locking request reads it now.",
    rule="radix_tree.full_locked, radix_tree.swa_locked",
    source="kvspec",
    scope=WITH_TREE,
    needs=("tree",),
    trigger=lambda s: locks_anything(s) and (shrank(s) or gave_up_states(s)),
)
def _locked_kv_stays(step: Step) -> Failure | None:
    size = step.config.geometry.page_size
    pages = step.after.tree.pages if step.after.tree is not None else {}
    for holder, (key, pinned_from, *_) in sorted(step.locks.items()):
        for end in page_ends(len(key), size):
            page = pages.get(key[:end])
            if page is not None and (page.has_swa or end <= pinned_from):
                continue
            expected = f"[{end - size}, {end}) of {path_text(key)}, locked by {holder}"
            if page is None:
                must = "is there"
                seen = "it is not"
            else:
                must = "has SWA KV"
                seen = "it is a tombstone"
            return failure(
                f"{expected}, {must}", seen, AtLock(holder), AtTreePage(key[:end], end - size)
            )
    return _locked_state_stays(step)


def _needs_state(step: Step, lock: Locked) -> bool:
    """Return whether a lock keeps the state at its end. A tree with rules of its own may release it
    with the SWA part."""
    given_back = "swa" in step.after.pools and lock.pinned_from == len(lock.key)
    return lock.state and not (step.tree_policy_is_free and given_back)


def _locked_state_stays(step: Step) -> Failure | None:
    if not step.config.geometry.states or step.after.tree is None:
        return None
    having = {node.path for node in step.after.tree.nodes if node.state is not None}
    for holder, lock in sorted(step.locks.items()):
        if _needs_state(step, lock) and lock.key not in having:
            expected = f"the state after {path_text(lock.key)}, locked by {holder}, is there"
            return failure(expected, "it is not", AtLock(holder), AtNode(lock.key, "state"))
    return None


@clause(
    "TREE-4",
    "protected prefixes are the tree's",
    "The first cache_protected_len positions of a row, and what a lock owner has locked, name the slots that"
    " the tree has for these tokens.",
    why=(
        "A row that names pages which the tree has freed as duplicates reads another request's KV."
    ),
    rule="prefix_cache.match_and_lock, tree_insertion.insert_prompt",
    source="#20070",
    scope=WITH_TREE,
    needs=("tree",),
    trigger=locks_anything,
)
def _protected_prefix_in_tree(step: Step) -> Failure | None:
    """Return the failure of the first page of a locked prefix for which its holder has other slots than the
    tree."""
    if step.after.tree is None:
        return None
    pages = step.after.tree.pages
    size = step.config.geometry.page_size
    slots_by_holder = {
        **{name: h.prefix for name, h in step.after.holders.items()},
        **step.after.tree.lock_holders,
    }
    for name, (key, *_) in sorted(step.locks.items()):
        if name not in slots_by_holder:  # it has no row yet
            continue
        slots = slots_by_holder[name]
        for end in page_ends(len(key), size):
            start = end - size
            page = pages.get(key[:end])
            of_tree = page.slots if page is not None else ()
            of_holder = tuple(slots[start:end])
            if of_tree != of_holder:
                return failure(
                    f"{name} at [{start}, {end}): the tree's slots {list(of_tree)}",
                    f"{list(of_holder)}",
                    AtPosition(name, "full", start),
                    AtLock(name),
                    AtTreePage(key[:end], start),
                )
    return None


def usable_length(step: Step, key: Key) -> int:
    """Return the length of `key` that could be handed out before this step: up to the end of a node, or
    to where the key leaves the tree, with one window of live SWA KV behind it or no tombstone down to
    the root."""
    size = step.config.geometry.page_size
    window = step.config.geometry.window
    assert step.before.tree is not None
    pages = step.before.tree.pages
    full_only = getattr(step.command, "full_only", False)
    needs_state = bool(step.config.geometry.states) and not full_only
    states = {node.path for node in step.before.tree.nodes if node.state is not None}
    best = 0
    run = 0
    no_tombstone = True
    for end in page_ends(len(key), size):
        if key[:end] not in pages:
            break
        live = pages[key[:end]].has_swa or full_only
        if live:
            run += size
        else:
            run = 0
            no_tombstone = False
        if (no_tombstone or window is None or run >= window) and (not needs_state or key[:end] in states):
            best = end
    return best


def match_of(step: Step) -> tuple[str, Key, int] | None:
    """Return (holder, key, length handed out) of a match."""
    if not step.done or step.after.tree is None:
        return None
    bigram = step.config.geometry.bigram
    if isinstance(step.command, Match):
        key = key_of(step.command.prompt, bigram)
        return (
            step.command.holder,
            key,
            len(step.after.tree.lock_holders.get(step.command.holder, ())),
        )
    request = step.named_request
    if isinstance(step.command, Admit):
        assert request is not None
        session = step.was.session(request.session)
        facts = step.after.requests.get(request.name)
        if (
            (session is None or session.slot is None)
            and facts is not None
            and facts.cursors is not None
        ):
            key = tree_key(text_tokens(request.text, request.origin + request.output - 1), bigram)
            return request.name, key, facts.cursors.cache_protected_len
    return None


@clause(
    "TREE-6",
    "lock counts",
    "A node's full counter is the number of locks whose prefix includes it. Its SWA counter is "
    "the number of locks that needed its SWA KV when taken and have not released that part, "
    "whatever was split since. The counter of its state is the number of locks that end there and need it.",
    why="With a count too low, pages in use are evicted; with one too high they never are.",
    decision="The lock remembers where it stopped. Walking up again at unlock until a window is covered, as"
    " lock did, stops a node too early where a pinned node was split.",
    assumption="If no pinned node is ever split, unlock may walk up again.",
    rule="radix_tree.lock, radix_tree.unlock",
    source="kvspec",
    concerns="cursors and locks",
    scope=f"{WITH_TREE} Locks follow from requests and lock owners, and from where nodes ended when the lock"
    " was taken. SWA counters are checked within bounds where prompts of one batch share a prefix, and where"
    " a tree splits by its own rules; such a tree may release the SWA part of a lock early, and its state."
    " `kvspec explore` starts each step from the reference's locks.",
    needs=("tree",),
    trigger=lambda s: len(s.locks) > 1,
)
def _lock_counts(step: Step) -> Failure | None:
    """Return the failure of the first node whose lock counters are not the number of its holders."""
    has_swa = "swa" in step.after.pools
    has_states = bool(step.config.geometry.states)
    if step.after.tree is None:
        return None
    for node in step.after.tree.nodes:
        expected_locks = _locks_through(step.locks, node)
        full = [*expected_locks]
        swa = [name for name, k in expected_locks.items() if k.pinned_from < len(node.path)]
        most = sum(k.reaches < len(node.path) for k in expected_locks.values())
        swa_locks = node.swa_locks if has_swa else 0
        states = [name for name, k in expected_locks.items() if has_states and k.state and k.key == node.path]
        if node.full_locks == len(full) and len(swa) <= swa_locks <= most:
            least = sum(_needs_state(step, expected_locks[name]) for name in states)
            if not least <= node.state_locks <= len(states):
                count = f"{node_text(node)}: {_holder_names(states)} state locks"
                place = AtNode(node.path, "state", len(states))
                return failure(count, f"counter {node.state_locks}", place, *map(AtLock, states))
            continue
        if node.full_locks != len(full):
            pool = "full"
            expected = full
        else:
            pool = "swa"
            expected = swa
        others = {**_locks_through(step.tree_locks_before, node), **expected_locks}.keys() - {*expected}
        return failure(
            f"{node_text(node)}: {_holder_names(full)} full, {_holder_names(swa)} SWA",
            f"counters {node.full_locks} full, {swa_locks} SWA",
            AtNode(node.path, pool, len(expected)),
            *map(AtLock, (*expected, *sorted(others))),
        )
    return None


def _locks_through(locks: Locks, node: NodeFacts) -> dict[str, Locked]:
    """Return the locks whose prefix passes through a node."""
    return {name: k for name, k in sorted(locks.items()) if k.key[: len(node.path)] == node.path}


def _holder_names(names: list[str]) -> str:
    return f"{len(names)} ({', '.join(names)})" if names else "0"
