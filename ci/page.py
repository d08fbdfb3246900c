"""A replayed trace as one HTML page: every step drawn, by the rules beside the system.

The page is made here, from `ci.snapshot`, as plain HTML and SVG; its script only turns pages. So it reads
without a script, prints, and asks nobody on a network for anything. What comes from a trace is escaped by
the template, always.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ci import render
from ci.differences import CURSORS, POOL, trouble
from ci.ledger import ledger, letters
from ci import Data
from ci.snapshot import snapshots
from reference.commands import Admit
from reference.clauses import CLAUSES
from reference.geometry import Geometry
from stateful_tests.results import Run

MAX_STEPS = 200  # a page of a long trace shows its end
MAX_COLUMNS = 5  # of the ledger
MAX_DEPTH = 24  # of a drawn tree
HUES = 6
SMALL, FEW = 48, 16  # pages of a pool that are shown whole, and of a larger one without a reason
MAX_CELLS = 40_000  # pages drawn, all steps together
FREE: Data = {"owners": [], "free": 1}
UNIT = 36.0  # width of a token in a drawing, where there is room
ROOM = 560.0  # width of a drawing
CHARACTER = 6.6  # width of one in a mark


def page(data: Data, run: Run) -> str:
    """The page of a run; data: what `ci.report` tells of it. The same run gives the same bytes."""
    environment = Environment(
        loader=PackageLoader("ci", "templates"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    script = _source(environment, "replay.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template("replay.html").render(
        **_content(data, run),
        style=Markup(_source(environment, "replay.css")),
        script=Markup(script),
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
        trace_json=Markup(_inert(data["trace"])),
    )


def _source(environment: Environment, name: str) -> str:
    assert environment.loader is not None
    return environment.loader.get_source(environment, name)[0]


def _inert(value: Any) -> str:
    """JSON for a script element: nothing in it can end that element or begin another."""
    text = json.dumps(value, indent=1)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def states(run: Run) -> list[Data]:
    """What a page shows, as data."""
    return snapshots(run, MAX_STEPS)


def _content(data: Data, run: Run) -> Data:
    shown = states(run)
    geometry = run.trace.geometry
    owners = _owners(shown)
    two_sided = run.system != "reference"  # the reference has no physical pages
    rows = ledger(run, shown, MAX_COLUMNS) if shown else {"columns": [], "rows": []}
    length = max((_extent(side) for s in shown for side in (s["reference"], s["system"])), default=1)
    used = {pool: _used(shown, pool, geometry.pages(pool)) for pool in geometry.pools}
    steps, before = [], None
    for state in shown:
        differs = {tuple(d["key"]) for d in state["differences"]}
        row = data["rows"][state["step"]]
        cut = _cut(run, state["step"])
        names = ("reference", "system") if two_sided else ("reference",)
        steps.append(
            {
                **{k: state[k] for k in ("step", "command", "differences")},
                "violates": row["violates"],
                "changes": render.changes(row),
                "sides": [_side(name, state, run, owners, length, cut) for name in names],
                "pools": [
                    _pool(pool, state, before, geometry, owners, used[pool])
                    for pool in (geometry.pools if two_sided else ())
                ],
                "differs": differs,
            }
        )
        before = state
    violation = data["violation"]
    clause = CLAUSES.get(violation["clause"]) if violation is not None else None
    return {
        "data": data,
        "title": (violation or {"clause": data.get("verdict", "conforms")})["clause"],
        "clause_title": clause.title if clause is not None else "",
        "steps": steps,
        "left_out": len(run.rows) - len(shown),
        "start": _start(shown, violation is not None),
        "ledger": rows,
        "owners": owners,
        "two_sided": two_sided,
        "sizes": {k: "none" if v is None else v for k, v in data["trace"]["geometry"].items()},
        "cursor_names": CURSORS,
        "window": geometry.window,
        "tree": geometry.tree,
        "letters": letters(run, shown),
    }


def _start(shown: list[Data], violated: bool) -> int:
    """What is looked at first: the violation, or else the last step after which somebody holds something."""
    busy = [i for i, state in enumerate(shown) if state["system"]["holders"] or state["system"]["nodes"]]
    return len(shown) - 1 if violated or not busy else busy[-1]


def _owners(states: list[Data]) -> dict[str, Data]:
    """Everybody who holds something, in the order in which they appear: a short tag and a hue."""
    found: dict[str, Data] = {}
    for state in states:
        for side in (state["reference"], state["system"]):
            for name in (*side["holders"], *side["guests"]):
                if name not in found:
                    tag = name if len(name) <= 3 else chr(ord("A") + len(found) % 26)
                    found[name] = {"tag": tag, "hue": f"o{len(found) % HUES}"}
    return found


def _owner(name: str, owners: dict[str, Data]) -> Data:
    if name.startswith("tree ") or name not in owners:
        return {"tag": "tree", "hue": "tree"}
    return owners[name]


def _cut(run: Run, index: int) -> tuple[str, int, str] | None:
    """Whose row a command cuts, where, and what that place is called."""
    step = run.history[index - run.first].step
    if step is None or step.cut_at is None:
        return None
    return step.cut_at[0], step.cut_at[2], "resumes at" if isinstance(step.command, Admit) else "target"


# One side of a step.


def _side(
    name: str, state: Data, run: Run, owners: dict[str, Data], length: int, cut: tuple[str, int, str] | None
) -> Data:
    side, other = state[name], state["system" if name == "reference" else "reference"]
    geometry, physical = run.trace.geometry, name == "system"
    holders = [
        {
            "name": who,
            "physical": physical,
            **_owner(who, owners),
            **(side["holders"].get(who) or {"who": ""}),
            "drawing": _drawing(who, state, physical, geometry, length, cut)
            if who in side["holders"]
            else None,
        }
        for who in dict.fromkeys((*side["holders"], *other["holders"]))
    ]
    return {
        "heading": "By the rules" if name == "reference" else f"In {run.system}",
        "outcome": side["outcome"],
        "holders": sorted(holders, key=lambda h: h["name"]),
        "cursors": side["cursors"],
        "requests": side["requests"],
        "sessions": side["sessions"],
        "free": side["free"],
        "guests": side["guests"],
        "counters": side["counters"],
        "accounts": side["accounts"],
        "forest": _forest(side["nodes"]),
        "missing": [n for n in other["nodes"] if n not in side["nodes"]],
        "physical": physical,
    }


def _forest(nodes: dict[str, Data]) -> list[Data]:
    """The tree as nested lists; a node whose parent is missing hangs from the root."""
    below: dict[str, list[str]] = {}
    for path, node in nodes.items():
        parent = node["parent"] if node["parent"] in nodes and node["parent"] != path else ""
        below.setdefault(parent, []).append(path)

    def grown(path: str, depth: int) -> list[Data]:
        found: list[Data] = []
        waiting = list(reversed(below.get(path, ())))
        while waiting:
            child = waiting.pop()
            deeper = depth < MAX_DEPTH
            children = grown(child, depth + 1) if deeper else []
            found.append({"path": child, **nodes[child], "children": children})
            if not deeper:  # set no further in
                waiting += reversed(below.get(child, ()))
        return found

    return grown("", 1)


def _extent(side: Data) -> int:
    """How many positions a side's rows need."""
    reach = (max(*h["cursors"].values(), h["target"] or 0) for h in side["holders"].values())
    return max(reach, default=1)


# A row: positions from left to right, a lane for each pool, the cursors as marks.


def _drawing(
    who: str, state: Data, physical: bool, geometry: Geometry, length: int, cut: tuple[str, int, str] | None
) -> Data:
    sides = ("system", "reference") if physical else ("reference", "system")
    holder, other = (state[name]["holders"].get(who) for name in sides)
    size = geometry.page_size
    cursors = holder["cursors"]
    pages = max(1, -(-length // size))
    unit = min(UNIT, ROOM / (pages * size))
    lanes = []
    for pool in geometry.pools:
        theirs = set(other[pool]) if other is not None else set()
        wrong = set(holder.get("wrong", {}).get(pool, ()))
        lanes.append(
            {
                "pool": POOL[pool],
                "segments": [
                    _segment(a, b, pool, holder, theirs, wrong, state, geometry, physical, unit)
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
    start: int, end: int, pool: str, holder: Data, theirs: set[int], wrong: set[int], state: Data,
    geometry: Geometry, physical: bool, unit: float,
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
        kind = "swept" if pool == "swa" and start < cursors["E"] else "hole"
    told = {
        "tree": "the radix tree's", "held": "committed", "ahead": "allocated ahead", "swept": "swept",
        "rest": "rest of the page", "none": "nothing", "hole": "no slot",
    }[kind]  # fmt: skip
    bad = ""
    if physical and number is not None and kind != "tree":
        cell = state["system"]["pools"][pool].get(number)
        if cell is not None:
            bad = trouble(number, geometry.pages(pool), len(cell["owners"]), cell["free"])
    misread = sorted(p for p in wrong if start <= p < end)
    if misread:
        told += f"; position {misread[0]} reads another token's KV"
    title = f"{POOL[pool]} [{start}, {end}): {told}"
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
    said = [f"row of {who}: {CURSORS['C']} {c['C']}, {CURSORS['A']} {c['A']}"]
    if geometry.window:
        said.append(f"{CURSORS['E']} {c['E']}")
    if geometry.tree:
        said.append(f"{CURSORS['R']} {c['R']}")
    said += [f"{len(holder[pool])} {POOL[pool]} pages" for pool in geometry.pools]
    return ", ".join(said)


# Pools: every page of the system, by number.


def _used(states: list[Data], pool: str, size: int) -> list[int]:
    """Pages that were ever anything but free, once, and some more, to show that there are."""
    busy = {page for state in states for page in state["system"]["pools"][pool]}
    more = range(1, min(size, SMALL if size <= SMALL else FEW) + 1)
    return sorted(busy | set(more))[: max(SMALL, MAX_CELLS // max(1, len(states)))]


def _pool(
    pool: str, state: Data, before: Data | None, geometry: Geometry, owners: dict[str, Data], shown: list[int]
) -> Data:
    pages = state["system"]["pools"][pool]
    was = before["system"]["pools"][pool] if before is not None else {}
    cells = []
    for number in shown:
        cell = pages.get(number, FREE)
        if cell is FREE and not 1 <= number <= geometry.pages(pool):
            continue
        wrong = trouble(number, geometry.pages(pool), len(cell["owners"]), cell["free"])
        who = [_owner(name, owners) for name, _ in cell["owners"]]
        tags = [*(o["tag"] for o in who), *(["free"] * cell["free"] if wrong else [])][:3]
        size = geometry.page_size
        places = [
            f"{name.removeprefix('tree ')} [{at * size}, {(at + 1) * size})" for name, at in cell["owners"]
        ]
        told = " and ".join([*places, *(["free"] * cell["free"])]) or "nobody"
        cells.append(
            {
                "number": number,
                "hue": who[0]["hue"] if who else "lost" if not cell["free"] else "free",
                "hue2": who[1]["hue"] if len(who) > 1 else "",
                "tags": tags if wrong or who else [],
                "wrong": wrong,
                "changed": before is not None and was.get(number, FREE) != cell,
                "title": f"{POOL[pool]} page {number}: {told}" + (f" ({wrong})" if wrong else ""),
            }
        )
    return {
        "pool": POOL[pool],
        "cells": cells,
        "total": geometry.pages(pool),
        "left_out": geometry.pages(pool) - sum(1 for p in shown if 1 <= p <= geometry.pages(pool)),
        "free": state["system"]["free"][pool],
    }
