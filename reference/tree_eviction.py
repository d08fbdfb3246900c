"""Eviction from the radix tree under memory pressure, and its order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from reference.commands import Freed
from reference.radix_tree import (
    Key, Node, Placed, Tree, change_node, full_locked, nodes, path_of, with_values, state_locked, swa_locked,
)  # fmt: skip
from reference.memoization import memoized


@memoized
def evictable_states(tree: Tree) -> int:
    """Return the number of states that no lock needs."""
    return sum(_state_candidate(tree, placed) for placed in nodes(tree))


def states_in_order(tree: Tree) -> list[Placed]:
    """Return the nodes whose state no lock needs, in the order of eviction."""
    return sorted(_candidates(tree, _state_candidate), key=_eviction_order("state_used"))


def evict(tree: Tree, full: int, swa: int, states: int = 0) -> tuple[Tree, Freed]:
    """Free at least `full` and `swa` tokens and `states` states, least recently used first, or all that is
    evictable.

    Full: an unlocked leaf goes, with its SWA KV and its state. SWA: an unlocked leaf goes; any other node
    becomes a tombstone. States: an unlocked leaf goes; any other node loses its state. A leaf that can end no
    match (a tombstone, or one without a state) goes with the last node below it, unless a lock without an SWA
    part ends with it.
    """
    freed = [0, 0, 0]
    parts = (full, _evict_leaf), (swa, _evict_swa), (states, _evict_state)
    for index, (amount, evict_next) in enumerate(parts):
        while freed[index] < amount and (evicted := evict_next(tree)) is not None:
            tree, part = evicted
            freed = [a + b for a, b in zip(freed, (part.full, part.swa, part.states))]
    return tree, Freed(*freed)


@memoized
def _evict_leaf(tree: Tree) -> tuple[Tree, Freed] | None:
    """Evict the least recently used leaf."""
    leaf = _oldest(tree, _full_candidate, "full_used")
    return _drop_leaf(tree, leaf) if leaf is not None else None


@memoized
def _evict_swa(tree: Tree) -> tuple[Tree, Freed] | None:
    """Evict the least recently used SWA KV of a node."""
    placed = _oldest(tree, _swa_candidate, "swa_used")
    if placed is None:
        return None
    return _drop_part(tree, placed, Freed(0, len(placed.node.key)), live=False)


@memoized
def _evict_state(tree: Tree) -> tuple[Tree, Freed] | None:
    """Evict the least recently used state."""
    placed = _oldest(tree, _state_candidate, "state_used")
    if placed is None:
        return None
    return _drop_part(tree, placed, Freed(full=0, swa=0, states=1), state_used=0)


def _drop_part(tree: Tree, placed: Placed, freed: Freed, **marks: Any) -> tuple[Tree, Freed]:
    """Drop a part of a node, or the node itself where it is an unlocked leaf."""
    if placed.node.children or full_locked(tree, placed):
        return change_node(tree, placed.path, partial(with_values, **marks)), freed
    return _drop_leaf(tree, placed)


def _full_candidate(tree: Tree, placed: Placed) -> bool:
    return not placed.node.children and not full_locked(tree, placed)


def _swa_candidate(tree: Tree, placed: Placed) -> bool:
    return placed.node.live and not swa_locked(tree, placed)


def _state_candidate(tree: Tree, placed: Placed) -> bool:
    return bool(placed.node.state_used) and not state_locked(tree, placed)


def _can_end_match(tree: Tree, node: Node) -> bool:
    """Return whether a match may end with this node."""
    return node.live and (not tree.states or bool(node.state_used))


def _oldest(tree: Tree, candidate: Callable[[Tree, Placed], bool], used: str) -> Placed | None:
    return min(_candidates(tree, candidate), key=_eviction_order(used), default=None)


def _candidates(tree: Tree, candidate: Callable[[Tree, Placed], bool]) -> list[Placed]:
    return [placed for placed in nodes(tree) if candidate(tree, placed)]


def _eviction_order(used: str) -> Callable[[Placed], tuple[int, int, Key]]:
    """Return a sort key that puts the least recently used first, and among equals the one nearest to the
    root."""
    return lambda placed: (getattr(placed.node, used), placed.end, placed.path)


def _drop_leaf(tree: Tree, leaf: Placed) -> tuple[Tree, Freed]:
    """Drop this leaf, and its ancestors that cannot end a match and have no other child."""
    full = swa = states = 0
    while True:
        full += len(leaf.node.key)
        swa += len(leaf.node.key) if leaf.node.live and tree.window is not None else 0
        if leaf.node.state_used:
            states += 1
        tree = change_node(tree, leaf.path, lambda _: ())
        above = path_of(tree, leaf.path[: leaf.start])
        serves = not above or _can_end_match(tree, above[-1].node)
        if serves or above[-1].node.children or full_locked(tree, above[-1]):
            return tree, Freed(full, swa, states)
        leaf = above[-1]
