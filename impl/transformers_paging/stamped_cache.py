"""KV of the model that the driver plays, in the cache tensor of the release.

The KV of a position is its stamp, in the keys and in the values. The release's own code moves it: the update
of an attention layer, copies of blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_WORDS = 8  # int64 words of a row: a head of 32 numbers of 16 bits
_HEAD = 4 * _WORDS


class StampedCache:
    """The KV of one group of layers, which is one layer.

    allocator: the release's CacheAllocator of the group.
    """

    def __init__(self, allocator: Any) -> None:
        self._allocator = allocator
        [self._layer] = allocator.layer_indices
        self._rows = allocator.cache_tensor.view(-1, _HEAD).view(torch.int64)

    def update(self, stamps: Sequence[int], read: Sequence[int], write: Sequence[int]) -> list[int]:
        """Return the stamps that attention gets for a batch, which writes `stamps`.

        read, write: rows of the cache, as the release numbers them.
        """
        rows = torch.tensor(stamps, dtype=torch.int64).view(-1, 1).repeat(1, _WORDS)
        states = rows.view(torch.float16).view(-1, 1, _HEAD)
        index = [torch.tensor(each, dtype=torch.int64) for each in (read, write)]
        keys, values = self._allocator.update(states, states.clone(), self._layer, *index)
        return _same(*(_stamps(each.reshape(-1, _HEAD).view(torch.int64)) for each in (keys, values)))

    def blocks(self) -> list[list[int]]:
        """Return the stamps in each block of the release's cache, 0 in a slot that was never written, or
        whose keys and values are of different positions."""
        size = self._allocator.tokens_per_page
        words = _stamps(self._rows)
        starts = range(0, len(words), self._allocator.block_physical_stride)
        return [
            _same(words[start : start + size], words[start + size : start + 2 * size])
            for start in starts
        ]


def _stamps(rows: torch.Tensor) -> list[int]:
    found: list[int] = rows[:, 0].tolist()
    return found


def _same(keys: Sequence[int], values: Sequence[int]) -> list[int]:
    return [key if key == value else 0 for key, value in zip(keys, values, strict=True)]
