"""vLLM's SimpleCPUOffloadConnector: host memory is a second pool of blocks.

Its scheduler side, and its worker side up to the queue of its copying thread, are the release's own. The
thread and the streams are stand-ins: commands (`Copy`, `Complete`) decide when a copy is made and completes.
A chunk of host memory is a block of that pool; the block after its null block is chunk 0.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from itertools import count
from typing import Any, NamedTuple

from impl.loading.optional import optional
from impl.stand_ins import Values
from impl.vllm.bare_connectors import CONNECTORS, DeviceJob, Offloads, Transfers
from impl.vllm.engine import Stamps
from reference.blocks.config import EngineConfig
from reference.blocks.facts import HostFacts, HostKey, Part, Transfer

CONNECTOR = "vllm/distributed/kv_transfer/kv_connector/v1/simple_cpu_offload_connector.py"
_PACKAGE = "vllm.v1.simple_kv_offload"
REAL = (_PACKAGE, f"{CONNECTORS}.v1.simple_cpu_offload_connector")
# Modules that move bytes.
INERT = tuple(f"{_PACKAGE}.{name}" for name in ("copy_backend", "cuda_mem_ops", "disk_backend"))
FILES = (CONNECTOR, "vllm/v1/simple_kv_offload/")
NULL_BLOCKS = 1  # blocks of host memory that are no chunks


class CopyEvent:
    """A stand-in for the `torch.Event` after a copy on its stream. done: the copy has completed."""

    def __init__(self, device: CopyingThread, load: bool) -> None:
        self._device = device
        self._load = load
        self.done = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        while not self.done:
            self._device.complete(load=self._load)


class PoolCopy(DeviceJob):
    """A copy in the queue of the thread.

    events: the worker's list, to which the thread adds its event.
    """

    def __init__(
        self, number: int, load: bool, parts: tuple[Part, ...], event: CopyEvent, events: list[Any]
    ) -> None:
        super().__init__(number, load, parts)
        self.event = event
        self.events = events


class CopyingThread(Transfers):
    """A stand-in for the thread of a `DmaCopyBackend` and its two streams. The worker sees the event of a
    copy once the copy is made."""

    def __init__(self, scheduler: Any, blocks: dict[int, Any], config: EngineConfig) -> None:
        super().__init__(blocks, config, 0)
        self._manager = scheduler.connector.scheduler_manager

    def launch_copy(
        self, src_blocks: list[int], dst_blocks: list[int], is_store: bool, event_idx: int,
        events_list: list[Any], wait_event: Any = None,
    ) -> None:  # fmt: skip
        """Queue a copy.

        wait_event: the event of a batch, which has run, because a batch runs when it is scheduled.
        """
        del wait_event
        if is_store:
            blocks = src_blocks
            chunks = dst_blocks
        else:
            blocks = dst_blocks
            chunks = src_blocks
        parts = parts_of(self._manager, blocks, chunks, self.blocks)
        event = CopyEvent(self, not is_store)
        self.submit(PoolCopy(event_idx, not is_store, parts, event, events_list))

    def submit(self, job: DeviceJob) -> bool:
        self.queues[job.load].append(job)
        return True

    def copy(self, *, load: bool) -> bool:
        job: Any = next((job for job in self.queues[load] if not job.copied), None)
        if job is None:
            return False
        super().copy(load=load)
        job.events.append((job.job, job.event))
        return True

    def complete(self, *, load: bool) -> bool:
        job: Any = next(iter(self.queues[load]), None)
        if job is None:
            return False
        super().complete(load=load)
        self.completed.clear()  # the worker asks the event
        job.event.done = True
        return True


class PoolOffloads(Offloads):
    """The worker's side of the release's own SimpleCPUOffloadConnector, with the stand-in thread below it.

    numbers: key of a transfer -> its number.
    """

    transfers: CopyingThread

    def __init__(self, scheduler: Any, transfers: CopyingThread) -> None:
        super().__init__(scheduler, transfers)
        self.numbers: dict[Any, int] = {}
        self._unused = count()

    def number(self, key: Any) -> int:
        """Return the number of a transfer: a new one for a new key."""
        return self.numbers[key] if key in self.numbers else next(self._unused)

    def attach(self) -> None:
        self.worker.worker_handler._backend = self.transfers


class Moving(NamedTuple):
    """A transfer that the connector's scheduler side has started.

    request: the request that is loaded, "" for a store.
    event: the number of its event, -1 before it has one.
    counts: host memory has its chunks under a hash, or will have them when it completes.
    """

    load: bool
    request: str
    event: int
    blocks: list[int]
    chunks: list[int]
    counts: bool = True

    @property
    def key(self) -> Any:
        if self.event >= 0:
            return self.load, self.event, self.request
        return self.load, self.event, self.request, *self.blocks


def expose() -> None:
    """Replace the streams of a device in the module of the worker's side."""
    worker = importlib.import_module(f"{_PACKAGE}.worker")
    event = Values(record=lambda _: None)
    worker.torch = Values(  # type: ignore[attr-defined]
        Event=lambda: event, cuda=Values(current_stream=lambda: None)
    )


def resets_host(connector: Any) -> bool:
    """Return whether a connector can reset host memory. Up to 0.23 that of a pool raises
    NotImplementedError."""
    manager = optional(connector, "SimpleCPUOffloadConnector.scheduler_manager", None)
    return manager is None or optional(manager, "SimpleCPUOffloadScheduler.reset") is not None


def parts_of(
    manager: Any, blocks: list[int], chunks: list[int], memory: dict[int, Any]
) -> tuple[Part, ...]:
    """Return the parts of a transfer.

    memory: the device's; it determines the group of a block if neither side has a hash.
    """
    utils = importlib.import_module("vllm.v1.core.kv_cache_utils")
    parts = []
    for block, chunk in zip(blocks, chunks, strict=True):
        key = hash_of(manager, block, chunk)
        group = memory.get(block, (0, ()))[0] if key is None else int(utils.get_group_id(key))
        parts.append((max(group, 0), block, chunk - NULL_BLOCKS, 0))
    return tuple(parts)


def hash_of(manager: Any, block: int, chunk: int) -> bytes | None:
    """Return the hash of a block or of its chunk in a transfer, None without one. Up to 0.29 a chunk has
    its hash from the start of a store."""
    pools = manager.cpu_block_pool.blocks[chunk], manager._gpu_block_pool.blocks[block]
    return next((pool.block_hash for pool in pools if pool.block_hash is not None), None)


def transfers_of(manager: Any) -> Iterator[Moving]:
    """Yield the transfers that the scheduler side has started and has not seen completed."""
    name = "SimpleCPUOffloadScheduler"
    abandoned = optional(manager, f"{name}._abandoned_reqs_to_load", {})
    for loads in (manager._reqs_to_load, abandoned):
        for request, load in loads.items():
            event = -1 if load.load_event is None else load.load_event
            meta = load.transfer_meta
            yield Moving(
                load=True,
                request=request,
                event=event,
                blocks=meta.gpu_block_ids,
                chunks=meta.cpu_block_ids,
            )
    for event, meta in manager._store_event_to_blocks.items():
        yield Moving(
            load=False,
            request="",
            event=event,
            blocks=meta.gpu_block_ids,
            chunks=meta.cpu_block_ids,
        )
    for meta in optional(manager, f"{name}._pending_finished_stores", ()):
        yield Moving(load=False, request="", event=-1, blocks=meta.gpu_block_ids, chunks=meta.cpu_block_ids)
    for event, meta in optional(manager, f"{name}._abandoned_store_event_to_blocks", {}).items():
        yield Moving(
            load=False,
            request="",
            event=event,
            blocks=meta.gpu_block_ids,
            chunks=meta.cpu_block_ids,
            counts=False,
        )


def pool_facts(
    worker_side: PoolOffloads, scheduler: Any, config: EngineConfig, stamps: Stamps, at_rest: bool
) -> HostFacts:
    """Return the facts of host memory.

    at_rest: the scheduler has received all results of the worker.
    """
    manager = scheduler.connector.scheduler_manager
    pool = manager.cpu_block_pool
    moving = tuple(_transfers(worker_side, manager))
    keys = sorted(_keys(worker_side, manager, config, stamps))
    pinned_chunks = {key.chunk for key in keys if key.pins >= 0}
    free = pool.free_block_queue.get_all_free_blocks()
    unowned = [
        number for block in free
        if (number := block.block_id - NULL_BLOCKS) not in pinned_chunks or block.ref_cnt
    ]  # fmt: skip
    chunks = len(pool.blocks) - NULL_BLOCKS
    memory = tuple(tuple(worker_side.transfers.host.get(chunk, [(-1, ())])) for chunk in range(chunks))
    records = [*_records(worker_side, manager, scheduler, at_rest)]
    unused = {block.block_id for block in pool.blocks[NULL_BLOCKS:] if not block.ref_cnt}
    lost = sorted(unused - {block.block_id for block in free})
    records += [f"chunk {number - NULL_BLOCKS}, which no eviction takes" for number in lost]
    return HostFacts(chunks, tuple(unowned), memory, tuple(keys), moving, tuple(records))


def _keys(
    worker_side: PoolOffloads, manager: Any, config: EngineConfig, stamps: Stamps
) -> Iterator[HostKey]:
    """Yield the hashes under which host memory finds a block, and those of blocks that a store writes."""
    pool = manager.cpu_block_pool
    waiting = _waiting_pins(manager)
    for key, block in hashes_of(pool):
        pins = block.ref_cnt - waiting.count(block.block_id)
        yield _key(key, block.block_id, pins, worker_side, config, stamps)
    for transfer in transfers_of(manager):
        if transfer.load or not transfer.counts:
            continue
        for block, chunk in zip(transfer.blocks, transfer.chunks):
            if (of_store := hash_of(manager, block, chunk)) is not None:
                yield _key(of_store, chunk, -1, worker_side, config, stamps)


def _key(
    key: bytes, number: int, pins: int, worker_side: PoolOffloads, config: EngineConfig, stamps: Stamps
) -> HostKey:
    utils = importlib.import_module("vllm.v1.core.kv_cache_utils")
    group = int(utils.get_group_id(key))
    chunk = number - NULL_BLOCKS
    stamps_in_chunk = {stamp for _, slots in worker_side.transfers.host.get(chunk, ()) for stamp in slots}
    size = config.groups[group].block_size
    return HostKey(chunk, group, stamps.of_block(utils.get_block_hash(key), size, stamps_in_chunk), pins)


def hashes_of(pool: Any) -> Iterator[tuple[bytes, Any]]:
    """Yield the hashes under which a pool finds its blocks."""
    for key, blocks in pool.cached_block_hash_to_block._cache.items():
        found = blocks.values() if isinstance(blocks, dict) else (blocks,)
        for block in found:
            yield key, block


def _waiting_pins(manager: Any) -> list[int]:
    """Return the blocks of host memory that hits of waiting requests pin, once for each pin."""
    hits = optional(manager, "SimpleCPUOffloadScheduler._pending_cpu_hits", {})
    return [
        block.block_id
        for blocks, *_ in hits.values()
        for group in blocks
        for block in group
        if not block.is_null
    ]


def _transfers(worker_side: PoolOffloads, manager: Any) -> Iterator[Transfer]:
    """Yield the transfers of the scheduler side, one for each request of a load, and all other copies of
    the thread."""
    queued: dict[Any, Any] = {
        (job.load, job.job): job for queue in worker_side.transfers.queues.values() for job in queue
    }
    numbers: dict[Any, int] = {}
    started = set()
    for transfer in transfers_of(manager):
        number = numbers[transfer.key] = worker_side.number(transfer.key)
        started.add((transfer.load, transfer.event))
        job = queued.get((transfer.load, transfer.event))
        sent = transfer.event >= 0
        parts = parts_of(manager, transfer.blocks, transfer.chunks, worker_side.transfers.blocks)
        copied = sent and (job is None or job.copied)
        yield Transfer(
            number, transfer.load, parts, sent, copied, sent and job is None, stale=not transfer.counts
        )
    for key, job in queued.items():
        if key not in started:
            number = numbers[key] = worker_side.number(key)
            yield Transfer(number, job.load, job.parts, submitted=True, copied=job.copied, stale=True)
    worker_side.numbers = numbers


def _records(worker_side: PoolOffloads, manager: Any, scheduler: Any, at_rest: bool) -> Iterator[str]:
    """Yield the records that the connector keeps of requests and transfers that are gone."""
    known = {*scheduler.requests, *scheduler.finished_req_ids}
    moving = [*transfers_of(manager)]
    hits = optional(manager, "SimpleCPUOffloadScheduler._pending_cpu_hits", {})
    yield from (f"a hit of request {_base_name(name)}" for name in hits if name not in known)
    for name, state in manager._reqs_to_store.items():
        if name not in known and not state.store_events:
            yield f"request {_base_name(name)}"
    events = {transfer.event for transfer in moving if not transfer.load}
    yield from (f"store {event}" for event in manager._store_event_to_reqs if event not in events)
    loading = {transfer.request for transfer in moving if transfer.load}
    for event, names in manager._load_event_to_reqs.items():
        yield from (f"load {event} of {_base_name(name)}" for name in names if name not in loading)
    stored = {block for transfer in moving if not transfer.load for block in transfer.blocks}
    marked = optional(manager, "SimpleCPUOffloadScheduler._in_flight_store_gpu_blocks", set())
    yield from (f"block {block}, which no store reads" for block in sorted(marked - stored))
    worker = worker_side.worker.worker_handler
    if not at_rest:
        return
    for transfer in moving:
        pending = worker._pending_store_event_indices
        if transfer.load:
            pending = worker._pending_load_event_indices
        is_reported = not transfer.load and transfer.event in worker._completed_store_events
        if transfer.event >= 0 and transfer.event not in pending and not is_reported:
            kind = "load" if transfer.load else "store"
            yield f"{kind} {transfer.event}, which has ended"


def _base_name(name: str) -> str:
    return name.partition("-")[0]
