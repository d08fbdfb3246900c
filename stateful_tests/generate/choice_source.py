"""Who decides: one interface for a plain random source (volume) and Hypothesis (shrinking, database)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")


class ChoiceSource(Protocol):
    """A source of decisions."""

    def upto(self, high: int) -> int:
        """A whole number in [0, high]."""
        ...


class RandomChoices:
    """Decisions from a seeded random source."""

    def __init__(self, seed: int | str) -> None:
        self._random = random.Random(seed).random

    def upto(self, high: int) -> int:
        return int(self._random() * (high + 1))


def pick(source: ChoiceSource, items: Sequence[T]) -> T:
    """One of `items`."""
    return items[source.upto(len(items) - 1)]


def once_in(source: ChoiceSource, n: int) -> bool:
    """True once in `n` times."""
    return source.upto(n - 1) == n - 1
