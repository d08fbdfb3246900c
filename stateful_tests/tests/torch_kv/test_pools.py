"""The physical side of torch_kv: allocation, freeing, checks, and what they cost."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from impl import counting_device
from impl.torch_kv import TorchKV
from impl.torch_kv.cursors import RowCursors
from impl.torch_kv.pool import OutOfPagesError, PagePool
from impl.torch_kv.sessions import KVRequest
from impl.torch_kv.store import KVStore
from reference.geometry import Geometry
from stateful_tests.tests.support.allocation import extend, lanes

CPU = torch.device("cpu")


def geometry(page_size: int, window: int | None = 4, pages: int = 64) -> Geometry:
    swa = 0 if window is None else pages
    return Geometry(page_size, window, pages, swa, rows=4, width=8 * max(page_size, 4))


def test_what_waits_is_nobodys_and_goes_back_once():
    pool = PagePool(3, 1, CPU)
    taken = pool.take(3).clone()
    pool.hold()
    pool.give(taken[:1])
    pool.give(taken[1:2])
    with pytest.raises(AssertionError):  # groups are not nested
        pool.hold()
    with pytest.raises(OutOfPagesError, match="1 pages asked for, 0 free"):
        pool.take(1)
    pool.release()
    assert sorted(pool.free_pages().tolist()) == [1, 2]
    pool.hold()
    pool.release()
    assert pool.available == 2


def decode(store: KVStore, rows: list[int], starts: list[int]) -> torch.Tensor:
    """alloc_decode of host lists."""
    row, start = lanes(store.device, rows, starts)
    pages = store.pages(starts, [s + 1 for s in starts])
    return store.alloc_decode(row, start, store.span_of_one(row, start), pages)


def free(store: KVStore, rows: list[int], first: list[int], end: list[int]) -> None:
    """The same pages of both pools, of host lists."""
    row, start, stop = lanes(store.device, rows, first, end)
    pages = sum(max(e - f, 0) for f, e in zip(first, end, strict=True))
    store.free(row, start, start, stop, pages, pages)


class Loop:
    """The same allocator, one token at a time in plain Python."""

    def __init__(self, size):
        self.page_size = size.page_size
        self.free = {pool: list(range(1, size.pages(pool) + 1)) for pool in size.pools}
        self.rows: list[list[int]] = [[0] * size.width for _ in range(size.rows)]
        self.mapping = [0] * ((size.full_pages + 1) * size.page_size if size.window else 0)

    def alloc(self, row, start, end):
        for position in range(start, end):
            if position % self.page_size:
                slot = self.rows[row][position - 1] + 1
                pair = self.mapping[slot - 1] + 1 if self.mapping else 0
            else:
                slot = self.free["full"].pop(0) * self.page_size
                pair = self.free["swa"].pop(0) * self.page_size if self.mapping else 0
            self.rows[row][position] = slot
            if self.mapping:
                self.mapping[slot] = pair

    def free_pages(self, ranges):
        """ranges: (row, first, end); what they free stands before what was free."""
        freed: dict[str, list[int]] = {pool: [] for pool in self.free}
        for row, first, end in ranges:
            for at in range(first * self.page_size, end * self.page_size, self.page_size):
                slot = self.rows[row][at]
                if self.mapping:
                    freed["swa"].append(self.mapping[slot] // self.page_size)
                    self.mapping[slot : slot + self.page_size] = [0] * self.page_size
                freed["full"].append(slot // self.page_size)
        self.free = {pool: freed[pool] + pages for pool, pages in self.free.items()}


def assert_same(store: KVStore, loop: Loop) -> None:
    assert store.req_to_token.tolist() == loop.rows
    assert store.full_to_swa.tolist() == loop.mapping
    assert store.full.free_pages().tolist() == loop.free["full"]
    if store.swa is not None:
        assert store.swa.free_pages().tolist() == loop.free["swa"]


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    page_size=st.sampled_from([1, 2, 4, 16]),
    window=st.sampled_from([None, 3]),
)
def test_batched_allocation_is_the_plain_loop(data, page_size, window):
    size = geometry(page_size, window, pages=128)
    store, loop = KVStore(size, CPU), Loop(size)
    length = [0] * size.rows
    for _ in range(data.draw(st.integers(1, 6))):
        rows = data.draw(st.lists(st.integers(0, size.rows - 1), min_size=1, unique=True))
        kind = data.draw(st.sampled_from(["extend", "decode", "free"]))
        if kind == "free":
            keep = [-(-data.draw(st.integers(0, length[r])) // page_size) for r in rows]
            end = [-(-length[r] // page_size) for r in rows]
            free(store, rows, keep, end)
            loop.free_pages(list(zip(rows, keep, end, strict=True)))
            for r, k in zip(rows, keep, strict=True):
                length[r] = min(length[r], k * page_size)
        else:
            rows = [r for r in rows if length[r] < size.width]
            if not rows:
                continue
            starts = [length[r] for r in rows]
            ends = [s + 1 for s in starts]
            if kind == "extend":
                ends = [data.draw(st.integers(s, size.width)) for s in starts]
                extend(store, rows, starts, ends)
            else:
                decode(store, rows, starts)
            for r, s, e in zip(rows, starts, ends, strict=True):
                loop.alloc(r, s, e)
                length[r] = e
        # The loop frees row by row and page by page, so even the order of the lists is the same.
        assert_same(store, loop)


def test_a_double_free_shows():
    pool = PagePool(2, page_size=1, device=CPU)
    pages = pool.take(2)
    pool.give(pages)
    pool.give(pages)
    assert sorted(pool.free_pages().tolist()) == [1, 1, 2, 2]
    assert pool.take(3).numel() == 3


def ready(size: Geometry, lengths: list[tuple[int, int, int]]) -> tuple[TorchKV, list[KVRequest]]:
    """A system with one session turn per (committed, allocated, evicted), all in rows of their own."""
    system = TorchKV()
    system.reset(size)
    requests = []
    for committed, allocated, evicted in lengths:
        row = system.store.free_rows.pop()
        extend(system.store, [row], [0], [allocated])
        swept = evicted // size.page_size
        system.store.free_swa(*lanes(CPU, [row], [0], [swept]), swept)
        request = KVRequest(f"r{row}", None, 1, [], 0, row=row)
        system.put(request, RowCursors(committed, allocated, evicted, 0))
        requests.append(request)
    return system, requests


@settings(max_examples=40, deadline=None)
@given(data=st.data(), page_size=st.sampled_from([1, 2, 4]))
def test_a_batch_is_trimmed_as_one_by_one(data, page_size):
    size = geometry(page_size, pages=128)
    lengths, targets = [], []
    for _ in range(data.draw(st.integers(1, 4))):
        allocated = data.draw(st.integers(1, size.width))
        committed = data.draw(st.integers(0, allocated))
        evicted = data.draw(st.integers(0, allocated // page_size)) * page_size
        lengths.append((committed, allocated, evicted))
        targets.append(data.draw(st.integers(0, size.width)))
    together, batch = ready(size, lengths)
    together.trim_overshoot(batch, targets)
    apart, single = ready(size, lengths)
    for request, target in zip(single, targets, strict=True):
        apart.trim_overshoot([request], [target])
    assert [r.cursors for r in batch] == [r.cursors for r in single]
    for r in batch:
        assert together.store.cursors.lines[r.row].tolist() == list(r.cursors)
    a, b = together.view(), apart.view()
    assert sorted(a.free_full) == sorted(b.free_full)
    assert sorted(a.free_swa) == sorted(b.free_swa)
    assert a.full_to_swa == b.full_to_swa


def cost_of_free(pages: int, freed: int, width: int = 512) -> int:
    store = KVStore(Geometry(4, 8, pages, pages, rows=2, width=width), counting_device.device())
    extend(store, [0], [0], [width])
    with counting_device.counting() as counted:
        free(store, [0], [width // 4 - freed], [width // 4])
    return counted.elements


def test_freeing_costs_what_is_freed():
    assert cost_of_free(pages=128, freed=8) == cost_of_free(pages=4096, freed=8)
    once, twice, fourfold = (cost_of_free(pages=256, freed=n) for n in (16, 32, 64))
    assert 0 < twice - once < once + 16
    assert fourfold - twice == 2 * (twice - once)
