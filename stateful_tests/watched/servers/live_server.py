"""A live server under clients over HTTP: its log is validated while it is written."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from impl.sglang.server.clients import Client, Config
from impl.sglang.server.events import WatchHeader
from impl.sglang.server.over_http import HttpClients, LiveServer
from stateful_tests.watched import deviations
from stateful_tests.watched.log_reader import LogError, WatchLog, logs_of
from stateful_tests.watched.validation_results import Validated
from stateful_tests.watched.validator import Validator

Start = Callable[[Path], LiveServer]
REST_S = 2.0  # after the last client: deferred closes happen


@dataclass(slots=True)
class LiveRun:
    """The result of `watch_live`."""

    header: WatchHeader
    validated: Validated
    start_s: float
    seconds: float
    #: how long after the clients the last line was judged (s)
    behind_s: float
    #: actions of clients, and how often
    counts: dict[str, int] = field(default_factory=dict)
    #: wrong answers
    wrong: list[str] = field(default_factory=list)
    #: the server's last words, if it ended by itself
    died: str = ""
    #: the known fault that explains them, if any
    known: str = ""


def watch_live(
    start: Start,
    config: Config,
    clients: tuple[Client, ...],
    seed: int,
    limit_s: float,
    say: Callable[[str], None],
    keep: Path,
) -> LiveRun:
    """Start a server, run clients, validate its log, stop it.

    keep: where its logs go if anything was wrong.
    """
    with tempfile.TemporaryDirectory(prefix="kvspec-") as folder:
        began = time.monotonic()
        server = start(Path(folder))
        try:
            up = time.monotonic()
            say(f"it answers on port {server.port} after {up - began:.0f} s")
            asking = HttpClients(server, clients, seed)
            (log,) = _logs(server)
            validator = Validator(log.header)
            last_done = 0.0

            def goes_on() -> bool:
                nonlocal last_done
                now = time.monotonic()
                if asking.done and not last_done:
                    last_done = now
                return server.alive and now < up + limit_s and not (last_done and now > last_done + REST_S)

            judged = time.monotonic()
            for line in log.lines(goes_on):
                validator.read(line)
                judged = time.monotonic()
            wrong = (
                asking.wrong
                if asking.done
                else [*asking.wrong, f"clients wait after {limit_s:g} s"]
            )
            died = "" if server.alive else server.last_words()
            release = log.header.release
            known_fault = deviations.fault_of_end(release, died, config, validator.result)
            server.stop()
            if died or wrong or validator.result.unexplained:
                shutil.rmtree(keep, ignore_errors=True)
                shutil.copytree(server.folder, keep)
        finally:
            server.stop()
    return LiveRun(
        header=log.header,
        validated=validator.result,
        start_s=up - began,
        seconds=(last_done or judged) - up,
        behind_s=max(0.0, judged - last_done) if last_done else 0.0,
        counts=dict(asking.counts),
        wrong=wrong,
        died=died,
        known=known_fault,
    )


def _logs(server: LiveServer) -> list[WatchLog]:
    """Return the log, once the first step is written."""
    while True:
        try:
            return logs_of([server.watch])
        except LogError:
            if not server.alive:
                raise
            time.sleep(0.1)
