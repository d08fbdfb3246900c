"""Faults of the arithmetic, as changes of reference/cursors.py: z3 and CrossHair have to refute each.

A named bug of `impl.bugs` is the same fault in the torch implementation.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from stateful_tests.prove.obligations import SOURCES


@dataclass(frozen=True)
class Fault:
    """A table of faults.toml, which says what its fields are."""

    name: str
    right: str
    wrong: str
    refuted: list[str]
    bugs: list[str]
    crosshair: str | None = None

    @property
    def source(self) -> str:
        """The module with the fault in it."""
        assert SOURCES["contract"].count(self.right) == 1, self.name
        return SOURCES["contract"].replace(self.right, self.wrong)


_TABLES = tomllib.loads(Path(__file__).with_name("faults.toml").read_text(encoding="utf-8"))[
    "fault"
]
FAULTS = tuple(Fault(**{"bugs": []} | table) for table in _TABLES)
