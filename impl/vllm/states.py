"""Recurrent layers on a CPU: a slot holds a stamp in place of a state, and stand-ins for the kernels read and
write stamps.

The release's own code moves states between blocks (vllm/v1/worker/mamba_utils.py). It copies bytes, so it
moves stamps too. The forward pass and the batch order of model runner V1 are stand-ins.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from impl.loading.optional import optional
from impl.stand_ins import Values, accepted_arguments
from impl.vllm.bare_scheduler import block_sizes, settings_of
from impl.vllm.runner import ModelRunnerV1, PersistentBatch, SlotMemory, batch_rows
from reference.blocks.config import EngineConfig
from reference.blocks.facts import Lane, StateUse, chain
from reference.recurrent_states import NOWHERE

_HERE = torch.device("cpu")
_UTILS = "vllm.v1.worker.mamba_utils"
_LAYERS = "vllm.model_executor.layers.mamba.mamba_utils"
_CHECKPOINT = "vllm.model_executor.layers.mamba.checkpoint"
_COLUMNS = 1 << 9  # of a block table on the device: more than the blocks of any text that is driven


class StateMemory(SlotMemory):
    """The memory of a runner with recurrent layers, by block.

    A block with a state has its group, the stamp of the recurrent state and the stamps in the window of the
    convolution.
    windows, states: tensors of both kinds of state; a row is (group + 1, stamp).
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__()
        self.groups = frozenset(config.recurrent)
        self.windows = torch.zeros(config.blocks + 1, 1 + config.drafts, 2, dtype=torch.int64)
        self.states = torch.zeros(config.blocks + 1, 2, dtype=torch.int64)

    def state(self, block: int, group: int) -> int:
        """Return the stamp of the recurrent state in a block, 0 if the block has none of this group."""
        return _stamp_of_group(self.states[block], group)

    def window(self, block: int, group: int, offset: int = 0) -> int:
        """Return the stamp in the window of the convolution that begins `offset` tokens later, 0 if another
        group has written it."""
        return _stamp_of_group(self.windows[block, offset], group)

    def write_state(self, block: int, group: int, stamp: int) -> None:
        """Write a recurrent state, as a kernel does."""
        super().pop(block, None)
        self.states[block] = torch.tensor([group + 1, stamp])

    def write_windows(self, block: int, group: int, stamps: Sequence[int]) -> None:
        """Write consecutive windows of the convolution, as a kernel does."""
        self.windows[block, : len(stamps)] = torch.tensor([[group + 1, stamp] for stamp in stamps])

    def get(self, block: int, default: Any = None) -> Any:
        group = int(self.states[block, 0]) - 1
        if group < 0:
            return super().get(block, default)
        windows = [_stamp_of_group(row, group) for row in self.windows[block]]
        return group, [int(self.states[block, 1]), *windows]

    def __setitem__(self, block: int, value: tuple[int, list[int]]) -> None:
        group, slots = value
        if group in self.groups:
            self.write_state(block, group, slots[0])
            self.write_windows(block, group, slots[1:])
            return
        self.states[block] = 0
        self.windows[block] = 0
        super().__setitem__(block, value)


def _stamp_of_group(row: torch.Tensor, group: int) -> int:
    """Return the stamp in a row of a state tensor, 0 if another group has written it."""
    owner, stamp = row.tolist()
    return int(stamp) if owner == group + 1 else 0


class RecurrentLayers:
    """The layers of the recurrent groups, with the reads and writes of their kernels for a batch entry.

    pool: the KVCacheConfig.
    align: prefix caching is on. A block then covers a part of the text, and the kernels keep the running
        state in the block of the last token; otherwise they keep it in the first block of the table.
    """

    dim_first = False  # layout of a window: channels before tokens (DS)

    def __init__(self, config: EngineConfig, memory: Any, pool: Any) -> None:
        """Find the release's function for checkpoints within a prompt.

        memory: the slots of states.
        pool: the release's KVCacheConfig.
        """
        self.config = config
        self.memory = memory
        self.align = config.caching
        self._place_checkpoints: Callable[..., Any] | None = None
        module = importlib.import_module(_CHECKPOINT)
        compute_checkpoints = vars(module).get("compute_mamba_prefill_checkpoints")
        if config.checkpoints and self.align and compute_checkpoints is not None:
            utils = importlib.import_module("vllm.v1.core.kv_cache_utils")
            settings = settings_of(config, overlap=False, v2=False)
            size, hashes = block_sizes(utils, pool, settings, config)
            lookahead = settings.num_hash_lookahead_tokens
            offered = {
                "hash_block_size": hashes,
                "checkpoint_alignment": config.checkpoints,
                "drop_eagle_block": config.eagle and not lookahead,
                "num_hash_lookahead_tokens": lookahead,
                "cache_hit_alignment_tokens": min(hashes, size),
            }
            self._place_checkpoints = partial(
                compute_checkpoints, **accepted_arguments(compute_checkpoints, offered)
            )

    def bind(self, pool: Any) -> Any:
        """Put byte copies of ours into the release's copy module. Return the module and the copy functions
        of the layers, by mamba_type where the release has them by type."""
        utils: Any = importlib.import_module(_UTILS)
        layers: Any = importlib.import_module(_LAYERS)
        if not self.dim_first:
            layers.is_conv_state_dim_first = _is_never_dim_first
            utils.is_conv_state_dim_first = _is_never_dim_first
        utils._TEMPORAL_TILES = 1
        utils._memcpy_u64_tiled = _copy_tile
        utils.batch_memcpy = _copy_all
        copies = layers.get_conv_copy_spec, layers.get_temporal_copy_spec
        if optional(utils, "validate_mamba_state_copy_funcs", None) is None:
            return utils, copies
        return utils, {
            pool.kv_cache_groups[self.config.recurrent[0]].kv_cache_spec.mamba_type: copies
        }

    def context(self, pool: Any) -> dict[str, Any]:
        """Return the layers by name, with the fields that the release reads from a forward context."""
        caches = [self.memory.windows, self.memory.states]
        names = (pool.kv_cache_groups[at].layer_names[0] for at in self.config.recurrent)
        return {name: Values(kv_cache=caches) for name in names}

    def entry(
        self, lane: Lane, accepted: int, origin: int = 0, *, is_round: bool
    ) -> tuple[StateUse, ...]:
        """Return the states that the kernels read and write for a batch entry, one StateUse for each group.

        accepted: accepted tokens of the previous round.
        origin: the stamp before the first token of the request's text.
        is_round: the entry is a verify round. It continues from the last accepted token of the previous
            round, and each of its tokens writes a state.
        """
        return tuple(
            self._use(lane, group, accepted, origin, is_round=is_round)
            for group in self.config.recurrent
        )

    def _use(
        self, lane: Lane, group: int, accepted: int, origin: int, *, is_round: bool
    ) -> StateUse:
        """Return what the kernels read and write of a state in one group (see entry)."""
        size = self.config.groups[group].block_size
        row = lane.tables[group]
        end = lane.start + len(lane.tokens)
        first_column = max(0, (end - 1) // size) if self.align else 0
        blocks = [
            row[column] if column < len(row) else 0
            for column in range(first_column, first_column + 1 + self.config.drafts)
        ]
        skip = accepted - 1 if is_round else 0
        block = NOWHERE
        read_stamps = (0, 0)
        stamp = origin
        if lane.start:
            block = blocks[skip]
            stamp = self.memory.state(block, group)
            read_stamps = stamp, self.memory.window(blocks[0], group, skip)
        stamps = []
        for token in lane.tokens:
            stamp = chain(stamp, token)
            stamps.append(stamp)
        if is_round or not stamps:  # an entry without a token writes no state
            return StateUse(group, block, read_stamps, tuple(zip(blocks, stamps)))
        writes = [(blocks[0], stamps[-1])]
        checkpoint_len, checkpoint_block = self._checkpoint(lane, size, row)
        if checkpoint_block:
            writes.insert(0, (checkpoint_block, stamps[checkpoint_len - 1]))
        return StateUse(group, block, read_stamps, tuple(writes))

    def _checkpoint(self, lane: Lane, size: int, row: Sequence[int]) -> tuple[int, int]:
        """Return the number of a prefill chunk's tokens after which it writes a checkpoint of its state, and
        the block of the checkpoint. Block 0 means no checkpoint: the kernel does not write the null block."""
        if self._place_checkpoints is None or lane.drafts or len(lane.tokens) < 2:
            return 0, 0
        end = lane.start + len(lane.tokens)
        count = len(lane.tokens)
        [length], [column] = self._place_checkpoints([end], [count], mamba_block_size=size)
        return length, row[column] if length and 0 <= column < len(row) else 0

    def run(self, lanes: list[Lane], are_rounds: Sequence[bool]) -> None:
        """Write the states of a batch. All entries have read before.

        are_rounds: whether each entry is a verify round.
        """
        for lane, is_round in zip(lanes, are_rounds):
            for use in lane.states:
                for block, stamp in use.writes:
                    self.memory.write_state(block, use.group, stamp)
                if is_round:
                    stamps = [stamp for _, stamp in use.writes]
                    self.memory.write_windows(use.writes[0][0], use.group, stamps)
                else:
                    for block, stamp in use.writes:
                        self.memory.write_windows(block, use.group, [stamp])


def _is_never_dim_first() -> bool:
    """Return the layout of windows, in the place of the release's `is_conv_state_dim_first`: tokens come
    before channels."""
    return False


def _copy_bytes(source: Any, target: Any, size: Any) -> None:
    ctypes.memmove(int(target), int(source), int(size))


def _copy_tile(source: Any, target: Any, size: Any, tile: Any, **_: Any) -> None:
    """Copy one tile, in the place of the release's `_memcpy_u64_tiled`. The first tile copies everything."""
    if not tile:
        _copy_bytes(source, target, size)


def _copy_all(sources: Any, targets: Any, sizes: Any) -> None:
    """Copy the regions, in the place of the release's `batch_memcpy`."""
    for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist()):
        _copy_bytes(source, target, size)


class MirroredBuffer:
    """A stand-in for `CpuGpuBuffer`: both sides share one tensor."""

    def __init__(self, size: int, dtype: Any, **_: Any) -> None:
        self.gpu = self.cpu = torch.zeros(
            size, dtype=torch.int64 if dtype == torch.uint64 else dtype
        )
        self.np = self.cpu.numpy()

    def copy_to_gpu(self, count: int | None = None) -> Any:
        return self.gpu if count is None else self.gpu[:count]


class DenseBatch(PersistentBatch):
    """The persistent batch of a hybrid model (gpu_input_batch.py): it has no gaps, and keeps for each request
    the accepted tokens of its last round."""

    def __init__(self, size: int, groups: int) -> None:
        super().__init__(size)
        self.num_accepted_tokens_cpu_tensor = torch.ones(size, dtype=torch.int64)
        self.num_accepted_tokens_cpu = self.num_accepted_tokens_cpu_tensor.numpy()
        self._tables = [torch.zeros(size, _COLUMNS, dtype=torch.int32) for _ in range(groups)]

    @property
    def req_ids(self) -> list[str]:
        return sorted(self.req_id_to_index, key=self.req_id_to_index.__getitem__)

    def add_request(self, state: Any) -> None:
        super().add_request(state)
        self.num_accepted_tokens_cpu[self.req_id_to_index[state.req_id]] = 1

    def condense(self) -> None:
        """Move the requests behind the first gap to the lowest free indices, until there is no gap."""
        index_of = self.req_id_to_index
        while index_of and max(index_of.values()) >= len(index_of):
            last = max(index_of, key=index_of.__getitem__)
            old = index_of[last]
            new = min({*range(len(index_of))} - {*index_of.values()})
            columns: Any = (
                self.rows,
                self.num_computed_tokens_cpu,
                self.num_tokens_no_spec,
                self.num_tokens,
                self.num_prompt_tokens,
                self.num_accepted_tokens_cpu,
            )
            for column in columns:
                column[new] = column[old]
            self.rows[old] = []
            index_of[last] = new

    def commit(self) -> None:
        """Copy the block tables to the tensors of the device."""
        for index in self.req_id_to_index.values():
            for table, row in zip(self._tables, self.rows[index]):
                table[index] = 0
                table[index, : len(row)] = torch.tensor(row, dtype=torch.int32)

    def __getitem__(self, group: int) -> Any:
        return Values(get_device_tensor=lambda _: self._tables[group])


class StateRunnerV1(ModelRunnerV1):
    """The worker of a hybrid model with model runner V1.

    pool: the KVCacheConfig.
    memory: None for a new StateMemory.
    """

    layers_class = RecurrentLayers
    # the release's copy module, its copy functions, its forward context and its buffers, with caching only
    _utils: Any = None
    _copies: Any = None
    _context: Any = None
    _buffers: Any = None

    def __init__(
        self,
        config: EngineConfig,
        overlap: bool,
        methods: dict[str, Any],
        pool: Any,
        memory: Any = None,
    ) -> None:
        """Make a runner with recurrent layers. With caching it has the release's MambaBuffers, whose kernels
        copy states between blocks.

        memory: that of a pair's server; None makes one.
        """
        super().__init__(config, overlap, methods)
        self.memory = StateMemory(config) if memory is None else memory
        self.layers = self.layers_class(config, self.memory, pool)
        self._pool = pool
        size = batch_rows(config)
        self.worker.kv_caches = self.memory
        self.worker.kv_cache_config = pool
        self.worker.input_batch = self.batch = DenseBatch(size, len(config.groups))
        self._running: dict[str, int] = {}  # request -> table column of its running state
        self._accepted = torch.ones(size, dtype=torch.int64)
        self._last_drafts: dict[str, int] = {}  # request -> drafts in the last batch
        if not self.layers.align:
            return
        self._utils, self._copies = self.layers.bind(pool)
        self._context = self.layers.context(pool)
        create = self._utils.MambaBuffers.create
        offered = {
            "max_num_reqs": size,
            "kv_cache_config": pool,
            "copy_funcs": self._copies,
            "device": _HERE,
            "make_buffer": MirroredBuffer,
            "with_postprocess_align": config.drafts > 0,
        }
        self._buffers = create(**accepted_arguments(create, offered))

    def prepare(self, scheduled: Any, previous: dict[str, int]) -> None:
        """Count the accepted tokens, and move states to the blocks in which they now run, as
        `_prepare_inputs` and `execute_model` do."""
        batch = self.batch
        count = len(batch.req_id_to_index)
        batch.commit()
        if self.overlap and not self.layers.align:
            self._count_on_device(previous)
            return
        if self.overlap and previous and self.config.drafts:
            counts = batch.num_accepted_tokens_cpu
            old_indices = [previous.get(name, -1) for name in batch.req_ids]
            counts[:count] = [counts[index] if index >= 0 else 1 for index in old_indices]
        if self.layers.align:
            self._move_states(scheduled, count)
        self._accepted[:count] = batch.num_accepted_tokens_cpu_tensor[:count]

    def _count_on_device(self, previous: dict[str, int]) -> None:
        """Take the accepted tokens from the counts on the device.

        previous: index of each request in the previous batch.
        """
        self._accepted[:] = 1
        for name, index in self.batch.req_id_to_index.items():
            if name in previous and self._last_drafts.get(name):
                self._accepted[index] = max(1, self.worker.sampled_counts[previous[name]])

    def _move_states(self, scheduled: Any, count: int) -> None:
        """Move states to the blocks of this batch (preprocess_mamba).

        count: requests of the batch.
        """
        offered = {
            "scheduler_output": scheduled,
            "kv_cache_config": self._pool,
            "input_batch": self.batch,
            "cache_config": Values(enable_prefix_caching=True),
            "mamba_state_idx": self._running,
            "requests": self.worker.requests,
            "forward_context": self._context,
            "mamba_state_copy_funcs": self._copies,
            "copy_bufs": self._buffers.preprocess,
            "align_ctx": self._buffers.postprocess_align,
        }
        self._utils.preprocess_mamba(**accepted_arguments(self._utils.preprocess_mamba, offered))
        if self._buffers.postprocess_align is not None:
            self._utils.stage_postprocess_inputs_to_gpu(
                self._buffers.postprocess_align,
                scheduled,
                self.batch.req_ids,
                count,
                self.worker.requests,
                self._running,
            )

    def forward(self, lanes: list[Lane]) -> list[Lane]:
        with_states = []
        are_rounds = [self._is_round(lane) for lane in lanes]
        for lane, is_round in zip(lanes, are_rounds):
            accepted = int(self._accepted[self.batch.req_id_to_index[lane.request]])
            origin = self.origin_of(lane.request)
            states = self.layers.entry(lane, accepted, origin, is_round=is_round)
            with_states.append(lane._replace(states=states))
        super().forward(with_states)
        self.layers.run(with_states, are_rounds)
        self._last_drafts = {lane.request: lane.drafts for lane in lanes}
        self._take_accepted(with_states)
        return with_states

    def _is_round(self, lane: Lane) -> bool:
        """Return whether the kernels treat an entry as a verify round, possibly without drafts
        (num_decode_draft_tokens)."""
        if not self.config.drafts:
            return False
        prompt = self.batch.num_prompt_tokens[self.batch.req_id_to_index[lane.request]]
        decodes_one_token = lane.start >= prompt and len(lane.tokens) == 1
        return decodes_one_token or (lane.drafts > 0 and len(lane.tokens) == lane.drafts + 1)

    def _take_accepted(self, lanes: list[Lane]) -> None:
        """Note the accepted tokens, and copy the state at a block boundary that a round has passed into the
        block of that boundary, as `_update_states_after_model_execute` does."""
        if not self.config.drafts or not lanes:
            return
        batch = self.batch
        accepted = torch.ones(len(self.batch.rows), dtype=torch.int64)
        for lane in lanes:
            accepted[batch.req_id_to_index[lane.request]] = max(1, len(lane.sampled))
        if not self.layers.align:
            batch.num_accepted_tokens_cpu_tensor[: len(lanes)] = accepted[: len(lanes)]
            return
        self._utils.postprocess_mamba_align_gpu(
            bufs=self._buffers,
            num_reqs=len(lanes),
            num_accepted_tokens_gpu=accepted,
            num_accepted_tokens_cpu_tensor=batch.num_accepted_tokens_cpu_tensor,
            input_batch=batch,
            kv_cache_config=self._pool,
            forward_context=self._context,
            mamba_state_copy_funcs=self._copies,
        )
