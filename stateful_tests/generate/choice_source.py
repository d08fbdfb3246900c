"""Who decides while a command is drawn: one interface, which two classes implement.

RandomChoices, for volume: a seeded random source. DrawnChoices (stateful_tests/machines/drawing.py): draws of
Hypothesis. Low numbers are the plain ones, so that Hypothesis shrinks towards plain commands.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")


class Choices(Protocol):
    """Makes every decision of the generators."""

    def upto(self, high: int) -> int:
        """A whole number in [0, high]; 0 where `high` is -1."""


class RandomChoices:
    """Decisions from a seeded random source."""

    def __init__(self, seed: int | str) -> None:
        self._random = random.Random(seed).random

    def upto(self, high: int) -> int:
        return int(self._random() * (high + 1))


def pick(choices: Choices, items: Sequence[T]) -> T:
    """One of `items`."""
    return items[choices.upto(len(items) - 1)]


def once_in(choices: Choices, n: int) -> bool:
    """True once in `n` times."""
    return choices.upto(n - 1) == n - 1
