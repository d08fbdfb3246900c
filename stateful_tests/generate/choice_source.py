"""Who decides: a seeded random source. Under Hypothesis its seed is drawn."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class RandomChoices:
    """Decisions from a seeded random source."""

    def __init__(self, seed: int | str) -> None:
        self._random = random.Random(seed).random

    def upto(self, high: int) -> int:
        """A whole number in [0, high]."""
        return int(self._random() * (high + 1))


def pick(source: RandomChoices, items: Sequence[T]) -> T:
    """One of `items`."""
    return items[source.upto(len(items) - 1)]


def once_in(source: RandomChoices, n: int) -> bool:
    """True once in `n` times."""
    return source.upto(n - 1) == n - 1
