"""Why a system broke, in one line. What stands before the first colon is the kind of failure: it stays the
same while a trace shrinks."""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from pathlib import Path

_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))


def described(error: BaseException, root: Path | None = None) -> str:
    """Type, message, and the line that raised it: the last one below `root`, else outside of libraries."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is of whoever called the system
    places = [(f.filename, f.lineno or 0, f.name) for f in frames]
    message = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {message}{_at(places, root)}"


def kind_of(failure: str) -> str:
    """The exception's type, or how else a system ended: "SIGSEGV", "hang"."""
    return failure.partition(":")[0]


def stack(said: str, root: Path | None = None) -> str:
    """Where a worker was when faulthandler wrote this, the last call first."""
    _, _, last = said.rpartition("(most recent call first):")
    places = re.findall(r'^ +File "(.*)", line (\d+) in (.*)$', last, re.MULTILINE)
    return _at([(file, int(line), name) for file, line, name in reversed(places)], root)


def _at(places: list[tuple[str, int, str]], root: Path | None) -> str:
    own = [p for p in places if (p[0].startswith(str(root)) if root else not p[0].startswith(_LIBRARIES))]
    if not places:
        return ""
    file, line, name = (own or places)[-1]
    if root is None:
        return f" at {Path(file).name}:{line} in {name}"
    return f" at {os.path.relpath(file, root) if own else f'kvspec:{Path(file).name}'}:{line}"


