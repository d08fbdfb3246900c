"""The physical side of torch_kv: allocation, freeing, checks, and what they cost."""

import importlib.util

import pytest
import torch

from impl.torch_kv import counting_device
from impl.torch_kv.pool import OutOfPagesError, PagePool
from impl.torch_kv.store import KVStore
from reference.geometry import Geometry
from stateful_tests.tests.support.allocation import extend, lanes

CPU = torch.device("cpu")


def test_held_frees_belong_to_nobody_and_return_once():
    pool = PagePool(3, 1, CPU)
    taken = pool.take(3).clone()
    pool.hold()
    pool.give(taken[:1])
    pool.give(taken[1:2])
    with pytest.raises(AssertionError):  # groups are not nested
        pool.hold()
    with pytest.raises(OutOfPagesError, match="1 pages requested, 0 free"):
        pool.take(1)
    pool.release()
    assert sorted(pool.free_pages().tolist()) == [1, 2]
    pool.hold()
    pool.release()
    assert pool.available == 2


def test_on_a_cpu_no_kernel_runs_though_triton_is_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert not KVStore(
        Geometry(page_size=1, window=None, full_pages=1, swa_pages=0, rows=1, width=1), CPU
    ).use_kernel


def free(store: KVStore, rows: list[int], first: list[int], end: list[int]) -> None:
    """The same pages of both pools, of host lists."""
    row, start, stop = lanes(store.device, rows, first, end)
    pages = sum(max(e - f, 0) for f, e in zip(first, end, strict=True))
    store.free(row, start, start, stop, pages, pages)


def test_pages_of_two_rows_go_back_together():
    store = KVStore(Geometry(page_size=4, window=8, full_pages=6, swa_pages=6, rows=2, width=16), CPU)
    extend(store, [0, 1], [0, 0], [16, 8])
    free(store, [0, 1], [1, 0], [4, 2])
    assert [sorted(pool.free_list()) for pool in store.pools] == [[2, 3, 4, 5, 6]] * 2


def cost_of_free(pages: int, freed: int, width: int = 512) -> int:
    store = KVStore(Geometry(4, 8, pages, pages, rows=2, width=width), counting_device.device())
    extend(store, [0], [0], [width])
    with counting_device.counting() as counted:
        free(store, [0], [width // 4 - freed], [width // 4])
    return counted.elements


def test_the_cost_of_a_free_grows_with_the_freed_pages():
    assert cost_of_free(pages=128, freed=8) == cost_of_free(pages=4096, freed=8)
    once, twice, fourfold = (cost_of_free(pages=256, freed=n) for n in (16, 32, 64))
    assert 0 < twice - once < once + 16
    assert fourfold - twice == 2 * (twice - once)
