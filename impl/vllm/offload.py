"""vLLM's OffloadingConnector, scheduler side and worker side, with its CPU manager: the release's own.

Ours is the device that moves KV, `Transfers`: when a job reads, writes and completes is a command of the
trace (`Copy`, `Complete`). Jobs of one direction go in order, as streams do.
"""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from impl.vllm.bare_scheduler import taken
from impl.vllm.engine import Stamps
from impl.vllm.runner import ModelRunner, Ran
from reference.blocks.config import EngineConfig
from reference.blocks.facts import HostFacts, HostKey, Part, Transfer

CONNECTORS = "vllm.distributed.kv_transfer.kv_connector"
_V1 = f"{CONNECTORS}.v1"
REAL = (
    f"{_V1}.base", f"{_V1}.metrics", f"{_V1}.offloading", f"{_V1}.offloading_connector",
    f"{CONNECTORS}.utils", "vllm.v1.kv_offload",
)  # fmt: skip
# Secondary tiers, and what moves bytes: it is never asked for.
INERT = tuple(
    f"vllm.v1.kv_offload.{name}"
    for name in ("tiering", "cpu.gpu_worker", "cpu.shared_offload_region", "cpu.host_register")
)
FILES = tuple(
    f"vllm/{name}"
    for name in (
        "distributed/kv_transfer/kv_connector/utils.py", "distributed/kv_transfer/kv_connector/v1/base.py",
        "distributed/kv_transfer/kv_connector/v1/metrics.py",
        "distributed/kv_transfer/kv_connector/v1/offloading", "v1/kv_offload/",
    )
)  # fmt: skip


class _Factory:
    """`KVConnectorFactory`: there is one connector."""

    @staticmethod
    def create_connector(config: Any, role: Any, kv_cache_config: Any = None) -> Any:
        given = {"vllm_config": config, "role": role, "kv_cache_config": kv_cache_config}
        if config.kv_transfer_config.kv_connector == "Peer":
            from impl.vllm.peer import connector

            return connector()(**given)
        kind = _Factory.get_connector_class()
        return kind(**taken(kind.__init__, given))

    @staticmethod
    def get_connector_class(*_: Any) -> Any:
        return importlib.import_module(f"{_V1}.offloading_connector").OffloadingConnector


class _Region:
    """`SharedOffloadRegion`, of which a size is read: chunks are as large as that, whatever they hold."""

    BLOCK_SIZE_ALIGNMENT = 4096


def provided() -> dict[str, dict[str, Any]]:
    """What the connector takes from modules that are not loaded."""
    return {
        f"{CONNECTORS}.factory": {"KVConnectorFactory": _Factory},
        "vllm.v1.kv_offload.cpu.shared_offload_region": {"SharedOffloadRegion": _Region},
    }


def expose() -> None:
    """`kv_connector.v1` itself imports every connector; the scheduler takes these names from it."""
    package, base = importlib.import_module(_V1), importlib.import_module(f"{_V1}.base")
    for name in ("KVConnectorBase_V1", "KVConnectorRole", "SupportsHMA", "supports_hma"):
        setattr(package, name, getattr(base, name))


@dataclass
class DeviceJob:
    """A transfer that was submitted."""

    job: int
    load: bool
    parts: tuple[Part, ...]
    copied: bool = False


CONNECTOR = "vllm/distributed/kv_transfer/kv_connector/v1/offloading_connector.py"
Chunk = list[tuple[int, tuple[int, ...]]]  # of each of its blocks: the group that its KV is of, and stamps


class Transfers:
    """The device that moves KV (`OffloadingWorker`). memory: the runner's blocks; host: chunks."""

    def __init__(self, runner: ModelRunner, config: EngineConfig) -> None:
        self._blocks, self._config = runner.memory, config
        self.host: dict[int, Chunk] = {}
        self.queues: dict[bool, deque[DeviceJob]] = {False: deque(), True: deque()}
        self.completed: list[int] = []
        self.jobs: dict[int, DeviceJob] = {}  # that were submitted

    # -- what the connector calls -----------------------------------------------------------------

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self.submit(DeviceJob(job_id, False, self.parts(src_spec, dst_spec)))

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        del expedited  # it is waited for
        return self.submit(DeviceJob(job_id, True, self.parts(dst_spec, src_spec)))

    def transfer_async(self, job_id: int, spec: tuple[Any, Any]) -> bool:
        """As releases up to 0.27 submit a job."""
        source, target = spec
        submit = self.submit_store if hasattr(source, "group_sizes") else self.submit_load
        return submit(job_id, source, target)

    def wait(self, job_ids: set[int]) -> None:
        for load, queue in self.queues.items():
            while any(job.job in job_ids for job in queue):
                self.complete(load)

    def get_finished(self) -> list[Any]:
        names = ("vllm.v1.kv_offload.base", "vllm.v1.kv_offload.worker.worker")
        modules = map(importlib.import_module, names)
        kind = next(module.TransferResult for module in modules if hasattr(module, "TransferResult"))
        done, self.completed = self.completed, []
        return [kind(job_id=job, success=True) for job in done]

    def shutdown(self) -> None:
        """Holds nothing."""

    # -- what the environment decides -------------------------------------------------------------

    def submit(self, job: DeviceJob) -> bool:
        self.jobs[job.job] = job
        self.queues[job.load].append(job)
        return True

    def parts(self, blocks: Any, host: Any) -> tuple[Part, ...]:
        """What a job moves, as cpu/gpu_worker.py walks its two lists."""
        size, parts = self._config.chunk_blocks, []
        ids, chunks = iter(map(int, blocks.block_ids)), [int(chunk) for chunk in host.block_ids]
        at = 0
        for group, (count, first) in enumerate(zip(blocks.group_sizes, blocks.block_indices)):
            skipped = first % size if count else 0
            for index in range(skipped, skipped + count):
                parts.append((group, next(ids), chunks[at + index // size], index % size))
            at += -(-(skipped + count) // size)
        return tuple(parts)

    def copy(self, load: bool) -> bool:
        """Move the KV of the oldest job that has not; False where there is none."""
        job = next((job for job in self.queues[load] if not job.copied), None)
        if job is None:
            return False
        job.copied = True
        if not load:  # what a chunk had before is nobody's
            self.host.update((chunk, [(-1, ())] * self._config.chunk_blocks) for _, _, chunk, _ in job.parts)
        for group, block, chunk, index in job.parts:
            size = self._config.groups[group].block_size
            held = self.host.setdefault(chunk, [(-1, ())] * self._config.chunk_blocks)
            if load:
                owner, slots = held[index]
                self._blocks[block] = (owner, list(slots) or [0] * size)
            else:
                owner, values = self._blocks.get(block, (-1, []))
                held[index] = (owner, tuple(values)) if block else (-1, ())
        return True

    def complete(self, load: bool) -> bool:
        """Complete the oldest job; False where there is none."""
        queue = self.queues[load]
        if not queue:
            return False
        if not queue[0].copied:
            self.copy(load)
        self.completed.append(queue.popleft().job)
        return True


class Offloading:
    """Both sides of the connector of one scheduler."""

    def __init__(self, scheduler: Any, runner: ModelRunner, config: EngineConfig, stamps: Stamps) -> None:
        self._scheduler, self._config, self._stamps = scheduler, config, stamps
        self.transfers = Transfers(runner, config)
        kind = type(scheduler.connector)
        role = importlib.import_module(f"{_V1}.base").KVConnectorRole.WORKER
        given = {
            "vllm_config": scheduler.vllm_config, "role": role, "kv_cache_config": scheduler.kv_cache_config,
        }  # fmt: skip
        self._worker = kind(**taken(kind.__init__, given))
        self._worker.connector_worker.worker = self.transfers

    def around(self, scheduled: Any, forward: Callable[[], Ran]) -> tuple[Ran, Any]:
        """Run a batch as a worker does, with what its connector does before and after."""
        worker, meta = self._worker, scheduled.kv_connector_metadata
        worker.handle_preemptions(meta)
        worker.bind_connector_metadata(meta)
        in_step = bool(getattr(scheduled, "has_sync_kv_loads", False))
        if in_step:
            worker.start_load_kv(None)
        ran = forward()
        if not in_step:
            worker.start_load_kv(None)
        worker.wait_for_save()
        sending, recving = worker.get_finished(scheduled.finished_req_ids)
        output = importlib.import_module("vllm.v1.outputs").KVConnectorOutput()
        output.finished_sending, output.finished_recving = sending or None, recving or None
        output.kv_connector_worker_meta = worker.build_connector_worker_meta()
        worker.clear_connector_metadata()
        return ran, output

    # -- facts ------------------------------------------------------------------------------------

    def facts(self) -> HostFacts:
        """Host memory, and what moves."""
        ours = self._scheduler.connector.connector_scheduler
        manager, jobs = ours.manager, tuple(self._in_flight(ours))
        keys = tuple(sorted(self._key(key, chunk) for key, chunk in _chunks(manager._policy)))
        allocated = _either(manager, "_num_allocated_chunks", "_num_allocated_blocks")
        nothing: Chunk = [(-1, ())] * self._config.chunk_blocks
        chunks = max([allocated, *(part[2] + 1 for job in jobs for part in job.parts)])
        held = tuple(tuple(self.transfers.host.get(chunk, nothing)) for chunk in range(chunks))
        free = (*manager._free_list, *range(allocated, chunks))
        return HostFacts(chunks, free, held, keys, jobs, tuple(self._records(ours)))

    def _key(self, key: bytes, chunk: Any) -> HostKey:
        group, size = int.from_bytes(key[-4:], "big"), self._config.chunk_blocks
        tokens = self._config.groups[group].block_size * size
        number = _either(chunk, "chunk_id", "block_id")
        return HostKey(number, group, self._stamps.of_block(key[:-4][:16], tokens), chunk.ref_cnt)

    def _in_flight(self, ours: Any) -> Iterator[Transfer]:
        """Jobs that the scheduler waits for, and those from before a reset that the device has yet."""
        for job_id, *moves in self._worker.connector_worker._unsubmitted_store_jobs:
            source, target = moves if len(moves) == 2 else moves[0]
            parts, stale = self.transfers.parts(source, target), job_id not in ours._jobs
            yield Transfer(job_id, False, parts, stale=stale)
        moving = {job.job for queue in self.transfers.queues.values() for job in queue}
        known = moving.union(ours._jobs, self.transfers.completed)
        jobs = self.transfers.jobs
        jobs = self.transfers.jobs = {number: jobs[number] for number in jobs if number in known}
        for number, job in jobs.items():
            completed, stale = number not in moving, number not in ours._jobs
            yield Transfer(number, job.load, job.parts, True, job.copied, completed, stale)

    def _records(self, ours: Any) -> Iterator[str]:
        """What the connector keeps of requests that are gone and have nothing in flight."""
        busy = {status.req_id for status in ours._jobs.values()}
        ended = self._scheduler.finished_req_ids
        for name in ours._req_status:
            if name not in self._scheduler.requests and name not in busy and name not in ended:
                yield f"request {name.partition('-')[0]}"
        for block, pending in ours._block_id_to_pending_jobs.items():
            if not pending & ours._jobs.keys():
                yield f"block {block}"


def _either(of: Any, *names: str) -> Any:
    """The first attribute of these names that a release has."""
    return getattr(of, next(name for name in names if hasattr(of, name)))


def _chunks(policy: Any) -> Iterator[tuple[bytes, Any]]:
    """The hashes of a policy and their chunks, in whichever of its lists."""
    for kept in [value for value in vars(policy).values() if isinstance(value, dict)]:
        for key, chunk in kept.items():
            chunk = getattr(chunk, "chunk", chunk)
            if hasattr(chunk, "ref_cnt"):
                yield key, chunk
