"""Standard streams that outlive their reader, so that an exit code is always the verdict's."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any


def printable(text: object) -> str:
    """Return text from outside (an exception, a name) with a space for each control character, which a
    terminal would obey."""
    return "".join(c if c.isprintable() else " " for c in str(text))


class UnbreakableStream:
    """A text stream that drops what it cannot write.

    error: why, None while all was written.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream if stream is not None else open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        self.error: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        if self.error is None:
            with self._errors_kept():
                self._stream.write(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        if self.error is None:
            with self._errors_kept():
                self._stream.flush()

    @contextmanager
    def _errors_kept(self) -> Iterator[None]:
        """Keep an OSError in `error`, and drop what follows."""
        try:
            yield
        except OSError as error:
            self.error = error
            # Python flushes the stream when it ends, and would print a second error and exit with 120: from
            # now on the file descriptor leads to /dev/null.
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


@contextmanager
def unbreakable_output() -> Iterator[UnbreakableStream]:
    """Put an UnbreakableStream in the place of stdout and of stderr, and yield that of stdout."""
    stdout = sys.stdout
    stderr = sys.stderr
    unbreakable = UnbreakableStream(stdout)
    sys.stdout = unbreakable
    sys.stderr = UnbreakableStream(stderr)
    try:
        yield unbreakable
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout = stdout
        sys.stderr = stderr
