"""Files of logs: cut ones, unusable ones, parts, and those that grow."""

import json

import pytest

from stateful_tests.watched import log_reader
from stateful_tests.watched.log_reader import LogError, WatchLog, logs_of
from stateful_tests.watched.validator import Validator
from stateful_tests.tests.support.written_logs import LOGS, lines_of, validate


def test_a_cut_log_validates_up_to_there(tmp_path):
    path = tmp_path / "cut.jsonl"
    path.write_bytes(LOGS[0].read_bytes()[:-20])
    (log,) = logs_of([path])
    validated = Validator(log.header).run(log.lines())
    assert not validated.unexplained
    assert log.cut is not None
    assert "has no end" in log.cut


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda lines: lines[1:], "no watcher's log"),
        (lambda lines: [{**lines[0], "format": "other"}, *lines[1:]], "no watcher's log"),
        (lambda lines: [{**lines[0], "version": 9}, *lines[1:]], "version 9 is not supported"),
        (lambda lines: [*lines[:5], lines[0], *lines[5:]], "line 6: a second header"),
        (lambda lines: [*lines[:5], {"event": "step", "number": "x"}], "line 6: "),
        (lambda lines: [*lines[:5], {"event": "grow"}], "line 6: "),
        (lambda lines: [], "is empty"),
    ],
)
def test_unusable_logs_are_one_line(change, says, written):
    with pytest.raises(LogError, match=says):
        validate(written(change(lines_of(LOGS[0]))))


def test_two_processes_in_one_log_part_ways(written):
    one = lines_of(LOGS[0])
    other = lines_of(LOGS[1])
    mixed = [line for pair in zip(one[1:], other[1:]) for line in pair]
    validated = validate(written([one[0], *mixed]))
    assert validated.unexplained and any("come" in what or "missing" in what for what in validated.skipped)


def test_missing_steps_are_reported(written):
    lines = [line for line in lines_of(LOGS[0]) if line.get("number") not in (5, 6)]
    assert "steps 5 to 6 are missing" in validate(written(lines)).skipped


def test_parts_of_one_process_are_one_log(tmp_path):
    lines = LOGS[0].read_text().splitlines(keepends=True)
    (tmp_path / "kvspec-7-0001.jsonl").write_text("".join(lines[:50]))
    (tmp_path / "kvspec-7-0002.jsonl").write_text("".join([lines[0], *lines[50:]]))
    found: list[WatchLog] = logs_of([tmp_path])
    assert len(found) == 1
    assert found[0].bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    assert Validator(found[0].header).run(found[0].lines()).events == len(lines) - 1
    (first,) = logs_of([tmp_path / "kvspec-7-0001.jsonl"])
    assert Validator(first.header).run(first.lines()).events == 49, "the requested part"


def test_parts_of_two_processes_are_no_log(tmp_path):
    head, *lines = LOGS[0].read_text().splitlines(keepends=True)
    other = json.dumps({**json.loads(head), "process": 7}) + "\n"
    (tmp_path / "kvspec-7-0001.jsonl").write_text("".join([head, *lines[:5]]))
    (tmp_path / "kvspec-7-0002.jsonl").write_text("".join([other, *lines[5:9]]))
    (log,) = logs_of([tmp_path])
    with pytest.raises(LogError, match=r"0002\.jsonl: line 1: of another process than"):
        Validator(log.header).run(log.lines())


def test_a_folder_without_logs_is_one_line(tmp_path):
    with pytest.raises(LogError, match=r"there is no \.jsonl in this folder"):
        logs_of(iter([tmp_path]))
    with pytest.raises(LogError, match="none: there is no such file or folder"):
        logs_of([tmp_path / "none"])


@pytest.mark.parametrize("before", [0, 5])
def test_a_part_that_ends_with_its_header_has_no_lines(before, tmp_path):
    """Its server was killed while it wrote."""
    head, *lines = LOGS[0].read_text().splitlines(keepends=True)
    if before:
        (tmp_path / "kvspec-7-0001.jsonl").write_text("".join([head, *lines[:before]]))
    (tmp_path / "kvspec-7-0002.jsonl").write_text(head.rstrip())
    (log,) = logs_of([tmp_path])
    assert len(list(log.lines())) == before and log.cut is None


def test_a_growing_log_is_followed(tmp_path):
    whole = LOGS[0].read_bytes()
    path = tmp_path / "kvspec-7-0001.jsonl"
    path.write_bytes(whole[:1500])
    rest = [whole[1500:3000], whole[3000:]]

    def growing():
        if not rest:
            return False
        with path.open("ab") as file:
            file.write(rest.pop(0))
        return True

    (log,) = logs_of([path])
    validated = Validator(log.header).run(log.lines(growing))
    assert validated.events == whole.count(b"\n") - 1
    assert not validated.unexplained
    assert log.cut is None


def test_lines_of_a_growing_log_are_read_before_the_wait_for_more(tmp_path):
    head, *lines = LOGS[0].read_text().splitlines(keepends=True)
    (tmp_path / "kvspec-7-0001.jsonl").write_text("".join([head, *lines[:5]]))
    (tmp_path / "kvspec-7-0002.jsonl").write_text("".join([head, *lines[5:9]]))
    read = []
    waited = []
    (log,) = logs_of([tmp_path])
    for line in log.lines(lambda: bool(waited.append(len(read)))):
        read.append(line)
    assert waited[0] == len(read) == 9


def test_a_growing_log_rotates(tmp_path):
    """A part is written whole before the next one exists, which is without a header for a moment."""
    head, *lines = LOGS[0].read_bytes().splitlines(keepends=True)
    parts = [tmp_path / f"kvspec-7-{number:04}.jsonl" for number in (1, 2, 3)]
    parts[0].write_bytes(head + lines[0] + lines[1][:20])
    writes = [
        {0: lines[1][20:] + lines[2], 1: b""},
        {1: head[:30]},
        {1: head[30:] + lines[3][:9]},
        {1: lines[3][9:] + b"".join(lines[4:20]), 2: head + b"".join(lines[20:])},
    ]

    def growing():
        for part, text in (writes.pop(0) if writes else {}).items():
            with parts[part].open("ab") as file:
                file.write(text)
        return bool(writes)  # it has ended after it has written

    (log,) = logs_of([parts[0]])
    validated = Validator(log.header).run(log.lines(growing))
    assert validated.events == len(lines)
    assert not validated.unexplained
    assert log.cut is None
    assert not writes
    assert log.files == parts


def test_a_line_that_ends_just_before_the_next_part_begins_is_read_whole(tmp_path, monkeypatch):
    head, *lines = LOGS[0].read_bytes().splitlines(keepends=True)
    path = tmp_path / "kvspec-7-0001.jsonl"
    following = tmp_path / "kvspec-7-0002.jsonl"
    path.write_bytes(head + lines[0][:20])
    looks = iter((False, False, True))
    later = log_reader._later

    def writes_meanwhile(part):
        if next(looks, False):
            path.write_bytes(head + lines[0])
            following.write_bytes(head + b"".join(lines[1:]))
        return later(part)

    monkeypatch.setattr(log_reader, "_later", writes_meanwhile)
    (log,) = logs_of([path])
    validated = Validator(log.header).run(log.lines(lambda: not following.exists()))
    assert validated.events == len(lines) and log.cut is None


def test_a_growing_log_without_parts_ends_with_its_server(tmp_path):
    whole = LOGS[0].read_bytes()
    path = tmp_path / "server.jsonl"
    path.write_bytes(whole[:-5])
    (log,) = logs_of([path])
    alive = iter((True, False))
    validated = Validator(log.header).run(log.lines(lambda: next(alive)))
    assert validated.events == whole.count(b"\n") - 2
    assert log.cut is not None
    assert log.files == [path]


def test_a_line_that_is_too_long_is_not_waited_for(tmp_path, monkeypatch):
    waited = []
    path = tmp_path / "long.jsonl"
    path.write_bytes(LOGS[0].read_bytes().splitlines(keepends=True)[0] + b"[" * 3_000)
    monkeypatch.setattr(log_reader, "MAX_LINE", 2_000)
    (log,) = logs_of([path])
    with pytest.raises(LogError, match="line 2: longer than 2000 bytes"):
        Validator(log.header).run(log.lines(lambda: waited.append(1)))
    assert not waited
