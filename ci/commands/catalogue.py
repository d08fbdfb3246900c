"""kvspec bugs, clauses and driven: lists, or some in full."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING

import click

from ci.commands.shared import ReportOut, json_option, list_rows, unusable
from impl.system_spec import SystemSpec

if TYPE_CHECKING:
    from ci import Data


_BUG_COLUMNS = {"id": "bug", "title": "what is wrong", "clause": "clause", "source": "source"}


@click.command()
@click.argument("names", nargs=-1)
@json_option
def bugs(names: tuple[str, ...], out: ReportOut) -> int:
    """List the named bugs, or explain one, also of a release.

    `--impl torch+BUG` puts a named bug into the built-in implementation. NAMES: these in full, known bugs of
    releases too. Words: those that mention them all, of releases first. A release, such as sglang==0.5.20:
    those that it has.
    """
    from ci.documents.findings import is_of, known_bugs
    from impl.bugs import BUGS

    if of := [name for name in names if SystemSpec.parse(name).version is not None]:
        with unusable("", ValueError):
            known = [
                row for row in known_bugs() if all(is_of(row["id"], release) for release in of)
            ]
        words = tuple(name for name in names if name not in of)
        return list_rows(known, out, _BUG_COLUMNS, words, f" of {' '.join(of)}")

    fields = ("id", "title", "clause", "modes", "source", "story")
    rows: list[Data] = [{field: getattr(bug, field) for field in fields} for bug in BUGS.values()]
    for row in rows:
        row["modes"] = ", ".join(mode.value for mode in row["modes"])
    return list_rows(known_bugs() + rows if names else rows, out, _BUG_COLUMNS, names)


@click.command()
@click.argument("names", nargs=-1)
@json_option
def clauses(names: tuple[str, ...], out: ReportOut) -> int:
    """List the clauses of the specification, or explain one.

    NAMES: these in full. Words: those that mention them all.
    """
    from impl.bugs import BUGS
    from reference.every_clause import EVERY_CLAUSE

    fields = ("id", "title", "sentence", "scope", "why", "decision", "assumption", "rule", "source")
    rows = [{field: getattr(clause, field) for field in fields} for clause in EVERY_CLAUSE.values()]
    for row in rows:
        row["catches"] = [
            f"{bug.id}: {bug.title}" for bug in BUGS.values() if bug.clause == row["id"]
        ]
    headings = {"id": "clause", "sentence": "what it says", "decision": "decision"}
    return list_rows(rows, out, headings, names)


@click.command()
@click.argument("names", nargs=-1)
@json_option
def driven(names: tuple[str, ...], out: ReportOut) -> int:
    """List what is driven of each engine, and what is not.

    Classes and flags of the newest SGLang, vLLM, transformers and LMDeploy. NAMES: these in full. A word,
    such as vllm: those that mention it.
    """
    from stateful_tests.lockstep.known_faults import FOLDER

    rows = []
    for engine, table in tomllib.loads(
        (FOLDER / "driven.toml").read_text(encoding="utf-8")
    ).items():
        entries = [(name, "yes", how) for name, how in table["driven"].items()]
        entries += [
            (name, "no", why) for why, missing in table["not_driven"].items() for name in missing
        ]
        release = f"{engine}=={table['release']}"
        rows += [
            {"id": name, "release": release, "driven": yes, "how": how}
            for name, yes, how in entries
        ]
    headings = {
        "id": "name",
        "release": "release",
        "driven": "driven",
        "how": "by what, or why not",
    }
    return list_rows(rows, out, headings, names)
