"""The API of LMDeploy that the adapter uses; see `impl.loading`: `probe` for a line, `parts` for a part."""

from __future__ import annotations

from impl.loading.parts import Tables

RELEASES = ("0.16.0", "0.17.0", "0.18.0")
# ruff: noqa: E501
CORE = """
0.16.0 ... config.py | CacheConfig(max_batches=_, block_size=_, num_cpu_blocks=_, num_gpu_blocks=_, kernel_block_size=_, window_size=_, max_prefill_token_num=_, enable_prefix_caching=_, num_reserved_gpu_blocks=_, device_type=_)
0.16.0 ... config.py | SchedulerConfig(max_batches=_, max_session_len=_, prefill_interval=_)
0.16.0 ... messages.py | SequenceMeta(_, strategy=_); SamplingParam(max_new_tokens=_); SamplingParam.max_new_tokens
0.16.0 ... messages.py | SchedulerSession.add_sequence(_, sampling_param=_, adapter_name=_); SequenceManager.get_all_sequences; LogicalTokenBlocks.get_real_blocks()
0.16.0 ... messages.py | SchedulerSequence.session_id; SchedulerSequence.num_blocks; SchedulerSequence.logical_blocks; SchedulerSequence.logical_state
0.16.0 ... messages.py | SchedulerSequence.status; MessageStatus.WAITING; MessageStatus.READY; MessageStatus.RUNNING; SchedulerSequence.num_history_ids; SchedulerSequence.num_ignored_history; SchedulerSequence.all_ids
0.16.0 ... messages.py | SchedulerSequence.num_new_tokens; SchedulerSequence.num_valid_ids; SchedulerSequence.sampling_param
0.16.0 ... model_inputs.py | ModelInputs.is_chunk; ModelInputs.is_last_chunk; ModelInputs.is_dummy; ModelInputs.state_offsets; ModelInputs.input_ids
0.16.0 ... model_inputs.py | ModelInputs.history_lengths; ModelInputs.block_offsets; ModelInputs.seq_length; ModelInputs.num_ignored_history; ModelInputsDelta.indice_cpu
0.16.0 ... strategies/ar/sequence.py | ARSequenceStrategy()
0.16.0 ... strategies/ar/engine.py | AREngineStrategy(_, _)
0.16.0 ... strategies/ar_spec/sequence.py | ARSpecSequenceStrategy()
0.16.0 ... strategies/ar_spec/engine.py | ARSpecEngineStrategy(_, _, _)
0.16.0 ... paging/scheduler.py | Scheduler(_, _, _); Scheduler.block_trie; Scheduler.block_manager; Scheduler.state_manager; Scheduler.seq_manager; Scheduler.sessions
0.16.0 ... paging/scheduler.py | Scheduler.has_unfinished(); Scheduler.add_session(_); Scheduler.stop_session(_); Scheduler.end_session(_); Scheduler.activate_seqs(_)
0.16.0 ... paging/block_trie/trie.py | BlockTrie.state_checkpoints; BlockTrie._roots
0.16.0 ... paging/block_trie/node.py | Node.children; Node.state_checkpoint; Node.block_id; Node.token_ids; Node.parent; Node.adapter_name
0.16.0 ... paging/block_trie/checkpoint_lifecycle.py | StateCheckpointLifecycle.unpin_saves(_)
0.16.0 ... paging/block_trie/node.py | NodeStateCheckpoint.published; NodeStateCheckpoint.step; NodeStateCheckpoint.slot; NodeStateCheckpoint.pin_count
0.16.0 ... paging/block_trie/node.py | NodeStateCheckpoint.frozen_block_id; NodeStateCheckpoint.exact_match_data
0.16.0 ... paging/block_trie/checkpoint.py | StateCheckpointMatchData.token_ids
0.16.0 ... paging/block_manager/base_block_manager.py | BaseBlockManager.allocator; LogicalAllocator._log_mem; LogicalAllocator._gpu_allocator
0.16.0 ... paging/block_manager/base_block_manager.py | LogicalAllocator._free_blocks; LogicalAllocator._free_count; LogicalAllocator._num_blocks
0.16.0 ... paging/block_manager/base_block_manager.py | LogicalMemory.phy_map; LogicalMemory.ref_count; PhysicalAllocator._free_blocks; PhysicalAllocator._free_count
0.16.0 ... paging/state_manager.py | StateManager._runtime_states; StateManager._checkpoint_states; StateManager.allocator; StateManager.get_num_free(); StateAllocator._free_states
0.16.0 ... engine/cache_inputs.py | CacheCheckpointInputs.kv_restore_plan; CacheCheckpointInputs.kv_save_plan; CacheCheckpointInputs.state_restore_plan; CacheCheckpointInputs.state_save_plan
0.16.0 ... engine/inputs_maker.py | InputsMakerConfig; InputsMakerAsync.send_next_inputs(); InputsMakerAsync.prefetch_next_inputs(); InputsMakerAsync.update_running_seqs(_, _)
0.16.0 ... engine/inputs_maker.py | InputsMakerAsync.has_pending_long_context_chunk(); InputsMakerAsync.reset_runtime_state()
0.16.0 ... engine/engine.py | Engine.sleep; Engine._cancel_and_end_all_sessions; Engine._get_max_session_len
0.16.0 ... engine/engine_loop.py | EngineLoop._finish_forward_output(_, _, _, _); EngineLoop.scheduler; EngineLoop.seq_strategy; EngineLoop.inputs_maker; EngineLoop.config
"""
# What releases do in different ways: a tree needs one of the two.
PARTS = {
    "store": """
0.17.0 ... config.py | CacheConfig(max_batches=_, block_size=_, num_cpu_blocks=_, num_gpu_blocks=_, kv_transfer_config=_); KVTransferConfig(kv_connector=_, kv_role=_)
0.17.0 ... paging/scheduler.py | Scheduler(_, _, _, _); Scheduler.kv_save_coordinator; Scheduler.kv_load_coordinator; Scheduler.has_remote_loading()
0.17.0 ... paging/kv_save_coordinator.py | KVSaveCoordinator._leases
0.17.0 ... paging/kv_load_coordinator.py | KVLoadCoordinator._loads
0.17.0 ... messages.py | SchedulerSequence.seq_id; MessageStatus.WAITING_FOR_REMOTE_KVS
0.17.0 ... kv_connector/base.py | KVConnectorOutput(completed_save_ids=_, finished_receiving=_, invalid_block_ids=_); KVConnectorRole.SCHEDULER
0.17.0 ... kv_connector/mooncake/store/connector.py | MooncakeStoreConnector(_, _); MooncakeStoreConnector.connector_scheduler
0.17.0 ... kv_connector/mooncake/store/scheduler.py | MooncakeStoreScheduler.client; MooncakeStoreScheduler._build_save_requests(_)
0.17.0 ... kv_connector/mooncake/store/data.py | MooncakeStoreConnectorMetadata.load_requests; MooncakeStoreConnectorMetadata.save_requests
0.17.0 ... kv_connector/mooncake/store/data.py | MooncakeStoreLoadRequest.request_id; MooncakeStoreLoadRequest.block_ids; MooncakeStoreLoadRequest.block_hashes
0.17.0 ... kv_connector/mooncake/store/data.py | MooncakeStoreSaveRequest.save_id; MooncakeStoreSaveRequest.start_block; MooncakeStoreSaveRequest.block_ids; MooncakeStoreSaveRequest.block_hashes
""",
    "pair": """
0.16.0 ... messages.py | SchedulerSession.add_sequence(_, sampling_param=_, adapter_name=_, migration_request=_, resp_cache=_, preserve_cache=_)
0.16.0 ... engine/engine.py | Engine._on_stop_session(_); Engine._on_end_session(_); Engine.end_session(_)
0.16.0 ... engine/engine_loop.py | EngineLoop.migration_loop(); EngineLoop.migration_event; EngineLoop.executor; EngineLoop.engine_conn
0.16.0 ... engine/inputs_maker.py | EngineRole.Prefill; EngineRole.Decode; EngineRole.Hybrid
0.16.0 ... messages.py | MessageStatus.MIGRATION_WAITING; MessageStatus.MIGRATION_READY; MessageStatus.MIGRATION_RUNNING; MessageStatus.MIGRATION_DONE
0.16.0 ... paging/scheduler.py | Scheduler.has_migration_waiting()
0.16.0 ... disagg/messages.py | MigrationExecutionBatch(protocol=_, requests=_)
0.16.0 ... disagg/conn/protocol.py | MigrationRequest(protocol=_, remote_engine_id=_, remote_session_id=_, remote_token_id=_, remote_block_ids=_, is_dummy_prefill=_)
""",
    "preemption": """
0.16.0 0.18.0 engine/inputs_maker.py | InputsMakerAsync.deactivate_evict_seqs()
0.18.0 ... engine/inputs_maker.py | InputsMakerAsync.preempt_invalid_decode_seqs()
""",
    "end of migrations": """
0.16.0 0.18.0 paging/scheduler.py | Scheduler.collect_migration_done()
0.18.0 ... paging/scheduler.py | Scheduler.resume_completed_migrations()
""",
    "publication": """
0.16.0 0.18.0 engine/engine_loop.py | EngineLoop._publish_forward_checkpoints(_, _)
0.18.0 ... paging/block_trie/checkpoint_lifecycle.py | StateCheckpointLifecycle.finish_forward_dispatch(_, has_save_plan=_)
0.18.0 ... paging/scheduler.py | Scheduler.state_checkpoints
""",
    "release": """
0.16.0 0.18.0 paging/block_manager/base_block_manager.py | BaseBlockManager.free(_)
0.18.0 ... paging/seq_states/states.py | SequenceLifecycle.release_paging_resources(_)
0.18.0 ... paging/scheduler.py | Scheduler.sequence_lifecycle
""",
}
TABLES = Tables(
    "lmdeploy",
    below="lmdeploy/pytorch",
    releases=RELEASES,
    core=CORE,
    parts=PARTS,
    says={},
    guide="A new release of LMDeploy or transformers",
)
SINCE = {part: TABLES.since(part) for part in PARTS}
