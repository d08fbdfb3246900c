"""Logs beside the reference: read as they are, or while servers write them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec.structs import replace

from ci.commands.shared import note, unusable
from stateful_tests.watched.actions.transfers import compare_pair_logs
from stateful_tests.watched.log_reader import LogError, WatchLog, log_files, log_name
from stateful_tests.watched.validation_results import Mismatch
from stateful_tests.watched.validator import Validator

PERIOD_S = 0.2  # between two looks for logs that begin

Tell = Callable[[Mismatch], None]
Begins = Callable[["LogReading"], None]


class LogReading:
    """One log and its validator.

    unreadable: why the rest of it could not be read, "" where it could.
    seconds: time spent on it.
    """

    def __init__(self, log: WatchLog, release: str | None) -> None:
        self.log = log
        self.unreadable = ""
        self.seconds = 0.0
        if release is not None:
            log.header = replace(log.header, release=release)
        self.validator = Validator(log.header)

    def read(self, growing: Callable[[], bool] | None = None, tell: Tell = lambda _: None) -> None:
        """Read it to its end.

        growing: wait there for more as long as this returns True.
        tell: called with a mismatch that no known fault explains.
        """
        began = time.perf_counter()
        result = self.validator.result
        try:
            for line in self.log.lines(growing):
                reported = len(result.mismatches)
                self.validator.read(line)
                for mismatch in result.mismatches[reported:]:
                    if mismatch.known is None:
                        tell(mismatch)
        except LogError as error:
            self.unreadable = str(error)
            note(self.unreadable)
        self.seconds = time.perf_counter() - began

    @property
    def writer_runs(self) -> bool:
        """Whether the process that writes the log runs on this machine."""
        try:
            os.kill(self.log.header.process, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return True


class LogReadings:
    """Every log in the given files and folders.

    logs: by name. The number of a part is left out, because a server deletes its oldest parts.
    no_logs: the files that are no logs, each with the reason.
    """

    def __init__(self, paths: Sequence[str], release: str | None) -> None:
        self._paths = paths
        self._release = release
        self.logs: dict[str, LogReading] = {}
        self.no_logs: dict[Path, str] = {}

    def new_readings(self) -> list[LogReading]:
        """Return logs that were not there before. Raises Unusable for a missing file or folder."""
        new = []
        with unusable("", LogError):
            groups = log_files(self._paths)
        for first, *later in groups:
            if log_name(first) in self.logs:
                continue
            try:
                reading = LogReading(WatchLog([first, *later]), self._release)
            except LogError as error:
                self.no_logs[first] = str(error)
                continue
            self.no_logs.pop(first, None)  # its first line had not been written yet
            self.logs[log_name(first)] = reading
            new.append(reading)
        return new

    def read(self) -> None:
        """Read all existing logs."""
        for reading in self.new_readings():
            reading.read()

    def join(self) -> None:
        """Compare the logs of the two servers of a pair, room by room."""
        validators = [reading.validator for reading in self.logs.values()]
        for prefill in (validator for validator in validators if validator.header.role == "prefill"):
            for decode in (validator for validator in validators if validator.header.role == "decode"):
                for mismatch in compare_pair_logs(prefill, decode):
                    decode.report(mismatch)

    def follow(self, tell: Tell | None, begins: Begins) -> None:
        """Read all logs concurrently, and those that appear meanwhile, until the processes that write them
        have ended or the user interrupts. A folder may have no log yet.

        begins: called with each log when its reading starts.
        Raises the error of a reading that failed.
        """
        stopped = threading.Event()
        telling = threading.Lock()
        threads: list[threading.Thread] = []
        failures: list[Exception] = []

        def one_at_a_time(mismatch: Mismatch) -> None:
            if tell is not None:
                with telling:
                    tell(mismatch)

        def start(reading: LogReading) -> None:
            """Announce a log and start the thread that reads it, until its process has ended or the reading
            is stopped. An exception of the thread goes to `failures`."""
            with telling:
                begins(reading)
            process = reading.log.header.process
            if not reading.writer_runs:
                note(
                    f"{reading.log.name}: no process {process} on this machine: the log is read as it is"
                )

            def growing() -> bool:
                return not stopped.is_set() and reading.writer_runs

            def read() -> None:
                try:
                    reading.read(growing, one_at_a_time)
                except Exception as error:
                    failures.append(error)

            threads.append(threading.Thread(target=read))
            threads[-1].start()

        wait_is_noted = False
        try:
            while not threads or any(thread.is_alive() for thread in threads):
                for reading in self.new_readings():
                    start(reading)
                if not threads and self.no_logs and not any(map(os.path.isdir, self._paths)):
                    return
                if not threads and not wait_is_noted:
                    wait_is_noted = True
                    note(f"{self._paths[0]}: no log yet; a server writes one with its first batch")
                time.sleep(PERIOD_S)
        except KeyboardInterrupt:
            pass
        finally:
            stopped.set()
            for thread in threads:
                thread.join()
        if failures:
            raise failures[0]
