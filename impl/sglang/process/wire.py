"""What a worker and its owner say to each other: length-prefixed msgpack, every message typed."""

from __future__ import annotations

import os
import select
import struct
import time
from typing import IO, Any

import msgspec

from impl.adapter import View
from reference.commands import COMMANDS, Choice, Command, Freed, Reason, Report
from reference.geometry import Geometry

_HEADER = struct.Struct("<I")
MAX_MESSAGE = 64 << 20  # bytes; the largest view of the largest geometry stays well below


class Reset(msgspec.Struct, tag=True, frozen=True):
    """Start a server of these sizes."""

    geometry: Geometry


class Apply(msgspec.Struct, tag=True, frozen=True):
    """Play one command: its class by name, and its fields."""

    kind: str
    command: msgspec.Raw


class StepReply(msgspec.Struct, tag=True, frozen=True):
    """Refused for a reason, or done with these choices; and the view after it.

    calls: what the driver did, as Python, of a worker that was asked to note it. late: for each request whose
    results wait (results.py), what it is called there and what processing them does to it.
    """

    view: View
    refused: Reason | None = None
    choices: tuple[Choice, ...] = ()
    report: Report | None = None
    freed: Freed | None = None
    calls: tuple[str, ...] = ()
    late: tuple[tuple[str, str], ...] = ()


class Failure(msgspec.Struct, tag=True, frozen=True):
    """The release failed, or cannot be used at all (`unusable`). One line; calls as of an StepReply."""

    error: str
    unusable: bool = False
    calls: tuple[str, ...] = ()


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The worker has loaded its release."""


Ask = Reset | Apply
Reply = StepReply | Failure | Ready

_ENCODER = msgspec.msgpack.Encoder()
ASKS = msgspec.msgpack.Decoder(Ask)
REPLIES: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_COMMANDS: dict[str, msgspec.msgpack.Decoder[Any]] = {
    c.__name__: msgspec.msgpack.Decoder(c) for c in COMMANDS
}


def pack_command(command: Command) -> Apply:
    return Apply(type(command).__name__, msgspec.Raw(_ENCODER.encode(command)))


def unpack_command(message: Apply) -> Command:
    command: Command = _COMMANDS[message.kind].decode(message.command)
    return command


def send(stream: IO[bytes], message: Any) -> None:
    """Write one message; raises OSError when nobody reads any more."""
    body = _ENCODER.encode(message)
    stream.write(_HEADER.pack(len(body)) + body)
    stream.flush()


def receive(fd: int, deadline: float | None = None) -> bytes | None:
    """Read one message's body; None at the end of the stream.

    deadline: of time.monotonic(); raises TimeoutError past it. Raises ValueError for a length that
    no message has.
    """
    header = _read(fd, _HEADER.size, deadline)
    if header is None:
        return None
    (length,) = _HEADER.unpack(header)
    if length > MAX_MESSAGE:
        raise ValueError(f"a message of {length} bytes")
    return _read(fd, length, deadline)


def _read(fd: int, count: int, deadline: float | None) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([fd], [], [], left)[0]:
                raise TimeoutError
        part = os.read(fd, min(count - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)
