"""The drawing of a row on a page: positions from left to right, a lane for each pool, cursors as marks."""

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from ci import Data
from ci.compare.differences import CURSORS, POOL, page_fault
from reference.geometry import Geometry
from stateful_tests.lockstep.text_drawings import span

UNIT = 36.0  # the largest width of a token (px)
DRAWING_WIDTH = 560.0  # (px)
CHARACTER = 6.6  # width of a character in a mark (px)


def draw_row(
    owner: str,
    state: Data,
    physical: bool,
    geometry: Geometry,
    length: int,
    cut: tuple[str, int, str] | None,
) -> Data:
    """Return the data that the template draws for the row of a holder.

    owner: the holder.
    state: a snapshot of both sides (ci/compare/snapshot.py).
    physical: the row of the system is drawn; otherwise that of the reference.
    length: positions for which the page has room.
    cut: (holder, position, label of that position) of the row that the command cuts; None if it cuts none.
    """
    sides = ("system", "reference") if physical else ("reference", "system")
    holder, other = (state[name]["holders"].get(owner) for name in sides)
    size = geometry.page_size
    cursors = holder["cursors"]
    pages = max(1, -(-length // size))
    unit = min(UNIT, DRAWING_WIDTH / (pages * size))
    keys = [d["key"] for d in state["differences"]]
    # Pages of the prefix that are not those of the tree.
    foreign = {int(key[3]) for key in keys if key[:3] == ["holders", owner, "prefix"]}
    other_pages = {pool: set(other[pool]) if other is not None else set() for pool in geometry.pools}
    pool_pages = state["system"]["pools"] if physical else None
    row = _Row(holder, other_pages, foreign, pool_pages, geometry, unit)
    segments = [*_segment_bounds(cursors, pages * size, size, unit)]
    lanes = [
        {"pool": POOL[pool], "segments": [row.segment(start, end, pool) for start, end in segments]}
        for pool in geometry.pools
    ]
    target = holder["target"]
    target_name = "target"
    if cut is not None and cut[0] == owner:
        _, target, target_name = cut
    differing = {k for k in CURSORS if other is not None and other["cursors"][k] != cursors[k]}
    marks = _marks(cursors, differing, geometry, unit)
    marks_height = 20 * (1 + max((mark["level"] for mark in marks), default=0))
    return {
        "width": pages * size * unit,
        "top": marks_height,
        "height": marks_height + 30 * len(lanes) + 22,
        "lanes": lanes,
        "marks": marks,
        "target": None
        if target is None
        else {"x": target * unit, "text": f"{target_name} {target}"},
        "window": _window(cursors, geometry, unit),
        "bounds": _page_bounds(cursors, size, unit),
        "label": _description(owner, holder, geometry),
    }


def _marks(cursors: Data, differing: set[str], geometry: Geometry, unit: float) -> list[Data]:
    """Return the marks of the cursors above a row; cursors at one position share a mark.

    differing: cursors that have another position on the other side.
    """
    marks: dict[int, list[str]] = {}
    for letter, position in cursors.items():
        if (letter != "E" or geometry.window) and (letter != "R" or geometry.tree or position):
            marks.setdefault(position, []).append(letter)
    return _stack_marks(
        (position * unit, f"{' '.join(letters)} {position}", bool(differing & set(letters)))
        for position, letters in sorted(marks.items())
    )


def _window(cursors: Data, geometry: Geometry, unit: float) -> Data | None:
    """Return the attention window that ends at the last committed token; None without one."""
    if not geometry.window:
        return None
    start = max(0, cursors["C"] - geometry.window)
    if cursors["C"] <= start:
        return None
    return {"x": start * unit, "width": (cursors["C"] - start) * unit}


def _page_bounds(cursors: Data, size: int, unit: float) -> list[float]:
    """Return the x positions of page bounds; empty if pages are too narrow to be distinguished."""
    if size == 1 or size * unit <= 8:
        return []
    end = -(-max(cursors["A"], cursors["C"]) // size) * size
    return [position * unit for position in range(0, end + size, size)]


class _Row(NamedTuple):
    """The row of a holder on one side, with what is compared on the other.

    holder: the holder in a snapshot.
    other_pages: indices of the holder's pages on the other side, by pool.
    foreign: indices of pages of the prefix that are not those of the tree.
    pages: the system's pages by pool; None for a row of the reference.
    unit: width of a token (px).
    """

    holder: Data
    other_pages: dict[str, set[int]]
    foreign: set[int]
    pages: Data | None
    geometry: Geometry
    unit: float

    def segment(self, start: int, end: int, pool: str) -> Data:
        """Return the drawing of positions [start, end) of a pool, which lie in one page and have one kind."""
        size = self.geometry.page_size
        page = start // size
        own_pages = self.holder[pool]
        kind = self._kind(start, pool)
        in_tree = start < self.holder["cursors"]["R"]
        number = self._tree_page(pool, page) if in_tree else own_pages.get(page)
        fault = self._page_fault(pool, page, number, in_tree)
        is_own = page in own_pages
        is_other = page in self.other_pages[pool]
        wrong = self.holder.get("wrong", {}).get(pool, ())
        misread = [position for position in sorted(wrong) if start <= position < end]
        title = f"{POOL[pool]} {span(start, end)}: {_MEANING[kind]}"
        if misread:
            title += f"; position {misread[0]} reads another token's KV"
        if number is not None:
            title += f", page {number}" + (f" ({fault})" if fault else "")
        room = min(size - start % size, end - start) * self.unit
        fits = number is not None and start % size == 0 and len(str(number)) * CHARACTER < room
        if misread:
            text = "✗"
        else:
            text = str(number) if fits else ""
        return {
            "x": start * self.unit,
            "width": (end - start) * self.unit,
            "kind": kind,
            "differs": bool(fault) or (not in_tree and is_own is not is_other),
            "text": text,
            "title": title,
        }

    def _tree_page(self, pool: str, page: int) -> int | None:
        """Return the number of a page of the locked prefix, if the system shows it."""
        if self.pages is None or pool != "full":
            return None
        prefix = self.holder.get("prefix", ())
        return prefix[page] if page < len(prefix) else None

    def _kind(self, start: int, pool: str) -> str:
        """Return the kind of a segment, a key of _MEANING."""
        cursors = self.holder["cursors"]
        size = self.geometry.page_size
        if start < cursors["R"]:
            return "tree"
        if start // size in self.holder[pool]:
            if start < cursors["C"]:
                return "held"
            return "ahead" if start < cursors["A"] else "rest"
        if start >= -(-cursors["A"] // size) * size:
            return "none"
        return "evicted" if pool == "swa" and start < cursors["E"] else "hole"

    def _page_fault(self, pool: str, page: int, number: int | None, in_tree: bool) -> str:
        """Describe the fault of a page of the system; "" if it has none, and for the reference."""
        if self.pages is None:
            return ""
        if in_tree:
            is_foreign = pool == "full" and page in self.foreign
            return "not the page that the tree has" if is_foreign else ""
        cell = self.pages[pool].get(number)
        if number is None or cell is None:
            return ""
        return page_fault(number, self.geometry.pages(pool), len(cell["owners"]), cell["free"])


_MEANING = {
    "tree": "the radix tree's",
    "held": "committed",
    "ahead": "allocated ahead",
    "evicted": "evicted",
    "rest": "rest of the page",
    "none": "nothing",
    "hole": "no slot",
}


def _segment_bounds(
    cursors: dict[str, int], end: int, size: int, unit: float
) -> Iterable[tuple[int, int]]:
    """Return the (start, end) of each segment: cut at cursors, and at page bounds if they are wide
    enough."""
    bounds = {0, end, *(c for c in cursors.values() if 0 < c < end)}
    if size * unit >= 4:
        bounds |= set(range(0, end, size))
    return pairwise(sorted(bounds))


def _stack_marks(marks: Iterable[tuple[float, str, bool]]) -> list[Data]:
    """Return the marks, with overlapping ones on different levels.

    marks: (x, text, differs).
    """
    ends: list[float] = []  # by level
    stacked = []
    for x, text, differs in marks:
        width = len(text) * CHARACTER + 6
        level = next((i for i, end in enumerate(ends) if end <= x - width / 2), len(ends))
        ends[level : level + 1] = [x + width / 2]
        stacked.append({"x": x, "text": text, "level": level, "differs": differs})
    return stacked


def _description(owner: str, holder: Data, geometry: Geometry) -> str:
    """Describe the drawing in words, for screen readers."""
    c = holder["cursors"]
    parts = [f"row of {owner}: {CURSORS['C']} {c['C']}, {CURSORS['A']} {c['A']}"]
    if geometry.window:
        parts.append(f"{CURSORS['E']} {c['E']}")
    if geometry.tree:
        parts.append(f"{CURSORS['R']} {c['R']}")
    parts += [f"{len(holder[pool])} {POOL[pool]} pages" for pool in geometry.pools]
    return ", ".join(parts)
