"""Reports on whole servers: what validation of a log found, and what a check of a release's scheduler did."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from textwrap import shorten
from typing import Any

import msgspec
from rich.console import Console

from ci import Data
from ci.report.effects import effect as effect
from ci.report.pair_story import pair_words, story
from ci.report.render import labelled, say, table
from impl.sglang.server.events import WatchHeader
from reference.every_clause import EVERY_CLAUSE
from reference.failures import counted
from reference.state import Cursors
from stateful_tests.lockstep.endings import Ending, ending, gravest
from stateful_tests.lockstep.known_faults import known_faults, looked_for, nearest
from stateful_tests.watched.beside import AFTER_A_GAP, AFTER_A_MISMATCH
from stateful_tests.watched.live import LiveRun
from stateful_tests.watched.reader import WatchLog
from stateful_tests.watched.results import Mismatch, Validated
from stateful_tests.watched.serving import JudgedRun, Served

_NEXT = (
    "kvspec clauses {clause} has the rule, kvspec bugs WORD the bugs like it. Look at the first mismatch: the"
    " others may follow from it"
)
# What an operator does to the server, by its kind.
_OPERATIONS = {
    "flush": "empties the cache once nothing runs or waits",
    "abort": "aborts all requests",
    "pause": "pauses the server",
    "retract": "retracts what runs, and pauses the server",
    "update": "retracts what runs, empties the cache, and pauses the server",
}
SHOWN = 5  # mismatches that the text shows of one log; `--json` has all


def server_text(header: WatchHeader) -> str:
    """Such as "sglang 0.5.23, page_size 4, window 8, tree, overlap"."""
    parts = [f"{header.engine} {header.release}", f"page_size {header.page_size}"]
    if header.role:
        parts.insert(1, f"a {header.role} server: its transfers, and not its batches")
    parts.append("no window" if header.window is None else f"window {header.window}")
    parts += [word for word, on in (("tree", header.tree), ("overlap", header.overlap),
                                    ("speculation", header.speculative)) if on]  # fmt: skip
    return ", ".join(parts)


def validation(
    name: str, header: WatchHeader, found: Validated, seconds: float, log: WatchLog | None = None
) -> Data:
    """Everything about the validation of one log. log: that was read, None of a live server."""
    cut = log.cut if log is not None else None
    skipped = [
        f"{count} {what}"
        if what.startswith("events")
        else f"{what}{f' ({count} times)' * (count > 1)}"
        for what, count in found.skipped.items()
    ] + ([cut] if cut else [])
    return {
        "log": name, "server": server_text(header), "role": header.role, "level": header.level,
        "events": found.events,
        "events_judged": found.events - found.skipped[AFTER_A_GAP] - found.skipped[AFTER_A_MISMATCH],
        "steps": found.steps, "commands": sum(found.commands.values()),
        "commands_by_kind": dict(found.commands),
        "values_compared": found.compared, "given": found.given, "seconds": round(seconds, 3),
        "events_per_s": round(found.events / seconds) if seconds else 0, "skipped": skipped,
        "refused_by_policy": dict(found.policy), "put_right": log.put_right if log is not None else "",
        "known": [_known(name, times, found) for name, times in found.known.most_common()],
        "faults_are_known": looked_for("sglang", header.release),
        "release": header.release, "nearest": nearest("sglang", header.release),
        "unreadable": "",
        "mismatches": [mismatch(each) for each in found.found], "more_mismatches": found.more,
    }  # fmt: skip


def _known(name: str, times: int, found: Validated) -> Data:
    """A known fault that a log shows. found: the first places."""
    return {
        "name": name,
        "times": times,
        "says": known_faults()[name].says,
        "upstream": known_faults()[name].upstream,
        "found": [mismatch(each) for each in found.mismatches if each.known == name],
    }


def validation_verdict(logs: list[Data], unusable: int = 0) -> str:
    """The verdict on one log or on several. unusable: number of files that are no logs."""
    number = sum(len(log["mismatches"]) + log["more_mismatches"] for log in logs)
    known: Counter[str] = Counter()
    for log in logs:
        known.update({each["name"]: each["times"] for each in log["known"]})
    empty = sum(not log["events"] for log in logs)
    parts = []
    judged, events = (sum(log[name] for log in logs) for name in ("events_judged", "events"))
    of = ""
    if judged < events:
        of = f" in {judged:,} of {events:,} events: the others were not judged"
    if number:
        parts.append(f"{number} mismatch{'es' * (number > 1)}{of}")
    elif any(log["skipped"] or log["unreadable"] for log in logs):
        parts.append("no mismatch" + (of or " in what could be read"))
    elif known:
        parts.append("nothing new")
    if known:
        counts = (f"{name} ({times})" for name, times in known.most_common())
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
    """All logs together. strict: a gap or a cut line fails as well. unusable: why other files are no logs.

    A log of which less than half was judged is incomplete, as one without an event.
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
    """The known faults that some logs show, each once, in two lines. verbose: with all that is known."""
    by_name: dict[str, list[Data]] = {}
    for log in logs:
        for each in log["known"]:
            by_name.setdefault(each["name"], []).append(each)
    if by_name:
        say(out, "known faults (kvspec bugs NAME has more, -v shows where):")
    for name, shown in by_name.items():
        first = shown[0]
        times = counted(sum(each["times"] for each in shown), "time")
        where = f" in {len(shown)} of {len(logs)} logs" if len(logs) > 1 else ""
        head = f"  {name}, {times}{where}: {first['says']}"
        if not verbose:
            head = f"  {shorten(head, out.width - 2, placeholder=' ...')}"
        say(out, head)
        if first["found"]:
            say(out, f"    effect: {first['found'][0]['effect']}")
        if verbose:
            say(out, f"    upstream: {first['upstream']}")


def validated_all(out: Console, data: Data, verbose: bool = False) -> None:
    """The total of several logs as text."""
    if len(data["logs"]) > 1 or data["unusable"]:
        known_faults_text(out, data["logs"], verbose)
        read = f"{len(data['logs'])} log{'s' * (len(data['logs']) > 1)}, {_read(data)}"
        say(out, f"{data['verdict']} ({read})", "bold red" if data["exit_code"] else "bold green")


def _read(data: Data) -> str:
    there = {name: what for name, what in _TOTALS.items() if data[name] or name == "events"}
    return ", ".join(f"{data[name]:,} {what}" for name, what in there.items())


def mismatch(m: Mismatch) -> Data:
    """One mismatch."""
    title = EVERY_CLAUSE[m.clause].title if m.clause in EVERY_CLAUSE else ""
    return {
        "file": m.file, "line": m.line, "at": _clock(m.at), "event": m.event, "command": m.command,
        "clause": m.clause, "title": title,
        "expected": m.expected, "observed": m.observed, "because": m.sentence, "request": m.about,
        "known": m.known, "differs": _differing(m.expected, m.observed),
        "effect": effect(m.clause, m.observed),
    }  # fmt: skip


def _clock(at: float) -> str:
    """A Unix time such as "2026-11-26 15:55:22.125 UTC"; none of 0."""
    if not at:
        return ""
    when = datetime.fromtimestamp(at, UTC)
    return f"{when:%Y-%m-%d %H:%M:%S}.{when.microsecond // 1000:03} UTC"


_CURSOR = re.compile(rf"\b({'|'.join(Cursors._fields)}) (\d+)")


def _differing(expected: str, observed: str) -> list[str]:
    """The cursors of which both sides show a value, and not the same."""
    wanted = dict(_CURSOR.findall(expected))
    return [name for name, value in _CURSOR.findall(observed) if wanted.get(name, value) != value]


def validated(
    out: Console,
    data: Data,
    ended: str = "",
    *,
    shown: bool = False,
    alone: bool = True,
    verbose: bool = False,
) -> None:
    """The report of one log as text. ended: how its server ended, if it should not have. shown: its
    mismatches were reported already. alone: known faults are told here, not behind all logs."""
    number = len(data["mismatches"]) + data["more_mismatches"]
    say(out, data["log"], "bold", whole=True)
    words = {
        "server": data["server"],
        "read": f"{_read(data)} in {data['seconds']:.1f} s",
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
        for each in data["known"]:
            if each["found"]:
                words[f"known {each['name']}"] = _places(each["times"], each["found"])
    labelled(out, words)
    if not shown:
        for found in data["mismatches"][:SHOWN]:
            out.print()
            shown_mismatch(out, found)
    if number > SHOWN and not shown:
        say(out, f"and {number - SHOWN} more; the first is the one to look at")
    if number and not shown:
        labelled(out, {"next": _NEXT.format(clause=data["mismatches"][0]["clause"])})
    if alone:
        known_faults_text(out, [data], verbose)
    bad = number or ended or not data["events"]
    say(out, ended or validation_verdict([data]), "bold red" if bad else "bold green")


def begins(out: Console, name: str, header: WatchHeader) -> None:
    """A log that is followed, as it begins."""
    say(out, f"{name}: {server_text(header)}", whole=True)


def show_at_once(out: Console, found: Mismatch) -> None:
    """A mismatch, as soon as it is found."""
    shown_mismatch(out, mismatch(found))
    labelled(out, {"next": _NEXT.format(clause=found.clause)})


def _places(times: int, found: list[Data]) -> str:
    """Say where a known fault shows, when, and in which command."""
    parts = [(str(m["line"]), m["at"], m["command"] or m["request"]) for m in found[:3]]
    shown = [", ".join(filter(None, each)) for each in parts]
    more = f"; and {times - len(shown)} more" if times > len(shown) else ""
    return f"line {'; '.join(shown)}{more}"


def shown_mismatch(out: Console, found: Data) -> None:
    """One mismatch as text."""
    at = f"{found['file']}:{found['line']}: {found['event']}"
    say(out, f"{at}: {found['clause']} ({found['title']})", "bold red", whole=True)
    off = found["differs"]
    seen = re.sub(
        r"\w+", lambda word: f"!{word[0]}" if word[0] in off else word[0], found["observed"]
    )
    words = {"command": found["command"], "expected": found["expected"], "server": seen}
    if found["request"]:
        words["state"] = found["request"]
    words |= {"time": found["at"], "effect": found["effect"]}
    labelled(out, {k: v for k, v in words.items() if v})


def served(
    result: Served, folder: Path | None, planned: int, canary: Mapping[str, str] | None = None
) -> Data:
    """Everything about a check of whole schedulers; the smallest run of each finding is saved in `folder`.

    planned: runs that were requested; canary: what the release's own says of each finding.
    """
    found = []
    for key, judged in result.found.items():
        finding = next(each for each in judged.findings if each.key == key)
        saved = None if folder is None else save(folder, judged)
        found.append({
            "key": key, "judge": finding.judge, "says": finding.says, "times": max(1, result.times[key]),
            "known": finding.known, "old": finding.old, "forwards": judged.outcome.forwards,
            "config": msgspec.to_builtins(judged.run.config), "seed": judged.run.seed,
            "clients": msgspec.to_builtins(judged.run.clients), "tail": judged.tail, "saved": saved,
            "choices": msgspec.to_builtins(judged.run.choices),
            "events": [each._asdict() for each in judged.outcome.events],
            "mismatch": mismatch(finding.mismatch) if finding.mismatch else None,
            "canary": (canary or {}).get(key),
            "again": None if saved is None else f"kvspec serve-check --again {saved}",
        })  # fmt: skip
    new = [each for each in found if not each["known"] and not each["old"]]
    return {
        "format": "kvspec-serve-check", "version": 1, "release": result.release, "seed": result.seed,
        "runs": result.runs, "runs_asked": planned, "forwards": result.forwards, "events": result.events,
        "seconds": round(result.seconds, 1), "reached": dict(result.reached.most_common()),
        "known": dict(result.known), "old": dict(result.old), "findings": found,
        "interrupted": result.interrupted,
        "exit_code": ending(
            broke=any(each["judge"] in ("server", "grants") for each in new),
            violated=bool(new),
            interrupted=result.interrupted,
            incomplete=result.runs < planned,
        ),
    }  # fmt: skip


def lived(run: LiveRun, seed: int, kept: Path) -> Data:
    """Everything about a live server under clients."""
    data = validation("a live server", run.header, run.validated, run.seconds)
    wrong = [] if run.died else run.wrong
    if not run.counts.get("tokens") and not run.died:
        wrong = [*wrong, "no client got a token"]
    found = bool(wrong or data["mismatches"])
    unexplained = bool(run.died) and not (found or run.known)
    end = ending(broke=unexplained, violated=found, incomplete=bool(run.known))
    return {
        "format": "kvspec-serve-live", "version": 1, "seed": seed, "start_s": round(run.start_s, 1),
        "clients": run.counts, "wrong": wrong, "behind_s": round(run.behind_s, 2), "died": run.died,
        "known": run.known,
        "reached": dict(run.validated.reached.most_common()), "log": data,
        "saved": str(kept) if found or run.died else None,
        "exit_code": end,
    }  # fmt: skip


def lived_text(out: Console, data: Data) -> None:
    """The report of a live server as text."""
    ended = ""
    if data["died"]:
        ended = f"the server ended by itself: {data['died']}"
    if data["known"]:
        ended = f"incomplete: the server ended by a known fault, {data['known']}"
    validated(out, data["log"], ended)
    texts = {
        "clients": ", ".join(f"{count} {what}" for what, count in data["clients"].items()),
        "judged": f"{data['behind_s']:.1f} s behind the server at its end",
        "reached": ", ".join(f"{what} {count}" for what, count in data["reached"].items()),
        "wrong": "; ".join(data["wrong"]),
        "known": known_faults()[data["known"]].summary if data["known"] else "",
        "its logs": data["saved"],
    }
    labelled(out, {what: text for what, text in texts.items() if text})


def save(folder: Path, judged: JudgedRun) -> str:
    """Write the run of a finding; the file's path."""
    name = "".join(c if c.isalnum() else "-" for c in judged.run.key)[:60].strip("-").lower()
    path = folder / f"serve-{judged.run.release}-{name}.json"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(judged.run), indent=1) + b"\n")
    return str(path)


def served_text(out: Console, data: Data) -> None:
    """The report of a check of whole schedulers as text: verdict, findings, what was reached."""
    new = [each for each in data["findings"] if not each["known"] and not each["old"]]
    say(out, _served_verdict(data, len(new)), "bold red" if new else "bold green")
    for each in data["findings"]:
        out.print()
        _served_finding(out, each)
    out.print()
    for key, times in data["old"].items():
        say(out, f"also in the base, {times} times: {key}")
    for name, times in data["known"].items():
        say(out, f"known {name}, {times} times: {known_faults()[name].summary}")
    if data["reached"]:
        reached = ", ".join(f"{what} {count}" for what, count in data["reached"].items())
        say(out, f"reached: {reached}")


def _served_verdict(data: Data, new: int) -> str:
    """Say what a check of whole schedulers found, and in how many runs. new: findings."""
    rate = f", {data['forwards'] / data['seconds']:.0f} a second" if data["seconds"] else ""
    done = f"{data['runs']} runs, {data['forwards']} forward passes{rate}"
    masked = data["known"] or data["old"] or data["findings"]
    if new:
        what = f"{new} findings"
    else:
        what = "nothing new" if masked else "conforms"
    what += f", known faults: {', '.join(data['known'])}," if data["known"] else ""
    if data["interrupted"]:
        what += f", interrupted after {data['runs']} of {data['runs_asked']} runs,"
    elif data["runs"] < data["runs_asked"] and not new:
        what = what if masked else "nothing was found"
        what = f"incomplete, {data['runs']} of {data['runs_asked']} runs: {what}"
    return f"sglang {data['release']}: {what} in {done}"


def _served_finding(out: Console, each: Data) -> None:
    """A finding with the smallest run that shows it."""
    say(out, f"{each['key']}: {each['says']}", "bold red" if not each["known"] else "bold")
    words = {
        "server": ", ".join(f"{k} {v}" for k, v in each["config"].items()),
        "clients": "\n".join(_client_text(client) for client in each["clients"]),
        "its last lines": "\n".join(each["tail"][-6:]),
        **pair_words(each),
        "after": f"{each['forwards']} forward passes",
        "met": f"in {each['times']} runs",
    }
    if each["known"]:
        words["known"] = each["known"]
    if each["canary"]:
        words["its own canary"] = each["canary"]
    labelled(out, {label: text for label, text in words.items() if text})
    for line in story(each["events"]):
        say(out, f"  {line}", whole=True)
    if each["again"]:
        say(out, f"  again: {each['again']}", whole=True)


def _client_text(client: Data) -> str:
    """Such as "c1 in a session, from round 3: 12 tokens limit 5; 1 later 4 tokens limit 9 stops at 3"."""
    kind = "in a session" if client["session"] else "without a session"
    kind += ", resends its conversation" if client["resends"] else ""
    start = f"{client['start']} rounds after {client['after']}"
    start = start if client["after"] else f"round {client['start']}"
    if client["operator"]:
        rounds = (
            f" for {client['close']} rounds" if client["operator"] not in ("flush", "abort") else ""
        )
        return f"{client['name']}, from {start}: {_OPERATIONS[client['operator']]}{rounds}"
    turns = []
    for turn in client["turns"]:
        shared = f" ({turn['shared']} of text {turn['text']})" if turn["shared"] else ""
        text = f"{turn['tokens']} tokens{shared}"
        text += f" limit {turn['limit']}" + (f" stops at {turn['stop']}" if turn["stop"] else "")
        text += " ignores the end token" if turn["ignore_eos"] else ""
        turns.append(text + (f" disconnects after {turn['abort']}" if turn["abort"] else ""))
    impatient = ", does not wait" if client["impatient"] else ""
    return f"{client['name']} {kind}, from {start}{impatient}: {'; then '.join(turns)}"


def events_table(out: Console, rows: list[dict[str, Any]]) -> None:
    """How each event is read."""
    shown = table("event", "guard", "commands", "compared besides their outcome")
    for row in rows:
        shown.add_row(*(row[name] or "-" for name in ("event", "guard", "commands", "compared")))
    out.print(shown)
