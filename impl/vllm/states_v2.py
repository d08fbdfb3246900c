"""Recurrent layers under model runner V2.

The release's own MambaHybridModelState, kernels included, moves states between blocks, counts accepted
drafts, and distinguishes verify rounds from prompts.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch

from impl.stand_ins import Values
from impl.vllm.runner_v2 import ModelRunnerV2
from impl.vllm.states import RecurrentLayers, StateMemory
from reference.blocks.config import EngineConfig
from reference.blocks.facts import Lane

HYBRID = "vllm.v1.worker.gpu.model_states.mamba_hybrid"


class DefaultModelState:
    """The base class of MambaHybridModelState (model_states/default.py), with the fields that the methods for
    recurrent layers read."""

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
    """Return the metadata of only the recurrent layers, in the place of `build_attn_metadata`."""
    return given["model_specific_attn_metadata"]


class _Round(NamedTuple):
    """A batch entry by the release's own metadata.

    verifies_drafts: it is a verify round.
    accepted: accepted tokens of the previous round.
    """

    verifies_drafts: bool
    accepted: int


class StateRunnerV2(ModelRunnerV2):
    """The worker of a hybrid model with model runner V2.

    pool: the release's KVCacheConfig.
    """

    def __init__(self, config: EngineConfig, overlap: bool, pool: Any) -> None:
        """Make a runner V2 with the release's MambaHybridModelState."""
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
        hybrid_state = importlib.import_module(HYBRID).MambaHybridModelState
        self._state = hybrid_state(settings, model, None, torch.device("cpu"))
        self._state.initialize_kv_cache(pool, self.worker.block_tables)
        self.worker.model_state = self._state
        self.worker.kv_caches = self.memory
        self.worker.kv_cache_config = pool
        self._rounds: dict[str, _Round] = {}

    def before_forward(self, batch: Any, tables: Any) -> None:
        """Move states and read the metadata of a batch, as `execute_model` does before the forward pass."""
        computed = self.worker.req_states.num_computed_tokens.gpu
        self._state.preprocess_state(batch, tables, self._pool, computed)
        attention_groups: list[Any] = [[] for _ in self.config.groups]
        metadata = self._state.prepare_attn(batch, None, tables, None, attention_groups, self._pool)
        self._rounds = dict.fromkeys(batch.req_ids, _Round(verifies_drafts=False, accepted=1))
        if self.config.drafts:
            # The number of drafts is negative for an entry that verifies none.
            drafts = metadata.num_decode_draft_tokens_cpu.tolist()
            accepted = metadata.num_accepted_tokens.tolist()
            for name, draft_count, accepted_count in zip(batch.req_ids, drafts, accepted):
                self._rounds[name] = _Round(draft_count >= 0, accepted_count)

    def forward(self, lanes: list[Lane]) -> list[Lane]:
        with_states = []
        for lane in lanes:
            verifies_drafts, accepted = self._rounds[lane.request]
            origin = self.origin_of(lane.request)
            states = self.layers.entry(lane, accepted, origin, is_round=verifies_drafts)
            with_states.append(lane._replace(states=states))
        super().forward(with_states)
        self.layers.run(with_states, [self._rounds[lane.request].verifies_drafts for lane in lanes])
        return with_states
