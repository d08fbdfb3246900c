"""Slots of recurrent state, and the slots of radix tree nodes.

The pool is on the host. A slot is a number, and holds the stamp of the text that was folded into it
(`reference.recurrent_states`). A server has a tensor instead, whose kernels use the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from impl.torch_kv.nodes import FULL, TreeNode
from reference.recurrent_states import EMPTY, chain

if TYPE_CHECKING:
    from impl.torch_kv.nodes import NodeLock


class StateSlots:
    """The pool of state slots. Slot 0 is for padding.

    free: free slots, the next one to allocate last.
    stamps: stamp of each slot's state.
    read: for each request of the last batch, the stamp of the state that it continued from.
    """

    def __init__(self, size: int) -> None:
        self.free = list(range(size, 0, -1))
        self.stamps = [EMPTY] * (size + 1)
        self.read: dict[str, int] = {}

    def take(self) -> int:
        """Allocate a slot; it still has its last owner's state. Raises IndexError if none is free."""
        return self.free.pop()

    def give(self, slot: int) -> None:
        self.free.insert(0, slot)

    def clear(self, slot: int) -> None:
        """Set the slot to the state before the first token."""
        self.stamps[slot] = EMPTY

    def copy(self, source: int, slot: int) -> None:
        self.stamps[slot] = self.stamps[source]

    def fold(self, slot: int, tokens: Sequence[int]) -> None:
        """Fold these tokens into the state in a slot."""
        for token in tokens:
            self.stamps[slot] = chain(self.stamps[slot], token)


class NodeStates:
    """States of tree nodes: each node may have one, at its end. A split leaves it with the second half."""

    states: StateSlots | None
    with_state: set[TreeNode]

    def ends_a_match(self, node: TreeNode) -> bool:
        """Return whether a request can resume behind the node: on a recurrent model it needs the state."""
        return self.states is None or node.state is not None

    def take_state(self, node: TreeNode, slot: int) -> None:
        """Give the inserter's slot to the node; if it has a state, the slot is a duplicate and is freed."""
        assert self.states is not None
        if node.state is not None:
            self.duplicate_state(slot)
        else:
            node.state = slot
            self.with_state.add(node)

    def duplicate_state(self, slot: int) -> None:
        """Free a state that the tree already has."""
        assert self.states is not None
        self.states.give(slot)

    def free_node_state(self, node: TreeNode) -> int:
        """Free the node's state, if it has one. Returns the number of freed states."""
        if node.state is None:
            return 0
        assert self.states is not None
        self.states.give(node.state)
        node.state = None
        self.with_state.discard(node)
        return 1

    def pin_state(self, node: TreeNode) -> None:
        """Pin the state of the node that a lock ends with."""
        node.state_locks += 1

    def unpin_state(self, lock: NodeLock) -> None:
        lock.node.state_locks -= 1

    def state_candidate(self, node: TreeNode) -> bool:
        """Return whether an eviction for states may free the node's state."""
        return not node.state_locks

    def next_state(self) -> TreeNode | None:
        """Return the node whose state is evicted first; None if none is evictable."""
        candidates = [node for node in self.with_state if self.state_candidate(node)]
        return min(candidates, key=lambda node: (node.state_used, node.end, node.path()), default=None)

    def evictable_states(self, but: TreeNode | None = None) -> int:
        """Return the number of evictable states.

        but: a node that keeps its own.
        """
        others = [node for node in self.with_state if node is not but]
        return sum(map(self.state_candidate, others))

    def outlives_state(self, node: TreeNode) -> bool:
        """Return whether the node stays when its state is freed: it has children, or a lock reads its full
        KV."""
        return bool(node.children or node.locks[FULL])
