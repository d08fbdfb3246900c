"""KV of one server as bytes at addresses, so that a wrong address reads another token's KV, or none."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

# Words of a token, 8 bytes each: the stamp in the first, the group in the second, the stamp in those up to
# the drafter's, which are the group and the stamp of its KV.
WORDS = 8
_DRAFTER = 6


class TensorMemory:
    """The KV of one server, for the runner as its dictionary of blocks: the group that last wrote a block,
    and the stamps in its slots. blocks: with the null block; size: tokens of the largest block."""

    def __init__(self, blocks: int, size: int) -> None:
        self.tensor = torch.zeros((blocks, size * WORDS), dtype=torch.int64)
        self._words = self.tensor.numpy().reshape(blocks, size, WORDS)
        self._base = self.tensor.data_ptr()
        self._bytes = size * WORDS * 8
        self.size = size

    def block_at(self, address: int) -> int | None:
        """The block at an address; None where another server's memory is."""
        at = (address - self._base) // self._bytes
        return at if 0 <= at < len(self._words) else None

    def stamp(self, block: int, group: int, _: int, at: int, value: int) -> None:
        """Write a slot of a block. What another group has written in the block is gone."""
        row = self._claimed(block, group)[at]
        row[:_DRAFTER] = value
        row[1] = group + 1

    def stamp_drafted(self, block: int, group: int, _: int, at: int, value: int) -> None:
        """Write the drafter's KV of a slot of a block."""
        self._claimed(block, group)[at, _DRAFTER:] = group + 1, value

    def drafted(self, block: int, group: int, _: int, at: int) -> int:
        """The stamp of the drafter's KV in a slot, 0 without any of this group."""
        owner, stamp = self._words[block, at, _DRAFTER:].tolist()
        return int(stamp) if owner == group + 1 else 0

    def _claimed(self, block: int, group: int) -> Any:
        """The words of a block for a group. What another group has written there is gone."""
        rows = self._words[block]
        owners = rows[:, (1, _DRAFTER)]
        if (owners[owners != 0] != group + 1).any():
            rows[:] = 0
        return rows

    def get(self, block: int, default: Any = (-1, ())) -> Any:
        """The group and the stamps of a block, those of the drafter behind the others."""
        group, slots = self.held()[block]
        if group < 0:
            return default
        drafted = [self.drafted(block, group, self.size, at) for at in range(self.size)]
        return group, (*slots, *drafted) if any(drafted) else slots

    def __setitem__(self, block: int, held: tuple[int, Any]) -> None:
        group, slots = held
        self._words[block] = 0
        for at, value in enumerate(slots):
            if value:
                write = self.stamp if at < self.size else self.stamp_drafted
                write(block, group, self.size, at % self.size, value)

    def held(self) -> list[tuple[int, tuple[int, ...]]]:
        """The group of each block (-1: none), and the stamps of its slots, 0 for a slot that is not whole."""
        owners = self._words[:, :, 1]
        first = (owners != 0).argmax(axis=1)
        groups = owners[np.arange(len(owners)), first]
        same = (self._words[:, :, 2:_DRAFTER] == self._words[:, :, :1]).all(axis=2)
        whole = same & (owners == groups[:, None]) & (groups[:, None] != 0)
        stamps = np.where(whole, self._words[:, :, 0], 0).tolist()
        return [
            (group - 1, tuple(slots) if group else ())
            for group, slots in zip(groups.tolist(), stamps)
        ]

    def caches(self, layers: int, tokens_first: bool, kernel_blocks: int = 1) -> dict[str, Any]:
        """The KV cache of each layer, as the release registers them: all in this memory, for groups share
        it. tokens_first: a block's tokens come before its heads, as up to 0.31. kernel_blocks: that a block
        is divided into."""
        size = self.size // kernel_blocks
        shape = (size, 1) if tokens_first else (1, size)
        blocks = len(self._words) * kernel_blocks
        flat = self.tensor.view(torch.float32).view(blocks, *shape, 2 * WORDS)
        return {f"layer{at}": flat for at in range(layers)}
