"""`make bench ARGS=explore`: states per second of the searches, side by side on the same scopes.

CPU seconds, which other work on the machine does not change, but for a GPU: there wall-clock seconds. Ours
include tracing the rules; SPIN's are of its search alone, and what it takes to translate and to compile its
model is a column of its own.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import click

from ci import render
from reference.geometry import Geometry
from stateful_tests import promela
from stateful_tests.arrays import arrays_on
from stateful_tests.column_search import ColumnSearch
from stateful_tests.explorer import Explorer
from stateful_tests.scopes import SCOPES, Scope

SIDE_BY_SIDE = ("session-page2-faithful", "session-wide", "two-sessions", "three-sessions")
WIDTHS = (2, 3, 4, 5)  # tokens of a row, in the family that shows how cost grows
STEPPED_S = 3.0  # that stepping may take in one scope: a rate needs no more

Row = dict[str, Any]


def _family(width: int) -> Scope:
    """Two sessions with room for both, pages of one token, up to 2 ahead."""
    sizes = Geometry(1, 1, 2 * width, 2 * width, 2, width)
    return Scope(f"width {width}", "two sessions with room for both", sizes, sessions=2, ahead=2)


def _stepped(scope: Scope) -> float:
    """States per second of stepping one by one."""
    explorer, began = Explorer(scope, clauses=False), time.process_time()
    explorer.run(pause=lambda: time.process_time() - began > STEPPED_S)
    return explorer.expanded / (time.process_time() - began)


def _searched(scope: Scope, device: str) -> tuple[ColumnSearch, float]:
    """A finished search, and its seconds."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    search, began = ColumnSearch(scope, arrays_on(device)), clock()
    search.run(memory_mb=float("inf"))
    return search, clock() - began


def _row(scope: Scope, stepped: bool, spin: bool, cuda: bool) -> tuple[Row, ColumnSearch]:
    search, seconds = _searched(scope, "cpu")
    row: Row = {
        "scope": scope.name, "states": search.states, "transitions": search.transitions,
        "depth": len(search.levels) - 1, "s": round(seconds, 2), "states/s": round(search.states / seconds),
    }  # fmt: skip
    if stepped:
        row["stepping states/s"] = rate = round(_stepped(scope))
        row["of stepping"] = round(row["states/s"] / rate, 1)
    if spin:
        run = promela.run(search)
        if (run.states, run.transitions) != (search.states, search.transitions):
            found = f"{run.states} states, {run.transitions} transitions"
            raise click.ClickException(f"{scope.name}: SPIN counts {found}")
        row["SPIN s"], row["SPIN made in s"] = round(run.seconds, 2), round(run.made_s, 1)
        row["SPIN states/s"] = round(run.states / max(run.seconds, 0.01))
        row["of SPIN"] = round(row["states/s"] / row["SPIN states/s"], 2)
    if cuda:
        _, on_gpu = _searched(scope, "cuda")
        row["GPU states/s"] = round(search.states / on_gpu)
        row["of CPU"] = round(seconds / on_gpu, 1)
    return row, search


@click.command()
@click.option("--scope", "names", multiple=True, metavar="NAME", default=SIDE_BY_SIDE, help="Side by side.")
@click.option("--width", "widths", multiple=True, type=click.IntRange(1, 8), default=WIDTHS, help="To grow.")
@click.option("--spin/--no-spin", default=True, help="Compiling a model takes up to half a minute.")
@click.option("--plot", metavar="FILE", help="How cost grows, as a plot (.svg, .png); needs matplotlib.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def explore(
    names: tuple[str, ...], widths: tuple[int, ...], spin: bool, plot: str | None, as_json: bool
) -> None:
    """The searches side by side, and how cost grows with the scope."""
    for name in names:
        if name not in SCOPES or SCOPES[name].geometry.tree or SCOPES[name].checks:
            raise click.UsageError(f"--scope {name}: no scope without a tree and without memory checks")
    notes = []
    if spin and (absent := promela.missing()) is not None:
        spin = False
        notes.append(f"no column of SPIN: {absent}")
    try:
        arrays_on("cuda")
        cuda = True
    except RuntimeError as error:
        cuda = False
        notes.append(f"no column of a GPU: {error}")
    beside = [_row(SCOPES[name], True, spin, cuda)[0] for name in names]
    growth = []
    for width in widths:
        row, search = _row(_family(width), False, False, cuda)
        kept = sum(len(search.arrays.to_bytes(column)) for column in (search.seen.words, *search.levels))
        growth.append(row | {"MB of states": round(kept / 2**20, 1)})
    if plot is not None:
        _plot(growth, plot)
    if as_json:
        json.dump({"side by side": beside, "growth": growth, "notes": notes}, sys.stdout, indent=2)
        print()
        return
    out = render.console()
    for rows in (beside, growth):
        render.listing(out, rows, {name: name for name in rows[0]})
        out.print()
    for note in notes:
        out.print(note)


def _plot(growth: list[Row], file: str) -> None:
    """States, and seconds that they take, by width."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise click.UsageError("--plot needs matplotlib: pip install 'kvspec[plot]'") from error
    figure = Figure(figsize=(6, 4), layout="constrained")
    left = figure.subplots()
    right = left.twinx()
    widths = [row["scope"].split()[1] for row in growth]
    left.semilogy(widths, [row["states"] for row in growth], "o-", color="tab:blue")
    right.semilogy(widths, [row["s"] for row in growth], "s--", color="tab:orange")
    left.set_xlabel("tokens of a row (two sessions)")
    left.set_ylabel("states", color="tab:blue")
    right.set_ylabel("seconds", color="tab:orange")
    if not Path(file).absolute().parent.is_dir():
        raise click.UsageError(f"--plot {file}: there is no such folder")
    figure.savefig(file)
