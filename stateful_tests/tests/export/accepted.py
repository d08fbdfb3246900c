"""Expected values in files: `KVSPEC_ACCEPT=1 pytest ...` writes what it finds, for a look at the diff."""

import json
import os
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "accepted"


def accepted(name: str, found: dict[str, Any]) -> dict[str, Any]:
    """The accepted values of these keys; compare what is found with them."""
    path = FOLDER / f"{name}.json"
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if os.environ.get("KVSPEC_ACCEPT"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(dict(sorted((known | found).items())), indent=2) + "\n")
        return found
    return {key: known.get(key) for key in found}
