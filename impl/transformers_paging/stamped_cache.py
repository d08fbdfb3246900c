"""KV of the model that the driver plays, in the cache tensor of the release.

The KV of a position is its stamp, and the number of its group of layers, in the keys and in the values. The
release's own code moves it: the update of an attention layer, copies of blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_WORDS = 8  # int64 words of a row: a head of 32 numbers of 16 bits
_HEAD = 4 * _WORDS

Slot = tuple[int, int]  # stamp and group of a position; 0 and -1 where nothing was written


class StampedCache:
    """The KV of all groups of layers, of one layer each, so that blocks of all groups are alike.

    allocators: the release's CacheAllocator of each group.
    """

    def __init__(self, allocators: Sequence[Any]) -> None:
        self._allocators = allocators
        self._rows = _words(allocators[0].cache_tensor)

    def update(
        self, group: int, stamps: Sequence[int], read: Sequence[int], write: Sequence[int]
    ) -> list[int]:
        """Return the stamps that attention gets for a batch, which writes `stamps`; 0 for another group's.

        read, write: rows of the cache, as the release numbers them.
        """
        row = torch.zeros(len(stamps), _WORDS, dtype=torch.int64)
        row[:, 0] = torch.tensor(stamps, dtype=torch.int64)
        row[:, 1] = group + 1
        states = row.view(torch.float16).view(-1, 1, _HEAD)
        index = [torch.tensor(each, dtype=torch.int64) for each in (read, write)]
        allocator = self._allocators[group]
        [layer] = allocator.layer_indices
        keys, values = allocator.update(states, states.clone(), layer, *index)
        slots = _same(_slots(_words(keys)), _slots(_words(values)))
        return [stamp if owner == group else 0 for stamp, owner in slots]

    def blocks(self, memory: torch.Tensor | None = None) -> list[list[Slot]]:
        """Return the slots of each block of the release's cache, or of another tensor with such blocks."""
        size = self._allocators[0].tokens_per_page
        slots = _slots(self._rows if memory is None else _words(memory.view(torch.float16)))
        starts = range(0, len(slots), self._allocators[0].block_physical_stride)
        return [
            _same(slots[start : start + size], slots[start + size : start + 2 * size])
            for start in starts
        ]


class UnpinnedTorch:
    """torch for a module that allocates pinned memory, of which there is none without a device. The memory is
    empty: what is read before it is written has no stamp."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *sizes: Any, pin_memory: bool = False, **kinds: Any) -> torch.Tensor:
        del pin_memory
        return torch.zeros(*sizes, **kinds)


def _words(states: torch.Tensor) -> torch.Tensor:
    return states.reshape(-1, _HEAD).view(torch.int64)


def _slots(rows: torch.Tensor) -> list[Slot]:
    return [(stamp, group - 1) for stamp, group in rows[:, :2].tolist()]


def _same(keys: Sequence[Slot], values: Sequence[Slot]) -> list[Slot]:
    """Return the slots, without those whose keys and values are of different positions."""
    return [key if key == value else (0, -1) for key, value in zip(keys, values, strict=True)]
