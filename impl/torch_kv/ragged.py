"""Ranges of different lengths, one per lane, laid end to end as flat tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def ragged(start: Tensor, count: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """The numbers [start[i], start[i] + count[i]) of every lane i, end to end.

    start, count: int64 [B] on one device; total: sum of count, known on the host so that nothing
    waits for the device. Returns (lane, value), int64 [total] each.
    """
    lane = torch.repeat_interleave(count, output_size=total)
    before = count.cumsum(0) - count
    value = (start - before).take(lane)
    value += torch.arange(total, dtype=torch.int64, device=start.device)
    return lane, value
