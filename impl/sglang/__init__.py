"""Real SGLang releases behind the adapter."""

from impl.sglang.process.system import SGLangSystem

__all__ = ["SGLangSystem"]
