"""Lines of a log by their running numbers: which are lost, stand twice, or stand in another place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from impl.sglang.server.events import Event

HELD = 64  # lines behind a missing one that are waited with: it may stand a little later


class Line(NamedTuple):
    """One line of a log: its file and number, and its event.

    lost: lines that are missing before it.
    """

    file: str
    number: int
    event: Event
    lost: int = 0


class LineOrder:
    """Puts lines in the order of their numbers.

    lost: numbers that no line has.
    repeated: lines whose number came before.
    moved: lines behind one with a higher number.
    """

    def __init__(self, first: int | None) -> None:
        """Begin at the first line.

        first: its number; None where the log goes on from a part that is not there.
        """
        self._next = first
        self._held_lines: dict[int, Line] = {}
        self.lost = self.repeated = self.moved = 0

    def in_order(self, lines: Iterable[tuple[int, Line]]) -> Iterator[Line]:
        """Yield the lines, each once, in order. Each has the number of lines that are lost before it."""
        for number, line in lines:
            if self._next is None:
                self._next = number
            if number < self._next or number in self._held_lines:
                self.repeated += 1
                continue
            if self._held_lines and number < max(self._held_lines):
                self.moved += 1
            self._held_lines[number] = line
            yield from self._release_lines(HELD)
        yield from self._release_lines(0)

    def _release_lines(self, most: int) -> Iterator[Line]:
        """Yield the lines that are next in order; where more than `most` wait, also those behind a gap."""
        while self._held_lines:
            number = min(self._held_lines)
            lost = number - (self._next or number)
            if lost and len(self._held_lines) <= most:
                return
            self.lost += lost
            self._next = number + 1
            yield self._held_lines.pop(number)._replace(lost=lost)
