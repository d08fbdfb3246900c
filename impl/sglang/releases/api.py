"""Names that the adapter uses of a checkout of SGLang; see `impl.loading.probe`. Add a line where a release or
the adapter starts to use something else. A name in braces is what the class of each release says; any other
name is replaced by what the class has for it in `renamed`. A line such as [chunks] names the fact (facts.py)
that the lines below it are of; all trees need those of [all]."""

# ruff: noqa: E501
DRIVEN = """
[all]
0.5.10 ...    managers/schedule_batch.py | Req(rid=_, origin_input_text=_, origin_input_ids=_, sampling_params=_, vocab_size=_)
0.5.10 ...    managers/schedule_batch.py | Req.finished(); Req.init_next_round_input(_); Req.set_finish_with_abort(_)
0.5.10 ...    managers/schedule_batch.py | Req.to_finish; Req.output_ids; Req.origin_input_ids; Req.last_node
0.5.10 ...    managers/schedule_batch.py | ScheduleBatch(reqs=_, req_to_token_pool=_, token_to_kv_pool_allocator=_, tree_cache=_)
0.5.10 ...    managers/schedule_batch.py | ScheduleBatch.prepare_for_extend(); ScheduleBatch.prepare_for_decode()
0.5.10 ...    managers/schedule_batch.py | ScheduleBatch.mix_with_running(_)
0.5.10 ...    managers/schedule_batch.py | ScheduleBatch._evict_swa(_, _); FINISH_ABORT(); FINISH_LENGTH(length=_)
0.5.10 ...    mem_cache/swa_memory_pool.py | SWAKVPool
0.5.10 ...    mem_cache/memory_pool.py | ReqToTokenPool(size=_, max_context_len=_, device=_, enable_memory_saver=_)
0.5.10 ...    mem_cache/memory_pool.py | ReqToTokenPool.free_slots; ReqToTokenPool.req_to_token; ReqToTokenPool.size
0.5.10 ...    mem_cache/cache_init_params.py | CacheInitParams(disable=_, req_to_token_pool=_, token_to_kv_pool_allocator=_, page_size=_, sliding_window_size=_, is_eagle=_)
0.5.10 ...    mem_cache/base_prefix_cache.py | MatchPrefixParams(key=_, req=_); EvictParams(num_tokens=_, swa_num_tokens=_)
0.5.10 ...    managers/scheduler.py | Scheduler.abort_request(_)
0.5.10 ...    mem_cache/base_prefix_cache.py | EvictResult.num_tokens_evicted; EvictResult.swa_num_tokens_evicted
0.5.10 ...    managers/schedule_batch.py | Req.sampling_params; Req.session; Req.is_retracted
[chunks]
0.5.10 0.5.13 managers/schedule_batch.py | Req.fill_ids
0.5.13 ...    managers/schedule_batch.py | Req.full_untruncated_fill_ids
0.5.10 0.5.15 managers/schedule_batch.py | Req.set_extend_input_len(_)
0.5.13 0.5.15 managers/schedule_batch.py | Req.fill_len
0.5.15 0.5.22 managers/schedule_batch.py | Req.set_extend_range(_, _); Req.extend_range
0.5.22 ...    managers/schedule_batch.py | Req.extend_end; Req.prefix_len
0.5.10 0.5.22 managers/schedule_batch.py | Req.prefix_indices
0.5.22 ...    mem_cache/common.py | match_kv_cache(_, _, _)
[chunk counter]
0.5.10 ...    managers/schedule_batch.py | Req.{chunks}
[cursors]
0.5.10 ...    managers/schedule_batch.py | {req_pool_idx}; {kv_committed_len}; {kv_allocated_len}
0.5.10 ...    managers/schedule_batch.py | {swa_evicted_seqlen}; {cache_protected_len}
0.5.16 ...    managers/schedule_batch.py | Req.kv
0.5.21 ...    managers/schedule_batch.py | ReqKvInfo.set_evicted_seqlen(_, _)
0.5.16 0.5.19 managers/schedule_batch.py | ReqKvInfo(kv_allocated_len=_, swa_evicted_seqlen=_)
0.5.19 ...    managers/schedule_batch.py | ReqKvInfo.holds_kv
[checkpoints]
0.5.11 ...    mem_cache/common.py | {checkpoints}(_, _)
[release]
0.5.10 0.5.22 mem_cache/common.py | release_kv_cache(_, _, is_insert=_)
0.5.22 ...    mem_cache/common.py | release_kv_cache(_, _, checkpoint=_)
[retraction]
0.5.10 0.5.19 managers/schedule_batch.py | ScheduleBatch.release_req(_, _, _); ScheduleBatch.retract_decode(_)
0.5.19 ...    managers/schedule_batch.py | ScheduleBatch.release_req(_, _); ScheduleBatch.retract_decode()
[checks]
0.5.10 ...    {checker} | {Checker}.self_check_during_busy()
0.5.10 0.5.11 {checker} | {Checker}.check_tree_cache(); {Checker}.self_check_during_idle(); {Checker}._get_batch_uncached_size(_)
0.5.13 ...    {checker} | {Checker}._check_req_pool()
0.5.13 ...    {checker} | {Checker}._check_all_pools(_); {Checker}._report_leak(_, _)
0.5.11 ...    {checker} | {Checker}._check_tree_cache(); {Checker}._check_pool_invariant(_, _, _, _, _, _, _)
0.5.13 ...    {observer} | {Observer}.get_pool_stats(); {Observer}.session_held_req_count()
[session modules]
0.5.10 ...    {controller} | SessionController(_); SessionController.open(_); SessionController.close(_)
0.5.10 ...    {controller} | SessionController.get(_); SessionController.sessions
0.5.10 ...    {controller} | SessionController.maybe_reap(_); SessionController._last_reap_time
0.5.10 ...    {controller} | Session.create_req(_, _, _); Session.req_nodes
0.5.10 ...    {sessions} | {SessionCache}(_); {SessionCache}.slots
[session slots]
0.5.10 0.5.19 {sessions} | SessionSlot.is_holding_kv
0.5.19 ...    {sessions} | SessionSlot.kv
0.5.16 ...    mem_cache/unified_radix_cache.py | UnifiedRadixCache.session; UnifiedRadixCache.full_evictable_size(); UnifiedRadixCache.swa_evictable_size()
[allocation]
0.5.10 0.5.16 mem_cache/common.py | alloc_token_slots(_, _)
0.5.10 0.5.16 mem_cache/common.py | alloc_paged_token_slots_extend(tree_cache=_, prefix_lens=_, prefix_lens_cpu=_, seq_lens=_, seq_lens_cpu=_, last_loc=_, extend_num_tokens=_)
0.5.16 ...    mem_cache/allocation.py | alloc_token_slots(_, _)
0.5.16 ...    mem_cache/allocation.py | alloc_paged_token_slots_extend(tree_cache=_, prefix_lens=_, prefix_lens_cpu=_, seq_lens=_, seq_lens_cpu=_, last_loc=_, extend_num_tokens=_)
0.5.16 ...    mem_cache/allocation.py | assign_req_to_token_pool_func
[free pages]
0.5.13 0.5.20 mem_cache/allocator/paged.py | "staged_pages" not in "PagedTokenToKVPoolAllocator"
0.5.13 0.5.20 mem_cache/allocator/paged.py | PagedTokenToKVPoolAllocator.free_pages; PagedTokenToKVPoolAllocator.release_pages
0.5.20 ...    mem_cache/allocator/paged.py | PagedTokenToKVPoolAllocator.get_all_free_pages()
[allocators]
0.5.10 0.5.13 mem_cache/allocator.py | TokenToKVPoolAllocator(_, kvcache=_, dtype=_, device=_, need_sort=_); alloc_extend_naive(_, _, _, _, _, _, _)
0.5.10 0.5.13 mem_cache/allocator.py | PagedTokenToKVPoolAllocator(_, _, kvcache=_, dtype=_, device=_, need_sort=_)
0.5.13 ...    mem_cache/allocator/__init__.py | TokenToKVPoolAllocator
0.5.13 ...    mem_cache/allocator/paged.py | PagedTokenToKVPoolAllocator(_, _, kvcache=_, dtype=_, device=_, need_sort=_); alloc_extend_naive(_, _, _, _, _, _, _)
0.5.13 ...    mem_cache/allocator/paged.py | PagedTokenToKVPoolAllocator.available_size(); PagedTokenToKVPoolAllocator.free_group_begin()
0.5.13 ...    mem_cache/allocator/paged.py | PagedTokenToKVPoolAllocator.free_group_end()
0.5.10 0.5.13 mem_cache/allocator.py | alloc_extend_kernel; alloc_decode_kernel
0.5.13 ...    mem_cache/allocator/paged.py | alloc_extend_kernel; alloc_decode_kernel
[SWA allocators]
0.5.10 0.5.13 mem_cache/swa_memory_pool.py | SWATokenToKVPoolAllocator.get_kvcache
0.5.13 ...    mem_cache/allocator/swa.py | SWATokenToKVPoolAllocator.get_kvcache
0.5.10 0.5.13 mem_cache/swa_memory_pool.py | SWATokenToKVPoolAllocator(size=_, size_swa=_, page_size=_, kvcache=_, dtype=_, device=_, need_sort=_)
0.5.13 ...    mem_cache/allocator/swa.py | SWATokenToKVPoolAllocator(size=_, size_swa=_, page_size=_, kvcache=_, dtype=_, device=_, need_sort=_)
0.5.13 ...    mem_cache/allocator/swa.py | SWATokenToKVPoolAllocator.full_attn_allocator; SWATokenToKVPoolAllocator.swa_attn_allocator
0.5.13 ...    mem_cache/allocator/swa.py | SWATokenToKVPoolAllocator.full_to_swa_index_mapping; SWATokenToKVPoolAllocator.free_swa(_)
[spare pages]
0.5.10 0.5.11 mem_cache/swa_memory_pool.py | "len(seq_lens) * self.page_size" in "SWATokenToKVPoolAllocator.alloc_extend"
0.5.11 0.5.13 mem_cache/swa_memory_pool.py | "len(seq_lens) * self.page_size" not in "SWATokenToKVPoolAllocator.alloc_extend"
0.5.13 ...    mem_cache/allocator/swa.py | "len(seq_lens) * self.page_size" not in "SWATokenToKVPoolAllocator.alloc_extend"
[states]
0.5.22 ...    mem_cache/memory_pool.py | HybridReqToTokenPool._alloc_ping_pong_buffer(_)
0.5.22 ...    mem_cache/memory_pool.py | HybridReqToTokenPool(size=_, mamba_size=_, mamba_spec_state_size=_, max_context_len=_, device=_, enable_memory_saver=_, cache_params=_, mamba_layer_ids=_, enable_mamba_extra_buffer=_, enable_mamba_extra_buffer_lazy=_, enable_overlap_schedule=_)
0.5.22 ...    mem_cache/memory_pool.py | HybridReqToTokenPool.mamba_allocator; HybridReqToTokenPool.mamba_pool; HybridReqToTokenPool.get_mamba_indices(_)
0.5.22 ...    mem_cache/memory_pool.py | HybridReqToTokenPool.translate_mamba_indices(_); HybridReqToTokenPool.copy_mamba_state(_, _)
0.5.22 ...    mem_cache/memory_pool.py | MambaPool.clear_slots(_); MambaPool.mamba_cache
0.5.22 ...    mem_cache/memory_pool.py | MambaSlotAllocator; HybridReqToTokenPool.mamba_initial_tracking_slots
0.5.22 ...    managers/schedule_batch.py | ScheduleBatch.mamba_lazy_spec_prepare(_, _)
0.5.22 ...    mem_cache/memory_pool.py | HybridReqToTokenPool.req_index_to_mamba_ping_pong_track_buffer_mapping
0.5.22 ...    managers/schedule_batch.py | ReqKvInfo.mamba_ping_pong_track_buffer; ReqKvInfo.mamba_last_track_idx
0.5.22 ...    managers/schedule_batch.py | ReqKvInfo.mamba_last_track_seqlen; ScheduleBatch.mamba_track_mask
0.5.22 ...    managers/schedule_batch.py | ScheduleBatch.mamba_track_indices; ScheduleBatch.mamba_track_seqlens
0.5.22 ...    managers/scheduler_components/batch_result_processor.py | SchedulerBatchResultProcessor._handle_finish_state_updated_req(_, _, _, _, _)
0.5.22 ...    speculative/spec_utils.py | prepare_mamba_track_for_verify(_)
0.5.22 ...    speculative/spec_utils.py | _verify_commit_step_indices(batch=_, accept_index=_, accept_lens=_, draft_token_num=_)
0.5.22 ...    mem_cache/cache_init_params.py | CacheInitParams.enable_mamba_extra_buffer
0.5.22 ...    managers/schedule_batch.py | ReqKvInfo.holds_mamba; ReqKvInfo.mamba_pool_idx; ReqKvInfo.mamba_cow_src_index; ReqKvInfo.mamba_needs_clear
0.5.22 ...    managers/schedule_batch.py | ScheduleBatch.mamba_cow_src_indices; ScheduleBatch.mamba_cow_dst_indices; ScheduleBatch.mamba_clear_indices
0.5.22 ...    mem_cache/unified_radix_cache.py | UnifiedRadixCache.mamba_evictable_size(); UnifiedRadixCache.tree_components
0.5.22 ...    mem_cache/base_prefix_cache.py | EvictParams(num_tokens=_, swa_num_tokens=_, mamba_num=_); EvictResult.mamba_num_evicted
[token ids]
0.5.10 0.5.13 managers/schedule_batch.py | "array('q'" not in "Req"
0.5.13 ...    managers/schedule_batch.py | "array('q'" in "Req"
[claims]
0.5.10 0.5.11 managers/scheduler_output_processor_mixin.py | "accept_lens[i] - 1" not in "SchedulerOutputProcessorMixin._resolve_spec_*tok*"
0.5.11 0.5.12 managers/scheduler_output_processor_mixin.py | "accept_lens[i] - 1" in "SchedulerOutputProcessorMixin._resolve_spec_*tok*"
0.5.12 0.5.13 managers/scheduler_output_processor_mixin.py | "kv_committed_len -= 1" in "SchedulerOutputProcessorMixin._resolve_spec_*tok*"
0.5.13 0.5.15 managers/scheduler_components/batch_result_processor.py | "kv_committed_len -= 1" in "SchedulerBatchResultProcessor._resolve_spec_*tok*"
0.5.15 ...    managers/scheduler_components/batch_result_processor.py | "kv_committed_len -= 1" not in "SchedulerBatchResultProcessor._resolve_spec_*tok*"
[prefill results]
0.5.13 0.5.18 managers/scheduler_components/batch_result_processor.py | "free_group_begin" not in "SchedulerBatchResultProcessor.process_batch_result_prefill"
0.5.18 ...    managers/scheduler_components/batch_result_processor.py | "free_group_begin" in "SchedulerBatchResultProcessor.process_batch_result_prefill"
[component kinds]
0.5.16 ...    mem_cache/unified_radix_cache.py | ComponentType.FULL; ComponentType.SWA; ComponentType.MAMBA
[locks]
0.5.11 0.5.17 mem_cache/unified_radix_cache.py | "root_node_handle" not in "UnifiedRadixCache"
0.5.22 ...    managers/schedule_batch.py | Req.lock; Req.swa_branching_seqlen
0.5.20 0.5.22 managers/schedule_batch.py | Req.lock_receipt
0.5.10 0.5.17 mem_cache/base_prefix_cache.py | DecLockRefParams(swa_uuid_for_lock=_)
0.5.17 0.5.20 mem_cache/base_prefix_cache.py | DecLockRefParams(swa_uuid_for_lock=_, skip_lock_node_ids=_)
0.5.19 0.5.22 mem_cache/base_prefix_cache.py | IncLockRefResult.to_dec_params()
0.5.17 ...    mem_cache/unified_radix_cache.py | UnifiedRadixCache.root_node_handle()
0.5.16 0.5.22 mem_cache/unified_radix_cache.py | UnifiedRadixCache.inc_lock_ref(_); UnifiedRadixCache.dec_lock_ref(_, _)
0.5.22 ...    mem_cache/unified_radix_cache.py | UnifiedRadixCache.lock(_); UnifiedRadixCache.unlock(_); UnifiedRadixCache.prefix_device_indices(_)
[caches]
0.5.16 ...    mem_cache/cache_init_params.py | CacheInitParams.tree_components
0.5.10 0.5.21 mem_cache/radix_cache.py | RadixCache(_)
0.5.10 0.5.22 mem_cache/chunk_cache.py | ChunkCache(_); SWAChunkCache(_)
0.5.10 0.5.21 mem_cache/swa_radix_cache.py | SWARadixCache(_)
0.5.16 ...    mem_cache/unified_radix_cache.py | UnifiedRadixCache(_); ComponentType; UnifiedRadixCache.evict(_); UnifiedRadixCache.match_prefix(_)
[tree nodes]
0.5.10 0.5.21 mem_cache/radix_cache.py | TreeNode.children; TreeNode.key; TreeNode.value; TreeNode.lock_ref
0.5.10 0.5.21 mem_cache/swa_radix_cache.py | TreeNode.full_lock_ref; TreeNode.swa_lock_ref; TreeNode.swa_tombstone
0.5.10 0.5.21 {sessions} | {SessionCache}.inner
0.5.16 0.5.17 mem_cache/unified_radix_cache.py | UnifiedTreeNode.component_data; UnifiedTreeNode.children; UnifiedTreeNode.key; UnifiedTreeNode.parent
0.5.17 ...    mem_cache/unified_cache/unified_tree_core.py | UnifiedTreeNode.component_data; UnifiedTreeNode.children; UnifiedTreeNode.key; UnifiedTreeNode.parent
0.5.16 0.5.17 mem_cache/unified_cache_components/tree_component.py | ComponentData.value; ComponentData.lock_ref
0.5.17 0.5.20 mem_cache/unified_cache/components/tree_component.py | ComponentData.value; ComponentData.lock_ref
0.5.20 ...    mem_cache/unified_cache/components/base.py | ComponentData.value; ComponentData.lock_ref
[match results]
0.5.10 0.5.22 mem_cache/base_prefix_cache.py | MatchResult.device_indices
0.5.10 ...    mem_cache/base_prefix_cache.py | MatchResult.last_device_node
[namespaces]
0.5.13 ...    mem_cache/radix_cache.py | RadixKey.is_bigram; RadixKey.token_ids
0.5.10 0.5.18 mem_cache/radix_cache.py | "cache_salt" not in "RadixKey"
0.5.10 0.5.18 mem_cache/radix_cache.py | RadixKey(token_ids=_, extra_key=_)
0.5.18 ...    mem_cache/radix_cache.py | RadixKey(token_ids=_, extra_key=_, cache_salt=_); RadixKey.cache_salt
0.5.18 ...    managers/schedule_batch.py | Req.cache_salt
[rounds]
0.5.10 0.5.15 speculative/eagle_info_v2.py | EagleDraftInputV2Mixin.prepare_for_decode(_)
0.5.15 ...    speculative/eagle_utils.py | eagle_prepare_for_decode(_)
[round ends]
0.5.10 0.5.15 speculative/eagle_info_v2.py | EagleDraftInputV2Mixin.prepare_for_decode(_)
0.5.15 0.5.16 speculative/eagle_utils.py | "// page_size * page_size" not in "eagle_prepare_for_decode"
0.5.16 0.5.19 speculative/eagle_utils.py | "// page_size * page_size" in "eagle_prepare_for_decode"
0.5.19 ...    speculative/eagle_utils.py | "page_aligned_decode_alloc_lens" in "eagle_prepare_for_decode"
[received prompts]
0.5.12 0.5.13 mem_cache/swa_memory_pool.py | SWATokenToKVPoolAllocator.alloc_extend_swa_tail(_, _, _, _, _, _, swa_tail_len=_)
0.5.13 ...    mem_cache/allocator/swa.py | SWATokenToKVPoolAllocator.alloc_extend_swa_tail(_, _, _, _, _, _, swa_tail_len=_)
0.5.19 ...    disaggregation/decode.py | DecodePreallocQueue._swa_tail_len(_)
[aborts]
0.5.20 ...    managers/scheduler.py | Scheduler._release_aborted_request(_)
[finish check]
0.5.10 ...    managers/schedule_batch.py | Req.{looks}(_)
[deferred close]
0.5.11 ...    {controller} | Session.close_on_finish
[history]
0.5.14 ...    {controller} | Session.committed_origin_len
[hand-ins]
0.5.10 0.5.16 mem_cache/radix_cache.py | RadixCache.cache_finished_req(_)
0.5.16 0.5.21 mem_cache/radix_cache.py | RadixCache.cache_finished_req(_, kv_len_to_handle=_)
0.5.19 ...    mem_cache/base_prefix_cache.py | BasePrefixCache.free_kv_row(_, _)
"""
# What the hooks of the watcher read, in a server (server/watch.py, reading.py).
WATCHED = """
0.5.14 ...    managers/scheduler.py | Scheduler._add_request_to_queue(_, is_retracted=_); Scheduler._prefetch_kvcache; Scheduler.abort_request(_); Scheduler.process_batch_result(_, _)
0.5.14 0.5.16 managers/scheduler.py | Scheduler.get_next_batch_to_run()
0.5.16 ...    managers/scheduler.py | Scheduler.get_next_batch_to_run(_, _)
0.5.14 ...    managers/scheduler.py | Scheduler.tree_cache; Scheduler.req_to_token_pool; Scheduler.token_to_kv_pool_allocator; Scheduler.session_controller
0.5.14 ...    managers/scheduler.py | Scheduler.is_hybrid_swa; Scheduler.spec_algorithm; Scheduler.enable_overlap; Scheduler.page_size; Scheduler.sliding_window_size
0.5.14 ...    managers/scheduler.py | Scheduler.waiting_queue; Scheduler.running_batch; Scheduler.last_batch; Scheduler.chunked_req; Scheduler.result_queue; Scheduler.server_args; Scheduler.max_queued_requests; Scheduler.disaggregation_mode
0.5.14 ...    managers/schedule_batch.py | ScheduleBatch.prefix_lens; ScheduleBatch.extend_lens; ScheduleBatch.decoding_reqs; ScheduleBatch.forward_mode
0.5.14 ...    managers/schedule_batch.py | Req.rid; Req.session; Req.sampling_params; Req.finished_reason; Req.finished_len; Req.is_retracted
0.5.14 ...    {controller} | SessionController._close(_); Session.streaming; Session.timeout; Session.session_id
0.5.14 ...    managers/io_struct.py | OpenSessionReqInput.session_id; OpenSessionReqInput.streaming; OpenSessionReqInput.timeout; CloseSessionReqInput.session_id; AbortReq.abort_all
0.5.14 ...    managers/io_struct.py | OpenSessionReqOutput.session_id; OpenSessionReqOutput.success; TokenizedGenerateReqInput.input_ids
0.5.14 ...    mem_cache/allocator/swa.py | SWATokenToKVPoolAllocator.full_available_size(); SWATokenToKVPoolAllocator.swa_available_size()
0.5.14 ...    mem_cache/allocator/swa.py | SWATokenToKVPoolAllocator.size_full; SWATokenToKVPoolAllocator.size_swa
0.5.16 ...    managers/schedule_batch.py | NextBatchPlan.batch_to_run
0.5.16 ...    mem_cache/unified_radix_cache.py | UnifiedRadixCache.disable; UnifiedRadixCache.evictable_size(); UnifiedRadixCache.protected_size()
0.5.19 ...    mem_cache/unified_radix_cache.py | UnifiedRadixCache._tree_core_backend
0.5.16 ...    mem_cache/unified_radix_cache.py | UnifiedRadixCache.full_protected_size(); UnifiedRadixCache.swa_protected_size()
0.5.22 ...    mem_cache/unified_radix_cache.py | UnifiedRadixCache.mamba_protected_size()
0.5.22 ...    mem_cache/memory_pool.py | HybridReqToTokenPool.mamba_initial_tracking_slots; HybridReqToTokenPool.enable_mamba_extra_buffer_lazy; MambaPool.size
0.5.23 ...    mem_cache/unified_cache/unified_tree_core.py | UnifiedTreeCore.inc_lock_ref(_); UnifiedTreeCore.inc_host_lock_ref(_)
0.5.23 ...    mem_cache/base_prefix_cache.py | IncLockRefResult.to_dec_params(); TreeLock.swa_released; TreeLock.receipt; TreeLock.node
"""
# What exported tests call besides (ci/templates).
EXPORTED = """
0.5.22 ...    mem_cache/unified_radix_cache.py | UnifiedRadixCache.path_device_indices(_); UnifiedRadixCache.tree_core
0.5.22 ...    mem_cache/unified_cache/unified_tree_core.py | UnifiedTreeCore.match_full_device_prefix(_); UnifiedTreeCore.all_values_flatten()
0.5.16 ...    mem_cache/unified_radix_cache.py | UnifiedRadixCache.root_node
"""
# What a whole scheduler is built from, and the stand-ins of its sockets, device and clients
# (server/build.py, whole_scheduler.py, fake_model.py).
SERVED = """
0.5.14 ...    managers/scheduler.py | Scheduler.run_event_loop(); Scheduler.gracefully_exit; Scheduler.tp_worker; Scheduler.draft_worker
0.5.14 ...    managers/io_struct.py | OpenSessionReqInput(capacity_of_str_len=_, session_id=_, streaming=_, timeout=_); CloseSessionReqInput(session_id=_)
0.5.14 ...    managers/io_struct.py | AbortReq(rid=_); TokenizedGenerateReqInput
0.5.14 ...    managers/schedule_policy.py | PrefillAdder.preempt_to_schedule
0.5.14 ...    managers/utils.py | GenerationBatchResult(logits_output=_, next_token_ids=_, can_run_cuda_graph=_)
0.5.14 ...    managers/scheduler_components/ipc_channels.py | SchedulerIpcChannels.create
0.5.14 ...    managers/scheduler_components/request_receiver.py | SchedulerRequestReceiver._pull_raw_reqs
0.5.14 ...    speculative/spec_info.py | SpeculativeAlgorithm.create_worker
0.5.14 ...    speculative/base_spec_worker.py | BaseSpecWorker
0.5.14 ...    speculative/eagle_info.py | EagleDraftInput
0.5.23 ...    managers/scheduler.py | Scheduler.attach_hicache_storage_wrapped(_)
0.5.23 ...    managers/io_struct.py | AttachHiCacheStorageReqInput.hicache_storage_backend; AttachHiCacheStorageReqInput.hicache_storage_backend_extra_config_json
0.5.23 ...    managers/io_struct.py | AttachHiCacheStorageReqInput.hicache_storage_prefetch_policy; AttachHiCacheStorageReqInput.hicache_write_policy
0.5.23 ...    managers/scheduler.py | Scheduler.disagg_metadata_buffers; Scheduler.req_to_metadata_buffer_idx_allocator
0.5.23 ...    managers/scheduler.py | Scheduler.disagg_prefill_bootstrap_queue; Scheduler.disagg_prefill_inflight_queue; Scheduler.disagg_prefill_pending_chunk_rids
0.5.23 ...    disaggregation/decode.py | DecodePreallocQueue._send_kv_metadata; DecodePreallocQueue.kv_manager; DecodePreallocQueue.pending_reqs
0.5.23 ...    managers/schedule_batch.py | Req.pending_bootstrap; Req.start_send_idx
0.5.23 ...    mem_cache/memory_pool.py | MHATokenToKVPool.k_buffer; MHATokenToKVPool.v_buffer; MHATokenToKVPool.head_num; MHATokenToKVPool.head_dim
0.5.23 ...    mem_cache/memory_pool.py | HybridReqToTokenPool.get_state_buf_infos()
0.5.23 ...    managers/schedule_batch.py | Req.retracted_stain
0.5.23 ...    disaggregation/decode.py | DecodeReqToTokenPool._alloc_size
0.5.23 ...    managers/io_struct.py | BatchTokenIDOutput.rids; BatchTokenIDOutput.output_ids; BatchTokenIDOutput.decode_ids; BatchTokenIDOutput.finished_reasons
0.5.23 ...    speculative/eagle_info.py | EagleDraftInput.hidden_states
0.5.23 ...    disaggregation/decode.py | DecodeTransferQueue._commit_hicache_local_restore_to_req(_); DecodeRequest.prefix_match
0.5.23 ...    disaggregation/decode_hicache_mixin.py | DecodePrefixMatch.needs_local_restore; DecodePrefixMatch.restore_token_count
0.5.23 ...    speculative/spec_utils.py | prepare_mamba_track_for_verify(_); commit_mamba_states_after_verify(_, _, _, _, _)
0.5.14 ...    managers/schedule_batch.py | ScheduleBatch.input_ids; ScheduleBatch.out_cache_loc; ScheduleBatch.seq_lens; ScheduleBatch.req_pool_indices; ScheduleBatch.spec_info
0.5.14 ...    mem_cache/allocator/swa.py | SWATokenToKVPoolAllocator.translate_loc_from_full_to_swa(_)
"""
# What +hicache uses besides (tiers).
TIERED = """
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
0.5.20 ...    mem_cache/unified_radix_cache.py | UnifiedRadixCache.attach_storage_backend(_, _, _, _, _); UnifiedRadixCache.detach_storage_backend()
0.5.20 ...    mem_cache/unified_radix_cache.py | UnifiedRadixCache.check_prefetch_progress(_); UnifiedRadixCache.release_aborted_request(_)
0.5.20 ...    mem_cache/unified_radix_cache.py | UnifiedRadixCache.pop_prefetch_loaded_span(_); UnifiedRadixCache.ongoing_backup
0.5.20 ...    mem_cache/unified_radix_cache.py | UnifiedRadixCache.finish_storage_prefetch_admission(_, _, _)
0.5.23 ...    mem_cache/unified_radix_cache.py | UnifiedRadixCache._storage_prefetch_wait
0.5.20 ...    mem_cache/unified_radix_cache.py | UnifiedRadixCache.ongoing_prefetch; UnifiedRadixCache.prefetch_loaded_tokens_by_reqid
0.5.20 ...    managers/cache_controller.py | HiCacheController.prefetch_thread_func(); HiCacheController.prefetch_io_aux_func()
0.5.20 ...    managers/cache_controller.py | HiCacheController.backup_thread_func(); HiCacheController.prefetch_sync_thread_func()
0.5.20 ...    managers/cache_controller.py | HiCacheController.prefetch_hit_queue; HiCacheController.ack_backup_queue
0.5.20 ...    managers/cache_controller.py | HiCacheController.prefetch_queue; HiCacheController.prefetch_buffer
0.5.20 ...    managers/cache_controller.py | HiCacheController.backup_queue; HiCacheController.host_mem_release_queue
0.5.20 ...    managers/cache_controller.py | HiCacheController.prefetch_tokens_occupied; STORAGE_BATCH_SIZE
0.5.20 ...    mem_cache/hicache_storage.py | HiCacheFile.batch_exists_v2; HiCacheFile._collect_existing_component_keys
0.5.20 ...    mem_cache/utils.py | get_native_hash; get_storage_hash_str
0.5.20 ...    managers/scheduler.py | Scheduler._prefetch_kvcache
0.5.22 ...    disaggregation/decode.py | DecodePreallocQueue(_, _, _, _, _, _, _, _, _, _, _, _, _); DecodePreallocQueue.add(_)
0.5.22 ...    disaggregation/decode.py | DecodePreallocQueue.queue; DecodePreallocQueue.retracted_queue
0.5.22 ...    disaggregation/decode.py | DecodePreallocQueue._init_kv_manager; DecodeTransferQueue(_, _, _, _)
0.5.22 ...    disaggregation/decode.py | DecodeTransferQueue.queue; DecodeTransferQueue._deferred_releases
0.5.22 ...    disaggregation/decode.py | DecodeTransferQueue.enable_deferred_kv_release; DecodeTransferQueue.deferred_kv_release_timeout
0.5.22 ...    disaggregation/decode.py | SchedulerDisaggregationDecodeMixin.process_decode_queue
0.5.22 ...    disaggregation/decode.py | SchedulerDisaggregationDecodeMixin.get_new_prebuilt_batch
0.5.22 ...    managers/scheduler.py | Scheduler.abort_request
0.5.23 ...    disaggregation/prefill.py | PrefillBootstrapQueue(_, _, _, _, _, _, _, _, _, _); PrefillBootstrapQueue.add(_, _)
0.5.23 ...    disaggregation/prefill.py | PrefillBootstrapQueue.queue; PrefillBootstrapQueue.pop_bootstrapped(); PrefillBootstrapQueue._init_kv_manager
0.5.23 ...    disaggregation/prefill.py | SchedulerDisaggregationPrefillMixin.get_next_disagg_prefill_batch_to_run(_, _)
0.5.23 ...    disaggregation/prefill.py | SchedulerDisaggregationPrefillMixin.process_batch_result_disagg_prefill(_, _)
0.5.23 ...    disaggregation/prefill.py | SchedulerDisaggregationPrefillMixin.process_disagg_prefill_inflight_queue()
0.5.23 ...    disaggregation/prefill.py | SchedulerDisaggregationPrefillMixin.maybe_send_cached_prefix_chunk(_)
0.5.23 ...    managers/scheduler.py | Scheduler.process_pending_chunked_abort; Scheduler.disagg_prefill_pending_chunk_rids
0.5.23 ...    managers/schedule_batch.py | Req.metadata_buffer_index; Req.inflight_middle_chunks; Req.pending_bootstrap
0.5.23 ...    mem_cache/unified_radix_cache.py | UnifiedRadixCache.lock(_)
0.5.22 ...    mem_cache/base_prefix_cache.py | TreeLock.swa_released; TreeLock.receipt; TreeLock.node
0.5.20 ...    mem_cache/rust_tree_core/adapter.py | RustUnifiedTreeCore.snapshot_buffer_backup(_, _); RustUnifiedTreeCore.pretty_print()
0.5.20 ...    mem_cache/rust_tree_core/adapter.py | RustUnifiedTreeCore.build_storage_backup_spec(_, _); RustUnifiedTreeCore.root_node_handle()
0.5.20 ...    mem_cache/rust_tree_core/adapter.py | RustUnifiedTreeCore.prefetch_anchor_info(_); RustUnifiedTreeCore.get_hash_values(_)
0.5.20 ...    mem_cache/rust_tree_core/adapter.py | RustUnifiedTreeCore.backfill_missing_hash_values(); RustUnifiedTreeCore.begin_insert(_)
0.5.18 ...    mem_cache/base_prefix_cache.py | InitLoadBackParams(best_match_node=_, host_hit_length=_, req=_)
0.5.18 ...    mem_cache/hicache_storage.py | PoolName.KV; PoolName.SWA; PoolName.MAMBA
0.5.18 0.5.19 mem_cache/memory_pool_host.py | HostPoolGroup(_); PoolEntry
0.5.19 ...    mem_cache/pool_host/group.py | HostPoolGroup(_); PoolEntry
0.5.19 ...    mem_cache/hybrid_cache/hybrid_pool_assembler.py | _evict_swa_for_device_alloc(_, _); _evict_mamba_for_device_alloc(_, _)
0.5.20 ...    mem_cache/unified_cache/components/base.py | CacheTransferPhase.BACKUP_STORAGE
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
0.5.22 ...    disaggregation/base/conn.py | KVPoll.Bootstrapping; KVPoll.WaitingForInput; KVPoll.Transferring; KVPoll.Success; KVPoll.Failed; StateType.SWA
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
BY = {
    "driven": DRIVEN,
    "tiered": TIERED,
    "watched": WATCHED,
    "exported": EXPORTED,
    "served": SERVED,
}
