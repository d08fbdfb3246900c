"""Logs of servers with recurrent layers."""

import pytest

from stateful_tests.tests.support.log_lines import events, spoilt
from stateful_tests.tests.support.watched_logs import header
from stateful_tests.tests.support.written_logs import validate


# Recurrent state: slots 8, of which a turn of c1 has one. Its second turn resumes; c2 waits with a slot.
STATES = events("""
open c1: done
submit c1.1 of c1: tokens 3, new 3
admit c1.1 of c1
extend: c1.1 tokens 3 C3 A3
step 1: batch 1, sessions 1, full 61, rows 5, states 7
step 2: batch 1, sessions 1, full 60, rows 5, states 7; c1.1 C4 A4
release c1.1 of c1: reason FINISH_LENGTH, inserts, outputs 2, counted 2, before C4 A4, after C4 A4, limit 2
open c2: done
submit c2.1 of c2: tokens 5, new 5
admit c2.1 of c2: prefix 3, R3
step 3: queued 1, sessions 2, full 60, rows 5, states 6
submit c1.2 of c1: tokens 7, new 2
admit c1.2 of c1: prefix 4, C4 A4
admit c2.1 of c2
extend: c1.2 prefix 4 tokens 3 C7 A7; c2.1 tokens 5 C5 A5
step 4: batch 2, sessions 2, full 52, rows 4, states 6
""")
OF_STATES = {
    "window": None,
    "full_tokens": 64,
    "swa_tokens": 0,
    "rows": 6,
    "width": 64,
    "states": 8,
}


@pytest.mark.parametrize("changes, found", [
    ("", []),
    ("6 states 6", ["STA-6", "STA-6"]),  # lost, and found again
    ("11 states 7; 16 states 7", ["STA-6"]),  # given back though c2.1 waits with it
    ("13 prefix 3, C3 A3", ["STA-2"]),
])  # fmt: skip
def test_states_add_up_and_turns_resume_where_theirs_are(changes, found, written):
    head = header(release="9.9.9", tree=True, **OF_STATES)
    result = validate(written([head, *spoilt(STATES, changes)]))
    assert [mismatch.clause for mismatch in result.unexplained] == found
    assert result.wrong_states == ({("c1.2", 3): ""} if found == ["STA-2"] else {})


@pytest.mark.parametrize(
    "free, found", [(7, []), (6, []), (5, ["STA-6", "STA-6"]), (8, ["STA-6"] * 2)]
)
def test_a_lazy_server_takes_one_slot_more_while_a_state_is_due(free, found, written):
    head = header(release="9.9.9", tree=True, lazy=True, **OF_STATES)
    result = validate(written([head, *spoilt(STATES, f"6 states {free}")]))
    assert [mismatch.clause for mismatch in result.unexplained] == found


# Verify rounds of c1's first turn, and its second. The last round accepts more than the first turn takes.
ROUNDS = events("""
open c1: done
submit c1.1 of c1: tokens 1, new 1
admit c1.1 of c1
extend: c1.1 tokens 1 C1 A1
step 1: batch 1, sessions 1, full 63, rows 5, states 7
step 2: batch 1, sessions 1, full 55, rows 5, states 7; c1.1 C1 A9
result: c1.1 outputs 1 C1 A9
step 3: batch 1, sessions 1, full 55, rows 5, states 7; c1.1 C1 A9
result: c1.1 outputs 2 C2 A9
step 4: sessions 1, full 55, rows 5, states 7
release c1.1 of c1: reason FINISH_LENGTH, inserts, outputs 6, counted 3, before C6 A9, after C4 A4, limit 3
submit c1.2 of c1: tokens 6, new 2
admit c1.2 of c1: prefix 4, C4 A4
step 5: queued 1, sessions 1, full 60, rows 5, states 7
admit c1.2 of c1: prefix 4, C4 A4
extend: c1.2 prefix 4 tokens 2 C6 A6
step 6: batch 1, sessions 1, full 58, rows 5, states 7
release c1.2 of c1: reason FINISH_LENGTH, inserts, outputs 1, counted 1, before C6 A6, after C6 A6, limit 1
submit c1.3 of c1: tokens 9, new 2
admit c1.3 of c1: prefix 6, C6 A6
""")
IN_FLIGHT = "10 batch 1; 10 c1.1 C2 A9; "
LONGER = "turn-goes-on-from-a-longer-state"


@pytest.mark.parametrize("changes, state, found, new", [
    ("", 6, [("STA-2", LONGER)], ["STA-2"]),
    ("11 outputs 4, before C4 A9", 4, [], []),  # it accepts what the turn takes
    # the KV of the last token was not computed, nor is it in the state; with a round in flight it may be
    ("11 outputs 3, before C3 A9", 3,
     [("LEN-2", "last-token"), ("STA-2", "last-token")], ["LEN-2", "STA-2"]),
    (IN_FLIGHT + "11 outputs 3, before C3 A9", 4,
     [("LEN-2", "last-token"), ("STA-2", LONGER)], ["LEN-2", "STA-2"]),
    (IN_FLIGHT + "11 outputs 4, before C4 A9", 5, [("STA-2", LONGER)], []),
])  # fmt: skip
def test_a_turn_resumes_behind_verify_rounds(changes, state, found, new, written):
    """Told once of a turn. What a round in flight adds to a state is not in a log."""
    settings = {"overlap": True, "speculative": True, **OF_STATES}
    lines = spoilt(ROUNDS, changes)
    result = validate(written([header(release="0.5.23", **settings), *lines]))
    assert [(mismatch.clause, mismatch.known) for mismatch in result.mismatches] == found
    for mismatch in result.mismatches:
        if mismatch.clause == "STA-2":
            assert mismatch.expected.startswith(f"c1.2 resumes at {state}"), mismatch
    wrong = [known for clause, known in found if clause == "STA-2"]
    assert result.wrong_states == dict.fromkeys([("c1.2", 4)] if wrong else [], *wrong)
    result = validate(written([header(release="9.9.9", **settings), *lines]))
    assert [mismatch.clause for mismatch in result.unexplained] == new


def test_a_turn_that_comes_back_resumes_where_it_did(written):
    """It was retracted before its first result; its first admission has told that its state is another."""
    lines = ROUNDS[:11] + events("""
submit c1.2 of c1: tokens 5, new 1
admit c1.2 of c1: prefix 4, C4 A4
extend: c1.2 prefix 4 tokens 1 C5 A5
step 5: batch 1, sessions 1, full 59, rows 5, states 7
release c1.2 of c1: before C5 A5, after C5 A5, limit 3
requeue c1.2
admit c1.2 of c1: prefix 4, C4 A4
""")
    head = header(release="0.5.23", overlap=True, speculative=True, **OF_STATES)
    result = validate(written([head, *lines]))
    assert not result.unexplained and not result.skipped, result.unexplained


@pytest.mark.parametrize("prefix, wrong", [(0, {("c2.1", 0): "waiting-turn-keeps-state"}), (3, {})])
def test_a_turn_that_waited_with_a_slot(prefix, wrong, written):
    """0.5.23 leaves the slot as it is: the state in it is another request's if the text begins there."""
    head = header(release="0.5.23", tree=True, **OF_STATES)
    changes = f"14 prefix {prefix}, R{prefix}; 15 c2.1 prefix {prefix} tokens {5 - prefix} C5 A5 R{prefix};"
    lines = spoilt(STATES, f"{changes} 16 tree_full {prefix}, tree_locked {prefix}")
    result = validate(written([head, *lines]))
    assert not result.mismatches and result.wrong_states == wrong


@pytest.mark.parametrize("release, session, reason, wrong", [
    ("0.5.23", None, "FINISH_LENGTH", {("b", 4): LONGER}), ("9.9.9", None, "FINISH_LENGTH", {}),
    ("0.5.23", "s", "FINISH_ABORT", {("b", 4): LONGER}),
])  # fmt: skip
def test_a_match_of_a_text_that_ended_in_flight_is_excused(
    release, session, reason, wrong, written
):
    """Its node has the state of more than that."""
    node = [[1, 2, 3, 4], [1, 2, 3, 4], [], 0, 0]
    states = {"free": [], "tracked": {}, "nodes": [3]}
    of_session = f" of {session}" if session else ""
    count = 1 if session else 0
    opened = events(f"open {session}: done") if session else []
    pages = ["pages", {}, [], [], None, None, [node], states | {"held": {}}]
    lines = [
        *opened,
        *events(f"""
submit a{of_session}: tokens 3, new 3, ids 1 2 3
admit a{of_session}: prefix 0
extend: a tokens 3 C3 A3
step 1: batch 1, sessions {count}, full 61, rows 5, states 7
result: a outputs 1 C3 A3 ids 4
step 2: batch 1, sessions {count}, full 59, rows 5, states 7; a C3 A5
step 3: batch 1, sessions {count}, full 57, rows 5, states 7; a C3 A7
release a{of_session}: reason {reason}, inserts, outputs 2, counted 2, before C4 A7, limit 2, ids 4 5
step 4: sessions {count}, full 60, rows 6, tree_full 4, states 8
"""),
        pages,
        *events(f"""
submit b: tokens 5, new 5, ids 1 2 3 4 9
admit b: prefix 4, R4
extend: b prefix 4 tokens 1 C5 A5 R4
step 5: batch 1, sessions {count}, full 59, rows 5, tree_full 4, tree_locked 4, states 7
"""),
        pages,
    ]
    sizes = {"tree": True, "speculative": True, "overlap": True, **OF_STATES}
    result = validate(written([header(release=release, **sizes), *lines]))
    assert result.wrong_states == wrong


@pytest.mark.parametrize(
    "release, known", [("0.5.23", "queued-abort-finishes-turn"), ("9.9.9", None)]
)
def test_an_abort_in_the_queue_that_counts_as_a_finish(release, known, written):
    """The turn of c1 waits: it gives back a slot that is its session's, and counts."""
    ends = events("""
step 4: queued 2, sessions 2, full 60, rows 5, states 6
release c1.2 of c1: before C4 A4, after C4 A4, limit 2
abort: queued c1.2
step 5: queued 1, sessions 2, full 60, rows 5, states 6
submit c1.3 of c1: tokens 9, new 2
""")
    head = header(release=release, tree=True, **OF_STATES)
    result = validate(written([head, *STATES[:13], *ends]))
    mismatches = [(mismatch.clause, mismatch.event, mismatch.known) for mismatch in result.mismatches]
    assert mismatches == [("SES-2", "release", known)]
    assert result.skipped.total() == (0 if known else 3), (
        "its input is text of the session from then on"
    )
