"""Findings in the order of a report: wrong KV leads, and takes what violates beside it with it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from ci.report.report_data import group_by_cause
from reference.commands import Close, Mode, Open
from reference.all_clauses import ALL_CLAUSES
from reference.failures import Failure
from reference.geometry import preset
from stateful_tests.check import finder
from stateful_tests.check.finder import Finder
from stateful_tests.check.finding_order import WRONG_KV
from stateful_tests.lockstep.check_results import Finding
from stateful_tests.lockstep.run_results import Run, Trace, Violation

TRACE = Trace(preset("page1"), Mode.FAITHFUL, (Open("s1"), Close("s1")))


def violation(*clauses: str, step: int = 1) -> Violation:
    failures = tuple(Failure(f"no {clause}", clause) for clause in clauses)
    return Violation(clauses[0], step, failures[0], clauses[1:], failures[1:])


def finding_of(*clauses: str, trace: Trace = TRACE) -> Finding:
    """Return a finding of the first clause; the others fail at the same step of its trace."""
    run = Run(replace(trace, clause=clauses[0]), "torch", (), violation(*clauses))
    return Finding(clauses[0], run, (Mode.FAITHFUL,), 1, 0.0, 0)


@pytest.fixture
def shrunk_clauses(monkeypatch):
    """The clauses whose traces a finder shrinks. Each trace violates whatever clause is asked about."""
    clauses_asked = []

    def minimise(system, trace, clause, **options):
        clauses_asked.append(clause)
        return replace(trace, commands=trace.commands[:1])

    monkeypatch.setattr(finder, "minimise", minimise)
    monkeypatch.setattr(finder, "explaining_masks", lambda *_: [])
    monkeypatch.setattr(Finder, "_failing_commands", lambda self, trace, *_: trace.commands)
    monkeypatch.setattr(Finder, "_may_get_smaller", lambda *_: False)
    monkeypatch.setattr(Finder, "_rank", lambda *_: 0)
    monkeypatch.setattr(Finder, "_finds_another_cause", lambda *_: False)
    return clauses_asked


def test_the_trace_of_wrong_kv_is_shrunk_and_shows_the_rest(shrunk_clauses):
    finder = Finder(SimpleNamespace(name="torch"))
    finder.take(violation("RUN-3", "OWN-3", "PUB-1", "PRO-1"), TRACE)
    assert shrunk_clauses == ["PUB-1"]
    assert [*finder.new] == ["PUB-1", "RUN-3", "OWN-3", "PRO-1"]


@pytest.fixture
def finder_of_pub(shrunk_clauses):
    """A finder that has shrunk a trace of PUB-1, and found RUN-3 beside PUB-1 in a later one."""
    finder = Finder(SimpleNamespace(name="torch"))
    finder.take(violation("PUB-1"), TRACE)
    finder.take(violation("RUN-3", "PUB-1"), replace(TRACE, commands=(Open("s2"), Close("s2"))))
    return finder


def test_a_violation_that_an_earlier_trace_shows_is_not_shrunk(finder_of_pub, shrunk_clauses):
    assert shrunk_clauses == ["PUB-1"]
    assert finder_of_pub.new["RUN-3"].commands == finder_of_pub.new["PUB-1"].commands


def test_a_violation_by_itself_is_shrunk(finder_of_pub, shrunk_clauses):
    finder_of_pub.take(violation("OWN-3"), TRACE)
    assert shrunk_clauses == ["PUB-1", "OWN-3"]


def test_a_violation_beside_a_known_one_in_another_mode_is_shrunk(finder_of_pub, shrunk_clauses):
    finder_of_pub.take(violation("LEN-1", "RUN-3"), replace(TRACE, mode=Mode.FREE))
    assert "LEN-1" in shrunk_clauses


def test_without_wrong_kv_the_first_of_the_step_is_shrunk(shrunk_clauses):
    finder = Finder(SimpleNamespace(name="torch"))
    finder.take(violation("RUN-3", "OWN-3"), TRACE)
    assert shrunk_clauses == ["RUN-3"]


def test_wrong_kv_leads_a_report(shrunk_clauses):
    finder = Finder(SimpleNamespace(name="torch"))
    told = []
    finder.found = lambda traces, _: told.append([*traces])
    for clause in ("PRO-1", "RUN-3", "READ-3"):
        finder.take(violation(clause), TRACE)
    assert told[-1] == ["READ-3", "RUN-3", "PRO-1"]


def test_a_cause_stands_where_its_gravest_finding_does():
    """The smaller trace of RUN-3 shows PUB-1 as well, so both are one cause."""
    longer = replace(TRACE, commands=(*TRACE.commands, Open("s2")))
    other = replace(TRACE, commands=(*TRACE.commands, Open("s3")))
    of_pub = finding_of("PUB-1", "RUN-3", trace=longer)
    of_run = finding_of("RUN-3", "PUB-1")
    of_own = finding_of("OWN-3", trace=other)
    assert group_by_cause([of_pub, of_own, of_run]) == [[of_run, of_pub], [of_own]]
    assert group_by_cause([of_own, of_pub, of_run]) == [[of_own], [of_run, of_pub]]


def test_the_headline_of_a_trace_is_the_cause_of_its_violations():
    """A page that is freed too early comes before the read of it."""
    of_read = finding_of("READ-2", "FREE-1")
    of_free = finding_of("FREE-1", "READ-2")
    assert group_by_cause([of_read, of_free]) == [[of_free, of_read]]


def test_each_clause_of_wrong_kv_is_one():
    assert {*ALL_CLAUSES} >= WRONG_KV
