"""A run as text: what it violates and why, and its commands as a table. It is made from the dictionaries of
`ci.report.report_data`."""

import re
from collections.abc import Iterator

from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.text import Text

from ci import Data
from impl.process.system_functions import names_by_file, parse_grouped
from impl.system_spec import SystemSpec
from reference.clauses import CLAUSES
from reference.failures import count_text
from ci.report import FREE_ONLY, IMPATIENT
from ci.report.text_output import (
    changes,
    print_labels,
    or_none,
    printable,
    say,
    sizes_of_trace,
    sizes,
    table,
    verdict,
)

MAX_ROWS = 60  # of a replayed trace; what led to the end is at the end
# of what a step calls: files, and functions of each, that the text names
_MOST_FILES = 5
_MOST_NAMES = 3
# of a short report, what a detailed one says elsewhere
_SAID_ELSEWHERE = "because", "reach"


def finding(
    out: Console, data: Data, title: str, *, detailed: bool = False, folded: bool = False
) -> None:
    """Print a violated clause with its smallest trace.

    folded: without its steps.
    """
    apart = " or ".join(data.get("without", ()))
    names = [
        (f"{c['id']} without {apart}" if apart else c["name"])
        + (f" (also in {c['also_in']})" if c["also_in"] else "")
        for c in data["clauses"]
    ]
    about = f" ({data['clauses'][0]['title']})" if data["clauses"][0]["title"] else ""
    say(out, f"{title}: {', '.join(names)}{about}", "bold red")
    words = _summary(data, apart)
    if detailed:
        for clause in data["clauses"]:
            print_labels(out, {clause["id"]: f"{clause['sentence']}\n{_times_text(clause)}"})
        if more := {label: words[label] for label in words if label not in _SAID_ELSEWHERE}:
            print_labels(out, more)
    else:
        print_labels(out, words if data.get("changed") else words | _called_text(data))
    if folded and data["saved"] is not None:
        say(out, f"replay  {data['replay']}", whole=True)
        return
    out.print()
    run(out, data, detailed=detailed)
    if data["saved"] is not None:
        _print_files(out, data)
    elif data.get("not_saved"):
        say(out, f"the trace could not be saved: {data['not_saved']}", "yellow")


def _times_text(clause: Data) -> str:
    """Return where and how often a clause was violated."""
    times = "once" if clause["times"] == 1 else f"{clause['times']} times"
    often = f"met {times}, first after {clause['found_after_commands']} commands"
    reach = f"{clause['reach']} (modes: {', '.join(clause['modes'])}); {clause['clients']}"
    return f"{reach}; {often}, {clause['found_after_s']:.1f} s"


def _summary(data: Data, apart: str) -> dict[str, str]:
    """Return why the run is wrong, and further notes.

    apart: the parts that the trace does without.
    """
    headline = data["clauses"][0]
    violation = data["violation"]
    because = (
        data["because"] or f"expected {violation['expected']}; observed {violation['observed']}"
    )
    words = {"because": because}
    notable = [
        text for text in (headline["reach"], headline["clients"]) if text in (FREE_ONLY, IMPATIENT)
    ]
    if notable and not data.get("flaky"):
        words["reach"] = "; ".join(notable)
    if data.get("no_witness"):
        words["witness"] = f"none: {data['no_witness']}"
    if data.get("looked_up"):
        words["looked up"] = data["looked_up"]["text"]
    if apart:
        words["apart"] = f"the other traces of {headline['id']} need {apart}, and this one does not"
    if data.get("changed"):
        words["changed"] = "\n".join(_changed_text(data))
    return words


def _print_files(out: Console, data: Data) -> None:
    """Print the files of the traces, and the command that replays the first."""
    by_file: dict[str, list[str]] = {}
    for clause in data["clauses"]:
        by_file.setdefault(clause["saved"] or data["saved"], []).append(clause["id"])
    for label in ("saved", "replay", "page"):
        if data[label] is not None:
            say(out, f"{label:<7} {data[label]}", whole=True)
    for file, clauses in [*by_file.items()][1:]:
        say(out, f"saved   {file}, for {', '.join(clauses)}", whole=True)


def run(out: Console, data: Data, *, detailed: bool = True) -> None:
    """Print the violation that a trace ends with, and the trace as a table of commands."""
    trace = data["trace"]
    violation = data["violation"]
    if data["step_table"] is not None:
        _step_table(out, data)
    else:
        _print_steps(out, data)
    way = f"mode {trace['mode']}" if "mode" in trace else "configuration"
    say(out, f"{trace['origin']} trace, {way}: {sizes(sizes_of_trace(trace))}", "dim")
    if violation is not None and detailed:
        out.print()
        rows = data["rows"]
        say(
            out,
            f"violated at step {violation['step']}: {violation['clause']}. {violation['sentence']}",
        )
        words = {"because": data["because"]} if data["because"] else {}
        if data["differences"]:
            words["differs"] = difference(data["differences"], data["implementation"])
        words |= {"expected": violation["expected"], "observed": violation["observed"]}
        if (since := violation["since"]) is not None:
            words["since"] = (
                f"step {since} ({rows[since]['command']}): run before it, the check balances"
            )
        if (first_violation := violation["first_violation"]) is not None:
            before = ", ".join(first_violation["clauses"])
            command = rows[first_violation["step"]]["command"]
            words["first_violation"] = (
                f"step {first_violation['step']} ({command}) violates {before};"
                f" from there on only {violation['clause']} is checked"
            )
        if violation["also"]:
            words["also"] = f"{', '.join(violation['also'])} at the same step"
            for clause, (expected, observed) in zip(violation["also"], violation["details"]):
                words[clause] = f"expected {expected}\nobserved {observed}"
        if known := data["known"]:
            words["known"] = f"{known['id']}: {known['summary']}"
        if data.get("changed"):
            words["changed"] = "\n".join(_changed_text(data))
        if violation["why"]:  # a clause of the specification
            clause = violation["clause"]
            page = "SPEC.md" if clause in CLAUSES else "SPEC-REFERENCE.md"
            words["more"] = f"kvspec clauses {clause}; {page} under {clause}"
        print_labels(out, words | _called_text(data))


def _changed_text(data: Data) -> list[str]:
    """Return the changed functions that a trace calls, and the commands that call them."""
    lines = []
    for function in data["changed"]:
        first, *more = function["steps"]
        ran = [f"command {first} ({data['rows'][first]['command']})"]
        if more:
            dots = " ..." if len(more) > 4 else ""
            ran.append(f"again in {', '.join(map(str, more[:4]))}{dots}")
        lines.append(f"{function['function']} ran in {', '.join(ran)}")
    left = len(lines) - _MOST_FILES
    return [*lines[:_MOST_FILES], f"and {left} more (--json has all)"] if left > 0 else lines


def _called_text(data: Data) -> dict[str, str]:
    """Return the files of the system that the failing command ran through, those with the most
    functions first, without the functions that most commands of the trace call."""
    by_file = names_by_file(parse_grouped(data["calls"]))
    files = sorted(by_file.items(), key=lambda names_of_file: -len(names_of_file[1]))
    lines = [f"{file}: {_first_names(names)}" for file, names in files[:_MOST_FILES]]
    if len(files) > _MOST_FILES:
        lines.append(f"and {len(files) - _MOST_FILES} more files (--json has all)")
    return {"calls": "\n".join(lines)} if lines else {}


def _first_names(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def difference(differences: list[Data], system: str) -> str:
    """Return the first difference between reference and system, and the number of others."""
    first_difference = differences[0]
    others = len(differences) - 1
    more = f" (and {count_text(others, 'more difference')})" if others else ""
    expected = f"{first_difference['about']}: {first_difference['reference']} expected"
    return f"{expected}, {first_difference['system']} in {system}{more}"


def _print_left_out(out: Console, shown_count: int, rows: int) -> None:
    if rows > shown_count:
        say(out, f"steps 0 to {rows - shown_count - 1} are left out here; --json has them all")


def _print_steps(out: Console, data: Data) -> None:
    """Print the changes of each command in the reference."""
    rows = data["rows"]
    _print_left_out(out, MAX_ROWS, len(rows))
    engine = "config" in data["trace"]  # which picks what it does: there is nothing beside it
    expected = ("reference", "what changes and what is freed in the reference")
    steps = table("#", "command", *(("outcome", "what it did") if engine else expected))
    for row in rows[-MAX_ROWS:]:
        mark = "> " if row["violates"] else "  "
        lines = changes(row) or list(filter(None, [row.get("why")]))
        if row["violates"]:
            violation = data["violation"]
            lines.append(f"violates {', '.join([violation['clause'], *violation['also']])}")
        cells = (
            f"{mark}{row['step']}",
            row["command"],
            row["outcome"],
            "\n".join(map(printable, lines)),
        )
        steps.add_row(
            *(Text(cell if cell is cells[3] else printable(cell)) for cell in cells),
            style="bold red" if row["violates"] else "",
        )
    out.print(steps)


class _Cell:
    """A cell of the step table; it breaks between its parts, never within one, such as "C 3*" or "[0,
    4)"."""

    def __init__(self, text: str) -> None:
        self.parts = re.findall(r"\[\d+, \d+\)\S*|\S+(?: !?[\d?]\S*)?", text)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        del console, options
        return Measurement(max(map(len, self.parts), default=0), len(" ".join(self.parts)))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        del console
        line = ""
        for part in self.parts:
            if line and len(line) + 1 + len(part) > options.max_width:
                yield Text(line)
                line = ""
            line = f"{line} {part}".lstrip()
        yield Text(line)


def _step_table(out: Console, data: Data) -> None:
    """Print the holdings after each command; the last twice, as expected and as observed."""
    rows = data["step_table"]["rows"]
    columns = data["step_table"]["columns"]
    _print_left_out(out, len({row["step"] for row in rows}), len(data["rows"]))
    step_table = table("#", "command", *map(printable, columns))
    step_table.columns[1].max_width = 30  # so that there is room for cursors
    for row in rows:
        refused = data["rows"][row["step"]]["outcome"]
        outcome = (
            f" ({refused})" if refused.startswith("refused") and row["what"] != "observed" else ""
        )
        bad = row["step"] == data["violation"]["step"]
        head = (f"{'> ' if bad else '  '}{row['step']}", f"{row['what']}{outcome}")
        cells = (_Cell(printable(cell)) for cell in row["cells"])
        step_table.add_row(*(Text(printable(cell)) for cell in head), *cells, style="bold red" if bad else "")
    out.print(step_table)
    say(out, "; ".join(_legend(columns, [cell for row in rows for cell in row["cells"]])), "dim")


# A sign of the step table, and what it stands for.
_SIGNS = {
    r"\b[CAER] !?\d": "tokens: C committed, A allocated, E SWA-evicted, R owned by the tree",
    r"\*": "* changed by the command",
    r"!": "! differs from the reference",
    r"^!?-$": "- is not there",
}


def _legend(columns: list[str], cells: list[str]) -> Iterator[str]:
    """Explain the signs that occur in a step table."""
    for sign, meaning in _SIGNS.items():
        if any(re.search(sign, cell) for cell in cells):
            yield meaning
    if any(column.startswith("node ") for column in columns):
        yield "of a node: its tokens, live or tombstone, full/SWA locks"


def refusals(out: Console, data: Data) -> None:
    """Print refusals that the trace does not state: in a trace by hand often a mistake."""
    if not data["unstated_refusals"]:
        return
    first_row = data["rows"][data["unstated_refusals"][0]]
    many = ": the trace hardly does what it was written for" if data["mostly_refused"] else ""
    count = f"{len(data['unstated_refusals'])} of {len(data['rows'])} commands refused, and not stated so"
    reason = ", ".join(filter(None, (first_row["outcome"].removeprefix("refused: "), first_row.get("why"))))
    say(
        out,
        f"{count}{many}. The first: command {first_row['step']} ({first_row['command']}), {reason}.",
        "yellow",
    )


def replay(out: Console, data: Data, *, brief: bool = False) -> None:
    """Print one file of `kvspec replay`.

    brief: a line when it conforms.
    """
    refused = len(data["unstated_refusals"])
    end_of_table = refused and data["violation"] is None  # else it stands above the table
    stated = (
        f"{refused} of {len(data['rows'])} commands refused, and not stated so"
        if end_of_table
        else ""
    )
    remarks = "; ".join(filter(None, (data["note"], stated)))
    note = f" ({remarks})" if remarks else ""
    if brief and not data["exit_code"]:
        say(out, f"{data['file']}: {data['verdict']}{note}", whole=True)
        return
    say(out, f"{data['file']} on {data['implementation']}", "bold", whole=True)
    trace = data["trace"]
    if about := [f"{key} {trace[key]}" for key in ("bug", "clause") if trace.get(key)]:
        say(out, ", ".join(about))
    if trace["story"]:
        say(out, " ".join(trace["story"].split()))
    refusals(out, data)
    run(out, data)
    out.print()
    steps = f" after {len(data['rows'])} of {len(trace['steps'])} steps" if trace["steps"] else ""
    verdict(out, f"{data['verdict']}{steps}{note}", data)
    out.print()


def replays(out: Console, data: Data) -> None:
    """Print one file of `kvspec replay` on every release: a line each, and those that conform."""
    rows = data["releases"]
    say(out, data["file"], "bold", whole=True)
    driven = [row["replay"] for row in rows if row["replay"] is not None]
    if driven:
        refusals(out, max(driven, key=lambda each: len(each["rows"])))
    made = table("release", "what the trace does there")
    made.columns[0].no_wrap = True
    for row in rows:
        style = "red" if row["replay"] is not None and row["exit_code"] else ""
        made.add_row(Text(row["implementation"]), Text(printable(_behaviour_text(row))), style=style)
    out.print(made)
    ends: dict[str, list[str]] = {}
    for row in rows:
        end = "cannot be driven" if row["replay"] is None else row["replay"]["verdict"]
        ends.setdefault(end, []).append(SystemSpec.parse(row["implementation"]).short)
    names = [SystemSpec.parse(row["implementation"]).short for row in rows]
    say(out, "; ".join(f"{end}: {_name_ranges(of_end, names)}" for end, of_end in ends.items()), "bold")
    out.print()


def _behaviour_text(row: Data) -> str:
    """Return the behaviour of a trace on a release, in a line."""
    replayed = row["replay"]
    reason = (row["unusable"] or "").removeprefix(f"{row['implementation']} ")
    if replayed is None:
        return f"cannot be driven: {reason}"
    violation = replayed["violation"]
    known = replayed["known"]
    note = replayed["note"]
    where = f" at command {violation['step']}" if violation else ""
    if known:
        label = f"known: {known['id']}"
    else:
        label = "no known fault" if violation else ""
    left_out = len(replayed["unstated_refusals"]) if not violation else 0
    refused = f"{left_out} of {len(replayed['rows'])} commands refused" if left_out else ""
    remarks = "; ".join(filter(None, (label, note, refused)))
    return f"{replayed['verdict']}{where}" + (f" ({remarks})" if remarks else "")


def _name_ranges(some: list[str], names: list[str]) -> str:
    """Return the selected names as ranges in their order, such as "0.5.10 to 0.5.12, 0.5.14"."""
    runs: list[list[str]] = []
    for index, name in enumerate(names):
        if name in some:
            if index and names[index - 1] in some:
                runs[-1].append(name)
            else:
                runs.append([name])
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


def shrunk(out: Console, data: Data) -> None:
    """Print the report of `kvspec shrink`."""
    before = data["before"]
    after = data["after"]
    run(out, after)
    out.print()
    steps = f"{len(before['trace']['steps'])} commands -> {len(after['trace']['steps'])}"
    now = sizes_of_trace(after["trace"])
    was = sizes_of_trace(before["trace"]).items()
    smaller = [
        f"{name} {or_none(size)} -> {or_none(now.get(name))}"
        for name, size in was
        if size != now.get(name)
    ]
    say(
        out,
        f"{data['clause']} on {after['implementation']}: {', '.join([steps, *smaller])}",
        "bold",
    )
    for label in ("saved", "replay"):
        say(out, f"{label:<7} {data[label]}", whole=True)
