"""Recurrent states of requests and of sessions' slots. Each rule is a method of its own, as in `sessions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from impl.torch_kv.nodes import TreeNode
from impl.torch_kv.requests import KVRequest, Slot
from impl.torch_kv.state_slots import StateSlots
from impl.vocabulary import require
from reference.commands import Reason
from reference.token_ids import token_id

if TYPE_CHECKING:
    from impl.torch_kv.nodes import NodeLock
    from impl.torch_kv.radix_tree import RadixTree


# Slots of a request whose text is inserted into the tree: the last state that it keeps, and the next.
BUFFERS = 2


class StateRules:
    """States of requests and of sessions' slots.

    states: the pool; None on a model without recurrent layers.
    tracks: the tree gets states inside a text, which a request keeps in its buffers while its own state goes
    on. A later turn of a session has the row of its slot, is not inserted and has no buffers.
    """

    states: StateSlots | None
    tree: RadixTree | None
    tracks: bool
    page_size: int

    # -- a request's own slot ---------------------------------------------------------------------

    def begin_states(self, requests: Sequence[KVRequest]) -> None:
        """Give each request without a slot one with an empty state. The caller knows that enough are free."""
        if self.states is None:
            return
        for request in requests:
            if request.state is None:
                request.state = self.states.take()
                request.state_len = 0
                self.clear_new(request.state)
            if self.tracks:
                request.buffers = [(self.states.take(), 0) for _ in range(BUFFERS)]

    def clear_new(self, slot: int) -> None:
        """Reset a slot that another text has used to the empty state."""
        assert self.states is not None
        self.states.clear(slot)

    def fold(
        self, requests: Sequence[KVRequest], starts: Sequence[int], ends: Sequence[int]
    ) -> None:
        """Fold tokens starts[i] to ends[i] into the state of requests[i].

        Tokens past the text are accepted drafts, whose ids follow from their positions.
        """
        if self.states is None:
            return
        for request, start, end in zip(requests, starts, ends, strict=True):
            assert request.state is not None
            self.states.read[request.name] = self.states.stamps[request.state]
            text = request.text[start:end]
            text += [token_id(request.serial, p) for p in range(start + len(text), end)]
            boundary = self.tracked_end(start, end) if request.buffers else start
            self.states.fold(request.state, text[: boundary - start])
            if boundary > start:
                self.track(request, boundary)
            self.states.fold(request.state, text[boundary - start :])
            request.state_len = end

    def free_state(self, holder: KVRequest | Slot) -> None:
        """Give the slot of a holder back, and the buffers of a request."""
        if holder.state is not None:
            assert self.states is not None
            self.states.give(holder.state)
            holder.state = None
        if isinstance(holder, KVRequest):
            self.free_buffers(holder)

    # -- states that are kept for the tree --------------------------------------------------------

    def tracked_end(self, start: int, end: int) -> int:
        """Return the position of the state that a batch of [start, end) keeps: its last end of a page, or
        `start` where no page ends in it."""
        return max(end // self.page_size * self.page_size, start)

    def track(self, request: KVRequest, length: int) -> None:
        """Copy the state after `length` tokens into the buffer with the older state."""
        assert self.states is not None and request.state is not None
        slot, _ = request.buffers.pop(0)
        self.states.copy(request.state, slot)
        request.buffers.append((slot, length))

    def tracked_len(self, request: KVRequest, length: int) -> int:
        """Return the last position up to `length` at which a state is kept; `length` without tracking."""
        if not self.tracks:
            return length
        return max((tracked for _, tracked in request.buffers if tracked <= length), default=0)

    def take_tracked(self, request: KVRequest, length: int) -> int:
        """Hand the slot with the state after `length` tokens over to the tree."""
        slot, tracked_len = next(buffer for buffer in request.buffers if buffer[1] == length)
        request.buffers.remove((slot, tracked_len))
        return slot

    def free_buffers(self, request: KVRequest) -> None:
        """Give back the slots in which states are kept for the tree."""
        for slot, _ in request.buffers:
            assert self.states is not None
            self.states.give(slot)
        request.buffers = []

    # -- what is matched, restored and handed to the tree -----------------------------------------

    def require_state(self, request: KVRequest, node: TreeNode) -> None:
        """Refuse an admission behind `node` that finds no slot for its copy."""
        if self.states is None or node.parent is None:
            return
        assert self.tree is not None
        has_slot = request.state is not None or bool(self.states.free)
        require(has_slot or self.tree.evictable_states(node), Reason.OUT_OF_STATES)

    def match_state(self, request: KVRequest, node: TreeNode) -> None:
        """Have a request continue from a copy of the state of `node`, in a slot of its own."""
        if self.states is None:
            return
        self.free_state(request)
        if node.parent is None:
            return
        assert self.tree is not None and node.state is not None
        if not self.states.free:
            self.tree.evict(0, 0, 1)
        request.state = self.states.take()
        request.state_len = node.end
        self.copy_matched(node.state, request.state)

    def copy_matched(self, source: int, slot: int) -> None:
        """Copy the state of a node into a request's slot: the node keeps its own."""
        assert self.states is not None
        self.states.copy(source, slot)

    def state_resumes(self, slot: Slot, prefix: int) -> bool:
        """Return whether a slot's state is the one after `prefix` tokens. A state cannot be cut back to
        fewer."""
        return self.states is None or slot.state_len == prefix

    def rewind_state(self, slot: Slot, prefix: int, lock: NodeLock | None) -> None:
        """Set a slot back to the state at the end of the tree's prefix, or to the empty state without one."""
        if self.states is None or slot.state_len == prefix:
            return
        assert slot.state is not None
        tree_state = lock.node.state if lock is not None else None
        if tree_state is None:
            self.states.clear(slot.state)
        else:
            self.states.copy(tree_state, slot.state)
        slot.state_len = prefix

    def checkpoint(self, request: KVRequest) -> int | None:
        """Return a slot for the tree: with a copy of the request's state, or the one with the last state that
        the request keeps for the tree. The request takes another slot in the place of that one."""
        if self.states is None:
            return None
        assert request.state is not None
        slot = self.states.take()
        if self.tracks:
            tracked_slot = self.take_tracked(request, request.buffers[-1][1])
            request.buffers.insert(0, (slot, 0))
            return tracked_slot
        self.states.copy(request.state, slot)
        return slot

    def computed_state(self, key: Sequence[int]) -> int | None:
        """Return a new slot with the state after `key`, for an inserter that is no request."""
        if self.states is None:
            return None
        slot = self.states.take()
        self.states.clear(slot)
        self.states.fold(slot, key)
        return slot

    def donate(self, request: KVRequest, length: int) -> int | None:
        """Hand the slot with the state after `length` tokens of a finished request over to the tree."""
        if self.tracks:
            return self.take_tracked(request, length)
        slot = request.state
        request.state = None
        return slot

    def brings_state(self, request: KVRequest, length: int) -> bool:
        """Return whether a finished request has the state after all that it inserts, for others to resume
        from."""
        return self.states is None or self.tracks or request.state_len == length
