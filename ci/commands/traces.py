"""kvspec tree: look at one trace."""

from __future__ import annotations

import click

from ci.commands.shared import Unusable, json_option, load_trace, text_out, writable_json, write_json


@click.command()
@click.argument("trace", metavar="TRACE")
@click.option("--step", type=int, metavar="N", help="After which step, as `kvspec replay` counts; the last.")
@json_option
def tree(trace: str, step: int | None, json_file: str | None) -> int:
    """Draw the radix tree at one step of a trace: what is in it, who pins it, what goes first."""
    loaded = load_trace(trace)
    writable_json(json_file)

    from ci import render, tree_view

    try:
        data = tree_view.collect(trace, loaded, step)
    except tree_view.NoTree as error:
        raise Unusable(f"{trace}: {error}") from error
    tree_view.text(render.console(text_out(json_file)), data)
    write_json(json_file, data)
    return 0
