"""The storage behind host memory: a file system with threads that run on command.

TieringOffloadingManager and FileSystemTierManager are the release's own. The files, and the threads that
read, write and look them up, are stand-ins.
"""

from __future__ import annotations

import importlib
import io
import os
from collections.abc import Callable, Sequence
from typing import Any

from impl.loading.optional import first_attribute, optional
from impl.stand_ins import Values
from impl.vllm.engine import Stamps
from reference.blocks.config import EngineConfig
from reference.blocks.facts import HostFacts, StorageJob, StoredChunk

TIERING = "vllm.v1.kv_offload.tiering"
MANAGER = "vllm/v1/kv_offload/tiering/fs/manager.py"
REGION = "vllm.v1.kv_offload.cpu.shared_offload_region"
_CHUNK = 8  # size of a chunk in the memory view of the tiers, which only divide by it (bytes)
ALL = -1
OPTION = "--storage"  # option of the worker process: the release has these modules


class HostRegion:
    """A stand-in for `SharedOffloadRegion`: it has the right number of chunks, but no content."""

    BLOCK_SIZE_ALIGNMENT = 4096

    def __init__(self, num_chunks: int = 0, num_blocks: int = 0, **_: Any) -> None:
        self._chunks = num_chunks or num_blocks

    def create_kv_memoryview(self) -> memoryview:
        return memoryview(bytearray(self._chunks * _CHUNK)).cast("B", (self._chunks, _CHUNK))

    def cleanup(self) -> None:
        """Do nothing: there is no shared memory."""


class Threads:
    """A stand-in for `DualQueueThreadPool`: stores run in their order, and so do loads.

    waiting: queued jobs by direction (True: loads), each with its tasks.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        self.waiting: dict[bool, dict[Any, list[Callable[[], None]]]] = {False: {}, True: {}}
        self._finished: list[tuple[Any, bool, float]] = []
        FILES.threads = self

    def enqueue_store(self, job_id: Any, count: int, tasks: Sequence[Callable[[], None]]) -> None:
        del count
        self.waiting[False][job_id] = list(tasks)

    def enqueue_load(self, job_id: Any, count: int, tasks: Sequence[Callable[[], None]]) -> None:
        del count
        self.waiting[True][job_id] = list(tasks)

    def run(self, *, load: bool, chunks: int = ALL) -> bool:
        """Run the oldest job of a direction. Return False if there is none.

        chunks: the job fails after this number of chunks, ALL where it does not fail.
        """
        queue = self.waiting[load]
        if not queue:
            return False
        job = next(iter(queue))
        tasks = queue.pop(job)
        FILES.bound = chunks
        done = True
        try:
            for task in tasks:
                task()
        except OSError:
            done = False
        self._finished.append((job, done, 0.0))
        return True

    def get_finished(self) -> list[tuple[Any, bool, float]]:
        finished = self._finished
        self._finished = []
        return finished

    def wait_idle(self) -> None:
        while self.run(load=False) or self.run(load=True):
            pass

    def shutdown(self, wait: bool = True) -> None:
        """Do nothing: there are no threads."""


class Files:
    """The files of a storage.

    host: host memory, by chunk.
    files: path -> the blocks of its chunk, each with its group and its stamps.
    keys: path -> hash and group.
    bound: number of chunks that the running job reads or writes before it fails, ALL for no failure.
    lookups: number of files that the last command has looked up.
    """

    def __init__(self) -> None:
        self.host: dict[int, Any] = {}
        self.files: dict[str, tuple[Any, ...]] = {}
        self.keys: dict[str, bytes] = {}
        self.threads: Threads | None = None
        self.bound = ALL
        self.lookups = 0

    def reset(self, host: dict[int, Any]) -> None:
        """Remove all files.

        host: host memory, by chunk.
        """
        self.host = host
        self.files = {}
        self.lookups = 0

    def store(self, paths: Sequence[str], _: Any, offsets: Sequence[int], size: int, *__: Any) -> None:
        """Write chunks to files, in the place of `batch_store_block`. A file that exists is not written
        again."""
        for index, (path, offset) in enumerate(zip(paths, offsets)):
            if index == self.bound:
                raise OSError("no space left")
            if path not in self.files:
                self.files[path] = tuple(self.host.get(offset // size, ()))

    def load(self, paths: Sequence[str], _: Any, offsets: Sequence[int], size: int, *__: Any) -> None:
        """Read chunks from files, in the place of `batch_load_block`. A file that is too short is removed."""
        for index, (path, offset) in enumerate(zip(paths, offsets)):
            if index == self.bound:
                self.files.pop(path, None)
            if path not in self.files:
                error: Any = OSError("short read")
                error.num_succeeded = index
                raise error
            self.host[offset // size] = [*self.files[path]]

    def write(self, chunks: int) -> bool:
        """Run the oldest job that writes host memory to files. Return False if there is none.

        chunks: see Threads.run.
        """
        return self.threads is not None and self.threads.run(load=False, chunks=chunks)

    def read(self, chunks: int) -> bool:
        """Run the oldest job that reads files into host memory. Return False if there is none.

        chunks: see Threads.run.
        """
        return self.threads is not None and self.threads.run(load=True, chunks=chunks)

    def are_present(self, paths: Sequence[str]) -> list[bool]:
        """Return whether each file exists."""
        self.lookups += len(paths)
        return [path in self.files for path in paths]


FILES = Files()


class _NoThread:
    """A thread that never starts: `answer_lookups` does its work."""

    def __init__(self, **_: Any) -> None: ...

    def start(self) -> None: ...

    def join(self) -> None: ...


def stand_ins_by_module() -> dict[str, dict[str, Any]]:
    """Return the stand-ins for names that the tiers import from modules that move bytes."""
    return {
        REGION: {"SharedOffloadRegion": HostRegion},
        f"{TIERING}.fs.io": {
            "batch_store_block": FILES.store,
            "batch_load_block": FILES.load,
            "probe_o_direct": lambda _: False,
        },
        f"{TIERING}.fs.thread_pool": {"DualQueueThreadPool": Threads},
    }


def expose() -> None:
    """Replace the threads in the modules that start them."""
    lookup = importlib.import_module(f"{TIERING}.async_lookup")
    lookup.threading = Values(Thread=_NoThread)  # type: ignore[attr-defined]
    manager = importlib.import_module(f"{TIERING}.fs.manager")
    manager._HAS_BATCH_LOOKUP_C = True  # type: ignore[attr-defined]
    manager.batch_lookup_C = FILES.are_present  # type: ignore[attr-defined]
    # The manager writes a description of the server beside its files. Nothing is written to the disk here.
    manager.os = Values(path=os.path, makedirs=lambda *_, **__: None)  # type: ignore[attr-defined]
    manager.open = lambda *_: io.StringIO()  # type: ignore[attr-defined]


def answer_lookups(manager: Any) -> None:
    """Look up the files that the last step has asked for."""
    FILES.lookups = 0
    for tier in manager.secondary_tiers:
        tier._lookup_manager._lookup_queue.put(None)
        tier._lookup_manager._worker()


def primary_of(manager: Any) -> Any:
    """Return the manager of host memory: the primary tier of a tiered manager, or the manager itself."""
    return optional(manager, "TieringOffloadingManager.primary_tier", manager)


def with_storage(
    facts: HostFacts, manager: Any, config: EngineConfig, stamps: Stamps
) -> HostFacts:
    """Return the facts of host memory, extended by those of the storage behind it."""
    assert FILES.threads is not None
    waiting = {job for queue in FILES.threads.waiting.values() for job in queue}
    jobs = []
    for number, transfer_job in manager._transfer_jobs.items():
        job = transfer_job.transfer_job
        chunks = tuple(map(int, first_attribute(job, "TransferJob.chunk_ids", "TransferJob.block_ids")))
        jobs.append(StorageJob(number, job.is_promotion, chunks, number not in waiting))
        for tier in manager.secondary_tiers:
            FILES.keys |= {tier.file_mapper.get_file_name(key): key for key in job.keys}
    stored = (_stored_chunk(path, memory, config, stamps) for path, memory in FILES.files.items())
    return facts._replace(jobs=tuple(jobs), stored=tuple(stored), lookups=FILES.lookups)


def _stored_chunk(path: str, memory: Any, config: EngineConfig, stamps: Stamps) -> StoredChunk:
    key = FILES.keys[path]
    group = int.from_bytes(key[-4:], "big")
    tokens = config.groups[group].block_size * config.chunk_blocks
    stamps_in_file = {stamp for _, slots in memory for stamp in slots}
    return StoredChunk(group, stamps.of_block(key[:-4][:16], tokens, stamps_in_file), tuple(memory))
