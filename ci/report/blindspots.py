"""`kvspec blindspots`: which run-time check sees which bug, and when. Data first, then text from it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from ci import Data
from ci.report import render
from impl.bugs import BUGS, broken
from reference.commands import Mode
from stateful_tests.blindspots import measure as blindspots
from stateful_tests.blindspots.measure import CHECKS, LOCKSTEP, STEPS, SUMS, BugResult, Detection, Drive
from stateful_tests.blindspots.monitors import MONITORS
from stateful_tests.blindspots.partitions import KINDS, balanced, seen_by, smallest
from stateful_tests.lockstep.systems import resolve

PAGES = 3  # of the pools whose partitions are all enumerated
HEALTHY = "torch (no bug)"
HEADS = {
    "sums-busy": "busy", "sums-idle": "idle", "free-list": "list", "free-owned": "freed",
    "owned-twice": "twice", "lost": "lost", "mapping": "map", "cursors": "curs", "window": "wind",
    "tree": "tree", "contents": "KV", LOCKSTEP: "ref",
}  # fmt: skip
_SHORT = {"at once": "now", "later": "late", "never": "-", "false alarm": "false", "broken": "dies"}

Progress = Callable[[str, int, int], None]


def collect(bugs: Sequence[str], runs: int, seed: int, progress: Progress) -> Data:
    """Measure the bugs named, all of them when none is, and a healthy system."""
    resolve("torch")  # sets torch up as every other command does
    began = time.monotonic()
    drawn = {
        (mode, tree): [
            blindspots.draw(mode, seed, run, machine=("both", "tree")[run % 2] if tree else "sessions")
            for run in range(runs)
        ]
        for mode in Mode
        for tree in (False, True)
    }
    kept = blindspots.fixtures()
    commands = 0
    clauses: set[str] = set()

    def measure(name: str, system: Any, drives: Sequence[Drive]) -> BugResult:
        def tick(count: int) -> None:
            nonlocal commands
            commands += count
            progress(f"{name}, {len(drives)} runs", commands, len(clauses))

        row = blindspots.measure(name, system, drives, tick)
        clauses.update(row.clauses)
        return row

    both = [drive for drives in drawn.values() for drive in drives]
    rows = [measure(HEALTHY, resolve("torch"), both)]
    modes = {HEALTHY: [mode.value for mode in Mode]}
    for name in bugs or BUGS:
        mode = Mode.FAITHFUL if Mode.FAITHFUL in BUGS[name].modes else Mode.FREE
        modes[name] = [mode.value]
        own = kept.get(name, [])
        tree = any(drive.geometry.tree for drive in own)  # it shows with a radix tree
        rows.append(measure(name, broken(name), [*drawn[mode, tree], *own]))
    healthy, faulty = rows[0], rows[1:]
    return {
        "format": "kvspec-blindspots",
        "version": 1,
        "runs_asked": runs,
        "steps_asked": STEPS,
        "seed": seed,
        "commands": commands,
        "seconds": round(time.monotonic() - began, 1),
        "checks": _checks(),
        "healthy": _row_data(healthy, modes),
        "bugs": [_row_data(row, modes) for row in faulty],
        "conclusion": _conclusion(faulty),
        "partitions": _partitions(faulty),
    }


def _checks() -> list[Data]:
    part = [(c, looks_for, "lengths, counts") for c, (_, looks_for) in SUMS.items()]
    part += [(m.id, m.looks_for, m.reads) for m in MONITORS.values()]
    return [{"id": c, "head": HEADS[c], "looks_for": what, "reads": reads} for c, what, reads in part]


def _row_data(row: BugResult, modes: dict[str, list[str]]) -> Data:
    return {
        "bug": row.bug,
        "title": BUGS[row.bug].title if row.bug in BUGS else "",
        "modes": modes[row.bug],
        "runs": row.runs,
        "shown": row.shown,
        "commands": row.commands,
        "pages_right": row.pages_right,
        "lockstep_clauses": list(row.clauses),
        "cells": {check: _cell_data(cell) for check, cell in row.cells.items()},
        "balanced_and_wrong": [
            {"kind": kind, "run": drive.origin, "after_commands": at + 1}
            for kind, (drive, at) in row.wrong.items()
        ],
        "balanced_and_wrong_later": list(row.wrong_later),
    }


def _cell_data(cell: Detection) -> Data:
    return {
        "verdict": cell.verdict,
        "shown": cell.shown,
        "seen": cell.seen,
        "at_once": cell.at_once,
        "late_after": dict(cell.after.most_common()),
        "median_commands_late": cell.median_delay,
    }


def _conclusion(rows: Sequence[BugResult]) -> Data:
    seen = [row for row in rows if row.sees]
    right = [row for row in rows if row.pages_right and row.shown]
    alone = [row for row in rows if row.shown and not row.sees and row not in right]
    alone += [row for row in right if all(row.cells[c].verdict == "never" for c in CHECKS)]
    verdicts = ("at once", "later", "never", "false alarm", "broken")
    by_sums = [row for row in seen if any(row.cells[c].sees for c in SUMS)]
    return {
        "bugs": len(rows),
        "seen_by_a_check": len(seen),
        "not_met": [row.bug for row in rows if not row.shown],
        "lockstep_alone": [row.bug for row in alone],
        "faults_of_checks": [row.bug for row in right if row not in alone],
        "counts": {
            check: {v: sum(row.cells[check].verdict == v for row in rows) for v in verdicts}
            for check in (*CHECKS, LOCKSTEP)
        },
        "sums_see": len(by_sums),
        "sums_see_at_once": sum(any(row.cells[c].verdict == "at once" for c in SUMS) for row in seen),
        "sums_never_see": [row.bug for row in seen if row not in by_sums],
        "smallest_sets": [list(some) for some in blindspots.smallest_sets(rows)],
        "smallest_sets_first": [list(some) for some in blindspots.smallest_sets(rows, first=True)],
        "by_cost": _by_cost(seen),
        "seen_at_once": sum(any(row.cells[c].verdict == "at once" for c in CHECKS) for row in rows),
    }


# What a check reads, cheapest first: a server has the first at hand, the last it cannot afford.
_COSTS = ("lengths", "free lists", "rows", "mapping", "KV")


def _by_cost(seen: Sequence[BugResult]) -> list[Data]:
    """How many bugs the checks see that read no more than lengths, than free lists as well, and so on."""
    steps = []
    for number, what in enumerate(_COSTS):
        dear = _COSTS[number + 1 :]
        cheap = [c["id"] for c in _checks() if not any(word in c["reads"] for word in dear)]
        count = sum(any(row.cells[check].sees for check in cheap) for row in seen)
        steps.append({"reads": what, "checks": cheap, "see": count})
    return steps


def _partitions(rows: Sequence[BugResult]) -> Data:
    counted = [partition for size in range(1, PAGES + 1) for partition in balanced(size)]
    wrong = [partition for partition in counted if not partition.right]
    found = smallest(PAGES)
    return {
        "pages_up_to": PAGES,
        "balanced": len(counted),
        "wrong": len(wrong),
        "wrong_with_a_page_nowhere": sum(bool(partition.nowhere) for partition in wrong),
        "kinds": [
            {
                "kind": kind,
                "smallest": found[kind].text(),
                "clauses": list(seen_by(found[kind])),
                "bugs": [row.bug for row in rows if kind in row.wrong],
                "bugs_later": [row.bug for row in rows if kind in row.wrong_later],
            }
            for kind in KINDS
        ],
    }


def text(out: Console, data: Data, *, detailed: bool) -> None:
    """The table, what its columns mean, what follows from it. detailed: every cell in words."""
    render.say(
        out,
        f"Named bug by run-time check, {data['runs_asked']} runs of {data['steps_asked']} commands for each,"
        f" seed {data['seed']}, and the bug's own fixtures, every run closed at its end: {data['commands']}"
        f" commands in {data['seconds']:.0f} s. Checks see the system's own state alone.",
    )
    out.print()
    made = render.table("bug", "shown", *HEADS.values(), right=("shown",))
    made.padding = (0, 0, 0, 0)
    for row in (data["healthy"], *data["bugs"]):
        met = row["shown"] or row is data["healthy"]
        cells = (_short(row["cells"][check]) if met else "?" for check in HEADS)
        made.add_row(row["bug"], f"{row['shown']}/{row['runs']} ", *cells)
    counts = data["conclusion"]["counts"]
    for verdict in () if detailed else ("at once", "later", "never"):
        made.add_row(f"all: {verdict}", "", *(str(counts[c][verdict]) for c in HEADS), style="bold")
    out.print(made)
    out.print()
    _legend(out, data)
    if detailed:
        for row in data["bugs"]:
            out.print()
            _moments(out, row)
    out.print()
    _conclude(out, data["conclusion"])
    if not detailed:
        out.print()
        _wrong_partitions(out, data["partitions"])


def _short(cell: Data) -> str:
    if cell["verdict"] == "later" and cell["at_once"]:
        return f"{max(1, 100 * cell['at_once'] // cell['shown'])}%"
    return _SHORT[cell["verdict"]]



def _legend(out: Console, data: Data) -> None:
    words = {
        "shown": "runs in which something, a check or the lockstep, showed the bug: its first sign",
        "now": "in every run in which the bug showed, at its first sign",
        "90%": "at the first sign in so many of the runs, later or not at all in the others",
        "late": "never at the first sign, some commands later; --bug NAME tells after which",
        "-": "in none of these runs",
        "false": "an alarm while every page is right: a fault of the check",
        "dies": "the check raises",
    }
    if data["conclusion"]["not_met"]:
        words["?"] = "the bug did not show in these runs"
    for check in data["checks"]:
        words[check["head"]] = f"{check['id']}: {check['looks_for']} (reads {check['reads']})"
    words[HEADS[LOCKSTEP]] = (
        "lockstep with the reference: every clause, after every command; a fault of a check only where the"
        " run has one"
    )
    free = [row["bug"] for row in data["bugs"] if row["modes"] == [Mode.FREE.value]]
    render.labelled(out, words)
    if free:
        render.say(out, f"Driven in free mode, all others in faithful mode: {', '.join(free)}.")


def _moments(out: Console, row: Data) -> None:
    head = f"{row['bug']}: {row['title']}" if row["title"] else row["bug"]
    render.say(out, f"{head} (showed in {row['shown']} of {row['runs']} runs)", style="bold")
    render.labelled(out, {check: moment(cell) for check, cell in row["cells"].items()})


def moment(cell: Data) -> str:
    """A cell in words."""
    if cell["verdict"] in ("at once", "never"):
        return str(cell["verdict"])
    parts = [f"at once in {cell['at_once']}"] if cell["at_once"] else []
    late = cell["seen"] - cell["at_once"]
    if late:
        after = ", ".join(f"{kind} {count}" for kind, count in cell["late_after"].items())
        parts.append(f"late in {late} (after {after}; median {cell['median_commands_late']:g} commands)")
    if cell["seen"] < cell["shown"]:
        parts.append(f"not in {cell['shown'] - cell['seen']}")
    verdict = "partly" if cell["verdict"] == "later" and cell["at_once"] else cell["verdict"]
    return f"{verdict}: {', '.join(parts)} of {cell['shown']} runs"


def _conclude(out: Console, part: Data) -> None:
    def names(bugs: list[str]) -> str:
        return f"{len(bugs)}: {', '.join(bugs)}" if bugs else "none"

    def sets(some: list[list[str]]) -> str:
        if not some or not some[0]:
            return "none"
        others = len(some) - 1
        more = f" (and {others} other set{'s' * (others > 1)} of that size)" if others else ""
        return " + ".join(some[0]) + more

    words = {
        "seen": f"{part['seen_by_a_check']} of {part['bugs']} bugs by some check,"
        f" {part['seen_at_once']} of them at once by some check",
        "sums": f"see {part['sums_see']} of these, {part['sums_see_at_once']} at once",
        "sums saw nothing of": names(part["sums_never_see"]),
        "by cost": _ladder(part["by_cost"]),
        "faults of checks": names(part["faults_of_checks"]),
        "lockstep alone": names(part["lockstep_alone"]),
        "smallest set that sees all": sets(part["smallest_sets"]),
        "and as early as any": sets(part["smallest_sets_first"]),
    }
    if part["not_met"]:
        words["did not show"] = names(part["not_met"])
    render.say(out, "What follows", style="bold")
    render.labelled(out, words)


def _ladder(steps: list[Data]) -> str:
    """How many bugs are seen as checks may read more."""
    first, *more = [f"{step['reads']}: {step['see']}" for step in steps]
    return ", ".join([f"checks that read {first}", *(f"and {part}" for part in more)])


def _wrong_partitions(out: Console, part: Data) -> None:
    render.say(out, "Smallest wrong partitions that sums cannot see", style="bold")
    render.say(
        out,
        f"Pages 1 to n in a free list, rows and slots, n up to {part['pages_up_to']}, all enumerated:"
        f" {part['balanced']} balance, {part['wrong']} of these are wrong, and in"
        f" {part['wrong_with_a_page_nowhere']} of the wrong a page is nowhere, so a search for lost pages"
        " sees each of them. 0: no page.",
    )
    out.print()
    made = render.table("kind", "smallest", "clauses", "named bugs that produce it")
    for kind in part["kinds"]:
        bugs = ", ".join(kind["bugs"]) or "none"
        if kind["bugs_later"]:
            bugs += f" (later, as a consequence: {len(kind['bugs_later'])})"
        made.add_row(kind["kind"], Text(kind["smallest"]), "\n".join(kind["clauses"]), bugs)
    out.print(made)
