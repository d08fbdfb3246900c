"""Recording: what is typed, and what a server logs, becomes a trace."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from impl.adapter import UnusableImplementation
from reference.commands import Admit, Done, Mode, Open, Reason, Refused, Submit
from reference.geometry import preset
from stateful_tests.lockstep import lockstep
from stateful_tests.lockstep.lockstep import replay
from stateful_tests.lockstep.reference_system import ReferenceSystem
from stateful_tests.traces.files import TraceError, dump, loads
from stateful_tests.traces.recording import Recorder, read_log

FIXTURES = Path(__file__).parents[3] / "fixtures"
EXAMPLE = FIXTURES / "recorded" / "two_turns_of_a_chat.jsonl"
HEADER = {
    "format": "kvspec-log", "version": 1,
    "geometry": {"page_size": 1, "window": 3, "full_pages": 8, "swa_pages": 8, "rows": 2, "width": 8},
}  # fmt: skip


def test_a_recorder_answers_and_takes_back():
    recorder = Recorder(preset("page1"), Mode.FAITHFUL)
    assert recorder.undo() is None
    assert recorder.do(Open("s1")).outcome == Done()
    assert recorder.do(Open("s1")).outcome == Refused(Reason.SESSION_EXISTS)
    recorder.undo()
    recorder.do(Submit("r1", "s1", 4))
    assert recorder.do(Admit("r2")).outcome == Refused(Reason.UNKNOWN_REQUEST)
    trace = recorder.trace("hand-written")
    assert trace.commands == (Open("s1"), Submit("r1", "s1", 4), Admit("r2"))
    assert [outcome for _, outcome in trace.expected] == [Done(), Done(), Refused(Reason.UNKNOWN_REQUEST)]
    assert loads(dump(trace).encode(), "recorded") == trace


def test_the_example_log():
    trace, partings = read_log(EXAMPLE)
    assert partings == []
    assert trace.origin == "recorded"
    assert len(trace.commands) == len(EXAMPLE.read_text().splitlines()) - 1
    assert dict(trace.expected)[5] == Refused(Reason.TURN_IN_FLIGHT)
    assert replay(ReferenceSystem(), trace).violation is None


def test_a_run_has_no_more_submits_than_token_ids_tell_apart(monkeypatch):
    monkeypatch.setattr(lockstep, "SHARED", 3)
    recorder = Recorder(preset("page1"), Mode.FAITHFUL)
    for request in ("r1", "r2"):
        recorder.do(Submit(request, None, 1))
    with pytest.raises(UnusableImplementation, match="one run has more than 2 submits"):
        recorder.do(Submit("r3", None, 1))
    trace = recorder.trace("hand-written")
    assert replay(ReferenceSystem(), trace).violation is None
    more = replace(trace, commands=(*trace.commands, Submit("r3", None, 1)), expected=())
    with pytest.raises(UnusableImplementation, match="one run has more than 2 submits"):
        replay(ReferenceSystem(), more)


def write(path: Path, *lines: Any) -> Path:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text(text + "\n", encoding="utf-8")
    return path


def test_a_log_says_where_the_rules_part_from_it(tmp_path):
    log = write(
        tmp_path / "server.jsonl", HEADER, "", {"do": "open", "session": "s1", "log": {"rank": 0}},
        {"do": "admit", "request": "r1"},
        {"do": "open", "session": "s2", "expect": {"refused": "session_exists"}},
    )  # fmt: skip
    trace, partings = read_log(log)
    assert trace.mode is Mode.FAITHFUL
    assert [(p.line, p.server, p.reference) for p in partings] == [
        (4, Done(), Refused(Reason.UNKNOWN_REQUEST)),
        (5, Refused(Reason.SESSION_EXISTS), Done()),
    ]
    violation = replay(ReferenceSystem(), trace).violation  # it says what the server did
    assert (violation.clause, violation.step) == ("TRACE", 1)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([], "log: is empty"),
        (["{"], "log: line 1: is not JSON"),
        ([{"do": "open", "session": "s1"}], "log: line 1: $.do: unknown field"),
        ([{**HEADER, "format": "kvspec-trace"}], "line 1: the first line must say"),
        ([{**HEADER, "mode": "wild"}], "line 1: $.mode: invalid enum value"),
        ([{**HEADER, "geometry": {**HEADER["geometry"], "window": 0}}], "line 1: $.geometry.window: "),
        ([HEADER, "", {"do": "leap"}], "line 3: $.do: invalid value"),
        ([HEADER, {"do": "admit", "request": 1}], "line 2: $.request: expected str, got int"),
        ([HEADER, {"do": "check_idle", "time": 1}], "line 2: $.time: unknown field"),
        ([HEADER, '{"do": "open", "do": "open", "session": "s"}'], "line 2: the key 'do' is given twice"),
    ],
)
def test_a_wrong_log_is_refused(tmp_path, lines, says):
    with pytest.raises(TraceError) as caught:
        read_log(write(tmp_path / "log", *lines))
    assert says in str(caught.value)


def test_the_writer_in_the_readme_writes_such_a_log(tmp_path, monkeypatch):
    [code] = re.findall(r"```python\n(.*?)```", (FIXTURES / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(code, names)
    names["log"]("open", session="s1", refused="session_exists")
    names["log"].file.close()
    trace, partings = read_log("server.jsonl")
    assert [type(c).__name__ for c in trace.commands] == ["Open", "Submit", "Admit", "Extend", "Open"]
    assert partings == []
