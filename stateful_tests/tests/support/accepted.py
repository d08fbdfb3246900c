"""Expected values in files: `pytest --accept ...` writes what it finds, for a look at the diff."""

import fcntl
import json
import os
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "accepted"
ACCEPT = "KVSPEC_ACCEPT"  # set by --accept


def accepted(name: str, found: dict[str, Any]) -> dict[str, Any]:
    """The accepted values of these keys; compare what is found with them."""
    path = FOLDER / f"{name}.json"
    if not os.environ.get(ACCEPT):
        known = read(name)
        return {key: known.get(key) for key in found}
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # workers write at once
        file.seek(0)
        known = json.loads(file.read() or "{}")
        file.truncate(0)
        file.write(json.dumps(dict(sorted((known | found).items())), indent=2) + "\n")
    return found


def read(name: str) -> dict[str, Any]:
    """All accepted values of a file."""
    known: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return known
