"""The release that a checkout is nearest to, by the lines of its files.

A sketch has the lines of an engine's driven files as 24-bit checksums, each with the releases that have the
line. `python -m ci.sketches` writes the sketches.
"""

from __future__ import annotations

import base64
import zlib
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).with_name("sketches")
BYTES = 3  # of a checksum
FAR = 300  # lines: a tree that differs more than that from the oldest release may be older
_AROUND = 2  # releases on either side: one may be a patch release
_LEANS = 3  # lines of a release nearby alone: a tree with as many lies between the two
_SHORTEST = 8  # characters; shorter lines stand everywhere


class Nearest(NamedTuple):
    """release: the nearest one; of several that are equally near, the first.
    lines: how many lines either of the two has and the other has not."""

    release: str
    lines: int


class Sketch(NamedTuple):
    """files: paths that any of the releases has, from the folder that holds the package.
    lines: checksum of a line -> the releases that have it, a bit for each."""

    releases: tuple[str, ...]
    files: tuple[str, ...]
    lines: dict[bytes, int]


def nearest(engine: str, root: Path) -> Nearest:
    """The release nearest to the files under `root`, which holds the package of the engine."""
    each = distances(engine, root)
    release = min(each, key=each.__getitem__)
    return Nearest(release, each[release])


def distances(engine: str, root: Path) -> dict[str, int]:
    """For each release, how many lines either has and the other has not, from old to new."""
    sketch = read(engine)
    there = checksums(root / file for file in sketch.files)
    of_mask = Counter(sketch.lines.values())
    shared = Counter(mask for line, mask in sketch.lines.items() if line in there)
    return {
        release: len(there) + sum(
            times - 2 * shared[mask] for mask, times in of_mask.items() if mask >> number & 1
        )
        for number, release in enumerate(sketch.releases)
    }  # fmt: skip


def neighbours(engine: str, release: str) -> tuple[str, ...]:
    """The releases around one, the older ones first. The release is in the sketch."""
    releases = read(engine).releases
    at = releases.index(release)
    return releases[max(0, at - _AROUND) : at] + releases[at + 1 : at + 1 + _AROUND]


@lru_cache(maxsize=4)
def leans(engine: str, root: Path, release: str) -> bool:
    """Whether a tree that is nearest to a release lies between it and a neighbour: it has lines that the
    neighbour has and the release has not. Such a tree may lack what the release has; any other renamed it."""
    sketch = read(engine)
    at = sketch.releases.index(release)
    there = checksums(root / file for file in sketch.files)
    for name in neighbours(engine, release):
        other = sketch.releases.index(name)
        its_own = (
            line for line, mask in sketch.lines.items() if mask >> other & 1 and not mask >> at & 1
        )
        if sum(line in there for line in its_own) >= _LEANS:
            return True
    return False


def checksums(files: Iterable[Path]) -> set[bytes]:
    """The checksums of the lines of files; a file that is not there has none."""
    found = set()
    for file in files:
        if not file.is_file():
            continue
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            text = " ".join(line.split())
            if len(text) >= _SHORTEST and not text.startswith("#"):
                found.add(zlib.crc32(text.encode()).to_bytes(4, "big")[:BYTES])
    return found


@lru_cache(maxsize=4)
def read(engine: str) -> Sketch:
    """The sketch of an engine."""
    releases, files, *groups = (FOLDER / f"{engine}.txt").read_text("ascii").splitlines()
    lines = dict[bytes, int]()
    for group in groups:
        mask, _, text = group.partition(" ")
        together = base64.b64decode(text)
        for at in range(0, len(together), BYTES):
            lines[together[at : at + BYTES]] = int(mask, 16)
    return Sketch(tuple(releases.split()), tuple(files.split()), lines)


def written(sketch: Sketch) -> str:
    """A sketch as text, a line for all that the same releases have."""
    groups = dict[int, list[bytes]]()
    for line, mask in sketch.lines.items():
        groups.setdefault(mask, []).append(line)
    texts = [
        f"{mask:x} {base64.b64encode(b''.join(sorted(groups[mask]))).decode()}"
        for mask in sorted(groups)
    ]
    return "\n".join([" ".join(sketch.releases), " ".join(sketch.files), *texts, ""])
