"""The rules of streaming sessions over a KVStore: lend, trim, save, evict, release.

Each rule is a method of its own, so that a named bug replaces one method by its faulty form. Rules of cursors
and ranges are arithmetic on ints and tensors alike: the host decides with ints, the device computes a whole
batch with tensors. Lengths are tokens; C, A, E, R stand for kv_committed_len,
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
    maximum,
    minimum,
    floor_divide,
)
from impl.torch_kv.requests import Holders, KVRequest, KVSession, Slot
from impl.torch_kv.states import StateRules
from impl.torch_kv.store import KVStore


class SessionRules(StateRules):
    """Rules of the row that a session's slot and its request share."""

    store: KVStore
    page_size: int
    window: int | None

    # Arithmetic

    def ceil(self, length: N) -> N:
        """Return `length` rounded up to whole pages."""
        return floor_divide(length + (self.page_size - 1), self.page_size) * self.page_size

    def floor(self, length: N) -> N:
        """Return `length` rounded down to whole pages."""
        return floor_divide(length, self.page_size) * self.page_size

    def window_live(self, evicted: int, position: int) -> bool:
        """Return whether the token at `position` finds the SWA KV of its window, [position - W, position)
        (SWA-2)."""
        if self.window is None:
            return True
        return evicted <= max(0, position - self.window)

    def evicted_end(self, cursors: RowCursors[int]) -> int:
        """Return the position below which SWA KV is evicted: E, or 0 if E lies in the tree's prefix.

        A window eviction starts at R, so E <= R means that none has happened; the lock pins the window
        before R.
        """
        _, _, evicted, protected = cursors
        return evicted if evicted > protected else 0

    # Cursors and pages of holders

    def table_of(self, holder: KVRequest | Slot) -> CursorTable:
        """Return the table of a holder's cursors."""
        return self.store.cursors if isinstance(holder, KVRequest) else self.store.slot_cursors

    def move(self, holders: Holders, rule: Rule, *arguments: list[int]) -> None:
        """Apply `rule` to the cursors of a batch of requests or slots, on the device and on the host."""
        self.table_of(holders[0]).move(Lanes(self.store.device, holders, *arguments), rule)

    def put(self, holder: KVRequest | Slot, cursors: RowCursors[int]) -> None:
        """Set the cursors of one holder, on the device and on the host."""
        self.table_of(holder).put(holder, cursors)

    def free_range(
        self, holder: KVRequest | Slot, ranges: Callable[..., tuple[Any, Any, Any]], *arguments: int
    ) -> None:
        """Free full pages [first, end) and SWA pages [swa_first, end) of a row, by page index.

        ranges: returns (first, swa_first, end) from cursors and the arguments. The device computes them from
        its own cursors; the host only counts the pages.
        """
        first, swa_first, end = ranges(holder.cursors, *arguments)
        full = max(end - first, 0)
        swa = max(end - swa_first, 0)
        if full:  # otherwise there is no SWA page to free either
            lanes = Lanes(self.store.device, [holder], *([value] for value in arguments))
            cursors = self.table_of(holder).read(lanes.row)
            self.store.free(lanes.row, *ranges(cursors, *lanes.columns), full, swa)

    # Trims: the rule of free_tail, trim_overshoot and retract

    def cap_cursors(self, cursors: RowCursors[N], target: N) -> RowCursors[N]:
        """Return the cursors with C, A and E capped at `target` (LEN-2, LEN-3): sgl-project/sglang#22862 and
        #22900."""
        committed, allocated, evicted, protected = cursors
        return RowCursors(
            minimum(committed, target),
            minimum(allocated, target),
            minimum(evicted, target),
            protected,
        )

    def cap_kept(self, cursors: RowCursors[N], target: N) -> RowCursors[N]:
        """Return the cursors, capped at `target`, of a turn that ends or is retracted."""
        return self.cap_cursors(cursors, target)

    def free_start(self, target: N) -> N:
        """Return the first position whose page is freed: the page that holds target - 1 stays (FREE-1)."""
        return self.ceil(target)

    def swa_free_start(self, target: N, evicted: N) -> N:
        """Return the first position whose SWA page is freed: a window eviction has freed those below E
        (FREE-2)."""
        return maximum(self.free_start(target), self.ceil(evicted))

    def beyond(self, cursors: RowCursors[N], target: N) -> tuple[N, N, N]:
        """Return the pages past `target`: first full page, first SWA page, end."""
        size = self.page_size
        return (
            floor_divide(self.free_start(target), size),
            floor_divide(self.swa_free_start(target, cursors.swa_evicted_seqlen), size),
            floor_divide(self.ceil(cursors.kv_allocated_len), size),
        )

    def free_beyond(self, holder: KVRequest | Slot, target: int) -> None:
        """Free the pages of a row past `target`. The cursors stay as they are."""
        self.free_range(holder, self.beyond, target)

    def trim_overshoot(self, request: KVRequest, target: int) -> None:
        """Free the pages of a finished turn past `target`, and cap its cursors (sgl-project/sglang#22897)."""
        self._trim(request, target)

    def drop_overallocated(self, request: KVRequest, target: int) -> None:
        """Free what a retracted turn has allocated ahead, and cap its cursors (sgl-project/sglang#22213 does
        not)."""
        self._trim(request, target)

    def _trim(self, request: KVRequest, target: int) -> None:
        self.free_beyond(request, target)
        self.move([request], self.cap_kept, [target])

    # Admission

    def slot_of(self, request: KVRequest) -> Slot | None:
        """Return the slot that an admission of `request` restores, if there is one."""
        return request.session.slot if request.session is not None else None

    def key_length(self, request: KVRequest) -> int:
        """Return the number of tokens that a prefix may cover: all but the last, whose logits are needed."""
        return len(request.text) - 1

    def resume_length(self, request: KVRequest, key_length: int) -> int:
        """Return the length of the prefix to resume behind: C, or R if the window before C is evicted
        (SWA-2) or the state is of another length (STA-2)."""
        slot = self.slot_of(request)
        assert slot is not None
        prefix = min(slot.cursors.kv_committed_len, key_length)
        if self.window_live(self.evicted_end(slot.cursors), prefix) and self.state_resumes(
            slot, prefix
        ):
            return prefix
        return slot.cursors.cache_protected_len

    def free_tail(self, slot: Slot, prefix: int) -> None:
        """Free the pages of a slot past the prefix, before an extend overwrites the row there, and cap the
        slot's cursors (LEN-3, sgl-project/sglang#22862)."""
        self.free_beyond(slot, prefix)
        self.move([slot], self.cap_cursors, [prefix])

    def lend(self, request: KVRequest, slot: Slot) -> None:
        """Give the request its slot's row and a copy of the slot's cursors."""
        request.row = slot.row
        request.state = slot.state
        request.state_len = slot.state_len
        self.store.cursors.copy(self.store.slot_cursors, request, slot)

    # Window eviction

    def eviction_reach(self, cursors: RowCursors[int], length: int) -> int:  # noqa: ARG002
        """Return the position up to which a window eviction at `length` frees: a page less than the window
        allows (SWA-1)."""
        assert self.window is not None
        return self.floor(length - self.window - self.page_size)

    def cursors_after_eviction(self, cursors: RowCursors[N], reach: N) -> RowCursors[N]:
        """Return the cursors after a window eviction: E is `reach`, unless it was past that."""
        committed, allocated, evicted, protected = cursors
        return RowCursors(
            committed, allocated, maximum(maximum(evicted, protected), reach), protected
        )

    def eviction_start(self, cursors: RowCursors[N]) -> N:
        """Return the first position whose SWA page is the row's own: those before R are the tree's.

        It is a page boundary: E lies inside a page only in slots, where a trim has capped it (`prove
        frontier`).
        """
        return maximum(cursors.swa_evicted_seqlen, cursors.cache_protected_len)

    def evict_window(self, request: KVRequest, length: int) -> None:
        """Free the SWA pages of a row between E and its new value."""
        size = self.page_size
        reach = self.eviction_reach(request.cursors, length)
        window_begin = self.eviction_start(request.cursors)
        frontier = self.cursors_after_eviction(request.cursors, reach)[2]
        pages = len(range(window_begin, frontier, size))
        lanes = Lanes(self.store.device, [request], [reach])
        before, after = self.store.cursors.move(lanes, self.cursors_after_eviction)
        if pages:
            start = floor_divide(self.eviction_start(before), size)
            self.store.free_swa(lanes.row, start, floor_divide(after.swa_evicted_seqlen, size), pages)

    # Save and release

    def save(self, session: KVSession, request: KVRequest) -> None:
        """Move the request's row, cursors and state to the session's slot (SES-2)."""
        assert request.row is not None
        session.slot = Slot(request.row, state=request.state, state_len=request.state_len)
        request.state = None
        self.free_buffers(request)
        self.store.slot_cursors.copy(self.store.cursors, session.slot, request)
        self.detach(request)

    def detach(self, request: KVRequest) -> None:
        """Take row and cursors from the request. The row's cursors are 0 for its next request."""
        if request.row is not None:
            self.put(request, ZERO)
        request.row = None

    def release(self, holder: KVRequest | Slot) -> None:
        """Free a row and its pages (FREE-1, FREE-2, OWN-4). Call it once per row."""
        assert holder.row is not None
        self.release_pages(holder)
        self.store.free_rows.append(holder.row)

    def release_pages(self, holder: KVRequest | Slot) -> None:
        """Free all pages of a row."""
        self.free_range(holder, self.owned_pages)

    def owned_pages(self, cursors: RowCursors[N]) -> tuple[N, N, N]:
        """Return full pages [R, A) and SWA pages [max(R, E), A): first full page, first SWA page, end."""
        size = self.page_size
        _, allocated, evicted, protected = cursors
        evicted = maximum(protected, self.ceil(evicted))
        end = floor_divide(self.ceil(allocated), size)
        return floor_divide(protected, size), floor_divide(evicted, size), end

    def holder_of_session(self, session: KVSession, request: KVRequest) -> KVRequest | Slot | None:
        """Return the holder of a session's KV: the turn that borrows it, or the slot."""
        return request if request.row is not None else session.slot

    def wipes(self, request: KVRequest) -> bool:
        """Return whether an abort of `request` frees its session's KV: the turn has written some."""
        return request.started
