"""A replayed trace as one HTML page: every step drawn, the reference beside the system.

The page is made here, from `ci.compare.snapshot`, as plain HTML and SVG; its script only turns pages. So
it reads without a script, prints, and asks nobody on a network for anything. What comes from a trace is
escaped by the template, always.
"""

import base64
import hashlib
import json
from pathlib import PurePath
from typing import Any

from markupsafe import Markup

from ci import TEMPLATES, Data, templates
from ci.compare.differences import CURSORS, POOL, page_fault
from ci.compare.step_table import cursor_letters, step_table
from ci.compare.snapshot import snapshots
from ci.report import text_output
from ci.report.pages.row_drawing import DRAWING_WIDTH, UNIT, draw_row
from ci.shown_kinds import shown_kind_of
from impl.bugs import BUGS
from reference.all_clauses import ALL_CLAUSES
from reference.commands import Admit
from reference.geometry import Geometry
from stateful_tests.lockstep.run_moments import Moment
from stateful_tests.lockstep.run_results import Run

MAX_STEPS = 200  # a page of a long trace shows its end
MAX_COLUMNS = 5  # of the step table
MAX_NODES = 8  # of the step table
MAX_DEPTH = 24  # of a drawn tree
HUES = 6
SMALL = 48  # pages of a pool that is shown whole
FEW = 16  # pages of a larger pool that are shown without a reason
MAX_CELLS = 40_000  # pages drawn, all steps together
FREE: Data = {"owners": [], "free": 1}


def page(data: Data, run: Run) -> str:
    """Return the page of a run. The same run gives the same bytes.

    data: by `ci.report.report_data`.
    """
    script = _source("replay.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    alone = shown_kind_of(run.trace.geometry).draws()
    content = alone.content(data, run) if alone is not None else _content(data, run)
    violation = data["violation"]
    return (
        templates(escape=True)
        .get_template("replay.html" if alone is None else "engine.html")
        .render(
            **content,
            data=data,
            title=violation["clause"] if violation is not None else _trace_name(data),
            because=_with_capital(data["because"] or violation["observed"])
            if violation is not None
            else "",
            violated=_violated_clauses(violation) if violation is not None else [],
            style=Markup(_source("replay.css")),
            script=Markup(script),
            policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
            trace_json=Markup(_inert_json(data["trace"])),
        )
    )


def _source(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")


def _inert_json(value: Any) -> str:
    """Return JSON for a script element: nothing in it can end that element or begin another."""
    text = json.dumps(value, indent=1)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def states(run: Run) -> list[Data]:
    """Return the data of a page."""
    alone = shown_kind_of(run.trace.geometry).draws()
    return snapshots(run, MAX_STEPS) if alone is None else alone.states(run)


def _content(data: Data, run: Run) -> Data:
    """Return the template's data of a page: each shown step with both sides and their pools, and the table of
    steps."""
    states_shown = states(run)
    geometry = run.trace.sizes(Geometry)
    owners = _owners(states_shown)
    two_sided = run.system != "reference"  # the reference has no physical pages
    rows = (
        step_table(run, states_shown, MAX_COLUMNS, MAX_NODES)
        if states_shown
        else {"columns": [], "rows": []}
    )
    length = max(
        (_positions_needed(side) for s in states_shown for side in (s["reference"], s["system"])), default=1
    )
    used = {pool: _used_pages(states_shown, pool, geometry.pages(pool)) for pool in geometry.pools}
    steps = []
    before = None
    for state in states_shown:
        differs = {tuple(d["key"]) for d in state["differences"]}
        row = data["rows"][state["step"]]
        names = ("reference", "system") if two_sided else ("reference",)
        shown_pools = geometry.pools if two_sided else ()
        steps.append(
            {
                **{k: state[k] for k in ("step", "command", "differences")},
                "violates": row["violates"],
                "changes": text_output.changes(row),
                "sides": [_side_data(name, state, run, owners, length) for name in names],
                "pools": [
                    _pool_data(pool, state, before, geometry, owners, used[pool]) for pool in shown_pools
                ],
                "differs": differs,
            }
        )
        before = state
    steps_taken = [m.step for m in run.moments(Moment) if m.step is not None]
    policy_is_free = any(step.tree_policy_is_free for step in steps_taken)
    return {
        "steps": steps,
        "left_out": len(run.rows) - len(states_shown),
        "start": _start_step(states_shown, data["violation"] is not None),
        "step_table": rows,
        "owners": owners,
        "two_sided": two_sided,
        # Two drawings beside each other would be too small on paper.
        "wide": length * UNIT > DRAWING_WIDTH / 2,
        "sizes": {k: text_output.or_none(v) for k, v in data["trace"]["geometry"].items()},
        "cursor_names": CURSORS,
        "window": geometry.window,
        "tree": geometry.tree,
        "tree_policy_is_free": policy_is_free,
        "story_open": policy_is_free,
        "letters": cursor_letters(run, states_shown),
    }


def _trace_name(data: Data) -> str:
    """Return the name of a trace without a violation: its file, in words."""
    return PurePath(data.get("file", "")).stem.replace("_", " ").strip() or data["implementation"]


def _with_capital(sentence: str) -> str:
    """Return the sentence with a capital, unless it begins with a name, such as r1."""
    name = any(c.isdigit() for c in sentence.partition(" ")[0])
    return sentence if name else sentence[:1].upper() + sentence[1:]


def _violated_clauses(violation: Data) -> list[Data]:
    """Return the clauses that fail at the last command, in order: their sentence, expected and
    observed."""
    details = [(violation["expected"], violation["observed"]), *violation["details"]]
    clauses = []
    for name, (expected, observed) in zip(
        (violation["clause"], *violation["also"]), details, strict=True
    ):
        clause = ALL_CLAUSES.get(name)
        about = {
            "Why": clause.why, "Scope": clause.scope, "Decision": clause.decision,
            "When a simpler rule would do": clause.assumption, "Source": clause.source,
        } if clause is not None else {}  # fmt: skip
        clauses.append(
            {
                "id": name,
                "known": clause is not None,
                "title": clause.title if clause is not None else "",
                "sentence": clause.sentence if clause is not None else violation["sentence"],
                "about": {label: text for label, text in about.items() if text},
                "bugs": [bug for bug in BUGS.values() if bug.clause == name],
                "expected": expected,
                "observed": observed,
            }
        )
    return clauses


def _start_step(states: list[Data], violated: bool) -> int:
    """Return the step that the page opens with: the violation, or else the last step after which a
    holder has something."""
    busy = [
        i for i, state in enumerate(states) if state["system"]["holders"] or state["system"]["nodes"]
    ]
    return len(states) - 1 if violated or not busy else busy[-1]


def _owners(states: list[Data]) -> dict[str, Data]:
    """Return all holders, in the order in which they appear, with a short tag and a hue."""
    owners: dict[str, Data] = {}
    for state in states:
        for side in (state["reference"], state["system"]):
            for name in (*side["holders"], *side["lock_holders"]):
                if name not in owners:
                    tag = name if len(name) <= 3 else chr(ord("A") + len(owners) % 26)
                    owners[name] = {"tag": tag, "hue": f"o{len(owners) % HUES}"}
    return owners


def _owner(name: str, owners: dict[str, Data]) -> Data:
    if name.startswith("tree ") or name not in owners:
        return {"tag": "tree", "hue": "tree"}
    return owners[name]


def _cut_of_command(run: Run, index: int, side: Data) -> tuple[str, int, str] | None:
    """Return the holder whose row a command cuts, the position on this side, and the name of that
    position."""
    step = run.moments(Moment)[index - run.history_start].step
    if step is None or step.cut_at is None:
        return None
    who, _, target = step.cut_at
    if not isinstance(step.command, Admit):
        return who, target, "target"
    return (
        (who, side["holders"][who]["cursors"]["C"], "resumes at")
        if who in side["holders"]
        else None
    )


# -- one side of a step ---------------------------------------------------------------------------


def _side_data(name: str, state: Data, run: Run, owners: dict[str, Data], length: int) -> Data:
    """Return the template's data of one side of a step.

    name: "reference" or "system".
    length: positions of the longest row that is drawn.
    """
    side = state[name]
    other = state["system" if name == "reference" else "reference"]
    cut = _cut_of_command(run, state["step"], side)
    geometry = run.trace.sizes(Geometry)
    physical = name == "system"
    holders = [
        {
            "name": who,
            "physical": physical,
            **_owner(who, owners),
            **(side["holders"].get(who) or {"who": ""}),
            "drawing": draw_row(who, state, physical, geometry, length, cut)
            if who in side["holders"]
            else None,
        }
        for who in dict.fromkeys((*side["holders"], *other["holders"]))
    ]
    return {
        "heading": "Reference" if name == "reference" else f"In {run.system}",
        "outcome": side["outcome"],
        "holders": sorted(holders, key=lambda h: h["name"]),
        "cursors": side["cursors"],
        "requests": side["requests"],
        "sessions": side["sessions"],
        "free": side["free"],
        "lock_holders": side["lock_holders"],
        "counters": side["counters"],
        "accounts": side["accounts"],
        "forest": _nested_tree(side["nodes"]),
        "missing": [n for n in other["nodes"] if n not in side["nodes"]],
        "physical": physical,
    }


def _nested_tree(nodes: dict[str, Data]) -> list[Data]:
    """Return the tree as nested lists; a node whose parent is missing hangs from the root."""
    below: dict[str, list[str]] = {}
    for path, node in nodes.items():
        parent = node["parent"] if node["parent"] in nodes and node["parent"] != path else ""
        below.setdefault(parent, []).append(path)

    def grow_forest(path: str, depth: int) -> list[Data]:
        forest: list[Data] = []
        waiting = list(reversed(below.get(path, ())))
        while waiting:
            child = waiting.pop()
            deeper = depth < MAX_DEPTH
            children = grow_forest(child, depth + 1) if deeper else []
            forest.append({"path": child, **nodes[child], "children": children})
            if not deeper:  # set no further in
                waiting += reversed(below.get(child, ()))
        return forest

    return grow_forest("", 1)


def _positions_needed(side: Data) -> int:
    """Return how many positions a side's rows need."""
    reach = (max(*h["cursors"].values(), h["target"] or 0) for h in side["holders"].values())
    return max(reach, default=1)


# -- pools: every page of the system, by number ---------------------------------------------------


def _used_pages(states: list[Data], pool: str, size: int) -> list[int]:
    """Return the pages that were ever anything but free, once, and some more, to show that there are."""
    busy = {page for state in states for page in state["system"]["pools"][pool]}
    more = range(1, min(size, SMALL if size <= SMALL else FEW) + 1)
    return sorted(busy | set(more))[: max(SMALL, MAX_CELLS // max(1, len(states)))]


def _pool_data(
    pool: str,
    state: Data,
    before: Data | None,
    geometry: Geometry,
    owners: dict[str, Data],
    pages_shown: list[int],
) -> Data:
    """Return the template's data of a pool of the system: its pages with owners and faults.

    before: the step shown before, None for the first.
    pages_shown: the numbers of the pages.
    """
    pages = state["system"]["pools"][pool]
    was = before["system"]["pools"][pool] if before is not None else {}
    cells = []
    for number in pages_shown:
        cell = pages.get(number, FREE)
        if cell is FREE and not 1 <= number <= geometry.pages(pool):
            continue
        wrong = page_fault(number, geometry.pages(pool), len(cell["owners"]), cell["free"])
        owner_names = [_owner(name, owners) for name, _ in cell["owners"]]
        tags = [*(o["tag"] for o in owner_names), *(["free"] * cell["free"] if wrong else [])][:3]
        without_owner = "free" if cell["free"] else "lost"
        size = geometry.page_size
        places = [
            f"{name.removeprefix('tree ')} [{at * size}, {(at + 1) * size})"
            for name, at in cell["owners"]
        ]
        owners_text = " and ".join([*places, *(["free"] * cell["free"])]) or "nobody"
        cells.append(
            {
                "number": number,
                "hue": owner_names[0]["hue"] if owner_names else without_owner,
                "hue2": owner_names[1]["hue"] if len(owner_names) > 1 else "",
                "tags": tags if wrong or owner_names else [],
                "wrong": wrong,
                "changed": before is not None and was.get(number, FREE) != cell,
                "title": f"{POOL[pool]} page {number}: {owners_text}"
                + (f" ({wrong})" if wrong else ""),
            }
        )
    return {
        "pool": POOL[pool],
        "cells": cells,
        "total": geometry.pages(pool),
        "left_out": geometry.pages(pool) - sum(1 for p in pages_shown if 1 <= p <= geometry.pages(pool)),
        "free": state["system"]["free"][pool],
    }
