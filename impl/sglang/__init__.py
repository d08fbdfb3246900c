"""Real SGLang releases behind the adapter."""

from impl.sglang.system import SGLangSystem

__all__ = ["SGLangSystem"]
