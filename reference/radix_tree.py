"""The radix tree: cached prefixes whose nodes hold full KV, and SWA KV or a tombstone.

Immutable, like all of the reference. A node is a run of whole pages; a path from the root spells a
prefix. Every node owns the full pages of its tokens; a live one owns their SWA pages too, a tombstone
has lost those. On a model with recurrent layers a node may own the state at its end: a split leaves it on the
lower half, for that ends there. Locks are kept by who holds them, as ranges of tokens, not as counters in
nodes: so unlock gives back exactly what lock took, whatever was split in between.

Least recently used: each operation has its own moment, and of nodes last used at the same moment the
one nearer to the root goes first. Lengths and positions are tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from reference.cursors import ceil_page, floor_page, window_start
from reference.memoization import memoized

Key = tuple[int, ...]


class Node(NamedTuple):
    """A run of tokens, whole pages.

    full_used, swa_used: the moment of its last use, per component.
    live: it has SWA KV; always true without a window.
    state_used: the moment of the last use of the recurrent state at its end, 0 where it has none.
    """

    key: Key
    live: bool
    full_used: int
    swa_used: int
    children: tuple[Node, ...] = ()
    state_used: int = 0


class Lock(NamedTuple):
    """The KV that a holder pins: full KV of `key`, SWA KV from `swa_from` to its end.

    state: it pins the state at its end too.
    whole: start of the SWA part when the lock was taken; `reshape` moves swa_from to the window.
    """

    holder: str
    key: Key
    swa_from: int
    state: bool = False
    whole: int = 0


class _Tree(NamedTuple):
    page_size: int
    window: int | None
    children: tuple[Node, ...] = ()
    locks: tuple[Lock, ...] = ()
    clock: int = 0
    states: bool = False


class Tree(_Tree):
    """A radix tree.

    children: those of the root, which is empty.
    locks: sorted by holder.
    clock: moments so far.
    states: the model has recurrent layers.
    """

    def __getstate__(self) -> None:
        """Leave out memoized values: they do not travel with a tree."""


class Placed(NamedTuple):
    """A node and the tokens from the root to its end."""

    node: Node
    path: Key

    @property
    def start(self) -> int:
        return len(self.path) - len(self.node.key)

    @property
    def end(self) -> int:
        return len(self.path)


class Insertion(NamedTuple):
    """The fate of the pages that an insert brought, as ranges of tokens.

    matched: the length that was there; full pages from the inserter's prefix to it are duplicates and freed.
    adopted: [matched, end), now the tree's.
    recovered: tombstones that got the inserter's SWA KV; SWA pages of other duplicates are freed.
    """

    matched: int
    end: int
    recovered: tuple[tuple[int, int], ...] = ()


class Sizes(NamedTuple):
    """Tokens in the tree, per pool: the evictable ones and those that a lock pins."""

    full_evictable: int
    full_protected: int
    swa_evictable: int
    swa_protected: int


@memoized
def nodes(tree: Tree) -> Sequence[Placed]:
    """Return all nodes, parents before children."""
    placed_nodes = [Placed(node, node.key) for node in tree.children]
    for placed in placed_nodes:
        placed_nodes += [Placed(child, placed.path + child.key) for child in placed.node.children]
    return placed_nodes


@memoized
def tokens_held(tree: Tree) -> tuple[int, int]:
    """Return the numbers of tokens whose full KV, and whose SWA KV, the tree owns."""
    full = swa = 0
    waiting = list(tree.children)
    while waiting:
        node = waiting.pop()
        full += len(node.key)
        swa += len(node.key) if node.live and tree.window is not None else 0
        waiting += node.children
    return full, swa


def lock_of(tree: Tree, holder: str) -> Lock | None:
    """Return the holder's lock, or None."""
    return next((lock for lock in tree.locks if lock.holder == holder), None)


def path_of(tree: Tree, key: Key) -> list[Placed]:
    """Return the nodes that spell `key`, from the root on; the last may be longer than `key`."""
    placed_nodes: list[Placed] = []
    children = tree.children
    position = 0
    while position < len(key):
        page = key[position : position + tree.page_size]
        node = next((n for n in children if n.key[: tree.page_size] == page), None)
        if node is None:
            break
        placed_nodes.append(Placed(node, (placed_nodes[-1].path if placed_nodes else ()) + node.key))
        same = shared_len(node.key, key[position:], tree.page_size)
        position += same
        if same < len(node.key):
            break
        children = node.children
    return placed_nodes


def shared_len(a: Key, b: Key, page_size: int) -> int:
    """Return the length of the common prefix, in whole pages (tokens)."""
    length = 0
    for x, y in zip(a, b):
        if x != y:
            break
        length += 1
    return floor_page(length, page_size)


# -- whose pages a lock pins ----------------------------------------------------------------------


def full_locked(tree: Tree, placed: Placed) -> bool:
    """Return whether a lock needs the node's full KV: its prefix passes through the node."""
    return any(lock.key[: placed.end] == placed.path for lock in tree.locks)


def swa_locked(tree: Tree, placed: Placed) -> bool:
    """Return whether a lock needs the node's SWA KV."""
    return any(
        lock.swa_from < placed.end and lock.key[: placed.end] == placed.path for lock in tree.locks
    )


def state_locked(tree: Tree, placed: Placed) -> bool:
    """Return whether a lock needs the state at the end of the node."""
    return any(lock.state and lock.key == placed.path for lock in tree.locks)


@memoized
def state_paths(tree: Tree) -> frozenset[Key]:
    """Return the paths to the nodes that have a state."""
    return frozenset(placed.path for placed in nodes(tree) if placed.node.state_used)


@memoized
def sizes(tree: Tree) -> Sizes:
    """Return tokens per pool, evictable and protected (CHK-2)."""
    counts = [0, 0, 0, 0]
    for placed in nodes(tree):
        counts[full_locked(tree, placed)] += len(placed.node.key)
        if placed.node.live and tree.window is not None:
            counts[2 + swa_locked(tree, placed)] += len(placed.node.key)
    return Sizes(*counts)


def reshape(tree: Tree, shape: list[tuple[Key, int, bool, bool]]) -> Tree:
    """Return the tree with other nodes, given as (path, start, live, has a state): for systems whose
    tree splits and evicts by rules of its own. Its locks pin no more SWA KV than their window needs.
    Nodes without a parent are left out (TREE-1)."""
    below: dict[Key, list[Node]] = {}
    for path, start, live, state in sorted(shape, key=lambda n: -len(n[0])):
        children = tuple(sorted(below.pop(path, ())))
        node = Node(path[start:], live or tree.window is None, 0, 0, children, int(state))
        below.setdefault(path[:start], []).append(node)
    locks = tree.locks
    if (window := tree.window) is not None:
        locks = tuple(k._replace(swa_from=max(k.swa_from, len(k.key) - window)) for k in locks)
    return tree._replace(children=tuple(sorted(below.get((), ()))), locks=locks)


# -- changing a persistent tree: everything on the path is copied, nothing else -------------------


def _edit_children(
    children: tuple[Node, ...], path: list[Placed], change: Callable[[Node], tuple[Node, ...]]
) -> tuple[Node, ...]:
    """Return `children` with the last node of `path` replaced by the result of `change` (none:
    removed)."""
    new = change(path[-1].node)
    for above, below in zip(reversed(path[:-1]), reversed(path)):
        new = (above.node._replace(children=_replace_child(above.node.children, below.node, new)),)
    return _replace_child(children, path[0].node, new)


def _replace_child(children: tuple[Node, ...], old: Node, new: tuple[Node, ...]) -> tuple[Node, ...]:
    """Return the children with one of them replaced, in the order of their keys."""
    return tuple(sorted([*(n for n in children if n is not old), *new], key=lambda n: n.key))


def change_node(tree: Tree, end: Key, change: Callable[[Node], tuple[Node, ...]]) -> Tree:
    """Return the tree with the node that ends at `end` replaced."""
    return tree._replace(children=_edit_children(tree.children, path_of(tree, end), change))


def _split(tree: Tree, key: Key) -> Tree:
    """Split a node so that one ends at `key`, whole pages that the tree has."""
    path = path_of(tree, key)
    if path[-1].end == len(key):
        return tree
    cut = len(key) - path[-1].start

    def halves(node: Node) -> tuple[Node, ...]:
        tail = node._replace(key=node.key[cut:])
        return (node._replace(key=node.key[:cut], children=(tail,), state_used=0),)

    return tree._replace(children=_edit_children(tree.children, path, halves))


def _with_node_at(tree: Tree, key: Key) -> tuple[Tree, Key]:
    """Return the part of `key` that the tree has, and the tree with a node that ends there."""
    path = path_of(tree, key)
    if not path:
        return tree, ()
    last = path[-1]
    prefix = key[: last.start + shared_len(last.node.key, key[last.start :], tree.page_size)]
    return _split(tree, prefix), prefix


def _mark_used(tree: Tree, key: Key) -> Tree:
    """Mark `key` as used: full KV along the path, SWA KV inside the window of its end (#26615), and the
    state there."""
    now = tree.clock + 1
    window_begin = window_start(len(key), tree.window) if tree.window else len(key)
    path = path_of(tree, key)
    below: tuple[Node, ...] = ()
    for placed, after in zip(reversed(path), [None, *reversed(path)]):
        node = placed.node
        if after is not None:
            node = node._replace(children=_replace_child(node.children, after.node, below))
        swa_used = now if node.live and placed.end > window_begin else node.swa_used
        state = now if node.state_used and placed.end == len(key) else node.state_used
        below = (node._replace(full_used=now, swa_used=swa_used, state_used=state),)
    if path:
        tree = tree._replace(children=_replace_child(tree.children, path[0].node, below))
    return tree._replace(clock=now)


def with_values(node: Node, **values: int | bool) -> tuple[Node, ...]:
    return (node._replace(**values),)  # type: ignore[arg-type]


# The operations; `tree_eviction.py` has evict.


def usable_length(tree: Tree, key: Key, full_only: bool = False) -> int:
    """Return the length of `key`, which ends with a node, that a request may resume from, in whole
    nodes.

    The KV of one window behind it must be live, or everything back to the root (TREE-5), and a
    recurrent model needs the state there.

    full_only: neither is required.
    """
    best = 0
    live_run = 0
    no_tombstone = True
    for placed_node in path_of(tree, key):
        live_run = live_run + len(placed_node.node.key) if placed_node.node.live else 0
        no_tombstone = no_tombstone and placed_node.node.live
        if full_only or (
            (tree.window is None or no_tombstone or live_run >= tree.window)
            and (not tree.states or placed_node.node.state_used)
        ):
            best = placed_node.end
    return best


def match(tree: Tree, key: Key, full_only: bool = False) -> tuple[Tree, int]:
    """Return the longest usable prefix of `key`, and the tree with a split at its end where the key
    leaves a node."""
    tree, matched = _with_node_at(tree, whole_pages(tree, key))
    length = usable_length(tree, matched, full_only)
    return _mark_used(tree, matched[:length]), length


def whole_pages(tree: Tree, key: Key) -> Key:
    """Return `key` without its last page, if that is not whole."""
    return key[: floor_page(len(key), tree.page_size)]


def lock(tree: Tree, holder: str, key: Key, full_only: bool = False) -> Tree:
    """Pin `key`, which a match has handed out: full KV of the path, SWA KV until a window is covered.

    In the SWA pool that is every node that reaches into the last window of `key`, each of them whole: up
    to a node more than one window (#26919 keeps fresh leaves at one). Nodes above pin only full KV. Of
    states it is the one at the end of `key`.
    """
    swa_from = len(key) if full_only else swa_lock_start(tree, key)
    state = tree.states and bool(key) and not full_only
    return tree._replace(
        locks=tuple(sorted((*tree.locks, Lock(holder, key, swa_from, state, swa_from))))
    )


def swa_lock_start(tree: Tree, key: Key) -> int:
    """Return the position from which a lock on `key` pins SWA KV: the nodes from there on cover a
    window."""
    start = len(key)
    for placed in reversed(path_of(tree, key)):
        if tree.window is None or len(key) - start >= tree.window:
            break
        start = placed.start
    return start


def unlock(tree: Tree, holder: str) -> Tree:
    """Give back exactly what the holder's lock took."""
    return tree._replace(locks=tuple(held for held in tree.locks if held.holder != holder))


def unlock_swa(tree: Tree, holder: str) -> Tree:
    """Give back the SWA part of the holder's lock; what is left pins full KV, and its state."""
    locks = (
        k._replace(swa_from=len(k.key), whole=len(k.key)) if k.holder == holder else k
        for k in tree.locks
    )
    return tree._replace(locks=tuple(locks))


def unlock_state(tree: Tree, holder: str) -> Tree:
    """Give back the state that the holder's lock pins; its KV stays pinned."""
    locks = (k._replace(state=False) if k.holder == holder else k for k in tree.locks)
    return tree._replace(locks=tuple(locks))


@memoized
def insert(tree: Tree, key: Key, evicted: int) -> tuple[Tree, Insertion]:
    """Put `key`, whole pages, into the tree. `evicted`: SWA KV of the pages below it is gone.

    What is there stays; a tombstone for which the key brings SWA KV gets it, unless a lock reads
    through it. What is new becomes a leaf: a tombstone below `evicted`, live from there on, and of the
    live part no more than one window of whole pages is one node (#26919, #22470). The node at the end takes
    the inserter's state, unless it has one.

    For a request that has ended; one that goes on uses `insert_and_continue`.
    """
    live_from = min(ceil_page(evicted, tree.page_size), len(key))
    tree, matched = _with_node_at(tree, key)
    if any(not p.node.live and p.start < live_from < p.end for p in path_of(tree, matched)):
        tree = _split(tree, key[:live_from])
    recovered = []
    for placed in path_of(tree, matched):
        if not placed.node.live and placed.start >= live_from and not full_locked(tree, placed):
            recovered.append((placed.start, placed.end))
            tree = change_node(tree, placed.path, partial(with_values, live=True))
    if len(matched) < len(key):
        tree = _fresh_leaf(tree, key, len(matched), live_from)
    if tree.states:
        tree = change_node(tree, key, partial(with_values, state_used=tree.clock + 1))
    return _mark_used(tree, key), Insertion(len(matched), len(key), tuple(recovered))


def insert_and_continue(
    tree: Tree, holder: str, key: Key, evicted: int
) -> tuple[Tree, Insertion] | None:
    """Insert for a holder that continues with its lock moved to the end of `key`, whole pages.

    Returns None, and inserts nothing, where `key` could not be matched again as a whole: where a recovery is
    refused, the holder's own SWA KV would be freed as a duplicate, and the holder still reads it. An example
    with page size and window 1: key (1, 2) is inserted with evicted 1 and locked, then another request
    computes (1,) by itself and inserts it. A match then gives 0. The holder's present lock counts like any
    other meanwhile.
    """
    grown, insertion = insert(tree, key, evicted)
    if usable_length(grown, key) < len(key):
        return None
    return lock(unlock(grown, holder), holder, key), insertion


def _fresh_leaf(tree: Tree, key: Key, matched: int, live_from: int) -> Tree:
    """Return a new leaf for key[matched:], split where its SWA KV begins and one window before its end."""
    cuts = {live_from, len(key)}
    if tree.window is not None:
        cuts.add(max(live_from, len(key) - ceil_page(tree.window, tree.page_size)))
    ends = sorted(cut for cut in cuts if cut > matched)
    now = tree.clock + 1
    leaf: tuple[Node, ...] = ()
    for start, end in reversed(list(zip([matched, *ends], ends))):
        leaf = (Node(key[start:end], start >= live_from, now, now, leaf),)
    if not matched:
        return tree._replace(children=tuple(sorted(tree.children + leaf)))
    return change_node(
        tree, key[:matched], lambda n: (n._replace(children=tuple(sorted(n.children + leaf))),)
    )
