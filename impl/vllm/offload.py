"""Loading of a connector, and the facts of host memory and of transfers.

vLLM's OffloadingConnector, scheduler side and worker side, and its CPU manager are the release's own. Ours is
the device that moves KV: when a job reads, writes and completes is a command (`Copy`, `Complete`, `Fail`).
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Iterator, Mapping, MutableMapping, MutableSequence, MutableSet
from pathlib import Path
from typing import Any

from impl.loading.optional import either
from impl.vllm.bare_connectors import (
    CONNECTORS, Loads, Offloads, Transfers, chunks_of, connector_class, create_connector,
)  # fmt: skip
from impl.vllm import simple_offload, storage
from impl.vllm.engine import Stamps
from reference.blocks.config import EngineConfig
from reference.blocks.facts import HostFacts, HostKey, Transfer

_V1 = f"{CONNECTORS}.v1"
REAL = (
    f"{_V1}.base",
    f"{_V1}.metrics",
    f"{_V1}.offloading",
    f"{_V1}.offloading_connector",
    f"{CONNECTORS}.utils",
    "vllm.v1.kv_offload",
    *simple_offload.REAL,
)
# What moves bytes.
INERT = tuple(
    f"vllm.v1.kv_offload.{name}"
    for name in (
        "tiering.fs.io", "tiering.fs.thread_pool", "cpu.gpu_worker", "cpu.shared_offload_region",
        "cpu.host_register",
    )
) + simple_offload.INERT
FILES = simple_offload.FILES + tuple(
    f"vllm/{name}"
    for name in (
        "distributed/kv_transfer/kv_connector/utils.py",
        "distributed/kv_transfer/kv_connector/v1/base.py",
        "distributed/kv_transfer/kv_connector/v1/metrics.py",
        "distributed/kv_transfer/kv_connector/v1/offloading",
        "v1/kv_offload/",
    )
)


class _Factory:
    """`KVConnectorFactory`, which looks a connector up by its name."""

    create_connector = staticmethod(create_connector)

    @staticmethod
    def get_connector_class(config: Any) -> Any:
        return connector_class(config.kv_connector)


def provided() -> dict[str, dict[str, Any]]:
    """Return what the connector takes from modules that are not loaded."""
    return {
        f"{CONNECTORS}.factory": {"KVConnectorFactory": _Factory},
        **storage.provided(),
    }


def expose(root: Path | None = None) -> None:
    """`kv_connector.v1` itself imports every connector; the scheduler takes these names from it. root: of a
    release whose storage is driven, if it has one."""
    package = importlib.import_module(_V1)
    base = importlib.import_module(f"{_V1}.base")
    for name in ("KVConnectorBase_V1", "KVConnectorRole", "SupportsHMA", "supports_hma"):
        setattr(package, name, getattr(base, name))
    if root is not None and (root / storage.MANAGER).is_file():
        storage.expose()
    if root is not None and (root / simple_offload.CONNECTOR).is_file():
        simple_offload.expose()


CONNECTOR = "vllm/distributed/kv_transfer/kv_connector/v1/offloading_connector.py"


def host_facts(
    of: Offloads | Loads, scheduler: Any, config: EngineConfig, stamps: Stamps
) -> HostFacts:
    """Host memory, and what moves. Of a peer the memory is not ours to judge."""
    transfers = of.transfers
    if isinstance(of, Loads):
        held = tuple(tuple(chunk) for _, chunk in sorted(transfers.host.items()))
        jobs = tuple(_submitted(transfers, transfers.completed))
        live = [
            request.request_id
            for request in scheduler.requests.values()
            if not request.is_finished()
        ]
        failed = tuple(name.partition("-")[0] for name in live if name in of.failed)
        marks = tuple(_marks(scheduler))
        return HostFacts(0, (), held, (), jobs, marks, failed, of.lost)
    ours = scheduler.connector.connector_scheduler
    manager = storage.primary_of(ours.manager)
    moving = (*_unsubmitted(of, ours), *_submitted(transfers, ours._jobs, ours._jobs))
    kept = chunks_of(manager)
    keys = tuple(sorted(_key(*each, config, stamps, transfers.host) for each in kept))
    allocated = either(
        manager,
        "CPUOffloadingManager._num_allocated_chunks",
        "CPUOffloadingManager._num_allocated_blocks",
    )
    nothing = [(-1, ())] * config.chunk_blocks
    named = [key.chunk for key in keys] + [part[2] for job in moving for part in job.parts]
    chunks = max([allocated, *(chunk + 1 for chunk in named)])
    memory = tuple(tuple(transfers.host.get(chunk, nothing)) for chunk in range(chunks))
    free = (*manager._free_list, *range(allocated, chunks))
    records = tuple(_records(scheduler, ours))
    seen = HostFacts(chunks, free, memory, keys, moving, records)
    return storage.with_storage(seen, ours.manager, config, stamps) if config.storage else seen


def _key(
    key: bytes, chunk: int, pins: int, config: EngineConfig, stamps: Stamps, host: Mapping[int, Any]
) -> HostKey:
    group = int.from_bytes(key[-4:], "big")
    tokens = config.groups[group].block_size * config.chunk_blocks
    found = {stamp for _, slots in host.get(chunk, ()) for stamp in slots}
    return HostKey(chunk, group, stamps.of_block(key[:-4][:16], tokens, found), pins)


def _unsubmitted(of: Offloads, ours: Any) -> Iterator[Transfer]:
    """Stores that the worker gives to the device with its next batch."""
    for job_id, *moves in of.worker.connector_worker._unsubmitted_store_jobs:
        source, target = moves if len(moves) == 2 else moves[0]
        yield Transfer(
            job_id, False, of.transfers.parts(source, target), stale=job_id not in ours._jobs
        )


def _submitted(transfers: Transfers, waited: Any, current: Any = None) -> Iterator[Transfer]:
    """Jobs that the device has, and those of `waited`, whose end somebody has yet to take. current: jobs that
    are not from before a reset."""
    moving = {job.job for queue in transfers.queues.values() for job in queue}
    known = moving.union(waited, transfers.completed)
    jobs = transfers.jobs
    jobs = transfers.jobs = {number: jobs[number] for number in jobs if number in known}
    for number, job in jobs.items():
        stale = current is not None and number not in current
        yield Transfer(number, job.load, job.parts, True, job.copied, number not in moving, stale)


def _marks(scheduler: Any) -> Iterator[str]:
    """Requests that are gone, and that the scheduler still takes for loaded, or for failed to load."""
    for mark in ("finished_recving", "failed_recving"):
        gone = getattr(scheduler, f"{mark}_kv_req_ids") - scheduler.requests.keys()
        yield from (f"{mark} of request {name.partition('-')[0]}" for name in sorted(gone))


def _records(scheduler: Any, ours: Any) -> Iterator[str]:
    """Yield what the connector keeps of requests that are gone and have nothing in flight."""
    yield from _marks(scheduler)
    busy = {status.req_id for status in ours._jobs.values()}
    known = {*scheduler.requests, *busy, *scheduler.finished_req_ids}
    yield from (
        f"request {name.partition('-')[0]}" for name in ours._req_status if name not in known
    )
    for block, pending in ours._block_id_to_pending_jobs.items():
        if not pending & ours._jobs.keys():
            yield f"block {block}"
    primary = storage.primary_of(ours.manager)
    yield from (f"chunk {chunk}, which no eviction takes" for chunk in stuck_chunks(primary))


def stuck_chunks(manager: Any) -> list[int]:
    """The chunks that nobody reads or writes and that the policy does not evict, though asked for all."""
    idle = {chunk for _, chunk, pins in chunks_of(manager) if not pins}
    policy = copy.copy(manager._policy)  # evict() removes chunks from its lists, and changes none
    for name, value in vars(policy).items():
        if isinstance(value, MutableMapping | MutableSequence | MutableSet):
            setattr(policy, name, copy.copy(value))
    noting = sys.getprofile()
    sys.setprofile(None)  # what a copy calls is no call of the command
    try:
        while idle and (taken := policy.evict(1, set())):
            for _, chunk in taken:
                idle.discard(either(chunk, "ChunkStatus.chunk_id", "BlockStatus.block_id"))
    finally:
        sys.setprofile(noting)
    return sorted(idle)
