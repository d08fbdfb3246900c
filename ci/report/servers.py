"""Reports on whole servers: what validation of a log found, and what a check of a release's scheduler did."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from ci import Data
from ci.report.render import labelled, say, table
from impl.sglang.server.events import WatchHeader
from reference.clauses import CLAUSES
from reference.state import Cursors
from stateful_tests.lockstep.known_faults import known_faults, looked_for, releases
from stateful_tests.watched.live import LiveRun
from stateful_tests.watched.results import Mismatch, Validated
from stateful_tests.watched.serving import JudgedRun, Served
from stateful_tests.watched.validator import SKIPPED

_NEXT = (
    "kvspec clauses {clause} says why the rule holds. The first mismatch is the one to look at: from there on"
    " a token of that request may be wrong, and pages may be lost until the server restarts"
)
SHOWN = 5  # mismatches that the text shows of one log; `--json` has all


def server_text(header: WatchHeader) -> str:
    """Such as "sglang 0.5.23, page_size 4, window 8, tree, overlap"."""
    parts = [f"{header.engine} {header.release}", f"page_size {header.page_size}"]
    parts.append("no window" if header.window is None else f"window {header.window}")
    parts += [word for word, on in (("tree", header.tree), ("overlap", header.overlap),
                                    ("speculation", header.speculative)) if on]  # fmt: skip
    return ", ".join(parts)


def validation(
    name: str, header: WatchHeader, found: Validated, seconds: float, cut: str | None
) -> Data:
    """Everything about the validation of one log."""
    skipped = [f"{count} {what}" for what, count in found.skipped.items()] + ([cut] if cut else [])
    return {
        "log": name, "server": server_text(header), "level": header.level, "events": found.events,
        "events_judged": found.events - found.skipped[SKIPPED],
        "steps": found.steps, "commands": sum(found.commands.values()),
        "commands_by_kind": dict(found.commands),
        "values_compared": found.compared, "given": found.given, "seconds": round(seconds, 3),
        "events_per_s": round(found.events / seconds) if seconds else 0, "skipped": skipped,
        "refused_by_policy": dict(found.policy),
        "known": [
            {"name": name, "times": times, "says": known_faults()[name].summary}
            for name, times in found.known.most_common()
        ],
        "faults_are_known": looked_for("sglang", header.release), "newest": releases("sglang")[-1],
        "unreadable": "",
        "mismatches": [mismatch(each) for each in found.found], "more_mismatches": found.more,
    }  # fmt: skip


def validation_verdict(logs: list[Data]) -> str:
    """Of a log, or of all together, in the words of a check."""
    number = sum(len(log["mismatches"]) + log["more_mismatches"] for log in logs)
    known: Counter[str] = Counter()
    for log in logs:
        known.update({each["name"]: each["times"] for each in log["known"]})
    empty = sum(not log["events"] for log in logs)
    parts = []
    if number:
        judged, events = (sum(log[name] for log in logs) for name in ("events_judged", "events"))
        of = (
            f" in {judged:,} of {events:,} events: the others were not judged"
            if judged < events
            else ""
        )
        parts.append(f"{number} mismatch{'es' * (number > 1)}{of}")
    elif any(log["skipped"] or log["unreadable"] for log in logs):
        parts.append("no mismatch in what could be read")
    elif known:
        parts.append("nothing new")
    if known:
        counts = (f"{name} ({times})" for name, times in known.most_common())
        parts.append(f"known faults: {', '.join(counts)}")
    if empty and not number:
        which = f"{empty} of {len(logs)} logs have" if len(logs) > 1 else "the log has"
        parts.append(f"incomplete: {which} a header and no event")
    return "; ".join(parts) or "conforms"


_TOTALS = {
    "events": "events",
    "steps": "steps",
    "commands": "commands",
    "values_compared": "values compared",
}


def validations(logs: list[Data], strict: bool, unusable: Sequence[str] = ()) -> Data:
    """All logs together. strict: a gap or a cut line fails as well. unusable: why other files are no logs."""
    code = 4 if any(not log["events"] or (strict and log["skipped"]) for log in logs) else 0
    code = 1 if any(log["mismatches"] for log in logs) else code
    return {
        "format": "kvspec-validation",
        "version": 1,
        "verdict": validation_verdict(logs),
        **{total: sum(log[total] for log in logs) for total in _TOTALS},
        "exit_code": 2 if unusable or any(log["unreadable"] for log in logs) else code,
        "logs": logs,
        "unusable": [*unusable],
    }


def validated_all(out: Console, data: Data) -> None:
    """The total of several logs as text."""
    if len(data["logs"]) > 1 or data["unusable"]:
        of = f" of {len(data['logs']) + len(data['unusable'])}" if data["unusable"] else ""
        read = f"{len(data['logs'])}{of} logs, {_read(data)}"
        say(out, f"{data['verdict']} ({read})", "bold red" if data["exit_code"] else "bold green")


def _read(data: Data) -> str:
    return ", ".join(f"{data[name]:,} {what}" for name, what in _TOTALS.items())


def mismatch(m: Mismatch) -> Data:
    """One mismatch."""
    title = CLAUSES[m.clause].title if m.clause in CLAUSES else ""
    return {
        "file": m.file, "line": m.line, "event": m.event, "command": m.command, "clause": m.clause,
        "title": title,
        "expected": m.expected, "observed": m.observed, "because": m.sentence, "request": m.about,
        "known": m.known, "differs": _differing(m.expected, m.observed),
    }  # fmt: skip


_CURSOR = re.compile(rf"\b({'|'.join(Cursors._fields)}) (\d+)")


def _differing(expected: str, observed: str) -> list[str]:
    """The cursors of which both sides show a value, and not the same."""
    wanted = dict(_CURSOR.findall(expected))
    return [name for name, value in _CURSOR.findall(observed) if wanted.get(name, value) != value]


def validated(out: Console, data: Data, ended: str = "", *, shown: bool = False) -> None:
    """The report of one log as text. ended: how its server ended, if it should not have. shown: its
    mismatches were reported already."""
    number = len(data["mismatches"]) + data["more_mismatches"]
    say(out, data["log"], "bold", whole=True)
    words = {
        "server": data["server"],
        "read": f"{_read(data)} in {data['seconds']:.1f} s",
    }
    if not data["faults_are_known"]:
        words["release"] = (
            "nobody has looked for its faults: those of earlier releases count as mismatches"
            f" (--release {data['newest']} counts its faults as known)"
        )
    if data["given"]:
        words["begins"] = (
            f"{data['given']} sessions and requests were taken as given, from a snapshot"
        )
    if data["skipped"]:
        words["skipped"] = "; ".join(data["skipped"])
    for each in data["known"]:
        words[f"known {each['name']}"] = f"{each['times']} times: {each['says']}"
    if data["known"]:
        about = "; ".join(f"kvspec bugs {each['name']}" for each in data["known"])
        words["next"] = f"{about}: what upstream knows, and a trace"
    labelled(out, words)
    for found in () if shown else data["mismatches"][:SHOWN]:
        out.print()
        shown_mismatch(out, found)
    if number > SHOWN and not shown:
        say(out, f"and {number - SHOWN} more; the first is the one to look at")
    if number:
        labelled(out, {"next": _NEXT.format(clause=data["mismatches"][0]["clause"])})
    bad = number or ended or not data["events"]
    say(out, ended or validation_verdict([data]), "bold red" if bad else "bold green")


def show_at_once(out: Console, found: Mismatch) -> None:
    """A mismatch, as soon as it is found."""
    shown_mismatch(out, mismatch(found))


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
            "mismatch": mismatch(finding.mismatch) if finding.mismatch else None,
            "canary": (canary or {}).get(key),
            "again": None if saved is None else f"kvspec serve-check --again {saved}",
        })  # fmt: skip
    new = [each for each in found if not each["known"] and not each["old"]]
    broke = any(each["judge"] == "server" for each in new)
    return {
        "format": "kvspec-serve-check", "version": 1, "release": result.release, "seed": result.seed,
        "runs": result.runs, "runs_asked": planned, "forwards": result.forwards, "events": result.events,
        "seconds": round(result.seconds, 1), "reached": dict(result.reached.most_common()),
        "known": dict(result.known), "old": dict(result.old), "findings": found,
        "interrupted": result.interrupted,
        "exit_code": 1 + 2 * broke if new else 130 if result.interrupted else 4 * (result.runs < planned),
    }  # fmt: skip


def lived(run: LiveRun, seed: int, kept: Path) -> Data:
    """Everything about a live server under clients."""
    data = validation("a live server", run.header, run.validated, run.seconds, None)
    wrong = [] if run.died else run.wrong
    if not run.counts.get("tokens") and not run.died:
        wrong = [*wrong, "no client got a token"]
    found = bool(wrong or data["mismatches"])
    return {
        "format": "kvspec-serve-live", "version": 1, "seed": seed, "start_s": round(run.start_s, 1),
        "clients": run.counts, "wrong": wrong, "behind_s": round(run.behind_s, 2), "died": run.died,
        "known": run.known,
        "reached": dict(run.validated.reached.most_common()), "log": data,
        "saved": str(kept) if found or run.died else None,
        "exit_code": int(found) or (4 if run.known else 3 if run.died else 0),
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
    rate = f", {data['forwards'] / data['seconds']:.0f} a second" if data["seconds"] else ""
    done = f"{data['runs']} runs, {data['forwards']} forward passes{rate}"
    masked = data["known"] or data["old"] or data["findings"]
    what = f"{len(new)} findings" if new else "nothing new" if masked else "conforms"
    what += f", known faults: {', '.join(data['known'])}," if data["known"] else ""
    if data["interrupted"]:
        what += f", interrupted after {data['runs']} of {data['runs_asked']} runs,"
    elif data["runs"] < data["runs_asked"] and not new:
        what = f"incomplete, {data['runs']} of {data['runs_asked']} runs: nothing was found"
    say(out, f"sglang {data['release']}: {what} in {done}", "bold red" if new else "bold green")
    for each in data["findings"]:
        out.print()
        say(out, f"{each['key']}: {each['says']}", "bold red" if not each["known"] else "bold")
        words = {
            "server": ", ".join(f"{k} {v}" for k, v in each["config"].items()),
            "clients": "\n".join(_client_text(client) for client in each["clients"]),
            "its last lines": "\n".join(each["tail"][-6:]),
            "after": f"{each['forwards']} forward passes",
            "met": f"in {each['times']} runs",
        }
        if each["known"]:
            words["known"] = each["known"]
        if each["canary"]:
            words["its own canary"] = each["canary"]
        labelled(out, words)
        if each["again"]:
            say(out, f"  again: {each['again']}", whole=True)
    out.print()
    for key, times in data["old"].items():
        say(out, f"also in the base, {times} times: {key}")
    for name, times in data["known"].items():
        say(out, f"known {name}, {times} times: {known_faults()[name].summary}")
    if data["reached"]:
        reached = ", ".join(f"{what} {count}" for what, count in data["reached"].items())
        say(out, f"reached: {reached}")


def _client_text(client: Data) -> str:
    """Such as "c1 in a session, from round 3: 12 tokens limit 5; 1 later 4 tokens limit 9 stops at 3"."""
    kind = "in a session" if client["session"] else "without a session"
    start = f"{client['start']} rounds after {client['after']}"
    start = start if client["after"] else f"round {client['start']}"
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
