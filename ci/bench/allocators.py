"""`make bench ARGS=allocators`: KVStore beside a release's own allocators, one process, the same batches.

A batch is extended from nothing, then decoded by a token, then freed, over and over. The release does as its
scheduler does on a CPU: allocate, write req_to_token (an extend row by row, for want of a kernel), free the
rows in one group. Ours does each in one call. Lanes differ by up to a page, so that some end inside one.
"""

import importlib
import math
import time
from typing import Any

import click
import torch

from ci.commands.shared import ReportOut, Unusable, json_option
from ci.report import render
from impl.sglang.parts.doubles import SERVER_ARGS, use_gpu
from impl.sglang.parts.fetch import release_root
from impl.sglang.releases.catalogue import supported
from impl.torch_kv.store import KVStore
from reference.geometry import LIMITS, Geometry

RELEASE = "0.5.23"
PAGES = (1, 16)
BATCHES = {1: 2048, 16: 512, 64: 128, 256: 32}  # rows -> tokens of each, at most
WORK = ("extend", "decode", "free")
_PLOT, _FROM, _DECADES = 48, 5.0, 4  # columns of the plot; microseconds where it begins; how far it goes


class MeasuredBatch:
    """Lanes with a row each; `ends`: their tokens after an extend. `cpu`: row, start and end, on the host."""

    def __init__(self, size: int, page_size: int) -> None:
        self.rows = list(range(size))
        self.ends = [BATCHES[size] - 1 - row % page_size for row in self.rows]
        self.cpu = [torch.tensor(numbers) for numbers in (self.rows, [0] * size, self.ends)]
        self.row, self.start, self.end = (numbers.to(SERVER_ARGS.device) for numbers in self.cpu)


class Ours:
    """KVStore."""

    def __init__(self, geometry: Geometry, batch: MeasuredBatch) -> None:
        self.store, self.batch = KVStore(geometry, batch.row.device), batch
        pages = [-(-(end + 1) // geometry.page_size) for end in batch.ends]
        self.pages, self.last = sum(pages), torch.tensor(pages, device=batch.row.device)

    def extend(self) -> None:
        store, it = self.store, self.batch
        pages = store.pages([0] * len(it.rows), it.ends)
        span = store.span(it.row, it.start, it.end - it.start, it.ends)
        store.alloc_extend(it.row, it.start, it.end, span, pages)

    def decode(self) -> None:
        store, it = self.store, self.batch
        pages = store.pages(it.ends, [end + 1 for end in it.ends])
        store.alloc_decode(it.row, it.end, store.span_of_one(it.row, it.end), pages)

    def free(self) -> None:
        it = self.batch
        self.store.free(it.row, it.start, it.start, self.last, self.pages, self.pages)

    def free_slots(self) -> int:
        return self.store.full.available * self.store.page_size


class Theirs:
    """The release's allocators and its ReqToTokenPool."""

    def __init__(self, geometry: Geometry, batch: MeasuredBatch, release: Any) -> None:
        SERVER_ARGS.page_size = self.page_size = geometry.page_size
        tokens = geometry.full_pages * geometry.page_size
        self.pool = release.make_allocator(tokens, tokens if geometry.window else None, geometry.page_size)
        self.rows, self.batch = release.make_rows(geometry.rows, geometry.width), batch
        self._write = importlib.import_module("sglang.srt.mem_cache.allocation").write_cache_indices
        self._free = importlib.import_module("sglang.srt.mem_cache.common").free_kv_row_segments
        self._no_prefix = [torch.empty_like(batch.row[:0])] * len(batch.rows)
        self._total, self._last = sum(batch.ends), torch.full_like(batch.row, -1)

    def extend(self) -> None:
        it = self.batch
        row, start, end = it.cpu
        if self.page_size == 1:
            slots = self.pool.alloc(self._total)
        else:
            slots = self.pool.alloc_extend(it.start, start, it.end, end, self._last, self._total)
        lengths = it.start, start, it.end, end, it.end, end
        self._write(slots, it.row, row, *lengths, self._no_prefix, self.rows)

    def decode(self) -> None:
        it = self.batch
        if self.page_size == 1:
            slots = self.pool.alloc(len(it.rows))
        else:
            last = self.rows.req_to_token[it.row, it.end - 1]
            slots = self.pool.alloc_decode(it.end + 1, it.cpu[2] + 1, last)
        self.rows.write((it.row, it.end.clone()), slots.to(torch.int32))

    def free(self) -> None:
        self.pool.free_group_begin()
        for row, end in zip(self.batch.rows, self.batch.ends):
            self._free(self.pool, [(self.rows.req_to_token[row][0 : end + 1], 0)], swa_evicted_seqlen=0)
        self.pool.free_group_end()

    def free_slots(self) -> int:
        return int(getattr(self.pool, "full_attn_allocator", self.pool).available_size())


def _now() -> float:
    """Seconds of this process on a CPU; of the clock on a GPU, once it has done what it was given."""
    if SERVER_ARGS.device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def _measured(sides: tuple[Ours, Theirs], runs: int) -> list[list[float]]:
    """Microseconds of each kind of work, for each side: the lower quartile. Not in turns: who copies a large
    free list empties the caches for the other."""
    taken: list[list[list[float]]] = [[[] for _ in WORK] for _ in sides]
    for number, times in enumerate(taken):
        side = sides[number]
        there = side.free_slots()
        for _ in range(runs):
            for work, found in zip((side.extend, side.decode, side.free), times):
                began = _now()
                work()
                found.append((_now() - began) * 1e6)
            assert side.free_slots() == there, "what was taken has not come back"
    return [[sorted(found)[runs // 4] for found in times] for times in taken]


def _plot(ours: list[float], theirs: list[float]) -> str:
    """A line of the plot: each time at its place on a logarithmic axis."""
    line = ["·"] * _PLOT
    for mark, times in zip("xo", (theirs, ours)):
        for us in times:
            line[max(0, min(_PLOT - 1, round(math.log10(us / _FROM) * _PLOT / _DECADES)))] = mark
    return "".join(line)


@click.command()
@click.option("--slots", multiple=True, type=click.IntRange(10_000), default=(10**4, 10**5, 10**6),
              show_default=True, help="Slots of a pool.")  # fmt: skip
@click.option("--runs", type=click.IntRange(1), default=20, show_default=True)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@json_option
def allocators(out: ReportOut, slots: tuple[int, ...], runs: int, device: str) -> None:
    """Allocate and free batches by the built-in store and by SGLang's own allocators."""
    if device == "cuda":
        if not torch.cuda.is_available():
            raise Unusable("--device cuda: torch sees no CUDA device here")
        use_gpu()
    LIMITS.update(dict.fromkeys(LIMITS, 1 << 40))  # they keep traces cheap; nothing here reads one
    release = supported(RELEASE)(release_root(RELEASE))
    torch.set_num_threads(1)
    rows, shown = [], []
    for window in (None, 64):
        for page_size in PAGES:
            for size in BATCHES:
                found = []
                for count in slots:
                    pages, batch = count // page_size, MeasuredBatch(size, page_size)
                    geometry = Geometry(page_size, window, pages, pages if window else 0, size, 4096)
                    with torch.inference_mode():
                        sides = Ours(geometry, batch), Theirs(geometry, batch, release)
                        found.append(_measured(sides, runs))
                for number, work in enumerate(WORK):
                    ours, theirs = ([each[side][number] for each in found] for side in (0, 1))
                    what = {"work": work, "pools": 2 if window else 1, "page": page_size,
                            "batch": f"{size} x {BATCHES[size]}"}  # fmt: skip
                    for n, a, b in zip(slots, ours, theirs):
                        rows.append(what | {"slots": n, "ours_us": round(a, 1), "theirs_us": round(b, 1)})
                    ratios = {f"at {n:,}": f"{b / a:.1f}" for n, a, b in zip(slots, ours, theirs)}
                    shown.append(what | ratios | {"plot": _plot(ours, theirs)})
    text = out.console
    text.print(f"How many times as long sglang {RELEASE} takes for pools of so many slots. In the plot")
    text.print(f"o is ours, x theirs; from {_FROM:g} us on, a decade every {_PLOT // _DECADES} columns.")
    render.listing(text, shown, {name: name for name in shown[0]})
    out.end(rows)
