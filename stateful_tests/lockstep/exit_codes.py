"""The endings of a kvspec command: exit codes, and their words in reports."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum


class Ending(IntEnum):
    """The end of a command. The value is its exit code."""

    CONFORMS = 0
    """Nothing new was found by all that was planned."""
    VIOLATED = 1
    """A clause is violated."""
    UNUSABLE = 2
    """What the command line names cannot be used."""
    BROKE = 3
    """The system broke, or kvspec did."""
    INCOMPLETE = 4
    """Nothing was found, and some of what was planned was not driven or judged."""
    INTERRUPTED = 130
    """Nothing was found until an interrupt, as shells number it."""

    @property
    def word(self) -> str:
        """The word in reports."""
        return self.name.lower()


# The gravest first.
_BY_GRAVITY = (
    Ending.BROKE,
    Ending.VIOLATED,
    Ending.UNUSABLE,
    Ending.INTERRUPTED,
    Ending.INCOMPLETE,
    Ending.CONFORMS,
)


def gravest(endings: Iterable[int]) -> Ending:
    """Return the ending of several runs together: a finding is graver than work that was not driven."""
    return min(map(Ending, endings), key=_BY_GRAVITY.index)


def ending(
    *,
    broke: bool = False,
    violated: bool = False,
    interrupted: bool = False,
    incomplete: bool = False,
) -> Ending:
    """Return the gravest ending whose condition holds; CONFORMS where none does."""
    conditions = {
        Ending.BROKE: broke,
        Ending.VIOLATED: violated,
        Ending.INTERRUPTED: interrupted,
        Ending.INCOMPLETE: incomplete,
    }
    return gravest([Ending.CONFORMS, *(each for each, holds in conditions.items() if holds)])
