"""The nodes of the radix tree, the locks on them, and what its operations report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from impl.lazy import Tensor

Key = tuple[int, ...]

# Components of a node: what is counted once for each.
FULL, SWA = 0, 1


@dataclass(slots=True, eq=False)
class TreeNode:
    """A run of tokens, whole pages.

    slots: int64 [len(key)] on the store's device, the full slots of its tokens. parent: None for the
    root; a node that is `gone` still names it. end: tokens from the root to its end. locks, used: per
    component how many locks pin it and the moment it was last used. children: by their first page. state: the
    slot of the recurrent state at its end; state_locks, state_used: the same of that.

    A node keeps its end and the tokens before it for life: a split puts a new node above it.
    """

    key: Key
    slots: Tensor
    parent: TreeNode | None
    end: int
    live: bool = True
    locks: list[int] = field(default_factory=lambda: [0, 0])
    used: list[int] = field(default_factory=lambda: [0, 0])
    children: dict[Key, TreeNode] = field(default_factory=dict)
    gone: bool = False
    state: int | None = None
    state_locks: int = 0
    state_used: int = 0

    @property
    def start(self) -> int:
        return self.end - len(self.key)

    def path(self) -> Key:
        """The tokens from the root to its end."""
        parts = []
        node: TreeNode | None = self
        while node is not None:
            parts.append(node.key)
            node = node.parent
        return tuple(token for key in reversed(parts) for token in key)

    def __lt__(self, other: TreeNode) -> bool:
        """Which of two goes first that were last used at one moment and end equally far from the root."""
        return self.path() < other.path()


class MatchedPrefix(NamedTuple):
    """The prefix of a key that can be resumed from. slots: int64 [length], a copy. node: to be locked."""

    length: int
    slots: Tensor
    node: TreeNode


@dataclass(slots=True, eq=False)
class NodeLock:
    """The KV that a holder pins: full KV up to the end of `node`, SWA KV from position swa_from to there
    (none, if that is its end); state: the recurrent state there.

    A position, not a node: wherever nodes are split later, the pinned ones are those on the way up
    from `node` that end beyond swa_from. SWA counters are not to be found again by walking up until
    a window is covered, for after a split of the topmost pinned node that walk stops too early.
    """

    node: TreeNode
    swa_from: int
    state: bool = False


class Owed:
    """Pages that an operation frees: first full slots of them, how many tokens they are; and states."""

    def __init__(self) -> None:
        self.full: list[Tensor] = []
        self.swa: list[Tensor] = []
        self.tokens = [0, 0]
        self.states = 0


# A node as it stands in a queue: its rank, its end, and the node.
Entry = tuple[int, int, TreeNode]
