"""The facts of a storage behind the host memory of a release's tree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from impl.loading.optional import optional
from impl.sglang.tiers.copy_engine import CopyEngine, slots_by_pool
from impl.sglang.tiers.numbering import Numbers
from impl.sglang.tiers.storage import BACKUP, FETCH, QUERY, Storage
from reference.tiers.facts import RECORD_ONLY, TierOperation


class StorageGatherer:
    """Looks at what a tree has a storage do.

    jobs: the run's numbers of transfers.
    pools: of the tree.
    """

    def __init__(
        self, cache: Any, storage: Storage, copies: CopyEngine, jobs: Numbers, pools: Sequence[str]
    ) -> None:
        self.cache = cache
        self.controller = cache.cache_controller
        self.storage = storage
        self.copies = copies
        self.jobs = jobs
        self.pools = pools
        # prefetches whose slots were seen: they hold nothing at first
        self.staged: set[int] = set()

    def operations(self) -> tuple[TierOperation, ...]:
        """Return the operations that are in a queue, at a thread, or recorded by the cache."""
        states: dict[int, tuple[Any, str]] = {}
        for operation, state in self._at_work():
            states.setdefault(id(operation), (operation, state))
        for prefetch in self.cache.ongoing_prefetch.values():
            states.setdefault(id(prefetch.operation), (prefetch.operation, RECORD_ONLY))
        operations = [self._operation(*operation) for operation in states.values()]
        known = {operation.id for operation, _ in states.values()}
        for number in self.cache.ongoing_backup.keys() - known:
            operations.append(
                TierOperation(
                    self.jobs.of(("backup", number)),
                    back=True,
                    name="",
                    state=RECORD_ONLY,
                    slots={},
                    moving={},
                )
            )
        return tuple(sorted(operations))

    def _at_work(self) -> Iterator[tuple[Any, str]]:
        controller = self.controller
        for name, waits, body, works in (
            ("prefetch_queue", "to ask", QUERY, "asks"),
            ("prefetch_buffer", "to read", FETCH, "reads"),
            ("backup_queue", "to write", BACKUP, "writes"),
        ):
            if (operation := self.storage.thread(body).operation) is not None:
                yield operation, works
            yield from (
                (operation, waits) for operation in getattr(controller, name).queue if operation
            )
        yield from ((operation, "answered") for operation in controller.prefetch_hit_queue.queue)
        yield from ((ack.operation, "done") for ack in controller.ack_prefetch_queue.queue)
        yield from ((operation, "done") for operation in controller.ack_backup_queue.queue)

    def _operation(self, operation: Any, state: str) -> TierOperation:
        """Return the fact of a backup or a prefetch, with the host slots that it has and those that its
        thread still moves.

        state: where it stands, in words.
        """
        handle = optional(operation, "PrefetchOperation.handle")
        host = operation.host_indices
        if handle is None:
            slots = slots_by_pool(host, operation.pool_transfers)
            done = self.storage.thread(BACKUP).done if state == "writes" else set()
            moving = {
                pool: tuple(slot for slot in own if (pool, slot) not in done)
                for pool, own in slots.items()
                if state != "done"
            }
            number = self.jobs.of(("backup", operation.id))
            return TierOperation(number, back=True, name="", state=state, slots=slots, moving=moving)
        prefetch = self.cache.ongoing_prefetch.get(handle)
        if prefetch is not None and prefetch.operation is operation:
            transfers = (transfer for each in prefetch.comp_xfers.values() for transfer in each)
            slots = slots_by_pool(prefetch.host_indices, transfers)
        elif host is None:
            slots = {}
        else:  # what it has not read is freed when it is over
            left = () if operation.pool_transfers_done else operation.pool_transfers
            slots = slots_by_pool(host[operation.completed_tokens :], left)
        call = self.storage.thread(FETCH).call if state == "reads" else None
        moving = {pool: tuple(own) for pool, own in (call or {}).items()}
        number = self.jobs.of(id(operation), operation)
        if host is not None and number not in self.staged:
            self.staged.add(number)
            for pool, pool_slots in slots.items():
                for slot in pool_slots:
                    self.copies.host[pool][slot] = 0
        return TierOperation(number, back=False, name=handle.rid, state=state, slots=slots, moving=moving)

    def storage_facts(self) -> dict[str, Any]:
        """Return the facts of what is stored, given back, asked for and reserved."""
        cache = self.cache
        controller = self.controller
        queues = (
            controller.host_mem_release_queue,
            *controller.extra_host_mem_release_queues.values(),
        )
        returned = {
            pool: tuple(slot for slots in each.queue for slot in slots.tolist())
            for pool, each in zip(self.pools, queues, strict=True)
        }
        asking_requests = {*cache.ongoing_prefetch, *cache.prefetch_loaded_tokens_by_reqid}
        asking_requests |= {*optional(cache, "UnifiedRadixCache._storage_prefetch_wait", ())}
        return {
            "stored": tuple(self.storage.written),
            "returned": returned,
            "asked": tuple(sorted(request.rid for request in asking_requests)),
            "reserved": int(controller.prefetch_tokens_occupied),
        }
