"""The clock of a release's tree with its host tier: it stands still until a command lets time pass."""

from __future__ import annotations

import importlib
import time
from typing import Any

from impl.sglang.parts.stand_ins import Bag

# Modules that read the time for how long a request may wait for a storage.
_READERS = (
    "sglang.srt.managers.cache_controller",
    "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller",
    "sglang.srt.mem_cache.unified_radix_cache",
    "sglang.srt.utils.poll_timer",
)


class ServerClock:
    """The time of one server.

    now: since its start (s).
    """

    def __init__(self) -> None:
        self.now = 0.0

    def install(self) -> None:
        """Have the release's modules read this clock. Waits of our own threads are not timed."""
        times = {"monotonic": self._read, "perf_counter": self._read}
        for name in _READERS:
            module: Any = importlib.import_module(name)
            module.time = Bag(**vars(time) | times)

    def _read(self) -> float:
        return self.now
