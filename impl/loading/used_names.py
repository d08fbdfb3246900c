"""The names that an adapter uses of a release, and which of these names a tree has lost.

The tables of an API have what the adapter reads. What it gives beside, such as an optional argument, a
setting in a dictionary or an attribute that it stores, no release refuses under an old name: the release goes
on without it. `python -m ci.sketches` writes which releases have which names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from impl.loading import probe
from impl.loading.nearest import FAR, FOLDER, Nearest, neighbours

PLAIN = "plain"  # the way of an engine that no option names
_MOST = 12  # names in a message
_STRANGE = 60  # a tree without so many is of another kind: their names tell nothing


class UsedName(NamedTuple):
    """A name that an adapter uses of a release.

    releases: a bit for each that has the name in one of its files.
    ways: in which the adapter gives the name to a release, which would go on without it; none of a name that
        the adapter reads.
    """

    name: str
    releases: int
    ways: frozenset[str]


class NameSketch(NamedTuple):
    """The names that an adapter uses, by the releases that have them.

    releases: from old to new.
    files: in which the names are looked for.
    names: all that the adapter uses and a release has.
    """

    releases: tuple[str, ...]
    files: tuple[str, ...]
    names: tuple[UsedName, ...]


def not_given(
    engine: str,
    root: Path,
    near: Nearest,
    ways: Collection[str] = (PLAIN,),
    renamed: Collection[str] = (),
) -> tuple[probe.Missing, ...]:
    """Find the names that the adapter gives to a tree nearest to `near`, and that no file of the tree has.

    A name counts that the releases around have as well: another one tells of another release. A tree that is
    older than all releases may lack any.

    ways: in which the tree is driven.
    renamed: names ("Class.member") for which the adapter has the tree's own.
    """
    sketch = read(engine)
    if near.release not in sketch.releases or (
        near.release == sketch.releases[0] and near.lines > FAR
    ):
        return ()
    followed = {name.rpartition(".")[2] for name in renamed}
    around = [sketch.releases.index(other) for other in neighbours(engine, near.release)]
    gone = [
        lost.name
        for lost in lost_names(engine, root, near.release)
        if lost.ways & {*ways} and all(lost.releases >> other & 1 for other in around)
    ]
    return tuple(
        probe.Missing(f"there is no {name}", "all driven files")
        for name in gone
        if name not in followed
    )


def also_lost(engine: str, root: Path, release: str, said: str) -> str:
    """Return the further names that a tree has lost, as the end of a message that has `said` some of them."""
    gone = [lost.name for lost in lost_names(engine, root, release)]
    more = [name for name in gone if not re.search(rf"\b{re.escape(name)}\b", said)]
    if not more or len(gone) > _STRANGE:
        return ""
    others = f" and {len(more) - _MOST} more" if len(more) > _MOST else ""
    names = ", ".join(more[:_MOST]) + others
    return f". No driven file has these names of {release} that the adapter uses: {names}"


def lost_names(engine: str, root: Path, release: str) -> Iterator[UsedName]:
    """Yield the names that a release has and no file of the tree under `root`."""
    sketch = read(engine)
    if release not in sketch.releases:
        return
    at = sketch.releases.index(release)
    there = words(root / file for file in sketch.files)
    for used in sketch.names:
        if used.releases >> at & 1 and used.name not in there:
            yield used


def words(files: Iterable[Path]) -> set[str]:
    """Return all words in files; a file that is not there has none."""
    found = set[str]()
    for file in files:
        if file.is_file():
            found |= _of_text(file.read_text("utf-8", errors="replace"))
    return found


@lru_cache(maxsize=256)  # most files of another tree are the same
def _of_text(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"[A-Za-z_]\w+", text))


@lru_cache(maxsize=4)
def read(engine: str) -> NameSketch:
    """Return the names of an engine's adapter."""
    releases, files, *groups = _file(engine).read_text("ascii").splitlines()
    names = []
    for group in groups:
        mask, ways, *together = group.split()
        given = frozenset() if ways == "-" else frozenset(ways.split(","))
        names += [UsedName(name, int(mask, 16), given) for name in together]
    return NameSketch(tuple(releases.split()), tuple(files.split()), tuple(sorted(names)))


def write(engine: str, sketch: NameSketch) -> None:
    """Write the names of an engine's adapter, a line for those that are alike."""
    groups = dict[tuple[int, str], list[str]]()
    for name, releases, ways in sketch.names:
        groups.setdefault((releases, ",".join(sorted(ways)) or "-"), []).append(name)
    lines = [
        f"{mask:x} {ways} {' '.join(sorted(groups[mask, ways]))}" for mask, ways in sorted(groups)
    ]
    text = "\n".join([" ".join(sketch.releases), " ".join(sketch.files), *lines, ""])
    _file(engine).write_text(text, "ascii")


def _file(engine: str) -> Path:
    return FOLDER / f"{engine}-names.txt"
