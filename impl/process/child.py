"""Processes that kvspec starts: what they inherit, and that none of them outlives it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path

MARK = "KVSPEC_WORKER"  # names the worker in the environment of all that it starts


def environment(search: Iterable[str | Path], **more: str) -> dict[str, str]:
    """Return the environment of a child.

    PYTHONOPTIMIZE is left out: it would remove the assertions of the system under test, which are findings.
    PYTHONSAFEPATH is set: no file of the current folder is imported in the place of a module.
    PYTHONHASHSEED is set, where nobody set it: sets have the same order in each run, so a trace replays.

    search: PYTHONPATH, in order.
    more: further variables.
    """
    path = os.pathsep.join(dict.fromkeys(str(folder) for folder in search if str(folder)))
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONOPTIMIZE"}
    return {"PYTHONHASHSEED": "0", **kept, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", **more}


def end_all(mark: str) -> None:
    """Kill every process whose environment has MARK=`mark`, those with a session of their own as well."""
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(folder.name) != os.getpid() and wanted in (
                folder / "environ"
            ).read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)
