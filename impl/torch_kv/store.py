"""The physical store: rows of req_to_token, both pools, the mapping between them, cursors of rows.

Every method takes a batch as tensors on the device, one element per batch entry, and the totals that size its
result as host ints, from the host's copy of the cursors. So no method waits for the device, and each call is
a fixed number of operators on it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from impl.torch_kv.cursors import CursorTable, N, floor_divide
from impl.lazy import Tensor, torch
from impl.torch_kv.pool import PagePool
from reference.memoization import memoized
from reference.geometry import Geometry


def repeat_each(values: Tensor, count: Tensor, total: int) -> Tensor:
    """Return values[i] repeated count[i] times, for all entries end to end: int64 [total], or [1] for a
    single entry.

    values, count: int64 [B] on one device.
    total: sum of count; the host knows it, so that nothing waits for the device.
    """
    return (
        values if values.numel() == 1 else torch.repeat_interleave(values, count, output_size=total)
    )


def ragged(start: Tensor, count: Tensor, total: int, step: int = 1) -> Tensor:
    """Return start[i], start[i] + step, ... with count[i] values per entry, end to end: int64 [total]; see
    `repeat_each`."""
    steps = torch.arange(0, total * step, step, dtype=torch.int64, device=start.device)
    if start.numel() > 1:
        start = start - (count.cumsum(0) - count) * step
    return steps.add_(repeat_each(start, count, total))


class BatchSpan:
    """Token positions of a batch, end to end: counts[i] positions from start[i] on in each row.

    row, start, count: int64 [B]; count is None for one position each.
    width: cells of a row.

    Tensors that only torch operators need are made on first use; kernels do without them.
    """

    def __init__(
        self, row: Tensor, width: int, start: Tensor, count: Tensor | None, counts: list[int]
    ) -> None:
        self._row = row
        self._width = width
        self._start = start
        self._count = count
        self.counts = counts

    @memoized
    def origin(self) -> Tensor:
        """Return the cell of each entry's position 0 in flattened req_to_token: int64 [B]."""
        return self._row * self._width

    @memoized
    def first(self) -> Tensor:
        """Return the cell of each entry's first position in flattened req_to_token: int64 [B]."""
        return self.origin + self._start

    @memoized
    def cell(self) -> Tensor:
        """Return the cells of all positions in flattened req_to_token: int64 [T]."""
        return (
            self.first if self._count is None else ragged(self.first, self._count, sum(self.counts))
        )

    def repeat_each(self, values: Tensor) -> Tensor:
        """Return each entry's value, int64 [B], once for each of its count[i] positions."""
        assert self._count is not None
        return repeat_each(values, self._count, sum(self.counts))


class KVStore:
    """Pools, rows, mapping and cursors of one geometry.

    req_to_token: int32 [rows, width] on `device`: position -> full slot.
    full_to_swa: int64 [(full_pages + 1) * page_size] on `device`: full slot -> SWA slot, 0 for none;
        empty without SWA.
    full, swa: the pools; `swa` is None without SWA.
    pools: the pools that exist, `full` first.
    cursors: cursors of the requests that use the rows.
    slot_cursors: cursors of the sessions' slots that name the rows. A slot keeps its cursors while a request
        borrows it, hence a second table.
    free_rows: host list of free rows, the next one to allocate last. Their cursors are 0.
    use_kernel: Triton kernels allocate and free, instead of torch operators.
    """

    pool_class = PagePool

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        """Make the pools, rows and cursor tables of these sizes on a device."""
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
        # A kernel contains all rules of this class; a subclass that changes a rule uses torch operators.
        triton = device.type == "cuda" and importlib.util.find_spec("triton") is not None
        self.use_kernel = triton and type(self) is KVStore

    @property
    def _kernels(self) -> Any:
        """The module of kernels; Triton is imported on first use."""
        from impl.torch_kv import kernels

        return kernels

    # Positions

    def span(self, row: Tensor, start: Tensor, count: Tensor, counts: list[int]) -> BatchSpan:
        """Return positions [start[i], start[i] + count[i]) of each row.

        counts: the host's copy of count.
        """
        return BatchSpan(row, self.width, start, count, counts)

    def span_of_one(self, row: Tensor, start: Tensor) -> BatchSpan:
        """Return position start[i] of each row."""
        return BatchSpan(row, self.width, start, None, [1] * row.numel())

    # Allocation: the same arithmetic for single entries (ints) and batches (tensors)

    def open_index(self, start: N) -> N:
        """Return the index of the first new page of an allocation from position `start` on (OWN-5)."""
        return floor_divide(start + (self.page_size - 1), self.page_size)

    def pages(self, starts: Sequence[int], ends: Sequence[int]) -> int:
        """Return the number of new pages for positions [starts[i], ends[i]): the open page is filled
        first."""
        size = self.page_size
        if size == 1:
            return sum(ends) - sum(starts)
        return sum([-(-end // size) for end in ends]) - sum(
            [self.open_index(start) for start in starts]
        )

    def alloc_extend(
        self, row: Tensor, start: Tensor, end: Tensor, span: BatchSpan, pages: int
    ) -> Tensor:
        """Allocate slots in both pools for positions [start[i], end[i]) of each row; write rows and mapping.

        span: these positions; an empty range needs no page.
        pages: number of new pages.
        Returns the full slots, int64 [T]. Raises OutOfPagesError.
        """
        size = self.page_size
        if self.use_kernel:
            filled: Tensor = self._kernels.fill(self, row, start, end, 0, span.counts, pages)
            return filled
        if size == 1:
            return self._write_to_rows(span, *(self._take(pool, start, end, pages) for pool in self.pools))
        # A table of pages in the order of positions: for each entry the page that may be open, then new ones.
        lanes = row.numel()
        opened = self.open_index(start)
        begin = 1 - opened
        if lanes > 1:
            fresh = floor_divide(end + (size - 1), size) - opened
            lane = torch.arange(lanes, dtype=torch.int64, device=self.device)
            first_slots = fresh.cumsum(0) - fresh + lane
            new = torch.arange(1, pages + 1, dtype=torch.int64, device=self.device)
            new.add_(repeat_each(lane, fresh, pages))
            begin += first_slots
        # The place of each cell among the slots of these pages.
        place = span.cell + span.repeat_each(begin * size - span.origin)
        slots = []
        for pool, last in zip(self.pools, self._last(span.first)):
            last_page = floor_divide(last, size)
            taken = self._take(pool, start, end, pages)
            if lanes == 1:
                table = torch.cat((last_page, taken))
            else:
                table = torch.empty(lanes + pages, dtype=torch.int64, device=self.device)
                table.put_(first_slots, last_page).put_(new, taken)
            slots.append(self._slots_of(table).take(place))
        return self._write_to_rows(span, *slots)

    def alloc_decode(self, row: Tensor, start: Tensor, span: BatchSpan, pages: int) -> Tensor:
        """Allocate one slot in both pools at position start[i] of each row: alloc_extend for one token."""
        size = self.page_size
        if self.use_kernel:
            filled: Tensor = self._kernels.fill(self, row, start, start, 1, span.counts, pages)
            return filled
        if pages == row.numel():
            return self._write_to_rows(span, *(pool.take(pages) * size for pool in self.pools))
        slots = [last + 1 for last in self._last(span.first)]
        if pages:
            full = start % size == 0
            for after, pool in zip(slots, self.pools):
                after.masked_scatter_(full, pool.take(pages) * size)
        return self._write_to_rows(span, *slots)

    def alloc_tail(
        self,
        full: BatchSpan,
        tail: BatchSpan,
        start: Tensor,
        live: Tensor,
        end: Tensor,
        pages: list[int],
    ) -> Tensor:
        """Allocate full slots for positions [start[i], end[i]) of each row, and SWA slots for [live[i],
        end[i]).

        start, live: first positions of a page.
        full, tail: the positions of the two ranges.
        pages: number of new pages of each pool.
        Returns the full slots, int64 [T].
        """
        assert self.swa is not None
        slots = self._new(self.full, full, start, end, pages[0])
        self.name(full, slots)
        self._map(self.slots(tail), self._new(self.swa, tail, live, end, pages[1]))
        return slots

    def _new(
        self, pool: PagePool, span: BatchSpan, start: Tensor, end: Tensor, pages: int
    ) -> Tensor:
        """Return the slots of `pages` new pages of a pool for the positions of `span`."""
        size = self.page_size
        first_page = floor_divide(start, size)
        fresh = floor_divide(end + (size - 1), size) - first_page
        skip = (fresh.cumsum(0) - fresh - first_page) * size - span.origin
        return self._slots_of(pool.take(pages)).take(span.cell + span.repeat_each(skip))

    def _take(self, pool: PagePool, start: Tensor, end: Tensor, pages: int) -> Tensor:  # noqa: ARG002
        """Return `pages` new pages of a pool for positions [start[i], end[i]) of all entries, end to end."""
        return pool.take(pages)

    def _last(self, cell: Tensor) -> Iterator[Tensor]:
        """Yield, for each pool, the slots in the cells before `cell`, int64 [B]. The cell before position 0
        is another row's, and is not used."""
        last = self._cells.take(cell - 1).long()
        yield last
        if self.swa is not None:
            yield self.full_to_swa.take(last)

    def _slots_of(self, pages: Tensor) -> Tensor:
        """Return all slots of `pages`, int64 [n]: int64 [n * page_size]."""
        return (pages.unsqueeze(1) * self.page_size + self._offsets).view(-1)

    def _write_to_rows(self, span: BatchSpan, slots: Tensor, swa_slots: Tensor | None = None) -> Tensor:
        """Write slots for the positions of `span`, int64 [T], to rows and mapping. Returns the full slots."""
        if swa_slots is not None:
            self._map(slots, swa_slots)
        self.name(span, slots)
        return slots

    def _map(self, slots: Tensor, swa_slots: Tensor) -> None:
        """Map newly allocated full slots to their SWA slots."""
        self.full_to_swa.put_(slots, swa_slots)

    def alloc_pages(self, pages: int) -> Tensor:
        """Allocate `pages` pages of each pool for no row. Returns the full slots, int64 [pages * page_size].

        Raises OutOfPagesError, as alloc_extend.
        """
        slots = [self._slots_of(pool.take(pages)) for pool in self.pools]
        if self.swa is not None:
            self._map(*slots)
        return slots[0]

    def name(self, span: BatchSpan, slots: Tensor) -> None:
        """Write full slots, int64 [T], to the rows at the positions of `span`; nothing is allocated or
        freed."""
        self._cells.put_(span.cell, slots.int())

    # Contents

    def slots(self, span: BatchSpan) -> Tensor:
        """Return the full slots of the positions of `span`: int64 [T]."""
        return self._cells.take(span.cell).long()

    def write(self, slots: Tensor, tokens: Tensor) -> None:
        """Write the KV of `tokens` to full slots `slots` and their SWA slots, int64 [T] each.

        The mapping gives the SWA slots, as it does to attention kernels: an unmapped slot (0) leads to the
        padding slot.
        """
        self.full.stamps.put_(slots, tokens)
        if self.swa is not None:
            self.swa.stamps.put_(self._swa_slots(slots), tokens)

    def _swa_slots(self, slots: Tensor) -> Tensor:
        """Return the SWA slots to which a write to these full slots leads."""
        return self.full_to_swa.take(slots)

    # Frees: ranges are indices of pages in the sequence, [first, end) of each row

    def free(
        self, row: Tensor, first: Tensor, swa_first: Tensor, end: Tensor, pages: int, swa_pages: int
    ) -> None:
        """Free full pages [first, end) and SWA pages [swa_first, end) of each row.

        pages, swa_pages: their numbers. The mapping of all slots of a freed full page is cleared.
        """
        # each SWA page in the range is that of a full page in the range
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
            self._free_full(floor_divide(slots, self.page_size))

    @contextmanager
    def frees_wait(self) -> Iterator[None]:
        """Return freed pages to their pools together, when the context ends. The mapping is read at each
        free, because it may change in between (sgl-project/sglang#36081)."""
        for pool in self.pools:
            pool.hold()
        yield
        for pool in self.pools:
            pool.release()

    def free_starts(self, slots: Tensor, swa_slots: Tensor) -> None:
        """Free pages that no row names, each by its first full slot.

        slots: int64 [n], full pages to free, with the mapping of all their slots.
        swa_slots: int64 [m], full pages whose SWA pages are freed; m is 0 without SWA.
        """
        if swa_slots.numel():
            self._free_swa(swa_slots)
        if slots.numel():
            self._free_full(floor_divide(slots, self.page_size))

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
        """Free SWA pages.

        slots: int64 [n], the first full slot of each page.
        """
        assert self.swa is not None
        self.swa.give(floor_divide(self.full_to_swa.take(slots), self.page_size))
        self._unmap(floor_divide(slots, self.page_size))

    def _unmap(self, pages: Tensor) -> None:
        if self.swa is not None:
            self.full_to_swa.view(-1, self.page_size).index_fill_(0, pages, 0)

    def _page_starts(self, row: Tensor, first: Tensor, end: Tensor, pages: int) -> Tensor:
        """Return the first full slot of each page [first, end) of each row: int64 [pages]."""
        size = self.page_size
        # `ragged` ignores the count of a single row
        count = (end - first).clamp_(min=0) if row.numel() > 1 else end
        return self._cells.take(ragged(row * self.width + first * size, count, pages, size)).long()
