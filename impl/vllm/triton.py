"""A stand-in for Triton that runs small kernels on the CPU, one program after the other.

It has the operations of kernels that update lengths, tokens, slots and block tables. The mask of a scalar
access is respected too.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from impl.process.failures import SystemFailed

_programs: list[tuple[tuple[int, ...], tuple[int, ...]]] = []  # (program id, grid) of the running kernels


class _Scalar(int):
    """A number that a kernel has loaded or computed. `to` with a pointer type converts it from an address."""

    def to(self, kind: Any) -> Any:
        if not isinstance(kind, _PointerType):
            return self
        return _Pointer(_array_at(self, kind.element))

    def __add__(self, other: Any) -> Any:
        return _scalar(int(self) + other)

    def __sub__(self, other: Any) -> Any:
        return _scalar(int(self) - other)

    def __mul__(self, other: Any) -> Any:
        return _scalar(int(self) * other)

    def __floordiv__(self, other: Any) -> Any:
        return _scalar(int(self) // other)

    def __neg__(self) -> Any:
        return _scalar(-int(self))

    __radd__ = __add__
    __rmul__ = __mul__


def _scalar(value: Any) -> Any:
    return _Scalar(value) if type(value) is int else value


class _LaneArray(np.ndarray[Any, Any]):
    """One number for each lane of a program. `to` with a pointer type converts them from addresses."""

    def to(self, kind: Any) -> Any:
        if not isinstance(kind, _PointerType):
            return self
        minimum = int(self.min())
        offsets = (self - minimum) // ctypes.sizeof(kind.element)
        return _Pointer(_array_at(minimum, kind.element), offsets)


class _PointerType:
    """The result of `pointer_type`.

    element: the ctypes type to which it points.
    """

    def __init__(self, element: Any) -> None:
        self.element = element


def _array_at(address: int, element: Any) -> Any:
    """Return the memory from an address on as an array that is longer than the accesses of any kernel."""
    return np.ctypeslib.as_array((element * (1 << 20)).from_address(int(address)))


class _Pointer:
    """A pointer to an element of an array, or to one for each lane.

    element_index: the index of the element, or an array of indices, one for each lane.
    """

    def __init__(self, array: Any, element_index: Any = 0) -> None:
        self.array = array
        self.element_index = element_index

    def __add__(self, more: Any) -> _Pointer:
        return _Pointer(self.array, self.element_index + more)

    def __sub__(self, less: Any) -> _Pointer:
        return _Pointer(self.array, self.element_index - less)


def _memory(tensor: torch.Tensor) -> Any:
    """Return the memory of a tensor from its first to its last element as a flat array, with the gaps of
    its strides."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    length = last + 1 if tensor.numel() else 0
    return tensor.as_strided((length,), (1,)).numpy()


def _not_negative(offsets: Any) -> Any:
    """Return the offsets. Raises IndexError for a negative offset, which NumPy would count from the end."""
    if np.any(offsets < 0):
        raise IndexError(f"index {np.min(offsets)} is before the first")
    return offsets


class Kernel:
    """The result of `triton.jit` for a function: called by other kernels, or launched on a grid."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *given: Any, **constants: Any) -> None:
        constants.pop("num_warps", None)
        arguments = [
            _Pointer(_memory(each)) if isinstance(each, torch.Tensor) else each for each in given
        ]
        for program in itertools.product(*map(range, grid)):
            _programs.append((program, grid))
            try:
                self._function(*arguments, **constants)
            except IndexError as error:
                raise SystemFailed(
                    f"illegal memory access in {self._function.__name__}: {error}"
                ) from error
            finally:
                _programs.pop()


class Triton:
    """A stand-in for the module `triton`."""

    @staticmethod
    def jit(function: Any = None, **_: Any) -> Any:
        return Kernel if function is None else Kernel(function)

    @staticmethod
    def cdiv(a: int, b: int) -> int:
        return -(-a // b)

    @staticmethod
    def next_power_of_2(number: int) -> int:
        return int(1 << (number - 1).bit_length())


class Language:
    """A stand-in for the module `triton.language`."""

    constexpr = None
    int32 = ctypes.c_int32
    int64 = ctypes.c_int64
    uint64 = ctypes.c_uint64
    uint8 = ctypes.c_uint8
    uint16 = ctypes.c_uint16
    uint32 = ctypes.c_uint32
    where = np.where
    maximum = np.maximum
    minimum = np.minimum
    sum = np.sum
    max = np.max
    range = range

    @staticmethod
    def arange(first: int, end: int) -> _LaneArray:
        return np.arange(first, end).view(_LaneArray)

    @staticmethod
    def full(shape: tuple[()], value: int, dtype: Any) -> _Scalar:
        del shape, dtype
        return _Scalar(value)

    @staticmethod
    def program_id(axis: int) -> int:
        program, _ = _programs[-1]
        return _Scalar(program[axis] if axis < len(program) else 0)

    @staticmethod
    def num_programs(axis: int) -> int:
        _, grid = _programs[-1]
        return grid[axis]

    @staticmethod
    def load(pointer: _Pointer, mask: Any = None, other: Any = 0) -> Any:
        offsets = pointer.element_index
        if not isinstance(offsets, np.ndarray):
            is_active = mask is None or mask
            return _Scalar(pointer.array[_not_negative(offsets)] if is_active else other)
        if mask is None:
            return pointer.array[_not_negative(offsets)]
        active = np.broadcast_to(mask, offsets.shape)
        values = np.full(offsets.shape, other, pointer.array.dtype)
        values[active] = pointer.array[_not_negative(offsets[active])]
        return values

    @staticmethod
    def store(pointer: _Pointer, value: Any, mask: Any = None) -> None:
        offsets = pointer.element_index
        if mask is None or not isinstance(offsets, np.ndarray):
            if mask is None or mask:
                pointer.array[_not_negative(offsets)] = value
            return
        active = np.broadcast_to(mask, offsets.shape)
        values = np.broadcast_to(value, offsets.shape)
        pointer.array[_not_negative(offsets[active])] = values[active]

    @staticmethod
    def pointer_type(kind: Any) -> Any:
        return _PointerType(kind)

    @staticmethod
    def cast(address: int, kind: Any) -> _Pointer:
        return _Pointer(_array_at(address, kind.element))

    @staticmethod
    def multiple_of(pointer: _Pointer, _: int) -> _Pointer:
        return pointer
