"""Real SGLang releases behind the adapter: their own bookkeeping, driven on a CPU."""

from impl.sglang.process.system import SGLangSystem

__all__ = ["SGLangSystem"]
