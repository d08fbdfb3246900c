"""Statements about the storage behind host memory, for the rows of clause_rows.txt.

"storage write 0 of 1 2": the engine has started a job that writes these chunks, and pins them. "storage read
0 of 1": it has started one that reads into them. "a file keeps 0-2 of r1": these positions are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from reference.blocks.facts import BlockFacts, HostFacts, StorageJob, StoredChunk

FOREIGN_STAMP = 7  # of no text of a row


class StorageScene(Protocol):
    """The part of an engine by hand that statements change (engine_by_hand.py, which imports this module)."""

    storage_jobs: dict[int, StorageJob]
    files: list[StoredChunk]

    def stamps(self, name: str) -> list[int]: ...

    def spoil(self, **changes: Callable[[BlockFacts], Any]) -> None: ...


def pins_by(jobs: Iterable[StorageJob]) -> dict[int, int]:
    """Return the pins that jobs of the storage hold, by chunk: the number of jobs that write it to the
    storage, or -1 where a job reads into it."""
    pins = dict[int, int]()
    for job in jobs:
        for chunk in job.chunks:
            pins[chunk] = -1 if job.load else pins.get(chunk, 0) + 1
    return pins


def _start_job(scene: StorageScene, way: str, job: str, chunks: str, done: str | None) -> None:
    number = int(job)
    scene.storage_jobs[number] = StorageJob(
        number, load=way == "read", chunks=tuple(map(int, chunks.split())), done=done is not None
    )


def _end_job(scene: StorageScene, job: str) -> None:
    del scene.storage_jobs[int(job)]


def _store_file(scene: StorageScene, first: str, end: str, name: str, how: str | None) -> None:
    stamps = scene.stamps(name)[int(first) : int(end)]
    content = list(stamps)
    if how == "overwritten":
        content[-1] = FOREIGN_STAMP
    elif how == "unwritten":
        content[-1] = 0
    scene.files.append(StoredChunk(0, tuple(stamps), ((0, tuple(content)),)))


def _look_up(scene: StorageScene, count: str) -> None:
    def with_lookups(facts: BlockFacts) -> HostFacts:
        assert facts.host is not None
        return facts.host._replace(lookups=int(count))

    scene.spoil(host=with_lookups)


STORAGE_STATEMENTS: dict[str, Callable[..., None]] = {
    r"storage (?P<way>write|read) (?P<job>\d) of (?P<chunks>\d( \d)*)(?P<done> done)?": _start_job,
    r"storage job (?P<job>\d) ends": _end_job,
    r"a file keeps (?P<first>\d+)-(?P<end>\d+) of (?P<name>r\d)"
    r"( (?P<how>overwritten|unwritten))?": _store_file,
    r"the storage is asked for (?P<count>\d) chunks?": _look_up,
}
