"""The rules of streaming sessions over a KVStore: lend, trim, save, evict, release.

Each rule is a method of its own, so that a named bug is one method put back as it once was. Rules of
cursors and ranges are arithmetic that holds for ints and tensors alike: on the host they decide, on
the device they do it for a whole batch. Lengths are tokens; C, A, E, R stand for kv_committed_len,
kv_allocated_len, swa_evicted_seqlen and cache_protected_len, P for the page size, W for the window.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from impl.torch_kv.cursors import (
    ZERO,
    CursorTable,
    Lanes,
    N,
    RowCursors,
    Rule,
    larger,
    smaller,
    whole,
)
from impl.torch_kv.requests import Holders, KVRequest, KVSession, Slot
from impl.torch_kv.states import StateRules
from impl.torch_kv.store import KVStore


class SessionRules(StateRules):
    """Lending, trimming, evicting and release, each of one row."""

    store: KVStore
    page_size: int
    window: int | None

    # Arithmetic.

    def ceil(self, length: N) -> N:
        """`length` rounded up to whole pages."""
        return whole(length + (self.page_size - 1), self.page_size) * self.page_size

    def floor(self, length: N) -> N:
        """`length` rounded down to whole pages."""
        return whole(length, self.page_size) * self.page_size

    def window_live(self, evicted: int, position: int) -> bool:
        """Whether the SWA KV that the token at `position` needs is there (SWA-2).

        That is its window, [position - W, position).
        """
        if self.window is None:
            return True
        return evicted <= max(0, position - self.window)

    def lost_below(self, cursors: RowCursors[int]) -> int:
        """Positions below this have no SWA KV any more: E, unless it lies in the tree's prefix.

        A window eviction starts at R, so E <= R says that nothing was evicted; the window behind R is locked.
        """
        _, _, evicted, protected = cursors
        return evicted if evicted > protected else 0

    # Cursors and pages of holders.

    def table_of(self, holder: KVRequest | Slot) -> CursorTable:
        """Return the table of a holder's cursors."""
        return self.store.cursors if isinstance(holder, KVRequest) else self.store.slot_cursors

    def move(self, holders: Holders, rule: Rule, *arguments: list[int]) -> None:
        """Move the cursors of a batch (requests, or slots) by `rule`, on the device and in the mirror."""
        self.table_of(holders[0]).move(Lanes(self.store.device, holders, *arguments), rule)

    def put(self, holder: KVRequest | Slot, cursors: RowCursors[int]) -> None:
        """Set the cursors of one holder, on the device and in the mirror."""
        self.table_of(holder).put(holder, cursors)

    def free_range(
        self, holder: KVRequest | Slot, ranges: Callable[..., tuple[Any, Any, Any]], *arguments: int
    ) -> None:
        """Free pages of a row in one pass: [first, end) and SWA [swa_first, end), by page index.

        ranges: gives (first, swa_first, end) from cursors and the arguments. The device computes them
        from its own cursors; the host only counts the pages, or finds none to free.
        """
        first, swa_first, end = ranges(holder.cursors, *arguments)
        full, swa = max(end - first, 0), max(end - swa_first, 0)
        if full:  # for no SWA page goes without its full page
            lanes = Lanes(self.store.device, [holder], *([value] for value in arguments))
            cursors = self.table_of(holder).read(lanes.row)
            self.store.free(lanes.row, *ranges(cursors, *lanes.columns), full, swa)

    # Cutting back: the one rule behind free_tail, trim_overshoot and retract.

    def capped(self, cursors: RowCursors[N], target: N) -> RowCursors[N]:
        """C, A and E at most `target` (LEN-2, LEN-3): sgl-project/sglang#22862 and #22900."""
        committed, allocated, evicted, protected = cursors
        return RowCursors(
            smaller(committed, target),
            smaller(allocated, target),
            smaller(evicted, target),
            protected,
        )

    def capped_kept(self, cursors: RowCursors[N], target: N) -> RowCursors[N]:
        """As `capped`, for a turn that ends or is retracted."""
        return self.capped(cursors, target)

    def free_start(self, target: N) -> N:
        """First token position whose page goes: the page that holds target - 1 stays (FREE-1)."""
        return self.ceil(target)

    def swa_free_start(self, target: N, evicted: N) -> N:
        """First token position whose SWA page goes. Pages below E went with a window eviction (FREE-2)."""
        return larger(self.free_start(target), self.ceil(evicted))

    def beyond(self, cursors: RowCursors[N], target: N) -> tuple[N, N, N]:
        """Pages past `target`: from where in the full pool, from where in the SWA pool, to where."""
        size = self.page_size
        return (
            whole(self.free_start(target), size),
            whole(self.swa_free_start(target, cursors.swa_evicted_seqlen), size),
            whole(self.ceil(cursors.kv_allocated_len), size),
        )

    def free_beyond(self, holder: KVRequest | Slot, target: int) -> None:
        """Free the pages of a row past `target`. Caps nothing."""
        self.free_range(holder, self.beyond, target)

    def trim_overshoot(self, request: KVRequest, target: int) -> None:
        """Finish: what lies past the target is freed and no longer counts (sgl-project/sglang#22897)."""
        self._trim(request, target)

    def drop_overallocated(self, request: KVRequest, target: int) -> None:
        """Retract: the same for what was allocated ahead (left open by sgl-project/sglang#22213)."""
        self._trim(request, target)

    def _trim(self, request: KVRequest, target: int) -> None:
        self.free_beyond(request, target)
        self.move([request], self.capped_kept, [target])

    # Admission.

    def slot_of(self, request: KVRequest) -> Slot | None:
        """The slot that an admission of `request` restores, if any."""
        return request.session.slot if request.session is not None else None

    def key_length(self, request: KVRequest) -> int:
        """Tokens that a prefix may cover: all but the last, which is recomputed for its logits."""
        return len(request.text) - 1

    def resume_length(self, request: KVRequest, key_length: int) -> int:
        """Prefix to resume at: what is committed, or R if the window there is gone (SWA-2) or the state is of
        another length (STA-2)."""
        slot = self.slot_of(request)
        assert slot is not None
        prefix = min(slot.cursors.kv_committed_len, key_length)
        if self.window_live(self.lost_below(slot.cursors), prefix) and self.state_resumes(
            slot, prefix
        ):
            return prefix
        return slot.cursors.cache_protected_len

    def free_tail(self, slot: Slot, prefix: int) -> None:
        """Free what a slot holds past the prefix, before an extend overwrites the row entries.

        sgl-project/sglang#22862. All three cursors of the slot are capped (LEN-3).
        """
        self.free_beyond(slot, prefix)
        self.move([slot], self.capped, [prefix])

    def lend(self, request: KVRequest, slot: Slot) -> None:
        """Give the request its slot's row and a copy of the slot's cursors."""
        request.row = slot.row
        request.state, request.state_len = slot.state, slot.state_len
        self.store.cursors.copy(self.store.slot_cursors, request, slot)

    # Window eviction.

    def eviction_reach(self, cursors: RowCursors[int], length: int) -> int:  # noqa: ARG002
        """How far the policy evicts when driven with `length`: a page short of the window (SWA-1)."""
        assert self.window is not None
        return self.floor(length - self.window - self.page_size)

    def evicted(self, cursors: RowCursors[N], reach: N) -> RowCursors[N]:
        """E after a window eviction: up to `reach`, never back."""
        committed, allocated, evicted, protected = cursors
        return RowCursors(
            committed, allocated, larger(larger(evicted, protected), reach), protected
        )

    def eviction_start(self, cursors: RowCursors[N]) -> N:
        """From where on the row has SWA pages of its own: what lies before R is the tree's.

        A page boundary: E lies inside a page in slots alone, where a cut has capped it (`prove frontier`).
        """
        return larger(cursors.swa_evicted_seqlen, cursors.cache_protected_len)

    def evict_window(self, request: KVRequest, length: int) -> None:
        """Free the SWA pages [E, new E) of a row."""
        size = self.page_size
        reach = self.eviction_reach(request.cursors, length)
        first = self.eviction_start(request.cursors)
        frontier = self.evicted(request.cursors, reach)[2]
        pages = len(range(first, frontier, size))
        lanes = Lanes(self.store.device, [request], [reach])
        before, after = self.store.cursors.move(lanes, self.evicted)
        if pages:
            start = whole(self.eviction_start(before), size)
            self.store.free_swa(lanes.row, start, whole(after.swa_evicted_seqlen, size), pages)

    # Saving, wiping, releasing.

    def save(self, session: KVSession, request: KVRequest) -> None:
        """The session's slot takes the request's row and cursors (SES-2)."""
        assert request.row is not None
        session.slot = Slot(request.row, state=request.state, state_len=request.state_len)
        request.state = None
        self.free_buffers(request)
        self.store.slot_cursors.copy(self.store.cursors, session.slot, request)
        self.detach(request)

    def detach(self, request: KVRequest) -> None:
        """The request lets go of its row and cursors; whoever takes the row next starts at 0."""
        if request.row is not None:
            self.put(request, ZERO)
        request.row = None

    def release(self, holder: KVRequest | Slot) -> None:
        """Give everything of a row back: its pages, and the row, once (FREE-1, FREE-2, OWN-4)."""
        assert holder.row is not None
        self.release_pages(holder)
        self.store.free_rows.append(holder.row)

    def release_pages(self, holder: KVRequest | Slot) -> None:
        """Free all pages of a row."""
        self.free_range(holder, self.owned)

    def owned(self, cursors: RowCursors[N]) -> tuple[N, N, N]:
        """Full pages [R, A) and SWA pages [max(R, E), A), as `beyond` gives them."""
        size = self.page_size
        _, allocated, evicted, protected = cursors
        evicted = larger(protected, self.ceil(evicted))
        return whole(protected, size), whole(evicted, size), whole(self.ceil(allocated), size)

    def held_by(self, session: KVSession, request: KVRequest) -> KVRequest | Slot | None:
        """Return the holder of a session's KV: its turn, which borrows it, or its slot."""
        return request if request.row is not None else session.slot

    def wipes(self, request: KVRequest) -> bool:
        """Whether an abort of `request` takes its session's KV along: it has written some."""
        return request.started
