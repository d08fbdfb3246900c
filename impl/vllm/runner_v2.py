"""Model runner V2 (vllm/v1/worker/gpu), the default of servers since 0.29: small kernels update lengths,
tokens and block tables in tensors.

The release's own `GPUModelRunner` adds requests, prepares the batch and postprocesses it, kernels included
(see `triton`). Attention, sampler and drafter are stand-ins.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch

from impl.bare import bare
from impl.loading.optional import optional
from impl.stand_ins import Values, accepted_arguments
from impl.vllm.drafter import DrafterV2
from impl.vllm.images import with_embeddings, with_images
from impl.vllm.images_v2 import EncoderV2
from impl.vllm.runner import ModelRunner, Ran
from reference.blocks.commands import STOP_TOKEN
from reference.blocks.config import EngineConfig
from reference.blocks.facts import Lane

_DEVICE = torch.device("cpu")
_PACKAGE = "vllm.v1.worker.gpu"


class ModelRunnerV2(ModelRunner):
    """The worker with model runner V2.

    pool: its KVCacheConfig.
    """

    encoder: EncoderV2 | None = None

    def __init__(self, config: EngineConfig, overlap: bool, pool: Any) -> None:
        """Make a GPUModelRunner V2 without a device: its request states, block tables and input buffers, on
        the CPU."""
        super().__init__(config, overlap)
        states, tables, self._batches, runner = (
            importlib.import_module(f"{_PACKAGE}.{name}")
            for name in ("states", "block_table", "input_batch", "model_runner")
        )
        specs = [group.kv_cache_spec for group in pool.kv_cache_groups]
        sizes = [spec.block_size for spec in specs]
        shape: dict[str, Any] = {
            "max_num_reqs": config.max_seqs,
            "max_model_len": config.max_model_len,
            "device": _DEVICE,
            "max_num_batched_tokens": config.max_batched_tokens,
            "vocab_size": 1,
            "num_speculative_steps": config.drafts,
            "block_sizes": sizes,
            "kernel_block_sizes": sizes,
            "max_num_blocks_per_group": [
                -(-config.max_model_len // size) + config.drafts * (group in config.recurrent)
                for group, size in enumerate(sizes)
            ],
            "sliding_window_reach": [
                optional(spec, "SlidingWindowSpec.num_retained_tokens", 0) for spec in specs
            ],
        }
        self.worker = worker = bare(runner.GPUModelRunner)
        worker.req_states = states.RequestState(**accepted_arguments(states.RequestState.__init__, shape))
        worker.block_tables = tables.BlockTables(**accepted_arguments(tables.BlockTables.__init__, shape))
        worker.input_buffers = input_buffers(config)
        # Token ids of the specification do not fit into 32 bits.
        staged_tensor = type(worker.req_states.all_token_ids)
        worker.req_states.all_token_ids = staged_tensor(
            (config.max_seqs, config.max_model_len), dtype=torch.int64, device=_DEVICE
        )
        worker.input_buffers.input_ids = worker.input_buffers.input_ids.long()
        worker.req_states.next_prefill_tokens = worker.req_states.next_prefill_tokens.long()
        vars(worker).update(
            device=_DEVICE, max_num_reqs=config.max_seqs, decode_query_len=1 + config.drafts, use_pp=False,
            is_last_pp_rank=False, lora_state=Values(remove_request=_nothing, add_request=_nothing),
            model_state=Values(
                remove_request=_nothing, add_request=_nothing, apply_staged_writes=_nothing,
                postprocess_state=_nothing, num_new_sampled_tokens_per_step=1,
            ),
            model_config=Values(rswa_window=None),
            kv_block_zeroer=Values(zero_block_ids=_nothing), kv_caches=self.memory,
            kv_cache_config=config,
        )  # fmt: skip
        vars(worker).update(dict.fromkeys((
            "pp_handler", "pooling_runner", "encoder_cache", "prompt_logprobs_worker", "sampler",
            "fast_prefill", "adaptive_verification", "pcp_manager",
        )))  # fmt: skip
        if config.encodes:
            self.encoder = EncoderV2(worker)

    def run(self, scheduled: Any, accept: Sequence[int], stop: Sequence[str]) -> Ran:
        """Run a scheduled batch as the runner's execute_model does: finish and add requests, prepare inputs,
        compute, sample.

        accept, stop: as in ModelRunnerV1.
        """
        worker = self.worker
        states = worker.req_states
        worker.finish_requests(scheduled)
        worker.free_states(scheduled)
        worker.add_requests(scheduled)
        worker.update_requests(scheduled)
        if self.encoder is not None:
            self.encoder.update(scheduled)
        worker.block_tables.apply_staged_writes()
        for new in scheduled.scheduled_new_reqs:
            known = new.prefill_token_ids
            self.put(new.req_id, with_images(known, new.mm_features) if self.encoder else known)
        order = list(scheduled.num_scheduled_tokens)
        if not order:
            return Ran((), {})
        gathered, _ = worker.gather_batch_req_state(scheduled, False)
        padded = Values(num_tokens=scheduled.total_num_scheduled_tokens, num_reqs=None)
        batch = worker.prepare_inputs(scheduled, gathered, padded, 0)
        gathered_tables, _ = worker.prepare_attn(batch)
        self.before_forward(batch, gathered_tables)
        tables = [table.tolist() for table in gathered_tables]
        counts = worker.block_tables.num_blocks.np
        starts = batch.query_start_loc.tolist()
        inputs = batch.input_ids.tolist()
        read: dict[str, dict[int, int]] = {}
        if self.encoder is not None:
            self.encoder.encode(scheduled)
            read = self.encoder.embeddings_read(batch)
        positions = batch.positions.tolist()
        is_sampled = (batch.seq_lens >= states.prefill_len.gpu[batch.idx_mapping]).tolist()
        lanes: dict[str, Lane] = {}
        for i, (name, index) in enumerate(zip(batch.req_ids, batch.idx_mapping.tolist())):
            tokens = inputs[starts[i] : starts[i + 1]]
            if self.encoder is not None:
                tokens = list(with_embeddings(tokens, read[name]))
            drafts = len(scheduled.scheduled_spec_decode_tokens.get(name, ()))
            accepted = accept[min(order.index(name), len(accept) - 1)] if accept else 0
            start = positions[starts[i]]
            first_draft = len(tokens) - drafts
            stamp = self.stamps(name, start, tokens[:first_draft])[-1]
            sampled = self.sample_tokens(stamp, tokens[first_draft:], accepted)
            if not is_sampled[i]:
                sampled = []
            elif name in stop:
                sampled[-1] = STOP_TOKEN
            rows = tuple(
                tuple(table[i][: counts[group, index]]) for group, table in enumerate(tables)
            )
            lanes[name] = Lane(name, start, tuple(tokens), drafts, tuple(sampled), rows)
        lanes = {lane.request: lane for lane in self.forward(list(lanes.values()))}
        shifted: dict[str, dict[int, int]] = {}
        if self.encoder is not None and self.config.eagle:
            shifted = self.encoder.embeddings_read(batch, shift=1)  # the drafter's inputs
        lanes = self._postprocess(batch, lanes, scheduled, shifted)
        ordered = tuple(lanes[name] for name in order)
        return Ran(ordered, {lane.request: list(lane.sampled) for lane in ordered})

    def before_forward(self, batch: Any, tables: Any) -> None:
        """Run a hook between the preparation of a batch and its forward pass.

        tables: block tables by group.
        """

    def _postprocess(
        self, batch: Any, lanes: dict[str, Lane], scheduled: Any, read: dict[str, dict[int, int]]
    ) -> dict[str, Lane]:
        """Store the results of the sampler and the drafter, as sample_tokens does, and return the entries
        with the drafter's use of its KV.

        read: request -> embeddings among the drafter's inputs, by input index.
        """
        states = self.worker.req_states
        max_drafts = self.config.drafts
        tokens = torch.zeros(len(lanes), 1 + max_drafts, dtype=torch.int64)
        for row, lane in zip(tokens, lanes.values()):
            row[: len(lane.sampled)] = torch.tensor(lane.sampled)
        counts = torch.tensor(
            [max(1, len(lane.sampled)) for lane in lanes.values()], dtype=torch.int32
        )
        sampled, rejected = self._batches.get_num_sampled_and_rejected(
            counts, batch.seq_lens, batch.cu_num_logits, batch.idx_mapping, states.prefill_len.gpu
        )
        self.worker.postprocess_sampled(
            batch.idx_mapping, tokens, sampled, rejected, batch.query_start_loc
        )
        scheduled_drafts = optional(
            scheduled, "SchedulerOutput.num_spec_tokens_to_schedule", max_drafts
        )
        if isinstance(self.drafter, DrafterV2):
            inputs = self.drafter.inputs(batch, states, sampled, rejected)
            if self.encoder is not None:
                inputs = [
                    entry._replace(tokens=with_embeddings(entry.tokens, read[name]))
                    for name, entry in zip(lanes, inputs)
                ]
            skips = optional(scheduled, "SchedulerOutput.skip_drafts", False)
            passes = 0 if skips else max(0, scheduled_drafts - 1)
            drafted = self.drafter.run(list(lanes.values()), inputs, passes)
            lanes = {lane.request: lane for lane in drafted}
        for name, lane in lanes.items():
            self.keep(name, lane.sampled)
        if max_drafts:
            drafts = torch.tensor([self.drafts(self.text[name][1], max_drafts) for name in lanes])
            drafts[:, scheduled_drafts:] = -1
            states.draft_tokens[batch.idx_mapping] = drafts
        return lanes

    def propose_drafts(self, ran: Ran, most: int) -> dict[str, list[int]]:
        """Return placeholders for the drafts of each request, because the drafts stay on the device."""
        del most
        return {lane.request: [-1] * self.config.drafts for lane in ran.lanes}


def input_buffers(config: EngineConfig) -> Any:
    """Return buffers for the inputs of a batch."""
    kind = importlib.import_module(f"{_PACKAGE}.input_batch").InputBuffers
    return kind(config.max_seqs, config.max_batched_tokens, _DEVICE)


def _nothing(*_: Any, **__: Any) -> None:
    return None
