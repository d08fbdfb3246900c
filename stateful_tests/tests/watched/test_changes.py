"""Validation finds each kind of change to a log of a real scheduler, or the change is one of NEVER.

What it counts in the logs as they are stands in counted.txt; `pytest --accept` writes it anew.
"""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stateful_tests.tests.support.log_changes import FOLDER, Change, ChangedLog
from stateful_tests.tests.support.night import some_at_night
from impl.sglang.server.events import Admitted, Extended, Released, Snapshot, Submitted
from stateful_tests.watched.log_reader import Line

COUNTED = Path(__file__).with_name("counted.txt")
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
    r"pages states tracked slot": "the other of its slots may have the later state",
    r"pages states tracked tokens": "a state is kept after any tokens of the text",
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


def test_counts_of_validated_logs_stay_as_recorded(request):
    text = "\n\n".join(_count_text(*log) for log in LOGS) + "\n"
    if request.config.getoption("accept"):
        COUNTED.write_text(text, encoding="utf-8")
    assert text == COUNTED.read_text(encoding="utf-8")


def _count_text(name: str, begins: int | None) -> str:
    log = ChangedLog(name, begins)
    validated = log.validate(log.lines)
    values = {
        field.name: getattr(validated, field.name)
        for field in fields(validated)
        if field.name != "mismatches"
    }
    lines = [f"  {what}: {_plain(value)}" for what, value in values.items() if value]
    return "\n".join([name if begins is None else f"{name} from snapshot {begins}", *lines])


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {count}" for name, count in sorted(value.items()))
    return str(sorted(value) if isinstance(value, set) else value)


@pytest.mark.parametrize("log", some_at_night(LOGS, lambda log: log not in LOGS[::3]))
def test_each_change_is_found(log):
    log = ChangedLog(*log)
    as_it_is = log.validate(log.lines)
    assert not as_it_is.unexplained
    skipped = set(as_it_is.skipped)
    holes = [
        f"{log.lines[c.at].number}: {c.kind}" for c in log.changes() if not _is_found(log, c, skipped)
    ]
    assert not holes, holes


def _is_found(log: ChangedLog, change: Change, skipped: set[str]) -> bool:
    """Return whether the change is found, or a part of the log is skipped for it, or it is one of
    NEVER."""
    validated = log.validate(change.lines)
    return bool(validated.unexplained or set(validated.skipped) - skipped or _never(log, change))


def _never(log: ChangedLog, change: Change) -> bool:
    """A log of another server that conforms. Lines of different requests may come in either order; but what
    clients say, results and ends come before the server decides on a batch."""
    former = log.lines[change.at].event
    if change.kind in ("admit before release", "evict_swa before release"):
        return (
            type(former) is Released and former.reason is None and change.kind.startswith("admit")
        )
    if type(former) is Submitted and change.kind == "submit ids" and not log.header.tree:
        return former.session is None  # nobody reads its text again
    if type(former) is Admitted and change.kind == "admit left out":
        later = (line for line in log.lines[change.at + 1 :] if former.request in _names(line))
        return type(next(later).event) is not Extended  # it goes on waiting
    if type(former) is Snapshot and change.kind == "snapshot sessions cursors E":
        pairs = zip(former.sessions, change.lines[change.at].event.sessions)
        [changed] = [session.session for session, now in pairs if session != now]
        return changed in [request.session for request in former.requests]  # its turn has cursors of its own
    one, other = (_names(log.lines[at]) for at in (change.at, change.at + 1))
    apart = " before " in change.kind and one and other and not one & other
    return bool(apart or any(re.fullmatch(kind, change.kind) for kind in NEVER))


def _names(line: Line) -> set[str]:
    """Return the requests and sessions that a line names."""
    return set(re.findall(r'"(c\d+(?:\.\d+)?)"', str(msgspec.json.encode(line.event))))
