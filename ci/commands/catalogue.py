"""kvspec bugs, clauses and driven: lists, or some in full."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING

import click

from ci.commands.options.name_lists import list_rows, similar_names, quoted_text
from ci.commands.shared import ReportOut, json_option, note, unusable
from impl.system_spec import ENGINES, SystemSpec

if TYPE_CHECKING:
    from ci import Data


_HOW = "by what, or why not"
_FEW = 3  # bugs that fit: below, those that are near are listed as well
_BUG_COLUMNS = {
    "id": "bug", "kind": "kind", "title": "what is wrong", "clause": "clause", "source": "source",
    "only": "only with",
}  # fmt: skip
_NEAR_COLUMNS = {**_BUG_COLUMNS, "lacks": "lacks"}  # words of the query


@click.command(context_settings={"ignore_unknown_options": True})  # a log may mention --some-flag
@click.argument("names", nargs=-1, metavar="[NAMES|WORDS]...")
@json_option
def bugs(names: tuple[str, ...], out: ReportOut) -> int:
    """Find known bugs by the words of a report, or explain one.

    WORDS, such as `garbage after preemption`, or a line of a server's log: the bugs that fit, the best first,
    with what was looked for and not met, and what is not driven. Where none fits, that is said. An engine or
    a release beside them, such as sglang==0.5.20: only of its bugs; vllm==0.33.0+offload: of that way.

    NAMES: these in full. Without any, the named bugs: `--impl torch+BUG` puts one into the built-in
    implementation.
    """
    from ci.documents.findings import is_of, known_bugs, named_bugs

    rows = named_bugs()
    if not names:
        columns = {key: _BUG_COLUMNS[key] for key in _BUG_COLUMNS if key != "only"}
        ending = list_rows(rows, out, columns)
        of_releases = "`kvspec bugs vllm` lists those of releases, `kvspec bugs WORDS` finds one"
        note(f"these can be put into torch; {of_releases}")
        return ending
    releases = [name for name in names if SystemSpec.parse(name).version is not None]
    text = tuple(name for name in names if name not in releases and name not in ENGINES)
    with unusable("", ValueError):
        known_rows = [row for row in known_bugs() if all(is_of(row["id"], release) for release in releases)]
    every = {row["id"].casefold() for row in known_bugs() + rows}
    if text and every.issuperset(map(str.casefold, text)):
        return list_rows(known_bugs() + rows, out, _BUG_COLUMNS, text)
    engines = {SystemSpec.parse(name).engine for name in names if name not in text}
    if not text:
        of_engines = [row for row in known_rows if {row["source"].partition(" ")[0]} >= engines]
        return list_rows(of_engines, out, _BUG_COLUMNS)
    return _list_matches(text, {row["id"] for row in known_rows}, engines, rows, out)


def _list_matches(
    text: tuple[str, ...], known_ids: set[str], engines: set[str], named_rows: list[Data], out: ReportOut
) -> int:
    """List bugs that have words of a text: known bugs `known_ids`, and those of one engine if `engines`
    names any."""
    from ci.documents.bug_search import KNOWN_KINDS, SHOWN, search_entries, find
    from ci.report import text_output

    every = [
        entry
        for entry in search_entries(named_rows)
        if (entry.kind not in KNOWN_KINDS or entry.row["id"] in known_ids)
        and (not engines or {entry.engine} <= engines | {""})
    ]
    matches = find(text, every)
    for place, row in enumerate(matches.rows):
        row["fits"] = place < matches.fits
    listed_rows = matches.rows[: min(SHOWN, matches.fits or SHOWN)]
    meant = similar_names(text[0] if len(text) == 1 else "", [row["id"] for row in matches.rows])
    if not matches.known and meant:
        text_output.say(out.console, f"no bug is named {quoted_text(text[0])}{meant}", "bold")
        return out.end(matches.rows)
    if not matches.known:
        lacking = ", ".join(map(quoted_text, matches.missing))
        lacking = f" (nothing here mentions {lacking})" if lacking else ""
        nearest = "nearest:" if listed_rows else "nothing is near; `kvspec bugs` lists the named bugs"
        unknown = "not known" if len(text) == 1 or not listed_rows else "no bug has all of these words"
        text_output.say(out.console, f"{unknown}{lacking}; {nearest}", "bold")
    if listed_rows:
        columns = _BUG_COLUMNS if matches.fits else _NEAR_COLUMNS
        text_output.listing(out.console, listed_rows, columns)
    if 0 < matches.fits < _FEW and (near_by := matches.rows[matches.fits : _FEW + 1]):
        text_output.say(out.console, "if that is not it, nearest:", "bold")
        text_output.listing(out.console, near_by, _NEAR_COLUMNS)
        listed_rows = [*listed_rows, *near_by]
    if more := len(matches.rows) - len(listed_rows):
        fitting = max(0, matches.fits - len(listed_rows))
        others = f"{fitting} more fit, {more - fitting}" if fitting else f"{more} more"
        note(f"{others} have some of these words: --json lists all")
    if len(listed_rows) > 1 and listed_rows[0]["id"] in known_ids:
        note(f"in full, with its traces: kvspec bugs {listed_rows[0]['id']}")
    return out.end(matches.rows)


@click.command()
@click.argument("names", nargs=-1)
@json_option
def clauses(names: tuple[str, ...], out: ReportOut) -> int:
    """List the clauses of the specification, or explain one.

    NAMES: these in full. Words: those that mention them all.
    """
    from impl.bugs import BUGS
    from reference.all_clauses import ALL_CLAUSES

    fields = ("id", "title", "sentence", "scope", "why", "decision", "assumption", "rule", "source")
    rows = [{field: getattr(clause, field) for field in fields} for clause in ALL_CLAUSES.values()]
    for row in rows:
        row["catches"] = [
            f"{bug.id}: {bug.title}" for bug in BUGS.values() if bug.clause == row["id"]
        ]
        row["releases"] = _in_releases(row["id"])
    headings = {"id": "clause", "sentence": "what it says", "decision": "decision"}
    return list_rows(rows, out, headings, names)


def _in_releases(clause: str) -> list[str]:
    """Return the known faults of releases that violate a clause first, with the releases that have
    them."""
    from stateful_tests.lockstep.known_faults import known_faults

    showing = (fault for fault in known_faults().values() if fault.clauses[:1] == (clause,))
    return [
        f"{fault.id}: {fault.engine} since {fault.first}"
        + (f", fixed in {fault.fixed}" if fault.fixed else "")
        for fault in showing
    ]


@click.command()
@click.argument("names", nargs=-1)
@json_option
def driven(names: tuple[str, ...], out: ReportOut) -> int:
    """List what is driven of each engine, and what is not.

    Classes of the newest SGLang, vLLM, transformers and LMDeploy, and fields of their configurations and
    requests with the defaults: how many by what drives them, or why nothing does. NAMES: these in full. A
    word, such as vllm or lora: each name that mentions it.
    """
    from ci.report import text_output
    from stateful_tests.lockstep.known_faults import FOLDER

    groups = [
        (f"{engine}=={table['release']}", driven, reason, members)
        for engine, table in tomllib.loads(
            (FOLDER / "driven.toml").read_text(encoding="utf-8")
        ).items()
        for driven in ("no", "yes")
        for reason, members in table["driven" if driven == "yes" else "not_driven"].items()
    ]
    rows = [
        {"id": name, "release": release, "driven": driven, "how": reason}
        for release, driven, reason, members in groups
        for name in members
    ]
    if names:
        headings = {"id": "name", "release": "release", "driven": "driven", "how": _HOW}
        return list_rows(rows, out, headings, names)
    summary = [
        {"release": release, "driven": driven, "names": str(len(members)), "how": reason}
        for release, driven, reason, members in groups
    ]
    columns = {"release": "release", "driven": "driven", "names": "names", "how": _HOW}
    text_output.listing(out.console, summary, columns)
    note("`kvspec driven WORD` lists the names that mention it, `kvspec driven vllm` those of an engine")
    return out.end(rows)
