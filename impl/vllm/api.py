"""The names of vLLM that the adapter uses (`impl.loading.probe` reads a line, `impl.loading.parts` a part). Add a
line when the adapter starts to use another name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from impl.adapter import UnusableImplementation
from impl.loading import parts, probe
from impl.loading.renamed import in_uses, name_of
from impl.loading.used_names import PLAIN
from impl.vllm.modules import VLLM

# how an engine runs -> its name in `--impl`
WAYS = {
    "overlap": "async", "v2": "v2", "offloads": "offload", "pair": "pair", "encodes": "images",
}  # fmt: skip
RELEASES = tuple(f"0.{minor}.0" for minor in range(11, 34))
# ruff: noqa: E501
CORE = """
0.11.0 ... v1/core/sched/scheduler.py | Scheduler.add_request(_); Scheduler.schedule(); Scheduler.update_from_output(_, _); Scheduler.finish_requests(_, _)
0.11.0 ... v1/core/sched/scheduler.py | Scheduler.has_requests(); Scheduler.reset_prefix_cache(); Scheduler.requests; Scheduler.kv_cache_manager
0.11.0 ... v1/core/sched/scheduler.py | Scheduler.update_draft_token_ids(_)
0.11.0 ... v1/core/sched/async_scheduler.py | AsyncScheduler
0.11.0 ... v1/core/sched/output.py | SchedulerOutput.scheduled_new_reqs; SchedulerOutput.scheduled_cached_reqs; SchedulerOutput.num_scheduled_tokens
0.11.0 ... v1/core/sched/output.py | SchedulerOutput.scheduled_spec_decode_tokens; NewRequestData.req_id
0.11.0 ... v1/core/kv_cache_utils.py | init_none_hash(_); get_request_block_hasher; get_block_hash(_); get_group_id(_)
0.11.0 ... v1/core/kv_cache_utils.py | KVCacheBlock.block_id; KVCacheBlock.ref_cnt; KVCacheBlock.block_hash; FreeKVCacheBlockQueue.get_all_free_blocks()
0.11.0 ... v1/core/block_pool.py | BlockPool.blocks; BlockPool.free_block_queue; BlockPool.cached_block_hash_to_block; BlockHashToBlockMap._cache
0.11.0 ... v1/core/kv_cache_manager.py | KVCacheManager.coordinator; KVCacheManager.block_pool
0.11.0 ... v1/core/kv_cache_coordinator.py | KVCacheCoordinator.single_type_managers
0.11.0 ... v1/core/single_type_kv_cache_manager.py | SingleTypeKVCacheManager.req_to_blocks; SingleTypeKVCacheManager.num_cached_block
0.11.0 ... v1/request.py | Request.status; Request._all_token_ids; Request.num_computed_tokens; Request.request_id; Request.priority; Request.block_hashes
0.11.0 ... v1/request.py | Request.is_finished(); RequestStatus.FINISHED_ABORTED; RequestStatus.WAITING; RequestStatus.RUNNING; RequestStatus.PREEMPTED
0.11.0 ... v1/engine/__init__.py | EngineCoreOutputs.outputs; EngineCoreOutput.request_id; EngineCoreOutput.new_token_ids; EngineCoreOutput.finish_reason
0.11.0 ... v1/outputs.py | ModelRunnerOutput.req_ids; ModelRunnerOutput.req_id_to_index; ModelRunnerOutput.sampled_token_ids; DraftTokenIds(_, _)
0.11.0 ... v1/kv_cache_interface.py | FullAttentionSpec; SlidingWindowSpec; KVCacheGroupSpec(_, _); KVCacheGroupSpec.layer_names; KVCacheGroupSpec.kv_cache_spec; KVCacheConfig(num_blocks=_, kv_cache_tensors=_, kv_cache_groups=_)
0.11.0 ... v1/worker/gpu_model_runner.py | GPUModelRunner._update_states(_)
0.11.0 ... v1/worker/gpu_input_batch.py | InputBatch.num_computed_tokens_cpu; InputBatch.num_tokens_no_spec; InputBatch.num_accepted_tokens_cpu; InputBatch.prev_req_id_to_index
"""
# Parts of the API that only some releases have. A tree is driven with its own parts, whatever its nearest release.
PARTS = {
    "resumed requests": """
0.12.0 ... v1/core/sched/output.py | CachedRequestData.resumed_req_ids
""",
    "drafts in flight": """
0.12.0 ... v1/worker/gpu_model_runner.py | GPUModelRunner._get_valid_sampled_token_count(); GPUModelRunner._copy_valid_sampled_token_count
""",
    "resets of the running": """
0.12.0 ... v1/core/sched/scheduler.py | Scheduler.reset_prefix_cache(reset_running_requests=_)
""",
    "internal names": """
0.14.0 ... v1/engine/__init__.py | EngineCoreRequest.external_req_id
""",
    "sessions": """
0.15.0 ... v1/request.py | Request.resumable; Request.streaming_queue; StreamingUpdate
0.15.0 ... v1/core/sched/scheduler.py | Scheduler._update_request_as_session; Scheduler._handle_stopped_request
0.15.0 ... v1/worker/gpu_model_runner.py | GPUModelRunner._update_streaming_request(_, _)
""",
    "resolved block sizes": """
0.20.0 ... v1/core/kv_cache_utils.py | resolve_kv_cache_block_sizes(_, _)
""",
    "retained windows": """
0.33.0 ... v1/kv_cache_interface.py | SlidingWindowSpec.num_retained_tokens
""",
    "skipped drafts": """
0.33.0 ... v1/core/sched/output.py | SchedulerOutput.skip_drafts
""",
    "drafts of a batch": """
0.24.0 ... v1/core/sched/output.py | SchedulerOutput.num_spec_tokens_to_schedule
""",
    "deferred frees": """
0.24.0 ... v1/core/sched/scheduler.py | Scheduler.deferred_frees; Scheduler.defer_block_free
""",
    "further hashes": """
0.24.0 ... v1/core/block_pool.py | BlockPool.cached_block_hashes_by_block; BlockPool._insert_block_hash
""",
    "copies on write": """
0.26.0 ... v1/core/sched/output.py | SchedulerOutput.kv_cache_block_copies
0.26.0 ... v1/core/kv_cache_manager.py | KVCacheManager.take_kv_cache_block_copies
0.26.0 ... v1/core/kv_cache_utils.py | KVCacheBlockCopy.src_block_id; KVCacheBlockCopy.dst_block_id
""",
    "pinned tails": """
0.27.0 0.29.0 v1/core/kv_cache_manager.py | KVCacheManager._partial_tail_pins
0.27.0 0.29.0 v1/core/single_type_kv_cache_manager.py | SingleTypeKVCacheManager.take_pending_partial_tail_offloads
""",
    "state": """
0.11.0 ... v1/kv_cache_interface.py | MambaSpec.mamba_type
0.15.0 ... v1/kv_cache_interface.py | MambaSpec.mamba_cache_mode
0.15.0 ... v1/worker/mamba_utils.py | preprocess_mamba; batch_memcpy
0.15.0 ... model_executor/layers/mamba/mamba_utils.py | get_conv_copy_spec; get_temporal_copy_spec
0.20.0 ... model_executor/layers/mamba/mamba_utils.py | is_conv_state_dim_first
0.22.0 ... v1/worker/mamba_utils.py | MambaBuffers.create; MambaBuffers.preprocess; MambaBuffers.postprocess_align
0.22.0 ... v1/worker/mamba_utils.py | postprocess_mamba_align_gpu(bufs=_, num_reqs=_, num_accepted_tokens_gpu=_, num_accepted_tokens_cpu_tensor=_, input_batch=_, kv_cache_config=_, forward_context=_, mamba_state_copy_funcs=_)
0.22.0 ... v1/worker/mamba_utils.py | stage_postprocess_inputs_to_gpu(_, _, _, _, _, _)
0.27.0 ... v1/worker/mamba_utils.py | preprocess_mamba(scheduler_output=_, kv_cache_config=_, cache_config=_, mamba_state_idx=_, input_batch=_, requests=_, forward_context=_, mamba_state_copy_funcs=_, copy_bufs=_, align_ctx=_)
""",
    "copies by kind": """
0.29.0 ... v1/worker/mamba_utils.py | validate_mamba_state_copy_funcs
0.29.0 ... v1/kv_cache_interface.py | MambaSpec.num_prefill_checkpoint_blocks; KVCacheConfig.prefix_cache_retention_interval
""",
    "checkpoints within a chunk": """
0.31.0 ... model_executor/layers/mamba/checkpoint.py | compute_mamba_prefill_checkpoints
""",
    "v2": """
0.12.0 ... v1/core/sched/output.py | NewRequestData.prefill_token_ids; SchedulerOutput.total_num_scheduled_tokens
0.12.0 ... v1/worker/gpu/states.py | RequestState.prefill_len; RequestState.num_computed_tokens; RequestState.draft_tokens
0.12.0 ... v1/worker/gpu/block_table.py | BlockTables.num_blocks
0.12.0 ... v1/worker/gpu/model_runner.py | GPUModelRunner.req_states; GPUModelRunner.block_tables; GPUModelRunner.input_buffers
0.14.0 ... v1/worker/gpu/buffer_utils.py | UvaBackedTensor.np; UvaBackedTensor.gpu
0.12.0 ... v1/worker/gpu/input_batch.py | InputBuffers.input_ids; InputBatch.query_start_loc; InputBatch.input_ids; InputBatch.positions
0.12.0 ... v1/worker/gpu/input_batch.py | InputBatch.seq_lens; InputBatch.idx_mapping; InputBatch.req_ids; InputBatch.cu_num_logits
0.13.0 ... v1/worker/gpu/input_batch.py | get_num_sampled_and_rejected(_, _, _, _, _)
0.14.0 ... v1/worker/gpu/block_table.py | BlockTables.apply_staged_writes()
0.15.0 ... v1/worker/gpu/model_runner.py | GPUModelRunner.finish_requests(_); GPUModelRunner.free_states(_); GPUModelRunner.add_requests(_)
0.15.0 ... v1/worker/gpu/model_runner.py | GPUModelRunner.update_requests(_); GPUModelRunner.prepare_inputs
0.15.0 ... v1/worker/gpu/input_batch.py | InputBuffers(_, _, _)
0.17.0 ... v1/worker/gpu/model_runner.py | GPUModelRunner.prepare_attn(_)
0.17.0 ... v1/worker/gpu/states.py | RequestState.all_token_ids; RequestState.next_prefill_tokens
0.23.0 ... v1/worker/gpu/model_runner.py | GPUModelRunner.postprocess_sampled(_, _, _, _, _)
0.28.0 ... v1/worker/gpu/model_runner.py | GPUModelRunner.gather_batch_req_state(_, _)
0.31.0 ... v1/worker/gpu/model_runner.py | GPUModelRunner.prepare_inputs(_, _, _, _)
""",
    "state+v2": """
0.21.0 ... v1/worker/gpu/model_states/mamba_hybrid.py | MambaHybridModelState; MambaHybridModelState.prepare_attn(_, _, _, _, _, _)
0.21.0 ... v1/worker/gpu/model_states/mamba_hybrid.py | MambaHybridAttnMetadata.num_accepted_tokens; MambaHybridAttnMetadata.num_decode_draft_tokens_cpu
0.25.0 ... v1/worker/gpu/model_states/mamba_hybrid.py | MambaHybridModelState.preprocess_state(_, _, _, _)
0.32.0 ... v1/worker/gpu/model_states/mamba_hybrid.py | MambaHybridModelState.initialize_kv_cache(_, _)
""",
    "drafter": """
0.20.0 ... v1/spec_decode/llm_base_proposer.py | SpecDecodeBaseProposer.prepare_next_token_ids_padded(_, _, _, _)
0.20.0 ... v1/spec_decode/llm_base_proposer.py | SpecDecodeBaseProposer.prepare_inputs_padded(_, _, _)
0.20.0 ... v1/spec_decode/llm_base_proposer.py | SpecDecodeBaseProposer.set_inputs_first_pass(target_token_ids=_, next_token_ids=_, target_positions=_, target_hidden_states=_, token_indices_to_sample=_, cad=_, num_rejected_tokens_gpu=_)
0.12.0 ... v1/spec_decode/utils.py | eagle_prepare_next_token_padded_kernel; eagle_prepare_inputs_padded_kernel
0.20.0 ... v1/kv_cache_interface.py | KVCacheGroupSpec.is_eagle_group
""",
    "drafter+v2": """
0.32.0 ... v1/worker/gpu/spec_decode/target_dependent_ar/speculator.py | prepare_prefill_inputs; _prepare_prefill_inputs_kernel
0.12.0 ... v1/worker/gpu/states.py | RequestState.last_sampled_tokens
""",
    "offload": """
0.11.0 ... distributed/kv_transfer/kv_connector/v1/offloading_connector.py | OffloadingConnector.connector_worker; OffloadingConnector.connector_scheduler
0.11.0 ... distributed/kv_transfer/kv_connector/v1/offloading_connector.py | OffloadingConnector.start_load_kv(_); OffloadingConnector.wait_for_save(); OffloadingConnector.get_finished(_)
0.11.0 ... distributed/kv_transfer/kv_connector/v1/base.py | KVConnectorRole.WORKER; KVConnectorBase_V1.bind_connector_metadata(_); KVConnectorBase_V1.clear_connector_metadata(); KVConnectorMetadata
0.12.0 ... distributed/kv_transfer/kv_connector/v1/base.py | SupportsHMA
0.11.0 ... v1/core/sched/scheduler.py | Scheduler.connector; Scheduler.vllm_config; Scheduler.kv_cache_config; Scheduler.finished_req_ids; Scheduler.finished_recving_kv_req_ids
0.11.0 ... v1/core/sched/output.py | SchedulerOutput.kv_connector_metadata; SchedulerOutput.finished_req_ids
0.11.0 ... v1/outputs.py | KVConnectorOutput.finished_sending; KVConnectorOutput.finished_recving; ModelRunnerOutput.kv_connector_output
0.11.0 ... v1/request.py | Request.num_prompt_tokens
0.11.0 ... v1/core/kv_cache_manager.py | KVCacheBlocks.get_block_ids()
0.11.0 ... v1/kv_cache_interface.py | SlidingWindowSpec.sliding_window
0.21.0 ... v1/kv_offload/base.py | GPULoadStoreSpec.group_sizes; GPULoadStoreSpec.block_indices
0.12.0 ... v1/core/sched/scheduler.py | Scheduler.failed_recving_kv_req_ids
0.12.0 ... v1/outputs.py | KVConnectorOutput.invalid_block_ids
0.14.0 ... distributed/kv_transfer/kv_connector/v1/offloading_connector.py | OffloadingConnector.handle_preemptions(_)
0.18.0 ... v1/outputs.py | KVConnectorOutput.kv_connector_worker_meta
0.19.0 ... v1/kv_offload/cpu/manager.py | CPUOffloadingManager._policy; CPUOffloadingManager._free_list
0.19.0 ... distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py | OffloadingConnectorScheduler.manager
0.19.0 ... distributed/kv_transfer/kv_connector/v1/offloading/worker.py | OffloadingConnectorWorker.worker; OffloadingConnectorWorker._unsubmitted_store_jobs
0.20.0 ... distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py | OffloadingConnectorScheduler._req_status
0.20.0 ... v1/kv_offload/cpu/manager.py | CPUOffloadingManager.lookup(_, _); CPUOffloadingManager.prepare_load(_, _)
0.21.0 ... distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py | OffloadingConnectorScheduler._jobs; OffloadingConnectorScheduler._block_id_to_pending_jobs
0.21.0 ... distributed/kv_transfer/kv_connector/v1/offloading_connector.py | OffloadingConnector.build_connector_worker_meta()
0.11.0 0.25.0 v1/kv_offload/worker/worker.py | TransferResult
0.25.0 ... v1/kv_offload/base.py | TransferResult
0.21.0 ... v1/kv_offload/cpu/policies/base.py | CachePolicy.evict(_, _)
0.21.0 0.30.0 v1/kv_offload/cpu/policies/base.py | BlockStatus.ref_cnt; BlockStatus.block_id
0.21.0 0.30.0 v1/kv_offload/cpu/manager.py | CPUOffloadingManager._num_allocated_blocks
0.30.0 ... v1/kv_offload/cpu/policies/base.py | ChunkStatus.ref_cnt; ChunkStatus.chunk_id
0.30.0 ... v1/kv_offload/cpu/manager.py | CPUOffloadingManager._num_allocated_chunks
""",
    "reset": """
0.13.0 ... v1/core/sched/scheduler.py | Scheduler.reset_connector_cache()
0.22.0 ... v1/kv_offload/base.py | OffloadingManager.reset_cache()
0.22.0 ... v1/kv_offload/cpu/manager.py | CPUOffloadingManager.reset_cache()
0.22.0 ... distributed/kv_transfer/kv_connector/v1/offloading_connector.py | OffloadingConnector.reset_cache()
""",
    "storage": """
0.28.0 ... v1/kv_offload/tiering/manager.py | TieringOffloadingManager._transfer_jobs; TieringOffloadingManager.primary_tier; TieringOffloadingManager.secondary_tiers
0.28.0 ... v1/kv_offload/tiering/manager.py | TieringOffloadingManager._register_job(_, _); JobMetadata.transfer_job
0.28.0 0.30.0 v1/kv_offload/tiering/base.py | TransferJob.block_ids
0.30.0 ... v1/kv_offload/tiering/base.py | TransferJob.chunk_ids
0.28.0 ... v1/kv_offload/tiering/base.py | TransferJob.keys; TransferJob.is_promotion
0.28.0 ... v1/kv_offload/tiering/fs/manager.py | FileSystemTierManager.file_mapper; FileSystemTierManager._lookup_manager
0.28.0 ... v1/kv_offload/tiering/async_lookup.py | AsyncLookupManager._lookup_queue; AsyncLookupManager._worker()
0.28.0 ... v1/kv_offload/file_mapper.py | FileMapper.get_file_name(_)
""",
    "simple": """
0.19.0 ... v1/core/kv_cache_utils.py | KVCacheBlock.is_null
0.19.0 ... distributed/kv_transfer/kv_connector/v1/simple_cpu_offload_connector.py | SimpleCPUOffloadConnector.scheduler_manager; SimpleCPUOffloadConnector.worker_handler
0.19.0 ... v1/simple_kv_offload/manager.py | SimpleCPUOffloadScheduler.cpu_block_pool; SimpleCPUOffloadScheduler._gpu_block_pool
0.19.0 ... v1/simple_kv_offload/manager.py | SimpleCPUOffloadScheduler._reqs_to_load; SimpleCPUOffloadScheduler._load_event_to_reqs
0.19.0 ... v1/simple_kv_offload/manager.py | SimpleCPUOffloadScheduler._reqs_to_store; SimpleCPUOffloadScheduler._store_event_to_reqs; SimpleCPUOffloadScheduler._store_event_to_blocks
0.19.0 ... v1/simple_kv_offload/manager.py | LoadRequestState.load_event; LoadRequestState.transfer_meta; StoreRequestState.store_events; TransferMeta.gpu_block_ids; TransferMeta.cpu_block_ids
0.19.0 ... v1/simple_kv_offload/worker.py | SimpleCPUOffloadWorker._backend; SimpleCPUOffloadWorker._completed_store_events
0.19.0 ... v1/simple_kv_offload/worker.py | SimpleCPUOffloadWorker._pending_load_event_indices; SimpleCPUOffloadWorker._pending_store_event_indices
""",
    "pinned hits": """
0.22.0 ... v1/simple_kv_offload/manager.py | SimpleCPUOffloadScheduler._pending_cpu_hits; SimpleCPUOffloadScheduler._in_flight_store_gpu_blocks
""",
    "resets of a pool": """
0.24.0 ... v1/simple_kv_offload/manager.py | SimpleCPUOffloadScheduler.reset(); SimpleCPUOffloadScheduler._abandoned_reqs_to_load; SimpleCPUOffloadScheduler._abandoned_store_event_to_blocks
""",
    "stores of the finished": """
0.30.0 ... v1/simple_kv_offload/manager.py | SimpleCPUOffloadScheduler._pending_finished_stores
""",
    "sync loads": """
0.29.0 ... v1/core/sched/output.py | SchedulerOutput.has_sync_kv_loads
""",
    "failed loads": """
0.30.0 ... v1/outputs.py | KVConnectorOutput.failed_recving
0.30.0 ... v1/core/sched/scheduler.py | Scheduler._handle_failed_recving
""",
    "resets of images": """
0.16.0 ... v1/core/sched/scheduler.py | Scheduler.reset_encoder_cache()
""",
    "images": """
0.23.0 ... v1/core/sched/scheduler.py | Scheduler.encoder_cache_manager; Scheduler._try_schedule_encoder_inputs
0.23.0 ... v1/core/sched/output.py | SchedulerOutput.scheduled_encoder_inputs; SchedulerOutput.free_encoder_mm_hashes
0.23.0 ... v1/core/encoder_cache_manager.py | EncoderCacheManager.cached; EncoderCacheManager.num_free_slots; EncoderCacheManager.num_freeable_slots
0.23.0 ... v1/request.py | Request.mm_features
0.23.0 ... multimodal/utils.py | get_mm_features_in_window(_, start=_, end=_)
0.23.0 ... v1/worker/gpu_model_runner.py | GPUModelRunner._batch_mm_inputs_from_scheduler(_); GPUModelRunner._gather_mm_embeddings(_, shift_computed_tokens=_)
""",
    "images+v2": """
0.25.0 ... v1/worker/gpu/mm/encoder_cache.py | EncoderCache(); EncoderCache.encoder_outputs
0.25.0 ... v1/worker/gpu/mm/encoder_runner.py | EncoderRunner.prepare_mm_inputs(_); EncoderRunner.encoder_cache; EncoderRunner.is_realtime
0.25.0 ... v1/worker/gpu/mm/encoder_runner.py | EncoderRunner.gather_mm_embeddings(_, _, _, _, _, _, draft_lookahead=_)
0.25.0 ... v1/worker/gpu/model_runner.py | GPUModelRunner.reset_encoder_cache(); GPUModelRunner.encoder_cache
0.25.0 ... v1/worker/gpu/input_batch.py | InputBatch.num_tokens; InputBatch.num_scheduled_tokens; InputBatch.query_start_loc_np; InputBatch.prefill_len_np; InputBatch.num_computed_tokens_np
0.25.0 ... v1/core/sched/output.py | NewRequestData.mm_features
""",
    "updates of images": """
0.33.0 ... v1/core/sched/output.py | SchedulerOutput.encoder_input_updates
0.33.0 ... v1/worker/gpu/mm/encoder_cache.py | EncoderCache.update_encoder_inputs(_, _)
""",
    "pair": """
0.26.0 ... distributed/kv_transfer/kv_connector/v1/nixl/connector.py | NixlPullConnector; NixlPushConnector
0.26.0 ... distributed/kv_transfer/kv_connector/v1/nixl/connector.py | NixlBaseConnector.connector_worker; NixlBaseConnector.connector_scheduler
0.26.0 ... distributed/kv_transfer/kv_connector/v1/nixl/connector.py | NixlBaseConnector.get_handshake_metadata(); NixlBaseConnector.register_kv_caches(_)
0.26.0 ... distributed/kv_transfer/kv_connector/v1/nixl/connector.py | NixlBaseConnector.set_xfer_handshake_metadata_pp_aware(_); NixlBaseConnector.get_block_ids_with_load_errors()
0.26.0 ... distributed/kv_transfer/kv_connector/v1/nixl/connector.py | NixlBaseConnector.get_kv_connector_stats()
0.26.0 ... distributed/kv_transfer/kv_connector/v1/nixl/base_worker.py | NixlBaseConnectorWorker.nixl_wrapper; NixlBaseConnectorWorker._handshake_initiation_executor
0.26.0 ... distributed/kv_transfer/kv_connector/v1/nixl/base_worker.py | NixlBaseConnectorWorker._recving_transfers
0.26.0 ... distributed/kv_transfer/kv_connector/v1/nixl/base_scheduler.py | NixlBaseConnectorScheduler._nixl_handshake_listener_t; NixlBaseConnectorScheduler.engine_id
0.26.0 ... distributed/kv_transfer/kv_connector/v1/nixl/base_scheduler.py | NixlBaseConnectorScheduler.side_channel_host; NixlBaseConnectorScheduler.side_channel_port
0.26.0 ... distributed/kv_transfer/kv_connector/v1/nixl/push_worker.py | NixlPushConnectorWorker._push_writer_loop(); NixlPushConnectorWorker._sending_transfers; NixlPushConnectorWorker._push_writer_stop
0.26.0 ... v1/request.py | Request.kv_transfer_params; RequestStatus.WAITING_FOR_REMOTE_KVS
0.26.0 ... v1/engine/__init__.py | EngineCoreOutput.kv_transfer_params
0.26.0 0.30.0 distributed/kv_transfer/kv_connector/v1/nixl/connector.py | NixlBaseConnector.get_finished(_)
0.30.0 ... distributed/kv_transfer/kv_connector/v1/nixl/connector.py | NixlBaseConnector.get_transfer_results(_)
""",
    "both connectors": """
0.23.0 ... distributed/kv_transfer/kv_connector/v1/multi_connector.py | MultiConnector._connectors; MultiConnector.all_children_support_hma(_)
0.11.0 ... distributed/kv_transfer/kv_connector/v1/multi_connector.py | MultiConnector._requests_to_connector; MultiConnector._extra_async_saves
0.16.0 ... distributed/kv_transfer/kv_connector/v1/multi_connector.py | MultiConnector.handle_preemptions(_); MultiConnector.register_kv_caches(_); MultiConnector.get_handshake_metadata()
0.23.0 ... distributed/kv_transfer/kv_connector/v1/multi_connector.py | MultiConnector.set_xfer_handshake_metadata_pp_aware(_); MultiConnector.get_block_ids_with_load_errors()
0.18.0 ... distributed/kv_transfer/kv_connector/v1/multi_connector.py | MultiConnector.get_kv_connector_stats(); MultiConnector.build_connector_worker_meta()
0.21.0 ... distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py | TransferJobStatus.is_store
0.12.0 ... distributed/kv_transfer/kv_connector/v1/base.py | supports_hma
""",
    "published handshakes": """
0.33.0 ... distributed/kv_transfer/kv_connector/v1/nixl/base_scheduler.py | NixlBaseConnectorScheduler._handshake_data
""",
}
_SAYS = {
    "sessions": "sessions",
    "drafts in flight": "drafts under asynchronous scheduling",
    "deferred frees": "deferred frees",
    "further hashes": "further hashes of a block",
    "copies on write": "copies on write",
    "state": "recurrent state",
    "state+v2": "recurrent state",
    "reset": "resets of host memory",
    "sync loads": "loads within a step",
    "failed loads": "failed loads of several groups",
    "both connectors": "a pair's host memory",
}
TABLES = parts.Tables("vllm", below="vllm", releases=RELEASES, core=CORE, parts=PARTS, says=_SAYS, guide="A new release of vLLM")
EVERY = TABLES.all_lines
_OF_CONNECTORS = frozenset({"offload", "reset", "sync loads", "failed loads", "storage", "simple", "pinned hits", "resets of a pool", "stores of the finished"})
_OF_PAIRS = frozenset({"pair", "both connectors", "published handshakes"})
_OF_IMAGES = frozenset({"images", "resets of images", "images+v2", "updates of images"})
_OF_V2 = frozenset({"v2", "state+v2", "drafter+v2", "images+v2", "updates of images", "retained windows", "skipped drafts", "drafts of a batch"})
# A pair's tables of requests, transfers, leases and notifications. Every release has some of them.
KEPT_BY_WORKER = (
    "_recving_metadata", "_recving_transfers", "_reqs_to_send", "_reqs_to_process", "_sending_transfers",
    "_push_finished_blocks", "_pending_d_registrations", "_send_failures", "_recv_failures",
    "consumer_notification_counts_by_req", "expected_consumer_notifications_by_req", "_pending_recv_notifs",
    "_handshake_futures",
)  # fmt: skip
KEPT_BY_SCHEDULER = (
    "_reqs_need_recv", "_reqs_need_save", "_reqs_need_send", "_reqs_not_processed", "_reqs_in_batch",
    "_finished_request_blocks", "_push_pending_registrations", "_push_registration_deadlines",
    "_heartbeat_by_engine", "_heartbeat_req_engine",
)  # fmt: skip
KEPT_BY_CORE = "finished_recving_kv_req_ids", "failed_recving_kv_req_ids"
# Old name -> new name (`Class.member`, a function or a class) for a change that is nothing but a rename. A release
# has one of the two names (impl.loading.renamed).
RENAMED: dict[str, str] = {}
# Part -> the first release that has it, by the tables.
SINCE = {part: TABLES.since(part) for part in PARTS}


def drives(release: str, part: str) -> bool:
    """Return whether a release has a part by the tables. An unknown release counts as the newest."""
    return release not in RELEASES or TABLES.is_documented(part, release)


def facts(
    root: Path,
    release: str | None = None,
    *,
    overlap: bool = False,
    v2: bool = False,
    offloads: bool = False,
    pair: bool = False,
    encodes: bool = False,
) -> parts.TreeParts:
    """Return the facts of the files under `root`.

    release: the release of the files, None if it is not known. overlap: for asynchronous scheduling. v2:
    for model runner V2. offloads: with its OffloadingConnector. pair: two servers, joined by its
    NixlConnector. encodes: for a model with an encoder.
    """
    wanted = {
        "v2": v2, "offload": offloads, "pair": pair, "images": encodes, "images+v2": encodes and v2,
    }  # fmt: skip
    unwanted: frozenset[str] = frozenset()
    if not v2:
        unwanted |= _OF_V2
    if not offloads:
        unwanted |= _OF_CONNECTORS
    if not pair:
        unwanted |= _OF_PAIRS
    if not encodes:
        unwanted |= _OF_IMAGES
    if not (overlap or pair):
        unwanted |= {"drafts in flight"}
    renamed = renamed_entries(root)
    names = partial(in_uses, names=renamed)
    wanted_parts = [part for part, is_wanted in wanted.items() if is_wanted]
    ways = (PLAIN, *wanted_parts)
    return parts.facts(root, TABLES, VLLM, wanted_parts, unwanted, release, names, ways, renamed)


def renamed_entries(root: Path) -> dict[str, str]:
    """Return the entries of RENAMED for which the files under `root` have the new name.

    Raises UnusableImplementation for a name that no table has.
    """
    checkout = probe.Checkout(root, "vllm", VLLM, ())

    def lacks(name: str, table: str) -> bool:
        lines = [
            line._replace(uses=tuple(use for use in line.uses if name_of(use) == name))
            for line in probe.entries(table)
        ]
        return bool(checkout.missing_names(lines))

    known = {name_of(use) for _, use in uses()}
    names = {}
    for name, new in RENAMED.items():
        if name not in known:
            raise UnusableImplementation(
                f"RENAMED of impl/vllm/api.py: no line of its tables has {name}, so nothing would follow it"
            )
        if lacks(name, EVERY) and not lacks(
            in_uses(name, {name: new}), in_uses(EVERY, {name: new})
        ):
            names[name] = new
    return names


def uses() -> Iterator[tuple[str, ast.expr]]:
    """Yield the module and the expression of each use in the tables."""
    for line in probe.entries(EVERY):
        for use in line.uses:
            yield "vllm." + line.file.removesuffix(".py").replace("/", "."), use
