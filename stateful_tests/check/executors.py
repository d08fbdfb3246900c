"""Executors of work: in this process, in processes beside it, or on a Ray cluster (`ray_cluster.py`).

Work is pure: what a task gives depends only on the task. Results come in the order of the tasks, so what is
made of them does not depend on how many tasks run at a time.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import active_children, get_context
from typing import Protocol, TypeVar

from impl.process.worker import end_with_parent

Task = TypeVar("Task")
Result = TypeVar("Result")
_Handle = TypeVar("_Handle")


class Executor(Protocol):
    """Runs tasks.

    at_once: number of tasks at a time.
    """

    at_once: int

    def map(
        self, work: Callable[[Task], Result], tasks: Iterable[Task]
    ) -> Generator[Result, None, None]:
        """Yield the results, in the order of the tasks. Closing the iterator leaves the rest undone."""

    def close(self) -> None: ...


class Serial:
    """Runs one task after the other, in this process, as their results are needed."""

    at_once = 1

    def map(
        self, work: Callable[[Task], Result], tasks: Iterable[Task]
    ) -> Generator[Result, None, None]:
        yield from map(work, tasks)

    def close(self) -> None:
        """Release nothing: it holds nothing."""


SERIAL = Serial()


def submit_ahead(
    submit: Callable[[Task], _Handle],
    result: Callable[[_Handle], Result],
    drop: Callable[[_Handle], object],
    tasks: Iterable[Task],
    most: int,
) -> Generator[Result, None, None]:
    """Yield results in the order of the tasks, with `most` tasks under way at a time."""
    waiting: deque[_Handle] = deque()
    try:
        for task in tasks:
            waiting.append(submit(task))
            if len(waiting) >= most:
                yield result(waiting.popleft())
        while waiting:
            yield result(waiting.popleft())
    finally:
        for handle in waiting:
            drop(handle)


class Processes:
    """Processes on this machine. They are forked where that is safe, and then start with all loaded
    modules."""

    def __init__(self, count: int, *, fork: bool = True) -> None:
        self.at_once = count
        method = "fork" if fork and sys.platform == "linux" else "spawn"
        self._pool = ProcessPoolExecutor(count, get_context(method), _ignore_interrupts)
        self._pool.submit(int)  # forks them now, before there are other threads

    def map(
        self, work: Callable[[Task], Result], tasks: Iterable[Task]
    ) -> Generator[Result, None, None]:
        def submit(task: Task) -> Future[Result]:
            return self._pool.submit(work, task)

        return submit_ahead(submit, Future[Result].result, Future[Result].cancel, tasks, 3 * self.at_once)

    def close(self) -> None:
        try:
            self._pool.shutdown(cancel_futures=True)
        except BaseException:
            # An interrupt: nobody tells them to end, and Python's exit waits for them.
            for process in active_children():
                process.kill()
            raise


def _ignore_interrupts() -> None:
    """Ignore interrupts: the process that submitted the work ends, and ends these."""
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    end_with_parent()


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
