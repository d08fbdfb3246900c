"""What the adapter uses of a checkout's host tier; see `impl.probe`. Add a line where it starts to use something
else. The rest stands in impl.sglang.releases.api."""

from __future__ import annotations

from pathlib import Path

from impl import probe
from impl.adapter import UnusableImplementation
from impl.sglang.parts.modules import WITH_TIERS
from impl.sglang.releases.catalogue import TABLE

FIRST = "0.5.18"  # the first release that is driven so: before it there is no L2TransferEngine
# With the core in Rust, which tells the locks of full KV on the device alone: in 0.5.19 the others break.
FIRST_IN_RUST = "0.5.20"
FIRST_WITH_STATES = "0.5.22"  # the first whose recurrent state is driven
# Where it differs how a release's locks count: see reference.tiers.locks.
_LOOSE = {"tombstones": "0.5.20", "host end": "0.5.22"}  # up to, not including
# ruff: noqa: E501
API = """
0.5.18 ...    mem_cache/l2_transfer.py | L2TransferEngine(_); TransferCompletion(_, _, _)
0.5.18 ...    mem_cache/l2_transfer.py | L2TransferEngine.submit_device_to_host(_); L2TransferEngine.submit_host_to_device
0.5.18 ...    mem_cache/unified_radix_cache.py | UnifiedRadixCache.init_hicache(_, _); UnifiedRadixCache.init_load_back(_)
0.5.18 ...    mem_cache/unified_radix_cache.py | UnifiedRadixCache.ready_to_load_host_cache(); UnifiedRadixCache.check_hicache_events()
0.5.18 ...    mem_cache/unified_radix_cache.py | UnifiedRadixCache.ongoing_write_through; UnifiedRadixCache.ongoing_load_back
0.5.18 ...    mem_cache/unified_radix_cache.py | UnifiedRadixCache.sanity_check(); UnifiedRadixCache.evict_host(_, _)
0.5.21 ...    mem_cache/unified_radix_cache.py | UnifiedRadixCache.flush_pending_backups()
0.5.18 ...    managers/cache_controller.py | HiCacheController.start_writing(); HiCacheController.start_loading()
0.5.18 ...    managers/cache_controller.py | HiCacheController.ack_write_queue; HiCacheController.ack_load_queue
0.5.18 ...    managers/cache_controller.py | HiCacheController.layer_done_counter; LayerDoneCounter.producer_index
0.5.18 ...    managers/cache_controller.py | HiCacheController.write_queue; HiCacheController.load_queue
0.5.18 ...    managers/schedule_policy.py | PrefillAdder._lock_node
0.5.20 ...    mem_cache/unified_radix_cache.py | UnifiedRadixCache.attach_storage_backend(_, _, _, _, _)
0.5.20 ...    mem_cache/unified_radix_cache.py | UnifiedRadixCache.check_prefetch_progress(_); UnifiedRadixCache.release_aborted_request(_)
0.5.20 ...    mem_cache/unified_radix_cache.py | UnifiedRadixCache.pop_prefetch_loaded_span(_); UnifiedRadixCache.ongoing_backup
0.5.20 ...    mem_cache/unified_radix_cache.py | UnifiedRadixCache.ongoing_prefetch; UnifiedRadixCache.prefetch_loaded_tokens_by_reqid
0.5.20 ...    managers/cache_controller.py | HiCacheController.prefetch_thread_func(); HiCacheController.prefetch_io_aux_func()
0.5.20 ...    managers/cache_controller.py | HiCacheController.backup_thread_func(); HiCacheController.prefetch_sync_thread_func()
0.5.20 ...    managers/cache_controller.py | HiCacheController.prefetch_hit_queue; HiCacheController.ack_backup_queue
0.5.20 ...    managers/cache_controller.py | HiCacheController.prefetch_queue; HiCacheController.prefetch_buffer
0.5.20 ...    managers/cache_controller.py | HiCacheController.backup_queue; HiCacheController.host_mem_release_queue
0.5.20 ...    managers/cache_controller.py | HiCacheController.prefetch_tokens_occupied; STORAGE_BATCH_SIZE
0.5.20 ...    mem_cache/hicache_storage.py | HiCacheFile.batch_exists_v2; HiCacheFile._collect_existing_component_keys
0.5.20 ...    mem_cache/utils.py | get_native_hash
0.5.20 ...    managers/scheduler.py | Scheduler._prefetch_kvcache
0.5.22 ...    disaggregation/decode.py | DecodePreallocQueue(_, _, _, _, _, _, _, _, _, _, _, _, _); DecodePreallocQueue.add(_)
0.5.22 ...    disaggregation/decode.py | DecodePreallocQueue.queue; DecodePreallocQueue.retracted_queue
0.5.22 ...    disaggregation/decode.py | DecodePreallocQueue._init_kv_manager; DecodeTransferQueue(_, _, _, _)
0.5.22 ...    disaggregation/decode.py | DecodeTransferQueue.queue; DecodeTransferQueue._deferred_releases
0.5.22 ...    disaggregation/decode.py | DecodeTransferQueue.enable_deferred_kv_release; DecodeTransferQueue.deferred_kv_release_timeout
0.5.22 ...    disaggregation/decode.py | SchedulerDisaggregationDecodeMixin.process_decode_queue
0.5.22 ...    disaggregation/decode.py | SchedulerDisaggregationDecodeMixin.get_new_prebuilt_batch
0.5.22 ...    managers/scheduler.py | Scheduler.abort_request
0.5.22 ...    mem_cache/base_prefix_cache.py | TreeLock.swa_released; TreeLock.receipt; TreeLock.node
0.5.20 ...    mem_cache/rust_tree_core/adapter.py | RustUnifiedTreeCore.snapshot_buffer_backup(_, _); RustUnifiedTreeCore.pretty_print()
0.5.20 ...    mem_cache/rust_tree_core/adapter.py | RustUnifiedTreeCore.build_storage_backup_spec(_, _); RustUnifiedTreeCore.root_node_handle()
0.5.20 ...    mem_cache/rust_tree_core/adapter.py | RustUnifiedTreeCore.prefetch_anchor_info(_); RustUnifiedTreeCore.get_hash_values(_)
0.5.20 ...    mem_cache/rust_tree_core/adapter.py | RustUnifiedTreeCore.backfill_missing_hash_values(); RustUnifiedTreeCore.begin_insert(_)
0.5.18 ...    mem_cache/pool_host/base.py | HostKVCache.alloc(_); HostKVCache.free(_); HostKVCache.free_slots
0.5.18 ...    mem_cache/unified_cache/unified_tree_core.py | UnifiedTreeNode.component_data; UnifiedTreeNode.hash_value; UnifiedTreeNode.id; UnifiedTreeNode.load_back_pending_id; UnifiedTreeNode.write_through_pending_id
0.5.18 0.5.20 mem_cache/unified_cache/components/tree_component.py | ComponentData.host_value; ComponentData.host_lock_ref; ComponentData.lock_ref; ComponentData.value
0.5.20 ...    mem_cache/unified_cache/components/base.py | ComponentData.host_value; ComponentData.host_lock_ref; ComponentData.lock_ref; ComponentData.value
0.5.18 ...    managers/cache_controller.py | CacheOperation.device_indices; CacheOperation.host_indices; CacheOperation.node_ids; CacheOperation.pool_transfers
0.5.18 ...    managers/cache_controller.py | HiCacheAck.finish_event; HiCacheAck.node_ids
0.5.18 ...    mem_cache/hicache_storage.py | PoolTransfer.device_indices; PoolTransfer.host_indices; PoolTransfer.indices_from_pool; PoolTransfer.name
0.5.18 ...    mem_cache/unified_radix_cache.py | _OngoingWriteThrough.lock_params; _OngoingWriteThrough.publish_node_ids
0.5.18 ...    mem_cache/unified_radix_cache.py | _OngoingLoadBack.lock_params
0.5.18 ...    managers/schedule_batch.py | Req.best_match_node; Req.host_hit_length; Req.needs_host_load_back
0.5.18 ...    mem_cache/unified_radix_cache.py | UnifiedRadixCache.load_back_threshold; UnifiedRadixCache.host_pool_group; UnifiedRadixCache.cache_controller
0.5.18 ...    managers/cache_controller.py | HiCacheController.l2_transfer_engine; HiCacheController.mem_pool_host
0.5.18 ...    managers/cache_controller.py | LayerDoneCounter.num_counters; LayerDoneCounter.events
0.5.19 ...    managers/schedule_batch.py | ReqKvInfo.retraction_backup
0.5.18 ...    mem_cache/unified_cache/unified_tree_core.py | UnifiedTreeCore.get_component_device_value; UnifiedTreeCore.walk_for_kv_canary
0.5.18 ...    mem_cache/pool_host/base.py | HostKVCache.release_slots
0.5.20 ...    mem_cache/unified_radix_cache.py | _OngoingPrefetch.anchor_lock_params; _OngoingPrefetch.anchor_node_id; _OngoingPrefetch.comp_xfers; _OngoingPrefetch.operation
0.5.20 ...    managers/cache_controller.py | HiCacheController.ack_prefetch_queue; HiCacheController.prefetch_sync_queue
0.5.20 ...    mem_cache/hybrid_cache/hybrid_cache_controller.py | HybridCacheController.extra_host_mem_release_queues
0.5.20 ...    mem_cache/hybrid_cache/hybrid_cache_controller.py | StorageOperation.completed_tokens; StorageOperation.hash_value
0.5.20 ...    mem_cache/hybrid_cache/hybrid_cache_controller.py | PrefetchOperation.pool_transfers_done; PrefetchOperation.handle
0.5.20 ...    managers/schedule_batch.py | Req.cache_request_handle
0.5.22 ...    disaggregation/decode.py | DecodeRequest.kv_receiver; DecodeRequest.metadata_buffer_index; DecodeRequest.waiting_for_input; DecodeRequest.req
0.5.22 ...    managers/scheduler.py | Scheduler.disagg_decode_prealloc_queue; Scheduler.disagg_decode_transfer_queue; Scheduler.max_running_requests; Scheduler.collect_inflight_reqs
0.5.22 ...    disaggregation/base/conn.py | KVPoll.Bootstrapping; KVPoll.WaitingForInput; KVPoll.Success
0.5.22 ...    session/session_controller.py | Session._inflight
0.5.18 ...    mem_cache/unified_radix_cache.py | UnifiedRadixCache.components; UnifiedRadixCache.supports_mamba
0.5.18 ...    mem_cache/unified_cache/unified_tree_core_interface.py | RadixCacheWalkResult.slot_indices
0.5.18 ...    mem_cache/unified_cache/unified_tree_core.py | UnifiedTreeCore.node_by_id
0.5.18 ...    managers/schedule_batch.py | ScheduleBatch.hicache_consumer_index
0.5.18 ...    managers/cache_controller.py | HiCacheController.enable_storage
0.5.20 ...    mem_cache/rust_tree_core/adapter.py | RustUnifiedTreeCore.build_hicache_transfers; RustUnifiedTreeCore.walk_for_kv_canary
0.5.20 ...    mem_cache/unified_cache/unified_tree_core_interface.py | BufferBackupSnapshot.parent_node_id
0.5.20 ...    mem_cache/base_prefix_cache.py | DecLockRefParams.skipped_lock_components
0.5.18 ...    mem_cache/base_prefix_cache.py | MatchResult.host_hit_length; MatchResult.swa_host_hit_length; MatchResult.best_match_node
0.5.18 ...    mem_cache/base_prefix_cache.py | MatchResult.last_host_node
"""


def require(root: Path, name: str, release: str) -> None:
    """Raise UnusableImplementation that names what the files under `root` lack of that release's host tier."""
    table = tuple(probe.entries(API))
    missing = probe.Checkout(root, "sglang/srt", WITH_TIERS, table).missing(release, list(TABLE))
    if missing:
        raise UnusableImplementation(
            f"{name} {root}: {probe.named(missing)}. Nothing was driven: CONTRIBUTING.md, 'A new release of"
            " SGLang', says how to follow it"
        )


def loose(release: str) -> tuple[str, ...]:
    """How the locks of a release differ (TierFacts.loose)."""
    order = list(TABLE)
    return tuple(name for name, end in _LOOSE.items() if order.index(release) < order.index(end))
