"""The leftovers of a server of a pair: what it keeps when nobody has anything to do there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any

from impl.loading.optional import optional
from reference.pairs.config import DECODE, PREFILL

# The tables of each server's manager that have an entry for each room.
_TABLES = {
    PREFILL: (
        "request_status", "failure_records", "transfer_infos", "req_to_decode_prefix_len",
        "_staging_outstanding", "_deferred_ack_targets", "_deferred_ack_poisoned_rooms",
    ),
    DECODE: (
        "request_status", "failure_records", "required_prefill_response_num_table",
        "prefill_response_tracker", "_deferred_abort_ack_tracker",
    ),
}  # fmt: skip
# The tables of P that an abort or late metadata leaves with an entry.
OF_A_ROOM = (
    "request_status", "failure_records", "transfer_infos", "req_to_decode_prefix_len", "deferred_bootstrap",
)  # fmt: skip


def rooms_kept(manager: Any, server: str) -> Iterator[tuple[str, Iterable[int]]]:
    """Yield the tables by room of a manager, and the rooms that each has."""
    for table in _TABLES[server]:
        yield table, getattr(manager, table)
    if (deferred := manager.deferred_bootstrap) is not None:
        # rooms that no sender owns expire
        yield (
            "deferred_bootstrap",
            [room for room, state in deferred.rooms.items() if state.owner is not None],
        )


def full_size(scheduler: Any) -> int:
    """Return the size of the full pool (tokens)."""
    allocator = scheduler.token_to_kv_pool_allocator
    return int(allocator.size_full if scheduler.is_hybrid_swa else allocator.size)


def held_tokens(scheduler: Any) -> int:
    """Return the number of tokens of the full pool that are neither free nor evictable."""
    allocator = scheduler.token_to_kv_pool_allocator
    tree = scheduler.tree_cache
    if scheduler.is_hybrid_swa:
        left = allocator.full_available_size() + tree.full_evictable_size()
    else:
        left = allocator.available_size() + tree.evictable_size()
    return full_size(scheduler) - int(left)


def has_unsent_load(scheduler: Any) -> bool:
    """Return whether a load from the host was queued and not sent: the next request that is restored sends
    it."""
    controller = optional(scheduler.tree_cache, "UnifiedRadixCache.cache_controller")
    return controller is not None and bool(controller.load_queue)


def waits(scheduler: Any, server: str) -> bool:
    """Return whether requests wait on a server for their peer or for room, or its host tier copies KV."""
    copies = [optional(scheduler.tree_cache, f"UnifiedRadixCache.{name}", ()) for name in _COPIES]
    queues = [queue for name, queue in _queues(scheduler, server) if name != _PENDING]
    return any(map(len, (*copies, *queues)))


def leftovers(scheduler: Any, server: str) -> Iterator[tuple[str, str]]:
    """Yield the rows, metadata rows and places in queues that a server keeps."""
    rows = scheduler.req_to_token_pool
    size = optional(rows, "DecodeReqToTokenPool._alloc_size", rows.size + 1) - 1
    if allocator := optional(rows, "HybridReqToTokenPool.mamba_allocator"):
        tree = scheduler.tree_cache
        cached = tree.mamba_evictable_size() if tree.supports_mamba() else 0
        if left := int(allocator.size) - int(allocator.available_size()) - int(cached):
            yield "states", f"{left} of {allocator.size}"
    if size != len(set(rows.free_slots)):
        yield "rows", f"{size - len(set(rows.free_slots))} of {size}"
    metadata = scheduler.req_to_metadata_buffer_idx_allocator
    free = list(metadata.free_slots)
    if missing := sorted(set(range(metadata.size)) - set(free)):
        yield "metadata rows", str(missing)
    if len(free) > len(set(free)):
        yield "metadata rows twice", str(sorted({row for row in free if free.count(row) > 1}))
    pools = optional(scheduler.tree_cache, "UnifiedRadixCache.host_pool_group")
    if pools is not None and scheduler.tree_cache.disable:  # for what is retracted alone
        sizes = [(entry.host_pool.size, entry.host_pool.available_size()) for entry in pools.entries]
        if any(size != free for size, free in sizes):
            yield "KV on the host", ", ".join(f"{size - free} of {size}" for size, free in sizes)
    waits_of_requests = optional(scheduler.tree_cache, "UnifiedRadixCache._storage_prefetch_wait", ())
    if len(waits_of_requests):
        yield "waits for a storage", f"{len(waits_of_requests)} entries"
    for name, queue in _queues(scheduler, server):
        if len(queue):
            yield name, f"{len(queue)} entries"


_PENDING = "chunks that are pending"  # names of requests, and no queue
_COPIES = "ongoing_write_through", "ongoing_load_back", "ongoing_prefetch", "ongoing_backup"


def _queues(scheduler: Any, server: str) -> Iterator[tuple[str, Sized]]:
    if server == PREFILL:
        yield "bootstrap queue", scheduler.disagg_prefill_bootstrap_queue.queue
        yield "inflight queue", scheduler.disagg_prefill_inflight_queue
        yield _PENDING, scheduler.disagg_prefill_pending_chunk_rids
        return
    prealloc = scheduler.disagg_decode_prealloc_queue
    transfers = scheduler.disagg_decode_transfer_queue
    yield "prealloc queue", prealloc.queue
    yield "pending requests", prealloc.pending_reqs
    yield "retracted requests", prealloc.retracted_queue
    yield "transfer queue", transfers.queue
    yield "deferred releases", transfers._deferred_releases
