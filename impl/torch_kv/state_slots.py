"""Slots of recurrent state, and which of them nodes of the radix tree have.

The pool is kept on the host: a slot is a number, and it holds the stamp of the text that was folded into it
(`reference.recurrent_states`). A server has a tensor there, which its kernels read and write by these
numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from impl.torch_kv.nodes import FULL, TreeNode
from reference.recurrent_states import EMPTY, chain

if TYPE_CHECKING:
    from impl.torch_kv.nodes import NodeLock


class StateSlots:
    """The pool. Slot 0 is the padding's. free: the next one handed out is the last. stamps: of each slot.
    read: request of the last batch -> the stamp of the state from which it went on."""

    def __init__(self, size: int) -> None:
        self.free = list(range(size, 0, -1))
        self.stamps = [EMPTY] * (size + 1)
        self.read: dict[str, int] = {}

    def take(self) -> int:
        """A slot, with whatever its last owner has left in it. Raises IndexError if none is free."""
        return self.free.pop()

    def give(self, slot: int) -> None:
        self.free.insert(0, slot)

    def clear(self, slot: int) -> None:
        """A text begins in it."""
        self.stamps[slot] = EMPTY

    def copy(self, source: int, slot: int) -> None:
        self.stamps[slot] = self.stamps[source]

    def fold(self, slot: int, tokens: Sequence[int]) -> None:
        """The state in a slot goes on by these tokens."""
        for token in tokens:
            self.stamps[slot] = chain(self.stamps[slot], token)


class NodeStates:
    """States of tree nodes, one at most, at the end of a node. A split leaves it where that end is."""

    states: StateSlots | None
    with_state: set[TreeNode]

    def ends_a_match(self, node: TreeNode) -> bool:
        """Whether a request can continue behind the node: a recurrent model needs the state there."""
        return self.states is None or node.state is not None

    def take_state(self, node: TreeNode, slot: int) -> None:
        """The node takes an inserter's slot; a duplicate is given back."""
        assert self.states is not None
        if node.state is not None:
            self.duplicate_state(slot)
        else:
            node.state = slot
            self.with_state.add(node)

    def duplicate_state(self, slot: int) -> None:
        """A state that the tree has already."""
        assert self.states is not None
        self.states.give(slot)

    def free_node_state(self, node: TreeNode) -> int:
        """The node's state goes; how many that are."""
        if node.state is None:
            return 0
        assert self.states is not None
        self.states.give(node.state)
        node.state = None
        self.with_state.discard(node)
        return 1

    def pin_state(self, node: TreeNode) -> None:
        """A lock that ends with the node needs its state."""
        node.state_locks += 1

    def unpin_state(self, lock: NodeLock) -> None:
        lock.node.state_locks -= 1

    def state_candidate(self, node: TreeNode) -> bool:
        """Whether state pressure may take the node's state."""
        return not node.state_locks

    def next_state(self) -> TreeNode | None:
        """The node whose state goes first; None if none may go."""
        found = [node for node in self.with_state if self.state_candidate(node)]
        return min(found, key=lambda node: (node.state_used, node.end, node.path()), default=None)

    def evictable_states(self, but: TreeNode | None = None) -> int:
        """States that may be evicted. but: a node that keeps its own."""
        others = [node for node in self.with_state if node is not but]
        return sum(map(self.state_candidate, others))

    def outlives_state(self, node: TreeNode) -> bool:
        """Whether a node stays whose state goes: not a leaf, but where a lock reads its full KV."""
        return bool(node.children or node.locks[FULL])
