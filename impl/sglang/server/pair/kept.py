"""Finds what a server of a pair still keeps when nobody has anything to do there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from impl.optional import optional
from reference.pairs.config import DECODE, PREFILL

# What both managers keep by room, and what only one of them does.
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


def rooms_kept(manager: Any, server: str) -> Iterator[tuple[str, Iterable[int]]]:
    """The tables by room of a manager, and the rooms that each has."""
    for table in _TABLES[server]:
        yield table, getattr(manager, table)
    if (deferred := manager.deferred_bootstrap) is not None:
        # rooms that no sender owns expire
        yield (
            "deferred_bootstrap",
            [room for room, state in deferred.rooms.items() if state.owner is not None],
        )


def kept(scheduler: Any, server: str) -> Iterator[tuple[str, str]]:
    """Rows, metadata rows and places in queues that a server keeps."""
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
        sizes = [(each.host_pool.size, each.host_pool.available_size()) for each in pools.entries]
        if any(size != free for size, free in sizes):
            yield "KV on the host", ", ".join(f"{size - free} of {size}" for size, free in sizes)
    if server == PREFILL:
        queues = {
            "bootstrap queue": scheduler.disagg_prefill_bootstrap_queue.queue,
            "inflight queue": scheduler.disagg_prefill_inflight_queue,
            "chunks that are pending": scheduler.disagg_prefill_pending_chunk_rids,
        }
    else:
        waits = scheduler.disagg_decode_prealloc_queue
        transfers = scheduler.disagg_decode_transfer_queue
        queues = {
            "prealloc queue": waits.queue, "pending requests": waits.pending_reqs,
            "retracted requests": waits.retracted_queue, "transfer queue": transfers.queue,
            "deferred releases": transfers._deferred_releases,
        }  # fmt: skip
    for name, queue in queues.items():
        if len(queue):
            yield name, f"{len(queue)} entries"
