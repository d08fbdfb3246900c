"""The radix tree: its shape, what its nodes hold, and what an insert leaves in it (TREE)."""

from __future__ import annotations

from collections.abc import Iterator

from reference.clauses.base import clause
from reference.clauses.contents import stamp_text
from reference.clauses.facts import NodeFacts, TreeFacts
from reference.clauses.owed import pages_freed
from reference.clauses.step import Step
from reference.commands import Decode, Extend, Finish, Insert, Launch, SpecDecode
from reference.cursors import ceil_page, page_ends
from reference.failures import AtEntry, AtNode, AtTreePage, Failure, failure
from reference.state import Phase, Request, state_of, text_tokens
from reference.prefix_cache import key_of, path_text
from reference.radix_tree import Key
from reference.token_ids import token_of, tree_key

WITH_TREE = "Servers with a radix tree."


def tree_of(step: Step) -> TreeFacts | None:
    return step.after.tree


def where(node: NodeFacts) -> str:
    """A node in words, such as "[4, 8) of a8"."""
    return f"[{node.start}, {len(node.path)}) of {path_text(node.path)}"


def shrank(step: Step) -> bool:
    """The tree has given pages back."""
    return any(
        holder.startswith("tree ") for pages in pages_freed(step).values() for holder in pages
    )


@clause(
    "TREE-1",
    "shape",
    "Every node is a run of whole pages, at least one; it hangs below a node that ends where it starts, and"
    " differs from its siblings in its first page.",
    why="A prefix must be found in one way only; two nodes must not share a page.",
    rule="radix_tree.path_of, radix_tree._split",
    source="kvspec",
    scope=WITH_TREE,
    needs=("tree",),
    trigger=lambda s: s.grew,
)
def _shape(step: Step) -> Failure | None:
    tree = tree_of(step)
    size = step.config.geometry.page_size
    if tree is None:
        return None
    ends = {n.path for n in tree.nodes}
    first: set[Key] = set()
    for node in tree.nodes:
        if not node.slots or node.start < 0 or node.start % size or len(node.path) % size:
            expected = f"nodes of whole pages, {size} tokens each"
            head = f"leaves a node {where(node)}, and nodes are whole pages of {size} tokens"
            return failure(expected, f"a node {where(node)}", AtNode(node.path), head=head)
        if node.start and node.path[: node.start] not in ends:
            expected = f"a node that ends at {node.start}, above {where(node)}"
            above = AtNode(node.path[: node.start])
            head = f"leaves no node that ends at {node.start}, where {where(node)} begins"
            return failure(expected, "there is none", AtNode(node.path), above, head=head)
        page = node.path[: node.start + size]
        if page in first:
            twins = [AtNode(n.path) for n in tree.nodes if n.path[: n.start + size] == page]
            expected = f"one node that goes on with {path_text(page)}"
            return failure(
                expected, "there are two", *twins, head=f"must leave {expected}, and leaves two"
            )
        first.add(page)
    return None


@clause(
    "TREE-2",
    "live or tombstone",
    "A node has an SWA slot for each of its tokens, those that the mapping names, or is a tombstone and has"
    " none.",
    why="A window that is matched over a half-dead node reads padding.",
    decision=(
        "An insert whose whole key was evicted leaves a tombstone. Taken for live, its slots are "
        "the padding's, and SWA sizes become negative at eviction (#22470)."
    ),
    assumption="If every window eviction stops a page short of the insert boundary, no key loses all SWA KV.",
    rule="radix_tree._grown",
    source="#22470",
    scope=f"{WITH_TREE} Models with SWA.",
    needs=("tree", "window"),
    trigger=lambda s: (
        (t := s.after.tree) is not None
        and s.grew
        and any(not n.live for n in t.nodes)
        and "swa" in s.after.pools
    ),
)
def _live_or_dead(step: Step) -> Failure | None:
    tree = tree_of(step)
    if tree is None or "swa" not in step.after.pools:
        return None
    for node in tree.nodes:
        if not node.live or (all(node.swa_slots) and list(node.swa_slots) == list(node.mapped)):
            continue
        place = AtNode(node.path, "swa")
        have = sum(1 for slot in node.swa_slots if slot)
        if have < len(node.slots) or len(node.swa_slots) != len(node.slots):
            expected = f"{len(node.slots)} SWA slots at {where(node)}, or none"
            head = f"must leave {where(node)} with SWA KV of all its tokens, or as a tombstone"
            return failure(expected, f"{have}", place, head=head)
        at = next(i for i, (slot, to) in enumerate(zip(node.swa_slots, node.mapped)) if slot != to)
        expected = f"SWA slots of {where(node)} as mapped: {list(node.mapped)}"
        head = f"leaves {where(node)} with SWA slot {node.swa_slots[at]} for position {node.start + at}"
        return failure(
            expected, f"{list(node.swa_slots)}", place, AtEntry(node.slots[at]), head=head
        )
    return None


@clause(
    "TREE-3",
    "nodes hold what their path says",
    "The full KV of a node is that of the tokens that its path spells, and so is the SWA KV of a live one.",
    why="Whoever matches the prefix reads it.",
    rule="prefix_cache.page_name",
    source="kvspec",
    scope=WITH_TREE,
    needs=("tree",),
    trigger=lambda s: s.grew,
)
def _contents(step: Step) -> Failure | None:
    found = wrong_token(step)
    if found is None:
        return None
    node, pool, at = found
    got = (node.full_read if pool == "full" else node.swa_read)[at]
    size = step.config.geometry.page_size
    start = (node.start + at) // size * size
    slot = (node.slots if pool == "full" else node.swa_slots)[at]
    held = stamp_text(got) if got else "no committed token"
    head = f"leaves {where(node)} with {pool} slot {slot} for position {node.start + at}"
    head += f", which holds {held} and must hold {stamp_text(token_of(node.path[node.start + at]))}"
    return failure(
        f"{pool} KV of {path_text(node.path)} at position {node.start + at}",
        f"its slot holds that of {path_text((got,)) if got else 'no committed token'}",
        AtTreePage(node.path[: start + size], start),
        AtNode(node.path, pool.lower()),
        head=head,
    )


def wrong_token(step: Step) -> tuple[NodeFacts, str, int] | None:
    """The first slot of a node that holds another token than its path says, by its place in the node."""
    tree = tree_of(step)
    if tree is None:
        return None
    for node in tree.nodes:
        wanted = [*map(token_of, node.path[node.start :])]
        for pool, got in (("full", node.full_read), ("SWA", node.swa_read)):
            for at, (want, stamp) in enumerate(zip(wanted, got)):
                if want != stamp:
                    return node, pool, at
    return None


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
    trigger=lambda s: s.after.tree is not None and any(True for _ in _inserted(s)),
)
def _inserted_found(step: Step) -> Failure | None:
    if step.after.tree is None or step.tree_policy_is_free:
        return None
    assert step.before.tree is not None
    known = step.before.tree.pages
    pages = step.after.tree.pages
    geometry = step.config.geometry
    for holder, key, brought, goes_on in _inserted(step):
        others = (
            *step.locked_before.values(),
            *(k for name, k in step.locks.items() if name != holder),
        )
        ends = page_ends(len(key), geometry.page_size)
        dead = {  # tombstones that may be, for want of SWA KV or as somebody reads through them
            end
            for end in ends
            if not pages.get(key[:end], (None, False))[1]
            and (end <= brought or any(k.key[:end] == key[:end] for k in others))
        }
        if (
            goes_on
            and geometry.window is not None
            and dead
            and max(dead) > len(key) - geometry.window
        ):
            continue
        for end in ends:
            page = pages.get(key[:end])
            evicted = key[:end] in known and lost(step)
            live = page is not None and (
                page[1] or geometry.window is None or end in dead or evicted
            )
            if not live:  # what was there may be evicted on the way: TREE-11
                start = end - geometry.page_size
                where = f"[{start}, {end}) of {path_text(key)}"
                place = AtTreePage(key[:end], start)
                if page is None:
                    expected = f"{where} in the tree"
                    return failure(expected, "it is not", place, head=f"must leave {expected}")
                expected = f"{where} live in the tree"
                return failure(expected, "a tombstone", place, head=f"must leave {expected}")
        states = {node.path for node in step.after.tree.nodes if node.state is not None}
        before = step.locked_before.get(holder)
        new = key and (before is None or len(before.key) < len(key))
        if geometry.states and new and key not in states and not lost_states(step):
            expected = f"the state after {path_text(key)} in the tree"
            head = f"must leave {expected}"
            return failure(expected, "there is none", AtNode(key, "state"), head=head)
    return None


def _inserted(step: Step) -> Iterator[tuple[str, Key, int, bool]]:
    """Yield who inserts whole pages into the tree, their tokens, up to where it brings no SWA KV, and
    whether it goes on: then only if it could match all of them again."""
    size = step.config.geometry.page_size
    bigram = step.config.geometry.bigram
    command = step.command
    if not step.done:
        return
    if isinstance(command, Insert):
        key = key_of(command.prompt, bigram)
        yield command.holder, _whole(key, size), ceil_page(command.evicted, size), command.chunked
    elif isinstance(command, Finish) and (was := step.acted) is not None and was.session is None:
        assert was.cursors is not None
        if brings_state(step, was, command):
            key = _finished_keys(step, was, command)[-1 if step.config.geometry.states else 0]
            yield was.holder, key, was.cursors.swa_evicted_seqlen, False
    else:
        for name, (committed, _) in step.progress.items():
            was = step.was.request(name)
            assert was is not None and was.cursors is not None
            session = step.was.session(was.session)
            c = was.cursors
            later = session is not None and session.slot is not None  # stays outside of the tree
            if not later and was.phase is not Phase.RUNNING:
                key = tree_key(text_tokens(was.text, c.kv_committed_len + committed), bigram)
                yield was.holder, _whole(key, size), step.frontier(name), True


def _finished_keys(step: Step, was: Request, command: Finish) -> list[Key]:
    """Whole pages of what a request that finishes hands in, at least and at most: the last round may be in
    flight, and then nobody hands it in."""
    assert was.cursors is not None
    most = least = min(was.cursors.kv_committed_len, was.origin + command.finished_len)
    if command.finished_len <= was.processed_outputs[1]:
        least = min(most, was.origin + was.processed_outputs[1] - 1)
    geometry = step.config.geometry
    keys = (tree_key(text_tokens(was.text, length), geometry.bigram) for length in (least, most))
    return [_whole(key, geometry.page_size) for key in keys]


def _whole(key: Key, size: int) -> Key:
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
        and (was := s.acted) is not None
        and was.cursors is not None
        and was.session is None
        and was.cursors.kv_allocated_len > was.origin + s.command.finished_len
    ),
)
def _seen_by_the_client(step: Step) -> Failure | None:
    command = step.command
    was = step.acted
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
        and any(brought > 0 and key for _, key, brought, _ in _inserted(s))
    ),
)
def _resumable(step: Step) -> Failure | None:
    was = step.acted
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
        or lost(step)
        or not brings_state(step, was, command)
    ):
        return None
    pages = step.after.tree.pages
    size = step.config.geometry.page_size
    locks = [k.key for k in step.locks.values()]
    found = []
    # if all is in the tree, all of it is to be resumed
    for key in _finished_keys(step, was, command):
        first = max(was.cursors.cache_protected_len, len(key) - window) // size * size
        ends = page_ends(len(key), size, first)
        gone = next(
            (end for end in ends if not _readable(pages.get(key[:end]), key[:end], locks)), None
        )
        if gone is None:
            return None
        found.append((key, gone))
    key, end = found[0]
    expected = f"[{end - size}, {end}) of {path_text(key)} live in the tree, for a match of {len(key)} tokens"
    observed = "a tombstone" if key[:end] in pages else "it is not there"
    return failure(
        expected, observed, AtTreePage(key[:end], end - size), head=f"must leave {expected}"
    )


def _readable(page: tuple[object, bool] | None, path: Key, locks: list[Key]) -> bool:
    """A page is live, or a tombstone that a lock passes through."""
    return page is not None and (page[1] or any(key[: len(path)] == path for key in locks))


@clause(
    "TREE-7",
    "a fresh leaf pins one window",
    "A leaf that an insert makes has at most one window of live SWA KV, in whole pages; what is "
    "before that is another node.",
    why=(
        "A lock pins nodes whole: a lock on a leaf of thousands of tokens pins as much SWA pool, "
        "and others are retracted for it."
    ),
    rule="radix_tree._grown",
    source="#26919",
    concerns="outcomes, choices and order",
    scope=f"{WITH_TREE} Models with SWA. A lock that ends in an inner node pins that whole.",
    of=(Extend, Decode, SpecDecode, Launch, Finish, Insert),
    needs=("tree", "window"),
    trigger=lambda s: s.grew and any(True for _ in _fresh(s)),
)
def _capped(step: Step) -> Failure | None:
    size = step.config.geometry.page_size
    window = step.config.geometry.window
    for node in _fresh(step):
        assert window is not None
        need = ceil_page(window, size)
        if len(node.slots) > need:
            expected = f"a lock on {where(node)} pins {need // size} SWA pages, as one window needs"
            head = f"makes {where(node)} one leaf, and a lock pins leaves whole: SWA KV of {len(node.slots)}"
            head += f" tokens for a window of {window}, which needs {need}"
            place = AtNode(node.path, "swa")
            return failure(expected, f"{len(node.slots) // size} SWA pages", place, head=head)
    return None


def _fresh(step: Step) -> Iterator[NodeFacts]:
    """Live leaves whose tokens were not in the tree."""
    tree = step.after.tree
    size = step.config.geometry.page_size
    if tree is None or step.config.geometry.window is None or not step.done:
        return
    assert step.before.tree is not None
    # A prompt may also come with the first round after its prefill.
    if isinstance(step.command, (Extend, Decode, SpecDecode, Launch, Finish, Insert)):
        known = step.before.tree.pages
        parents = {node.path[: node.start] for node in tree.nodes}
        for node in tree.nodes:
            if (
                node.live
                and node.path not in parents
                and node.path[: node.start + size] not in known
            ):
                yield node


def lost(step: Step) -> bool:
    """The system's tree, which it shows before and after, has given up pages, or their SWA KV."""
    before, after = step.before.tree, step.after.tree
    assert before is not None and after is not None
    kept = after.pages
    return any(
        path not in kept or (live and not kept[path][1]) for path, (_, live) in before.pages.items()
    )


def lost_states(step: Step) -> bool:
    """The system's tree has given up states; their nodes may be there."""
    before, after = step.before.states, step.after.states
    return (
        before is not None and after is not None and not before.nodes.keys() <= after.nodes.keys()
    )


def brings_state(step: Step, was: Request, command: Finish) -> bool:
    """A request that finishes can be resumed from: a recurrent model has the state after what it inserts, and
    inserts all that it has."""
    assert was.cursors is not None
    length = min(was.cursors.kv_committed_len, was.origin + command.finished_len)
    geometry = step.config.geometry
    return not geometry.states or (state_of(step.was, was) == length and not geometry.tracks)
