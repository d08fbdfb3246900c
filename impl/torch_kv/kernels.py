"""Triton kernels behind KVStore on CUDA, imported only there: triton is optional. One launch does what takes
torch a dozen operators, each of which costs a GPU more than its work."""

# No `from __future__ import annotations`: triton reads the annotations of a kernel, and knows only its own.
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from impl.torch_kv.pool import PagePool

BLOCK = 128
# Numbers and addresses of every kind, for which one compilation does.
_ANY = ["row", "start", "start_by", "end", "end_by", "more", "new_full", "new_swa", "first", "first_by",
        "swa_first", "swa_first_by", "free_full", "free_swa", "width"]  # fmt: skip


class Store(Protocol):
    """The parts of a KVStore that the kernels read and write."""

    page_size: int
    width: int
    device: torch.device
    full: PagePool
    swa: PagePool | None
    req_to_token: Tensor
    full_to_swa: Tensor


@triton.jit(do_not_specialize=_ANY)  # type: ignore[untyped-decorator, unused-ignore]
def _fill(  # type: ignore[no-untyped-def]
    row, start, start_by, end, end_by, more, new_full, new_swa, req_to_token, full_to_swa, slots, width,
    page_size: tl.constexpr, has_swa: tl.constexpr, lanes: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Write the slots of new positions into rows, and map their SWA slots. An entry takes the pages behind
    those of the entries before it; its first positions fill the page that is open."""
    lane = tl.program_id(0)
    each = tl.arange(0, lanes)
    earlier = each < lane
    starts = tl.load(start + each * start_by, mask=earlier, other=0)
    ends = tl.load(end + each * end_by, mask=earlier, other=0) + tl.where(earlier, more, 0)
    fresh = (ends + page_size - 1) // page_size - (starts + page_size - 1) // page_size
    taken_by_earlier = tl.sum(fresh, 0)
    begin = tl.load(start + lane * start_by)
    position = begin + tl.program_id(1) * block + tl.arange(0, block)
    mine = position < tl.load(end + lane * end_by) + more
    rank = position // page_size - (begin + page_size - 1) // page_size
    is_fresh = mine & (rank >= 0)
    cells = req_to_token + tl.load(row + lane) * width
    last = tl.load(cells + begin - 1, mask=begin > 0, other=0).to(tl.int64)
    page = tl.load(new_full + taken_by_earlier + rank, mask=is_fresh)
    slot = tl.where(is_fresh, page, last // page_size) * page_size + position % page_size
    tl.store(cells + position, slot, mask=mine)
    tl.store(slots + tl.sum(ends - starts, 0) + position - begin, slot, mask=mine)
    if has_swa:
        opened = tl.load(full_to_swa + last) // page_size
        page = tl.load(new_swa + taken_by_earlier + rank, mask=is_fresh)
        swa_slot = tl.where(is_fresh, page, opened) * page_size + position % page_size
        tl.store(full_to_swa + slot, swa_slot, mask=mine)


def fill(
    store: Store, row: Tensor, start: Tensor, end: Tensor, more: int, counts: list[int], pages: int
) -> Tensor:
    """Enter slots of `pages` new pages of each pool for positions [start[i], end[i] + more) of each row in
    req_to_token, full_to_swa and, end to end, in what is returned: int64 [T].

    row, start, end: int64 [B], row without gaps.
    counts: positions of each entry, known on the host.
    """
    slots = torch.empty(sum(counts), dtype=torch.int64, device=store.device)
    if len(slots):
        full = store.full.take(pages)
        swa = None if store.swa is None else store.swa.take(pages)
        _fill[(len(row), triton.cdiv(max(counts), BLOCK))](
            row, start, start.stride(0), end, end.stride(0), more, full, full if swa is None else swa,
            store.req_to_token, store.full_to_swa, slots, store.width, page_size=store.page_size,
            has_swa=swa is not None, lanes=triton.next_power_of_2(len(row)), block=BLOCK,
        )  # fmt: skip
    return slots


@triton.jit(do_not_specialize=_ANY)  # type: ignore[untyped-decorator, unused-ignore]
def _give(  # type: ignore[no-untyped-def]
    row, first, first_by, swa_first, swa_first_by, end, end_by, free_full, free_swa, req_to_token,
    full_to_swa, width, page_size: tl.constexpr, has_full: tl.constexpr, has_swa: tl.constexpr,
    lanes: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Put the pages of rows, from `first` to `end`, behind those in the free list, and the mapped SWA pages
    from `swa_first` on. The mapping of their slots is cleared."""
    lane = tl.program_id(0)
    each = tl.arange(0, lanes)
    earlier = each < lane
    ends = tl.load(end + each * end_by, mask=earlier, other=0)
    begin = tl.load(first + lane * first_by)
    index = begin + tl.program_id(1) * block + tl.arange(0, block)
    mine = index < tl.load(end + lane * end_by)
    cells = req_to_token + tl.load(row + lane) * width
    slot = tl.load(cells + index * page_size, mask=mine)
    page = slot // page_size
    if has_full:
        firsts = tl.load(first + each * first_by, mask=earlier, other=0)
        by_earlier = tl.sum(tl.maximum(ends - firsts, 0), 0)
        tl.store(free_full + by_earlier + index - begin, page, mask=mine)
    if has_swa:
        firsts = tl.load(swa_first + each * swa_first_by, mask=earlier, other=0)
        by_earlier = tl.sum(tl.maximum(ends - firsts, 0), 0)
        swa_begin = tl.load(swa_first + lane * swa_first_by)
        live = mine & (index >= swa_begin)
        swa_slot = tl.load(full_to_swa + slot, mask=live)
        tl.store(free_swa + by_earlier + index - swa_begin, swa_slot // page_size, mask=live)
        for offset in range(page_size):
            tl.store(full_to_swa + page * page_size + offset, swa_slot * 0, mask=mine)


def give(
    store: Store,
    row: Tensor,
    first: Tensor,
    swa_first: Tensor,
    end: Tensor,
    pages: int,
    swa_pages: int,
) -> None:
    """Enter full pages [first[i], end[i]) and SWA pages [swa_first[i], end[i]) of each row, so many in all,
    in the free lists, and clear the mapping of all of these.

    row, first, swa_first, end: int64 [B], row without gaps, first at most swa_first.
    """
    full = store.full.room(pages) if pages else None
    swa = store.swa.room(swa_pages) if store.swa is not None and swa_pages else None
    free = swa if full is None else full
    if free is not None:
        _give[(len(row), triton.cdiv(len(free), BLOCK))](
            row, first, first.stride(0), swa_first, swa_first.stride(0), end, end.stride(0), free,
            free if swa is None else swa, store.req_to_token, store.full_to_swa, store.width,
            page_size=store.page_size, has_full=full is not None, has_swa=store.swa is not None,
            lanes=triton.next_power_of_2(len(row)), block=BLOCK,
        )  # fmt: skip
