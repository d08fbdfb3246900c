"""The step table of a violated trace: a row for each command, a column for each owner, node or page at stake.

The system and the reference agree in every row but the last, which has two lines: expected and observed.
`*` marks a value that the command changed, `!` a value that differs from the reference. A node of the tree
that a command splits, evicts, makes a tombstone or revives has a column as well: its range, live or
tombstone, its full and SWA locks.
"""

from collections import Counter
from itertools import pairwise

from reference.geometry import Geometry
from ci import Data
from ci.compare.differences import POOL, page_spans
from stateful_tests.lockstep.text_drawings import span, swa_of
from stateful_tests.lockstep.run_results import Run

MAX_COLUMNS = 3
MAX_NODES = 2  # further columns, for nodes that changed
MAX_ROWS = 60  # the last rows of a long trace: they led to its end

Cell = dict[str, str]  # label -> value
Column = tuple[str, ...]  # the key of a difference, without its words


def step_table(
    run: Run, states: list[Data], columns: int = MAX_COLUMNS, nodes: int = MAX_NODES
) -> Data:
    """Return the columns and rows for these states.

    A violation at the last state has two rows. A run without one has columns for the holders.

    columns: most columns of differences and holders.
    nodes: most further columns, for nodes that changed.
    """
    violated = run.violation is not None
    geometry = run.trace.sizes(Geometry)
    drawer = _Drawer(states, geometry.page_size, cursor_letters(run, states), columns, nodes)
    rows: list[Data] = []
    before: list[Cell] = [{} for _ in drawer.columns]
    agreeing = states[:-1] if violated else states
    for state in agreeing:
        agreed = [
            drawer.cell(state, "system", column) or drawer.cell(state, "reference", column)
            for column in drawer.columns
        ]
        rows.append(_table_row(state, state["command"], agreed, before, agreed))
        before = agreed
    if violated:
        last = states[-1]
        expected = [drawer.cell(last, "reference", column) for column in drawer.columns]
        observed = [drawer.cell(last, "system", column) for column in drawer.columns]
        rows.append(_table_row(last, f"{last['command']}, expected", expected, before, expected))
        rows.append(_table_row(last, "observed", observed, before, expected))
    return {"columns": [drawer.title(column) for column in drawer.columns], "rows": rows}


def cursor_letters(run: Run, states: list[Data]) -> str:
    """Return the letters of the cursors to show: C and A always, E with a window, R with a tree. R also
    without a tree, where it should be 0 and is not."""
    geometry = run.trace.sizes(Geometry)
    sides = [state[which] for state in states for which in ("reference", "system")]
    cursors = [c for side in sides for c in side["cursors"].values() if isinstance(c, dict)]
    swa = "E" if geometry.window is not None else ""
    tree = "R" if geometry.tree or any(c["R"] for c in cursors) else ""
    return f"CA{swa}{tree}"


NOTHING = "-"  # the owner or node does not exist
UNKNOWN = "?"  # free pages of the reference, which has more in use than there are


class _Drawer:
    """Chooses the columns of a table and makes its cells.

    letters: of the cursors to show.
    max_columns: most columns of differences and holders.
    max_nodes: most further columns, for nodes that changed.
    """

    def __init__(
        self, states: list[Data], page_size: int, letters: str, max_columns: int, max_nodes: int
    ) -> None:
        self.page_size = page_size
        self.letters = letters
        self.last = states[-1]
        self.differences = {tuple(d["key"]): d for d in self.last["differences"]}
        self.columns = self._columns(states, max_columns, max_nodes)

    def _columns(self, states: list[Data], max_columns: int, max_nodes: int) -> list[Column]:
        """Return the columns: first differences at the end, in the order of a report, then nodes that
        changed, then other holders."""
        kinds: Counter[str] = Counter()
        columns_chosen: list[Column] = []
        columns = dict.fromkeys(self._column(kind, names) for kind, *names in self.differences)
        for column in filter(self._has_past, columns):
            kinds[column[0]] += 1
            if kinds[column[0]] <= 2 and len(columns_chosen) < max_columns:
                columns_chosen.append(column)
        columns_chosen = columns_chosen or list(columns)[:1]  # its cells are empty but for the last row
        shown_holders = {self._holder(column[1]) for column in columns_chosen if column[0] == "cursors"}
        sides = [state[which] for state in reversed(states) for which in ("reference", "system")]
        others: list[Column] = [
            ("holders", name) for side in sides for name in side["holders"] if name not in shown_holders
        ]
        others += [("lock_holders", name) for side in sides for name in side["lock_holders"]]
        others.append(("free",))
        others = [column for column in dict.fromkeys(others) if column not in columns_chosen]
        others = others[: max_columns - len(columns_chosen)]
        others.sort(key=lambda column: (column == ("free",), column))
        changed: list[Column] = [("nodes", path) for path in changed_nodes(states)]
        changed = [column for column in changed if column not in columns_chosen][-max_nodes:]
        return columns_chosen + changed + others

    def _has_past(self, column: Column) -> bool:
        """Return whether a column has cells in the rows of earlier commands as well."""
        kind, *names = column
        if kind == "holders":
            if len(names) == 1:
                return True
            return names[1] in POOL and "SWA slots" not in self.differences[column]["about"]
        return kind in ("outcome", "cursors", "nodes", "lock_holders", "free", "pools")

    def _column(self, kind: str, names: list[str]) -> Column:
        """Return the column that shows a difference."""
        if kind in ("nodes", "lock_holders"):
            return kind, names[0]
        if kind in ("cursors", "holders", "wrong"):
            holder = self._holder(names[0]) if kind == "cursors" else names[0]
            expected = self.last["reference"]["holders"].get(holder, {}).get("cursors")
            observed = self.last["system"]["holders"].get(holder, {}).get("cursors")
            differing = {key[1] for key in self.differences if key[0] == "cursors"}
            of_holder = [name for name in differing if self._holder(name) == holder]
            if expected != observed and len(of_holder) <= 1:
                return "holders", holder
            return (kind, names[0]) if kind == "cursors" else (kind, *names)
        return ("free",) if kind == "free" else (kind, *names)

    def _holder(self, name: str) -> str:
        """Return the name under which a request or a slot holds its row: its session's, or its own."""
        if name.startswith("slot of "):
            return name.removeprefix("slot of ")
        requests = self.last["reference"]["requests"] | self.last["system"]["requests"]
        return (requests[name]["session"] if name in requests else None) or name

    def cell(self, state: Data, which: str, column: Column) -> Cell:
        """Return the cell of a column for a state, on one side."""
        side = state[which]
        match column:
            case ["outcome"]:
                return {"": side["outcome"]}
            case ["cursors", name]:
                value = side["cursors"].get(name)
                if isinstance(value, dict) and any(value.values()):
                    return self._cursors(value)
                return {"": value if isinstance(value, str) and value else NOTHING}
            case ["holders", name]:
                holder = side["holders"].get(name)
                if holder is None:
                    return {"": NOTHING}
                return {"": holder["who"].split()[0], **self._cursors(holder["cursors"])}
            case ["holders", name, pool] if self._has_past(column):
                return {"": page_spans(side["holders"].get(name, {}).get(pool, ()), self.page_size)}
            case ["nodes", path]:
                return _node_cell(side["nodes"].get(path))
            case ["lock_holders", name]:
                locked = side["lock_holders"].get(name)
                if locked is None:
                    return {"": NOTHING}
                return {"": span(0, locked) if locked else "nothing"}
            case ["free"]:
                return {
                    POOL.get(k, k): UNKNOWN if v is None else str(v)
                    for k, v in side["free"].items()
                }
            case ["pools", pool, page] if "pools" in side:
                return {"": self._owners(side["pools"][pool].get(int(page)))}
        if state is not self.last:  # a difference is known at the last state alone
            return {}
        if column[0] == "pools":
            return {"": "one owner, or free"}
        return {"": self.differences[column][which]}

    def _cursors(self, cursors: Data) -> Cell:
        return {letter: str(cursors[letter]) for letter in self.letters}

    def _owners(self, page: Data | None) -> str:
        """Name the owners of a page with their positions in it, and how often it is free."""
        if page is None:
            return "free"
        owners = [
            f"{owner.removeprefix('tree ')} {page_spans([at], self.page_size)}"
            for owner, at in page["owners"]
        ]
        free = {0: [], 1: ["free"]}.get(page["free"], [f"free {page['free']} times"])
        return " + ".join([*owners, *free]) or "nobody"

    def title(self, column: Column) -> str:
        kind, *names = column
        if kind in ("cursors", "holders", "free", "outcome") and column not in self.differences:
            return names[0] if names else kind
        if kind in ("nodes", "lock_holders") and len(names) == 1:
            return f"{kind[:-1]} {names[0]}"
        return str(self.differences[column]["about"])


def _node_cell(node: Data | None) -> Cell:
    """Return the cell of a node: its positions, live or tombstone, and the locks on its full and SWA KV."""
    if node is None:
        return {"": NOTHING}
    where = span(node["start"], node["end"])
    locks = str(node["full_locks"])
    if node["live"] is not None:
        where = f"{where} {swa_of(node['live'])}"
        return {"": where, "locks": locks, "/": str(node["swa_locks"])}
    return {"": where, "locks": locks}


def changed_nodes(states: list[Data]) -> list[str]:
    """Return the paths of nodes that a command split, evicted, made a tombstone or revived, on either side.

    The node that changed last is last.
    """
    changed: dict[str, None] = {}
    for before, after in pairwise(states):
        for which in ("reference", "system"):
            was = before[which]["nodes"]
            now = after[which]["nodes"]
            for path, node in was.items():
                then = now.get(path)
                split = then is not None and then["start"] != node["start"]
                if then is None or split or then["live"] != node["live"]:
                    changed.pop(path, None)
                    changed[path] = None
                if split and then["parent"] not in was:  # its upper part is a node of its own now
                    changed.pop(then["parent"], None)
                    changed[then["parent"]] = None
    return list(changed)


def _table_row(
    state: Data, row_text: str, cells: list[Cell], before: list[Cell], expected: list[Cell]
) -> Data:
    """Return a row of the table.

    before: the cells of the row above.
    expected: those of the reference.
    """
    texts = []
    for cell, was, rule in zip(cells, before, expected):
        values = []
        for label, value in cell.items():
            differs = rule.get(label) not in (value, UNKNOWN)
            if value == NOTHING and was.get(label, NOTHING) != NOTHING:
                cell_text = "gone*"
            else:
                cell_text = value
                moved = bool(was) and was.get(label, "0") != value
                if moved and value not in (NOTHING, "", "idle"):
                    cell_text += "*"
            if differs:
                cell_text = f"!{cell_text}"
            values.append(f"{label} {cell_text}".lstrip())
        texts.append(" ".join(values).replace(" / ", "/"))
    return {"step": state["step"], "what": row_text, "cells": texts}
