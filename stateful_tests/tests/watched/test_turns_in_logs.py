"""Logs of turns that are rejected, meet a flush or are retracted in a pause."""

from typing import Any

import pytest

from stateful_tests.tests.support.log_lines import event, events, spoilt
from stateful_tests.tests.support.watched_logs import header
from stateful_tests.tests.support.written_logs import validate


SMALL: dict[str, Any] = {
    "window": None, "full_tokens": 64, "swa_tokens": 0, "rows": 6, "width": 64,
}  # fmt: skip

# Two first turns of one session at once, on 0.5.18: the second is rejected, and ends as the session's.
TWO_FIRST_TURNS = events("""
open c1: done
submit c1.1 of c1: tokens 1, new 1
admit c1.1 of c1
extend: c1.1 tokens 1 C1 A1
step 1: batch 1, sessions 1, full 63, rows 5
submit c1.2 of c1: tokens 1, new 1, rejected, why "active request"
admit c1.2 of c1
extend: c1.2 tokens 1 C1 A1
step 2: batch 1, sessions 1, full 62, rows 4
release c1.2 of c1: reason FINISH_ABORT, inserts, outputs 1, before C1 A1, limit 1
step 3: sessions 1, full 62, rows 4
""")


@pytest.mark.parametrize("release, known", [("0.5.18", "rejection-takes-slot"), ("0.5.24", None)])
def test_a_rejected_turn_that_ends_as_the_sessions(release, known, written):
    head = header(**SMALL, release=release, overlap=True)
    validated = validate(written([head, *TWO_FIRST_TURNS]))
    assert [(m.clause, m.event, m.known) for m in validated.mismatches] == [("SES-2", "release", known)]
    assert validated.skipped["events after a mismatch, up to the next snapshot"] == 1


# A turn, a flush, the next turn of its session.
A_FLUSH = events("""
open c1: done
submit c1.1 of c1: tokens 2, new 2
admit c1.1 of c1
extend: c1.1 tokens 2 C2 A2
step 1: batch 1, sessions 1, full 62, rows 5
release c1.1 of c1: reason FINISH_LENGTH, inserts, outputs 1, counted 1, before C2 A2, after C2 A2, limit 1
step 2: sessions 1, full 62, rows 5
flush
step 3: sessions 1, full 64, rows 6
submit c1.2 of c1: tokens 4, new 1
admit c1.2 of c1
extend: c1.2 tokens 4 C4 A4
step 4: batch 1, sessions 1, full 60, rows 5
""")


@pytest.mark.parametrize("at, to, found", [
    (7, 7, []), (7, 5, [("OUT-1", "flush")]),
    (7, None, [
        ("OWN-3", "step"), ("OWN-4", "step"), ("LEN-3", "admit"), ("OWN-3", "step"), ("OWN-4", "step"),
    ]),
])  # fmt: skip
def test_after_a_flush_a_session_keeps_nothing(at, to, found, written):
    """It is in the log, where it was made, or before its turn has ended."""
    lines = [*A_FLUSH]
    flush = lines.pop(at)
    if to is not None:
        lines = [*lines[:to], flush, *lines[to:]]
    head = header(**SMALL)
    result = validate(written([head, *lines]))
    assert [(mismatch.clause, mismatch.event) for mismatch in result.unexplained] == found
    assert result.reached["a flush of what sessions keep"] == (to == 7)


def test_a_flush_leaves_nothing_in_the_tree(written):
    head = header(**SMALL, tree=True)
    (mismatches,) = validate(written([head, event("flush: tree 5")])).unexplained
    assert (mismatches.clause, mismatches.event, mismatches.observed) == ("OUT-1", "flush", "5 are there")


@pytest.mark.parametrize("release, known", [
    ("0.5.23", "flush-under-a-waiting-state"), ("0.5.24", None)])  # fmt: skip
def test_a_flush_spares_the_state_of_a_turn_that_waits(release, known, written):
    """Its first look at the tree has given it a slot, and there was no room."""
    lines = events("""
open c1: done
submit c1.1 of c1: tokens 9, new 9
admit c1.1 of c1: prefix 4, R4
step 1: queued 1, sessions 1, full 60, rows 6, tree_full 4, states 7
flush
""")
    head = header(**SMALL, release=release, states=8, tree=True)
    mismatches = validate(written([head, *lines])).mismatches
    assert [(m.clause, m.event, m.known) for m in mismatches] == [("STA-6", "flush", known)]
    others = spoilt(lines, "2 session no; 3 session no; 4 states 8")
    assert not validate(written([head, *others])).mismatches, "only turns of sessions keep the slot"


# An operator pauses the server between two chunks of a turn.
A_PAUSE = events("""
open c1: done
submit c1.1 of c1: tokens 12, new 12
admit c1.1 of c1
extend: c1.1 tokens 8 C8 A8
step 1: batch 1, sessions 1, full 56, rows 5
release c1.1 of c1: before C8 A8, after C8 A8, limit 2
requeue c1.1
admit c1.1 of c1: prefix 8, C8 A8
extend: c1.1 prefix 8 tokens 4 C12 A12
step 2: batch 1, sessions 1, full 52, rows 5
""")


@pytest.mark.parametrize("kept, found", [(8, []), (4, [("LEN-2", "release"), ("LEN-2", "admit")])])
def test_a_turn_that_is_retracted_between_two_chunks_keeps_what_it_has_computed(
    kept, found, written
):
    lines = spoilt(A_PAUSE, f"6 after C{kept} A{kept}")
    head = header(**SMALL)
    result = validate(written([head, *lines]))
    assert [(mismatch.clause, mismatch.event) for mismatch in result.unexplained] == found
    assert result.reached["a retract between two chunks"] == 1
    assert not result.reached["a retract before the first result"]
