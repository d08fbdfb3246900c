"""torch, imported when one of its names is first used: it takes seconds, and lists of bugs need none."""

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
            setattr(self, name, value)  # from now on it is found without coming here
            return value

    torch = _Torch("torch")
    Tensor = Any  # in annotations alone

__all__ = ["Tensor", "torch"]
