"""`kvspec blindspots`: which run-time check sees which bug, and when. Data first, then text from it."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from ci import Data
from ci.report import render
from impl.bugs import BUGS, broken
from reference.commands import Mode
from stateful_tests.blindspots import measure as blindspots
from stateful_tests.blindspots.measure import CHECKS, LOCKSTEP, STEPS, SUMS, BugResult, Drive
from stateful_tests.blindspots.monitors import MONITORS
from stateful_tests.lockstep.systems import resolve

HEALTHY = "torch (no bug)"
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
    healthy, faulty = measure(HEALTHY, resolve("torch"), both), []
    for name in bugs or BUGS:
        own = kept.get(name, [])
        tree = any(drive.geometry.tree for drive in own)  # it shows with a radix tree
        faulty.append(measure(name, broken(name), [*drawn[_mode(name), tree], *own]))
    return {
        "format": "kvspec-blindspots",
        "version": 2,
        "runs_asked": runs,
        "steps_asked": STEPS,
        "seed": seed,
        "commands": commands,
        "seconds": round(time.monotonic() - began, 1),
        "checks": [
            {"id": name, "looks_for": looks_for, "reads": reads}
            for name, looks_for, reads in (
                *((name, looks_for, "lengths, counts") for name, (_, looks_for) in SUMS.items()),
                *((m.name, m.looks_for, m.reads) for m in MONITORS.values()),
            )
        ],
        "healthy": _row_data(healthy),
        "bugs": [_row_data(row) for row in faulty],
        "conclusion": _conclusion(faulty),
    }


def _mode(bug: str) -> Mode:
    return Mode.FAITHFUL if Mode.FAITHFUL in BUGS[bug].modes else Mode.FREE


def _row_data(row: BugResult) -> Data:
    return row._asdict() | {
        "title": BUGS[row.bug].title if row.bug in BUGS else "",
        "modes": [_mode(row.bug).value] if row.bug in BUGS else [mode.value for mode in Mode],
        "cells": {check: cell._asdict() for check, cell in row.cells.items()},
    }


def _conclusion(rows: Sequence[BugResult]) -> Data:
    seen = [row for row in rows if row.sees]
    by_sums = [row.bug for row in seen if any(row.cells[c].sees for c in SUMS)]
    of_checks = [row.bug for row in rows if row.pages_right and not row.sees
                 and any(row.cells[c].verdict != "never" for c in CHECKS)]  # fmt: skip
    known = {*(row.bug for row in seen), *of_checks}
    return {
        "bugs": len(rows),
        "seen_by_a_check": len(seen),
        "seen_at_once": sum(any(row.cells[c].verdict == "at once" for c in CHECKS) for row in rows),
        "sums_see": len(by_sums),
        "sums_never_see": [row.bug for row in seen if row.bug not in by_sums],
        "faults_of_checks": of_checks,
        "lockstep_alone": [row.bug for row in rows if row.shown and row.bug not in known],
        "not_met": [row.bug for row in rows if not row.shown],
        "counts": {
            check: {v: sum(row.cells[check].verdict == v for row in rows) for v in _SHORT}
            for check in (*CHECKS, LOCKSTEP)
        },
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
    heads = (*CHECKS, LOCKSTEP)
    made = render.table("bug", "shown", *heads, right=("shown",))
    made.padding = (0, 0, 0, 0)
    for row in (data["healthy"], *data["bugs"]):
        hidden = not row["shown"] and row is not data["healthy"]
        cells = ("?" if hidden else _short(row["cells"][check], row["shown"]) for check in heads)
        made.add_row(row["bug"], f"{row['shown']}/{row['runs']} ", *cells)
    counts = data["conclusion"]["counts"]
    for verdict in () if detailed else ("at once", "later", "never"):
        made.add_row(f"all: {verdict}", "", *(str(counts[c][verdict]) for c in heads), style="bold")
    out.print(made)
    out.print()
    words = {
        "shown": "runs in which something, a check or the lockstep, showed the bug: its first sign",
        "now": "in every run in which the bug showed, at its first sign",
        "90%": "at the first sign in so many of the runs, later or not at all in the others",
        "late": "never at the first sign, some commands later; --bug NAME tells after which",
        "false": "an alarm while every page is right: a fault of the check",
        "dies": "the check raises",
        "?": "the bug did not show in these runs",
        **{c["id"]: f"{c['looks_for']} (reads {c['reads']})" for c in data["checks"]},
        LOCKSTEP: "lockstep with the reference: every clause, after every command",
    }
    render.labelled(out, words)
    for row in data["bugs"] if detailed else ():
        out.print()
        met = f"showed in {row['shown']} of {row['runs']} runs, {row['modes'][0]} mode"
        render.say(out, f"{row['bug']}: {row['title']} ({met})", style="bold")
        render.labelled(out, {check: moment(cell, row["shown"]) for check, cell in row["cells"].items()})
    out.print()
    _conclude(out, data["conclusion"])


def _short(cell: Data, shown: int) -> str:
    if cell["verdict"] == "later" and cell["at_once"]:
        return f"{max(1, 100 * cell['at_once'] // shown)}%"
    return _SHORT[cell["verdict"]]


def moment(cell: Data, shown: int) -> str:
    """A cell in words."""
    if cell["verdict"] in ("at once", "never"):
        return str(cell["verdict"])
    late = cell["seen"] - cell["at_once"]
    after = ", ".join(f"{kind} {count}" for kind, count in cell["late_after"].items())
    parts = [f"at once in {cell['at_once']}"] * bool(cell["at_once"])
    parts += [f"late in {late} (after {after}; median {cell['median_commands_late']} commands)"] * bool(late)
    return f"{cell['verdict']}: {', '.join(parts)} of {shown} runs"


def _conclude(out: Console, part: Data) -> None:
    def names(what: str) -> str:
        return f"{len(part[what])}: {', '.join(part[what])}" if part[what] else "none"

    render.say(out, "What follows", style="bold")
    render.labelled(out, {
        "seen": f"{part['seen_by_a_check']} of {part['bugs']} bugs by some check, {part['seen_at_once']} of"
        " them at once by some check",
        "sums": f"see {part['sums_see']} of these, and nothing of {names('sums_never_see')}",
        "faults of checks": names("faults_of_checks"),
        "lockstep alone": names("lockstep_alone"),
        "did not show": names("not_met"),
    })  # fmt: skip
