"""The release that a checkout is nearest to, by the lines of its files.

A sketch has the lines of an engine's driven files as 24-bit checksums, each with the releases that have the
line. `python -m ci.sketches` writes the sketches. Lines of equal text count as one line.
"""

from __future__ import annotations

import base64
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).with_name("sketches")
BYTES = 3  # a checksum has 24 bits
FAR = 300  # lines: a tree that differs more than that from the oldest release may be older
_RELEASES_AROUND = 2  # on either side, for one of them may be a patch release
# Lines that a tree and the neighbour have, and the nearest release has not: see `lies_between`.
_LEAST_SHARED = 3
_SHORTEST_LINE = 8  # characters; shorter lines, such as `else:`, are in every release and tell nothing


class Nearest(NamedTuple):
    """The release that a tree is nearest to.

    release: the nearest one; of several that are equally near, the first.
    lines: how many lines differ.
    """

    release: str
    lines: int


class Sketch(NamedTuple):
    """The lines of an engine's releases.

    files: paths that any of the releases has, from the folder that holds the package.
    lines: checksum of a line -> the releases that have it, a bit for each.
    """

    releases: tuple[str, ...]
    files: tuple[str, ...]
    lines: dict[bytes, int]


def nearest(engine: str, root: Path) -> Nearest:
    """Return the release nearest to the files under `root`, which holds the package of the engine."""
    return nearest_of(distances(engine, root))


def nearest_of(differing_lines: Mapping[str, int]) -> Nearest:
    """Return the nearest release by the `distances` of a tree."""
    release = min(differing_lines, key=differing_lines.__getitem__)
    return Nearest(release, differing_lines[release])


def distances(engine: str, root: Path) -> dict[str, int]:
    """Return how many lines of the tree under `root` differ from each release, the oldest release first."""
    sketch = read(engine)
    lines = tree_lines(engine, root)
    shared = _per_release(sketch, (sketch.lines.get(line, 0) for line in lines))
    return {
        release: len(lines) + own_lines - 2 * shared_lines
        for release, own_lines, shared_lines in zip(sketch.releases, _own_lines(engine), shared)
    }


@lru_cache(maxsize=4)
def _own_lines(engine: str) -> list[int]:
    sketch = read(engine)
    return _per_release(sketch, sketch.lines.values())


def _per_release(sketch: Sketch, masks: Iterable[int]) -> list[int]:
    """Count the lines of each release.

    masks: for each line, the releases that have it, a bit for each.
    """
    counted = Counter(masks)
    return [
        sum(count for mask, count in counted.items() if mask >> number & 1)
        for number in range(len(sketch.releases))
    ]


def lines_apart(lines: Set[bytes], others: Set[bytes]) -> int:
    """Count the lines that one of two trees lacks. An edited line counts twice, as in `git diff --stat`."""
    return len(lines ^ others)


def differing(count: int) -> str:
    """Return the number of differing lines in words."""
    if not count:
        return "no new line of code"
    return "1 line differs" if count == 1 else f"{count:,} lines differ"


def tree_lines(engine: str, root: Path) -> Set[bytes]:
    """Return the checksums of the driven files under `root`, which holds the package of the engine."""
    return checksums(root / file for file in read(engine).files)


def release_lines(engine: str, release: str) -> Set[bytes]:
    """Return the checksums of a release, from the sketch: the release's folder in the cache may lack files
    that other ways drive."""
    sketch = read(engine)
    number = sketch.releases.index(release)
    return {line for line, mask in sketch.lines.items() if mask >> number & 1}


def neighbours(engine: str, release: str) -> tuple[str, ...]:
    """Return the releases next to `release`, the oldest first. Raises ValueError for one that the sketch
    lacks."""
    releases = read(engine).releases
    index = releases.index(release)
    older = releases[max(0, index - _RELEASES_AROUND) : index]
    newer = releases[index + 1 : index + 1 + _RELEASES_AROUND]
    return older + newer


@lru_cache(maxsize=4)
def lies_between(engine: str, root: Path, release: str) -> bool:
    """Return whether a tree lies between `release`, its nearest one, and a neighbour: whether it has lines
    that the neighbour has and the release has not.

    A name of the release that such a tree lacks may not be there yet, or no more. Any other tree renamed
    it.
    """
    of_tree = tree_lines(engine, root)
    of_release = release_lines(engine, release)
    return any(
        len(of_tree & (release_lines(engine, name) - of_release)) >= _LEAST_SHARED
        for name in neighbours(engine, release)
    )


def checksums(files: Iterable[Path]) -> set[bytes]:
    """Return the checksums of the lines of `files`. Files that do not exist are left out."""
    found = set[bytes]()
    for file in files:
        if file.is_file():
            found |= _checksums_of_text(file.read_text(encoding="utf-8", errors="replace"))
    return found


# A check asks for the same tree several times, and another tree has most files unchanged.
@lru_cache(maxsize=256)
def _checksums_of_text(text: str) -> frozenset[bytes]:
    """Return the checksums of the lines of a text, without white space, comments and short lines."""
    lines = (" ".join(line.split()) for line in text.splitlines())
    return frozenset(
        zlib.crc32(line.encode()).to_bytes(4, "big")[:BYTES]
        for line in lines
        if len(line) >= _SHORTEST_LINE and not line.startswith("#")
    )


@lru_cache(maxsize=4)
def read(engine: str) -> Sketch:
    """Read the sketch of an engine: its releases, its files, then a line for each mask (see
    `sketch_text`)."""
    releases, files, *groups = (FOLDER / f"{engine}.txt").read_text("ascii").splitlines()
    lines = dict[bytes, int]()
    for group in groups:
        mask, _, text = group.partition(" ")
        joined = base64.b64decode(text)
        for start in range(0, len(joined), BYTES):
            lines[joined[start : start + BYTES]] = int(mask, 16)
    return Sketch(tuple(releases.split()), tuple(files.split()), lines)


def sketch_text(sketch: Sketch) -> str:
    """Return a sketch as text. Lines that the same releases have share one line: the mask in hexadecimal
    digits, and their checksums as base64."""
    groups = dict[int, list[bytes]]()
    for line, mask in sketch.lines.items():
        groups.setdefault(mask, []).append(line)
    texts = [
        f"{mask:x} {base64.b64encode(b''.join(sorted(groups[mask]))).decode()}"
        for mask in sorted(groups)
    ]
    return "\n".join([" ".join(sketch.releases), " ".join(sketch.files), *texts, ""])
