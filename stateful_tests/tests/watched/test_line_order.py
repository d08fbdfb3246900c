"""Running numbers of lines: a line that is lost, stands twice or elsewhere is never a fault of the server."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from impl.sglang.server.events import VERSION
from stateful_tests.tests.support.log_lines import events, spoilt
from stateful_tests.watched.log_follower import AFTER_A_GAP, AFTER_A_MISMATCH
from stateful_tests.watched.line_order import HELD
from stateful_tests.watched.log_reader import LogError, WatchLog, logs_of
from stateful_tests.watched.validation_results import Validated
from stateful_tests.watched.validator import Validator

FOLDER = Path(__file__).parents[3] / "fixtures" / "watched"
LOGS = sorted(FOLDER.glob("*.jsonl"))
Lines = list[str]


def number_lines(log: Path) -> Lines:
    """Return a log as a server writes it today."""
    head, *lines = log.read_text().splitlines()
    head = json.dumps({**json.loads(head), "version": VERSION})
    return [head, *(f"[{index},{line}]" for index, line in enumerate(lines, 1))]


def validate_lines(lines: Lines, folder: Path) -> tuple[WatchLog, Validated]:
    path = folder / "log.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    (log,) = logs_of([path])
    return log, Validator(log.header).run(log.lines())


def each_tenth(change: Callable[[str], Lines]) -> Callable[[Lines], Lines]:
    def change_log(lines: Lines) -> Lines:
        return [
            new
            for index, line in enumerate(lines)
            for new in (change(line) if index and index % 10 == 0 else [line])
        ]

    return change_log


def swap_lines(lines: Lines) -> Lines:
    lines = [*lines]
    for index in range(10, len(lines) - 1, 10):
        lines[index : index + 2] = lines[index + 1], lines[index]
    return lines


lost = each_tenth(lambda _: [])
doubled = each_tenth(lambda line: [line, line])
cut = each_tenth(lambda line: [line[: len(line) // 2]])


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.stem)
@pytest.mark.parametrize("change", [lost, doubled, swap_lines, cut])
def test_a_log_that_was_damaged_shows_no_mismatch(log, change, tmp_path):
    lines = number_lines(log)
    read, result = validate_lines(change(lines), tmp_path)
    tenths = (len(lines) - 1) // 10
    assert not result.unexplained
    unjudged = result.skipped[AFTER_A_GAP] + result.skipped[AFTER_A_MISMATCH]
    if change in (lost, cut):
        at_end = 1 if (len(lines) - 1) % 10 == 0 else 0  # what nothing follows is not missed
        assert read.order.lost == tenths - at_end and unjudged
        assert read.damaged == (tenths if change is cut else 0)
        return
    # Nothing is missing: it is judged as if it had not been touched.
    assert not unjudged and result.events == len(lines) - 1
    as_it_is = validate_lines(lines, tmp_path)[1]
    assert (result.commands, result.known) == (as_it_is.commands, as_it_is.known)
    says = "lines stood twice" if change is doubled else "lines stood in another place"
    assert read.put_right == f"{read.order.repeated or read.order.moved} {says}"


def test_findings_before_a_gap_stay(tmp_path):
    """The numbers say that nothing is missing up to there."""
    lines = number_lines(FOLDER / "sglang-0.5.23-window_and_chunk_cache.jsonl")
    line_index = next(
        line_index
        for line_index, line in enumerate(lines)
        if '"release"' in line and "FINISH" in line
    )
    number, event = json.loads(lines[line_index])
    event[7][0] += 3
    lines[line_index] = json.dumps([number, event])
    found = validate_lines([*lines[: line_index + 2], *lines[line_index + 3 :]], tmp_path)[1]
    assert found.unexplained and found.skipped["lines that are missing"] == 1


@pytest.mark.parametrize("late", [HELD, HELD + 1])
def test_a_line_is_waited_for_and_then_given_up(late, tmp_path):
    """One that comes still later stands twice as far as its number says."""
    lines = number_lines(FOLDER / "sglang-0.5.23-tree_under_overlap.jsonl")
    line = lines.pop(40)
    lines.insert(40 + late, line)
    read, found = validate_lines(lines, tmp_path)
    assert not found.unexplained
    counts = read.order.lost, read.order.moved, read.order.repeated
    assert counts == ((0, 1, 0) if late <= HELD else (1, 0, 1))


def test_a_later_part_begins_with_its_own_number(tmp_path):
    lines = number_lines(FOLDER / "sglang-0.5.23-clients_that_do_not_wait.jsonl")
    line_index = next(
        line_index for line_index, line in enumerate(lines) if line_index and '["snapshot"' in line
    )
    head = json.dumps({**json.loads(lines[0]), "part": 2})
    read, found = validate_lines([head, *lines[line_index:]], tmp_path)
    assert not found.unexplained
    assert not found.skipped
    assert read.order.lost == 0


def test_a_second_header_is_no_log(tmp_path):
    lines = number_lines(LOGS[0])
    with pytest.raises(LogError, match="line 6: a second header"):
        validate_lines([*lines[:5], lines[0], *lines[5:]], tmp_path)


def test_judging_goes_on_at_a_step_of_an_empty_server(tmp_path):
    """Nobody runs, waits, has a row or a session: the state is known."""
    lines = [*number_lines(FOLDER / "sglang-0.5.23-window_and_chunk_cache.jsonl")[:40]]
    head = json.loads(lines[0])
    rows = head["rows"]
    full = head["full_tokens"]
    swa = head["swa_tokens"]
    del lines[20]
    later = events(f"""
step 900: full {full}, swa {swa}, rows {rows}
open z: done
submit z.1 of z: tokens 3, new 3
""")
    numbers = [*enumerate(later, 41)], [*enumerate(spoilt(later, "1 sessions 1"), 41)]
    idle, busy = ([*lines, *map(json.dumps, number)] for number in numbers)
    unjudged = [validate_lines(each, tmp_path)[1].skipped[AFTER_A_GAP] for each in (idle, busy)]
    assert unjudged[1] - unjudged[0] == 3


def test_judging_goes_on_with_a_snapshot_that_differs(tmp_path):
    """It is a mismatch, and a state to go on with."""
    lines = number_lines(FOLDER / "sglang-0.5.23-clients_that_do_not_wait.jsonl")
    line_index = next(
        line_index
        for line_index, line in enumerate(lines)
        if line_index > 110 and '["snapshot"' in line
    )
    number, event = json.loads(lines[line_index])
    event[2][0]["cursors"][2] += 2
    lines[line_index] = json.dumps([number, event])
    found = validate_lines(lines, tmp_path)[1]
    assert [(mismatch.clause, mismatch.event) for mismatch in found.unexplained] == [("LEN-4", "snapshot")]
    assert not found.skipped


def test_judging_goes_on_with_cursors_that_differ(tmp_path):
    """A finish keeps a page too many: whatever comes later is judged as well."""
    lines = number_lines(FOLDER / "sglang-0.5.23-window_and_chunk_cache.jsonl")
    line_index = next(
        line_index
        for line_index, line in enumerate(lines)
        if '["release"' in line and "FINISH" in line
    )
    number, event = json.loads(lines[line_index])
    event[8][1] += 4
    lines[line_index] = json.dumps([number, event])
    found = validate_lines(lines, tmp_path)[1]
    assert found.unexplained[0].clause == "LEN-2" and not found.skipped
    assert found.unexplained[0].line == line_index + 1
