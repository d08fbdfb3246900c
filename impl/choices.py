"""Sources of random decisions: one interface, which three classes implement.

RandomChoices, for volume: a seeded random source. KeyedChoices, for the played parts of a server: a decision
depends on its subject alone. DrawnChoices (stateful_tests/machines/drawing.py): draws of
Hypothesis. Low numbers are the plain ones, so that Hypothesis shrinks towards plain commands.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Protocol, TypeVar

T = TypeVar("T")
_64_BITS = (1 << 64) - 1


class Choices(Protocol):
    """Makes every random decision."""

    def upto(self, high: int) -> int:
        """Return a whole number in [0, high]; 0 where `high` is -1."""


class RandomChoices:
    """Decisions from a seeded random source."""

    def __init__(self, seed: int | str) -> None:
        self._random = random.Random(seed).random

    def upto(self, high: int) -> int:
        return int(self._random() * (high + 1))


class KeyedChoices:
    """Decisions that follow from numbers: a seed, and what is decided, such as a request and a position.

    The same numbers give the same decisions, whatever was decided before.
    """

    def __init__(self, *numbers: int) -> None:
        self._state = 0x9E3779B97F4A7C15
        for number in numbers:
            self._mix(number)

    def _mix(self, number: int) -> None:
        """Take a number into the state: one round of splitmix64."""
        value = ((self._state ^ number) * 0xBF58476D1CE4E5B9) & _64_BITS
        self._state = value ^ (value >> 31)

    def upto(self, high: int) -> int:
        number = self._state
        self._mix(0)
        return number % (high + 1) if high > 0 else 0


def pick(choices: Choices, items: Sequence[T]) -> T:
    """Return one of `items`, each as likely as another."""
    return items[choices.upto(len(items) - 1)]


def once_in(choices: Choices, n: int) -> bool:
    """Return True once in `n` times."""
    return choices.upto(n - 1) == n - 1


def chance(choices: Choices, percent: int) -> bool:
    """Return True in `percent` of a hundred cases."""
    return choices.upto(99) >= 100 - percent


def between(choices: Choices, low: int, high: int) -> int:
    """Return a whole number in [low, high]."""
    return low + choices.upto(high - low)


def weight_if(condition: object, weight: int) -> int:
    """Return `weight` where the condition holds, else 0."""
    return weight if condition else 0


def by_weight(choices: Choices, weights: Mapping[T, int]) -> T | None:
    """Return a key, as likely as its share of the weights; None where all are 0."""
    point = choices.upto(max(0, sum(weights.values()) - 1))
    return next((key for key, end in zip(weights, accumulate(weights.values())) if point < end), None)
