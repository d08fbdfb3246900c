"""Every fixture: conforms on the reference and on torch, and fails by its clause with its bug put back.

A fixture is the memory of a fault; this file is what makes it one.
"""

import pickle
from pathlib import Path

import pytest

from impl.bugs import BUGS
from stateful_tests.lockstep.replays import replay
from stateful_tests.lockstep.system_names import resolve
from stateful_tests.traces.trace_files import dump, load

FOLDER = Path(__file__).parents[3] / "fixtures" / "regressions"
FIXTURES = sorted(FOLDER.glob("*.json"))
ABOUT_NO_PLACE = {"OUT-1", "OUT-3", "BROKEN", "TREE-10"}  # an answer, a choice, an amount
SHORT = 8  # commands: what a reader takes in at a glance


@pytest.mark.parametrize("path", FIXTURES, ids=lambda p: p.stem)
@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_the_fixture_conforms_without_its_bug(path, impl):
    trace = load(path)
    if impl == "reference" and trace.geometry.tracks:
        return  # it tracks no state
    assert replay(resolve(impl), trace).violation is None


@pytest.mark.parametrize("path", FIXTURES, ids=lambda p: p.stem)
def test_the_fixture_violates_its_clause_with_its_bug(path):
    trace = load(path)
    if trace.bug is None:
        assert trace.clause is None
        return
    violation = replay(resolve(f"torch+{trace.bug}"), trace).violation
    assert violation.clause == trace.clause == BUGS[trace.bug].clause
    assert violation.step == len(trace.commands) - 1 < SHORT
    assert trace.mode in BUGS[trace.bug].modes
    places = {c: f.at for c, f in zip(violation.clauses, violation.failures)}
    assert {clause for clause, at in places.items() if not at} <= ABOUT_NO_PLACE
    assert [f.at for f in pickle.loads(pickle.dumps(violation)).failures] == [*places.values()]


@pytest.mark.parametrize("path", FIXTURES, ids=lambda p: p.stem)
def test_the_fixture_has_a_story_and_the_form_of_the_writer(path):
    trace = load(path)
    assert trace.story.endswith(".")
    assert len(trace.expected) == len(trace.commands), "every step states its outcome"
    assert path.read_text(encoding="utf-8") == dump(trace)
