"""Recurrent state of a server of a pair, in the bytes that it shares with KV and that the connector sends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from impl.vllm.pair.memory import WORDS, TensorMemory
from impl.vllm.states import RecurrentLayers, StateRunnerV1
from reference.blocks.config import EngineConfig

# Rows of the window of a convolution: an owner and a stamp for each of the Mamba2 projections x, B and C. The
# owner includes the number of the projection, so that two projections that are swapped are seen.
_PROJECTIONS = range(3)
_ROWS = 2 * len(_PROJECTIONS)


def words_of_state(config: EngineConfig) -> int:
    """Return the size of a state: the window of the convolution, then the recurrent state (words of 8
    bytes)."""
    return _ROWS * (1 + config.drafts) + 2


def lay_out_states(pool: Any, config: EngineConfig) -> None:
    """Give the recurrent layers of a KVCacheConfig the shapes of a Mamba2 model in layout DS, with pages as
    large as those of attention."""
    page = 8 * WORDS * page_tokens(config)
    for index in config.recurrent:
        group = pool.kv_cache_groups[index]
        group.kv_cache_spec = replace(
            group.kv_cache_spec, shapes=((_ROWS, 1 + config.drafts), (1, 2)),
            dtypes=(torch.int64, torch.int64), page_size_padded=page,
        )  # fmt: skip


def page_tokens(config: EngineConfig) -> int:
    """Return the size of the largest block of a group with KV (tokens)."""
    return max(group.block_size for group in config.groups if not group.state)


class PairStateMemory(TensorMemory):
    """The memory of a server with recurrent layers, with the interface of StateMemory.

    A block of a recurrent group holds the window of the convolution, with one column for each position at
    which a verify round can end, then the recurrent state. A write of KV into the block clears both.
    windows: the window of each block, as the layers see it.
    states: the recurrent state of each block, as the layers see it.
    """

    def __init__(self, config: EngineConfig) -> None:
        blocks = config.blocks + 1
        size = page_tokens(config)
        super().__init__(blocks, size)
        self.groups = frozenset(config.recurrent)
        columns = 1 + config.drafts
        page = size * WORDS
        self.windows = self.tensor.as_strided((blocks, _ROWS, columns), (page, columns, 1))
        self.states = self.tensor.as_strided((blocks, 1, 2), (page, 2, 1), _ROWS * columns)

    def state(self, block: int, group: int) -> int:
        """Return the stamp of the recurrent state in a block, 0 if the block has none of this group."""
        owner, stamp = self.states[block, 0].tolist()
        return int(stamp) if owner == group + 1 else 0

    def window(self, block: int, group: int, offset: int = 0) -> int:
        """Return the stamp in the window of the convolution that begins `offset` tokens later, 0 if its
        projections are not all from one state of this group."""
        column = self.windows[block, :, offset].tolist()
        stamps = {*column[1::2]}
        return int(stamps.pop()) if column[::2] == _owners(group) and len(stamps) == 1 else 0

    def _claimed(self, block: int, group: int) -> Any:
        """Return the words of a block that a group with KV is about to write. A state in the block is
        cleared."""
        if self._state_group(block) >= 0:
            self.tensor[block] = 0
        return super()._claimed(block, group)

    def get(self, block: int, default: Any = (-1, ())) -> Any:
        """Return the group and the stamps of a block, in the order of `held`."""
        if self._state_group(block) >= 0:
            return self.held()[block]
        return super().get(block, default)

    def write_state(self, block: int, group: int, stamp: int) -> None:
        """Write a recurrent state, as a kernel does."""
        if self._state_group(block) != group:
            self.tensor[block] = 0
        self.states[block, 0] = torch.tensor([group + 1, stamp])

    def write_windows(self, block: int, group: int, stamps: Sequence[int]) -> None:
        """Write consecutive windows of the convolution, as a kernel does."""
        rows = [row for owner in _owners(group) for row in ([owner] * len(stamps), list(stamps))]
        self.windows[block, :, : len(stamps)] = torch.tensor(rows)

    def _state_group(self, block: int) -> int:
        """Return the group of the recurrent state in a block, -1 for none."""
        group = int(self.states[block, 0, 0]) - 1
        return group if group in self.groups else -1

    def __setitem__(self, block: int, held: tuple[int, Any]) -> None:
        group, slots = held
        if group not in self.groups:
            super().__setitem__(block, held)
            return
        self.tensor[block] = 0
        self.write_state(block, group, slots[0])
        self.write_windows(block, group, slots[1:])

    def held(self) -> list[tuple[int, tuple[int, ...]]]:
        """Return for each block its group (-1: none) and its stamps: one for each slot of KV, or that of
        the recurrent state followed by those of the windows."""
        blocks = super().held()
        columns = range(self.windows.shape[2])
        for block in range(len(blocks)):
            if (group := self._state_group(block)) >= 0:
                windows = (self.window(block, group, at) for at in columns)
                blocks[block] = group, (self.state(block, group), *windows)
        return blocks


def _owners(group: int) -> list[int]:
    return [group + 1 + 1000 * projection for projection in _PROJECTIONS]


class PairLayers(RecurrentLayers):
    """Recurrent layers in the layout that the connector needs: channels before tokens."""

    dim_first = True


class PairStateRunner(StateRunnerV1):
    """The worker of a server of a pair with recurrent layers. memory: a PairStateMemory."""

    layers_class = PairLayers
