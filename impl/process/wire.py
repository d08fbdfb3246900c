"""Messages between a worker and its owner: length-prefixed msgpack, every message typed."""

from __future__ import annotations

import operator
import os
import re
import select
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import IO, Any, NamedTuple, Union, cast

import msgspec

from impl.adapter import Capabilities, View
from impl.process.failures import WrongShape
from impl.process.system_functions import SystemFunction
from reference.commands import (
    TREE_COMMANDS,
    COMMANDS, DONE, Broken, Choice, Command, Done, Freed, Outcome, Reason, Refused, Report,
)  # fmt: skip
from reference.system_kinds import KINDS, AnyCommand, Kind, kind_by_commands

_HEADER = struct.Struct("<I")
MAX_MESSAGE = 64 << 20  # bytes; the largest view of the largest geometry stays well below
LOOK_S = 0.1  # how often a receiver that waits for a message checks its sender


class Reset(msgspec.Struct, tag=True, frozen=True):
    """Start empty with these sizes.

    called: note the functions that this calls.
    """

    geometry: Any
    called: bool = False


class Apply(msgspec.Struct, tag=True, frozen=True):
    """Carry out one command.

    kind: name of the command's class.
    command: the command's fields, packed.
    called: note the functions that the command calls.
    """

    kind: str
    command: msgspec.Raw
    called: bool = False


class Noted(msgspec.Struct, frozen=True):
    """Notes of a system about its last command.

    calls: the command as lines of Python.
    late: what is still to come (see SGLangSystem).
    called: functions of the system's files, file by file, in the order of their first calls.
    """

    calls: tuple[str, ...] = ()
    late: tuple[tuple[str, str], ...] = ()
    called: tuple[SystemFunction, ...] = ()


class StepReply(msgspec.Struct, tag=True, frozen=True):
    """The system refused the command for a reason or carried it out with these choices; its view after it."""

    view: Any
    refused: Reason | None = None
    choices: tuple[Choice, ...] = ()
    report: Report | None = None
    freed: Freed | None = None
    noted: Noted = Noted()


class WorkerFailure(msgspec.Struct, tag=True, frozen=True):
    """The system failed.

    error: the reason, in one line.
    unusable: the system cannot be used at all.
    misfit: it cannot because the adapter does not fit it.
    view: what the system shows after it has failed; None where it shows nothing.
    """

    error: str
    unusable: bool = False
    misfit: bool = False
    view: Any = None
    noted: Noted = Noted()


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The worker has made its system, which has this name and these capabilities."""

    name: str = ""
    capabilities: Capabilities = Capabilities()


Ask = Reset | Apply
Reply = StepReply | WorkerFailure | Ready


class KindMessages(NamedTuple):
    """The message types of a kind of system.

    reset: has the sizes of the kind.
    reply, failure: have its facts.
    """

    reset: type[Reset]
    reply: type[StepReply]
    failure: type[WorkerFailure]


def _messages(kind: Kind) -> KindMessages:
    facts: Any = kind.facts or View

    def typed_message(base: type, *field: Any) -> Any:
        """Return a subclass of a message in which a field has the type of this kind."""
        tag = f"{base.__name__} of {kind.name}"
        return msgspec.defstruct(
            tag, [field], bases=(base,), module=__name__, tag=tag, frozen=True, kw_only=True
        )

    return KindMessages(
        reset=typed_message(Reset, "geometry", kind.config),
        reply=typed_message(StepReply, "view", facts),
        failure=typed_message(WorkerFailure, "view", facts | None, None),
    )


MESSAGES = {kind.name: _messages(kind) for kind in KINDS.values()}
# The class of a kind's sizes -> its reset; the class of its facts -> its messages.
RESETS = {kind.config: MESSAGES[kind.name].reset for kind in KINDS.values()}
MESSAGES_BY_FACTS = {kind.facts or View: MESSAGES[kind.name] for kind in KINDS.values()}


def _plain(value: object) -> object:
    """Convert what msgpack has no type for: arrays and their numbers, and other containers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Iterable):
        return list(value)
    number: Any = value
    return operator.index(number)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
_OUTCOMES: dict[type, msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(kind) for kind in (Done, Refused, Broken)
}
_VIEWS: dict[str, msgspec.msgpack.Decoder[Any]] = {
    kind.name: msgspec.msgpack.Decoder(kind.facts or View) for kind in KINDS.values()
}
_CAPABILITIES = msgspec.msgpack.Decoder(Capabilities)
_OF_KINDS = [*MESSAGES.values()]
ASKS: msgspec.msgpack.Decoder[Ask] = msgspec.msgpack.Decoder(
    Union[Apply, *(messages.reset for messages in _OF_KINDS)]
)
REPLIES: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(
    Union[Ready, WorkerFailure, *(of for messages in _OF_KINDS for of in (messages.reply, messages.failure))]
)
_COMMANDS: dict[str, msgspec.msgpack.Decoder[Any]] = {
    c.__name__: msgspec.msgpack.Decoder(c)
    for kind in KINDS.values()
    for c in kind.commands
}


def pack_command(command: AnyCommand) -> Apply:
    return Apply(type(command).__name__, msgspec.Raw(_ENCODER.encode(command)))


def unpack_command(message: Apply) -> Command:
    command: Command = _COMMANDS[message.kind].decode(message.command)
    return command


def copied_view(kind: Kind, view: object) -> Any:
    """Return a copy of what a system of this kind shows: it may show its own lists, and go on changing them.

    Raises WrongShape where a field of the view has another type.
    """
    try:
        return _copy_checked("view()", _VIEWS[kind.name], view)
    except WrongShape as error:
        if kind.facts is None:
            raise
        # Facts are an array in msgpack: the decoder names a field by its index.
        fields = cast(Any, kind.facts)._fields
        message = re.sub(r"\[(\d+)\]", lambda at: f".{fields[int(at[1])]}", str(error), count=1)
        raise WrongShape(message) from None


def checked_outcome(given: object) -> Outcome:
    """Return a copy of what `apply` returned.

    Raises TypeError where that is no outcome, and WrongShape where a field of it has another type.
    """
    if type(given) not in _OUTCOMES:
        raise TypeError(f"apply(): gave {given!r:.60}, not Done, Refused or Broken")
    outcome: Outcome = given if given is DONE else _copy_checked("apply()", _OUTCOMES[type(given)], given)
    return outcome


def checked_capabilities(answer: Capabilities) -> Capabilities:
    """Return a copy of the capabilities that a system states.

    Raises TypeError where they are of another type, name no command, or contradict each other.
    """
    if not isinstance(answer, Capabilities):
        raise TypeError(f"capabilities: expected Capabilities, got {type(answer).__name__}")
    capabilities: Capabilities = _copy_checked("capabilities", _CAPABILITIES, answer)
    if not capabilities.commands or capabilities.commands - _COMMANDS.keys():
        unknown = ", ".join(sorted(capabilities.commands - _COMMANDS.keys())) or "none"
        raise TypeError(f"capabilities.commands: {unknown}; one or more of {', '.join(_COMMANDS)}")
    if not capabilities.modes:
        raise TypeError("capabilities.modes: none; free, faithful or both")
    if capabilities.kind and capabilities.kind not in KINDS:
        raise TypeError(f"capabilities.kind: {capabilities.kind!r:.40}; one of {', '.join(KINDS)}")
    if contradiction := _contradiction(capabilities):
        raise TypeError(f"capabilities.{contradiction}")
    return capabilities


def _contradiction(can: Capabilities) -> str:
    """Say which capabilities do not go together, or ""."""
    trees = {kind.__name__ for kind in TREE_COMMANDS} & can.commands
    row_commands = ({kind.__name__ for kind in COMMANDS} & can.commands) - {"Abort"}
    schedules = "Schedule" in can.commands
    by_commands = kind_by_commands(can.commands)
    cases = {
        f"kind: {can.kind}: its commands are those of {by_commands.name}": (
            can.system_kind is not by_commands
        ),
        "commands: EvictSwa goes with swa=True": "EvictSwa" in can.commands and not can.swa,
        f"commands: {', '.join(sorted(trees))}: goes with tree=True": trees and not can.tree,
        "swa, full_only: one of them is True": not can.swa and not can.full_only,
        "tree, no_tree: one of them is True": not can.tree and not can.no_tree,
        "commands: Schedule goes with Add": schedules and "Add" not in can.commands,
        "commands: More and End go together": not can.sessions and {"More", "End"} & can.commands,
        f"commands: Schedule (it picks its batches) goes without {', '.join(sorted(row_commands))}": (
            schedules and row_commands
        ),
    }
    return next((words for words, holds in cases.items() if holds), "")


def _copy_checked(subject: str, decoder: msgspec.msgpack.Decoder[Any], value: object) -> Any:
    try:
        return decoder.decode(_ENCODER.encode(value))
    except (TypeError, OverflowError, msgspec.ValidationError) as error:
        reason, _, path = (
            str(error).replace("`", "").replace("Expected", "expected").partition(" - at $")
        )
        raise WrongShape(f"{subject}{path}: {reason}") from None


def send(stream: IO[bytes], message: Any) -> None:
    """Write one message. Raises OSError when the reader has closed the stream."""
    body = _ENCODER.encode(message)
    stream.write(_HEADER.pack(len(body)) + body)
    stream.flush()


def receive(fd: int, look: Callable[[], None] | None = None) -> bytes | None:
    """Read one message's body; None at the end of the stream.

    look: called every LOOK_S seconds while nothing arrives; an exception of it ends the wait.
    Raises ValueError for a length above MAX_MESSAGE.
    """
    message = b""
    end = _HEADER.size
    while len(message) < end:
        while look is not None and not select.select([fd], [], [], LOOK_S)[0]:
            look()
        if not (part := os.read(fd, 1 << 20)):  # nobody sends a second message before an answer
            return None
        message += part
        if len(message) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(message)
            if length > MAX_MESSAGE:
                raise ValueError(f"a message of {length} bytes")
            end = _HEADER.size + length
    return message[_HEADER.size :]
