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


def free(store: KVStore, rows: list[int], first: list[int], end: list[int]) -> None:
    """The same pages of both pools, of host lists."""
    row, start, stop = lanes(store.device, rows, first, end)
    pages = sum(max(e - f, 0) for f, e in zip(first, end, strict=True))
    store.free(row, start, start, stop, pages, pages)


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
