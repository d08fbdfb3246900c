"""A device that is not the host, in the host's memory: `--device counting` asks of TorchKV what a GPU would.

Its tensors do not mix with those of the CPU, and what a fresh one holds is arbitrary. It counts operators,
transfers to it, and waits: reads of a value, and operators whose result has a size that is only known there.
Not modelled: for a large transfer out of memory that is not pinned, CUDA waits as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.library import Library
from torch.utils._pytree import tree_leaves, tree_map_only

from impl.adapter import UnusableImplementation
from impl.torch_kv.system import TorchKV
from reference.commands import CheckBusy, CheckIdle, Command, Outcome

NAME = "counting"
MAY_WAIT = {CheckBusy: 1, CheckIdle: 1}  # how often a command may; the others never
_HOST = torch.device("cpu")
_BY_VALUE = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
_registered: list[Library] = []  # its kernels go when a library does


class DeviceMixError(RuntimeError):
    """An operator was given tensors of the device and of the CPU."""


class HostWaitError(RuntimeError):
    """A command waited for the device, which it may not, or more often than it may."""


@dataclass
class Counts:
    """Counts of the device's work.

    operators: by name.
    elements: how many they produced or wrote; views cost nothing.
    transfers: to the device.
    waits: by which operators.
    may_wait: how often, or HostWaitError.
    """

    operators: Counter[str] = field(default_factory=Counter)
    elements: int = 0
    transfers: int = 0
    waits: list[str] = field(default_factory=list)
    may_wait: float = float("inf")

    def wait(self, operator: str) -> None:
        self.waits.append(operator)
        if len(self.waits) > self.may_wait:
            raise HostWaitError(f"{operator} waits for the device")


_counts = [Counts()]


@contextmanager
def counting(may_wait: float = float("inf")) -> Iterator[Counts]:
    """Count what happens inside."""
    _counts.append(Counts(may_wait=may_wait))
    try:
        yield _counts[-1]
    finally:
        _counts.pop()


class DeviceTensor(torch.Tensor):
    """A tensor on the device.

    held: the same on the CPU.
    """

    held: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> DeviceTensor:
        size = held.shape
        stride = held.stride()
        offset = held.storage_offset()
        # else it could be no view of a tensor made outside that mode
        with torch.inference_mode(False):
            self: DeviceTensor = torch.Tensor._make_wrapper_subclass(
                cls, size, stride, offset, dtype=held.dtype, device=torch.device(NAME)
            )
        self.held = held
        return self

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self.cpu())

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator on the CPU and count it: launches, elements written, and waits for a value on the
        host. Raises DeviceMixError for tensors of two devices."""
        kwargs = kwargs or {}
        parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        counts = _counts[-1]
        name = func.overloadpacket.__name__
        counts.operators[name] += 1
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if "out" in kwargs:
            raise NotImplementedError(f"{name} into a tensor on {NAME}, which may change its size")
        to_host = name == "_to_copy" and kwargs.get("device") == _HOST
        if name == "copy_":
            return _copy(*args)
        if any(tensor.dim() and not isinstance(tensor, cls) for tensor in tensors):
            raise DeviceMixError(f"{name} of tensors on {NAME} and on the CPU")
        if to_host or _by_value(func, name, args, kwargs):
            counts.wait(name)
        held = tree_map_only(cls, lambda each: each.held, (args, kwargs))
        held_args, held_kwargs = tree_map_only(torch.device, lambda _: _HOST, held)
        out = func(*held_args, **held_kwargs)
        if name.endswith("_"):
            counts.elements += max(
                (tensor.numel() for tensor in tensors[1:]), default=tensors[0].numel()
            )
            return args[0]
        if isinstance(out, torch.Tensor) and not func.is_view:
            counts.elements += out.numel()
        return out if to_host else tree_map_only(torch.Tensor, cls, out)


def _copy(to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    counts = _counts[-1]
    source_data, target_data = (getattr(tensor, "held", None) for tensor in (source, to))
    if source_data is None:
        counts.transfers += 1
    if target_data is None or (source_data is None and not non_blocking):
        counts.wait("copy_")
    written = (to if target_data is None else target_data).copy_(
        source if source_data is None else source_data
    )
    counts.elements += written.numel()
    return to


def _by_value(func: Any, name: str, args: Any, kwargs: Any) -> bool:
    """Return whether the result is a number, or has a size that depends on numbers."""
    if name in ("index", "index_put", "index_put_"):
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    return not _BY_VALUE.isdisjoint(func.tags)


def _fresh(make: Callable[..., torch.Tensor]) -> Callable[..., DeviceTensor]:
    return lambda *sizes, dtype=None, **_: DeviceTensor(make(*sizes, dtype=dtype))


_KERNELS: dict[str, Callable[..., torch.Tensor]] = {
    "empty.memory_format": _fresh(lambda size, dtype: torch.full(size, 85, dtype=dtype)),
    "empty_strided": _fresh(
        lambda *sizes, dtype: torch.empty_strided(*sizes, dtype=dtype).fill_(85)
    ),
    "arange": _fresh(torch.arange),
    "arange.start": _fresh(torch.arange),
    "arange.start_step": _fresh(torch.arange),
    # What `torch.tensor(..., device=...)` comes to, past __torch_dispatch__.
    "_copy_from": lambda source, to, non_blocking=False: _copy(to, source, non_blocking),
}


def device() -> torch.device:
    """Return the device, registered with torch once in a process. Raises UnusableImplementation."""
    if not _registered:
        try:
            from torch.utils.backend_registration import (
                _setup_privateuseone_for_python_backend as set_up,
            )
        except ImportError as error:
            raise UnusableImplementation(
                f"--device {NAME}: this torch is too old: {error}"
            ) from error
        set_up(NAME)
        aten = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        for name, kernel in _KERNELS.items():
            aten.impl(name, kernel, "PrivateUse1")  # type: ignore[no-untyped-call]
        _registered.append(aten)
    return torch.device(NAME)


def on_counting_device(system: type[TorchKV]) -> TorchKV:
    """Return such a system on the device: HostWaitError for a command that waits more often than it may.

    Its `most`: of each kind of command, by name, the most transfers and waits that one took.
    """

    class Counted(system):  # type: ignore[misc, valid-type]
        def apply(self, command: Command) -> Outcome:
            with counting(MAY_WAIT.get(type(command), 0)) as counts:
                outcome: Outcome = super().apply(command)
            kind = type(command).__name__
            transfers, waits = self.most.get(kind, (0, 0))
            self.most[kind] = max(transfers, counts.transfers), max(waits, len(counts.waits))
            return outcome

    made = Counted(str(device()))
    made.most = {}
    return made
