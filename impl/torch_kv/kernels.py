"""Triton kernel behind KVStore.alloc_extend on CUDA, imported there alone: triton is optional. For pages of
one token torch needs no more operators than that."""

# No `from __future__ import annotations`: triton reads the annotations of a kernel.
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _fill(
    lanes: Any,
    new_full: Any,
    new_swa: Any,
    req_to_token: Any,
    full_to_swa: Any,
    batch: Any,
    width: Any,
    page_size: tl.constexpr,
    has_swa: tl.constexpr,
    block: tl.constexpr,
) -> None:
    lane = tl.program_id(0)
    row = tl.load(lanes + lane)
    start = tl.load(lanes + batch + lane)
    count = tl.load(lanes + 2 * batch + lane)
    offset = tl.load(lanes + 3 * batch + lane)
    i = tl.program_id(1) * block + tl.arange(0, block)
    mine = i < count
    position = start + i
    rank = position // page_size - (start + page_size - 1) // page_size
    fresh = mine & (rank >= 0)
    cells = req_to_token + row * width
    last = tl.load(cells + start - 1, mask=start > 0, other=0).to(tl.int64)
    taken = tl.load(new_full + offset + rank, mask=fresh, other=0)
    slot = tl.where(fresh, taken, last // page_size) * page_size + position % page_size
    tl.store(cells + position, slot, mask=mine)
    if has_swa:
        opened = tl.load(full_to_swa + last) // page_size
        taken = tl.load(new_swa + offset + rank, mask=fresh, other=0)
        swa_slot = tl.where(fresh, taken, opened) * page_size + position % page_size
        tl.store(full_to_swa + slot, swa_slot, mask=mine)


def fill(
    lanes: Tensor,
    longest: int,
    new_full: Tensor,
    new_swa: Tensor | None,
    req_to_token: Tensor,
    full_to_swa: Tensor,
    page_size: int,
) -> None:
    """Enter the slots of a batch in req_to_token (int32 [rows, width]) and full_to_swa (int64).

    lanes: int64 [4, B]: of each lane its row, first position, number of tokens, and where its new
    pages begin among those of the batch. longest: most tokens of a lane, known on the host.
    new_full, new_swa: int64 [n] new pages of either pool (new_swa None without SWA).
    """
    batch = lanes.shape[1]
    _fill[(batch, triton.cdiv(longest, BLOCK))](
        lanes.contiguous(),
        new_full,
        new_full if new_swa is None else new_swa,
        req_to_token,
        full_to_swa,
        batch,
        req_to_token.shape[1],
        page_size=page_size,
        has_swa=new_swa is not None,
        block=BLOCK,
    )
