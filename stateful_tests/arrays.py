"""The few functions on columns that the fast search needs, by numpy or by torch on a device."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np


class NumpyArrays:
    """Columns of numpy: lengths in 16 bits, keys in 64."""

    name = "numpy"
    small: Any = np.int16
    large: Any = np.int64
    chunk = 1 << 15  # states that are expanded together: what a cache holds

    def __init__(self) -> None:
        self.how: dict[str, Callable[[Any, Any], Any]] = {
            "+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv,
            "%": operator.mod, "<": operator.lt, "==": operator.eq, "min": np.minimum, "max": np.maximum,
        }  # fmt: skip

    def column(self, values: Any, kind: Any = None) -> Any:
        return np.asarray(values, dtype=kind or self.large)

    def to_bytes(self, column: Any) -> bytes:
        return bytes(column.tobytes())

    def from_bytes(self, data: bytes) -> Any:
        return np.frombuffer(data, dtype=self.large).copy()

    def cast(self, column: Any, kind: Any) -> Any:
        return column.astype(kind)

    def arange(self, size: int) -> Any:
        return np.arange(size)

    def full(self, size: int, number: int) -> Any:
        return np.full(size, number, dtype=self.large)

    def nonzero(self, holds: Any) -> Any:
        return np.flatnonzero(holds)

    def maximum(self, one: Any, two: Any) -> Any:
        return np.maximum(one, two)

    def minimum(self, one: Any, two: Any) -> Any:
        return np.minimum(one, two)

    def cat(self, columns: list[Any]) -> Any:
        return np.concatenate(columns) if len(columns) > 1 else columns[0]

    def repeat(self, values: Any, counts: Any) -> Any:
        return np.repeat(values, counts)

    def cumsum(self, counts: Any) -> Any:
        return np.cumsum(counts)

    def counts(self, numbers: Any, size: int, weights: Any = None) -> Any:
        """How often each of 0 .. size - 1 is there."""
        return np.bincount(numbers, weights, minlength=size).astype(self.large)

    def order(self, column: Any) -> Any:
        return np.argsort(column, kind="stable")

    def sorted(self, column: Any) -> Any:
        return np.sort(column)

    def inserted(self, known: Any, at: Any, new: Any) -> Any:
        """A column with `new` put before the places `at`, which are in order."""
        return np.insert(known, at, new)

    def unique(self, column: Any) -> Any:
        column = np.sort(column)
        if not len(column):
            return column
        return column[np.concatenate(([True], column[1:] != column[:-1]))]

    def unique_of(self, column: Any) -> tuple[Any, Any]:
        """The values, and the place of each element among them."""
        return np.unique(column, return_inverse=True)

    def places(self, known: Any, column: Any) -> tuple[Any, Any]:
        """Where each element is, or would be, in a sorted column; whether it is there."""
        if not len(known):
            return np.zeros(len(column), dtype=np.int64), np.zeros(len(column), dtype=bool)
        at = np.minimum(np.searchsorted(known, column), len(known) - 1)
        return at, known[at] == column

    def above(self, known: Any, column: Any) -> Any:
        """Before which place of a sorted column each element goes."""
        return np.searchsorted(known, column)

    def any(self, column: Any) -> bool:
        return bool(np.any(column))

    def spread(self, start: Any, stop: Any, size: int) -> tuple[Any, Any]:
        """For each row and each number in [start, stop): (the row, the number)."""
        counts = self.maximum(stop - start, 0)
        if isinstance(counts, int) or not counts.shape:
            counts = self.full(size, int(counts))
        counts = self.cast(counts, self.large)
        index = self.repeat(self.arange(size), counts)
        numbers = self.arange(len(index)) - self.repeat(self.cumsum(counts) - counts, counts)
        lowest = start if isinstance(start, int) else start[index]
        return index, self.cast(numbers + lowest, self.small)
