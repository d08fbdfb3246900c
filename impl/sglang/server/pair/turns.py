"""The threads of both servers, of which one runs at a time: the conductor says which, and for how long.

A thread of a release hands over where it would block, and where others may run between two of its calls.
What the release keeps in module globals for a process is put in place for the server whose turn it is.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from typing import Any


class ServerThread:
    """One thread of a server.

    name: what it does.
    error: what it ended with.
    may_run: what it waits for, None if it may run.
    """

    def __init__(self, stage: Stage, server: str, name: str, work: Callable[[], object]) -> None:
        self.stage = stage
        self.server = server
        self.name = name
        self.work = work
        self.error: BaseException | None = None
        self.over = False
        self.may_run: Callable[[], bool] | None = None
        self._may_continue = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name=f"{server} {name}", daemon=True)
        self._thread.start()

    @property
    def ready(self) -> bool:
        return not self.over and (self.may_run is None or self.may_run())

    def take(self) -> None:
        """Let the thread run until it hands over or ends."""
        self.stage.current = self
        self.stage.enter(self.server)
        self._may_continue.release()
        self.stage.back.acquire()
        self.stage.current = None

    def hand_over(self, until: Callable[[], bool] | None) -> None:
        """Let others run, until this thread may run and gets its turn. The thread itself calls this."""
        self.may_run = until
        self.stage.back.release()
        self._may_continue.acquire()
        self.may_run = None

    def _run(self) -> None:
        self._may_continue.acquire()
        try:
            self.work()
        except BaseException as error:
            self.error = error
        self.over = True
        self.stage.back.release()


class Stage:
    """All threads of a pair; they end with the process.

    current: the one whose turn it is.
    server: whose globals are in place.
    """

    def __init__(self) -> None:
        self.back = threading.Semaphore(0)
        self.current: ServerThread | None = None
        self.turns: list[ServerThread] = []
        self.server = ""
        self._contexts: dict[str, Any] = {}
        self._module: Any = importlib.import_module("sglang.srt.runtime_context")

    def enter(self, server: str, *, anew: bool = False) -> None:
        """Put the globals of a server in place.

        anew: those of a process that has built nothing.
        """
        module = self._module
        if self.server:
            self._contexts[self.server] = module._CONTEXT
        self.server = server
        if anew:
            parallel = module.ParallelContext()
            self._contexts[server] = module.RuntimeContext(parallel=parallel)
        context = self._contexts[server]
        module._CONTEXT = context
        module._PARALLEL = context.parallel

    def add(self, server: str, name: str, work: Callable[[], object]) -> ServerThread:
        """Start a new thread of a server."""
        turn = ServerThread(self, server, name, work)
        self.turns.append(turn)
        return turn

    def hand_over(self, until: Callable[[], bool] | None = None) -> None:
        """Let others run in the place of the thread that calls this. The conductor itself goes on."""
        if self.current is not None:
            self.current.hand_over(until)
