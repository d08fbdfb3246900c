"""Runs of a whole scheduler, from outside: a worker in the server environment, a job for each run."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from pathlib import Path
from typing import IO

import msgspec

from impl.adapter import UnusableImplementation
from impl.process import child
from impl.sglang.server import environment
from impl.sglang.server.worker import Job
from impl.sglang.server.outcome import RunOutcome

# the folder that `impl` and `reference` are imported from
HOME = Path(__file__).resolve().parents[3]


def outside(root: Path | None, settings: dict[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a process in a server environment. Raises UnusableImplementation for a part
    of the package, because Python would take the environment's instead.

    root: a folder with another `sglang/`.
    """
    if root is not None and not (root / "sglang" / "__init__.py").is_file():
        raise UnusableImplementation(
            f"{root}/sglang: has no __init__.py; a server needs the whole package"
        )
    more = {environment.SITE: environment.packages(), "PYTHONWARNINGS": "ignore"}
    made = child.environment([HOME, *([root] if root else [])], **more)
    kept = {name: value for name, value in made.items() if not name.startswith("SGLANG_")}
    return kept | (settings or {})


def last_words(output: bytes) -> str:
    """Return the last line of what a process wrote."""
    lines = [line.strip() for line in output[-8000:].decode(errors="replace").split("\n")]
    return next((line[:300] for line in reversed(lines) if line), "it said nothing")


class WholeScheduler:
    """A release's scheduler, ready to serve one run after the other. Raises UnusableImplementation when the
    release does not load.

    python: of the server environment.
    root: a folder with another `sglang/` than the environment's, such as a checkout's.
    """

    def __init__(self, python: Path, root: Path | None = None) -> None:
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the worker)
        self._process = subprocess.Popen(
            [str(python), "-m", "impl.sglang.server.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=outside(root),
        )
        if self._line() != b'"ready"\n':
            words = self._last_words()
            self.close()
            raise UnusableImplementation(f"the release does not load in {python}: {words}")

    def run(self, job: Job) -> RunOutcome:
        """Serve a job. Raises UnusableImplementation where code of kvspec fails in it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(job) + b"\n")
            self._process.stdin.flush()
        if not (line := self._line()):
            raise RuntimeError(f"the worker ended: {self._last_words()}")
        outcome = msgspec.json.decode(line, type=RunOutcome)
        if outcome.unusable:
            raise UnusableImplementation(outcome.unusable)
        return outcome

    def close(self) -> None:
        """End the worker."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def _last_words(self) -> str:
        self._errors.seek(0)
        return last_words(self._errors.read())
