"""A search kept in a file, to be taken up again: gzip over MessagePack, read back into the same types.

It belongs to one scope and to one text of the rules; with any other it is refused, in one line.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import tempfile
import zlib
from array import array
from pathlib import Path

import msgspec
from msgspec import Struct

import reference
from reference.tree import Node
from stateful_tests.column_search import ColumnSearch
from stateful_tests.explorer import Explorer
from stateful_tests.quotient import Unit
from stateful_tests.results import Tally
from stateful_tests.unit_rules import Shape

FORMAT, VERSION = "kvspec-exploration", 3
_KEY_BYTES = 64
_SEARCH = (
    "column_search.py", "moves.py", "numbered.py", "quotient.py", "scopes.py", "situations.py",
    "traced.py", "unit_rules.py", "units.py",
)  # fmt: skip


class UnfinishedError(ValueError):
    """A file that cannot be taken up: one line says why."""


class Steps(Struct, tag=True):
    """What an Explorer has found. keys, parents, via: fixed-size numbers, one after the other."""

    units: dict[int, Unit]
    trees: dict[int, tuple[Node, ...]]
    keys: bytes
    parents: bytes
    via: bytes
    levels: list[int]
    expanded: int
    transitions: int
    seconds: float
    situations: dict[str, int]
    tallies: dict[str, tuple[int, int]] | None

    @classmethod
    def of(cls, explorer: Explorer) -> Steps:
        values = dict(enumerate(explorer.graph.quotient.values))
        tallies = explorer.checker.tallies if explorer.checker is not None else None
        return cls(
            {n: value for n, value in values.items() if isinstance(value, Unit)},
            {n: value for n, value in values.items() if value is not None and not isinstance(value, Unit)},
            b"".join(key.to_bytes(_KEY_BYTES, "little") for key in explorer.keys),
            explorer.parents.tobytes(), explorer.via.tobytes(), explorer.levels, explorer.expanded,
            explorer.transitions, explorer.seconds, dict(explorer.graph.situations),
            None if tallies is None else {c: (t.evaluated, t.critical) for c, t in tallies.items()},
        )  # fmt: skip

    def put_into(self, explorer: Explorer) -> bool:
        """Whether the lengths fit together."""
        for _, value in sorted({**self.units, **self.trees}.items()):
            explorer.graph.quotient.number(value)
        blocks = range(0, len(self.keys), _KEY_BYTES)
        explorer.keys = [int.from_bytes(self.keys[at : at + _KEY_BYTES], "little") for at in blocks]
        explorer.seen = {key: at for at, key in enumerate(explorer.keys)}
        explorer.parents, explorer.via = array("I", self.parents), array("H", self.via)
        explorer.levels, explorer.expanded = self.levels, self.expanded
        explorer.transitions, explorer.seconds = self.transitions, self.seconds
        explorer.graph.situations.update(self.situations)
        if explorer.checker is not None and self.tallies is not None:
            explorer.checker.tallies.update({c: Tally(*counts) for c, counts in self.tallies.items()})
        return 0 < len(explorer.keys) == len(explorer.parents) == len(explorer.via)


class Columns(Struct, tag=True):
    """What a ColumnSearch has found. words: of units; keys: of states; 64 bits each, one after the other."""

    shapes: list[Shape]
    words: bytes
    keys: bytes
    starts: list[int]
    expanded: int
    transitions: int
    seconds: float
    situations: dict[str, int]
    tallies = None

    @classmethod
    def of(cls, search: ColumnSearch) -> Columns:
        packed = search.arrays.to_bytes
        return cls(
            [shape for shape in search.units.shapes if shape is not None], packed(search.units.words),
            packed(search.seen.words), search.starts, search.expanded, search.transitions, search.seconds,
            dict(search.situations),
        )  # fmt: skip

    def put_into(self, search: ColumnSearch) -> bool:
        """Whether the lengths fit together."""
        column = search.arrays.from_bytes
        for shape in self.shapes:
            search.units.shape_number(shape)
        search.units.add(column(self.words)[1:])
        search.seen.add(column(self.keys)[1:])
        search.starts, search.expanded = self.starts, self.expanded
        search.count_from(self.transitions, self.situations)
        search.seconds = self.seconds
        return self.expanded <= search.starts[-1] <= search.states


class File(Struct):
    """A search, and what it belongs to."""

    format: str
    version: int
    scope: str
    rules: str
    search: Steps | Columns


_DECODER = msgspec.msgpack.Decoder(File)


def rules_digest() -> str:
    """Of the source of everything that decides what a search finds."""
    digest = hashlib.sha256()
    here = Path(__file__).parent
    files = [*sorted(Path(reference.__path__[0]).rglob("*.py")), *(here / name for name in _SEARCH)]
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def save(search: Explorer | ColumnSearch, path: str | os.PathLike[str]) -> None:
    """Write the search, whole or not at all. Raises OSError."""
    kept = Columns.of(search) if isinstance(search, ColumnSearch) else Steps.of(search)
    file = File(FORMAT, VERSION, repr(search.scope), rules_digest(), kept)
    target = Path(path)
    handle, scratch = tempfile.mkstemp(dir=target.absolute().parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(gzip.compress(msgspec.msgpack.encode(file), 1, mtime=0))
        os.replace(scratch, target)
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise


def load(search: Explorer | ColumnSearch, path: str | os.PathLike[str]) -> None:
    """Put a fresh search where the one in the file was. Raises UnfinishedError, OSError."""
    try:
        file = _DECODER.decode(gzip.decompress(Path(path).read_bytes()))
    except (gzip.BadGzipFile, EOFError, zlib.error, msgspec.MsgspecError, RecursionError) as error:
        raise UnfinishedError(f"{path}: is no unfinished exploration ({type(error).__name__})") from None
    if (file.format, file.version) != (FORMAT, VERSION):
        raise UnfinishedError(f"{path}: is no unfinished exploration of this version")
    if file.scope != repr(search.scope):
        raise UnfinishedError(f"{path}: was made in another scope")
    if file.rules != rules_digest():
        raise UnfinishedError(f"{path}: was made under other rules; start again without it")
    kept = file.search
    checked = isinstance(search, Explorer) and search.checker is not None
    if (kept.tallies is not None) != checked:
        raise UnfinishedError(f"{path}: was made {'without' if checked else 'with'} clauses")
    if isinstance(search, ColumnSearch):
        fits = isinstance(kept, Columns) and kept.put_into(search)
    else:
        fits = isinstance(kept, Steps) and kept.put_into(search)
    if not fits:
        raise UnfinishedError(f"{path}: is damaged")
