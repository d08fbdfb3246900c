"""Allocation by host lists."""

from typing import Any

import torch

from impl.torch_kv.store import KVStore


def lanes(device: torch.device, *columns: list[int]) -> tuple[Any, ...]:
    return tuple(torch.tensor(column, dtype=torch.int64, device=device) for column in columns)


def extend(store: KVStore, rows: list[int], starts: list[int], ends: list[int]) -> torch.Tensor:
    """alloc_extend of host lists."""
    row, start, end = lanes(store.device, rows, starts, ends)
    span = store.span(row, start, end - start, [e - s for s, e in zip(starts, ends, strict=True)])
    return store.alloc_extend(row, start, end, span, store.pages(starts, ends))
