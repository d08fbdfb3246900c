"""The Triton kernel on the CPU: by our own reading of Triton, and by Triton's interpreter where that is."""

from __future__ import annotations

import importlib.util
import random
import sys
from dataclasses import replace

import pytest
import torch

import impl.torch_kv
from impl.torch_kv import TorchKV
from impl.torch_kv.store import KVStore
from impl.vllm import triton
from reference.commands import Mode
from reference.geometry import PRESETS, Geometry
from stateful_tests.tests.support.allocation import extend
from stateful_tests.tests.torch_kv.test_conformance import conforms

THERE = importlib.util.find_spec("triton") is not None
INTERPRETERS = [
    "ours", pytest.param("triton", marks=pytest.mark.skipif(not THERE, reason="triton is not installed"))
]  # fmt: skip


@pytest.fixture(params=INTERPRETERS, autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels, as the module finds them that launches them."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    if request.param == "ours":
        monkeypatch.setattr(triton.Triton, "language", triton.Language, raising=False)
        monkeypatch.setitem(sys.modules, "triton", triton.Triton)
        monkeypatch.setitem(sys.modules, "triton.language", triton.Language)
    name = "impl.torch_kv.kernels"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, name, importlib.import_module(name))
    monkeypatch.setattr(impl.torch_kv, "kernels", sys.modules[name], raising=False)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("page_size", [2, 4, 16])
def test_the_kernel_enters_what_torch_enters(page_size: int, window: int | None) -> None:
    choose = random.Random(7)
    size = Geometry(page_size, window, 600, 600 if window else 0, rows=3, width=200)
    for _ in range(5):
        a, b = (KVStore(size, torch.device("cpu")) for _ in range(2))
        b.use_kernel = True
        starts = [0, 0, 0]
        for _ in range(3):
            ends = [choose.choice([s, min(200, s + 5), choose.randint(s, 200)]) for s in starts]
            slots = [extend(store, [2, 0, 1], starts, ends) for store in (a, b)]
            starts = ends
            for one, other in (
                slots, (a.req_to_token, b.req_to_token), (a.full_to_swa, b.full_to_swa),
                (a.full.free_pages(), b.full.free_pages()),
            ):  # fmt: skip
                assert torch.equal(one, other)


class ByKernel(TorchKV):
    def reset(self, geometry: Geometry) -> None:
        super().reset(geometry)
        self.store.use_kernel = True


def test_with_it_torch_kv_does_what_the_reference_does(monkeypatch: pytest.MonkeyPatch) -> None:
    launched, fill = [], impl.torch_kv.kernels.fill
    monkeypatch.setattr(impl.torch_kv.kernels, "fill", lambda *given: launched.append(given) or fill(*given))
    for preset in ("page4", "page2", "no-swa"):
        for machine in ("sessions", "both"):
            like = replace(PRESETS[preset], tree=machine == "both")
            conforms(ByKernel(), f"{preset} {machine}", machine, like, Mode.FREE)
    assert len(launched) > 20
