"""Progress of long work, on stderr: a live line on a terminal, a plain line now and then in a pipe."""

import sys
import time
from types import TracebackType
from typing import Self

from rich.status import Status

from ci.standard_streams import printable
from ci.report.text_output import console, say

EVERY_S = 10.0  # between plain lines
REFRESH_S = 0.1  # between changes of the live line


class Progress:
    """Reports progress: a context manager, which is called with the work, its commands and its violations."""

    def __init__(self) -> None:
        self._out = out = console(sys.stderr)
        self._started = self._reported_at = time.monotonic()
        self._live: Status | None = out.status("starting") if out.is_terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """Print a line that stays."""
        say(self._out, text, whole=True)

    def __call__(self, work: str, commands: int, violated: int) -> None:
        """Report the work.

        violated: number of clauses so far.
        """
        clauses = "1 clause" if violated == 1 else f"{violated} clauses"
        self.line(f"{work}; {commands} commands, {clauses} violated")

    def line(self, text: str) -> None:
        """Print a line on the present work, unless one was printed less than an interval ago."""
        now = time.monotonic()
        interval_s = EVERY_S if self._live is None else REFRESH_S
        if now - self._reported_at < interval_s:
            return
        self._reported_at = now
        line = f"{now - self._started:.0f} s: {printable(text)}"
        if self._live is not None:
            self._live.update(line)
        else:
            self._out.print(line, soft_wrap=True)
