"""Recurrent state of a server whose tree keeps the state at the end of a text alone (no_buffer), or states
that are tracked while their request goes on (extra_buffer).

Slots and nodes are the release's own: `HybridReqToTokenPool`, `MambaSlotAllocator`, the MAMBA component of
its tree. A slot holds a stamp (reference.recurrent_states), in the pool's own tensor, so that the release's
copies move it. Stand-ins, each after what a server does: the forward pass (`fold`, `kept_state`), what the
worker does before it (`run_deferred`: ModelRunner, model_runner.py:1920 in 0.5.23), and what the scheduler
does with the slot of a request that it has matched and does not run (`revert_match`: scheduler.py:4285).

A server has slots enough for every request that runs (kv_cache_configurator.py). A run of kvspec has fewer:
what would find none is refused before anything moves. With a second slot on demand (extra_buffer_lazy) a
decode takes it if it is there, so the server's own number for a request is kept free of others instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from impl.lazy import torch

from impl.adapter import StatesView
from impl.loading.optional import optional
from impl.sglang.parts.stand_ins import state_chunk
from impl.sglang.parts.tracking import buffers_of, tracked_states
from impl.vocabulary import require
from reference.commands import Reason
from reference.recurrent_states import chained, stamp_after

if TYPE_CHECKING:
    from impl.sglang.parts.trees import ReleaseTree


# With a second slot on demand: a request's own, one for the tree, the second, and the node that it locks
# (_calculate_mamba_ratio of kv_cache_configurator.py).
LAZY_RATIO = 4


class States:
    """The slots of one server.

    read: request of the last batch -> the stamp from which it went on.
    bearers: counts the holders that may have slots, on a server that takes the second slot on demand; else
        None.
    """

    def __init__(
        self, rows: Any, tree: ReleaseTree | None, bearers: Callable[[], int] | None = None
    ) -> None:
        self.rows = rows
        self.tree = tree
        self.bearers = bearers
        self.read: dict[str, int] = {}

    # -- questions before a command ---------------------------------------------------------------

    @property
    def buffers(self) -> int:
        """Slots that a request takes with its row, besides the one of its own."""
        return int(self.rows.mamba_initial_tracking_slots)

    def slots_left(self) -> int:
        """Return the number of slots that are free or evictable."""
        evictable = 0 if self.tree is None else self.tree.cache.mamba_evictable_size()
        return int(self.rows.mamba_allocator.available_size()) + int(evictable)

    def has_slots(self, slots: int, more: int = 1) -> bool:
        """Return whether that many slots are free or evictable.

        more: requests to come, each of which needs LAZY_RATIO slots where the second slot is on demand;
            `slots` does not count then.
        """
        if self.bearers is not None:
            size = int(self.rows.mamba_pool.size)
            return LAZY_RATIO * (self.bearers() + more) <= size
        return slots <= self.slots_left()

    def require(self, slots: int, more: int = 1) -> None:
        require(self.has_slots(slots, more), Reason.OUT_OF_STATES)

    def require_for_match(self, req: Any, lent: bool, owed: int, new: bool) -> None:
        """Refuse an admission that may find no slot for its copy: the state that it matches must stay.

        lent: the request runs on the slot of its session.
        owed: slots that the tree gets.
        new: it waited without a slot until now.
        """
        if self.bearers is not None:
            self.require(0, int(new))
            return
        if req.kv.holds_mamba or self.rows.mamba_allocator.available_size() > owed:
            return
        require(lent or self.tree is None or self.slots_left() > 1 + owed, Reason.OUT_OF_STATES)

    def require_for_prefill(self, reqs: Sequence[Any], copies: int) -> None:
        """Refuse a batch without enough slots for its requests that have none, and for the tree's copies.

        copies: number of states that the tree gets.
        """
        without = sum(req.kv.mamba_ping_pong_track_buffer is None for req in reqs)
        slots = sum(not req.kv.holds_mamba for req in reqs) + self.buffers * without + copies
        self.require(slots, 0)

    # -- what a server does -----------------------------------------------------------------------

    def revert_match(self, req: Any) -> None:
        """Undo the match of a request that the scheduler does not run."""
        req.kv.mamba_cow_src_index = None
        req.kv.mamba_needs_clear = False
        if req.kv.holds_mamba and not optional(req, "Req.session"):
            self.free_slot(req)

    def free_slot(self, req: Any) -> None:
        self.rows.mamba_allocator.free(req.kv.mamba_pool_idx.unsqueeze(-1))
        req.kv.mamba_pool_idx = None
        if req.kv.mamba_ping_pong_track_buffer is not None:
            buffer = req.kv.mamba_ping_pong_track_buffer
            self.rows.mamba_allocator.free(buffer[buffer >= 0])
            req.kv.mamba_ping_pong_track_buffer = None

    def run_deferred(self, batch: Any) -> None:
        """Carry out the clears and copies that a prefill has deferred to its forward pass."""
        pool = self.rows
        if batch.mamba_clear_indices is not None:
            pool.mamba_pool.clear_slots(pool.translate_mamba_indices(batch.mamba_clear_indices))
        if batch.mamba_cow_src_indices is not None:
            source = pool.translate_mamba_indices(batch.mamba_cow_src_indices)
            pool.copy_mamba_state(source, pool.translate_mamba_indices(batch.mamba_cow_dst_indices))
        batch.mamba_clear_indices = batch.mamba_cow_src_indices = batch.mamba_cow_dst_indices = None

    def fold(
        self, name: str, row: Any, tokens: Sequence[int], kept: tuple[int, int] = (-1, 0)
    ) -> list[int]:
        """Fold these tokens into a request's state, as the recurrent layers of a forward pass do. Returns
        the state's stamp after each.

        kept: the slot that also gets one of these states, and the number of tokens before it; 0 for none.
        """
        slot, self.read[name] = self.stamp_of(row)
        stamps = chained(tokens, self.read[name])
        self.cells[slot] = stamps[-1]
        if kept[1] > 0:
            self.put(kept[0], stamps[kept[1] - 1])
        return stamps

    def stamp_of(self, row: Any) -> tuple[int, int]:
        """Return the slot that a row leads to, and the stamp in it."""
        slot = int(self.rows.get_mamba_indices(row))
        return slot, int(self.cells[slot])

    def put(self, slot: int, stamp: int) -> None:
        """Write a state's stamp into a slot; -1 is no slot."""
        if slot != -1:
            self.cells[slot] = stamp

    def kept_state(self, batch: Any, index: int, start: int, end: int) -> tuple[int, int]:
        """Return the slot that gets a state for the tree, and the number of the entry's tokens before it.

        (0, 0) if the batch tracks no state of the entry. A decode counts all tokens, a prefill whole chunks
        (_init_track_ssm_indices).

        index: the entry in the batch, which computes [start, end).
        """
        if batch.mamba_track_mask is None or not batch.mamba_track_mask[index]:
            return 0, 0
        count = end - start
        if batch.mamba_track_seqlens is not None:
            tracked_count = int(batch.mamba_track_seqlens[index]) - start
            chunk = state_chunk()
            count = tracked_count // chunk * chunk if tracked_count % chunk else count
        return int(batch.mamba_track_indices[index]), count

    def compute(self, req: Any, tokens: Sequence[int], tracked: int) -> None:
        """Give a lock holder a slot with the state after these tokens.

        tracked: number of tokens before the state that a tracking server keeps for the tree; 0 for none.
        """
        new = req.kv.mamba_ping_pong_track_buffer is None
        needed = 0 if req.kv.holds_mamba else 1
        if new:
            needed += self.buffers
        missing = needed - self.rows.mamba_allocator.available_size()
        if missing > 0:
            assert self.tree is not None
            self.tree.evict(0, 0, missing)
        if not req.kv.holds_mamba:
            slots = self.rows.mamba_allocator.alloc(1)
            if slots is None:
                raise RuntimeError("no slot for a state: fewer were evicted than counted as evictable")
            req.kv.mamba_pool_idx = slots[0]
        stamps = chained(tokens)
        self.cells[int(req.kv.mamba_pool_idx)] = stamp_after(stamps, len(tokens))
        if self.buffers:
            if new:
                self.rows._alloc_ping_pong_buffer(req)
            buffer = req.kv.mamba_ping_pong_track_buffer
            track_index = req.kv.mamba_last_track_idx
            self.rows.req_index_to_mamba_ping_pong_track_buffer_mapping[req.kv.req_pool_idx] = buffer
            req.kv.mamba_last_track_seqlen = tracked or None
            if tracked:
                self.cells[int(buffer[track_index])] = stamp_after(stamps, tracked)

    # -- looking ----------------------------------------------------------------------------------

    @property
    def cells(self) -> Any:
        """A stamp for each slot: the first bytes of its state in the first layer."""
        state = self.rows.mamba_pool.mamba_cache.temporal[0]
        return state.flatten(1).view(torch.int64)[:, 0]

    def view(
        self,
        requests: Mapping[str, Any],
        sessions: Mapping[str, Any],
        reached: Mapping[str, tuple[int, int]],
        verifies: bool,
    ) -> StatesView:
        """Return the slots of recurrent state as the view shows them.

        requests, sessions: the KV record (`kv`) of each holder, by its name.
        reached, verifies: see StatesView.
        """
        return StatesView(
            free=self.rows.mamba_allocator.free_slots.tolist(),
            stamps=self.cells.tolist(),
            requests={
                name: int(kv.mamba_pool_idx) for name, kv in requests.items() if kv.holds_mamba
            },
            sessions={
                name: int(kv.mamba_pool_idx) for name, kv in sessions.items() if kv.holds_mamba
            },
            read=self.read,
            reached=reached,
            verifies=verifies,
            buffers={name: buffers_of(kv) for name, kv in [*requests.items(), *sessions.items()]},
            tracked={name: tracked_states(kv) for name, kv in [*requests.items(), *sessions.items()]},
        )
