"""Our implementation of the bookkeeping on torch tensors, on any device; nothing of a server's own code."""

from impl.torch_kv.system import TorchKV

__all__ = ["TorchKV"]
