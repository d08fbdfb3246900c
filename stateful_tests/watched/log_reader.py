"""Logs of a watcher, read as they are: cut, rotated, still growing, or no log at all.

A file that cannot be used is one line (LogError). What can be used of a log is used: a last line without an
end belongs to a server that was killed while it wrote, and is left out.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO

import msgspec

from impl.sglang.server.events import FORMAT, NUMBERED, READABLE, Event, WatchHeader
from reference.failures import count_text
from stateful_tests.watched.line_order import Line as Line
from stateful_tests.watched.line_order import LineOrder

MAX_LINE = 16 << 20  # bytes; a line of level `pages` of a pool of 2^18 tokens stays below
_PERIOD_S = 0.1
_EVENTS: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)
_NUMBERED: msgspec.json.Decoder[tuple[int, Event]] = msgspec.json.Decoder(tuple[int, Event])
_HEADERS = msgspec.json.Decoder(WatchHeader)
_PART = re.compile(r"(.+)-(\d{4})\.jsonl")


class LogError(ValueError):
    """A log that cannot be used: file, line, reason."""


class WatchLog:
    """One server process's log.

    files: its parts in order.
    header: that of the first.
    damaged: lines that are no whole event, where running numbers tell which are missing.
    order: order of those lines.
    """

    def __init__(self, files: list[Path]) -> None:
        self.files = files
        self.header = _header_of(files[0])
        self.cut: str | None = None  # where a last line had no end
        self.damaged = 0
        self.order: LineOrder | None = None
        if self.header.version >= NUMBERED:
            self.order = LineOrder(1 if self.header.part == 1 else None)
        self.bytes = sum(file.stat().st_size for file in files)

    @property
    def put_right(self) -> str:
        """Describe the lines that were put into order."""
        if self.order is None:
            return ""
        counts = {"stood twice": self.order.repeated, "stood in another place": self.order.moved}
        return ", ".join(f"{count_text(n, 'line')} {what}" for what, n in counts.items() if n)

    @property
    def name(self) -> str:
        """Its name in reports."""
        return (
            str(self.files[0])
            if len(self.files) == 1
            else f"{self.files[0]} and {len(self.files) - 1} more"
        )

    def lines(self, growing: Callable[[], bool] | None = None) -> Iterator[Line]:
        """Yield every event.

        growing: at the end wait for more for as long as this returns True, in later parts too.
        """
        lines = self._all_lines(growing)
        if self.order is not None:
            yield from self.order.in_order(lines)
        else:
            yield from (line for _, line in lines)

    def _all_lines(self, growing: Callable[[], bool] | None) -> Iterator[tuple[int, Line]]:
        """Yield every event in the order of the files, with its running number, 0 in a log without."""
        number = 0
        while number < len(self.files):
            yield from self._lines_of(self.files[number], growing, number)
            number += 1
            if growing is not None:
                self.files += _later(self.files[-1])

    def _lines_of(
        self, path: Path, growing: Callable[[], bool] | None, offset: int
    ) -> Iterator[tuple[int, Line]]:
        """Yield the events of a file with their number in the log, 0 where events have none. Raises LogError.

        growing: more lines may come.
        """
        if offset and growing is not None:
            _wait_for_header(path, growing)
        if _header_of(path).process != self.header.process:
            raise LogError(f"{path}: line 1: of another process than {self.files[0]}")
        number = 1
        name = str(path)
        with path.open("rb") as file:
            file.readline(MAX_LINE)
            for raw in _whole_lines(file, growing, lambda: bool(_later(path))):
                number += 1
                if not raw.endswith(b"\n"):
                    if len(raw) >= MAX_LINE:
                        raise LogError(f"{path}: line {number}: longer than {MAX_LINE} bytes")
                    self.cut = f"{path}: line {number} has no end: it is left out"
                    return
                try:
                    if self.order is None:
                        yield 0, Line(name, number, _EVENTS.decode(raw))
                    else:
                        running, event = _NUMBERED.decode(raw)
                        yield running, Line(name, number, event)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    if self.order is None or _is_header(raw):
                        raise LogError(f"{path}: line {number}: {_reason(raw, error)}") from None
                    self.damaged += 1


NO_LOG = (
    "there is no .jsonl in this folder: a server writes one if it starts with KVSPEC_WATCH=DIR and kvspec is"
    " installed beside it"
)


def logs_of(paths: Iterable[str | os.PathLike[str]]) -> list[WatchLog]:
    """Return the logs in files and folders.

    Raises LogError for a file that is no log, and where there is none.
    """
    paths = [*paths]
    found_files = log_files(paths)
    if not found_files:
        raise LogError(f"{paths[0]}: {NO_LOG}")
    return [WatchLog(files) for files in found_files]


def log_files(paths: Iterable[str | os.PathLike[str]]) -> list[list[Path]]:
    """Return the files of each log: parts of one process belong together. Raises LogError for missing
    files."""
    paths_of: dict[str, set[Path]] = {}
    for given in map(Path, paths):
        if not given.is_dir() and not given.is_file():
            raise LogError(f"{given}: there is no such file or folder")
        files = sorted(given.glob("*.jsonl")) if given.is_dir() else [given]
        for file in files:
            paths_of.setdefault(log_name(file), set()).add(file)
    return [sorted(files) for files in paths_of.values()]


def log_name(file: Path) -> str:
    """Return the name that all parts of a log share."""
    match = _PART.fullmatch(str(file))
    return match[1] if match else str(file)


def _header_of(path: Path) -> WatchHeader:
    """Return the header of a log's file. Raises LogError for a file that is none, or of another version."""
    try:
        with path.open("rb") as file:
            raw = file.readline(MAX_LINE)
    except OSError as error:
        raise LogError(f"{path}: {error.strerror}") from None
    if not raw.strip():
        raise LogError(f"{path}: is empty")
    try:
        fields = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        fields = None
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise LogError(
            f"{path}: line 1: no watcher's log, which KVSPEC_WATCH=DIR makes a server write. For a line of a"
            " server's own log: kvspec bugs 'LINE'"
        )
    if fields.get("version") not in READABLE:
        version = f"{fields.get('version')!r:.20}"
        can = " and ".join(map(str, READABLE))
        raise LogError(f"{path}: line 1: version {version} is not supported, {can} are")
    try:
        header = _HEADERS.decode(raw)
    except msgspec.ValidationError as error:
        raise LogError(f"{path}: line 1: {error}") from None
    return header


def _wait_for_header(path: Path, growing: Callable[[], bool]) -> None:
    """Wait for the header of a part, which exists before its header is written."""
    with path.open("rb") as file:
        while not file.readline(MAX_LINE).endswith(b"\n") and growing():
            time.sleep(_PERIOD_S)


def _reason(raw: bytes, error: Exception) -> str:
    """Return why a line is no event, or why it is a header in the wrong place."""
    if _is_header(raw):
        return "a second header: lines of two processes, or of two files, in one"
    return f"not a whole event: {error}"


def _is_header(raw: bytes) -> bool:
    return raw.startswith(b"{") and f'"{FORMAT}"'.encode() in raw[:200]


def _whole_lines(
    file: IO[bytes], growing: Callable[[], bool] | None, goes_on: Callable[[], bool]
) -> Iterator[bytes]:
    """Yield lines with their ends; the last one may have none. A growing file is waited for, and read
    once more after its writer has gone or has begun the next part: it wrote all of this one before."""
    rest = b""
    over = growing is None
    while True:
        raw = rest + file.readline(MAX_LINE)
        if raw.endswith(b"\n") or len(raw) >= MAX_LINE:
            rest = b""
            yield raw
        elif over:
            if raw:
                yield raw
            return
        else:
            assert growing is not None  # else it is over
            rest = raw
            over = goes_on() or not growing()
            if not over:
                time.sleep(_PERIOD_S)


def _later(path: Path) -> list[Path]:
    """Return the parts after this one."""
    match = _PART.fullmatch(str(path))
    if match is None:
        return []
    following = Path(f"{match[1]}-{int(match[2]) + 1:04}.jsonl")
    return [following] if following.exists() else []
