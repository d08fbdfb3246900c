"""The watcher's file: events go through a bounded queue to a thread that writes JSON Lines.

`put` never waits and never raises: an event is dropped and counted if the queue is full, and a disk error
ends the log with one warning. Files are rotated. Each file begins with the header, and each file after the
first has a snapshot behind it, so that any file can be read alone.
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

MAX_QUEUED_EVENTS = 1 << 15  # events that may wait for the disk; some 50 MB at most at level `lengths`
FLUSH_PERIOD_S = 0.25  # a killed server loses what is younger than this
_JSON_ENCODER = msgspec.json.Encoder(enc_hook=int)  # `int` for NumPy and Torch numbers


class EventLog:
    """The log of one process: DIR/kvspec-PID-0001.jsonl, 0002, ... of which the newest `keep` stay.

    most_bytes: size from which a file is followed by the next one (bytes).
    events: number of events put so far, dropped ones included.
    dropped: number of events lost since the last snapshot.
    wants_snapshot: the next event must be a snapshot, because a file is full or an event was dropped.
    """

    def __init__(self, folder: Path, *, most_bytes: int, keep: int) -> None:
        self.folder = folder
        self.most_bytes = most_bytes
        self.keep = keep
        self.header: dict[str, Any] = {}
        self.wants_snapshot = False
        self.events = 0
        self.dropped = 0
        # Events are encoded in batches: one by one takes longer.
        self._queue: deque[Event | list[Any]] = deque()
        self._file: IO[bytes] | None = None
        self._file_number = 0
        self._file_bytes = 0
        self._events_written = 0
        self._disabled = False
        self._stopping = threading.Event()
        self._write_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="kvspec-watch", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def put(self, event: Event | list[Any]) -> None:
        """Queue an event for writing. It is encoded later, so nothing that it holds may change."""
        self.events += 1
        if self._disabled:
            return
        if len(self._queue) >= MAX_QUEUED_EVENTS:
            self.dropped += 1
            self.wants_snapshot = True
        else:
            self._queue.append(event)

    def close(self) -> None:
        """Stop the thread and write the queued events."""
        self._stopping.set()
        self._thread.join(timeout=5)
        self.flush()

    def _run(self) -> None:
        while not self._stopping.wait(FLUSH_PERIOD_S):
            self.flush()

    def flush(self) -> None:
        """Write the queued events now. Disables the log if that fails."""
        with self._write_lock:
            try:
                self._write_queued()
            except Exception as error:
                if not self._disabled:
                    self._disabled = True
                    logging.getLogger("kvspec").warning(
                        "kvspec watches no longer: %s: %s", self.folder, error
                    )
                self._queue.clear()
                with contextlib.suppress(OSError):
                    if self._file is not None:
                        self._file.close()

    def _write_queued(self) -> None:
        while self._queue and not self._disabled:
            events: list[Event | list[Any]] = []
            for _ in range(min(len(self._queue), 4096)):
                event = self._queue.popleft()
                if self._file_bytes > self.most_bytes and isinstance(event, Snapshot):
                    self._write_events(events)
                    events = []
                    self._next_file()
                events.append(event)
            self._write_events(events)

    def _write_events(self, events: list[Event | list[Any]]) -> None:
        if self._file is None:
            self._next_file()
        assert self._file is not None
        # Events are numbered across all files, so that a reader notices missing, repeated and moved lines.
        numbered = [*enumerate(events, self._events_written + 1)]
        self._events_written += len(events)
        unwritten = memoryview(_JSON_ENCODER.encode_lines(numbered))
        self._file_bytes += len(unwritten)
        while unwritten:  # an unbuffered write may be partial
            unwritten = unwritten[self._file.write(unwritten) :]
        if self._file_bytes > self.most_bytes:
            self.wants_snapshot = True

    def _next_file(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file_number += 1
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"kvspec-{os.getpid()}"
        path = self.folder / f"{name}-{self._file_number:04}.jsonl"
        self._file = path.open("xb", buffering=0)
        header = _JSON_ENCODER.encode({**self.header, "part": self._file_number}) + b"\n"
        self._file.write(header)
        self._file_bytes = len(header)
        for old in range(1, self._file_number - self.keep + 1):
            with contextlib.suppress(FileNotFoundError):
                (self.folder / f"{name}-{old:04}.jsonl").unlink()
