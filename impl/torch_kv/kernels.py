"""Triton kernels behind KVStore on CUDA, imported there alone: triton is optional. One launch does what takes
torch a dozen operators, each of which costs a GPU more than its work."""

# No `from __future__ import annotations`: triton reads the annotations of a kernel, and knows its own alone.
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128
# Numbers and addresses of every kind, for which one compilation does.
_ANY = ["row", "start", "start_by", "end", "end_by", "more", "new_full", "new_swa", "first", "first_by",
        "swa_first", "swa_first_by", "free_full", "free_swa", "width"]  # fmt: skip


@triton.jit(do_not_specialize=_ANY)  # type: ignore[untyped-decorator, unused-ignore]
def _fill(  # type: ignore[no-untyped-def]
    row, start, start_by, end, end_by, more, new_full, new_swa, req_to_token, full_to_swa, slots, width,
    page_size: tl.constexpr, has_swa: tl.constexpr, lanes: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
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
    row: Tensor,
    start: Tensor,
    end: Tensor,
    more: int,
    longest: int,
    slots: Tensor,
    new_full: Tensor,
    new_swa: Tensor | None,
    req_to_token: Tensor,
    full_to_swa: Tensor,
    page_size: int,
) -> None:
    """Enter slots for positions [start[i], end[i] + more) of each row in req_to_token (int32 [rows, width]),
    full_to_swa (int64) and, end to end, in `slots` (int64 [T]).

    row, start, end: int64 [B], row without gaps; longest: most positions of a lane, known on the host.
    new_full, new_swa: int64 [n] new pages of either pool (new_swa None without SWA).
    """
    _fill[(len(row), triton.cdiv(longest, BLOCK))](
        row, start, start.stride(0), end, end.stride(0), more, new_full,
        new_full if new_swa is None else new_swa, req_to_token, full_to_swa, slots, req_to_token.shape[1],
        page_size=page_size, has_swa=new_swa is not None, lanes=triton.next_power_of_2(len(row)), block=BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=_ANY)  # type: ignore[untyped-decorator, unused-ignore]
def _give(  # type: ignore[no-untyped-def]
    row, first, first_by, swa_first, swa_first_by, end, end_by, free_full, free_swa, req_to_token,
    full_to_swa, width, page_size: tl.constexpr, has_full: tl.constexpr, has_swa: tl.constexpr,
    lanes: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
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
    row: Tensor,
    first: Tensor,
    swa_first: Tensor,
    end: Tensor,
    free_full: Tensor | None,
    free_swa: Tensor | None,
    req_to_token: Tensor,
    full_to_swa: Tensor,
    page_size: int,
) -> None:
    """Enter full pages [first[i], end[i]) of each row in free_full, SWA pages [swa_first[i], end[i]) in
    free_swa (int64 [n] each, None where none go), and clear the mapping of all of these.

    row, first, swa_first, end: int64 [B], row without gaps, first at most swa_first.
    """
    free = free_swa if free_full is None else free_full
    assert free is not None
    _give[(len(row), triton.cdiv(len(free), BLOCK))](
        row, first, first.stride(0), swa_first, swa_first.stride(0), end, end.stride(0), free,
        free if free_swa is None else free_swa, req_to_token, full_to_swa, req_to_token.shape[1],
        page_size=page_size, has_full=free_full is not None, has_swa=bool(len(full_to_swa)),
        lanes=triton.next_power_of_2(len(row)), block=BLOCK,
    )  # fmt: skip
