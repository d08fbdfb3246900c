"""As much of Triton as small kernels need that keep lengths, tokens, slots and block tables: a program at a
time, on the CPU. A mask of a scalar access is respected too."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from impl.process.failures import SystemFailed

_programs: list[tuple[tuple[int, ...], tuple[int, ...]]] = []  # which one runs, of how many


class _Scalar(int):
    """A number that a kernel has loaded or computed; as an address it becomes a pointer."""

    def to(self, kind: Any) -> Any:
        return _Pointer(_at_address(self, kind.of)) if isinstance(kind, _PointerType) else self

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

    __radd__, __rmul__ = __add__, __mul__


def _scalar(value: Any) -> Any:
    return _Scalar(value) if type(value) is int else value


class _Numbers(np.ndarray[Any, Any]):
    """Numbers of the lanes of a program; as addresses they become a pointer of as many places."""

    def to(self, kind: Any) -> Any:
        if not isinstance(kind, _PointerType):
            return self
        first = int(self.min())
        return _Pointer(_at_address(first, kind.of), (self - first) // ctypes.sizeof(kind.of))


class _PointerType:
    """`pointer_type`: of what."""

    def __init__(self, of: Any) -> None:
        self.of = of


def _at_address(address: int, kind: Any) -> Any:
    """Memory from an address on, as far as a kernel may go."""
    return np.ctypeslib.as_array((kind * (1 << 20)).from_address(int(address)))


class _Pointer:
    """A place in an array, or as many as `at` has."""

    def __init__(self, array: Any, at: Any = 0) -> None:
        self.array, self.at = array, at

    def __add__(self, more: Any) -> _Pointer:
        return _Pointer(self.array, self.at + more)

    def __sub__(self, less: Any) -> _Pointer:
        return _Pointer(self.array, self.at - less)


def _memory(tensor: torch.Tensor) -> Any:
    """From its first element to its last one, strides and all: what a kernel has is an address."""
    far = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.as_strided((far + 1 if tensor.numel() else 0,), (1,)).numpy()


def _inside(at: Any) -> Any:
    """Places that do not lie before the first, as NumPy would take them from the end."""
    if np.any(at < 0):
        raise IndexError(f"index {np.min(at)} is before the first")
    return at


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
    """`triton`."""

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
    """`triton.language`."""

    constexpr = None
    int32, int64, uint64 = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64
    uint8, uint16, uint32 = ctypes.c_uint8, ctypes.c_uint16, ctypes.c_uint32
    where, maximum, minimum, sum = np.where, np.maximum, np.minimum, np.sum
    range = range

    @staticmethod
    def arange(first: int, end: int) -> _Numbers:
        return np.arange(first, end).view(_Numbers)

    @staticmethod
    def program_id(axis: int) -> int:
        at = _programs[-1][0]
        return _Scalar(at[axis] if axis < len(at) else 0)

    @staticmethod
    def num_programs(axis: int) -> int:
        return _programs[-1][1][axis]

    @staticmethod
    def load(pointer: _Pointer, mask: Any = None, other: Any = 0) -> Any:
        at = pointer.at
        if not isinstance(at, np.ndarray):
            return _Scalar(pointer.array[_inside(at)] if mask is None or mask else other)
        if mask is None:
            return pointer.array[_inside(at)]
        active = np.broadcast_to(mask, at.shape)
        found = np.full(at.shape, other, pointer.array.dtype)
        found[active] = pointer.array[_inside(at[active])]
        return found

    @staticmethod
    def store(pointer: _Pointer, value: Any, mask: Any = None) -> None:
        at = pointer.at
        if mask is None or not isinstance(at, np.ndarray):
            if mask is None or mask:
                pointer.array[_inside(at)] = value
            return
        active = np.broadcast_to(mask, at.shape)
        pointer.array[_inside(at[active])] = np.broadcast_to(value, at.shape)[active]

    @staticmethod
    def pointer_type(kind: Any) -> Any:
        return _PointerType(kind)

    @staticmethod
    def cast(address: int, kind: Any) -> _Pointer:
        return _Pointer(_at_address(address, kind.of))

    @staticmethod
    def multiple_of(pointer: _Pointer, _: int) -> _Pointer:
        return pointer
