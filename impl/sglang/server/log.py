"""The watcher's file: events go through a bounded queue to a thread that writes JSON Lines.

Whoever puts an event never waits and never sees an exception: a full queue drops it and counts, a disk that
refuses ends the log with one warning. Files are rotated; each begins with the header, and from the second on
with a snapshot, so that any of them can be read alone.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
from collections import deque
from pathlib import Path
from typing import IO, Any

import msgspec

from impl.sglang.server.events import Event, Snapshot

QUEUE = 1 << 15  # events that may wait for the disk; some 50 MB at most at level `lengths`
PERIOD_S = 0.25  # a killed server loses what is younger than this
_JSON = msgspec.json.Encoder(enc_hook=int)  # of numbers that are another library's


class EventLog:
    """One process's log: DIR/kvspec-PID-0001.jsonl, 0002, ... of which the newest `keep` stay.

    events: that came; dropped: of these lost since the last snapshot. wants_snapshot: the next event
    must be a whole state, as a new file begins or as something was dropped.
    """

    def __init__(self, folder: Path, *, most_bytes: int, keep: int) -> None:
        self.folder, self.most_bytes, self.keep = folder, most_bytes, keep
        self.header: dict[str, Any] = {}
        self.wants_snapshot = False
        self.dropped = self.events = 0
        # encoded many at a time: one by one takes longer
        self._queue: deque[Event | list[Any]] = deque()
        self._file: IO[bytes] | None = None
        self._part = self._size = self._lines = 0
        self._off = False
        self._ended = threading.Event()
        self._writing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="kvspec-watch", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def put(self, event: Event | list[Any]) -> None:
        """Have an event written, as it is now: nothing that it holds may change later."""
        self.events += 1
        if self._off:
            return
        if len(self._queue) >= QUEUE:
            self.dropped += 1
            self.wants_snapshot = True
        else:
            self._queue.append(event)

    def close(self) -> None:
        """Write what waits, and end."""
        self._ended.set()
        self._thread.join(timeout=5)
        self.flush()

    def _run(self) -> None:
        while not self._ended.wait(PERIOD_S):
            self.flush()

    def flush(self) -> None:
        """Write what waits, now."""
        with self._writing:
            try:
                self._write()
            except Exception as error:
                if not self._off:
                    self._off = True
                    logging.getLogger("kvspec").warning(
                        "kvspec watches no longer: %s: %s", self.folder, error
                    )
                self._queue.clear()
                with contextlib.suppress(OSError):
                    if self._file is not None:
                        self._file.close()

    def _write(self) -> None:
        while self._queue and not self._off:
            events: list[Event | list[Any]] = []
            for _ in range(min(len(self._queue), 4096)):
                event = self._queue.popleft()
                if self._size > self.most_bytes and isinstance(event, Snapshot):
                    self._flush(events)
                    events = []
                    self._next_file()
                events.append(event)
            self._flush(events)

    def _flush(self, events: list[Event | list[Any]]) -> None:
        if self._file is None:
            self._next_file()
        assert self._file is not None
        # Numbers go on over all parts: a reader sees which lines are lost, stand twice or in another place.
        numbered = [*enumerate(events, self._lines + 1)]
        self._lines += len(events)
        left = memoryview(_JSON.encode_lines(numbered))
        self._size += len(left)
        while left:  # a disk that is nearly full takes a part
            left = left[self._file.write(left) :]
        if self._size > self.most_bytes:
            self.wants_snapshot = True

    def _next_file(self) -> None:
        if self._file is not None:
            self._file.close()
        self._part += 1
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"kvspec-{os.getpid()}"
        self._file = (self.folder / f"{name}-{self._part:04}.jsonl").open("xb", buffering=0)
        first = _JSON.encode({**self.header, "part": self._part}) + b"\n"
        self._file.write(first)
        self._size = len(first)
        for old in range(1, self._part - self.keep + 1):
            with contextlib.suppress(FileNotFoundError):
                (self.folder / f"{name}-{old:04}.jsonl").unlink()
