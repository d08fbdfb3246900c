"""Reports on whole servers: what a check of a release's scheduler did, and a live server under clients."""

from collections.abc import Mapping
from pathlib import Path

import msgspec
from rich.console import Console

from ci import Data
from ci.report.pair_story import pair_words, story
from ci.report.text_output import print_labels, say
from ci.report.log_reports import mismatch, print_log_report, validation
from reference.failures import count_text
from stateful_tests.lockstep.exit_codes import ending
from stateful_tests.lockstep.known_faults import known_faults
from stateful_tests.watched.servers.live_server import LiveRun
from stateful_tests.watched.servers.scheduler_runs import JudgedRun, Served

# What an operator does to the server, by its kind.
_OPERATIONS = {
    "flush": "empties the cache once nothing runs or waits",
    "abort": "aborts all requests",
    "pause": "pauses the server",
    "retract": "retracts what runs, and pauses the server",
    "update": "retracts what runs, empties the cache, and pauses the server",
}


def served_report(
    result: Served, folder: Path | None, planned: int, canary: Mapping[str, str] | None = None
) -> Data:
    """Return everything about a check of whole schedulers; the smallest run of each finding is saved in
    `folder`.

    planned: runs that were requested.
    canary: the verdict of the release's own canary on each finding.
    """
    findings = []
    for key, judged in result.found.items():
        finding = next(each for each in judged.findings if each.key == key)
        saved = None if folder is None else save(folder, judged)
        findings.append({
            "key": key, "judge": finding.judge, "says": finding.says, "times": max(1, result.times[key]),
            "known": finding.known, "old": finding.old, "forwards": judged.outcome.forwards,
            "config": msgspec.to_builtins(judged.run.config), "seed": judged.run.seed,
            "clients": msgspec.to_builtins(judged.run.clients), "tail": judged.tail, "saved": saved,
            "choices": msgspec.to_builtins(judged.run.choices),
            "events": [event._asdict() for event in judged.outcome.events],
            "mismatch": mismatch(finding.mismatch) if finding.mismatch else None,
            "canary": (canary or {}).get(key),
            "again": None if saved is None else f"kvspec serve-check --again {saved}",
        })  # fmt: skip
    new = [finding for finding in findings if not finding["known"] and not finding["old"]]
    return {
        "format": "kvspec-serve-check", "version": 1, "release": result.release, "seed": result.seed,
        "runs": result.runs, "runs_asked": planned, "forwards": result.forwards, "events": result.events,
        "seconds": round(result.seconds, 1), "reached": dict(result.reached.most_common()),
        "known": dict(result.known), "old": dict(result.old), "findings": findings,
        "interrupted": result.interrupted,
        "exit_code": ending(
            broke=any(finding["judge"] in ("server", "grants") for finding in new),
            violated=bool(new),
            interrupted=result.interrupted,
            incomplete=result.runs < planned,
        ),
    }  # fmt: skip


def live_report(run: LiveRun, seed: int, log_folder: Path) -> Data:
    """Return everything about a live server under clients."""
    data = validation("a live server", run.header, run.validated, run.seconds)
    wrong = [] if run.died else run.wrong
    if not run.counts.get("tokens") and not run.died:
        wrong = [*wrong, "no client got a token"]
    has_faults = bool(wrong or data["mismatches"])
    unexplained = bool(run.died) and not (has_faults or run.known)
    end = ending(broke=unexplained, violated=has_faults, incomplete=bool(run.known))
    return {
        "format": "kvspec-serve-live", "version": 1, "seed": seed, "start_s": round(run.start_s, 1),
        "clients": run.counts, "wrong": wrong, "behind_s": round(run.behind_s, 2), "died": run.died,
        "known": run.known,
        "reached": dict(run.validated.reached.most_common()), "log": data,
        "saved": str(log_folder) if has_faults or run.died else None,
        "exit_code": end,
    }  # fmt: skip


def lived_text(out: Console, data: Data) -> None:
    """Print the report of a live server."""
    ended = ""
    if data["died"]:
        ended = f"the server ended by itself: {data['died']}"
    if data["known"]:
        ended = f"incomplete: the server ended by a known fault, {data['known']}"
    print_log_report(out, data["log"], ended)
    texts = {
        "clients": ", ".join(f"{count} {what}" for what, count in data["clients"].items()),
        "judged": f"{data['behind_s']:.1f} s behind the server at its end",
        "reached": ", ".join(f"{what} {count}" for what, count in data["reached"].items()),
        "wrong": "; ".join(data["wrong"]),
        "known": known_faults()[data["known"]].summary if data["known"] else "",
        "its logs": data["saved"],
    }
    print_labels(out, {what: text for what, text in texts.items() if text})


def save(folder: Path, judged: JudgedRun) -> str:
    """Write the run of a finding, and return the file's path."""
    name = "".join(c if c.isalnum() else "-" for c in judged.run.key)[:60].strip("-").lower()
    path = folder / f"serve-{judged.run.release}-{name}.json"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(judged.run), indent=1) + b"\n")
    return str(path)


def served_text(out: Console, data: Data) -> None:
    """Print the report of a check of whole schedulers: verdict, findings, what was reached."""
    new = [finding for finding in data["findings"] if not finding["known"] and not finding["old"]]
    say(out, _served_verdict(data, len(new)), "bold red" if new else "bold green")
    for finding in data["findings"]:
        out.print()
        _served_finding(out, finding)
    out.print()
    for key, times in data["old"].items():
        say(out, f"also in the base, {count_text(times, 'time')}: {key}")
    for name, times in data["known"].items():
        say(out, f"known {name}, {count_text(times, 'time')}: {known_faults()[name].says}")
    if data["known"]:
        say(out, "kvspec bugs NAME has more of a known fault: what upstream knows, what avoids it")
    if data["reached"]:
        reached = ", ".join(f"{what} {count}" for what, count in data["reached"].items())
        say(out, f"reached: {reached}")


def _served_verdict(data: Data, new: int) -> str:
    """Return the findings of a check of whole schedulers, and the number of runs.

    new: findings.
    """
    rate = f", {data['forwards'] / data['seconds']:.0f} a second" if data["seconds"] else ""
    runs = count_text(data["runs"], "run")
    passes = count_text(data["forwards"], "forward pass", "es")
    runs_text = f"{runs}, {passes}{rate}"
    masked = data["known"] or data["old"] or data["findings"]
    if new:
        summary = count_text(new, "finding")
    else:
        summary = "nothing new" if masked else "conforms"
    summary += f", known faults: {', '.join(data['known'])}," if data["known"] else ""
    if data["interrupted"]:
        summary += f", interrupted after {data['runs']} of {data['runs_asked']} runs,"
    elif data["runs"] < data["runs_asked"] and not new:
        if not masked:
            summary = "nothing was found"
        summary = f"incomplete, {data['runs']} of {data['runs_asked']} runs: {summary}"
    return f"sglang {data['release']}: {summary} in {runs_text}"


def _served_finding(out: Console, each: Data) -> None:
    """Print a finding with the smallest run that shows it."""
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
    print_labels(out, {label: text for label, text in words.items() if text})
    for line in story(each["events"]):
        say(out, f"  {line}", whole=True)
    if each["again"]:
        say(out, f"  again: {each['again']}", whole=True)


def _client_text(client: Data) -> str:
    """Return a client in words, such as "c1 in a session, from round 3: 12 tokens limit 5; 1 later 4
    tokens limit 9 stops at 3"."""
    kind = "in a session" if client["session"] else "without a session"
    kind += ", resends its conversation" if client["resends"] else ""
    start = f"{client['start']} rounds after {client['after']}"
    if not client["after"]:
        start = f"round {client['start']}"
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
