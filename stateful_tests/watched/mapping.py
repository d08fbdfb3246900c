"""The mapping of a log: each kind of event is one guarded action beside the reference.

The guard must hold, the commands are carried out on the reference, and what the event shows is compared with
it. The rows of TABLE stand with the functions that do this, in `turns`, `prefill`, `rounds`, `ends`, `steps`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from stateful_tests.watched.beside import Beside

E = TypeVar("E")
Action = Callable[["Beside", E], None]


@dataclass(frozen=True, slots=True)
class Mapping:
    """One row: what must hold before, the commands, what is compared besides their outcome."""

    event: type
    guard: str
    commands: str
    compared: str
    act: Action[Any]


TABLE: dict[type, Mapping] = {}


def action(
    event: type[E], *, guard: str = "", commands: str = "", compared: str = ""
) -> Callable[[Action[E]], Action[E]]:
    """Register the decorated function as the action of this kind of event."""

    def add(act: Action[E]) -> Action[E]:
        TABLE[event] = Mapping(event, guard, commands, compared, act)
        return act

    return add


def mapping_row(mapping: Mapping) -> dict[str, str]:
    """A row of the table, in words."""
    event = str(mapping.event.__struct_config__.tag)  # type: ignore[attr-defined]
    return {
        "event": event, "guard": mapping.guard, "commands": mapping.commands, "compared": mapping.compared,
    }  # fmt: skip
