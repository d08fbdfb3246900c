"""Recurrent state of LMDeploy: slots of requests, checkpoints in the trie, what the worker does with both.

LMDeploy has a pool of slots beside its blocks. Facts number it behind them: slot n is block `blocks` +
n."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from reference.blocks.config import EngineConfig
from reference.blocks.facts import Published, StateUse, chained
from reference.recurrent_states import EMPTY, NOWHERE

_CHECKPOINTS = 2  # prefix_cache_state_budget


class CheckpointedStates:
    """The states of one run, without slots for a model that has no recurrent layers.

    slots: number of slots.
    blocks: number of blocks of KV, which are all others.
    stamps: slot -> the stamp of the state in it.
    """

    def __init__(self, config: EngineConfig) -> None:
        # ExecutorBase counts one for each request of a batch, and one to spare.
        self.slots = config.max_seqs + 1 + _CHECKPOINTS if config.recurrent else 0
        self.blocks = config.blocks - self.slots
        self.stamps: dict[int, int] = {}
        self._size = config.groups[0].block_size
        self._every = max(0, config.retention or self._size)

    @property
    def settings(self) -> dict[str, Any]:
        """The fields of CacheConfig."""
        if not self.slots:
            return {}
        return {
            "num_state_caches": self.slots + 1,
            "states_shapes": [((1,), "float32")],
            "prefix_cache_state_budget": _CHECKPOINTS,
            "prefix_cache_decode_state_interval": self._every,
        }

    def fold(
        self, slot: int, start: int, tokens: Sequence[int], origin: int
    ) -> tuple[StateUse, ...]:
        """Fold tokens into the state of a slot, as the layers do; the first tokens of a text into an empty
        state.

        start: position of the first of them.
        origin: the origin of the text.
        """
        if not self.slots:
            return ()
        previous = self.stamps.get(slot, EMPTY) if start else EMPTY
        self.stamps[slot] = chained(tokens, previous if start else origin)[-1]
        block = self.blocks + slot if slot >= 0 else 0
        return (
            StateUse(1, block if start else NOWHERE, (previous, previous), ((block, self.stamps[slot]),)),
        )

    def copy_slots(self, plan: tuple[Sequence[int], Sequence[int]] | None) -> None:
        """Copy slots (StateCacheEngine.copy_slots)."""
        for source, target in zip(*plan or ((), ())):
            self.stamps[target] = self.stamps.get(source, EMPTY)

    def block_table(self, slot: int) -> tuple[int, ...]:
        """Return the block of a slot; none for -1."""
        return (self.blocks + slot,) if slot >= 0 else ()

    @property
    def memory(self) -> dict[int, int]:
        """The stamp of the state in each block."""
        return {self.blocks + slot: stamp for slot, stamp in self.stamps.items() if slot >= 0}

    def published_states(
        self, checkpoint: Any, physical_blocks: list[int], origin: int
    ) -> Iterator[Published]:
        """Yield the states that a checkpoint of the trie names.

        physical_blocks: the block for each logical one.
        origin: the origin of its text.
        """
        if not checkpoint.published:
            return
        start = (checkpoint.step - 1) // self._size * self._size
        tokens = checkpoint.exact_match_data.token_ids.tolist()
        stamps = tuple(chained(tokens, origin)[start:])
        for group, block in enumerate(self._checkpoint_blocks(checkpoint, physical_blocks)):
            if block:
                yield Published(block, group, stamps)

    def blocks_in_flight(self, checkpoint: Any, physical_blocks: list[int]) -> list[int]:
        """Return blocks of a checkpoint that batches in flight copy from or to."""
        copied = not checkpoint.published or checkpoint.pin_count
        return [block for block in self._checkpoint_blocks(checkpoint, physical_blocks) if block and copied]

    def _checkpoint_blocks(self, checkpoint: Any, physical_blocks: list[int]) -> tuple[int, int]:
        """Return the block in which the text ends, if it ends within one, and the block with the state."""
        frozen = checkpoint.frozen_block_id
        return physical_blocks[frozen] if frozen >= 0 else 0, self.blocks + checkpoint.slot
