"""Eviction from the radix tree under memory pressure, and its order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from reference.commands import Freed
from reference.radix_tree import (
    Key, Node, Placed, Tree, changed, full_locked, nodes, path_of, stamped, state_locked, swa_locked,
)  # fmt: skip
from reference.memoization import memoized


@memoized
def evictable_states(tree: Tree) -> int:
    """States that no lock needs."""
    return sum(_state_candidate(tree, placed) for placed in nodes(tree))


def states_in_order(tree: Tree) -> list[Placed]:
    """Nodes whose state no lock needs, in the order in which pressure on states takes them."""
    return sorted(_candidates(tree, _state_candidate), key=_turn("state_used"))


def evict(tree: Tree, full: int, swa: int, states: int = 0) -> tuple[Tree, Freed]:
    """Free at least `full` and `swa` tokens and `states` states, least recently used first, or all that is
    evictable.

    Full: unlocked leaves go, both sides. SWA: a leaf without a lock goes, any other node becomes a tombstone.
    States: a leaf without a lock goes, any other node loses its state. A leaf that is a tombstone, or has no
    state, serves no match and goes with the last node that was below it, but where a lock without an SWA
    part ends with it.
    """
    freed = [0, 0, 0]
    ways = (full, _without_leaf), (swa, _without_swa), (states, _without_state)
    for at, (amount, without) in enumerate(ways):
        while freed[at] < amount and (less := without(tree)) is not None:
            tree, gone = less
            freed = [a + b for a, b in zip(freed, (gone.full, gone.swa, gone.states))]
    return tree, Freed(*freed)


@memoized
def _without_leaf(tree: Tree) -> tuple[Tree, Freed] | None:
    """Without the leaf that goes first."""
    leaf = _oldest(tree, _full_candidate, "full_used")
    return _dropped(tree, leaf) if leaf is not None else None


@memoized
def _without_swa(tree: Tree) -> tuple[Tree, Freed] | None:
    """Without the SWA KV that goes first."""
    placed = _oldest(tree, _swa_candidate, "swa_used")
    if placed is None:
        return None
    return _less(tree, placed, Freed(0, len(placed.node.key)), live=False)


@memoized
def _without_state(tree: Tree) -> tuple[Tree, Freed] | None:
    """Without the state that goes first."""
    placed = _oldest(tree, _state_candidate, "state_used")
    if placed is None:
        return None
    return _less(tree, placed, Freed(0, 0, 1), state_used=0)


def _less(tree: Tree, placed: Placed, freed: Freed, **marks: Any) -> tuple[Tree, Freed]:
    """Without a part of a node, or without the node where it is a leaf that nobody has locked."""
    if placed.node.children or full_locked(tree, placed):
        return changed(tree, placed.path, partial(stamped, **marks)), freed
    return _dropped(tree, placed)


def _full_candidate(tree: Tree, placed: Placed) -> bool:
    return not placed.node.children and not full_locked(tree, placed)


def _swa_candidate(tree: Tree, placed: Placed) -> bool:
    return placed.node.live and not swa_locked(tree, placed)


def _state_candidate(tree: Tree, placed: Placed) -> bool:
    return bool(placed.node.state_used) and not state_locked(tree, placed)


def _serves(tree: Tree, node: Node) -> bool:
    """A match may end with this node."""
    return node.live and (not tree.states or bool(node.state_used))


def _oldest(tree: Tree, candidate: Callable[[Tree, Placed], bool], used: str) -> Placed | None:
    return min(_candidates(tree, candidate), key=_turn(used), default=None)


def _candidates(tree: Tree, candidate: Callable[[Tree, Placed], bool]) -> list[Placed]:
    return [placed for placed in nodes(tree) if candidate(tree, placed)]


def _turn(used: str) -> Callable[[Placed], tuple[int, int, Key]]:
    """Least recently used first; of those used at the same moment, the one nearer to the root."""
    return lambda placed: (getattr(placed.node, used), placed.end, placed.path)


def _dropped(tree: Tree, leaf: Placed) -> tuple[Tree, Freed]:
    """Without this leaf, and the nodes above it that serve no match and have no other child."""
    full = swa = states = 0
    while True:
        full += len(leaf.node.key)
        swa += len(leaf.node.key) if leaf.node.live and tree.window is not None else 0
        states += bool(leaf.node.state_used)
        tree = changed(tree, leaf.path, lambda _: ())
        above = path_of(tree, leaf.path[: leaf.start])
        serves = not above or _serves(tree, above[-1].node)
        if serves or above[-1].node.children or full_locked(tree, above[-1]):
            return tree, Freed(full, swa, states)
        leaf = above[-1]
