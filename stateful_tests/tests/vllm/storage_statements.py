"""Statements about the storage behind host memory, for the rows of clause_rows.txt.

"storage write 0 of 1 2": the engine has started a job that writes these chunks, and pins them. "storage read
0 of 1": it has started one that reads into them. "a file keeps 0-2 of r1": these positions are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from reference.blocks.facts import HostFacts, StorageJob, StoredChunk

OTHER = 7  # a stamp that no text has


def pins_by(jobs: Iterable[StorageJob]) -> dict[int, int]:
    """Return by how much jobs of the storage pin each chunk; -1 of one that is read into."""
    pins = dict[int, int]()
    for job in jobs:
        for chunk in job.chunks:
            pins[chunk] = -1 if job.load else pins.get(chunk, 0) + 1
    return pins


def _job(scene: Any, way: str, job: str, chunks: str, done: str | None) -> None:
    number = int(job)
    of = tuple(map(int, chunks.split()))
    scene.storage_jobs[number] = StorageJob(number, way == "read", of, done is not None)


def _ends(scene: Any, job: str) -> None:
    del scene.storage_jobs[int(job)]


def _file(scene: Any, first: str, end: str, name: str, how: str | None) -> None:
    stamps = scene.stamps(name)[int(first) : int(end)]
    there = list(stamps)
    if how == "overwritten":
        there[-1] = OTHER
    elif how == "unwritten":
        there[-1] = 0
    scene.files.append(StoredChunk(0, tuple(stamps), ((0, tuple(there)),)))


def _asked(scene: Any, count: str) -> None:
    def spoil(facts: Any) -> HostFacts:
        host: HostFacts = facts.host
        return host._replace(lookups=int(count))

    scene.spoil(host=spoil)


STORAGE_STATEMENTS: dict[str, Callable[..., None]] = {
    r"storage (?P<way>write|read) (?P<job>\d) of (?P<chunks>\d( \d)*)(?P<done> done)?": _job,
    r"storage job (?P<job>\d) ends": _ends,
    r"a file keeps (?P<first>\d+)-(?P<end>\d+) of (?P<name>r\d)( (?P<how>overwritten|unwritten))?": _file,
    r"the storage is asked for (?P<count>\d) chunks?": _asked,
}
