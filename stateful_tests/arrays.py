"""The few functions on columns that the fast search needs, by numpy, or by torch on a device."""

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

    def order(self, column: Any) -> Any:
        """Places of the elements from the least to the greatest; equal ones stay in order."""
        return np.argsort(column, kind="stable")

    def sorted(self, column: Any) -> Any:
        return np.sort(column)

    def unique(self, column: Any) -> Any:
        """The values, sorted."""
        column = np.sort(column)
        return column[np.concatenate((column[:1] == column[:1], column[1:] != column[:-1]))]

    def unique_of(self, column: Any) -> tuple[Any, Any]:
        """The values, sorted, and the place of each element among them."""
        return np.unique(column, return_inverse=True)

    def above(self, known: Any, column: Any) -> Any:
        """Before which place of a sorted column each element goes."""
        return np.searchsorted(known, column)

    def inserted(self, known: Any, at: Any, new: Any) -> Any:
        """A column with `new` put before the places `at`, which are in order."""
        return np.insert(known, at, new)

    # By the functions above.

    def places(self, known: Any, column: Any) -> tuple[Any, Any]:
        """Where each element is, or would be, in a sorted column; whether it is there."""
        if not len(known):
            return self.full(len(column), 0), self.full(len(column), 0) != 0
        at = self.minimum(self.above(known, column), self.full(1, len(known) - 1))
        return at, known[at] == column

    def spread(self, start: Any, stop: Any, size: int) -> tuple[Any, Any]:
        """For each row and each number in [start, stop): (the row, the number)."""
        counts = self.full(size, 0) + stop - start
        counts = self.maximum(counts, self.full(1, 0))
        index = self.repeat(self.arange(size), counts)
        numbers = self.arange(len(index)) - self.repeat(self.cumsum(counts) - counts, counts)
        return index, self.cast(numbers + (start if isinstance(start, int) else start[index]), self.small)


class TorchArrays(NumpyArrays):
    """The same by torch. Raises RuntimeError where the device is not there."""

    chunk = 1 << 20

    def __init__(self, device: str) -> None:
        import torch

        self.torch, self.device = torch, device
        self.name = f"torch on {device}"
        self.small, self.large = torch.int16, torch.int64
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

    def order(self, column: Any) -> Any:
        return self.torch.sort(column, stable=True).indices

    def sorted(self, column: Any) -> Any:
        return self.torch.sort(column).values

    def unique(self, column: Any) -> Any:
        return self.torch.unique(column)

    def unique_of(self, column: Any) -> tuple[Any, Any]:
        values, inverse = self.torch.unique(column, return_inverse=True)
        return values, inverse

    def above(self, known: Any, column: Any) -> Any:
        return self.torch.searchsorted(known, column)

    def inserted(self, known: Any, at: Any, new: Any) -> Any:
        places = at + self.arange(len(new))
        made = self.full(len(known) + len(new), 0)
        old = made == 0
        old[places] = False
        made[places], made[old] = new, known
        return made


def arrays_on(device: str) -> NumpyArrays:
    """numpy for "cpu", torch for another device. Raises RuntimeError where it is not there."""
    return NumpyArrays() if device == "cpu" else TorchArrays(device)
