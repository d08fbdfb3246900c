"""Reports as text, from the dictionaries of `ci.report.data`: for a terminal, and plain for a pipe."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import IO, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ci import Data
from reference.accounts import account_text
from reference.commands import Account

PIPE_WIDTH = 100
MAX_MISSING = 20  # of the situations that a check has missed
MAX_ROWS = 60  # of a replayed trace; what led to the end is at the end


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to the command line what a reader who has seen enough means: no failure."""
        raise BrokenPipeError


def console(file: IO[str] | None = None) -> Console:
    """A console that takes text as it is, and writes no control characters unless to a terminal."""
    out = file if file is not None else sys.stdout
    terminal = out.isatty()
    return _Console(
        file=out,
        force_terminal=terminal,
        color_system="auto" if terminal else None,
        width=None if terminal else PIPE_WIDTH,
        markup=False,
        highlight=False,
        emoji=False,
    )


def plain(text: object) -> str:
    """Text of a stranger (an exception, a name) without anything that a terminal would obey."""
    return "".join(c if c.isprintable() else " " for c in str(text))


def table(*columns: str, right: Sequence[str] = ()) -> Table:
    """An empty table in the one style that all reports share."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for column in columns:
        number = column in right
        made.add_column(column, justify="right" if number else "left", no_wrap=number, overflow="fold")
    return made


def say(out: Console, text: str, style: str = "", *, whole: bool = False) -> None:
    """A paragraph of plain text. whole: never wrapped, as it is there to be copied."""
    out.print(Text(plain(text), style=style), soft_wrap=whole)


def verdict(out: Console, text: str, data: Data) -> None:
    """The last line of a report, in the colour of its exit code."""
    say(out, text, "bold red" if data["exit_code"] else "bold green")


def sizes(geometry: Data) -> str:
    """Such as "page_size 4, window none, tree"."""
    given = {k: "none" if v is None else v for k, v in geometry.items()}
    return ", ".join(k if v is True else f"{k} {v}" for k, v in given.items())


def check(out: Console, data: Data) -> None:
    """The report of `kvspec check`."""
    runs = ", ".join(f"{name} {count}" for name, count in data["examples_asked"].items())
    asked = f"runs for each row below: {runs}; each of up to {data['steps_asked']} commands"
    words = {
        "implementation": data["implementation"],
        "tier": f"{data['tier']}, seed {data['seed']}, modes {', '.join(data['modes'])}",
        "plan": f"{asked}, time limit {data['time_limit_s']:g} s",
        "presets": ", ".join(data["presets"]),
    }
    if left_out := data["machines_left_out"] + data["presets_left_out"]:
        words["left out"] = f"{', '.join(left_out)} (the implementation cannot be built so)"
    labelled(out, words)
    out.print()
    numbers = ("runs", "commands", "commands/s")
    machines = table("machine", "preset", "mode", *numbers, right=numbers)
    begun = [m for m in data["machines"] if m["commands"]]
    for m in begun:
        row = (m["machine"], m["preset"], m["mode"], m["examples"], m["commands"], m["commands_per_s"])
        machines.add_row(*map(str, row))
    total = (data["examples"], data["commands"], data["commands_per_s"])
    machines.add_row("all", "", "", *map(str, total), style="bold")
    out.print(machines)
    if waiting := len(data["machines"]) - len(begun):
        say(out, f"not begun when the check ended: {waiting} more")
    out.print()
    counts = ("evaluated", "situation reached")
    clauses = table("clause", "about", *counts, right=counts)
    clauses.columns[-1].no_wrap, clauses.columns[-1].width = False, 18
    for c in data["clauses"]:
        reached = str(c["times_reached"]) if c["reached"] else "never"
        about = f"{c['title']} (waived: {c['waived']})" if c["waived"] else c["title"]
        evaluated = "-" if c["waived"] else str(c["evaluated"])
        clauses.add_row(c["id"], Text(about), evaluated, "-" if c["waived"] else reached)
    out.print(clauses)
    out.print()
    say(out, f"refusals met: {_counts(data['refusals'])}")
    say(out, f"commands: {_counts(data['commands_by_kind'])}")
    if data["unreached"]:
        say(out, f"situation never reached: {', '.join(data['unreached'])}", "yellow")
    _situations(out, data["situations"], data["tier"])
    for number, found in enumerate(data["findings"], 1):
        out.print()
        finding(out, found, f"violation {number} of {len(data['findings'])}")
    out.print()
    verdict(out, data["verdict"], data)


def _situations(out: Console, data: Data, tier: str) -> None:
    """What was reached of what the explorer has reached."""
    due = " (tier pr has to reach them all)" if tier == "smoke" else ""
    asked = f"{data['asked']} that the explorer has reached{due}"
    say(out, f"situations reached: {data['reached']} of {asked}")
    for group in data["left_out"]:
        say(out, f"  left out: {len(group['situations'])}, {group['why']}")
    for row in data["exempt"]:
        say(out, f"  exempt: {row['situation']}: {row['reason']} (reached {row['times']} times)")
    for text in data["missing"][:MAX_MISSING]:
        say(out, f"  never reached: {text}", "yellow")
    if (more := len(data["missing"]) - MAX_MISSING) > 0:
        say(out, f"  never reached: {more} more; --json has them all", "yellow")


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"


def finding(out: Console, data: Data, title: str) -> None:
    """A violated clause with its smallest trace."""
    say(out, f"{title}: {', '.join(c['id'] for c in data['clauses'])}", "bold red")
    for c in data["clauses"]:
        times = "once" if c["times"] == 1 else f"{c['times']} times"
        met = f"met {times}, first after {c['found_after_commands']} commands"
        reach = f"{c['reach']} (modes: {', '.join(c['modes'])}); {met}, {c['found_after_s']:.1f} s"
        labelled(out, {c["id"]: f"{c['sentence']}\n{reach}"})
    out.print()
    run(out, data)
    if data["saved"] is not None:
        out.print()
        for label in ("saved", "replay", "page"):
            if data[label] is not None:
                say(out, f"{label:<7} {data[label]}", whole=True)
    elif data.get("not_saved"):
        say(out, f"the trace could not be saved: {data['not_saved']}", "yellow")


def run(out: Console, data: Data) -> None:
    """A trace as a table of commands, and the violation it ends with."""
    trace = data["trace"]
    say(out, f"{trace['origin']} trace, mode {trace['mode']}: {sizes(trace['geometry'])}")
    out.print()
    if data["ledger"] is not None:
        _ledger(out, data)
    else:
        _steps(out, data)
    if (violation := data["violation"]) is not None:
        out.print()
        rows = data["rows"]
        say(out, f"violated at step {violation['step']}: {violation['clause']}. {violation['sentence']}")
        words = {"because": data["argument"]} if data["argument"] else {}
        if data["differences"]:
            words["differs"] = difference(data["differences"], data["implementation"])
        words |= {"expected": violation["expected"], "observed": violation["observed"]}
        if (since := violation["since"]) is not None:
            words["since"] = f"step {since} ({rows[since]['command']}): run before it, the check balances"
        if violation["also"]:
            words["also"] = f"{', '.join(violation['also'])} at the same step"
            for clause, (expected, observed) in zip(violation["also"], violation["details"]):
                words[clause] = f"expected {expected}\nobserved {observed}"
        if violation["why"]:  # a clause of the specification
            words["more"] = f"kvspec clauses {violation['clause']}; SPEC.md under {violation['clause']}"
        labelled(out, words)


def difference(differences: list[Data], system: str) -> str:
    """The first difference between reference and system, and how many more there are."""
    first = differences[0]
    more = f" (and {len(differences) - 1} more)" if len(differences) > 1 else ""
    return f"{first['about']}: {first['reference']} by the rules, {first['system']} in {system}{more}"


def _left_out(out: Console, shown: int, rows: int) -> None:
    if rows > shown:
        say(out, f"steps 0 to {rows - shown - 1} are left out here; --json has them all")


def _steps(out: Console, data: Data) -> None:
    """What each command changed, by the rules."""
    rows = data["rows"]
    _left_out(out, MAX_ROWS, len(rows))
    steps = table("#", "command", "reference", "what changes and what is freed, by the rules")
    for row in rows[-MAX_ROWS:]:
        mark = "> " if row["violates"] else "  "
        lines = changes(row)
        if row["violates"]:
            violation = data["violation"]
            lines.append(f"violates {', '.join([violation['clause'], *violation['also']])}")
        cells = (f"{mark}{row['step']}", row["command"], row["outcome"], "\n".join(map(plain, lines)))
        steps.add_row(
            *(Text(cell if cell is cells[3] else plain(cell)) for cell in cells),
            style="bold red" if row["violates"] else "",
        )
    out.print(steps)


def _ledger(out: Console, data: Data) -> None:
    """Who has what after each command; the last twice, by the rules and in the system."""
    rows, columns = data["ledger"]["rows"], data["ledger"]["columns"]
    _left_out(out, len({row["step"] for row in rows}), len(data["rows"]))
    made = table("#", "command", *map(plain, columns))
    for row in rows:
        refused = data["rows"][row["step"]]["outcome"]
        outcome = f" ({refused})" if refused.startswith("refused") and row["what"] != "in the system" else ""
        bad = row["step"] == data["violation"]["step"]
        cells = (f"{'> ' if bad else '  '}{row['step']}", f"{row['what']}{outcome}", *row["cells"])
        made.add_row(*(Text(plain(cell)) for cell in cells), style="bold red" if bad else "")
    out.print(made)
    legend = "C A E R are the cursors of a row. * changed here, ! not as the rules have it"
    if any(column.startswith("node ") for column in columns):
        legend += "; of a node: its tokens, live or tombstone, full/SWA locks"
    say(out, legend, "dim")


def labelled(out: Console, words: dict[str, str]) -> None:
    """Labels and what they stand for; lines that go on are set under the text, not the label."""
    grid = Table.grid(padding=(0, 2))
    for label, text in words.items():
        grid.add_row(f"  {label}", Text("\n".join(map(plain, text.split("\n")))))
    out.print(grid)


def changes(row: Data) -> list[str]:
    """What a step changed: a line for each cursor, each holder's freed ranges, each part of the tree."""
    lines = [f"{c['holder']} {c['cursor']} {c['before']} -> {c['after']}" for c in row["cursors"]]
    freed: dict[str, list[str]] = {}
    for f in row["freed"]:
        freed.setdefault(f["holder"], []).append(f"{f['pool']} [{f['start']}, {f['end']})")
    lines += [account_text(Account(**account)) for account in row["accounts"]]
    lines += [f"{holder} freed {' '.join(ranges)}" for holder, ranges in freed.items()]
    return [*lines, *row["tree"]]


def replay(out: Console, data: Data, *, brief: bool = False) -> None:
    """One file of `kvspec replay`; brief: a line when it conforms."""
    note = f" ({data['note']})" if data["note"] else ""
    if brief and not data["exit_code"]:
        say(out, f"{data['file']}: {data['verdict']}{note}", whole=True)
        return
    say(out, f"{data['file']} on {data['implementation']}", "bold", whole=True)
    trace = data["trace"]
    if about := [f"{key} {trace[key]}" for key in ("bug", "clause") if trace[key]]:
        say(out, ", ".join(about))
    if trace["story"]:
        say(out, " ".join(trace["story"].split()))
    run(out, data)
    out.print()
    steps = f" after {len(data['rows'])} of {len(trace['steps'])} steps" if trace["steps"] else ""
    verdict(out, f"{data['verdict']}{steps}{note}", data)
    out.print()


def shrunk(out: Console, data: Data) -> None:
    """The report of `kvspec shrink`."""
    before, after = data["before"], data["after"]
    run(out, after)
    out.print()
    steps = f"{len(before['trace']['steps'])} commands -> {len(after['trace']['steps'])}"
    now = after["trace"]["geometry"]
    was = before["trace"]["geometry"].items()
    smaller = [f"{name} {size} -> {now.get(name)}" for name, size in was if size != now.get(name)]
    say(out, f"{data['clause']} on {after['implementation']}: {', '.join([steps, *smaller])}", "bold")
    for label in ("saved", "replay"):
        say(out, f"{label:<7} {data[label]}", whole=True)


def record(out: Console, row: Data) -> None:
    """One row of a listing in full."""
    labelled(out, {key: _cell(value) for key, value in row.items() if value})


def listing(out: Console, rows: list[Data], columns: dict[str, str]) -> None:
    """A plain listing; columns: key -> heading."""
    made = table(*columns.values())
    made.columns[0].no_wrap = True  # names are there to be copied
    for row in rows:
        made.add_row(*(Text(plain(_cell(row[key]))) for key in columns))
    out.print(made)


def _cell(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
