"""Expected values in files. `pytest --accept` overwrites them with what it finds; review the diff."""

import fcntl
import json
import os
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "accepted"
ACCEPT = "KVSPEC_ACCEPT"  # set by --accept


def accepted_values(name: str, found: dict[str, Any]) -> dict[str, Any]:
    """Return the accepted values for the keys of `found`. With --accept, store `found` and return it."""
    path = FOLDER / f"{name}.json"
    if not os.environ.get(ACCEPT):
        known = read(name)
        return {key: known.get(key) for key in found}
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # several workers may write at the same time
        file.seek(0)
        known = json.loads(file.read() or "{}")
        text = json.dumps(dict(sorted((known | found).items())), indent=2) + "\n"
        file.truncate(0)
        file.write(text)
    return found


def read(name: str) -> dict[str, Any]:
    """Return all accepted values of a file."""
    known: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return known
