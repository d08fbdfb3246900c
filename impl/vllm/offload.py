"""The modules of a connector, and the facts of host memory and of transfers.

Both sides of the OffloadingConnector and its CPU manager are the release's own. The device that moves KV is a
stand-in: commands (`Copy`, `Complete`, `Fail`) decide when a job reads, writes and completes.
"""

from __future__ import annotations

import copy
import importlib
import re
import sys
from collections.abc import Iterator, Mapping, MutableMapping, MutableSequence, MutableSet
from pathlib import Path
from typing import Any

from impl.loading.optional import first_attribute, optional
from impl.vllm.bare_connectors import (
    CONNECTORS, Loads, Offloads, Transfers, chunks_of, connector_class, create_connector,
)  # fmt: skip
from impl.vllm import simple_offload, storage
from impl.vllm.engine import Stamps
from reference.blocks.config import EngineConfig
from reference.blocks.facts import HostFacts, HostKey, Transfer

_V1 = f"{CONNECTORS}.v1"
OFFLOADING = "OffloadingConnector"
REAL = (
    f"{_V1}.base",
    f"{_V1}.metrics",
    f"{_V1}.offloading",
    f"{_V1}.offloading_connector",
    f"{CONNECTORS}.utils",
    "vllm.v1.kv_offload",
    *simple_offload.REAL,
)
# Modules that move bytes.
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
    """A stand-in for `KVConnectorFactory`, which finds a connector by its name."""

    create_connector = staticmethod(create_connector)

    @staticmethod
    def get_connector_class(config: Any) -> Any:
        return connector_class(config.kv_connector)


def stand_ins_by_module() -> dict[str, dict[str, Any]]:
    """Return the stand-ins for names that the connector imports from modules that are not loaded, by
    module."""
    return {
        f"{CONNECTORS}.factory": {"KVConnectorFactory": _Factory},
        **storage.stand_ins_by_module(),
    }


def expose(root: Path | None = None) -> None:
    """Set the names that the scheduler imports from `kv_connector.v1`, because the package's own code imports
    every connector.

    root: the folder of a release; its storage and its simple connector are prepared too, if it has them.
    """
    package = importlib.import_module(_V1)
    base = importlib.import_module(f"{_V1}.base")
    for name in ("KVConnectorBase_V1", "KVConnectorRole", "SupportsHMA", "supports_hma"):
        setattr(package, name, getattr(base, name))
    if root is not None and (root / storage.MANAGER).is_file():
        storage.expose()
    if root is not None and (root / simple_offload.CONNECTOR).is_file():
        simple_offload.expose()


CONNECTOR = "vllm/distributed/kv_transfer/kv_connector/v1/offloading_connector.py"


def children(connector: Any) -> list[Any]:
    """Return the connectors below a MultiConnector, or a connector of another kind itself."""
    return list(optional(connector, "MultiConnector._connectors", (connector,)))


def offloading_scheduler(scheduler: Any) -> Any:
    """Return the scheduler's side of a scheduler's OffloadingConnector, which it has alone or among
    others."""
    connectors = children(scheduler.connector)
    if len(connectors) > 1:
        connectors = [connector for connector in connectors if type(connector).__name__ == OFFLOADING]
    return connectors[0].connector_scheduler


def loads_wait_for_steps(root: Path) -> bool:
    """Return whether the worker's loads wait for the compute stream, as its stores do (since 0.28)."""
    worker = root / "vllm/v1/kv_offload/cpu/gpu_worker.py"
    text = worker.read_text(encoding="utf-8") if worker.is_file() else ""
    return re.search(r"if self\.gpu_to_cpu:\s+(#.*\s+)*stream\.wait_stream", text) is None and (
        "stream.wait_stream" in text
    )


def host_facts(
    worker_side: Offloads | Loads, scheduler: Any, config: EngineConfig, stamps: Stamps,
    loads_wait: bool = False
) -> HostFacts:
    """Return the facts of host memory and of transfers. Host memory of a peer is not checked.

    loads_wait: loads from the host wait for the compute stream.
    """
    transfers = worker_side.transfers
    if isinstance(worker_side, Loads):
        held = tuple(tuple(chunk) for _, chunk in sorted(transfers.host.items()))
        jobs = tuple(_submitted_jobs(transfers, transfers.completed))
        live = [
            request.request_id
            for request in scheduler.requests.values()
            if not request.is_finished()
        ]
        failed = tuple(name.partition("-")[0] for name in live if name in worker_side.failed)
        marks = tuple(_marks(scheduler))
        return HostFacts(
            chunks=0,
            free=(),
            memory=held,
            keys=(),
            transfers=jobs,
            records=marks,
            failed=failed,
            lost=worker_side.blocks_lost,
        )
    connector = offloading_scheduler(scheduler)
    manager = storage.primary_of(connector.manager)
    moving = (
        *_unsubmitted_stores(worker_side, connector),
        *_submitted_jobs(transfers, connector._jobs, connector._jobs),
    )
    kept_chunks = chunks_of(manager)
    keys = tuple(sorted(_key(*chunk, config, stamps, transfers.host) for chunk in kept_chunks))
    allocated = first_attribute(
        manager,
        "CPUOffloadingManager._num_allocated_chunks",
        "CPUOffloadingManager._num_allocated_blocks",
    )
    nothing = [(-1, ())] * config.chunk_blocks
    named_chunks = [key.chunk for key in keys] + [part[2] for job in moving for part in job.parts]
    chunks = max([allocated, *(chunk + 1 for chunk in named_chunks)])
    memory = tuple(tuple(transfers.host.get(chunk, nothing)) for chunk in range(chunks))
    free = (*manager._free_list, *range(allocated, chunks))
    records = tuple(_records(scheduler, connector))
    facts = HostFacts(chunks, free, memory, keys, moving, records, loads_wait=loads_wait)
    if config.storage:
        return storage.with_storage(facts, connector.manager, config, stamps)
    return facts


def _key(
    key: bytes, chunk: int, pins: int, config: EngineConfig, stamps: Stamps, host: Mapping[int, Any]
) -> HostKey:
    group = int.from_bytes(key[-4:], "big")
    tokens = config.groups[group].block_size * config.chunk_blocks
    stamps_in_chunk = {stamp for _, slots in host.get(chunk, ()) for stamp in slots}
    return HostKey(chunk, group, stamps.of_block(key[:-4][:16], tokens, stamps_in_chunk), pins)


def _unsubmitted_stores(worker_side: Offloads, connector: Any) -> Iterator[Transfer]:
    """Yield the stores that the worker submits to the device with its next batch."""
    for job_id, *moves in worker_side.worker.connector_worker._unsubmitted_store_jobs:
        source, target = moves if len(moves) == 2 else moves[0]
        parts = worker_side.transfers.parts(source, target)
        yield Transfer(job_id, load=False, parts=parts, stale=job_id not in connector._jobs)


def _submitted_jobs(transfers: Transfers, waited: Any, current: Any = None) -> Iterator[Transfer]:
    """Yield the jobs on the device, and the completed ones in `waited` or not yet reported. Forget all
    others.

    current: jobs that are not from before a reset, None if all are current.
    """
    moving = {job.job for queue in transfers.queues.values() for job in queue}
    known = moving.union(waited, transfers.completed)
    transfers.jobs = {number: job for number, job in transfers.jobs.items() if number in known}
    for number, job in transfers.jobs.items():
        stale = current is not None and number not in current
        yield Transfer(
            number,
            job.load,
            job.parts,
            submitted=True,
            copied=job.copied,
            completed=number not in moving,
            stale=stale,
        )


def _marks(scheduler: Any) -> Iterator[str]:
    """Yield the finished requests that the scheduler still marks as loaded or as failed to load."""
    for mark in ("finished_recving", "failed_recving"):
        left_over = getattr(scheduler, f"{mark}_kv_req_ids") - scheduler.requests.keys()
        yield from (f"{mark} of request {name.partition('-')[0]}" for name in sorted(left_over))


def _records(scheduler: Any, connector: Any) -> Iterator[str]:
    """Yield the records that the connector keeps of requests that are gone and have nothing in flight."""
    yield from _marks(scheduler)
    busy = {status.req_id for status in connector._jobs.values()}
    known = {*scheduler.requests, *busy, *scheduler.finished_req_ids}
    yield from (
        f"request {name.partition('-')[0]}" for name in connector._req_status if name not in known
    )
    for block, pending in connector._block_id_to_pending_jobs.items():
        if not pending & connector._jobs.keys():
            yield f"block {block}"
    primary = storage.primary_of(connector.manager)
    yield from (f"chunk {chunk}, which no eviction takes" for chunk in stuck_chunks(primary))


def stuck_chunks(manager: Any) -> list[int]:
    """Return the chunks without reader or writer that the policy does not evict when it is asked for all."""
    idle = {chunk for _, chunk, pins in chunks_of(manager) if not pins}
    policy = copy.copy(manager._policy)  # evict() changes its lists, but no chunk
    for name, value in vars(policy).items():
        if isinstance(value, MutableMapping | MutableSequence | MutableSet):
            setattr(policy, name, copy.copy(value))
    profile = sys.getprofile()
    sys.setprofile(None)  # calls of the copy do not count as calls of the command
    try:
        while idle and (taken := policy.evict(1, set())):
            for _, chunk in taken:
                idle.discard(first_attribute(chunk, "ChunkStatus.chunk_id", "BlockStatus.block_id"))
    finally:
        sys.setprofile(profile)
    return sorted(idle)
