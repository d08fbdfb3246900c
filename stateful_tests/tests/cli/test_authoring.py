"""kvspec shrink and new-fixture."""

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


