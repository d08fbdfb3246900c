"""Events in words: what a line stands for, how one is changed, and what is wrong with it."""

import msgspec
import pytest

from impl.sglang.server.events import Event
from stateful_tests.tests.support.log_lines import (
    EVENTS, LogLineError, change_line, event, events, header_fields, spoilt,
)  # fmt: skip
from stateful_tests.tests.watched.test_noticed_changes import PIECES, ROWS

STEP = "step 4: batch 1, sessions 1, full 27, swa 28, rows 3; c1.1 C5 A5 E1"
LINES = {
    "open c1: done": ["open", "c1", True, False],
    "submit c1.2 of c1: tokens 1, new 1, rejected, why \"too long\", ids 7":
        ["submit", "c1.2", "c1", 1, 1, True, "too long", [7]],
    "submit a: tokens 3, new 3, ids empty": ["submit", "a", None, 3, 3, False, "", []],
    "admit a: prefix 3, R3": ["admit", "a", None, 3, [0, 0, 0, 3]],
    "extend: a tokens 4 C4 A4; b prefix 1 tokens 2 C3 A3":
        ["extend", [["a", 0, 4, [4, 4, 0, 0]], ["b", 1, 2, [3, 3, 0, 0]]]],
    "result: a outputs 1 C3 A3 ids 7 8": ["result", [["a", 1, [3, 3, 0, 0], [7, 8]]]],
    STEP: ["step", 4, 1, 0, 1, 27, 28, 3, 0, 0, 0, [["c1.1", 5, 5, 1, 0]], 0, 0.0],
    "release a: inserts, outputs 1, counted 0, before C3 A3, after C0, limit 9":
        ["release", "a", None, None, True, 1, 0, [3, 3, 0, 0], [0, 0, 0, 0], 9, None],
    "abort: queued c1.2 c1.3": ["abort", ["c1.2", "c1.3"]],
    "failed step: error \"KeyError: 'x'\"": ["failed", "step", "KeyError: 'x'"],
    "pages: free_full 5; owner c1 row 1 C3 A3 slots 1 2; node path 1 2 slots 4 5 full_locks 1":
        ["pages", {"c1": [1, [3, 3, 0, 0], [1, 2]]}, [5], [], None, None, [[[1, 2], [4, 5], [], 1, 0]],
         None],
    "pages; states free 3 nodes 1 -; held c1 1 2; tracked c1 2 3":
        ["pages", {}, [], [], None, None, None,
         {"free": [3], "held": {"c1": [1, 2]}, "tracked": {"c1": [2, 3]}, "nodes": [1, None]}],
}  # fmt: skip


@pytest.mark.parametrize("line", LINES)
def test_a_line_stands_for_an_event(line):
    assert event(line) == LINES[line]
    msgspec.convert(event(line), Event)


def test_a_snapshot_has_all_fields_that_have_no_default():
    snapshot = event(
        "snapshot; session c1 turn r; request r session c1 queued tokens 3 C2 A2 rounds decode"
    )
    assert snapshot[2:] == [
        [{"session": "c1", "tokens": 0, "closing": False, "cursors": None, "turn": "r"}],
        [{
            "request": "r", "session": "c1", "queued": True, "tokens": 3, "outputs": 0, "rejected": False,
            "retracted": False, "cursors": [2, 2, 0, 0], "rounds": ["decode"],
        }],
    ]  # fmt: skip
    msgspec.convert(snapshot, Event)


def test_every_event_of_a_server_by_itself_stands_in_a_row():
    """Facts of a host tier are written in Python (tiers/scenes.py), transfers in test_transfers.py."""
    of_pairs = {"queue", "send", "name", "arrive", "give_back", "rest"}
    lines_said = [line for log in (*PIECES.values(), *(row.log for row in ROWS)) for line in log]
    assert {name for name, *_ in lines_said} == {*EVENTS} - {"tier", *of_pairs}


@pytest.mark.parametrize(
    ("line", "change", "as_line"),
    [
        (STEP, "full 9 swa 8", STEP.replace("full 27, swa 28", "full 9, swa 8")),
        (STEP, "c1.1 C6 A6", STEP.replace("C5 A5 E1", "C6 A6")),
        (STEP, "c2 C1 A1", f"{STEP}; c2 C1 A1"),
        ("extend: a tokens 4 C4 A4", "a prefix 1", "extend: a prefix 1 tokens 4 C4 A4"),
        ("admit a of s: prefix 3, C3 A3", "session no C4", "admit a: prefix 3, C4"),
        ("release a: counted 3", "counted no", "release a"),
        (
            "pages; owner c1 row 1 C3 A3 slots 1 2",
            "owner c1 slots 4",
            "pages; owner c1 row 1 C3 A3 slots 4",
        ),
        (
            "snapshot; request r tokens 3 C2 A2",
            "request r queued cursors no",
            "snapshot; request r queued tokens 3",
        ),
    ],
)
def test_a_change_is_in_the_words_of_the_line(line, change, as_line):
    was = event(line)
    assert change_line(was, change) == event(as_line)
    assert was == event(line), "the event itself stays"


def test_changes_of_a_log_have_the_numbers_of_its_lines():
    log = events(f"flush\n{STEP}")
    assert spoilt(log, "1 tree 2; 2 rows 1; 2 c1.1 C1") == [
        event("flush: tree 2"), event(STEP.replace("rows 3", "rows 1").replace("C5 A5 E1", "C1")),
    ]  # fmt: skip
    assert log == events(f"flush\n{STEP}")


def test_header_fields_replace_the_defaults():
    text = header_fields(
        "window no, states 8, tree, release 0.5.23; tier full_tokens 32, policy write_back"
    )
    assert text == {
        "window": None, "states": 8, "tree": True, "release": "0.5.23",
        "tier": {"full_tokens": 32, "policy": "write_back"},
    }  # fmt: skip
    assert header_fields("") == {}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("stepp 4: full 3", "no event is called 'stepp'; one of open, close"),
        ("step 4: fulll 3", "'fulll' is no field; one of number, batch"),
        ("open c1: done yes", "'yes' behind a flag"),
        ("flush: tree 1 2", "too many values"),
        ("extend: a tokenz 3", "'tokenz' is no field; one of request, prefix"),
        ("flush: tree 1; c1 C3", "flush has no entries: c1 C3"),
    ],
)
def test_a_line_that_is_no_event_says_why(line, says):
    with pytest.raises(LogLineError, match=says) as error:
        event(line)
    assert str(error.value).startswith(repr(line))
