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
from stateful_tests.explorer import Explorer
from stateful_tests.quotient import Unit
from stateful_tests.results import Tally

FORMAT, VERSION = "kvspec-exploration", 1
_KEY_BYTES = 64
_SEARCH = ("moves.py", "quotient.py", "scopes.py", "situations.py")


class UnfinishedError(ValueError):
    """A file that cannot be taken up: one line says why."""


class File(Struct):
    """Everything that an Explorer has found. keys, parents, via: fixed-size numbers, one after the other."""

    format: str
    version: int
    scope: str
    rules: str
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


_DECODER = msgspec.msgpack.Decoder(File)


def rules_digest() -> str:
    """Of the source of everything that decides what a search finds."""
    digest = hashlib.sha256()
    here = Path(__file__).parent
    files = [*sorted(Path(reference.__path__[0]).rglob("*.py")), *(here / name for name in _SEARCH)]
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def save(explorer: Explorer, path: str | os.PathLike[str]) -> None:
    """Write the search, whole or not at all. Raises OSError."""
    values = dict(enumerate(explorer.graph.quotient.values))
    tallies = explorer.checker.tallies if explorer.checker is not None else None
    file = File(
        FORMAT, VERSION, repr(explorer.scope), rules_digest(),
        {n: value for n, value in values.items() if isinstance(value, Unit)},
        {n: value for n, value in values.items() if value is not None and not isinstance(value, Unit)},
        b"".join(key.to_bytes(_KEY_BYTES, "little") for key in explorer.keys),
        explorer.parents.tobytes(), explorer.via.tobytes(), explorer.levels, explorer.expanded,
        explorer.transitions, explorer.seconds, dict(explorer.graph.situations()),
        None if tallies is None else {c: (t.evaluated, t.critical) for c, t in tallies.items()},
    )  # fmt: skip
    target = Path(path)
    handle, scratch = tempfile.mkstemp(dir=target.absolute().parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(gzip.compress(msgspec.msgpack.encode(file), 1, mtime=0))
        os.replace(scratch, target)
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise


def load(explorer: Explorer, path: str | os.PathLike[str]) -> None:
    """Put a fresh Explorer where the one in the file was. Raises UnfinishedError, OSError."""
    try:
        file = _DECODER.decode(gzip.decompress(Path(path).read_bytes()))
    except (gzip.BadGzipFile, EOFError, zlib.error, msgspec.MsgspecError, RecursionError) as error:
        raise UnfinishedError(f"{path}: is no unfinished exploration ({type(error).__name__})") from None
    if (file.format, file.version) != (FORMAT, VERSION):
        raise UnfinishedError(f"{path}: is no unfinished exploration of this version")
    if file.scope != repr(explorer.scope):
        raise UnfinishedError(f"{path}: was made in another scope")
    if file.rules != rules_digest():
        raise UnfinishedError(f"{path}: was made under other rules; start again without it")
    if (file.tallies is None) != (explorer.checker is None):
        raise UnfinishedError(f"{path}: was made {'with' if file.tallies else 'without'} clauses")
    quotient = explorer.graph.quotient
    for _, value in sorted({**file.units, **file.trees}.items()):
        quotient.number(value)
    blocks = range(0, len(file.keys), _KEY_BYTES)
    explorer.keys = [int.from_bytes(file.keys[at : at + _KEY_BYTES], "little") for at in blocks]
    explorer.seen = {key: at for at, key in enumerate(explorer.keys)}
    explorer.parents, explorer.via = array("I", file.parents), array("H", file.via)
    if not explorer.keys or len({len(x) for x in (explorer.keys, explorer.parents, explorer.via)}) != 1:
        raise UnfinishedError(f"{path}: is damaged")
    explorer.levels, explorer.expanded = file.levels, file.expanded
    explorer.transitions, explorer.seconds = file.transitions, file.seconds
    explorer.graph.counted.update(file.situations)
    if explorer.checker is not None and file.tallies is not None:
        explorer.checker.tallies.update({c: Tally(*counts) for c, counts in file.tallies.items()})
