"""How the driver refuses: a release refuses nothing by itself, so the rules are looked at first."""

from __future__ import annotations

from impl import vocabulary
from reference.commands import Prompt, Reason


class CommandRefused(Exception):
    """Internal: the command is refused for this reason; nothing was touched."""

    def __init__(self, reason: Reason) -> None:
        self.reason = reason


def require(condition: object, reason: Reason) -> None:
    """Refuse unless `condition` holds."""
    if not condition:
        raise CommandRefused(reason)


def spelled(prompt: Prompt, start: int = 0) -> list[int]:
    """The tokens of `prompt` where it begins at position `start`. Refuses one that is none (EMPTY)."""
    require(vocabulary.well_formed(prompt), Reason.EMPTY)
    return vocabulary.spelled(prompt, start)
