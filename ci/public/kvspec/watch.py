"""The plugin that SGLang loads (entry point `sglang.srt.plugins`) in each process of a server."""

from impl.sglang.server.hooks import register

__all__ = ["register"]
