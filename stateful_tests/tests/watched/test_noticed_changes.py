"""What the validator notices: one log for each guard, changed at one place; what validation must say then.

The rows of noticed.txt, and what can be changed in many ways.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from impl.sglang.server.events import FIELDS, WatchHeader
from stateful_tests.tests.support.accepted import accepted_values
from stateful_tests.tests.support.log_lines import JsonLine, event, header_fields, spoilt
from stateful_tests.tests.support.row_files import paragraphs
from stateful_tests.tests.support.watched_logs import header
from stateful_tests.watched.log_reader import logs_of
from stateful_tests.watched.validation_results import Validated
from stateful_tests.watched.server_situation import situation
from stateful_tests.watched.validator import Validator

Log = list[JsonLine]
PIECES: dict[str, Log] = {}
SKIPPED = "events after a mismatch, up to the next snapshot"


class Row(NamedTuple):
    """A log, what its header has otherwise, and all that validation says."""

    title: str
    header: dict[str, Any]
    log: Log
    outcome: str


def rows() -> Iterator[Row]:
    """Yield the rows of noticed.txt; its pieces stand before them."""
    for title, on, lines, outcome, _ in paragraphs(Path(__file__).with_name("noticed.txt")):
        log = [event for line in lines for event in events(line)]
        if outcome:
            yield Row(title, header_fields(on), log, outcome)
        else:
            PIECES[title] = log


def events(line: str) -> Log:
    """Return an event, or what is written of a piece: its lines, and changes in the words of a
    line."""
    head, _, changes = line.partition(": ")
    name, *numbers = head.split()
    if name not in PIECES:
        return [event(line)]
    log = spoilt(PIECES[name], changes)
    bounds = (number.partition("-") for number in numbers or [f"1-{len(log)}"])
    return [event for a, _, b in bounds for event in log[int(a) - 1 : int(b or a)]]


def copy(*logs: Log) -> Log:
    return json.loads(json.dumps([event for log in logs for event in log]))


ROWS = list(rows())
TURN, FINISH, WITHOUT_OUTPUT = (PIECES[name] for name in ("TURN", "FINISH", "WITHOUT_OUTPUT"))


@pytest.fixture
def validate(tmp_path) -> Callable[..., Validated]:
    def run(lines: Log, **changes: Any) -> Validated:
        path = tmp_path / "log.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in (header(**changes), *lines)))
        (log,) = logs_of([path])
        assert isinstance(log.header, WatchHeader)
        return Validator(log.header).run(log.lines())

    return run


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.title)
def test_validation_says(row, validate):
    validated = validate(row.log, **row.header)
    parts = [
        f"{m.clause} {m.event}"
        + (f" of {m.expected.partition(':')[0]}" if m.clause == "REF-1" else "")
        + (f" ({m.known})" if m.known else "")
        for m in validated.mismatches
    ]
    parts += [
        f"skipped: {count} {what}" for what, count in validated.skipped.items() if what != SKIPPED
    ]
    parts += [f"the server's choice: {count} {what}" for what, count in validated.policy.items()]
    parts += [f"never computed: {session} {position}" for session, position in sorted(validated.holes)]
    parts = parts or [name for name in ("prepared", "parked", "next_chunk") if getattr(validated, name)]
    assert ("; ".join(parts) or "conforms") == row.outcome


def test_mismatches_of_rows_have_their_words(validate):
    words = defaultdict[str, set[str]](set)
    for row in ROWS:
        for mismatch in validate(row.log, **row.header).mismatches:
            words[mismatch.clause].add(f"{mismatch.expected}; {mismatch.observed}")
    found = {clause: sorted(each) for clause, each in words.items()}
    assert found == accepted_values("noticed_words", found)


def first(found: Validated) -> tuple[str, str]:
    assert found.unexplained, "nothing was noticed"
    return found.unexplained[0].clause, found.unexplained[0].event


COUNTS = [
    ("batch", "OUT-1"), ("queued", "SES-2"), ("sessions", "SES-2"), ("full", "OWN-3"), ("swa", "OWN-3"),
    ("rows", "OWN-4"), ("tree_full", "OWN-3"), ("tree_swa", "OWN-3"),
]  # fmt: skip


@pytest.mark.parametrize("by", [1, -1])
@pytest.mark.parametrize("field, clause", COUNTS)
def test_each_count_of_a_step_has_a_clause(field, clause, by, validate):
    lines = copy(TURN, FINISH)
    (at,) = [n for n, line in enumerate(lines) if line[:2] == ["step", 3]]
    lines[at][1 + FIELDS["step"].index(field)] += by
    assert first(validate(lines)) == (clause, "step")


@pytest.mark.parametrize(
    "cursor, by", [(c, by) for c in range(4) for by in (1, -1) if c != 3 or by > 0]
)
def test_cursors_after_a_finish_without_output(cursor, by, validate):
    lines = copy(WITHOUT_OUTPUT)
    if cursor == 2 and by < 0:
        by = 2
    lines[-2][1 + FIELDS["release"].index("after")][cursor] += by
    mismatch = validate(lines).unexplained[0]
    assert (mismatch.event, mismatch.command) == ("release", "finish c1.1 keep 0")


PAGES = Path(__file__).parents[3] / "fixtures" / "watched" / "sglang-0.5.23-pages.jsonl"


def test_outputs_of_an_end_are_those_of_its_results(validate):
    head, *lines = map(json.loads, PAGES.read_text().splitlines())
    end = next(
        line for line in lines if line[0] == "release" and line[-1] and line[3] == "FINISH_LENGTH"
    )
    end[-1][0] += 1
    mismatch = validate(lines, **head).unexplained[0]
    assert (mismatch.clause, mismatch.event) == (
        "SES-1",
        "release",
    )
    assert "outputs of" in mismatch.expected


@pytest.mark.parametrize(
    "change, clause",
    [
        (lambda s: s[3][0].update(cursors=[6, 6, 1, 0]), "LEN-4"),
        (lambda s: s[3][0].update(tokens=2), "SES-1"),
        (lambda s: s[3][0].update(outputs=4), "SES-1"),
        (lambda s: s[3][0].update(session=None), "OUT-1"),
        (lambda s: s[2].clear(), "SES-2"),
        (lambda s: s[3].clear(), "SES-2"),
    ],
)
def test_a_changed_snapshot_is_a_mismatch(change, clause, validate):
    """At the beginning what follows differs; in the middle the snapshot itself does."""
    lines = copy(PIECES["SNAPSHOT"], FINISH)
    change(lines[0])
    in_the_middle = validate([*TURN, *lines])
    assert in_the_middle.unexplained[0].event == "snapshot" or clause == "SES-1"
    assert validate(lines).unexplained


def test_the_observed_length_of_a_row_follows_from_its_pages(validate):
    head = {"window": None, "full_tokens": 8, "swa_tokens": 0, "rows": 2, "width": 8}
    mismatches = validate(events("PAGED: 8 owner c1 C5 A5 R6"), **head).unexplained
    (mismatch,) = [mismatch for mismatch in mismatches if mismatch.clause == "LEN-4"]
    assert mismatch.expected.startswith("c1: ") and ":" not in mismatch.observed
    assert all(mismatch.expected != mismatch.observed for mismatch in mismatches)


def test_the_first_mismatches_are_kept(validate, monkeypatch):
    monkeypatch.setattr("stateful_tests.watched.log_follower.MAX_FOUND", 1)
    validated = validate(events("TURN: 5 rows 9; 8 rows 8"))
    assert (len(validated.unexplained), validated.more) == (1, 2)
    monkeypatch.setattr("stateful_tests.watched.log_follower.MAX_OF_KNOWN", 1)
    steps = [event(f"step {at}: full {32 + at}, swa 32, rows 4") for at in (1, 2, 3)]
    validated = validate(steps, tree=True, release="0.5.20", window=6, page_size=4)
    assert (len(validated.mismatches), validated.known["swept-too-far"]) == (1, 3)


def test_after_a_mismatch_the_next_snapshot_is_taken(validate):
    validated = validate([*events("TURN: 7 c1.1 tokens 2"), *PIECES["SNAPSHOT"], *FINISH])
    assert len(validated.unexplained) == 1 and validated.given == 2
    assert validated.skipped[SKIPPED] == 4 and validated.commands["Finish"] == 1


@pytest.mark.parametrize("lines, reached", [
    (events("TURN") + events("RETRACT"), {"a retract": 1}),
    (events("TURN 1-8") + events("release c1.1 of c1: outputs 1, before C3 A3, after C3 A3, limit 9"),
     {"a retract": 1}),
    (events("TURN 1-8") + events("release c1.1 of c1: before C3 A3, after C3 A3, limit 9"),
     {"a retract": 1, "a retract before the first result": 1}),
])  # fmt: skip
def test_which_retracts_are_reached(lines, reached, validate):
    validated = validate(lines, overlap=True)
    assert {name: count for name, count in validated.reached.items() if "retract" in name} == {
        "a retract of a session's turn": 1,
        **reached,
    }


def test_another_text_differs_at_a_position(validate):
    mismatch = validate(events("TEXTS 1-7: 7 ids 1 5 3 4")).unexplained[0]
    assert "at position 1 " in mismatch.observed


@pytest.mark.parametrize("lines, says", [
    ([], ""),
    (events("TURN"), "since step 4 a batch of 1 has run, in which c1.1 decode; 0 wait; tokens of KV: c1 5;"
                     " 27 were free at that step, SWA 28"),
    (events("TURN 1-6"), "since step 1 admission looked at c1.1 (between two chunks, 2 of 3 tokens);"
                         " a batch of 1 has run; 0 wait; tokens of KV: c1 2; 30 were free at that step,"
                         " SWA 30"),
])  # fmt: skip
def test_a_situation_in_a_sentence(lines, says, validate, tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in (header(), *lines)))
    (log,) = logs_of([path])
    validator = Validator(log.header)
    validator.run(log.lines())
    assert situation(validator) == says


def test_an_end_without_output_is_a_finish(validate):
    assert validate(copy(WITHOUT_OUTPUT)).commands["Finish"] == 1
