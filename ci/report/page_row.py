"""A row on a page: positions from left to right, a strip for each pool, the cursors as marks."""

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from ci import Data
from ci.compare.differences import CURSORS, POOL, trouble
from reference.geometry import Geometry
from stateful_tests.lockstep.pictures import span

UNIT = 36.0  # width of a token in a drawing, where there is room
DRAWING_WIDTH = 560.0
CHARACTER = 6.6  # width of one in a mark


def drawing(
    who: str,
    state: Data,
    physical: bool,
    geometry: Geometry,
    length: int,
    cut: tuple[str, int, str] | None,
) -> Data:
    """Return the data that the template draws. length: positions that the rows of the page need. cut: whose
    row the command cuts, where, and what that place is called."""
    sides = ("system", "reference") if physical else ("reference", "system")
    holder, other = (state[name]["holders"].get(who) for name in sides)
    size = geometry.page_size
    cursors = holder["cursors"]
    pages = max(1, -(-length // size))
    unit = min(UNIT, DRAWING_WIDTH / (pages * size))
    keys = [d["key"] for d in state["differences"]]
    # not what the tree has
    foreign = {int(key[3]) for key in keys if key[:3] == ["holders", who, "prefix"]}
    theirs = {pool: set(other[pool]) if other is not None else set() for pool in geometry.pools}
    of_system = state["system"]["pools"] if physical else None
    row = _Row(holder, theirs, foreign, of_system, geometry, unit)
    cuts = [*_cuts(cursors, pages * size, size, unit)]
    lanes = [
        {"pool": POOL[pool], "segments": [row.segment(start, end, pool) for start, end in cuts]}
        for pool in geometry.pools
    ]
    target, called = holder["target"], "target"
    if cut is not None and cut[0] == who:
        _, target, called = cut
    off = {k for k in CURSORS if other is not None and other["cursors"][k] != cursors[k]}
    top = _marks(cursors, off, geometry, unit)
    height = 20 * (1 + max((m["level"] for m in top), default=0))
    return {
        "width": pages * size * unit,
        "top": height,
        "height": height + 30 * len(lanes) + 22,
        "lanes": lanes,
        "marks": top,
        "target": target if target is None else {"x": target * unit, "text": f"{called} {target}"},
        "window": _window(cursors, geometry, unit),
        "bounds": _page_bounds(cursors, size, unit),
        "label": _spoken(who, holder, geometry),
    }


def _marks(cursors: Data, off: set[str], geometry: Geometry, unit: float) -> list[Data]:
    """The cursors above a row; those of one position share a mark. off: those that the other side has
    elsewhere."""
    marks: dict[int, list[str]] = {}
    for letter, position in cursors.items():
        if (letter != "E" or geometry.window) and (letter != "R" or geometry.tree or position):
            marks.setdefault(position, []).append(letter)
    return _levels(
        (position * unit, f"{' '.join(letters)} {position}", bool(off & set(letters)))
        for position, letters in sorted(marks.items())
    )


def _window(cursors: Data, geometry: Geometry, unit: float) -> Data | None:
    """The window that ends at the last committed token."""
    if not geometry.window:
        return None
    start = max(0, cursors["C"] - geometry.window)
    if cursors["C"] <= start:
        return None
    return {"x": start * unit, "width": (cursors["C"] - start) * unit}


def _page_bounds(cursors: Data, size: int, unit: float) -> list[float]:
    """Return the bounds of pages, if they are wide enough to be told apart."""
    if size == 1 or size * unit <= 8:
        return []
    used = -(-max(cursors["A"], cursors["C"]) // size) * size
    return [at * unit for at in range(0, used + size, size)]


class _Row(NamedTuple):
    """A holder's row on one side, and what is seen of it on the other.

    holder: as a snapshot has it. theirs: pool -> pages that the other side has. foreign: pages that are not
    the tree's. pages: the system's pages by pool, None on the reference's side. unit: width of a token.
    """

    holder: Data
    theirs: dict[str, set[int]]
    foreign: set[int]
    pages: Data | None
    geometry: Geometry
    unit: float

    def segment(self, start: int, end: int, pool: str) -> Data:
        """Positions [start, end) of a pool, all of one page and one kind."""
        size, mine = self.geometry.page_size, self.holder[pool]
        page, of_tree = start // size, start < self.holder["cursors"]["R"]
        kind, number = self._kind(start, pool), mine.get(page)
        if of_tree:
            prefix = (
                self.holder.get("prefix", ()) if self.pages is not None and pool == "full" else ()
            )
            number = prefix[page] if page < len(prefix) else None
        bad = self._bad(pool, page, number, of_tree)
        misread = [
            p for p in sorted(self.holder.get("wrong", {}).get(pool, ())) if start <= p < end
        ]
        title = f"{POOL[pool]} {span(start, end)}: {_MEANING[kind]}"
        if misread:
            title += f"; position {misread[0]} reads another token's KV"
        if number is not None:
            title += f", page {number}" + (f" ({bad})" if bad else "")
        room = min(size - start % size, end - start) * self.unit
        shown = number is not None and start % size == 0 and len(str(number)) * CHARACTER < room
        return {
            "x": start * self.unit,
            "width": (end - start) * self.unit,
            "kind": kind,
            "differs": bool(bad) or (not of_tree and (page in mine) != (page in self.theirs[pool])),
            "text": "✗" if misread else str(number) if shown else "",
            "title": title,
        }

    def _kind(self, start: int, pool: str) -> str:
        cursors, size = self.holder["cursors"], self.geometry.page_size
        if start < cursors["R"]:
            return "tree"
        if start // size in self.holder[pool]:
            if start < cursors["C"]:
                return "held"
            return "ahead" if start < cursors["A"] else "rest"
        if start >= -(-cursors["A"] // size) * size:
            return "none"
        return "evicted" if pool == "swa" and start < cursors["E"] else "hole"

    def _bad(self, pool: str, page: int, number: int | None, of_tree: bool) -> str:
        """Say what is wrong with the page that lies there; empty on the reference's side."""
        if self.pages is None:
            return ""
        if of_tree:
            return (
                "not the page that the tree has" if pool == "full" and page in self.foreign else ""
            )
        cell = self.pages[pool].get(number)
        if number is None or cell is None:
            return ""
        return trouble(number, self.geometry.pages(pool), len(cell["owners"]), cell["free"])


_MEANING = {
    "tree": "the radix tree's",
    "held": "committed",
    "ahead": "allocated ahead",
    "evicted": "evicted",
    "rest": "rest of the page",
    "none": "nothing",
    "hole": "no slot",
}


def _cuts(cursors: dict[str, int], end: int, size: int, unit: float) -> Iterable[tuple[int, int]]:
    """Stretches of one kind: between page boundaries (where they can be seen) and cursors."""
    at = {0, end, *(c for c in cursors.values() if 0 < c < end)}
    if size * unit >= 4:
        at |= set(range(0, end, size))
    return pairwise(sorted(at))


def _levels(marks: Iterable[tuple[float, str, bool]]) -> list[Data]:
    """Marks that would overlap go one above the other."""
    ends: list[float] = []
    made = []
    for x, text, differs in marks:
        width = len(text) * CHARACTER + 6
        level = next((i for i, end in enumerate(ends) if end <= x - width / 2), len(ends))
        ends[level : level + 1] = [x + width / 2]
        made.append({"x": x, "text": text, "level": level, "differs": differs})
    return made


def _spoken(who: str, holder: Data, geometry: Geometry) -> str:
    """The drawing in words, for those who do not see it."""
    c = holder["cursors"]
    parts = [f"row of {who}: {CURSORS['C']} {c['C']}, {CURSORS['A']} {c['A']}"]
    if geometry.window:
        parts.append(f"{CURSORS['E']} {c['E']}")
    if geometry.tree:
        parts.append(f"{CURSORS['R']} {c['R']}")
    parts += [f"{len(holder[pool])} {POOL[pool]} pages" for pool in geometry.pools]
    return ", ".join(parts)
