"""The physical side: rows of req_to_token, both pools, the mapping between them, cursors of rows.

Every method takes a batch as tensors on the device, one element per batch entry, and the few totals that size
a result as host ints (the mirror of the cursors knows them). So no method waits for the device, and
all device work is a fixed number of operators per call.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from impl.torch_kv.cursors import CursorTable, N, whole
from impl.lazy import Tensor, torch
from impl.torch_kv.pool import PagePool
from reference.memoization import memoized
from reference.geometry import Geometry


def each(values: Tensor, count: Tensor, total: int) -> Tensor:
    """values[i] count[i] times, of every entry, end to end: int64 [total], or [1] of a single entry.

    values, count: int64 [B] on one device; total: sum of count, known on the host so that nothing waits
    for the device.
    """
    return (
        values if values.numel() == 1 else torch.repeat_interleave(values, count, output_size=total)
    )


def ragged(start: Tensor, count: Tensor, total: int, step: int = 1) -> Tensor:
    """start[i], start[i] + step, ... of all entries, count[i] each, end to end: int64 [total]; see each."""
    steps = torch.arange(0, total * step, step, dtype=torch.int64, device=start.device)
    if start.numel() > 1:
        start = start - (count.cumsum(0) - count) * step
    return steps.add_(each(start, count, total))


class BatchSpan:
    """Token positions of a batch, end to end: counts[i] from start[i] on in each row, of `width` cells.

    row, start, count: int64 [B]; count None for one each. What torch operators need is worked out on first
    use: kernels do without.
    """

    def __init__(
        self, row: Tensor, width: int, start: Tensor, count: Tensor | None, counts: list[int]
    ) -> None:
        self._row, self._width, self._start, self._count, self.counts = (
            row,
            width,
            start,
            count,
            counts,
        )

    @memoized
    def origin(self) -> Tensor:
        """Return the cell of position 0 of each entry in req_to_token laid flat: int64 [B]."""
        return self._row * self._width

    @memoized
    def first(self) -> Tensor:
        """Return the cell of the first position of each entry there: int64 [B]."""
        return self.origin + self._start

    @memoized
    def cell(self) -> Tensor:
        """Return the cells of the positions there: int64 [T]."""
        return (
            self.first if self._count is None else ragged(self.first, self._count, sum(self.counts))
        )

    def each(self, values: Tensor) -> Tensor:
        """Repeat the value of an entry, int64 [B], for each of its count[i] positions: as `each`."""
        assert self._count is not None
        return each(values, self._count, sum(self.counts))


class KVStore:
    """Pools, rows, mapping and cursors of one geometry.

    req_to_token: int32 [rows, width] on `device`: position -> full slot.
    full_to_swa: int64 [(full_pages + 1) * page_size] on `device`: full slot -> SWA slot, 0 for none;
        empty without SWA.
    full, swa: the pools (`swa` None without SWA); pools: those there are, in this order.
    cursors: of the requests that use the rows. slot_cursors: of the sessions' slots that name them; a
        slot lent to a request keeps its cursors as they were then, hence a second table.
    free_rows: host list of rows that nobody holds; the next one handed out is the last. Their cursors are 0.
    use_kernel: Triton kernels allocate and free, instead of torch operators.
    """

    pool_class = PagePool

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        size = geometry.page_size
        self.page_size = size
        self.width = geometry.width
        self.device = device
        self.full = self.pool_class(geometry.full_pages, size, device)
        self.pools = [self.full]
        self.swa: PagePool | None = None
        slots = 0
        if geometry.window is not None:
            self.swa = self.pool_class(geometry.swa_pages, size, device)
            self.pools.append(self.swa)
            slots = (geometry.full_pages + 1) * size
        self.full_to_swa = torch.zeros(slots, dtype=torch.int64, device=device)
        self.req_to_token = torch.zeros(
            (geometry.rows, geometry.width), dtype=torch.int32, device=device
        )
        self._cells = self.req_to_token.view(-1)
        self._offsets = torch.arange(size, dtype=torch.int64, device=device)
        self.cursors = CursorTable(geometry.rows, device)
        self.slot_cursors = CursorTable(geometry.rows, device)
        self.free_rows = list(range(geometry.rows - 1, -1, -1))
        # A kernel is this class's rules in one piece; a subclass that changes one takes the torch path.
        triton = device.type == "cuda" and importlib.util.find_spec("triton") is not None
        self.use_kernel = triton and type(self) is KVStore

    @property
    def _kernels(self) -> Any:
        """Triton is imported where its kernels are used."""
        from impl.torch_kv import kernels

        return kernels

    # Positions.

    def span(self, row: Tensor, start: Tensor, count: Tensor, counts: list[int]) -> BatchSpan:
        """Positions [start[i], start[i] + count[i]) of each row. counts: count as the host knows it."""
        return BatchSpan(row, self.width, start, count, counts)

    def span_of_one(self, row: Tensor, start: Tensor) -> BatchSpan:
        """Position start[i] of each row."""
        return BatchSpan(row, self.width, start, None, [1] * row.numel())

    # Allocation. Arithmetic on single entries (ints) and batches (tensors) alike.

    def open_index(self, start: N) -> N:
        """Index of the first page that an allocation from position `start` on takes anew (OWN-5)."""
        return whole(start + (self.page_size - 1), self.page_size)

    def pages(self, starts: Sequence[int], ends: Sequence[int]) -> int:
        """Pages that positions [starts[i], ends[i]) take anew: the open page is filled first."""
        size = self.page_size
        if size == 1:
            return sum(ends) - sum(starts)
        return sum([-(-end // size) for end in ends]) - sum(
            [self.open_index(start) for start in starts]
        )

    def alloc_extend(
        self, row: Tensor, start: Tensor, end: Tensor, span: BatchSpan, pages: int
    ) -> Tensor:
        """Slots in both pools for positions [start[i], end[i]) of each row; fills rows and mapping.

        span: those positions, pages: the pages they take; an empty range takes nothing. Returns the
        full slots, int64 [T]. Raises OutOfPagesError.
        """
        size = self.page_size
        if self.use_kernel:
            filled: Tensor = self._kernels.fill(self, row, start, end, 0, span.counts, pages)
            return filled
        if size == 1:
            return self._enter(span, *(self._take(pool, start, end, pages) for pool in self.pools))
        # A table of pages in the order of positions: of each entry the one that may be open, then new ones.
        lanes, opened = row.numel(), self.open_index(start)
        begin = 1 - opened
        if lanes > 1:
            fresh = whole(end + (size - 1), size) - opened
            lane = torch.arange(lanes, dtype=torch.int64, device=self.device)
            first = fresh.cumsum(0) - fresh + lane
            new = torch.arange(1, pages + 1, dtype=torch.int64, device=self.device)
            new.add_(each(lane, fresh, pages))
            begin += first
        # From a cell to its place among the slots of these pages.
        place = span.cell + span.each(begin * size - span.origin)
        slots = []
        for pool, last in zip(self.pools, self._last(span.first)):
            last_page, taken = whole(last, size), self._take(pool, start, end, pages)
            if lanes == 1:
                table = torch.cat((last_page, taken))
            else:
                table = torch.empty(lanes + pages, dtype=torch.int64, device=self.device)
                table.put_(first, last_page).put_(new, taken)
            slots.append(self._slots_of(table).take(place))
        return self._enter(span, *slots)

    def alloc_decode(self, row: Tensor, start: Tensor, span: BatchSpan, pages: int) -> Tensor:
        """One slot in both pools at position start[i] of each row: alloc_extend by one token."""
        size = self.page_size
        if self.use_kernel:
            filled: Tensor = self._kernels.fill(self, row, start, start, 1, span.counts, pages)
            return filled
        if pages == row.numel():
            return self._enter(span, *(pool.take(pages) * size for pool in self.pools))
        slots = [last + 1 for last in self._last(span.first)]
        if pages:
            full = start % size == 0
            for after, pool in zip(slots, self.pools):
                after.masked_scatter_(full, pool.take(pages) * size)
        return self._enter(span, *slots)

    def alloc_tail(
        self,
        full: BatchSpan,
        tail: BatchSpan,
        start: Tensor,
        live: Tensor,
        end: Tensor,
        pages: list[int],
    ) -> Tensor:
        """Full slots for positions [start[i], end[i]) of each row, SWA slots for [live[i], end[i]) alone: new
        pages of either pool, so many; start and live are where a page begins.

        full, tail: those positions. Returns the full slots, int64 [T].
        """
        assert self.swa is not None
        slots = self._new(self.full, full, start, end, pages[0])
        self.name(full, slots)
        self._map(self.slots(tail), self._new(self.swa, tail, live, end, pages[1]))
        return slots

    def _new(
        self, pool: PagePool, span: BatchSpan, start: Tensor, end: Tensor, pages: int
    ) -> Tensor:
        """Slots of `pages` new pages of a pool for the positions of `span`."""
        size = self.page_size
        first = whole(start, size)
        fresh = whole(end + (size - 1), size) - first
        skip = (fresh.cumsum(0) - fresh - first) * size - span.origin
        return self._slots_of(pool.take(pages)).take(span.cell + span.each(skip))

    def _take(self, pool: PagePool, start: Tensor, end: Tensor, pages: int) -> Tensor:  # noqa: ARG002
        """`pages` new pages of a pool for positions [start[i], end[i]) of every entry, end to end."""
        return pool.take(pages)

    def _last(self, cell: Tensor) -> Iterator[Tensor]:
        """Slots in each pool of what stands before `cell`, int64 [B]. Before position 0 that is round the
        corner, and unused."""
        last = self._cells.take(cell - 1).long()
        yield last
        if self.swa is not None:
            yield self.full_to_swa.take(last)

    def _slots_of(self, pages: Tensor) -> Tensor:
        """All slots of `pages`, int64 [n]: int64 [n * page_size]."""
        return (pages.unsqueeze(1) * self.page_size + self._offsets).view(-1)

    def _enter(self, span: BatchSpan, slots: Tensor, swa_slots: Tensor | None = None) -> Tensor:
        """Enter slots for the positions of `span`, int64 [T], in rows and mapping. Returns the full ones."""
        if swa_slots is not None:
            self._map(slots, swa_slots)
        self.name(span, slots)
        return slots

    def _map(self, slots: Tensor, swa_slots: Tensor) -> None:
        """Enter the SWA slots of newly allocated full slots."""
        self.full_to_swa.put_(slots, swa_slots)

    def alloc_pages(self, pages: int) -> Tensor:
        """`pages` pages of each pool that no row names: their full slots, int64 [pages * page_size].

        Raises OutOfPagesError, as alloc_extend.
        """
        slots = [self._slots_of(pool.take(pages)) for pool in self.pools]
        if self.swa is not None:
            self._map(*slots)
        return slots[0]

    def name(self, span: BatchSpan, slots: Tensor) -> None:
        """Rows name full slots `slots`, int64 [T], at the positions of `span`; nothing is taken or freed."""
        self._cells.put_(span.cell, slots.int())

    # Contents.

    def slots(self, span: BatchSpan) -> Tensor:
        """Full slots of the positions of `span`: int64 [T]."""
        return self._cells.take(span.cell).long()

    def write(self, slots: Tensor, tokens: Tensor) -> None:
        """KV of `tokens` to full slots `slots` and their SWA slots, int64 [T] each.

        The SWA side is found through the mapping, as attention kernels find it: an entry 0 sends the
        write to the padding slot.
        """
        self.full.stamps.put_(slots, tokens)
        if self.swa is not None:
            self.swa.stamps.put_(self._swa_slots(slots), tokens)

    def _swa_slots(self, slots: Tensor) -> Tensor:
        """SWA slots that a write to these full slots goes to."""
        return self.full_to_swa.take(slots)

    # Freeing. Ranges are pages by index in the sequence: [first, end) of each row.

    def free(
        self, row: Tensor, first: Tensor, swa_first: Tensor, end: Tensor, pages: int, swa_pages: int
    ) -> None:
        """Free full pages [first, end) and SWA pages [swa_first, end) of each row.

        pages, swa_pages: how many that is. The mapping of a freed full page is cleared whole.
        """
        # for no SWA page goes without its full page
        same = self.swa is not None and pages == swa_pages
        if self.use_kernel:
            self._kernels.give(self, row, first, swa_first, end, pages, swa_pages)
            return
        if not same:
            self.free_swa(row, swa_first, end, swa_pages)
        if pages:
            slots = self._page_starts(row, first, end, pages)
            if same:
                self._free_swa(slots)
            self._free_full(whole(slots, self.page_size))

    @contextmanager
    def frees_wait(self) -> Iterator[None]:
        """Free the pages of a batch together, at its end; which pages that are is looked up as each is
        freed, for the mapping may change in between (sgl-project/sglang#36081)."""
        for pool in self.pools:
            pool.hold()
        yield
        for pool in self.pools:
            pool.release()

    def free_starts(self, slots: Tensor, swa_slots: Tensor) -> None:
        """Free pages that no row names, each by its first full slot.

        slots: int64 [n], full pages that go, their mapping cleared whole; swa_slots: int64 [m], full
        pages whose SWA side goes, m 0 without SWA.
        """
        if swa_slots.numel():
            self._free_swa(swa_slots)
        if slots.numel():
            self._free_full(whole(slots, self.page_size))

    def _free_full(self, pages: Tensor) -> None:
        self.full.give(pages)
        self._unmap(pages)

    def free_swa(self, row: Tensor, first: Tensor, end: Tensor, pages: int) -> None:
        """Free SWA pages [first, end) of each row and clear the mapping of their full pages."""
        if self.use_kernel:
            self._kernels.give(self, row, first, first, end, 0, pages)
        elif self.swa is not None and pages:
            self._free_swa(self._page_starts(row, first, end, pages))

    def _free_swa(self, slots: Tensor) -> None:
        """slots: int64 [n], the first full slot of each page whose SWA side goes."""
        assert self.swa is not None
        self.swa.give(whole(self.full_to_swa.take(slots), self.page_size))
        self._unmap(whole(slots, self.page_size))

    def _unmap(self, pages: Tensor) -> None:
        if self.swa is not None:
            self.full_to_swa.view(-1, self.page_size).index_fill_(0, pages, 0)

    def _page_starts(self, row: Tensor, first: Tensor, end: Tensor, pages: int) -> Tensor:
        """First full slot of each page [first, end) of each row: int64 [pages]."""
        size = self.page_size
        # for a single row it is not needed
        count = (end - first).clamp_(min=0) if row.numel() > 1 else end
        return self._cells.take(ragged(row * self.width + first * size, count, pages, size)).long()
