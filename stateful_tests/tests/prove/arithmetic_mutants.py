"""Faults of the arithmetic, as changes of the reference's text: what proofs and CrossHair have to refute.

A named bug of `impl.bugs` is the same fault in the torch implementation, as far as the fault is one of
lengths and pages. The bugs that are not here are faults of free lists, rows, contents, order or of
sessions, which no cursor shows.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Fault:
    """A table of faults.toml, which says what its fields are."""

    name: str
    module: str
    right: str
    wrong: str
    refuted: list[str]
    bugs: list[str]
    crosshair: str | None = None

    @property
    def edits(self) -> dict[str, tuple[tuple[str, str], ...]]:
        return {f"reference.{self.module}": ((self.right, self.wrong),)}


_TABLES = tomllib.loads(Path(__file__).with_name("faults.toml").read_text(encoding="utf-8"))["fault"]
FAULTS = tuple(Fault(**{"bugs": []} | table) for table in _TABLES)
