"""Our implementation of the bookkeeping on torch tensors, on any device."""

from impl.torch_kv.pool import (
    DoubleFreeError,
    ForeignSlotError,
    OutOfPagesError,
    PaddingFreedError,
    PoolError,
)
from impl.torch_kv.system import TorchKV

__all__ = [
    "DoubleFreeError",
    "ForeignSlotError",
    "OutOfPagesError",
    "PaddingFreedError",
    "PoolError",
    "TorchKV",
]
