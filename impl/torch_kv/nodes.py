"""The nodes of the radix tree, locks on them, and results of the tree's operations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from impl.lazy import Tensor

Key = tuple[int, ...]

# Components of a node: each has its own locks, last use and counters.
FULL = 0
SWA = 1


@dataclass(slots=True, eq=False)
class TreeNode:
    """A run of tokens in whole pages.

    A node keeps its end and the tokens before it for life: a split puts a new node above it.
    """

    key: Key
    #: int64 [len(key)] on the store's device, the full slots of its tokens
    slots: Tensor
    #: None for the root; a dropped node keeps its parent
    parent: TreeNode | None
    #: number of tokens from the root to the node's end
    end: int
    #: the tokens have SWA KV; otherwise the node is a tombstone
    live: bool = True
    #: for each component, the number of locks and the clock of the last use
    locks: list[int] = field(default_factory=lambda: [0, 0])
    used: list[int] = field(default_factory=lambda: [0, 0])
    #: child nodes by their first page
    children: dict[Key, TreeNode] = field(default_factory=dict)
    #: the node was dropped from the tree
    gone: bool = False
    #: slot of the recurrent state at the node's end, None without one
    state: int | None = None
    #: number of locks on the state, and the clock of its last use
    state_locks: int = 0
    state_used: int = 0

    @property
    def start(self) -> int:
        return self.end - len(self.key)

    def path(self) -> Key:
        """Return the tokens from the root to the node's end."""
        parts = []
        node: TreeNode | None = self
        while node is not None:
            parts.append(node.key)
            node = node.parent
        return tuple(token for key in reversed(parts) for token in key)

    def __lt__(self, other: TreeNode) -> bool:
        """Order nodes with the same last use and the same end for eviction."""
        return self.path() < other.path()


class MatchedPrefix(NamedTuple):
    """The prefix of a key that a request may resume from.

    length: its tokens.
    slots: int64 [length], a copy of its full slots.
    node: the node at its end, which the caller locks.
    """

    length: int
    slots: Tensor
    node: TreeNode


@dataclass(slots=True, eq=False)
class NodeLock:
    """The KV that a holder pins.

    node: full KV is pinned up to this node's end.
    swa_from: SWA KV is pinned from this position to the node's end; none if it is the end.
    state: the recurrent state at the node's end is pinned.

    `swa_from` is a position, not a node, so that it survives splits: the nodes with pinned SWA KV are the
    ancestors of `node` that end behind it. A walk up until a window is covered would not find them: after a
    split of the topmost pinned node it stops too early.
    """

    node: TreeNode
    swa_from: int
    state: bool = False


class Owed:
    """Pages and states that an operation frees.

    full, swa: first full slots of the pages, int64 [n] each.
    tokens: number of tokens, for each component.
    states: number of states.
    """

    def __init__(self) -> None:
        self.full: list[Tensor] = []
        self.swa: list[Tensor] = []
        self.tokens = [0, 0]
        self.states = 0


# An entry of an eviction queue: the node's rank and end when it was queued, and the node.
Entry = tuple[int, int, TreeNode]
