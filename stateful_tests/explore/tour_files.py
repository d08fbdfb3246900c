"""Recorded tours as files: gzip over JSON. `fixtures/README.md` says what is in one.

A file is data from a stranger: measured, parsed into typed structs, refused in one line.
"""

from __future__ import annotations

import gzip
import os
import stat
import zlib
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from reference.commands import Mode
from reference.geometry import Geometry, GeometryError
from reference.model import SPEC_VERSION
from stateful_tests.explore.tour import Walks
from stateful_tests.lockstep.results import Trace
from stateful_tests.traces import files as traces
from stateful_tests.traces.schema import MAX_BYTES, Name

_Count = Annotated[int, Meta(ge=0, le=1 << 40)]
# Twice the index of the command, and one more where the transition is run for the first time.
_Step = Annotated[int, Meta(ge=0, le=1 << 20)]
_Walk = Annotated[list[_Step], Meta(min_length=1, max_length=100_000)]


class _TourFile(msgspec.Struct, forbid_unknown_fields=True):
    """A tour. trace: a trace file with the sizes, and every command of the walks once as its steps."""

    format: Literal["kvspec-tour"]
    version: Literal[1]
    spec: str
    scope: Name
    states: _Count
    transitions: _Count
    refusals: _Count
    trace: msgspec.Raw
    walks: Annotated[list[_Walk], Meta(max_length=100_000)]


_FILE = msgspec.json.Decoder(_TourFile)


class TourError(ValueError):
    """A tour that cannot be used: one line with the file and the reason."""


def dumps(walks: Walks) -> bytes:
    """The bytes of a tour's file. Equal tours give equal bytes."""
    trace = Trace(walks.geometry, walks.mode, walks.commands, "exhaustive")
    text = msgspec.json.format(traces.dump(trace).encode(), indent=0)
    steps = [[2 * index + new for index, new in walk] for walk in walks.walks]
    file = _TourFile(
        "kvspec-tour", 1, SPEC_VERSION, walks.scope, walks.states, walks.transitions, walks.refusals,
        msgspec.Raw(text), steps,
    )  # fmt: skip
    return gzip.compress(msgspec.json.encode(file), 9, mtime=0)


def load(path: str | os.PathLike[str]) -> Walks:
    """Read a tour. Raises TourError, whatever is wrong with the file."""
    try:
        found = traces.shipped(path)
        if not stat.S_ISREG(os.stat(found).st_mode):
            raise TourError(f"{path}: not a regular file")
        with open(found, "rb") as raw:
            packed = raw.read(MAX_BYTES + 1)
        return _loads(_unpacked(packed, path), path)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or "is no gzip file"
        raise TourError(f"{path}: {reason}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TourError(f"{path}: {error}") from None
    except (traces.TraceError, GeometryError) as error:
        raise TourError(str(error)) from None


def _unpacked(packed: bytes, path: str | os.PathLike[str]) -> bytes:
    """What was packed, unless there is too much of it."""
    unpacker = zlib.decompressobj(zlib.MAX_WBITS | 16)
    data = unpacker.decompress(packed, MAX_BYTES)
    if unpacker.unconsumed_tail:
        raise TourError(f"{path}: a gzip bomb, or no tour: unpacks to more than {MAX_BYTES >> 20} MiB")
    if not unpacker.eof:
        raise TourError(f"{path}: is cut off")
    return data


def _loads(data: bytes, path: str | os.PathLike[str]) -> Walks:
    file = _FILE.decode(data)
    trace = traces.loads(bytes(file.trace), f"{os.fspath(path)}: $.trace")
    most = 2 * len(trace.commands)
    if any(step >= most for walk in file.walks for step in walk):
        raise TourError(f"{path}: $.walks: a step that is none of the {len(trace.commands)} commands")
    walks = tuple(tuple((step // 2, bool(step % 2)) for step in walk) for walk in file.walks)
    geometry: Geometry = trace.geometry
    mode: Mode = trace.mode
    return Walks(
        file.scope, geometry, mode, file.states, file.transitions, file.refusals, trace.commands, walks
    )
