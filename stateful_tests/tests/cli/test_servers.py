"""kvspec validate and setup-server on the command line."""

import json
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import msgspec
import pytest

from ci.cli import run
from ci.commands import server_checks, log_validation
from ci.commands.log_validation import LogReading, LogReadings
from ci.commands.options import server_settings
from ci.report.operator_effects import effect
from impl.adapter import UnusableImplementation
from impl.sglang.parts.fetch import release_root
from impl.sglang.server import environment, runs
from impl.sglang.server.clients import Config
from reference.clauses import CLAUSES
from stateful_tests.check.known_faults import masks as masking

WATCHED = Path(__file__).parents[3] / "fixtures" / "watched"
LOG = str(WATCHED / "sglang-0.5.23-window_and_chunk_cache.jsonl")
NOT_IN_A_LOG = ("CHK", "END", "FREE")  # they judge what a log does not show
SPECULATION = str(WATCHED / "sglang-0.5.23-speculation_under_overlap.jsonl")


@pytest.fixture
def wrong(tmp_path):
    """A log in which a finish forgets a page."""
    head, *lines = [json.loads(line) for line in Path(LOG).read_text().splitlines()]
    reason, after = (1 + head["fields"]["release"].index(name) for name in ("reason", "after"))
    release = next(e for e in lines if e[0] == "release" and e[after] and e[reason])
    release[after][1] += 4
    path = tmp_path / "wrong.jsonl"
    head["process"] = ended_process()
    path.write_text("".join(json.dumps(line) + "\n" for line in (head, *lines)))
    return str(path)


def ended_process():
    """Return the number of a process that has ended, as that of a recorded log may run here."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def log_of_ended_server():
    """Return the text of LOG, whose server has ended."""
    return re.sub('"process":[0-9]+', f'"process":{ended_process()}', Path(LOG).read_text(), count=1)


def test_a_mismatch_is_reported_and_its_commands_are_saved(wrong, tmp_path, capsys):
    report = tmp_path / "report.json"
    assert run(["validate", wrong, "--json", str(report), "--save", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert "LEN-2 (finish and retract cap at target)" in text and "wrong.jsonl:" in text
    assert "!kv_allocated_len" in text and "!kv_committed_len" not in text
    data = json.loads(report.read_text())
    assert data["exit_code"] == 1 and data["logs"][0]["mismatches"][0]["clause"] == "LEN-2"
    assert run(["replay", data["logs"][0]["saved"], "--impl", "reference"]) == 0


@pytest.mark.parametrize("strict", [(), ("--strict",)])
def test_a_log_without_an_event_is_incomplete(strict, tmp_path, capsys):
    empty = tmp_path / "empty.jsonl"
    empty.write_text(Path(LOG).read_text().splitlines(keepends=True)[0])
    assert run(["validate", str(empty), *strict]) == 4
    assert "incomplete: the log has a header and no event" in capsys.readouterr().out
    assert run(["validate", str(empty), LOG, *strict]) == 4
    end = capsys.readouterr().out
    assert "incomplete: 1 of 2 logs have a header and no event (2 logs, 285 events" in " ".join(
        end.split()
    )


def test_known_faults_are_named_in_the_words_of_a_check(tmp_path, capsys):
    report = tmp_path / "report.json"
    assert run(["validate", LOG, SPECULATION, "--json", str(report)]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("known faults (kvspec bugs NAME has more, -v shows where):")
    log, _, fault, effects, *total = lines[at - 1 :]
    data = json.loads(report.read_text())
    assert log == data["verdict"] == "nothing new; known faults: last-token (5)"
    assert fault.startswith("  last-token, 5 times in 1 of 2 logs: ") and "effect: " in effects
    assert "upstream" not in " ".join(lines)
    assert run(["validate", "-v", LOG, SPECULATION]) == 0
    assert "upstream: no report found" in capsys.readouterr().out
    read = "2 logs, 673 events, 224 steps, 457 commands, "
    assert f"{log} ({read}" in " ".join(" ".join(total).split())
    assert data["events"] == sum(log["events"] for log in data["logs"]) == 673


def test_follow_ends_with_the_server(wrong, capsys):
    assert run(["validate", "--follow", wrong]) == 1
    said = capsys.readouterr()
    assert said.out.count("LEN-2 (") == 1, "at once, and not again in the report"
    assert "kvspec clauses LEN-2" in said.out and "no process" in said.err


def test_all_logs_are_followed_at_once_and_those_that_begin_meanwhile(wrong, tmp_path):
    server = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    texts = [
        re.sub('"process":[0-9]+', f'"process":{server.pid}', Path(log).read_text(), count=1)
        for log in (LOG, wrong)
    ]
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "first.jsonl").write_text(texts[0])
    readings = LogReadings([str(folder)], None)
    begun = list[str]()

    def tell(found):
        assert found.file.endswith("later.jsonl")
        if server.poll() is None:  # told while it runs; what follows from the first comes after it
            server.communicate(b"\n")

    reads = LogReading.read
    begin = iter([partial((folder / "later.jsonl").write_text, texts[1])])

    def read(reading, *given):
        next(begin, lambda: None)()
        reads(reading, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LogReading, "read", read)
        readings.follow(tell, lambda each: begun.append(each.log.files[0].name))
    assert begun == ["first.jsonl", "later.jsonl"]
    assert [reading.log.files[0].name for reading in readings.logs.values()] == [
        "first.jsonl",
        "later.jsonl",
    ]
    assert [bool(reading.validator.result.unexplained) for reading in readings.logs.values()] == [False, True]


def test_a_folder_without_a_log_is_waited_for(tmp_path, monkeypatch):
    looks = iter(
        [lambda: None, partial((tmp_path / "log.jsonl").write_text, log_of_ended_server())]
    )
    monkeypatch.setattr(log_validation.time, "sleep", lambda _: next(looks, lambda: None)())
    assert run(["validate", "--follow", str(tmp_path)]) == 0


def test_a_log_without_its_header_is_waited_for(tmp_path, monkeypatch):
    log = tmp_path / "log.jsonl"
    text = log_of_ended_server()
    log.write_text("")
    looks = iter([lambda: None, partial(log.write_text, text)])
    monkeypatch.setattr(log_validation.time, "sleep", lambda _: next(looks, lambda: None)())
    assert run(["validate", "--follow", str(tmp_path)]) == 0


def test_an_error_while_following_is_raised(monkeypatch):
    def fails(reading, line):
        raise ZeroDivisionError(line.number)

    monkeypatch.setattr(log_validation.Validator, "read", fails)
    with pytest.raises(ZeroDivisionError):
        LogReadings([LOG], None).follow(None, lambda reading: None)


def test_a_log_whose_first_part_is_deleted_meanwhile_is_read_once(tmp_path):
    head, *lines = Path(LOG).read_bytes().splitlines(keepends=True)
    parts = [tmp_path / f"kvspec-7-{number:04}.jsonl" for number in (1, 2)]
    for part, text in zip(parts, (lines[:20], lines[20:]), strict=True):
        part.write_bytes(head + b"".join(text))
    readings = LogReadings([str(tmp_path)], None)
    assert len(readings.new_readings()) == 1
    parts[0].unlink()
    assert not readings.new_readings() and len(readings.logs) == 1


def test_a_file_that_is_no_log_hides_no_other(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "b.jsonl").write_text(Path(LOG).read_text())
    assert run(["validate", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert "a.jsonl: line 1: no watcher's log" in said.err
    assert "conforms 1 of 2 logs could not be read (1 log, 285" in " ".join(said.out.split())


def test_a_log_that_cannot_be_read_hides_no_mismatch(wrong, tmp_path, capsys):
    garbage = tmp_path / "garbage.jsonl"
    garbage.write_text("{}\n")
    assert run(["validate", wrong, str(garbage)]) == 1
    assert "1 of 2 logs could not be read" in " ".join(capsys.readouterr().out.split())


def test_a_report_overwrites_no_log(wrong, tmp_path, capsys):
    was = Path(wrong).read_text()
    assert run(["validate", "--json", wrong, LOG]) == 2
    assert f"--json {wrong}: is a watcher's log" in capsys.readouterr().err
    assert Path(wrong).read_text() == was


def test_a_mismatch_has_a_time_and_an_effect(wrong, tmp_path, capsys):
    timed = tmp_path / "timed.jsonl"
    lines = Path(wrong).read_text().splitlines()
    steps = [json.loads(line) for line in lines if line.startswith('["step"')]
    text = "\n".join(
        json.dumps([*json.loads(line)[:12], 0, 1.7e9]) if line.startswith('["step"') else line
        for line in lines
    )
    timed.write_text(text + "\n")
    assert len(steps[0]) <= 13 and run(["validate", str(timed)]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "time 2023-11-14 22:13:20.000 UTC" in said and "effect answers of this session" in said


@pytest.mark.parametrize(
    ("clause", "observed", "says"),
    [
        ("OWN-3", "24 (-4)", "leak"),
        ("OWN-3", "28 (-8, -4 at the step before)", "leak"),
        ("OWN-3", "32 (+4, -4 at the step before)", "answers may be wrong"),
        # One cause: a count that comes back is no new effect, and one that turned says the same on.
        ("OWN-3", "32 (+0, -4 at the step before)", "the count is right again"),
        ("OWN-3", "24 (-4, +4 at the step before)", "answers may be wrong"),
        ("OUT-3", "5", "answers may be wrong"),
        ("TREE-3", "", "answers may be wrong"),
    ],
)
def test_a_mismatch_has_its_effect_in_words(clause, observed, says):
    assert effect(clause, observed).startswith(says)


def test_a_mismatch_may_make_no_answer_wrong():
    assert effect("TREE-11", "").endswith("makes no answer wrong")


def test_every_clause_of_a_log_has_an_effect():
    assert all(effect(clause, "") for clause in CLAUSES if clause.split("-")[0] not in NOT_IN_A_LOG)


def test_a_gap_is_no_mismatch(tmp_path, capsys):
    """What follows it up to a snapshot says nothing: in a log without one, most is not judged."""
    cut = tmp_path / "cut.jsonl"
    lines = Path(SPECULATION).read_text().splitlines(keepends=True)
    cut.write_text("".join(lines[:40] + lines[60:]))
    assert run(["validate", str(cut)]) == 4
    said = " ".join(capsys.readouterr().out.split())
    assert " are missing; " in said and "the others were not judged; incomplete" in said


@pytest.fixture
def log_of(tmp_path):
    """Return a function that gives the file of a log that names another release."""

    def write(release):
        fork = tmp_path / "fork.jsonl"
        fork.write_text(Path(SPECULATION).read_text().replace('"0.5.23"', f'"{release}"', 1))
        return str(fork)

    return write


def test_a_log_of_an_unknown_release_is_judged_without_known_faults(log_of, capsys):
    assert run(["validate", log_of("0.6.1")]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "--release 0.5.23 counts the faults of that as known" in said
    assert said.endswith("5 mismatches"), "all of it is judged"


def test_a_server_is_taken_for_the_release_that_the_user_names(log_of, capsys):
    assert run(["validate", log_of("0.6.1"), "--release", "0.5.23"]) == 0
    assert "known faults: last-token" in capsys.readouterr().out


def test_a_local_version_has_the_known_faults_of_its_release(log_of, capsys):
    assert run(["validate", log_of("0.5.23.post1+corp")]) == 0
    assert "the known faults are those of 0.5.23" in capsys.readouterr().out


def test_a_release_before_the_first_has_no_known_faults(log_of, capsys):
    assert run(["validate", log_of("0.5.9")]) == 1
    assert "nobody has looked for its faults" in capsys.readouterr().out


def test_events_are_listed(capsys):
    assert run(["validate", "--events"]) == 0
    assert "evict_swa" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, says",
    [
        ([], "give a LOG"),
        (["nothing.jsonl"], "there is no such file or folder"),
        ([LOG, "--release", "0.6.1"], "nobody has looked"),
        ([__file__], "no watcher's log"),
    ],
)
def test_unusable_input_is_reported_in_one_line(arguments, says, capsys):
    assert run(["validate", *arguments]) == 2
    complaint = capsys.readouterr().err
    assert says in complaint and complaint.count("\n") == 1


def test_a_huge_number_in_a_log_is_one_line(tmp_path, capsys):
    lines = Path(LOG).read_text().splitlines()
    lines[3] = lines[3].replace(",", f",{'9' * 5000},", 1)
    file = tmp_path / "huge.jsonl"
    file.write_text("\n".join(lines))
    assert run(["validate", str(file)]) == 2
    complaint = capsys.readouterr().err
    assert "huge.jsonl: line 4: " in complaint and complaint.count("\n") == 1


def test_help_describes_each_field_of_set(capsys):
    assert run(["serve-check", "--help"]) == 0
    page = capsys.readouterr().out
    for field in Config.__struct_fields__:
        assert re.search(rf"^  {field}=(N|0.1) +[\w']", page, re.M), field


@pytest.mark.parametrize(
    "impl, given, says",
    [
        ("0.5.18", ["states=30"], "recurrent layers run in 0.5.23; this is 0.5.18"),
        ("0.5.23", ["page_size=0"], "expected page_size=N with a number of at least 1"),
        ("0.5.23", ["page_size=9"], "at most 8"),
        ("0.5.23", ["chunk=10", "page_size=4"], "a chunk is whole pages"),
        ("0.5.23", ["running=0"], "expected running=N with a number of at least 1"),
        ("0.5.23", ["tokens=5"], "expected tokens=N with a number of at least 6"),
        ("0.5.23", ["track=8"], "needs --set states=N"),
        ("0.5.23", ["states=30", "lazy=1"], "needs --set track=N"),
        ("0.5.23", ["states=30", "track=4", "page_size=8"], "a multiple of --set page_size"),
        ("0.5.23", ["priority=3"], "one of 0 none, 1 greatest, 2 smallest; not 3"),
        ("0.5.23", ["threshold=1"], "needs --set priority=1 or 2"),
        ("0.5.23", ["lowest=1", "priority=0"], "needs --set priority=1 or 2"),
        ("0.5.14", ["lowest=1", "priority=1"], "0.5.23 retracts so; this is 0.5.14"),
        ("0.5.23", ["states=30", "track=8", "lazy=2"], "expected lazy=N with 0 or 1"),
        ("0.5.23", ["states=30", "track=8", "lazy=1", "overlap=0"], "needs overlap"),
        ("0.5.23", ["states=30", "window=4"], "a server with --set states has none"),
        ("0.5.23", ["states=30", "track=6", "draft=4"], "at least twice --set draft"),
        ("0.5.23", ["states=4"], "at least 5"),
        ("0.5.23", ["states=30", "track=0", "overlap=1"], "neither overlap nor pages"),
    ],
)
def test_recurrent_layers_go_with_the_rest_of_a_server(impl, given, says, capsys):
    args = [part for setting in given for part in ("--set", setting)]
    assert run(["serve-check", "--impl", f"sglang=={impl}", *args]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "given, says",
    [
        (["--runs", "0"], "range"),
        (["--again", LOG], "kvspec validate reads it"),
    ],
)
def test_unusable_options_of_serve_check(given, says, capsys):
    assert run(["serve-check", *given]) == 2
    assert says in capsys.readouterr().err


def test_what_a_host_tier_of_a_pair_excludes_is_switched_off():
    """By values of the right type: a worker takes no number for a switch."""
    given = {"pair": True, "decode_hicache": True}
    server_settings._require_pair_tiers(given)
    assert given["prefill_complete"] is False
    built = Config(**given)
    assert msgspec.convert(msgspec.to_builtins(built), Config) == built


@pytest.mark.parametrize("impl, given, says", [
    ("0.5.20", ["hicache=1"], "a host tier runs in 0.5.23; this is 0.5.20"),
    ("0.5.23", ["policy=1"], "needs --set hicache=1"),
    ("0.5.23", ["hicache=0", "host=6"], "needs --set hicache=1"),
    ("0.5.23", ["hicache=1", "states=30", "track=8"], "--set track: a server with --set hicache=1 and --set"),
    ("0.5.23", ["hicache=1", "states=30", "overlap=1"], "--set overlap: a server with --set hicache=1 and"),
    ("0.5.23", ["hicache=1", "states=30", "page_size=4"], "--set page_size: a server with --set hicache=1"),
    ("0.5.23", ["hicache=1", "states=30", "mixed=1"], "--set mixed: a server with --set hicache=1 and --set"),
    ("0.5.23", ["hicache=1", "states=30", "storage=1"], "--set storage: a server with --set hicache=1 and"),
    ("0.5.23", ["rust=1"], "--set rust: a setting of a host tier; needs --set hicache=1"),
    ("0.5.23", ["hicache=1", "tree=0"], "is one of the tree's KV"),
    ("0.5.23", ["hicache=1", "policy=3"], "0 write_through, 1 write_through_selective, 2 write_back; not 3"),
    ("0.5.23", ["storage=1"], "needs --set hicache=1"),
    ("0.5.23", ["hicache=1", "storage=4"], "2 wait_complete, 3 timeout; not 4"),
    ("0.5.23", ["hicache=1", "host=0"], "at least 1"),
])  # fmt: skip
def test_a_host_tier_goes_with_the_rest_of_a_server(impl, given, says, capsys):
    args = [part for setting in given for part in ("--set", setting)]
    assert run(["serve-check", "--impl", f"sglang=={impl}", *args]) == 2
    assert says in capsys.readouterr().err


def test_serve_check_wants_an_environment(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("KVSPEC_CACHE", str(tmp_path))
    assert run(["serve-check", "--impl", "sglang==0.5.23"]) == 2
    assert "kvspec setup-server 0.5.23" in capsys.readouterr().err


def test_serve_check_says_first_what_a_checkout_lacks(monkeypatch, tmp_path, capsys):
    try:
        root = release_root("0.5.23")
    except UnusableImplementation as error:
        pytest.skip(str(error))
    shutil.copytree(root, tmp_path / "it", copy_function=os.symlink)
    file = tmp_path / "it/sglang/srt/managers/utils.py"
    text = file.read_text().replace("class GenerationBatchResult", "class Result")
    file.unlink()
    file.write_text(text)
    monkeypatch.setattr(environment, "python_of", lambda _: Path(sys.executable))
    monkeypatch.setattr(runs, "WholeScheduler", lambda *_: None)
    monkeypatch.setattr(masking, "masks", lambda *_: ())
    server_checks._base_to_compare("0.5.23", str(tmp_path / "it"), None)
    assert "serve-check cannot run it (sglang/srt/managers/utils.py" in capsys.readouterr().err
