"""What validation says of each log, and of each kind of change to it: the files of `changes`, one a log.

Each line: "line of the log: kind of change: what is found", a finding with its clause, its event and how
many lines after the change. `pytest --accept` writes them anew. A change that nobody finds is
one of NEVER, or a hole.
"""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stateful_tests.tests.support.log_changes import FOLDER, Change, ChangedLog
from stateful_tests.watched.reader import Line
from stateful_tests.watched.results import Validated

ACCEPTED = Path(__file__).with_name("changes")
LOGS = [(path.stem, None) for path in sorted(FOLDER.glob("*.jsonl"))]
LOGS += [("sglang-0.5.23-clients_that_do_not_wait", 2), ("sglang-0.5.23-pages_of_a_tree", 1)]
# Changes that leave the log of another server which conforms, and why.
NEVER = {
    r"close before .*": "a client may close at any moment",
    r"admit before (step|snapshot)|step before admit": "the server may look at who waits at any moment",
    r"result before snapshot": "the request is in its prefill and has no outputs",
    r"admit cursors R": "what the tree offered at one look; the next look counts",
    r"insert cursors E": "inside of what is the tree's, E has no effect",
    r"evict_swa length": "E is allowed for both lengths",
    r"open times_out|snapshot sessions times_out": "a timeout allows a close, and does not ask for one",
    r"pages mapping": "of an unused page; SGLang overwrites it before it is read",
    r"pages nodes (full|SWA) locks": "locks are counted in tokens, at each step",
    r"pages nodes path": "the tree may know other texts; whoever matches this one reads its slots",
    r"release counted": "the stop may be any token that the last verify round accepted",
    r"release ids": "of the last round: no result tells them, no later turn repeats them",
    r"release inserts": "whether a request leaves its text in the tree is the server's choice",
    r"release left out": "it ends after the log does",
    r"release limit": "the request ended before its limit",
    r"release outputs": "without results in the log, one round more may be in flight",
    r"snapshot left out": "nothing is lost",
    r"snapshot requests (extends|rejected|retracted)": "how it came there, before the log began",
    r"snapshot requests ids": "text of before the log began",
    r"snapshot sessions (closing|cursors [AC]|tokens)": "of before the log began, or of the turn",
    r"step lanes A": "how far a round allocates ahead within its page is the server's choice",
    r"submit new": "a rejected turn adds nothing to the history",
    r"submit rejected": "an ordinary request",
}
APART = "the lines are of different requests, and may come in either order"


@pytest.mark.parametrize("name, begins", LOGS)
def test_what_is_found(name, begins, request):
    log = ChangedLog(name, begins)
    lines = [*_counts(log.validated(log.lines)), "", *(_found(log, change) for change in log.changes())]
    text = "\n".join([*lines, ""])
    file = ACCEPTED / f"{name}{'' if begins is None else f'-from_snapshot_{begins}'}.txt"
    if request.config.getoption("accept"):
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")
    holes = [line for line in lines if line.endswith(": nothing")]
    assert not holes, holes


def _counts(found: Validated) -> list[str]:
    """All that was counted in a log as it is."""
    values = {field.name: getattr(found, field.name) for field in fields(found)}
    values["mismatches"] = len(found.mismatches)
    return [f"{name}: {_plain(value)}" for name, value in values.items() if value]


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {count}" for name, count in sorted(value.items()))
    return str(sorted(value) if isinstance(value, set) else value)


def _found(log: ChangedLog, change: Change) -> str:
    found = log.validated(change.lines)
    number = log.lines[change.at].number
    at = {line.number: position for position, line in enumerate(change.lines)}
    seen = [f"{m.clause} {m.event} +{at[m.line] - change.at}" for m in found.found[:3]]
    seen += sorted(set(found.skipped) - {"events after a mismatch, up to the next snapshot"})
    return f"{number}: {change.kind}: {', '.join(seen) or _why_never(log, change)}"


def _why_never(log: ChangedLog, change: Change) -> str:
    one, other = (_names(log.lines[at]) for at in (change.at, change.at + 1))
    if " before " in change.kind and one and other and not one & other:
        return f"never: {APART}"
    reasons = [why for kind, why in NEVER.items() if re.fullmatch(kind, change.kind)]
    return f"never: {reasons[0]}" if reasons else "nothing"


def _names(line: Line) -> set[str]:
    """The requests and sessions that a line names."""
    return set(re.findall(r'"(c\d+(?:\.\d+)?)"', str(msgspec.json.encode(line.event))))
