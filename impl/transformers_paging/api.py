"""Names that the adapter uses of transformers (in `impl.loading`, `probe` says what a line means, `parts` what a part is)."""

from __future__ import annotations

from impl.loading.parts import Tables

RELEASES = ("5.23.0", "5.24.0")
# ruff: noqa: E501
CORE = """
5.23.0 ... cache.py | PagedAttentionCache(_, _, _, _); PagedAttentionCache.cache_allocators; PagedAttentionCache.max_batch_tokens; PagedAttentionCache.pool
5.23.0 ... cache.py | PagedAttentionCache.extend_read_and_write_indices(_, _, _, _, _); get_device_and_memory_breakdown
5.23.0 ... cache_allocators/cache_allocator.py | compute_block_hash; CacheAllocator.ledger; CacheAllocator.block_table; CacheAllocator.block_physical_stride
5.23.0 ... cache_allocators/cache_allocator.py | CacheAllocator.blocks_per_sector; BlockLedger.cached_blocks; BlockLedger.shared_ref_counts
5.23.0 ... cache_allocators/cache_allocator.py | CacheAllocator.update(_, _, _, _, _); CacheAllocator.cache_tensor; CacheAllocator.layer_indices; CacheAllocator.tokens_per_page; CacheAllocator.get_seqlen_k(_, _)
5.23.0 ... cache_allocators/cache_allocator.py | BlockLedger.block_to_hash; BlockLedger.hash_to_block
5.23.0 ... cache_allocators/cache_pool.py | RegularTrees.trees; CachePool._free_blocks; CachePool.free_sectors; CachePool.num_sectors
5.23.0 ... scheduler.py | FIFOScheduler(_, _, _); Scheduler.waiting_requests; Scheduler.active_requests; Scheduler.add_waiting_request(_)
5.23.0 ... scheduler.py | Scheduler.has_pending_requests(); Scheduler.set_request_cancellation(_); Scheduler.clear_cancelled_requests()
5.23.0 ... requests.py | RequestState(request_id=_, initial_tokens=_, streaming=_, max_new_tokens=_, eos_token_id=_, num_children=_)
5.23.0 ... requests.py | RequestState.request_id; RequestState.initial_tokens; RequestState.generated_tokens; RequestState.tokens_to_process
5.23.0 ... requests.py | RequestState.position_offset; RequestState._true_initial_tokens; RequestState.is_cpu_offloaded; FutureRequestState.state; FutureRequestState.query_length; FutureRequestState.has_new_token
5.23.0 ... requests.py | GenerationOutput.request_id; GenerationOutput.generated_tokens; GenerationOutput.is_finished()
5.23.0 ... offloading_manager.py | OffloadingManager(_, _, _, _, _, _); OffloadingManager.free_request_cpu_cache(_); OffloadingManager._compute_num_cpu_sectors(_, _)
5.23.0 ... offloading_manager.py | OffloadingManager._cpu_pool; OffloadingManager._cpu_tensor; OffloadingManager._request_id_to_cpu_blocks
5.23.0 ... continuous_api.py | ContinuousBatchProcessor.prepare_next_batch(); ContinuousBatchProcessor.update_batch()
"""
OVERLAP = "async"  # the way with asynchronous batching, and the part of the API that it needs
PARTS = {
    OVERLAP: """
5.23.0 ... input_outputs.py | ContinuousBatchingAsyncIOs.carry_over_tokens(_, _, _); ContinuousBatchingAsyncIOs.swap_io_pairs()
5.23.0 ... input_outputs.py | ContinuousBatchingAsyncIOs.current_pair; ContinuousBatchingAsyncIOs.io_pairs
5.23.0 ... input_outputs.py | ContinuousBatchingAsyncIOs.max_batch_tokens; ContinuousBatchingIOs.req_id_to_new_token_position; ContinuousBatchingIOs.carry_over_ids; ContinuousBatchingIOs.requests_in_batch; HostDeviceIOPair.host_io
""",
}
TABLES = Tables(
    "transformers", below="transformers/generation/continuous_batching", releases=RELEASES, core=CORE, parts=PARTS,
    says={OVERLAP: "asynchronous batching"}, guide="A new release of LMDeploy or transformers",
)  # fmt: skip
