"""Reports on logs of watched servers: what validation found in one log or in several."""

import re
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from textwrap import shorten
from typing import Any

from rich.console import Console

from ci import Data
from ci.documents.related_faults import avoidance_text
from ci.report.operator_effects import effect
from ci.report.text_output import print_labels, say, table
from impl.sglang.server.events import WatchHeader
from reference.all_clauses import ALL_CLAUSES
from reference.failures import count_text
from reference.state import Cursors
from stateful_tests.lockstep.exit_codes import Ending, ending, gravest
from stateful_tests.lockstep.known_faults import known_faults, is_looked_for, nearest
from stateful_tests.watched.log_follower import AFTER_A_GAP, AFTER_A_MISMATCH
from stateful_tests.watched.log_reader import WatchLog
from stateful_tests.watched.validation_results import Mismatch, Validated

_NEXT = (
    "kvspec clauses {clause} has the rule, kvspec bugs WORD the bugs like it. Look at the first mismatch: the"
    " others may follow from it"
)
SHOWN = 5  # mismatches that the text shows of one log; `--json` has all


def server_text(header: WatchHeader) -> str:
    """Return the server in words, such as "sglang 0.5.23, page_size 4, window 8, tree, overlap"."""
    parts = [f"{header.engine} {header.release}", f"page_size {header.page_size}"]
    if header.role:
        parts.insert(1, f"a {header.role} server: its transfers, and not its batches")
    parts.append("no window" if header.window is None else f"window {header.window}")
    parts += [word for word, on in (("tree", header.tree), ("overlap", header.overlap),
                                    ("speculation", header.speculative)) if on]  # fmt: skip
    return ", ".join(parts)


def validation(
    name: str, header: WatchHeader, validated: Validated, seconds: float, log: WatchLog | None = None
) -> Data:
    """Return everything about the validation of one log.

    log: the log, None for a live server.
    """
    cut = log.cut if log is not None else None
    skipped = []
    for what, count in validated.skipped.items():
        if what.startswith("events"):
            skipped.append(f"{count} {what}")
        else:
            skipped.append(f"{what} ({count} times)" if count > 1 else what)
    if cut:
        skipped.append(cut)
    return {
        "log": name, "server": server_text(header), "role": header.role, "level": header.level,
        "events": validated.events,
        "events_judged": (
            validated.events - validated.skipped[AFTER_A_GAP] - validated.skipped[AFTER_A_MISMATCH]
        ),
        "steps": validated.steps, "commands": sum(validated.commands.values()),
        "commands_by_kind": dict(validated.commands),
        "values_compared": validated.compared, "given": validated.given, "seconds": round(seconds, 3),
        "events_per_s": round(validated.events / seconds) if seconds else 0, "skipped": skipped,
        "refused_by_policy": dict(validated.policy), "put_right": log.put_right if log is not None else "",
        "known": [_known_fault_data(name, times, validated) for name, times in validated.known.most_common()],
        "faults_are_known": is_looked_for("sglang", header.release),
        "release": header.release, "nearest": nearest("sglang", header.release),
        "unreadable": "",
        "mismatches": [mismatch(found) for found in validated.unexplained], "more_mismatches": validated.more,
    }  # fmt: skip


def _known_fault_data(name: str, times: int, validated: Validated) -> Data:
    """Return a known fault that a log shows.

    validated: the first places.
    """
    return {
        "name": name,
        "times": times,
        "says": known_faults()[name].says,
        "upstream": known_faults()[name].upstream,
        "avoid": avoidance_text(known_faults()[name]),
        "found": [mismatch(found) for found in validated.mismatches if found.known == name],
    }


def validation_verdict(logs: list[Data], unusable: int = 0) -> str:
    """Return the verdict on one log or on several.

    unusable: number of files that are no logs.
    """
    number = sum(len(log["mismatches"]) + log["more_mismatches"] for log in logs)
    known_counts: Counter[str] = Counter()
    for log in logs:
        known_counts.update({known["name"]: known["times"] for known in log["known"]})
    empty = sum(not log["events"] for log in logs)
    parts = []
    judged, events = (sum(log[name] for log in logs) for name in ("events_judged", "events"))
    share = ""
    if judged < events:
        share = f" in {judged:,} of {events:,} events: the others were not judged"
    if number:
        parts.append(f"{count_text(number, 'mismatch', 'es')}{share}")
    elif any(log["skipped"] or log["unreadable"] for log in logs):
        parts.append("no mismatch" + (share or " in what could be read"))
    elif known_counts:
        parts.append("nothing new")
    if known_counts:
        counts = (f"{name} ({times})" for name, times in known_counts.most_common())
        parts.append(f"known faults: {', '.join(counts)}")
    if 2 * judged < events and not number:
        parts.append("incomplete")
    if empty and not number:
        which = f"{empty} of {len(logs)} logs have" if len(logs) > 1 else "the log has"
        parts.append(f"incomplete: {which} a header and no event")
    unread = unusable + sum(bool(log["unreadable"]) for log in logs)
    if unread and len(logs) + unusable > 1:
        parts.append(f"{unread} of {len(logs) + unusable} logs could not be read")
    return "; ".join(parts) or "conforms"


_TOTALS = {
    "events": "events",
    "steps": "steps",
    "commands": "commands",
    "values_compared": "values compared",
}


def validations(logs: list[Data], strict: bool, unusable: Sequence[str] = ()) -> Data:
    """Return all logs together.

    A log of which less than half was judged is incomplete, as one without an event.

    strict: a gap or a cut line fails as well.
    unusable: why other files are no logs.
    """
    few = any(2 * log["events_judged"] < log["events"] or not log["events"] for log in logs)
    end = ending(
        violated=any(log["mismatches"] for log in logs),
        incomplete=few or (strict and any(log["skipped"] for log in logs)),
    )
    if unusable or any(log["unreadable"] for log in logs):
        end = gravest([end, Ending.UNUSABLE])
    return {
        "format": "kvspec-validation",
        "version": 1,
        "verdict": validation_verdict(logs, len(unusable)),
        **{total: sum(log[total] for log in logs) for total in _TOTALS},
        "exit_code": end,
        "logs": logs,
        "unusable": [*unusable],
    }


def known_faults_text(out: Console, logs: Sequence[Data], verbose: bool) -> None:
    """Print the known faults that some logs show, each once, in two lines.

    verbose: with all details.
    """
    by_name: dict[str, list[Data]] = {}
    for log in logs:
        for known in log["known"]:
            by_name.setdefault(known["name"], []).append(known)
    if by_name:
        say(out, "known faults (kvspec bugs NAME has more, -v shows where):")
    for name, shown in by_name.items():
        first_fault = shown[0]
        times = count_text(sum(known["times"] for known in shown), "time")
        where = f" in {len(shown)} of {len(logs)} logs" if len(logs) > 1 else ""
        head = f"  {name}, {times}{where}: {first_fault['says']}"
        if not verbose:
            head = f"  {shorten(head, out.width - 2, placeholder=' ...')}"
        say(out, head)
        if first_fault["found"]:
            say(out, f"    effect: {first_fault['found'][0]['effect']}")
        if first_fault["avoid"]:
            say(out, f"    avoid: {first_fault['avoid']}")
        if verbose:
            say(out, f"    upstream: {first_fault['upstream']}")


def print_log_reports(out: Console, data: Data, verbose: bool = False) -> None:
    """Print the total of several logs."""
    if len(data["logs"]) > 1 or data["unusable"]:
        known_faults_text(out, data["logs"], verbose)
        read = f"{count_text(len(data['logs']), 'log')}, {_lines_read(data)}"
        say(out, f"{data['verdict']} ({read})", "bold red" if data["exit_code"] else "bold green")


def _lines_read(data: Data) -> str:
    counts = {name: what for name, what in _TOTALS.items() if data[name] or name == "events"}
    return ", ".join(f"{data[name]:,} {what}" for name, what in counts.items())


def mismatch(m: Mismatch) -> Data:
    """Return one mismatch as data."""
    title = ALL_CLAUSES[m.clause].title if m.clause in ALL_CLAUSES else ""
    return {
        "file": m.file, "line": m.line, "at": _time_text(m.at), "event": m.event, "command": m.command,
        "clause": m.clause, "title": title,
        "expected": m.expected, "observed": m.observed, "because": m.sentence, "request": m.about,
        "known": m.known, "differs": _differing_cursors(m.expected, m.observed),
        "effect": effect(m.clause, m.observed),
    }  # fmt: skip


def _time_text(unix_time: float) -> str:
    """Return a Unix time, such as "2026-11-26 15:55:22.125 UTC"; "" for 0."""
    if not unix_time:
        return ""
    when = datetime.fromtimestamp(unix_time, UTC)
    return f"{when:%Y-%m-%d %H:%M:%S}.{when.microsecond // 1000:03} UTC"


_CURSOR = re.compile(rf"\b({'|'.join(Cursors._fields)}) (\d+)")


def _differing_cursors(expected: str, observed: str) -> list[str]:
    """Return the cursors for which both sides show different values."""
    wanted = dict(_CURSOR.findall(expected))
    return [name for name, value in _CURSOR.findall(observed) if wanted.get(name, value) != value]


def print_log_report(
    out: Console,
    data: Data,
    ended: str = "",
    *,
    shown: bool = False,
    alone: bool = True,
    verbose: bool = False,
) -> None:
    """Print the report of one log.

    ended: how its server ended, if it should not have.
    shown: its mismatches were reported already.
    alone: this report lists the known faults, not one behind all logs.
    """
    number = len(data["mismatches"]) + data["more_mismatches"]
    say(out, data["log"], "bold", whole=True)
    words = {
        "server": data["server"],
        "read": f"{_lines_read(data)} in {data['seconds']:.1f} s",
    }
    if not data["faults_are_known"]:
        words["release"] = (
            "nobody has looked for its faults: known ones count as mismatches"
            f" (--release {data['nearest']} counts the faults of that as known)"
        )
    elif data["release"] != data["nearest"]:
        words["release"] = f"the known faults are those of {data['nearest']}"
    if data["given"]:
        words["begins"] = (
            f"{data['given']} sessions and requests were taken as given, from a snapshot"
        )
    if data["skipped"]:
        words["skipped"] = "; ".join(data["skipped"])
    if data["put_right"]:
        words["order"] = data["put_right"]
    if data["role"] and data["level"] == "lengths":
        words["pages"] = "not compared: the log has none (KVSPEC_WATCH_LEVEL=pages)"
    if verbose:
        for known in data["known"]:
            if known["found"]:
                words[f"known {known['name']}"] = _places_text(known["times"], known["found"])
    print_labels(out, words)
    if not shown:
        for mismatch in data["mismatches"][:SHOWN]:
            out.print()
            shown_mismatch(out, mismatch)
    if number > SHOWN and not shown:
        say(out, f"and {number - SHOWN} more; the first is the one to look at")
    if number and not shown:
        print_labels(out, {"next": _NEXT.format(clause=data["mismatches"][0]["clause"])})
    if alone:
        known_faults_text(out, [data], verbose)
    bad = number or ended or not data["events"]
    say(out, ended or validation_verdict([data]), "bold red" if bad else "bold green")


def print_beginning(out: Console, name: str, header: WatchHeader) -> None:
    """Print the beginning of a log that is followed."""
    say(out, f"{name}: {server_text(header)}", whole=True)


def show_at_once(out: Console, mismatches: Mismatch) -> None:
    """Print a mismatch, as soon as it is found."""
    shown_mismatch(out, mismatch(mismatches))
    print_labels(out, {"next": _NEXT.format(clause=mismatches.clause)})


def _places_text(times: int, shown_places: list[Data]) -> str:
    """Return where a known fault shows, when, and in which command."""
    parts = [(str(m["line"]), m["at"], m["command"] or m["request"]) for m in shown_places[:3]]
    places = [", ".join(filter(None, part)) for part in parts]
    more = f"; and {times - len(places)} more" if times > len(places) else ""
    return f"line {'; '.join(places)}{more}"


def shown_mismatch(out: Console, mismatch: Data) -> None:
    """Print one mismatch."""
    place = f"{mismatch['file']}:{mismatch['line']}: {mismatch['event']}"
    say(out, f"{place}: {mismatch['clause']} ({mismatch['title']})", "bold red", whole=True)
    off = mismatch["differs"]
    seen = re.sub(
        r"\w+", lambda word: f"!{word[0]}" if word[0] in off else word[0], mismatch["observed"]
    )
    words = {"command": mismatch["command"], "expected": mismatch["expected"], "server": seen}
    if mismatch["request"]:
        words["state"] = mismatch["request"]
    words |= {"time": mismatch["at"], "effect": mismatch["effect"]}
    print_labels(out, {k: v for k, v in words.items() if v})


def events_table(out: Console, rows: list[dict[str, Any]]) -> None:
    """Print the actions of each event."""
    shown = table("event", "guard", "commands", "compared besides their outcome")
    for row in rows:
        shown.add_row(*(row[name] or "-" for name in ("event", "guard", "commands", "compared")))
    out.print(shown)
