"""The Triton kernels on the CPU, run by our interpreter, and by Triton's where Triton is installed."""

import importlib.util
import sys
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

import impl.torch_kv
from impl.choices import RandomChoices, between, pick
from impl.torch_kv import TorchKV
from impl.torch_kv.store import KVStore
from impl.vllm import triton
from reference.commands import Mode
from reference.cursors import ceil_page
from reference.geometry import PRESETS, Geometry
from stateful_tests.tests.support.allocation import extend, lanes
from stateful_tests.tests.torch_kv.random_runs import conforms

WITHOUT_TRITON = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
# Tests with a GPU (test_device.py) may have loaded triton in this process, and it interprets no longer.
WITH_A_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
LONGEST = 150  # tokens of a row before a decode
INTERPRETERS = ["ours", pytest.param("triton", marks=[WITHOUT_TRITON, WITH_A_GPU])]


@pytest.fixture(params=INTERPRETERS, autouse=True)
def kernels(request, monkeypatch):
    """Load the kernels under an interpreter. A store launches them from the loaded module."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    if request.param == "ours":
        monkeypatch.setattr(triton.Triton, "language", triton.Language, raising=False)
        monkeypatch.setitem(sys.modules, "triton", triton.Triton)
        monkeypatch.setitem(sys.modules, "triton.language", triton.Language)
    name = "impl.torch_kv.kernels"
    # monkeypatch restores both after the test: the kernels that are loaded below are of this interpreter
    monkeypatch.setattr(impl.torch_kv, "kernels", None, raising=False)
    monkeypatch.setitem(sys.modules, name, impl)
    del sys.modules[name]
    importlib.import_module(name)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_kernels_leave_the_pools_and_rows_that_torch_operators_leave(page_size, window):
    """Rounds of extends, a decode, a window eviction and a free; some entries have nothing to do."""
    choices = RandomChoices(7)
    geometry = Geometry(
        page_size=page_size,
        window=window,
        full_pages=600,
        swa_pages=600 if window else 0,
        rows=3,
        width=LONGEST + 50,  # a decode adds a token
    )
    device = torch.device("cpu")
    with_operators, with_kernels = stores = [KVStore(geometry, device) for _ in range(2)]
    with_kernels.use_kernel = True
    # These methods are the last steps of the path with torch operators: calling None raises.
    for name in ("_write_to_rows", "_free_full", "_free_swa"):
        setattr(with_kernels, name, None)
    rows = [2, 0, 1]

    def tensors(store):
        return [store.req_to_token, store.full_to_swa, *(pool.free_pages() for pool in store.pools)]

    def assert_stores_agree():
        torch.testing.assert_close(tensors(with_kernels), tensors(with_operators), rtol=0, atol=0)

    def assert_allocations_agree(slots):
        torch.testing.assert_close(slots[1], slots[0], rtol=0, atol=0)
        assert_stores_agree()

    for round_ in range(6):
        starts = [0, 0, 0]
        for _ in range(3):
            ends = [
                pick(choices, [start, min(LONGEST, start + 5), between(choices, start, LONGEST)])
                for start in starts
            ]
            assert_allocations_agree([extend(store, rows, starts, ends) for store in stores])
            starts = ends
        row, start = lanes(device, rows, starts)
        pages = with_operators.pages(starts, [end + 1 for end in starts])
        assert_allocations_agree(
            [
                store.alloc_decode(row, start, store.span_of_one(row, start), pages)
                for store in stores
            ]
        )
        # Bounds in pages: [0, kept) stays, the window has left [0, evicted), the row ends at `held`.
        held = [ceil_page(length + 1, page_size) // page_size for length in starts]
        evicted = [choices.upto(end) for end in held]
        kept = [choices.upto(end) for end in evicted] if round_ % 2 else [0, 0, 0]
        row, nothing, first, swa_first, end = lanes(device, rows, [0] * 3, kept, evicted, held)
        for store in stores:
            with store.frees_wait() if round_ > 3 else nullcontext():
                store.free_swa(row, nothing, swa_first, sum(evicted))
                freed = sum(held) - sum(kept)
                swa_freed = sum(held) - sum(evicted)
                store.free(row, first, swa_first, end, freed, swa_freed)
        assert_stores_agree()


class TorchKVWithKernels(TorchKV):
    def reset(self, geometry):
        super().reset(geometry)
        self.store.use_kernel = True


def test_torch_kv_with_kernels_conforms_and_launches_them(monkeypatch):
    launched = []

    def count_slots(kernel):
        def launch(*arguments):
            launched.append(kernel.__name__)
            return kernel(*arguments)

        return launch

    for name in ("fill", "give"):
        kernel = getattr(impl.torch_kv.kernels, name)
        monkeypatch.setattr(impl.torch_kv.kernels, name, count_slots(kernel))
    for preset in ("page1", "page4", "page2", "no-swa"):
        for machine in ("sessions", "both"):
            like = replace(PRESETS[preset], tree=machine == "both")
            conforms(TorchKVWithKernels(), f"{preset} {machine}", machine, like, Mode.FREE)
    assert launched.count("fill") > 20 and launched.count("give") > 20
