"""kvspec tree: look at the radix tree in one trace."""

from __future__ import annotations

import click

from ci.commands.saved_traces import load_trace
from ci.commands.shared import ReportOut, json_option, unusable


@click.command()
@click.argument("trace", metavar="TRACE")
@click.option(
    "--step",
    type=int,
    metavar="N",
    help="Step, as `kvspec replay` counts them. [default: the last]",
)
@json_option
def tree(out: ReportOut, trace: str, step: int | None) -> int:
    """Draw the radix tree at a step of a trace.

    It is the tree of the reference: the locks on each node, and the order of eviction.
    """
    loaded = load_trace(trace)

    from ci.report import tree_view

    with unusable(f"{trace}: ", tree_view.NoTree):
        data = tree_view.collect(trace, loaded, step)
    tree_view.text(out.console, data)
    return out.end(data)
