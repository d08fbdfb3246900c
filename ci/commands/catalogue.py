"""kvspec bugs, clauses and blindspots: lists, and which check sees which bug."""

import click

from ci.commands.shared import ReportOut, Unusable, json_option, list_rows, unusable


@click.command()
@click.argument("names", nargs=-1)
@json_option
def bugs(names: tuple[str, ...], out: ReportOut) -> int:
    """List the named bugs: each puts one fault into the torch implementation. With NAMES: those, in full."""
    from impl.bugs import BUGS

    fields = ("id", "title", "clause", "modes", "source", "story")
    rows = [{field: getattr(bug, field) for field in fields} for bug in BUGS.values()]
    for row in rows:
        row["modes"] = [mode.value for mode in row["modes"]]
    headings = {"id": "bug", "title": "what is wrong", "clause": "clause", "source": "source"}
    return list_rows(rows, out, headings, names)


@click.command()
@click.argument("names", nargs=-1)
@json_option
def clauses(names: tuple[str, ...], out: ReportOut) -> int:
    """List the clauses of the specification. With NAMES: those, in full."""
    from impl.bugs import BUGS
    from reference.blocks.clauses import EVERY_CLAUSE

    fields = ("id", "title", "sentence", "scope", "why", "settled", "assumption", "rule", "source")
    rows = [{field: getattr(clause, field) for field in fields} for clause in EVERY_CLAUSE.values()]
    for row in rows:
        row["catches"] = [f"{bug.id}: {bug.title}" for bug in BUGS.values() if bug.clause == row["id"]]
    headings = {"id": "clause", "sentence": "what it says", "settled": "how it was settled"}
    return list_rows(rows, out, headings, names)


@click.command("blindspots")
@click.option("--bug", "names", multiple=True, metavar="NAME", help="Bug to measure (repeatable).")
@click.option("--runs", type=click.IntRange(1, 10_000), default=20, show_default=True, help="Runs per bug.")
@click.option("--seed", type=int, default=0, show_default=True, help="Where random decisions start from.")
@json_option
def blind_spots(names: tuple[str, ...], runs: int, seed: int, out: ReportOut) -> int:
    """Measure which run-time check sees which named bug, and when."""
    from impl.bugs import BUGS

    for name in names:
        if name not in BUGS:
            raise Unusable(f"--bug {name}: unknown bug; `kvspec bugs` lists them")

    from ci.report import blindspots
    from ci.report.progress import Progress

    with unusable("blindspots: "), Progress() as progress:
        data = blindspots.collect(tuple(dict.fromkeys(names)), runs, seed, progress)
    blindspots.text(out.console, data, detailed=bool(names))
    return out.end(data)
