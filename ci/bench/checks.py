"""What a busy check costs, against the number of requests and the size of the pools.

Three ways to the same sums: one pass over the device cursors, a loop over requests that reads each
one's cursors from the device, and a loop over the host's mirror of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

from torch import Tensor

from impl.torch_kv import TorchKV
from impl.torch_kv.sessions import KVRequest
from reference.commands import Admit, Chunk, Extend, Submit
from reference.cursors import counted_full, counted_swa
from reference.geometry import Geometry
from reference.ledger import Cursors

SIZES = [(1, 1 << 10), (16, 1 << 10), (16, 1 << 14), (128, 1 << 10), (1024, 1 << 12)]  # requests, pages
_WIDTH = 64
_TOKENS = 13


def _loaded(device: str, requests: int, pages: int) -> TorchKV:
    """A system in which this many requests run."""
    system = TorchKV(device)
    system.reset(Geometry(4, 8, pages, pages, rows=requests, width=_WIDTH))
    names = [f"r{i}" for i in range(requests)]
    for name in names:
        system.apply(Submit(name, None, _TOKENS))
        system.apply(Admit(name))
    system.apply(Extend(tuple(Chunk(name, _TOKENS) for name in names)))
    return system


def _loop(system: TorchKV, cursors_of: Callable[[Any], Any]) -> tuple[int, int]:
    full = swa = 0
    for request in system.active():
        cursors = Cursors(*cursors_of(request))
        full += counted_full(cursors, system.page_size)
        swa += counted_swa(cursors, system.page_size)
    return full, swa


def _from_device(lines: Tensor, request: KVRequest) -> list[int]:
    return lines[request.row].tolist()


def _microseconds(work: Callable[[], object], repeat: int = 30) -> float:
    """The median of some runs; each ends with numbers on the host, so a device has been waited for."""
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return sorted(times)[repeat // 2] * 1e6


def rows(device: str) -> list[dict[str, object]]:
    """One row for each size; `one pass` is 1 in the ratios."""
    measured: list[dict[str, object]] = []
    for requests, pages in SIZES:
        system = _loaded(device, requests, pages)
        lines = system.store.cursors.lines
        ways: dict[str, Callable[[], Any]] = {
            "one pass": partial(system.report),
            "loop, device": partial(_loop, system, partial(_from_device, lines)),
            "loop, host mirror": partial(_loop, system, attrgetter("cursors")),
        }
        full, swa, _ = ways["one pass"]().accounts
        assert ways["loop, device"]() == ways["loop, host mirror"]() == (full.uncached, swa.uncached)
        cost = {name: _microseconds(work) for name, work in ways.items()}
        measured.append(
            {"requests": requests, "pages": pages}
            | {name: f"{us:.0f} us ({us / cost['one pass']:.2f})" for name, us in cost.items()}
        )
    return measured
