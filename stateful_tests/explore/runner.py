"""One exploration from beginning to end; an interrupt ends it between two states."""

from __future__ import annotations

import signal
from types import FrameType

from stateful_tests.coverage.scopes import Scope
from stateful_tests.explore.search_base import MEMORY_MB, Exploration, Progress
from stateful_tests.explore.stepwise import Explorer


def run(
    scope: Scope,
    *,
    states: int | None = None,
    depth: int | None = None,
    memory_mb: float = MEMORY_MB,
    progress: Progress | None = None,
) -> Exploration:
    """Explore a scope to a fixed point or a bound. An interrupt ends the search between two states."""
    explorer = Explorer(scope)
    interrupted = False

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            raise KeyboardInterrupt
        interrupted = True

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        stopped = explorer.run(
            states=states, depth=depth, memory_mb=memory_mb, progress=progress, pause=lambda: interrupted
        )
        return explorer.result("an interrupt" if stopped == "paused" else stopped)
    finally:
        signal.signal(signal.SIGINT, before)
