"""The release that a checkout is nearest to, by the lines of its files.

A sketch has the lines of an engine's driven files as 24-bit checksums, each with the releases that have the
line. `python -m ci.sketches` writes the sketches. A text that several lines have counts as one line.
"""

from __future__ import annotations

import base64
import zlib
from collections import Counter
from collections.abc import Iterable, Set
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
    lines: how many lines differ."""

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
    """For each release, how many lines differ, from old to new."""
    sketch = read(engine)
    lines = tree_lines(engine, root)
    shared = _per_release(sketch, (sketch.lines.get(line, 0) for line in lines))
    every = _per_release(sketch, sketch.lines.values())
    return {
        release: len(lines) + own - 2 * both
        for release, own, both in zip(sketch.releases, every, shared)
    }


def _per_release(sketch: Sketch, masks: Iterable[int]) -> list[int]:
    """How many of these lines, each with the releases that have it, a release has."""
    counted = Counter(masks)
    return [
        sum(count for mask, count in counted.items() if mask >> number & 1)
        for number in range(len(sketch.releases))
    ]


def lines_apart(lines: Set[bytes], others: Set[bytes]) -> int:
    """How many lines differ between two trees: those that one has and the other has not. An edited line
    counts twice, as in `git diff --stat`."""
    return len(lines ^ others)


def differing(count: int) -> str:
    """How many lines differ, in words."""
    if not count:
        return "no distinct line differs"
    return f"{count:,} line{'s differ' if count > 1 else ' differs'}"


def tree_lines(engine: str, root: Path) -> Set[bytes]:
    """The lines of the driven files under `root`, which holds the package of the engine."""
    return checksums(root / file for file in read(engine).files)


def release_lines(engine: str, release: str) -> Set[bytes]:
    """The lines of a release that the sketch has. Its folder in the cache may lack files of other ways."""
    sketch = read(engine)
    number = sketch.releases.index(release)
    return {line for line, mask in sketch.lines.items() if mask >> number & 1}


def neighbours(engine: str, release: str) -> tuple[str, ...]:
    """The releases around one, the older ones first. The release is in the sketch."""
    releases = read(engine).releases
    at = releases.index(release)
    return releases[max(0, at - _AROUND) : at] + releases[at + 1 : at + 1 + _AROUND]


@lru_cache(maxsize=4)
def leans(engine: str, root: Path, release: str) -> bool:
    """Whether a tree that is nearest to a release lies between it and a neighbour: it has lines that the
    neighbour has and the release has not. Such a tree may lack what the release has; any other renamed it."""
    there = tree_lines(engine, root)
    lines = release_lines(engine, release)
    return any(
        len(there & (release_lines(engine, name) - lines)) >= _LEANS
        for name in neighbours(engine, release)
    )


def checksums(files: Iterable[Path]) -> set[bytes]:
    """The checksums of the lines of files; a file that is not there has none."""
    found = set[bytes]()
    for file in files:
        if file.is_file():
            found |= _of_text(file.read_text(encoding="utf-8", errors="replace"))
    return found


@lru_cache(maxsize=256)  # a tree is asked several times, and most files of another are the same
def _of_text(text: str) -> frozenset[bytes]:
    lines = (" ".join(line.split()) for line in text.splitlines())
    return frozenset(
        zlib.crc32(line.encode()).to_bytes(4, "big")[:BYTES]
        for line in lines
        if len(line) >= _SHORTEST and not line.startswith("#")
    )


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
