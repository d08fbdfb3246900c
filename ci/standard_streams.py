"""Standard streams that outlive their reader, so that an exit code is always the verdict's."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


def plain(text: object) -> str:
    """Return text of a stranger (an exception, a name) without control characters that a terminal would
    obey."""
    return "".join(c if c.isprintable() else " " for c in str(text))


class Lasting:
    """A text stream that drops what it cannot write; `error` has the reason."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream if stream is not None else open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        self.error: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        if self.error is None:
            with self._kept():
                self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        if self.error is None:
            with self._kept():
                self._stream.flush()

    @contextmanager
    def _kept(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.error = error
            # Python flushes the rest when it ends, and would complain
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


@contextmanager
def lasting_output() -> Iterator[Lasting]:
    """Make stdout and stderr Lasting, and yield stdout."""
    before = sys.stdout, sys.stderr
    out = sys.stdout = Lasting(sys.stdout)
    sys.stderr = Lasting(sys.stderr)
    try:
        yield out
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before
