"""Recurrent layers under model runner V2: the release's own MambaHybridModelState, kernels included, moves
states between blocks, counts accepted drafts, and tells rounds of drafts from prompts."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from impl.stand_ins import Values
from impl.vllm.runner_v2 import ModelRunnerV2
from impl.vllm.states import RecurrentLayers, StateMemory
from reference.blocks.config import EngineConfig
from reference.blocks.facts import Lane

HYBRID = "vllm.v1.worker.gpu.model_states.mamba_hybrid"


class DefaultModelState:
    """The worker's state of every model (model_states/default.py): no recurrent layers need it."""

    num_new_sampled_tokens_per_step = 1

    def __init__(self, config: Any, model: Any, encoder_cache: Any, device: Any) -> None:
        del encoder_cache
        self.vllm_config = config
        self.model = model
        self.device = device
        self.max_num_reqs = config.max_num_reqs
        self.max_model_len = config.max_model_len

    def add_request(self, *_: Any) -> None:
        pass

    remove_request = apply_staged_writes = add_request


def metadata(**given: Any) -> Any:
    """`build_attn_metadata`: what is the recurrent layers' own."""
    return given["model_specific_attn_metadata"]


class StateRunnerV2(ModelRunnerV2):
    """One worker of a hybrid model. pool: the KVCacheConfig."""

    def __init__(self, config: EngineConfig, overlap: bool, pool: Any) -> None:
        super().__init__(config, overlap, pool)
        self.memory: StateMemory = StateMemory(config)
        self.layers = RecurrentLayers(config, self.memory, pool)
        self._pool = pool
        _, copies = self.layers.bind(pool)
        settings = Values(
            cache_config=Values(
                mamba_cache_mode="align" if self.layers.align else "none",
                use_kda_recoverssm=False,
                mamba_block_size=config.groups[config.recurrent[0]].block_size,
            ),
            compilation_config=Values(static_forward_context=self.layers.context(pool)),
            num_speculative_tokens=config.drafts,
            max_num_reqs=config.max_seqs,
            max_model_len=config.max_model_len,
        )
        model = Values(get_mamba_state_copy_funcs=lambda _: copies)
        kind = importlib.import_module(HYBRID).MambaHybridModelState
        self._state = kind(settings, model, None, torch.device("cpu"))
        self._state.initialize_kv_cache(pool, self.worker.block_tables)
        self.worker.model_state = self._state
        self.worker.kv_caches = self.memory
        self.worker.kv_cache_config = pool
        # requests: a round of drafts, how many were accepted
        self._rows: dict[str, tuple[bool, int]] = {}

    def prepared(self, batch: Any, tables: Any) -> None:
        """`execute_model` between the batch and its forward pass."""
        computed = self.worker.req_states.num_computed_tokens.gpu
        self._state.preprocess_state(batch, tables, self._pool, computed)
        none: list[Any] = [[] for _ in self.config.groups]
        made = self._state.prepare_attn(batch, None, tables, None, none, self._pool)
        self._rows = dict.fromkeys(batch.req_ids, (False, 1))
        if self.config.drafts:
            kinds = made.num_decode_draft_tokens_cpu.tolist()
            counts = made.num_accepted_tokens.tolist()
            for name, kind, count in zip(batch.req_ids, kinds, counts):
                self._rows[name] = kind >= 0, count

    def forward(self, lanes: list[Lane]) -> list[Lane]:
        kinds = [self._rows[lane.request] for lane in lanes]
        made = [
            lane._replace(states=self.layers.entry(lane, *kind, self.origin_of(lane.request)))
            for lane, kind in zip(lanes, kinds)
        ]
        super().forward(made)
        self.layers.run(made, [rounds for rounds, _ in kinds])
        return made
