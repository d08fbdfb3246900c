"""A violated trace as a ledger: a row for each command, a column for each owner, node or page at stake.

Up to the last row both sides agree, and a row shows both; the last is told twice, by the rules and as the
system has it. `*` marks what a command changed, `!` what is not as the rules have it. A node of the tree is told as live or
tombstone, and by its full and SWA locks.
"""

from __future__ import annotations

from collections import Counter

from ci.report import Data
from ci.snapshot import POOL, spans
from stateful_tests.results import Run

MAX_COLUMNS = 3
MAX_ROWS = 60  # of a long trace; what led to the end is at the end

Cell = dict[str, str]  # label -> value
Column = tuple[str, ...]  # the key of a difference, without what is told of it


def ledger(run: Run, states: list[Data]) -> Data:
    """The rows of these states; a violation at the last one is told twice. Without one the columns are those
    who held something."""
    split = run.violation is not None
    geometry = run.trace.geometry
    drawer = _Drawer(states, geometry.page_size, bool(geometry.window), geometry.tree)
    rows: list[Data] = []
    before: list[Cell] = [{} for _ in drawer.columns]
    for state in states[:-1] if split else states:
        agreed = [
            drawer.cell(state, "system", column) or drawer.cell(state, "reference", column)
            for column in drawer.columns
        ]
        rows.append(_row(state, state["command"], agreed, before, agreed))
        before = agreed
    if split:
        last = states[-1]
        rules = [drawer.cell(last, "reference", column) for column in drawer.columns]
        seen = [drawer.cell(last, "system", column) for column in drawer.columns]
        rows.append(_row(last, f"{last['command']}, by the rules", rules, before, rules))
        rows.append(_row(last, "in the system", seen, before, rules))
    return {"columns": [_title(column) for column in drawer.columns], "rows": rows}


class _Drawer:
    """Which columns there are, and what stands in them."""

    def __init__(self, states: list[Data], page_size: int, window: bool, tree: bool) -> None:
        self.page_size = page_size
        self.letters = "CA" + "E" * window + "R" * tree
        self.last = last = states[-1]
        self.owners = {
            name: None
            for state in reversed(states)
            for side in (state["reference"], state["system"])
            for name, cursors in side["cursors"].items()
            if isinstance(cursors, dict) and any(cursors.values())
        }
        self.told = {tuple(d["key"]): d for d in last["differences"]}
        self.columns = self._columns(states)

    def _columns(self, states: list[Data]) -> list[Column]:
        """What differs at the end, in the order in which it is told; then who else holds something."""
        found: dict[Column, None] = {}
        for kind, *names in self.told:
            if kind in ("cursors", "nodes", "guests"):
                found[kind, names[0]] = None
            elif kind in ("holders", "wrong"):
                slot = f"slot of {names[0]}"
                known = self.last["reference"]["cursors"]
                found["cursors", slot if slot in known else names[0]] = None
            elif kind == "free":
                found["free",] = None
            else:
                found[kind, *names] = None
        kinds: Counter[str] = Counter()
        chosen: list[Column] = []
        for column in found:
            kinds[column[0]] += 1
            if kinds[column[0]] <= (1 if column[0] == "accounts" else 2) and len(chosen) < MAX_COLUMNS:
                chosen.append(column)
        guests = dict.fromkeys(name for state in states for name in state["reference"]["guests"])
        more: list[Column] = [("cursors", name) for name in self.owners]
        for column in (*more, *(("guests", name) for name in guests), ("free",)):
            if column not in chosen and len(chosen) < MAX_COLUMNS:
                chosen.append(column)
        return chosen

    def cell(self, state: Data, which: str, column: Column) -> Cell:
        side = state[which]
        kind, *names = column
        if kind == "outcome":
            return {"": side["outcome"]}
        if kind == "cursors":
            value = side["cursors"].get(names[0])
            if isinstance(value, dict):
                return {k: str(value[k]) for k in self.letters} if any(value.values()) else {"": "-"}
            return {"": value or "-"}
        if kind == "nodes":
            node = side["nodes"].get(names[0])
            live = "" if node is None or node["live"] is None else "live " if node["live"] else "tombstone "
            return {"": "-" if node is None else f"{live}{node['full_locks']}/{node['swa_locks']}"}
        if kind == "guests":
            locked = side["guests"].get(names[0])
            return {"": "-" if locked is None else f"[0, {locked})" if locked else "nothing"}
        if kind == "free":
            return {POOL.get(k, k): str(v) for k, v in side["free"].items()}
        if kind == "pools" and "pools" in side:
            page = side["pools"][names[0]].get(int(names[1]), {"owners": [], "free": 0})
            owners = [f"{who.removeprefix('tree ')} {spans({at}, self.page_size)}" for who, at in page["owners"]]
            return {"": " + ".join([*owners, *["free"] * page["free"]]) or "nobody"}
        if kind == "pools":
            return {"": "one owner, or free"} if state is self.last else {}
        return {"": self.told[column][which]} if state is self.last else {}


def _title(column: Column) -> str:
    kind, *names = column
    if kind == "pools":
        return f"{POOL[names[0]]} page {names[1]}"
    one = {"nodes": "node", "guests": "guest", "requests": "request", "sessions": "session"}
    told = [POOL.get(name, name) for name in names]
    return " ".join([one[kind], *told] if kind in one else told or [kind])


def _row(state: Data, what: str, cells: list[Cell], before: list[Cell], rules: list[Cell]) -> Data:
    told = []
    for cell, was, rule in zip(cells, before, rules):
        text = []
        for label, value in cell.items():
            changed = was and was.get(label, "0") != value and value not in ("-", "")
            wrong = rule.get(label) != value
            text.append(" ".join(filter(None, [label, f"{'!' * wrong}{value}{'*' * bool(changed)}"])))
        told.append(" ".join(text))
    return {"step": state["step"], "what": what, "cells": told}
