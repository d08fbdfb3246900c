"""Logs of a real release's scheduler conform, and what is changed in them is noticed."""

from dataclasses import astuple
from typing import get_args

import pytest

from impl.sglang.server.events import Event
from stateful_tests.lockstep.known_faults import known_faults
from stateful_tests.tests.support import log_changes
from stateful_tests.traces import trace_files
from stateful_tests.traces.notation import format_command
from stateful_tests.watched.log_follower import TABLE
from stateful_tests.watched.log_reader import logs_of
from stateful_tests.watched.validator import Validator
from stateful_tests.tests.support.written_logs import FIXTURES, LOGS, lines_of, validate


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("*.jsonl")), ids=lambda p: p.stem)
def test_a_real_scheduler_conforms(path):
    validated = validate(path)
    assert not validated.unexplained, validated.unexplained[0]
    assert validated.steps > 25
    assert validated.compared > 200
    assert not validated.skipped
    assert {m.known for m in validated.mismatches} <= known_faults().keys()


def test_every_event_has_a_row():
    assert TABLE.keys() == set(get_args(Event))


def test_a_mismatch_names_line_clause_and_both_sides(written):
    lines = lines_of(LOGS[-1])
    line_index = next(
        n for n, e in enumerate(lines) if e.get("event") == "release" and e["after"] and e["reason"]
    )
    lines[line_index]["after"][1] += 4  # a tail that finish forgot
    (first, *_) = validate(written(lines)).unexplained
    assert (first.line, first.clause, first.event) == (line_index + 1, "LEN-2", "release")
    assert "kv_allocated_len" in first.expected and "kv_allocated_len" in first.observed
    assert str(lines[line_index]["session"]) in first.about


def test_a_count_that_is_off_is_reported_once(written):
    lines = lines_of(LOGS[-1])
    line_index = next(n for n, e in enumerate(lines) if e.get("event") == "step" and n > 40)
    for line in lines[line_index:]:
        if line.get("event") == "step":
            line["full"] -= 4  # a page is lost, for good
    mismatches = validate(written(lines)).unexplained
    assert [(p.line, p.clause) for p in mismatches] == [(line_index + 1, "OWN-3")]
    assert "(-4)" in mismatches[0].observed


@pytest.fixture
def wrong_lines():
    """The lines of a log in which a release keeps four tokens too many in a session's slot."""
    lines = lines_of(LOGS[-1])
    line_index = next(
        n for n, e in enumerate(lines) if e.get("event") == "release" and e["after"] and e["reason"]
    )
    lines[line_index]["after"][1] += 4
    return lines


def validator_of(path):
    """Return the validator of a log that it has read."""
    (log,) = logs_of([path])
    validator = Validator(log.header)
    validator.run(log.lines())
    return validator


def test_a_mismatch_becomes_a_trace(written, wrong_lines, tmp_path):
    validator = validator_of(written(wrong_lines))
    trace = validator.trace()
    assert trace is not None and trace.clause == "LEN-2"
    assert astuple(trace.geometry) == astuple(validator.geometry)
    assert trace.expected and all(done.choices for _, done in trace.expected)
    assert format_command(trace.commands[-1]) == validator.result.unexplained[0].command
    trace_files.save(trace, tmp_path / "trace.json")
    assert trace_files.load(tmp_path / "trace.json").commands == trace.commands


def test_a_trace_that_is_too_long_is_not_kept(written, wrong_lines, monkeypatch):
    path = written(wrong_lines)
    trace = validator_of(path).trace()
    monkeypatch.setattr("stateful_tests.watched.log_follower.MAX_STEPS", len(trace.commands))
    assert validator_of(path).trace() == trace
    monkeypatch.setattr("stateful_tests.watched.log_follower.MAX_STEPS", len(trace.commands) - 1)
    assert validator_of(path).trace() is None


def test_the_trace_of_a_log_ends_with_its_first_mismatch(written, wrong_lines):
    trace = validator_of(written(wrong_lines)).trace()
    first_step = next(line for line in wrong_lines if line.get("event") == "step")
    first_step["rows"] += 1
    assert len(validator_of(written(wrong_lines)).trace().commands) < len(trace.commands)


def test_a_mismatch_in_a_tree_of_unknown_content_has_no_trace():
    log = log_changes.ChangedLog("sglang-0.5.23-tree_under_overlap")
    changed = next(change for change in log.changes() if change.kind == "release left out")
    validator = Validator(log.header)
    assert validator.run(changed.lines).unexplained and validator.trace() is None


def test_a_log_that_begins_in_the_middle_or_conforms_has_no_trace():
    for begins, kind in ((2, "release left out"), (None, None)):
        log = log_changes.ChangedLog("sglang-0.5.23-clients_that_do_not_wait", begins)
        changed = next((change.lines for change in log.changes() if change.kind == kind), log.lines)
        validator = Validator(log.header)
        assert bool(validator.run(changed).unexplained) is (kind is not None)
        validator.header.tree = False
        assert validator.trace() is None


def test_a_claim_has_to_be_stated(written):
    head, *lines = lines_of(FIXTURES / "sglang-0.5.14-rounds_that_claim.jsonl")
    assert head["claims"] == 1
    mismatches = validate(written([{**head, "claims": 0}, *lines])).unexplained
    assert (mismatches[0].event, mismatches[0].clause) == ("step", "LEN-4")


def test_a_mixed_batch_is_logged_whole(written):
    lines = lines_of(FIXTURES / "sglang-0.5.23-mixed_batches.jsonl")
    assert validate(written(lines)).known["mixed-round-not-counted"]
    later = validate(written([{**lines[0], "release": "0.5.24"}, *lines[1:]])).unexplained
    assert ("LEN-2", "release") in {(p.clause, p.event) for p in later}
    events = [line.get("event") for line in lines]
    step = next(
        line for line, before in zip(lines[1:], events) if before == "extend" and line.get("lanes")
    )
    step["lanes"].pop()
    (first, *_) = validate(written(lines)).unexplained
    assert (first.clause, first.observed) == ("OUT-1", f"runs one of {step['batch']}")
