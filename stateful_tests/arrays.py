"""The few functions on columns that the fast search needs, by numpy, or by torch on a device."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np


class NumpyArrays:
    """Columns of numpy: lengths in 16 bits, numbers in tables of hashes in 32, keys in 64."""

    name = "numpy"
    small: Any = np.int16
    large: Any = np.int64
    table: Any = np.int32
    chunk = 1 << 16  # states that are expanded together: more are slower, caches do not hold them

    def __init__(self) -> None:
        self.how: dict[str, Callable[[Any, Any], Any]] = {
            "+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv,
            "%": lambda one, two: one - one // two * two,  # numpy has vector instructions for these alone
            "<": operator.lt, "==": operator.eq, "min": np.minimum, "max": np.maximum,
        }  # fmt: skip

    def column(self, values: list[int]) -> Any:
        return np.array(values, dtype=self.large)

    def full(self, size: int, number: int) -> Any:
        return np.full(size, number, dtype=self.large)

    def arange(self, size: int) -> Any:
        return np.arange(size)

    def from_bytes(self, data: bytes) -> Any:
        return np.frombuffer(data, dtype=np.int64).copy()

    def to_bytes(self, column: Any) -> bytes:
        return bytes(column.tobytes())

    def number(self, value: int) -> Any:
        """One number for all rows."""
        return np.array(value, dtype=self.small)  # numpy is faster on this than on an int

    def truth(self, column: Any) -> Any:
        """Where a column is not 0."""
        return column.astype(bool, copy=False)

    def count(self, holds: Any) -> int:
        """In how many places it holds."""
        return int(np.count_nonzero(holds))

    def cast(self, column: Any, kind: Any) -> Any:
        return column.astype(kind)

    def nonzero(self, holds: Any) -> Any:
        """Places where it holds."""
        return holds.nonzero()[0]

    def any(self, column: Any) -> bool:
        return bool(column.any())

    def maximum(self, one: Any, two: Any) -> Any:
        return self.how["max"](one, two)

    def minimum(self, one: Any, two: Any) -> Any:
        return self.how["min"](one, two)

    def cat(self, columns: list[Any]) -> Any:
        return np.concatenate(columns)

    def repeat(self, values: Any, counts: Any) -> Any:
        """Each value as often as its count says."""
        return np.repeat(values, counts)

    def cumsum(self, counts: Any) -> Any:
        return np.cumsum(counts)

    def counts(self, numbers: Any, size: int) -> Any:
        """How often each of 0 .. size - 1 is there."""
        return np.bincount(numbers, minlength=size)

    def unique(self, column: Any) -> Any:
        """The values, sorted."""
        column = np.sort(column)
        return column[self.firsts(column)]

    # By the functions above.

    def firsts(self, *columns: Any) -> Any:
        """The places of rows that are not as the one before."""
        differs = self.full(len(columns[0]), 1) != 0
        differs[1:] = columns[0][1:] != columns[0][:-1]
        for column in columns[1:]:
            differs[1:] |= column[1:] != column[:-1]
        return self.nonzero(differs)

    def spread(self, start: Any, stop: Any, size: int) -> tuple[Any, Any]:
        """For each row and each number in [start, stop): (the row, the number)."""
        none = self.full(size, 0)
        counts = self.maximum(none + stop - start, none)
        index = self.repeat(self.arange(size), counts)
        numbers = self.arange(len(index)) + (none + start - self.cumsum(counts) + counts)[index]
        return index, self.cast(numbers, self.small)


class TorchArrays(NumpyArrays):
    """The same by torch. Raises RuntimeError where the device is not there."""

    chunk = 1 << 20

    def __init__(self, device: str) -> None:
        import torch

        self.torch, self.device = torch, device
        self.name = f"torch on {device}"
        self.small, self.table, self.large = torch.int16, torch.int32, torch.int64
        if device != "cpu" and not torch.cuda.is_available():
            raise RuntimeError("torch finds no CUDA device")

        def extreme(tensors: Callable[[Any, Any], Any], bound: str) -> Callable[[Any, Any], Any]:
            def function(one: Any, two: Any) -> Any:
                if isinstance(one, int):
                    one, two = two, one
                return one.clamp(**{bound: two}) if isinstance(two, int) else tensors(one, two)

            return function

        super().__init__()
        self.how |= {
            "<": lambda one, two: (one < two).to(torch.int8),  # truth values that can be counted with
            "==": lambda one, two: (one == two).to(torch.int8),
            "min": extreme(torch.minimum, "max"),
            "max": extreme(torch.maximum, "min"),
        }

    def column(self, values: list[int]) -> Any:
        return self.torch.tensor(values, dtype=self.large, device=self.device)

    def full(self, size: int, number: int) -> Any:
        return self.torch.full((size,), number, dtype=self.large, device=self.device)

    def arange(self, size: int) -> Any:
        return self.torch.arange(size, device=self.device)

    def from_bytes(self, data: bytes) -> Any:
        return self.torch.from_numpy(super().from_bytes(data)).to(self.device)

    def to_bytes(self, column: Any) -> bytes:
        return super().to_bytes(column.cpu().numpy())

    def number(self, value: int) -> Any:
        return value

    def truth(self, column: Any) -> Any:
        return column.bool()

    def count(self, holds: Any) -> int:
        return int(holds.count_nonzero())

    def cast(self, column: Any, kind: Any) -> Any:
        return column.to(kind)

    def nonzero(self, holds: Any) -> Any:
        return holds.nonzero(as_tuple=True)[0]

    def cat(self, columns: list[Any]) -> Any:
        return self.torch.cat(columns)

    def repeat(self, values: Any, counts: Any) -> Any:
        return self.torch.repeat_interleave(values, counts)

    def cumsum(self, counts: Any) -> Any:
        return self.torch.cumsum(counts, 0)

    def counts(self, numbers: Any, size: int) -> Any:
        return self.torch.bincount(numbers, minlength=size)

    def unique(self, column: Any) -> Any:
        return self.torch.unique(column)


def arrays_on(device: str) -> NumpyArrays:
    """numpy for "cpu", torch for another device. Raises RuntimeError where it is not there."""
    return NumpyArrays() if device == "cpu" else TorchArrays(device)
