"""Shared parts of reports as text: the console, tables, paragraphs and listings. They are plain in a pipe."""

import os
import sys
from collections.abc import Sequence
from shutil import get_terminal_size
from textwrap import wrap
from typing import IO, Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ci import Data
from ci.standard_streams import printable as printable
from reference.memory_accounts import account_text
from reference.commands import Account

PIPE_WIDTH = 100
SENTENCE = 40  # characters; a column of cells that are longer on average has sentences
WIDEST = 60  # characters of a column


def console(file: IO[str] | None = None) -> Console:
    """Return a console that prints text as it is, and writes no control characters unless to a
    terminal."""
    out = file if file is not None else sys.stdout
    terminal = out.isatty()
    # https://no-color.org; rich would leave what is bold.
    coloured = terminal and not os.environ.get("NO_COLOR")
    columns = os.environ.get("COLUMNS", "")
    asked = int(columns) if columns.isdigit() else 0
    return Console(
        file=out,
        force_terminal=terminal,
        color_system="auto" if coloured else None,
        width=asked or (get_terminal_size().columns if terminal else PIPE_WIDTH),
        markup=False,
        highlight=False,
        emoji=False,
    )


def table(*columns: str, right: Sequence[str] = ()) -> Table:
    """Return an empty table in the style that all reports share."""
    new_table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for column in columns:
        number = column in right
        new_table.add_column(
            column, justify="right" if number else "left", no_wrap=number, overflow="fold"
        )
    return new_table


def say(out: Console, text: str, style: str = "", *, whole: bool = False) -> None:
    """Print a paragraph of plain text.

    whole: never wrapped, because it is there to be copied.
    """
    out.print(Text(printable(text), style=style), soft_wrap=whole)


def verdict(out: Console, text: str, data: Data) -> None:
    """Print the last line of a report, in the colour of its exit code."""
    say(out, text, "bold red" if data["exit_code"] else "bold green")


def print_labels(out: Console, words: dict[str, str]) -> None:
    """Print labels and their texts; continued lines are set under the text, not the label."""
    grid = Table.grid(padding=(0, 2))
    for label, text in words.items():
        grid.add_row(f"  {label}", Text("\n".join(map(printable, text.split("\n")))))
    out.print(grid)


def record(out: Console, row: Data) -> None:
    """Print one row of a listing in full."""
    print_labels(out, {key: _cell_text(value, "\n") for key, value in row.items() if value})


def listing(out: Console, rows: list[Data], columns: dict[str, str]) -> None:
    """Print a plain listing.

    columns: key -> heading, those with sentences last. On a terminal sentences are below the name; in a pipe
        only where rows are wider than the console. What stands below has its heading, but for the longest
        sentences.
    """
    cells = {key: [printable(_cell_text(row[key])) for row in rows] for key in columns}
    long = {key for key in columns if sum(map(len, cells[key])) > SENTENCE * len(rows)}
    keys = sorted(columns, key=lambda key: key in long)
    if out.is_terminal and not long:
        made = table(*columns.values())
        made.columns[0].no_wrap = True  # names are there to be copied
        for row in zip(*cells.values()):
            made.add_row(*map(Text, row))
        out.print(made)
        return
    short = [key for key in keys if key not in long]
    longest = max(long, key=lambda key: sum(map(len, cells[key])), default="")
    labels = {key: "" if key == longest else f"{columns[key]}: " for key in columns}
    if not out.is_terminal:
        _plain_listing(out, columns, cells, keys, short, labels)
        return
    for index in range(len(rows)):
        say(out, "   ".join(filter(None, (cells[key][index] for key in short))), "bold")
        for key in (key for key in keys[len(short) :] if cells[key][index]):
            out.print(Padding(Text(labels[key] + cells[key][index]), (0, 0, 0, 4)))


def _plain_listing(
    out: Console, columns: dict[str, str], cells: dict[str, list[str]], keys: list[str], short: list[str],
    labels: dict[str, str],
) -> None:  # fmt: skip
    """Print a listing as plain lines: a row is one line, for grep. Where rows are wider than the
    console, the widest columns are below them: those with sentences, then of the `short` ones the
    widest."""
    shown_keys = keys
    if max(map(len, _column_lines(columns, cells, keys))) > out.width:
        shown_keys = [*short] or keys[:1]
    while shown_keys[1:] and max(map(len, _column_lines(columns, cells, shown_keys))) > out.width:
        shown_keys.remove(max(shown_keys[1:], key=lambda key: max(map(len, cells[key]))))
    heading, *lines = _column_lines(columns, cells, shown_keys)
    say(out, heading, whole=True)
    for index, line in enumerate(lines):
        say(out, line, whole=True)
        for key in (key for key in keys if key not in shown_keys and cells[key][index]):
            for text in wrap(labels[key] + cells[key][index], out.width - 4):
                say(out, f"    {text}", whole=True)


def _column_lines(columns: dict[str, str], cells: dict[str, list[str]], keys: list[str]) -> list[str]:
    """Return the heading and the rows of some columns, each as one line."""
    lines = [[columns[key] for key in keys], *zip(*(cells[key] for key in keys))]
    widths = [min(WIDEST, max(map(len, column))) for column in zip(*lines)][:-1]
    return ["   ".join([*map(str.ljust, line, widths), line[-1]]).rstrip() for line in lines]


def _cell_text(value: Any, between: str = ", ") -> str:
    return between.join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def or_none(size: Any) -> Any:
    """Return the word "none" for a size that a system does not have."""
    return "none" if size is None else size


def sizes(geometry: Data) -> str:
    """Return sizes in words, such as "page_size 4, window none, tree"."""
    settings = geometry.get("settings") or {}
    named = {name: size for name, size in geometry.items() if name != "settings"}
    given: Data = {name: or_none(size) for name, size in named.items() if size is not False}
    given |= settings
    if groups := given.pop("groups", None):
        given = {
            "blocks of": " and ".join(map(_group_text, groups)),
            **{k: v for k, v in given.items() if v},
        }
    return ", ".join(_size_text(name, value) for name, value in given.items())


def _size_text(name: str, value: Any) -> str:
    """Return a size or a switch in words; for a pair the sizes of a server."""
    if isinstance(value, dict):
        return f"{name} ({sizes(value)})"
    return name if value is True else f"{name} {value}"


def _group_text(group: Data) -> str:
    """Return a layer group in words, such as "4 window 6 with state"."""
    words = " window ".join(
        str(group[part]) for part in ("block_size", "window") if group.get(part)
    )
    if group.get("ring"):
        return f"{words} in a ring"
    return f"{words} with state" if group.get("state") else words


def sizes_of_trace(trace: Data) -> Data:
    """Return the sizes of a trace's system."""
    sizes: Data = trace["geometry"] if "geometry" in trace else trace["config"]
    return sizes


def changes(row: Data) -> list[str]:
    """Return the changes of a step: a line for each cursor, each holder's freed ranges, each part of the
    tree."""
    lines = [f"{c['holder']} {c['cursor']} {c['before']} -> {c['after']}" for c in row["cursors"]]
    freed: dict[str, list[str]] = {}
    for f in row["freed"]:
        freed.setdefault(f["holder"], []).append(f"{f['pool']} [{f['start']}, {f['end']})")
    lines += [account_text(Account(**account)) for account in row["accounts"]]
    lines += [f"{holder} freed {' '.join(ranges)}" for holder, ranges in freed.items()]
    return [*lines, *row["tree"]]
