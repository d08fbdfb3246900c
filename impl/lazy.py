"""torch, imported when one of its names is first used: the import takes seconds, and commands such as
`kvspec bugs` need no torch."""

import importlib
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:

    class _Torch(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            value = getattr(importlib.import_module("torch"), name)
            setattr(self, name, value)  # Python calls __getattr__ only for attributes that are missing
            return value

    torch = _Torch("torch")
    Tensor = Any  # only annotations use it

__all__ = ["Tensor", "torch"]
