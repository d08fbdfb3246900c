"""Faults that no release has: what puts each into a checkout of one, and the commands that show it.

A fault shows in caches of one page size alone, so all of them fit into one checkout. No run that is drawn
has these page sizes.
"""

import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from reference.commands import Mode
from reference.geometry import Geometry
from stateful_tests.lockstep.results import Trace
from stateful_tests.traces.notation import parse

# Appended to a module; a fault is given what it takes the place of.
_GATE = """

def _at_page_size(size, kind, name, fault):
    right = getattr(kind, name)

    def run(this, *args, **kwargs):
        cache = getattr(this, "tree_core", None) or getattr(this, "tree_cache", None) or this
        if cache.page_size == size:
            return fault(right, this, *args, **kwargs)
        return right(this, *args, **kwargs)

    setattr(kind, name, run)
"""


@dataclass(frozen=True)
class Planted:
    """A table of faults.toml, which says what its fields are: a fault at one page size, and what shows it."""

    clause: str
    page_size: int
    commands: str
    places: dict[str, str]
    faults: dict[str, str] = field(default_factory=dict)
    fault: str = ""
    window: int = 1
    tree: bool = True
    name: str = ""

    def trace(self) -> Trace:
        size = self.page_size
        window = self.window * size or None
        always = (("SGLANG_SWA_EVICTION_INTERVAL", "1"),)  # rounds evict
        geometry = Geometry(
            size, window, 8, 0 if window is None else 8, 3, 4 * size, self.tree, always
        )
        commands = tuple(map(parse, self.commands.split(";")))
        return Trace(geometry, Mode.FAITHFUL, commands, clause=self.clause)


def plant(release: str, checkout: Path) -> None:
    """Put all faults of this release into a checkout of it."""
    for fault in PLANTED:
        if release in fault.places:
            file, _, name = fault.places[release].partition(":")
            body = fault.faults.get(release, fault.fault)
            kind, _, method = name.partition(".")
            module = checkout / "sglang" / "srt" / file
            text = module.read_text(encoding="utf-8")
            gate = "" if _GATE in text else _GATE
            put = f"_at_page_size({fault.page_size}, {kind}, {method!r}, fault)"
            module.write_text(f"{text}{gate}\n\n{body}\n\n\n{put}\n", encoding="utf-8")


_TABLES = tomllib.loads(Path(__file__).with_name("faults.toml").read_text(encoding="utf-8"))[
    "fault"
]
PLANTED = tuple(Planted(**table) for table in _TABLES)
