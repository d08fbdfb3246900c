"""The table: how each kind of event is read. Each row stands with the method that does it, in `validator`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar


@dataclass(frozen=True, slots=True)
class Mapping:
    """How one kind of event is read: the commands it becomes, and what is judged besides their outcome."""

    event: type
    commands: str
    judged: str
    read: Callable[[Any, Any], None]


TABLE: dict[type, Mapping] = {}
Reader = TypeVar("Reader")


Read = Callable[[Reader, Any], None]


def reads(event: type, commands: str, judged: str) -> Callable[[Read[Reader]], Read[Reader]]:
    """Register the decorated method as what reads this kind of event."""

    def add(read: Read[Reader]) -> Read[Reader]:
        TABLE[event] = Mapping(event, commands, judged, read)
        return read

    return add


def mapping_row(mapping: Mapping) -> dict[str, str]:
    """A row of the table, in words."""
    event = str(mapping.event.__struct_config__.tag)  # type: ignore[attr-defined]
    return {"event": event, "commands": mapping.commands, "judged": mapping.judged}
