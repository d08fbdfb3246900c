"""What the validator notices: one log for each guard, changed at one place; the clause that must say it.

The plain log is written by hand: a session's turn of three tokens in two chunks on a server without a tree,
page_size 1. Each row changes it, and names the first mismatch as clause, event.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from impl.sglang.server.events import WatchHeader
from stateful_tests.tests.support.watched_logs import header
from stateful_tests.watched.reader import logs_of
from stateful_tests.watched.results import Validated
from stateful_tests.watched.validator import Validator

HEADER = header()

TURN = """
["open","c1",true]
["submit","c1.1","c1",3,3,false]
["admit","c1.1","c1",0,[0,0,0,0]]
["extend",[["c1.1",0,2,[2,2,0,0]]]]
["step",1,1,0,1,30,30,3,0,0,0,[]]
["admit","c1.1","c1",2,[2,2,0,0]]
["extend",[["c1.1",2,1,[3,3,0,0]]]]
["step",2,1,0,1,29,29,3,0,0,0,[]]
["evict_swa","c1.1",3,[3,3,1,0]]
["step",3,1,0,1,28,29,3,0,0,0,[["c1.1",4,4,1,0]]]
["step",4,1,0,1,27,28,3,0,0,0,[["c1.1",5,5,1,0]]]
"""
FINISH = """
["release","c1.1","c1","FINISH_LENGTH",true,3,3,[5,5,1,0],[5,5,1,0],3]
["step",5,0,0,1,27,28,3,0,0,0,[]]
"""
ABORT = """
["release","c1.1","c1","FINISH_ABORT",true,3,null,[5,5,1,0],null,9]
["step",5,0,0,1,32,32,4,0,0,0,[]]
"""
RETRACT = """
["release","c1.1","c1",null,false,3,null,[5,5,1,0],[5,5,1,0],9]
["requeue","c1.1"]
["step",5,0,1,1,27,28,3,0,0,0,[]]
"""
WITHOUT_OUTPUT = """
["open","c1",true]
["submit","c1.1","c1",3,3,false]
["admit","c1.1","c1",0,[0,0,0,0]]
["extend",[["c1.1",0,3,[3,3,0,0]]]]
["step",1,1,0,1,29,29,3,0,0,0,[]]
["release","c1.1","c1","FINISH_LENGTH",true,1,0,[3,3,0,0],[3,3,0,0],0]
["step",2,0,0,1,29,29,3,0,0,0,[]]
"""
SNAPSHOT = [
    "snapshot", 0,
    [{"session": "c1", "tokens": 0, "closing": False, "cursors": None, "turn": "c1.1"}],
    [{
        "request": "c1.1", "session": "c1", "queued": False, "tokens": 3, "outputs": 3, "rejected": False,
        "retracted": False, "cursors": [5, 5, 1, 0],
    }],
]  # fmt: skip
VERIFIES = """
["submit","a",null,3,3,false]
["admit","a",null,0,[0,0,0,0]]
["extend",[["a",0,3,[3,3,0,0]]]]
["step",1,1,0,0,29,29,3,0,0,0,[]]
["result",[["a",1,[3,3,0,0],[]]]]
["step",2,1,0,0,27,27,3,0,0,0,[["a",3,5,0,0]]]
["result",[["a",3,[5,5,0,0],[]]]]
["step",3,1,0,0,25,25,3,0,0,0,[["a",5,7,0,0]]]
["release","a",null,"FINISH_LENGTH",true,5,4,[7,7,0,0],null,4]
["step",4,0,0,0,32,32,4,0,0,0,[]]
"""


def events(*parts: str) -> list[list[Any]]:
    """The lines of a log."""
    return [json.loads(line) for part in parts for line in part.split("\n") if line.strip()]


@pytest.fixture
def validate(tmp_path) -> Callable[..., Validated]:
    def run(lines: list[list[Any]], **header: Any) -> Validated:
        path = tmp_path / "log.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in ({**HEADER, **header}, *lines)))
        (log,) = logs_of([path])
        assert isinstance(log.header, WatchHeader)
        return Validator(log.header).run(log.lines())

    return run


def first(found: Validated) -> tuple[str, str]:
    assert found.found, "nothing was noticed"
    return found.found[0].clause, found.found[0].event


VERIFYING = {"speculative": True}


@pytest.mark.parametrize("log, header", [
    (TURN + FINISH, {}), (TURN + ABORT, {}), (TURN + RETRACT, {}), (WITHOUT_OUTPUT, {}),
    (VERIFIES, VERIFYING),
])  # fmt: skip
def test_the_plain_logs_conform(log, header, validate):
    found = validate(events(log), **header)
    assert not found.mismatches and not found.skipped


COUNTS = [
    (2, "OUT-1"), (3, "SES-2"), (4, "SES-2"), (5, "OWN-3"), (6, "OWN-3"), (7, "OWN-4"), (8, "OWN-3"),
    (9, "OWN-3"),
]  # fmt: skip


@pytest.mark.parametrize("by", [1, -1])
@pytest.mark.parametrize("field, clause", COUNTS)
def test_each_count_of_a_step_has_its_clause(field, clause, by, validate):
    lines = events(TURN, FINISH)
    (at,) = [n for n, line in enumerate(lines) if line[:2] == ["step", 3]]
    lines[at][field] += by
    assert first(validate(lines)) == (clause, "step")


def test_locked_tokens_have_their_clause(validate):
    lines = events(TURN, FINISH)
    lines[-1][10] = 2  # nobody protects any
    assert first(validate(lines)) == ("TREE-6", "step")


@pytest.mark.parametrize("cursor, by", [(c, by) for c in range(4) for by in (1, -1) if c != 3 or by > 0])
def test_cursors_after_a_finish_without_output(cursor, by, validate):
    lines = events(WITHOUT_OUTPUT)
    if cursor == 2 and by < 0:
        by = 2
    lines[-2][8][cursor] += by
    assert first(validate(lines))[1] == "release"


@pytest.mark.parametrize("at, then, clause", [
    (4, 5, "OUT-1"),  # the next round is launched before the result
    (6, 7, "LEN-4"),  # a result that comes after the next round
    (3, 4, "OUT-1"),  # a result before its round
])  # fmt: skip
def test_a_result_stands_between_its_rounds(at, then, clause, validate):
    lines = events(VERIFIES)
    lines[at], lines[then] = lines[then], lines[at]
    assert first(validate(lines, **VERIFYING))[0] == clause


def test_a_result_that_is_left_out(validate):
    for at in (4, 6):
        lines = events(VERIFIES)
        del lines[at]
        assert first(validate(lines, **VERIFYING))[0] in ("OUT-1", "LEN-4")


@pytest.mark.parametrize("header", [{}, VERIFYING])
def test_a_round_in_the_wrong_phase(header, validate):
    lines = events(TURN)[:5]  # between two chunks
    if header:
        lines.append(["result", [["c1.1", 0, [2, 2, 0, 0], []]]])
    lines.append(["step", 2, 1, 0, 1, 29, 29, 3, 0, 0, 0, [["c1.1", 2 if header else 3, 3, 0, 0]]])
    assert first(validate(lines, **header)) == ("OUT-1", "step")


def test_a_window_eviction_of_a_request_that_waits(validate):
    eviction = ["evict_swa", "c1.1", 3, [0, 0, 0, 0]]
    lines = [*events(TURN)[:2], eviction, ["step", 1, 0, 1, 1, 32, 32, 4, 0, 0, 0, []]]
    assert first(validate(lines)) == ("OUT-1", "step")


def test_a_window_eviction_goes_too_far(validate):
    lines = events(TURN, FINISH)
    (at,) = [n for n, line in enumerate(lines) if line[0] == "evict_swa"]
    lines[at][3][2] = 3
    assert first(validate(lines)) == ("OUT-3", "evict_swa")


def test_a_second_requeue(validate):
    assert first(validate([*events(TURN, RETRACT), ["requeue", "c1.1"]])) == ("OUT-1", "requeue")


# Known faults: their labels, and that a release without them has none.


AGAIN = ["submit", "c1.2", "c1", 8, 2, False]  # 6 tokens of history: those of the turn that was aborted


@pytest.mark.parametrize("release, known", [("0.5.23", "retract-ends-turn"), ("9.9.9", None)])
def test_an_aborted_turn_in_the_history(release, known, validate):
    resumes = events("""
    ["admit","c1.1","c1",5,[5,5,1,0]]
    ["extend",[["c1.1",5,1,[6,6,1,0]]]]
    ["step",6,1,0,1,26,27,3,0,0,0,[]]
    ["release","c1.1","c1","FINISH_ABORT",true,4,null,[6,6,1,0],null,9]
    """)
    lines = [*events(TURN, RETRACT), *resumes]
    (mismatch,) = validate([*lines, ["submit", "c1.2", "c1", 9, 2, False]], release=release).mismatches
    assert (mismatch.clause, mismatch.event, mismatch.known) == ("SES-1", "submit", known)
    assert not validate([*lines, ["submit", "c1.2", "c1", 2, 2, False]], release=release).mismatches


def test_an_aborted_turn_that_was_not_retracted_is_no_known_fault(validate):
    (mismatch,) = validate([*events(TURN, ABORT), AGAIN], release="0.5.23").mismatches
    assert (mismatch.clause, mismatch.known) == ("SES-1", None)


@pytest.mark.parametrize("release, known", [("0.5.23", "retract-ends-turn"), ("9.9.9", None)])
def test_a_turn_that_is_nobodys_after_a_retract(release, known, validate):
    lines = [*events(TURN, RETRACT), ["admit", "c1.1", None, 0, [0, 0, 0, 0]]]
    (mismatch,) = validate(lines, release=release).mismatches
    assert (mismatch.clause, mismatch.event, mismatch.known) == ("SES-2", "admit", known)


@pytest.mark.parametrize("release, known", [("0.5.23", "retract-ends-turn"), ("9.9.9", None)])
def test_a_snapshot_shows_that_a_turn_is_nobodys_after_a_retract(release, known, validate):
    (_, _, [session], [request]) = shown = json.loads(json.dumps(SNAPSHOT))
    session.update(tokens=6, cursors=[5, 5, 1, 0])
    request.update(session=None, queued=True, retracted=True, cursors=None)
    (mismatch,) = validate([*events(TURN, RETRACT), shown], release=release).mismatches
    assert (mismatch.clause, mismatch.event, mismatch.known) == ("SES-2", "snapshot", known)


LAST_TOKEN = """
["open","c1",true]
["submit","c1.1","c1",3,3,false]
["admit","c1.1","c1",0,[0,0,0,0]]
["extend",[["c1.1",0,3,[3,3,0,0]]]]
["step",1,1,0,1,29,29,3,0,0,0,[]]
["result",[["c1.1",1,[3,3,0,0],[]]]]
["step",2,1,0,1,26,26,3,0,0,0,[["c1.1",3,6,0,0]]]
["release","c1.1","c1","FINISH_LENGTH",true,3,3,[5,6,0,0],[6,6,0,0],3]
["step",3,0,0,1,26,26,3,0,0,0,[]]
"""


@pytest.mark.parametrize("release, known", [("0.5.23", "last-token"), ("9.9.9", None)])
def test_the_last_token_of_a_verify_round(release, known, validate):
    found = validate(events(LAST_TOKEN), **VERIFYING, release=release)
    (mismatch,) = found.mismatches
    assert (mismatch.clause, mismatch.event, mismatch.known) == ("LEN-2", "release", known)
    assert found.holes == ({("c1", 5)} if known else set())


PAGES = Path(__file__).parents[3] / "fixtures" / "watched" / "sglang-0.5.23-pages.jsonl"


def test_outputs_of_an_end_are_those_of_its_results(validate):
    head, *lines = map(json.loads, PAGES.read_text().splitlines())
    end = next(line for line in lines if line[0] == "release" and line[-1] and line[3] == "FINISH_LENGTH")
    end[-1][0] += 1
    mismatch = validate(lines, **head).found[0]
    assert (mismatch.clause, mismatch.event) == ("SES-1", "release") and "outputs of" in mismatch.expected


# A log that begins in the middle of life, and snapshots.


def begins(change: Callable[[list[Any]], Any] = lambda _: None) -> list[list[Any]]:
    """A log whose first line is a snapshot."""
    snapshot = json.loads(json.dumps(SNAPSHOT))
    change(snapshot)
    return [snapshot, *events(FINISH)]


def test_a_log_may_begin_in_the_middle(validate):
    found = validate(begins())
    assert not found.mismatches and found.given == 2 and found.commands["Finish"] == 1


def test_a_log_may_begin_with_a_round_in_flight_of_a_retracted_request(validate):
    request = {
        "request": "a", "session": None, "queued": True, "tokens": 3, "outputs": 0, "rejected": False,
        "retracted": True, "cursors": None, "rounds": ["prefill"],
    }  # fmt: skip
    lines = events("""
["admit","a",null,0,[0,0,0,0]]
["extend",[["a",0,3,[3,3,0,0]]]]
["step",1,1,0,0,29,29,3,0,0,0,[]]
["step",2,1,0,0,27,27,3,0,0,0,[["a",3,5,0,0]]]
["result",[["a",1,[3,5,0,0],[]]]]
["step",3,1,0,0,25,25,3,0,0,0,[["a",3,7,0,0]]]
["result",[["a",2,[4,7,0,0],[]]]]
    """)
    found = validate([["snapshot", 0, [], [request]], *lines], overlap=True, **VERIFYING)
    assert not found.mismatches and found.commands["SpecDecode"] == 1


@pytest.mark.parametrize("change, clause", [
    (lambda s: s[3][0].update(cursors=[6, 6, 1, 0]), "LEN-4"),
    (lambda s: s[3][0].update(tokens=2), "SES-1"),
    (lambda s: s[3][0].update(outputs=4), "SES-1"),
    (lambda s: s[3][0].update(session=None), "OUT-1"),
    (lambda s: s[2].clear(), "SES-2"),
    (lambda s: s[3].clear(), "SES-2"),
])  # fmt: skip
def test_what_a_snapshot_says_counts(change, clause, validate):
    """At the beginning what follows differs; in the middle the snapshot itself does."""
    lines = begins(change)
    in_the_middle = validate([*events(TURN), *lines])
    assert in_the_middle.found[0].event == "snapshot" or clause == "SES-1"
    assert validate(lines).found


def test_after_a_mismatch_the_next_snapshot_is_taken(validate):
    lines = events(TURN)
    lines[6][1][0][2] = 2  # a chunk too long
    found = validate([*lines, *begins()])
    assert len(found.found) == 1 and found.given == 2
    assert found.skipped["events after a mismatch, up to the next snapshot"] == len(lines) - 7
    assert found.commands["Finish"] == 1


def test_a_snapshot_that_stands_for_lost_lines(validate):
    lost = json.loads(json.dumps(SNAPSHOT))
    lost[1] = 3
    found = validate([*events(TURN)[:4], lost, *events(FINISH)])
    assert not found.mismatches and found.skipped["events that the watcher dropped"] == 3
