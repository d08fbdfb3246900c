"""kvspec shrink, new-fixture and record."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from reference.commands import Close, Open, Submit
from stateful_tests.lockstep.lockstep import replay
from stateful_tests.lockstep.systems import resolve
from stateful_tests.traces.files import load, save

FIXTURES = Path(__file__).parents[3] / "fixtures"
SHORT = FIXTURES / "regressions" / "retract_then_retry_frees_the_reserved_token.json"
STORY = "A retract while a step is in flight leaves one token more than the text has."


@pytest.fixture
def long(tmp_path):
    """The same fault behind noise."""
    trace = load(SHORT)
    noise = (Open("x"), Submit("n", "x", 3), *trace.commands, Close("x"))
    path = tmp_path / "long.json"
    save(replace(trace, commands=noise, expected=(), story="", clause=None), path)
    return path


# -- shrink --------------------------------------------------------------------------------------------


def test_shrink_writes_the_smallest_trace(kvspec, long):
    before = long.read_bytes()
    code, out, _ = kvspec("shrink", str(long), "--json", "report.json")
    assert code == 0
    assert "10 commands -> 6" in out
    assert "full_pages 40 -> 1" in out
    assert long.read_bytes() == before
    made = load(long.with_name("long.shrunk.json"))
    assert (made.origin, made.clause, len(made.expected)) == ("minimised", "LEN-3", 6)
    violation = replay(resolve("torch+pr22862-tail"), made).violation
    assert violation is not None and violation.clause == "LEN-3"
    data = json.loads(Path("report.json").read_text())
    assert (len(data["before"]["rows"]), len(data["after"]["rows"])) == (9, 6)


def test_shrink_keeps_to_the_clause_that_is_asked_for(kvspec, long):
    assert kvspec("shrink", str(long), "--clause", "FREE-1", "--out", "free.json")[0] == 0
    assert load("free.json").clause == "FREE-1"
    code, _, err = kvspec("shrink", str(long), "--clause", "TREE-1", "--out", "tree.json")
    assert code == 2
    assert "violates LEN-3, FREE-1, FREE-2 on torch+pr22862-tail, not TREE-1" in err
    assert not Path("tree.json").exists()


def test_shrink_writes_over_nothing_unasked(kvspec, long):
    before = long.read_bytes()
    code, _, err = kvspec("shrink", str(long), "--out", str(long))
    assert (code, long.read_bytes()) == (2, before)
    assert "exists already; --force overwrites it" in err
    assert kvspec("shrink", str(long), "--out", str(long), "--force")[0] == 0
    assert long.read_bytes() != before


# -- new-fixture ---------------------------------------------------------------------------------------


def test_a_trace_becomes_a_fixture(kvspec, long):
    name = "a_retry_frees_the_token"
    options = ("--name", name, "--story", STORY, "--out", "here")
    code, out, _ = kvspec("new-fixture", str(long), *options)
    assert code == 0
    assert "a fixture has fewer than 8 commands: kvspec shrink" in out
    made = load(f"here/{name}.json")
    assert (made.story, made.bug, made.clause) == (STORY, "pr22862-tail", "LEN-3")
    assert len(made.expected) == len(made.commands) == 9, "cut where it violates, every outcome stated"


WHOLE = ("--name", "a_b_c", "--story", STORY)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([*WHOLE, "--name", "bug7"], "--name: 'bug7' is no clause of a sentence"),
        ([*WHOLE, "--story", "Bad."], "--story: say in a sentence or more"),
        ([*WHOLE, "--bug", "none-such"], "there is no bug called none-such"),
        ([*WHOLE, "--clause", "LEN-99"], "there is no clause called LEN-99"),
        ([*WHOLE, "--clause", "TREE-1"], "violates LEN-3 first on torch+pr22862-tail, not TREE-1"),
        ([*WHOLE, "--bug", "pr22900"], "conforms on torch+pr22900: it shows no fault there"),
        ([*WHOLE, "--impl", "torch+pr22900"], "a trace of the bug pr22862-tail is replayed on torch+pr22862"),
        ([], "Missing option '--name'"),
        (["--name", "a_b_c"], "Missing option '--story'"),
    ],
)
def test_an_unusable_fixture_is_refused_and_nothing_is_written(kvspec, long, options, says):
    before = long.read_bytes()
    code, _, err = kvspec("new-fixture", str(long), "--out", "here", *options)
    assert (code, long.read_bytes(), Path("here").exists()) == (2, before, False)
    assert says in err


def test_a_fixture_that_is_there_stays(kvspec, long):
    Path("a_b_c.json").write_text("mine")
    options = ("--name", "a_b_c", "--story", STORY, "--out", ".")
    assert kvspec("new-fixture", str(long), *options)[0] == 2
    assert Path("a_b_c.json").read_text() == "mine"
    assert kvspec("new-fixture", str(long), *options, "--force")[0] == 0


# -- record --------------------------------------------------------------------------------------------


def record(kvspec, monkeypatch, typed, *options):
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    return kvspec("record", "--out", "made.json", *options)


def test_what_is_typed_and_no_text_is_refused(kvspec, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"open s1\nopen \xff\n"), encoding="utf-8"))
    code, _, err = kvspec("record", "--out", "made.json")
    assert (code, err.startswith("kvspec: line 2: "), Path("made.json").exists()) == (2, True, False)


def test_what_is_typed_is_answered_and_written(kvspec, monkeypatch):
    typed = "open s1\n# a turn\nsubmit r1 in s1 +4\n\nadmit r1\nextend r1 +9\nundo\nextend r1 +4\nadmit r1\n"
    code, out, _ = record(kvspec, monkeypatch, typed)
    assert code == 0
    assert out.splitlines() == [
        "done", "done", "done", "refused: bad_length", "undone: extend r1 +9",
        "done; s1 kv_committed_len 0 -> 4; s1 kv_allocated_len 0 -> 4", "refused: wrong_phase",
        "saved   made.json (5 commands)",
    ]  # fmt: skip
    assert kvspec("replay", "made.json")[0] == 0


def test_sizes_are_options(kvspec, monkeypatch):
    options = ("--preset", "page4", "--window", "0", "--rows", "2", "--tree", "--mode", "free")
    assert record(kvspec, monkeypatch, "match h1 a8\n", *options)[0] == 0
    made = load("made.json")
    sizes = made.geometry
    assert (sizes.page_size, sizes.window, sizes.swa_pages, sizes.rows, sizes.tree) == (4, None, 0, 2, True)
    assert made.mode == "free"


@pytest.mark.parametrize(
    ("typed", "options", "says"),
    [
        ("open s1\nopne s2\n", [], "line 2: 'opne' is no command; commands: open, "),
        ("", [], "no command was given"),
        ("open s1\n", ["--preset", "huge"], "--preset: unknown 'huge'; one of page1, "),
        ("open s1\n", ["--from", "no.jsonl"], "--from no.jsonl: No such file"),
        ("open s1\n", ["--from", "no.jsonl", "--rows", "2"], "--from: a log states sizes and mode itself"),
    ],
)
def test_an_unusable_recording_writes_nothing(kvspec, monkeypatch, typed, options, says):
    code, _, err = record(kvspec, monkeypatch, typed, *options)
    assert (code, Path("made.json").exists()) == (2, False)
    assert says in err


def test_a_terminal_goes_on_after_a_wrong_line(kvspec, monkeypatch):
    monkeypatch.setattr("sys.stdin", Terminal("opne s1\nhelp\nopen s1\n"))
    code, out, _ = kvspec("record", "--out", "made.json")
    assert code == 0
    assert "'opne' is no command" in out
    assert "extend REQUEST +TOKENS" in out
    assert load("made.json").commands == (Open("s1"),)


def test_a_log_becomes_a_trace(kvspec):
    log = FIXTURES / "recorded" / "two_turns_of_a_chat.jsonl"
    lines = log.read_text().splitlines()
    Path("bad.jsonl").write_text("\n".join([*lines[:3], lines[5], *lines[3:]]))
    code, out, _ = kvspec("record", "--from", "bad.jsonl", "--out", "bad.json")
    assert code == 0
    assert "line 4: spec_decode turn-1 +4 accept 3: server done, rules refused: wrong_phase" in out
    assert "saved   bad.json (14 commands, 1 against the rules)" in out
    assert kvspec("record", "--from", str(log), "--out", "good.json")[0] == 0
    assert kvspec("replay", "good.json")[0] == 0
