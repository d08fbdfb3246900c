"""One exploration from beginning to end: taken up from a file, kept there while it runs, interrupted."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

from stateful_tests import unfinished
from stateful_tests.column_search import ColumnSearch
from stateful_tests.exploration import MEMORY_MB, Exploration, Progress
from stateful_tests.explorer import Explorer
from stateful_tests.scopes import Scope

KEEP_EVERY_S = 120.0


def searcher(scope: Scope, clauses: bool | None = None, arrays: Any = None) -> Explorer | ColumnSearch:
    """What searches a scope: by columns, unless there is a radix tree or clauses are to be asked."""
    if scope.geometry.tree or (scope.clauses if clauses is None else clauses):
        return Explorer(scope, clauses=clauses)
    return ColumnSearch(scope, arrays)


def run(
    scope: Scope,
    *,
    clauses: bool | None = None,
    states: int | None = None,
    depth: int | None = None,
    memory_mb: float = MEMORY_MB,
    resume: str | None = None,
    progress: Progress | None = None,
    arrays: Any = None,
) -> Exploration:
    """Explore a scope to a fixed point or a bound. clauses: None as the scope says.

    resume: a file to go on from if it is there, and to keep the search in while it is not finished. An
    interrupt ends the search between two states. arrays: what makes columns (None: numpy). Raises
    UnfinishedError, OSError.
    """
    explorer = searcher(scope, clauses, arrays)
    if resume is not None and Path(resume).exists():
        unfinished.load(explorer, resume)
    interrupted = False
    keep_at = time.monotonic() + KEEP_EVERY_S

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            raise KeyboardInterrupt
        interrupted = True

    def pause() -> bool:
        return interrupted or (resume is not None and time.monotonic() > keep_at)

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        while True:
            stopped = explorer.run(
                states=states, depth=depth, memory_mb=memory_mb, progress=progress, pause=pause
            )
            if resume is not None:
                unfinished.save(explorer, resume)
            if stopped != "paused":
                return explorer.result(stopped)
            if interrupted:
                return explorer.result("an interrupt")
            keep_at = time.monotonic() + KEEP_EVERY_S
    finally:
        signal.signal(signal.SIGINT, before)
