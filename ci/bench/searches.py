"""`make bench ARGS=explore`: states per second of the searches, side by side on the same scopes.

CPU seconds, which other work on the machine changes little, but for a GPU and for two cores: there wall-clock
seconds. `s` includes tracing the rules, which is what we have for SPIN's translation and compilation (`SPIN
made in s`); `search s` is a second search, with the rules traced. SPIN searches depth first with -O2 and
-DSAFETY, without partial-order reduction, on one core and with -DNCORE=2 on two: the same states each time.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from ci import render
from ci.commands.shared import json_option, text_out, writable_json, write_json
from reference.geometry import Geometry
from stateful_tests import promela
from stateful_tests.arrays import arrays_on
from stateful_tests.column_search import ColumnSearch
from stateful_tests.explorer import Explorer
from stateful_tests.scopes import SCOPES, Scope
from stateful_tests.unit_rules import UnitRules

SIDE_BY_SIDE = *(name for name in SCOPES if name.startswith("session-")), "three-sessions"
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


def _searched(
    scope: Scope, device: str, rules: UnitRules | None = None
) -> tuple[ColumnSearch, float, float]:
    """A finished search, its CPU and its wall-clock seconds."""
    cpu, wall = time.process_time(), time.perf_counter()
    search = ColumnSearch(scope, arrays_on(device), rules)
    search.run(memory_mb=float("inf"))
    return search, time.process_time() - cpu, time.perf_counter() - wall


def _row(scope: Scope, stepped: bool, cuda: bool) -> tuple[Row, ColumnSearch]:
    search, seconds, _ = _searched(scope, "cpu")
    row: Row = {
        "scope": scope.name, "states": search.states, "transitions": search.transitions,
        "depth": len(search.levels) - 1, "s": round(seconds, 2), "states/s": round(search.states / seconds),
    }  # fmt: skip
    if stepped:
        row["of stepping"] = round(search.states / seconds / _stepped(scope), 1)
    if cuda:
        _, _, on_gpu = _searched(scope, "cuda")
        row["GPU states/s"] = round(search.states / on_gpu)
        row["of CPU"] = round(seconds / on_gpu, 1)
    return row, search


def _beside_spin(row: Row, search: ColumnSearch) -> Row:
    """Ratios are of states per second: more than 1, and SPIN is slower."""
    _, alone, wall = _searched(search.scope, "cpu", search.rules)
    run = promela.run(search, two_cores=True)
    if (run.states, run.transitions) != (search.states, search.transitions):
        found = f"{run.states} states, {run.transitions} transitions"
        raise RuntimeError(f"{search.scope.name}: SPIN counts {found}")
    assert run.two_cores_s is not None
    return {
        "scope": search.scope.name, "search s": round(alone, 2), "SPIN s": round(run.seconds, 2),
        "ratio": round(run.seconds / alone, 2), "s": row["s"], "SPIN made in s": round(run.made_s, 1),
        "ratio with making": round((run.seconds + run.made_s) / row["s"], 1), "wall s": round(wall, 2),
        "2 cores wall s": round(run.two_cores_s, 2), "ratio of wall": round(run.two_cores_s / wall, 2),
    }  # fmt: skip


@click.command()
@click.option("--scope", "names", multiple=True, metavar="NAME", default=SIDE_BY_SIDE, help="Side by side.")
@click.option("--width", "widths", multiple=True, type=click.IntRange(1, 8), default=WIDTHS, help="To grow.")
@click.option("--spin/--no-spin", default=True, help="Compiling a model takes up to a minute.")
@click.option("--plot", metavar="FILE", help="How cost grows, as a plot (.svg, .png); needs matplotlib.")
@json_option
def explore(
    names: tuple[str, ...], widths: tuple[int, ...], spin: bool, plot: str | None, json_file: str | None
) -> None:
    """The searches side by side, and how cost grows with the scope."""
    writable_json(json_file)
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
    beside, beside_spin, growth = list[Row](), list[Row](), list[Row]()
    for name in names:
        click.echo(name, err=True)
        row, search = _row(SCOPES[name], True, cuda)
        beside.append(row)
        if spin:
            beside_spin.append(_beside_spin(row, search))
    for width in widths:
        row, search = _row(_family(width), False, cuda)
        kept = sum(len(search.arrays.to_bytes(column)) for column in (search.seen.words, search.seen.table))
        growth.append(row | {"MB of states": round(kept / 2**20, 1)})
    if plot is not None:
        _plot(growth, plot)
    write_json(
        json_file, {"side by side": beside, "SPIN": beside_spin, "growth": growth, "notes": notes}
    )
    out = render.console(text_out(json_file))
    for rows in filter(None, (beside, beside_spin, growth)):
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
