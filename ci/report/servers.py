"""Reports on whole servers: what validation of a log found, and what a check of a release's scheduler did."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rich.console import Console

from ci import Data
from ci.report.render import labelled, say, table
from reference.clauses import CLAUSES
from stateful_tests.watched.deviations import KNOWN
from stateful_tests.watched.events import WatchHeader
from stateful_tests.watched.results import LogParting, Validated

SHOWN = 5  # partings that the text shows of one log; `--json` has all


def server_text(header: WatchHeader) -> str:
    """Such as "sglang 0.5.23, page_size 4, window 8, tree, overlap"."""
    parts = [f"{header.engine} {header.release}", f"page_size {header.page_size}"]
    parts.append("no window" if header.window is None else f"window {header.window}")
    parts += [word for word, on in (("tree", header.tree), ("overlap", header.overlap),
                                    ("speculation", header.speculative)) if on]  # fmt: skip
    return ", ".join(parts)


def validation(name: str, header: WatchHeader, found: Validated, seconds: float, cut: str | None) -> Data:
    """Everything about the validation of one log."""
    skipped = [f"{count} {what}" for what, count in found.skipped.items()] + ([cut] if cut else [])
    known = Counter(p.deviation for p in found.partings if p.deviation)
    return {
        "log": name, "server": server_text(header), "level": header.level, "events": found.events,
        "steps": found.steps, "commands": sum(found.commands.values()),
        "commands_by_kind": dict(found.commands),
        "values_compared": found.compared, "given": found.given, "seconds": round(seconds, 3),
        "events_per_s": round(found.events / seconds) if seconds else 0, "skipped": skipped,
        "refused_by_policy": dict(found.policy),
        "known": [{"name": n, "times": c, "says": KNOWN[n].says} for n, c in known.most_common()],
        "partings": [parting(p) for p in found.found], "more_partings": found.more,
    }  # fmt: skip


def parting(p: LogParting) -> Data:
    """One parting."""
    title = CLAUSES[p.clause].title if p.clause in CLAUSES else ""
    return {
        "file": p.file, "line": p.line, "event": p.event, "command": p.command, "clause": p.clause,
        "title": title,
        "expected": p.expected, "observed": p.observed, "because": p.because, "request": p.about,
        "deviation": p.deviation,
    }  # fmt: skip


def validated(out: Console, data: Data) -> None:
    """The report of one log as text."""
    number = len(data["partings"]) + data["more_partings"]
    say(out, data["log"], "bold", whole=True)
    words = {
        "server": data["server"],
        "read": f"{data['events']} events, {data['steps']} steps, {data['commands']} commands,"
        f" {data['values_compared']} values compared in {data['seconds']:.1f} s",
    }
    if data["given"]:
        words["begins"] = f"in the middle: {data['given']} sessions and requests were taken as given"
    if data["skipped"]:
        words["skipped"] = "; ".join(data["skipped"])
    for each in data["known"]:
        words[f"known {each['name']}"] = f"{each['times']} times: {each['says']}"
    labelled(out, words)
    for found in data["partings"][:SHOWN]:
        out.print()
        shown_parting(out, found)
    if number > SHOWN:
        say(out, f"and {number - SHOWN} more; the first is the one to look at")
    verdict = f"{number} lines are against the specification" if number else "conforms"
    say(out, verdict, "bold red" if number else "bold green")


def shown_parting(out: Console, found: Data) -> None:
    """One parting as text."""
    at = f"{found['file']}:{found['line']}: {found['event']}"
    say(out, f"{at}: {found['clause']} ({found['title']})", "bold red",
        whole=True)  # fmt: skip
    words = {"command": found["command"], "rules": found["expected"], "server": found["observed"]}
    if found["request"]:
        words["state"] = found["request"]
    labelled(out, {k: v for k, v in words.items() if v})


def events_table(out: Console, rows: list[dict[str, Any]]) -> None:
    """How each event is read."""
    shown = table("event", "becomes", "judged besides the outcome")
    for row in rows:
        shown.add_row(row["event"], row["commands"] or "-", row["judged"] or "-")
    out.print(shown)
