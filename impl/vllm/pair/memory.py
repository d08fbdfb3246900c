"""The KV of one server as bytes at addresses: a transfer with a wrong address reads the wrong token's KV."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

# Words of a token (8 bytes each): 0 the stamp, 1 the group + 1, 2 to 5 the stamp again, so that a partial
# copy is seen, 6 and 7 the group + 1 and the stamp of the drafter's KV.
WORDS = 8
_DRAFTER = 6


class TensorMemory:
    """The KV of one server, with the interface of SlotMemory: for each block the group that last wrote it and
    the stamps in its slots.

    blocks: number of blocks, the null block included.
    size: size of the largest block (tokens).
    """

    def __init__(self, blocks: int, size: int) -> None:
        self.tensor = torch.zeros((blocks, size * WORDS), dtype=torch.int64)
        self._words = self.tensor.numpy().reshape(blocks, size, WORDS)
        self._base = self.tensor.data_ptr()
        self._bytes = size * WORDS * 8
        self.size = size

    def block_at(self, address: int) -> int | None:
        """Return the block at an address, None for an address outside of this memory."""
        block = (address - self._base) // self._bytes
        return block if 0 <= block < len(self._words) else None

    def stamp(self, block: int, group: int, _: int, slot: int, value: int) -> None:
        """Write the KV of a slot of a block. Slots of another group in the block are cleared."""
        row = self._claimed(block, group)[slot]
        row[:_DRAFTER] = value
        row[1] = group + 1

    def stamp_drafted(self, block: int, group: int, _: int, slot: int, value: int) -> None:
        """Write the drafter's KV of a slot of a block."""
        self._claimed(block, group)[slot, _DRAFTER:] = group + 1, value

    def drafted(self, block: int, group: int, _: int, slot: int) -> int:
        """Return the stamp of the drafter's KV in a slot, 0 if this group has none there."""
        owner, stamp = self._words[block, slot, _DRAFTER:].tolist()
        return int(stamp) if owner == group + 1 else 0

    def _claimed(self, block: int, group: int) -> Any:
        """Return the words of a block that a group is about to write. Slots of another group are cleared."""
        rows = self._words[block]
        owners = rows[:, (1, _DRAFTER)]
        if (owners[owners != 0] != group + 1).any():
            rows[:] = 0
        return rows

    def get(self, block: int, default: Any = (-1, ())) -> Any:
        """Return the group and the stamps of a block; the drafter's stamps, if there are any, are the last.
        """
        group, slots = self.held()[block]
        if group < 0:
            return default
        drafted = [self.drafted(block, group, self.size, index) for index in range(self.size)]
        return group, (*slots, *drafted) if any(drafted) else slots

    def __setitem__(self, block: int, held: tuple[int, Any]) -> None:
        group, slots = held
        self._words[block] = 0
        for index, value in enumerate(slots):
            if value:
                write = self.stamp if index < self.size else self.stamp_drafted
                write(block, group, self.size, index % self.size, value)

    def held(self) -> list[tuple[int, tuple[int, ...]]]:
        """Return for each block its group (-1: none) and the stamps of its slots, 0 for a slot that is not
        whole."""
        owners = self._words[:, :, 1]
        first_slots = (owners != 0).argmax(axis=1)
        groups = owners[np.arange(len(owners)), first_slots]
        same = (self._words[:, :, 2:_DRAFTER] == self._words[:, :, :1]).all(axis=2)
        is_held = same & (owners == groups[:, None]) & (groups[:, None] != 0)
        stamps = np.where(is_held, self._words[:, :, 0], 0).tolist()
        return [
            (group - 1, tuple(slots) if group else ())
            for group, slots in zip(groups.tolist(), stamps)
        ]

    def caches(self, layers: int, tokens_first: bool, kernel_blocks: int = 1) -> dict[str, Any]:
        """Return the KV cache of each layer for the release to register: all layers share this memory, as
        groups do.

        tokens_first: the token dimension is before the head dimension, as up to 0.31. kernel_blocks: number
        of kernel blocks in a block.
        """
        size = self.size // kernel_blocks
        shape = (size, 1) if tokens_first else (1, size)
        blocks = len(self._words) * kernel_blocks
        flat = self.tensor.view(torch.float32).view(blocks, *shape, 2 * WORDS)
        return {f"layer{index}": flat for index in range(layers)}
