"""The Mooncake Store of a server: the scheduler's side of its connector is the release's own.

The store and the worker that moves KV are stand-ins: commands decide when a transfer reads, writes and
completes (`Copy`, `Complete`, `Fail`). A lookup is answered after the command that asks it, from what the
store has then. The store keeps what it has until it is full, and then puts the newest in the place of the
oldest.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any

from impl.self_scheduling.request_sources import RequestSources
from reference.blocks.config import EngineConfig
from reference.blocks.facts import HostFacts, Part, StoredChunk, Transfer

CONNECTOR = "MooncakeStoreConnector"
WAY = "store"
# Modules of the release that are loaded for it, below lmdeploy.pytorch.
CALLED = tuple(
    f"kv_connector.{name}"
    for name in ("base", "mooncake.store.connector", "mooncake.store.scheduler")
)
REAL = ("kv_connector",)
# Those of them that move bytes.
INERT = tuple(
    f"kv_connector.{name}"
    for name in (
        "factory", "mooncake.store.lookup", "mooncake.store.worker", "mooncake.store.worker_threads",
    )
)  # fmt: skip


class Lookups:
    """A stand-in for `LookupKeyClient`, which asks the store for a prefix.

    asked: number of a request -> the hashes that it has asked for.
    answers: number of a request -> tokens that the store has of them.
    """

    def __init__(self, cache: Any) -> None:
        self._block_size = cache.block_size
        self.asked: dict[int, tuple[bytes, ...]] = {}
        self.answers: dict[int, int] = {}

    def lookup(
        self, req_id: int, token_len: int, block_hashes: Sequence[bytes], non_block: bool
    ) -> int | None:
        """Return the number of tokens that the store has; None until it has answered."""
        del token_len, non_block  # the hashes are of so many tokens
        if req_id in self.answers:
            return self.answers.pop(req_id)
        self.asked[req_id] = tuple(block_hashes)
        return None

    def is_pending(self, req_id: int) -> bool:
        return req_id in self.asked

    def discard(self, req_id: int) -> None:
        self.asked.pop(req_id, None)
        self.answers.pop(req_id, None)

    def answer(self, known: Container[bytes]) -> int:
        """Answer all lookups, and return their number.

        known: the hashes that the store has.
        """
        for request, hashes in self.asked.items():
            there = next((at for at, key in enumerate(hashes) if key not in known), len(hashes))
            self.answers[request] = there * self._block_size
        answered = len(self.asked)
        self.asked = {}
        return answered


@dataclass
class StoreTransfer:
    """A transfer of the worker.

    serial: position among all transfers, from 1.
    number: the release's number of a save, or of the request that a load is for.
    blocks, hashes: one for each part.
    stamps: the text under each hash, of a save.
    chunks: the chunk in which each part is on its way.
    copied: its KV has moved.
    completed: it has ended.
    reported: the worker has told its end.
    lost: indices of the parts that a load does not bring.
    """

    serial: int
    number: int
    load: bool
    blocks: tuple[int, ...]
    hashes: tuple[bytes, ...]
    stamps: tuple[tuple[int, ...], ...] = ()
    chunks: tuple[int, ...] = ()
    copied: bool = False
    completed: bool = False
    reported: bool = False
    lost: set[int] = field(default_factory=set)


class MooncakeStore:
    """The store, and the worker that moves KV between it and the blocks.

    memory: block -> its group and the stamps of its slots, as the driver has them.
    entries: hash -> the KV that the store has under it.
    """

    def __init__(self, config: EngineConfig, memory: dict[int, tuple[int, list[int]]]) -> None:
        self._config = config
        self._memory = memory
        self._size = config.groups[0].block_size
        self.entries: dict[bytes, StoredChunk] = {}
        self.jobs: list[StoreTransfer] = []
        self._chunks = 0  # most chunks that were on their way at a time
        self._submitted = 0

    def submit(self, metadata: Any, sources: RequestSources, requests: dict[int, Any]) -> None:
        """Take the transfers that the scheduler asks of the worker.

        requests: the number of a sequence -> the sequence.
        """
        for load in metadata.load_requests:
            job = self._add_transfer(load.request_id, True, load.block_ids, load.block_hashes)
            job.lost = {at for at, key in enumerate(job.hashes) if key not in self.entries}
        for save in metadata.save_requests:
            sequence = requests[save.request_id]
            end = (save.start_block + len(save.block_ids)) * self._size
            text = sources.stamps_of(sequence.all_ids[:end].tolist(), sequence.session_id)
            starts = range(save.start_block * self._size, end, self._size)
            new = [at for at, key in enumerate(save.block_hashes) if key not in self.entries]
            job = self._add_transfer(
                save.save_id,
                False,
                [save.block_ids[at] for at in new],
                [save.block_hashes[at] for at in new],
            )
            job.stamps = tuple(tuple(text[starts[at] : starts[at] + self._size]) for at in new)
            job.copied = job.completed = not new

    def _add_transfer(
        self, number: int, load: bool, blocks: Sequence[int], hashes: Sequence[bytes]
    ) -> StoreTransfer:
        used = {chunk for other in self.jobs for chunk in other.chunks}
        free = (chunk for chunk in count() if chunk not in used)
        chunks = tuple(islice(free, len(blocks)))
        self._chunks = max([self._chunks, *(chunk + 1 for chunk in chunks)])
        self._submitted += 1
        job = StoreTransfer(self._submitted, number, load, tuple(blocks), tuple(hashes), chunks=chunks)
        self.jobs.append(job)
        return job

    def _oldest_incomplete(self, load: bool) -> StoreTransfer | None:
        return next((job for job in self.jobs if job.load is load and not job.completed), None)

    def copy(self, load: bool) -> bool:
        """Move the KV of the oldest transfer that has not moved it. Return False if there is none."""
        moving = (job for job in self.jobs if job.load is load and not job.copied)
        if (job := next(moving, None)) is None:
            return False
        self._move_kv(job)
        return True

    def fail(self, blocks: int) -> bool:
        """Have the oldest load fail behind its first `blocks` blocks. Return False if none can."""
        moving = (job for job in self.jobs if job.load and not job.copied)
        if (job := next(moving, None)) is None:
            return False
        job.lost |= {*range(blocks, len(job.blocks))}
        self._move_kv(job)
        job.completed = True
        return True

    def complete(self, load: bool) -> bool:
        """Complete the oldest transfer of a direction. Return False if there is none."""
        if (job := self._oldest_incomplete(load)) is None:
            return False
        if not job.copied:
            self._move_kv(job)
        job.completed = True
        return True

    def _move_kv(self, job: StoreTransfer) -> None:
        job.copied = True
        for at, (block, key) in enumerate(zip(job.blocks, job.hashes)):
            if not job.load:
                self._store_chunk(key, StoredChunk(0, job.stamps[at], (self._held_slots(block),)))
            elif at not in job.lost:
                _, slots = self.entries[key].memory[0]
                self._memory[block] = 0, list(slots)

    def _held_slots(self, block: int) -> tuple[int, tuple[int, ...]]:
        group, slots = self._memory.get(block, (-1, []))
        return group, tuple(slots)

    def _store_chunk(self, key: bytes, entry: StoredChunk) -> None:
        if key in self.entries:  # of two saves the first counts
            return
        read = {key for job in self.jobs if job.load and not job.copied for key in job.hashes}
        idle = (each for each in self.entries if each not in read)
        if len(self.entries) >= self._config.host_chunks:
            if (oldest := next(idle, None)) is None:
                return
            del self.entries[oldest]
        self.entries[key] = entry

    def take_finished(self, output: type[Any]) -> Any:
        """Return what the worker reports with the results of a step (`get_finished`)."""
        done = [job for job in self.jobs if job.completed and not job.reported]
        for job in done:
            job.reported = True
        return output(
            completed_save_ids={job.number for job in done if not job.load} or None,
            finished_receiving={job.number for job in done if job.load} or None,
            invalid_block_ids={job.blocks[at] for job in done for at in job.lost},
        )

    def forget_reported(self, output: Any) -> None:
        """Forget the transfers whose end the scheduler has seen.

        output: the report of `take_finished`.
        """
        if output is None:
            return
        seen = {(False, save) for save in output.completed_save_ids or ()}
        seen |= {(True, load) for load in output.finished_receiving or ()}
        self.jobs = [
            job for job in self.jobs if not (job.reported and (job.load, job.number) in seen)
        ]

    def facts(self, lookups: int) -> HostFacts:
        """Return the facts of the store and of transfers.

        lookups: number of lookups of the last command that were answered after it.
        """
        memory: list[tuple[int, tuple[int, ...]]] = [(-1, ())] * self._chunks
        for job in self.jobs:
            for key, chunk in zip(job.hashes, job.chunks):
                if key in self.entries:
                    memory[chunk] = self.entries[key].memory[0]
        used = {chunk for job in self.jobs for chunk in job.chunks}
        return HostFacts(
            chunks=self._chunks,
            free=tuple(chunk for chunk in range(self._chunks) if chunk not in used),
            memory=tuple((held,) for held in memory),
            keys=(),
            transfers=tuple(self._transfer_facts()),
            stored=tuple(self.entries.values()),
            lookups=lookups,
        )

    def _transfer_facts(self) -> Iterator[Transfer]:
        for job in self.jobs:
            parts: tuple[Part, ...] = tuple(
                (0, block, chunk, 0) for block, chunk in zip(job.blocks, job.chunks)
            )
            yield Transfer(job.serial, job.load, parts, True, job.copied, job.completed)
