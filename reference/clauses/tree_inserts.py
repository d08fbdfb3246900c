"""Clauses on what an insert leaves in the radix tree, and what a finish brings into it (TREE)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from reference.clauses.registry import clause
from reference.clauses.facts import NodeFacts, TreePage
from reference.clauses.step import Step
from reference.clauses.tree_shape import WITH_TREE, gave_up_pages, gave_up_states, node_text
from reference.commands import Decode, Extend, Finish, Insert, Launch, SpecDecode
from reference.cursors import ceil_page, page_ends
from reference.failures import AtNode, AtTreePage, Failure, failure
from reference.prefix_cache import key_of, path_text
from reference.radix_tree import Key
from reference.state import Phase, Request, state_of, text_tokens
from reference.token_ids import tree_key


@clause(
    "TREE-12",
    "what was inserted is there",
    "After an insert every whole page of its key is in the tree; those for which it brought SWA KV have it,"
    " but for tombstones that a lock passes through. On a recurrent model the node at its end has a state.",
    why="The next request with this prompt computes it again, or worse, the pages are nobody's.",
    decision=(
        "A locked tombstone is not recovered: its full slots would change under the reader. The "
        "inserter's SWA KV there would be freed as a duplicate, so a running request inserts "
        "only if it can match its whole prompt again. Smallest (P 1, W 1): insert a2 and keep "
        "the lock, evict 1 SWA token, insert a1 chunked."
    ),
    rule="radix_tree.insert, radix_tree.insert_and_continue",
    source="#26919, kvspec",
    scope=f"{WITH_TREE} Inserts that were carried out. Not of systems whose tree picks what it takes.",
    of=(Insert, Finish, Extend),
    needs=("tree",),
    trigger=lambda s: s.after.tree is not None and any(True for _ in _inserted_keys(s)),
)
def _inserted_found(step: Step) -> Failure | None:
    if step.after.tree is None or step.tree_policy_is_free:
        return None
    window = step.config.geometry.window
    for inserted in _inserted_keys(step):
        tombstones = _tombstones_left(step, inserted)
        if inserted.goes_on and window is not None:
            begin = len(inserted.key) - window
            if any(end > begin for end in tombstones):
                continue  # it could not match all of its key again
        wrong = _missing_page(step, inserted, tombstones) or _missing_state(step, inserted)
        if wrong is not None:
            return wrong
    return None


def _tombstones_left(step: Step, inserted: InsertedKey) -> set[int]:
    """Return the ends of the pages of a key that may be tombstones: the insert brought no SWA KV for
    them, or another lock passes through them."""
    assert step.after.tree is not None
    pages = step.after.tree.pages
    key = inserted.key
    others = [lock.key for lock in step.tree_locks_before.values()]
    others += [lock.key for name, lock in step.locks.items() if name != inserted.holder]
    return {
        end
        for end in page_ends(len(key), step.config.geometry.page_size)
        if not (key[:end] in pages and pages[key[:end]].has_swa)
        and (end <= inserted.brought or any(other[:end] == key[:end] for other in others))
    }


def _missing_page(step: Step, inserted: InsertedKey, tombstones: set[int]) -> Failure | None:
    """Return the failure of the first page of a key that is not in the tree, or is a tombstone for no reason.
    A page that was there may be evicted on the way: TREE-11."""
    assert step.before.tree is not None and step.after.tree is not None
    pages_before = step.before.tree.pages
    pages = step.after.tree.pages
    geometry = step.config.geometry
    key = inserted.key
    for end in page_ends(len(key), geometry.page_size):
        page = pages.get(key[:end])
        evicted = key[:end] in pages_before and gave_up_pages(step)
        if page is not None and (page.has_swa or geometry.window is None or end in tombstones or evicted):
            continue
        start = end - geometry.page_size
        page_of_key = f"[{start}, {end}) of {path_text(key)}"
        place = AtTreePage(key[:end], start)
        if page is None:
            expected = f"{page_of_key} in the tree"
            return failure(expected, "it is not", place, head=f"must leave {expected}")
        expected = f"{page_of_key} live in the tree"
        return failure(expected, "a tombstone", place, head=f"must leave {expected}")
    return None


def _missing_state(step: Step, inserted: InsertedKey) -> Failure | None:
    """Return the failure where the node at the end of a new key lacks a state, on a recurrent model."""
    assert step.after.tree is not None
    key = inserted.key
    before = step.tree_locks_before.get(inserted.holder)
    new = key and (before is None or len(before.key) < len(key))
    if not step.config.geometry.states or not new or gave_up_states(step):
        return None
    if key in {node.path for node in step.after.tree.nodes if node.state is not None}:
        return None
    expected = f"the state after {path_text(key)} in the tree"
    return failure(
        expected, "there is none", AtNode(key, "state"), head=f"must leave {expected}"
    )


class InsertedKey(NamedTuple):
    """Whole pages that a lock owner or a request inserts into the tree.

    key: their tokens.
    brought: position up to which the insert brings no SWA KV.
    goes_on: the holder continues, and inserts only if it can match all of them again.
    """

    holder: str
    key: Key
    brought: int
    goes_on: bool


def _inserted_keys(step: Step) -> Iterator[InsertedKey]:
    """Yield the keys that the command inserts into the tree."""
    size = step.config.geometry.page_size
    bigram = step.config.geometry.bigram
    command = step.command
    if not step.done:
        return
    if isinstance(command, Insert):
        key = _whole_key_pages(key_of(command.prompt, bigram), size)
        yield InsertedKey(command.holder, key, ceil_page(command.evicted, size), command.chunked)
    elif isinstance(command, Finish) and (was := step.named_request) is not None and was.session is None:
        assert was.cursors is not None
        if _inserts_state(step, was, command):
            least, most = _finished_keys(step, was, command)
            key = most if step.config.geometry.states else least
            yield InsertedKey(was.holder, key, was.cursors.swa_evicted_seqlen, goes_on=False)
    else:
        for name, (committed, _) in step.progress.items():
            was = step.was.request(name)
            assert was is not None and was.cursors is not None
            session = step.was.session(was.session)
            later = session is not None and session.slot is not None  # stays outside of the tree
            if not later and was.phase is not Phase.RUNNING:
                text = text_tokens(was.text, was.cursors.kv_committed_len + committed)
                key = _whole_key_pages(tree_key(text, bigram), size)
                yield InsertedKey(was.holder, key, step.frontier(name), goes_on=True)


def _finished_keys(step: Step, was: Request, command: Finish) -> list[Key]:
    """Return the shortest and the longest key, in whole pages, that a finishing request may insert. A
    round still in flight is not inserted."""
    assert was.cursors is not None
    most = least = min(was.cursors.kv_committed_len, was.origin + command.finished_len)
    if command.finished_len <= was.processed_outputs[1]:
        least = min(most, was.origin + was.processed_outputs[1] - 1)
    geometry = step.config.geometry
    keys = (tree_key(text_tokens(was.text, length), geometry.bigram) for length in (least, most))
    return [_whole_key_pages(key, geometry.page_size) for key in keys]


def _whole_key_pages(key: Key, size: int) -> Key:
    """Return the whole pages of a key.

    size: tokens of a page.
    """
    return key[: len(key) // size * size]


@clause(
    "TREE-15",
    "what is cached is what the client saw",
    "A finish brings into the tree whole pages of its input and of the outputs that count, no others.",
    why="Nobody was sent what lies past the stop: no prompt repeats it, and its pages serve nobody.",
    rule="rules.finish.finish",
    source="#24590, #35694",
    scope=WITH_TREE,
    of=(Finish,),
    needs=("tree",),
    trigger=lambda s: (
        isinstance(s.command, Finish)
        and s.done
        and s.after.tree is not None
        and (was := s.named_request) is not None
        and was.cursors is not None
        and was.session is None
        and was.cursors.kv_allocated_len > was.origin + s.command.finished_len
    ),
)
def _finish_brings_no_more_than_the_client_saw(step: Step) -> Failure | None:
    command = step.command
    was = step.named_request
    if not isinstance(command, Finish) or not step.done or was is None or step.after.tree is None:
        return None
    assert step.before.tree is not None
    target = was.origin + command.finished_len
    known = step.before.tree.pages
    key = tree_key(text_tokens(was.text, target), step.config.geometry.bigram)
    size = step.config.geometry.page_size
    for path in sorted(step.after.tree.pages, key=len):
        if path not in known and key[: len(path)] != path:
            start = len(path) - size
            expected = f"nothing new past the {target} tokens of input and output that count"
            page = f"[{start}, {len(path)}) of {path_text(path)}"
            head = f"caches {page}, and the client has {target} tokens of this text"
            return failure(expected, page, AtTreePage(path, start), head=head)
    return None


@clause(
    "TREE-14",
    "what was computed can be resumed from",
    "When an ordinary request has finished, the tree has all whole pages that it computed, with "
    "SWA KV for one window behind the last; tombstones that a lock passes through may stay.",
    why=(
        "Chat clients send the whole conversation again. A leaf with less than a window serves "
        "no match: the next turn recomputes it, and its pages are wasted."
    ),
    decision=(
        "SWA-1 allows eviction up to floor(L - W), which can keep too little: the tree takes "
        "whole pages and counts the window from their end. Stopping at floor(L - W - P), or at "
        "ceil_P(max(W, P)) before the last page, is enough. If the last round may have been in "
        "flight, a window behind the tree's later end is enough as well."
    ),
    rule="cursors.evict_window, radix_tree.insert",
    source="#22470",
    scope=f"{WITH_TREE} Models with SWA. Requests whose windows were evicted with less than they insert, as"
    " before each round; not the prefix from the tree (TREE-8), nor KV evicted in that step.",
    of=(Finish,),
    needs=("tree", "window"),
    trigger=lambda s: (
        isinstance(s.command, Finish)
        and s.after.tree is not None
        and "swa" in s.after.pools
        and any(key.brought > 0 and key.key for key in _inserted_keys(s))
    ),
)
def _computed_pages_are_resumable(step: Step) -> Failure | None:
    """Return the failure of the first page that a finished request computed and the tree does not have live,
    or as a tombstone under a lock."""
    was = step.named_request
    window = step.config.geometry.window
    command = step.command
    if (
        not isinstance(command, Finish)
        or not step.done
        or step.after.tree is None
        or window is None
    ):
        return None
    assert was is not None and was.cursors is not None
    length = min(was.cursors.kv_committed_len, was.origin + command.finished_len)
    if (
        was.session is not None
        or was.evicted >= length
        or gave_up_pages(step)
        or not _inserts_state(step, was, command)
    ):
        return None
    pages = step.after.tree.pages
    size = step.config.geometry.page_size
    locks = [lock.key for lock in step.locks.values()]
    missing = []
    # One of the two keys is enough: the tree has the shorter one if the last round was in flight.
    for key in _finished_keys(step, was, command):
        window_begin = max(was.cursors.cache_protected_len, len(key) - window) // size * size
        ends = page_ends(len(key), size, window_begin)
        gone = next(
            (end for end in ends if not _readable(pages.get(key[:end]), key[:end], locks)), None
        )
        if gone is None:
            return None
        missing.append((key, gone))
    key, end = missing[0]
    expected = f"[{end - size}, {end}) of {path_text(key)} live in the tree, for a match of {len(key)} tokens"
    observed = "a tombstone" if key[:end] in pages else "it is not there"
    return failure(
        expected, observed, AtTreePage(key[:end], end - size), head=f"must leave {expected}"
    )


def _readable(page: TreePage | None, path: Key, locks: list[Key]) -> bool:
    """Return whether a page is live, or a tombstone under a lock."""
    return page is not None and (page.has_swa or any(key[: len(path)] == path for key in locks))


@clause(
    "TREE-7",
    "a fresh leaf pins one window",
    "A leaf that an insert makes has at most one window of live SWA KV, in whole pages; what is "
    "before that is another node.",
    why=(
        "A lock pins nodes whole: a lock on a leaf of thousands of tokens pins as much SWA pool, "
        "and others are retracted for it."
    ),
    rule="radix_tree._fresh_leaf",
    source="#26919",
    concerns="outcomes, choices and order",
    scope=f"{WITH_TREE} Models with SWA. A lock that ends in an inner node pins that whole.",
    of=(Extend, Decode, SpecDecode, Launch, Finish, Insert),
    needs=("tree", "window"),
    trigger=lambda s: s.grew and any(True for _ in _fresh_leaves(s)),
)
def _fresh_leaf_is_one_window(step: Step) -> Failure | None:
    size = step.config.geometry.page_size
    window = step.config.geometry.window
    for node in _fresh_leaves(step):
        assert window is not None
        needed = ceil_page(window, size)
        if len(node.slots) > needed:
            leaf = node_text(node)
            expected = f"a lock on {leaf} pins {needed // size} SWA pages, as one window needs"
            head = f"makes {leaf} one leaf, and a lock pins leaves whole: SWA KV of {len(node.slots)}"
            head += f" tokens for a window of {window}, which needs {needed}"
            place = AtNode(node.path, "swa")
            return failure(expected, f"{len(node.slots) // size} SWA pages", place, head=head)
    return None


def _fresh_leaves(step: Step) -> Iterator[NodeFacts]:
    """Yield live leaves whose tokens were not in the tree before."""
    tree = step.after.tree
    size = step.config.geometry.page_size
    if tree is None or step.config.geometry.window is None or not step.done:
        return
    assert step.before.tree is not None
    # A prompt is inserted by its last prefill chunk, or by the first round after it.
    if isinstance(step.command, (Extend, Decode, SpecDecode, Launch, Finish, Insert)):
        pages_before = step.before.tree.pages
        parents = {node.path[: node.start] for node in tree.nodes}
        for node in tree.nodes:
            if (
                node.live
                and node.path not in parents
                and node.path[: node.start + size] not in pages_before
            ):
                yield node


def _inserts_state(step: Step, was: Request, command: Finish) -> bool:
    """Return whether a finishing request leaves a prefix that can be resumed. A recurrent model has the
    state after what it inserts, and inserts everything it has."""
    assert was.cursors is not None
    length = min(was.cursors.kv_committed_len, was.origin + command.finished_len)
    geometry = step.config.geometry
    return not geometry.states or (state_of(step.was, was) == length and not geometry.tracks)
