"""A worker of a vLLM release that launches each kernel twice: by impl.vllm.triton, and by Triton itself on
copies of all memory that the kernel reaches. Triton runs on a GPU, without one in its own interpreter. A
command breaks where the two leave different memory.

`python -m stateful_tests.tests.support.triton_beside ROOT COUNTS [--async]`; the file COUNTS gets how often
each kernel was launched.
"""

import inspect
import json
import logging
import os
import sys
from collections import Counter
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
os.environ |= {"TRITON_INTERPRET": "1"} if DEVICE == "cpu" else {}

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

import impl.vllm.triton as own  # noqa: E402
from impl.process.failures import SystemFailed  # noqa: E402
from impl.process.worker import serve  # noqa: E402
from impl.vllm.driver import EngineDriver  # noqa: E402

_INTEGERS = ("int32", "int64", "uint64", "uint8", "uint16", "uint32")
ANNOTATIONS = {getattr(own.Language, name): getattr(tl, name) for name in _INTEGERS}
ANNOTATIONS[own.Language.constexpr] = tl.constexpr
addressed: dict[int, torch.Tensor] = {}  # by data_ptr(): tensors of addresses name them
launches: Counter[str] = Counter()


class Copies:
    """Copies on the device of the memory behind tensors, and behind the addresses in them."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[str, torch.Tensor, torch.Tensor, list[Any]]] = {}

    def of(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Return the same tensor in the copy.

        name: for the report.
        """
        storage = tensor.untyped_storage()
        if (key := storage.data_ptr()) not in self._made:
            here = torch.empty(0, dtype=tensor.dtype).set_(storage)
            there = here.clone()
            moves = list[Any]()
            if tensor.dtype in (torch.int64, torch.uint64):
                words = there.view(torch.int64)
                for at, word in enumerate(words.tolist()):
                    if word in addressed:
                        behind = self.of(addressed[word], f"memory at an address in {name}")
                        words[at] = data_ptr(behind)
                        moves.append((at, word, data_ptr(behind)))
            self._made[key] = name, here, there.to(DEVICE), moves
        copy = torch.empty(0, dtype=tensor.dtype, device=DEVICE)
        there = self._made[key][2]
        place = tensor.storage_offset(), tensor.shape, tensor.stride()
        return copy.set_(there.untyped_storage(), *place)

    def compare(self, kernel: str) -> None:
        """Raises SystemFailed where a copy differs from what it was made of."""
        for name, here, there, moved in self._made.values():
            ours = here.numpy()
            real = there.cpu().numpy()
            for at, old, new in moved:
                if real[at] == new:  # else an output held an old address by chance
                    real[at] = old
            if differ := np.flatnonzero(ours != real).tolist():
                both = f"{ours[differ[0]]} by impl.vllm.triton, {real[differ[0]]} by Triton"
                raise SystemFailed(f"{kernel} leaves in {name} at {differ[0]}: {both}")


data_ptr = torch.Tensor.data_ptr


def _noted_address(tensor: torch.Tensor) -> int:
    if (address := data_ptr(tensor)) and tensor.device.type == "cpu":
        addressed[address] = tensor
    return address


class Beside(own.Kernel):
    """A kernel whose launches are compared."""

    known: dict[str, "Beside"] = {}  # noqa: RUF012
    _real: Any = None

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        self.known[function.__name__] = self

    def real(self) -> Any:
        """Return what `triton.jit` makes of the same function, with Triton and real kernels in its
        globals."""
        if self._real is None:
            function = self._function
            scope = {**vars(sys.modules[function.__module__]), "triton": triton, "tl": tl}
            twin = FunctionType(function.__code__, scope, function.__name__, function.__defaults__)
            twin.__annotations__ = {
                name: ANNOTATIONS[kind] for name, kind in function.__annotations__.items()
            }
            twin.__module__ = function.__module__
            twin.__qualname__ = function.__qualname__
            self._real = triton.jit(twin)
            scope |= {name: self.known[name].real() for name in scope if name in self.known}
        return self._real

    def _launch(self, grid: tuple[int, ...], *given: Any, **constants: Any) -> None:
        kernel = self._function.__name__
        copies = Copies()
        names = inspect.signature(self._function).parameters
        twins = [
            copies.of(each, name) if isinstance(each, torch.Tensor) else each
            for name, each in zip(names, given)
        ]
        super()._launch(grid, *given, **constants)
        try:
            self.real()[grid](*twins, **constants)
            if DEVICE == "cuda":
                torch.cuda.synchronize()
        except Exception as error:
            raise SystemFailed(f"{kernel} fails in Triton: {error!r}") from error
        copies.compare(kernel)
        launches[kernel] += 1


class Driver(EngineDriver):
    def reset(self, geometry: Any) -> None:
        addressed.clear()
        super().reset(geometry)

    def close(self) -> None:
        Path(sys.argv[2]).write_text(json.dumps(launches))


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    own.Kernel, torch.Tensor.data_ptr = Beside, _noted_address  # type: ignore
    root = Path(sys.argv[1])
    sys.exit(serve(lambda: Driver(root, "--async" in sys.argv, v2=True), root))
