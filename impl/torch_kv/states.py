"""Slots of recurrent state: those of requests and sessions, and those of nodes of the radix tree.

The pool is kept on the host: a slot is a number, and what stands in it is the stamp of the text that was
folded into it (`reference.states`). A server has a tensor there, which its kernels read and write by these
numbers.

Each rule is a method of its own, as in `sessions`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from impl.torch_kv.nodes import FULL, TreeNode
from impl.vocabulary import require
from reference.commands import Reason, token_id
from reference.states import EMPTY, chain

if TYPE_CHECKING:
    from impl.torch_kv.nodes import NodeLock
    from impl.torch_kv.radix_tree import RadixTree
    from impl.torch_kv.sessions import KVRequest, Slot


class StateSlots:
    """The pool. Slot 0 is the padding's. free: the next one handed out is the last. stamps: of each slot.
    read: request of the last batch -> the stamp of the state from which it went on."""

    def __init__(self, size: int) -> None:
        self.size = size
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
        if self.states is None or node.state is None:
            return 0
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

    def evictable_states(self, but: TreeNode | None = None, unlocked: NodeLock | None = None) -> int:
        """States that may be evicted. but: a node that keeps its own; unlocked: as if this lock had been let
        go."""
        mine = unlocked.node if unlocked is not None and unlocked.state else None
        others = [node for node in self.with_state if node is not but]
        return sum(node.state_locks - (node is mine) <= 0 for node in others)

    def outlives_state(self, node: TreeNode) -> bool:
        """Whether a node stays whose state goes: not a leaf, but where a lock reads its full KV."""
        return bool(node.children or node.locks[FULL])


class StateRules:
    """States of requests and of sessions' slots. states: None on a model without recurrent layers."""

    states: StateSlots | None
    tree: RadixTree | None

    # A request's own slot.

    def begin_states(self, requests: Sequence[KVRequest]) -> None:
        """Whoever has no slot takes one, with an empty state. The caller knows that they are there."""
        for request in requests if self.states is not None else ():
            if request.state is None:
                assert self.states is not None
                request.state, request.state_len = self.states.take(), 0
                self.clear_new(request.state)

    def clear_new(self, slot: int) -> None:
        """A text begins in a slot that others have used."""
        assert self.states is not None
        self.states.clear(slot)

    def fold(self, requests: Sequence[KVRequest], starts: Sequence[int], ends: Sequence[int]) -> None:
        """States go on from positions starts[i] to ends[i], past the text by rule: drafts that are accepted.
        """
        if self.states is None:
            return
        for request, start, end in zip(requests, starts, ends, strict=True):
            assert request.state is not None
            self.states.read[request.name] = self.states.stamps[request.state]
            text = request.text[start:end]
            text += [token_id(request.serial, p) for p in range(start + len(text), end)]
            self.states.fold(request.state, text)
            request.state_len = end

    def free_state(self, holder: KVRequest | Slot) -> None:
        """Give a slot back."""
        if self.states is not None and holder.state is not None:
            self.states.give(holder.state)
            holder.state = None

    # What is matched, restored and handed to the tree.

    def require_state(self, request: KVRequest, node: TreeNode, lock: NodeLock | None) -> None:
        """Refuse an admission behind `node` that finds no slot for its copy. lock: the one that it lets go.
        """
        if self.states is None or node.parent is None:
            return
        assert self.tree is not None
        left = len(self.states.free) + (request.state is not None)
        require(left or self.tree.evictable_states(node, lock), Reason.OUT_OF_STATES)

    def match_state(self, request: KVRequest, node: TreeNode) -> None:
        """The request continues from a copy of a node's state, in a slot of its own."""
        if self.states is None:
            return
        self.free_state(request)
        if node.parent is None:
            return
        assert self.tree is not None and node.state is not None
        if not self.states.free:
            self.tree.evict(0, 0, 1)
        request.state, request.state_len = self.states.take(), node.end
        self.copy_matched(node.state, request.state)

    def copy_matched(self, source: int, slot: int) -> None:
        """Copy on write: the node keeps its own."""
        assert self.states is not None
        self.states.copy(source, slot)

    def state_resumes(self, slot: Slot, prefix: int) -> bool:
        """Whether a slot's state is the one after `prefix` tokens: it cannot be cut back."""
        return self.states is None or slot.state_len == prefix

    def rewind_state(self, slot: Slot, prefix: int, lock: NodeLock | None) -> None:
        """A turn starts again where the tree's prefix ends: from the state there, or from none."""
        if self.states is None or slot.state_len == prefix:
            return
        assert slot.state is not None
        kept = lock.node.state if prefix and lock is not None else None
        if kept is None:
            self.states.clear(slot.state)
        else:
            self.states.copy(kept, slot.state)
        slot.state_len = prefix

    def checkpoint(self, request: KVRequest) -> int | None:
        """A copy of a request's state, for the tree, in a slot of its own."""
        if self.states is None:
            return None
        assert request.state is not None
        slot = self.states.take()
        self.states.copy(request.state, slot)
        return slot

    def computed_state(self, key: Sequence[int]) -> int | None:
        """A slot with the state after `key`, as whoever has computed it brings it."""
        if self.states is None:
            return None
        slot = self.states.take()
        self.states.clear(slot)
        self.states.fold(slot, key)
        return slot

    def donate(self, request: KVRequest) -> int | None:
        """The state of a request that has finished, for the tree."""
        slot, request.state = request.state, None
        return slot

    def brings_state(self, request: KVRequest, length: int) -> bool:
        """Whether a finished request has the state after all that it inserts: else nobody could resume there.
        """
        return self.states is None or request.state_len == length
