"""A row on a page: positions from left to right, a strip for each pool, the cursors as marks."""

from collections.abc import Iterable
from itertools import pairwise

from ci import Data
from ci.compare.differences import CURSORS, POOL, trouble
from reference.geometry import Geometry

UNIT = 36.0  # width of a token in a drawing, where there is room
DRAWING_WIDTH = 560.0
CHARACTER = 6.6  # width of one in a mark


def drawing(
    who: str, state: Data, physical: bool, geometry: Geometry, length: int, cut: tuple[str, int, str] | None
) -> Data:
    """What the template draws. length: positions that the rows of the page need. cut: whose row the command
    cuts, where, and what that place is called."""
    sides = ("system", "reference") if physical else ("reference", "system")
    holder, other = (state[name]["holders"].get(who) for name in sides)
    size = geometry.page_size
    cursors = holder["cursors"]
    pages = max(1, -(-length // size))
    unit = min(UNIT, DRAWING_WIDTH / (pages * size))
    keys = [d["key"] for d in state["differences"]]
    foreign = {int(key[3]) for key in keys if key[:3] == ["holders", who, "prefix"]}  # not what the tree has
    lanes = []
    for pool in geometry.pools:
        theirs = set(other[pool]) if other is not None else set()
        wrong = set(holder.get("wrong", {}).get(pool, ()))
        lanes.append(
            {
                "pool": POOL[pool],
                "segments": [
                    _segment(a, b, pool, holder, theirs, wrong, foreign, state, geometry, physical, unit)
                    for a, b in _cuts(cursors, pages * size, size, unit)
                ],
            }
        )
    _, target, called = cut if cut is not None and cut[0] == who else (who, holder["target"], "target")
    marks: dict[int, list[str]] = {}
    for letter, position in cursors.items():
        if (letter != "E" or geometry.window) and (letter != "R" or geometry.tree or position):
            marks.setdefault(position, []).append(letter)
    off = {k for k in CURSORS if other is not None and other["cursors"][k] != cursors[k]}
    top = _levels(
        (position * unit, f"{' '.join(letters)} {position}", bool(off & set(letters)))
        for position, letters in sorted(marks.items())
    )
    height = 20 * (1 + max((m["level"] for m in top), default=0))
    start = max(0, cursors["C"] - geometry.window) if geometry.window else 0
    used = -(-max(cursors["A"], cursors["C"]) // size) * size
    return {
        "width": pages * size * unit,
        "top": height,
        "height": height + 30 * len(lanes) + 22,
        "lanes": lanes,
        "marks": top,
        "target": {"x": target * unit, "text": f"{called} {target}"} if target is not None else None,
        "window": {"x": start * unit, "width": (cursors["C"] - start) * unit}
        if geometry.window and cursors["C"] > start
        else None,
        "bounds": [at * unit for at in range(0, used + size, size)] if size > 1 and size * unit > 8 else [],
        "label": _spoken(who, holder, geometry),
    }


def _cuts(cursors: dict[str, int], end: int, size: int, unit: float) -> Iterable[tuple[int, int]]:
    """Stretches of one kind: between page boundaries (where they can be seen) and cursors."""
    at = {0, end, *(c for c in cursors.values() if 0 < c < end)}
    if size * unit >= 4:
        at |= set(range(0, end, size))
    return pairwise(sorted(at))


def _segment(
    start: int, end: int, pool: str, holder: Data, theirs: set[int], wrong: set[int], foreign: set[int],
    state: Data, geometry: Geometry, physical: bool, unit: float,
) -> Data:  # fmt: skip
    page, cursors, size = start // geometry.page_size, holder["cursors"], geometry.page_size
    mine: dict[int, int | None] = holder[pool]
    number = mine.get(page)
    if start < cursors["R"]:
        kind = "tree"
        prefix = holder.get("prefix", ())
        number = prefix[page] if physical and pool == "full" and page < len(prefix) else None
    elif page in mine:
        kind = "held" if start < cursors["C"] else "ahead" if start < cursors["A"] else "rest"
    elif start >= -(-cursors["A"] // size) * size:
        kind = "none"
    else:
        kind = "evicted" if pool == "swa" and start < cursors["E"] else "hole"
    meaning = {
        "tree": "the radix tree's", "held": "committed", "ahead": "allocated ahead", "evicted": "evicted",
        "rest": "rest of the page", "none": "nothing", "hole": "no slot",
    }[kind]  # fmt: skip
    bad = ""
    if physical and number is not None and kind != "tree":
        cell = state["system"]["pools"][pool].get(number)
        if cell is not None:
            bad = trouble(number, geometry.pages(pool), len(cell["owners"]), cell["free"])
    elif kind == "tree" and physical and pool == "full" and page in foreign:
        bad = "not the page that the tree has"
    misread = sorted(p for p in wrong if start <= p < end)
    if misread:
        meaning += f"; position {misread[0]} reads another token's KV"
    title = f"{POOL[pool]} [{start}, {end}): {meaning}"
    if number is not None:
        title += f", page {number}" + (f" ({bad})" if bad else "")
    room = min(size - start % size, end - start) * unit
    shown = number is not None and start % size == 0 and len(str(number)) * CHARACTER < room
    return {
        "x": start * unit,
        "width": (end - start) * unit,
        "kind": kind,
        "differs": ((page in mine) != (page in theirs) and start >= cursors["R"]) or bool(bad),
        "text": "✗" if misread else str(number) if shown else "",
        "title": title,
    }


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
