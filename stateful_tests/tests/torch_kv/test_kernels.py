"""The Triton kernels on the CPU: by our own reading of Triton, and by Triton's interpreter where that is."""

import importlib.util
import random
import sys
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

import impl.torch_kv
from impl.torch_kv import TorchKV
from impl.torch_kv.store import KVStore
from impl.vllm import triton
from reference.commands import Mode
from reference.geometry import PRESETS, Geometry
from stateful_tests.tests.support.allocation import extend, lanes
from stateful_tests.tests.torch_kv.test_conformance import conforms

# With a GPU the kernels run there (test_device.py), and triton may be loaded by then and not interpret.
WHY_NOT = "there is a GPU" if torch.cuda.is_available() else "triton is not installed"
SKIPPED = torch.cuda.is_available() or importlib.util.find_spec("triton") is None
INTERPRETERS = ["ours", pytest.param("triton", marks=pytest.mark.skipif(SKIPPED, reason=WHY_NOT))]


@pytest.fixture(params=INTERPRETERS, autouse=True)
def kernels(request, monkeypatch):
    """The kernels, as the module finds them that launches them."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    if request.param == "ours":
        monkeypatch.setattr(triton.Triton, "language", triton.Language, raising=False)
        monkeypatch.setitem(sys.modules, "triton", triton.Triton)
        monkeypatch.setitem(sys.modules, "triton.language", triton.Language)
    name = "impl.torch_kv.kernels"
    # what is loaded here goes again
    monkeypatch.setattr(impl.torch_kv, "kernels", None, raising=False)
    monkeypatch.setitem(sys.modules, name, impl)
    del sys.modules[name]
    importlib.import_module(name)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_the_kernels_leave_what_torch_leaves(page_size, window):
    """Rounds of extends, a decode, a window eviction and a free; some entries have nothing to do."""
    choose = random.Random(7)
    size = Geometry(page_size, window, 600, 600 if window else 0, rows=3, width=200)
    stores = [KVStore(size, torch.device("cpu")) for _ in range(2)]
    stores[1].use_kernel = True
    # what torch operators end with is not called there
    vars(stores[1]).update(dict.fromkeys(("_enter", "_free_full", "_free_swa")))
    rows, device = [2, 0, 1], torch.device("cpu")

    def agree(slots=()):
        a, b = (
            [s.req_to_token, s.full_to_swa, *(pool.free_pages() for pool in s.pools)]
            for s in stores
        )
        assert all(map(torch.equal, [*a, *slots[:1]], [*b, *slots[1:]]))

    for round_ in range(6):
        starts = [0, 0, 0]
        for _ in range(3):
            ends = [choose.choice([s, min(150, s + 5), choose.randint(s, 150)]) for s in starts]
            agree([extend(store, rows, starts, ends) for store in stores])
            starts = ends
        row, start = lanes(device, rows, starts)
        pages = stores[0].pages(starts, [end + 1 for end in starts])
        agree(
            [
                store.alloc_decode(row, start, store.span_of_one(row, start), pages)
                for store in stores
            ]
        )
        ends = [-(-(end + 1) // page_size) for end in starts]
        evicted = [choose.randint(0, end) for end in ends]
        kept = [choose.randint(0, end) for end in evicted] if round_ % 2 else [0, 0, 0]
        row, nothing, first, swa_first, end = lanes(device, rows, [0] * 3, kept, evicted, ends)
        for store in stores:
            with store.frees_wait() if round_ > 3 else nullcontext():
                store.free_swa(row, nothing, swa_first, sum(evicted))
                store.free(
                    row, first, swa_first, end, sum(ends) - sum(kept), sum(ends) - sum(evicted)
                )
        agree()


class ByKernel(TorchKV):
    def reset(self, geometry):
        super().reset(geometry)
        self.store.use_kernel = True


def test_with_it_torch_kv_does_what_the_reference_does(monkeypatch):
    launched = []
    for name in ("fill", "give"):
        kernel = getattr(impl.torch_kv.kernels, name)
        noting = lambda *given, kernel=kernel: launched.append(kernel.__name__) or kernel(*given)  # noqa: E731
        monkeypatch.setattr(impl.torch_kv.kernels, name, noting)
    for preset in ("page1", "page4", "page2", "no-swa"):
        for machine in ("sessions", "both"):
            like = replace(PRESETS[preset], tree=machine == "both")
            conforms(ByKernel(), f"{preset} {machine}", machine, like, Mode.FREE)
    assert launched.count("fill") > 20 and launched.count("give") > 20
