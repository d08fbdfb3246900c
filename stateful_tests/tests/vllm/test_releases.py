"""vLLM's releases themselves, where their files can be had."""

import os
from pathlib import Path

import pytest

from impl.adapter import UnusableImplementation
from reference.blocks.commands import Add, ResetCache, Schedule, Update
from reference.blocks.config import engine_preset
from reference.commands import Abort, Done, Mode, Reason, Refused
from stateful_tests.check import campaign, tiers
from stateful_tests.lockstep.lockstep import replay
from stateful_tests.lockstep.results import Trace
from stateful_tests.traces import files as traces
from stateful_tests.traces.notation import ENGINE_KINDS, parse

FIXTURES = Path(__file__).parents[3] / "fixtures" / "releases"
TRACES = sorted(FIXTURES.glob("vllm-*/*.json"))


@pytest.mark.parametrize("way", ["", "+async", "+v2", "+async+v2"])
def test_turns_drafts_and_a_reset_on_either_model_runner(vllm, way):
    said = "add r1 a5 +1 for 4 (session); add r2 a4 for 6; schedule; update; schedule accept 2; update"
    said += "; reset_cache (running); schedule; update; more r1 a3 +1 for 3; schedule accept 1; update"
    commands = [parse(line, ENGINE_KINDS) for line in said.split("; ") + ["schedule accept 1", "update"] * 9]
    run = replay(vllm("0.33.0" + way), Trace(engine_preset("drafts"), Mode.FAITHFUL, tuple(commands)))
    given = [line for row in run.rows for line in row.tree if " gets " in line or "ends" in line]
    assert run.violation is None
    assert sum("r1" in line and "ends: length" in line for line in given) == 2
    assert "r2 is gone" in str(run.rows)


def test_an_update_with_nothing_in_flight_is_refused(vllm):
    run = replay(vllm("0.33.0"), Trace(engine_preset("full"), Mode.FAITHFUL, (Update(), Schedule())))
    assert [type(row.outcome) for row in run.rows] == [Refused, Refused]


@pytest.mark.parametrize("release, flights", [("0.33.0", 1), ("0.33.0+async", 2)])
def test_of_what_clients_do_only_aborts_come_into_a_step(vllm, release, flights):
    """As in EngineCore: input is read between steps, aborts as soon as the model has run."""
    refused, done = (Add("r2", 1, 1), ResetCache(), Schedule()), (Abort("r1"), Update())
    filled = [Schedule(), Update(), Schedule()] if flights == 2 else [Schedule()]
    commands = (Add("r1", 5, 3), *filled, *refused, *done)
    run = replay(vllm(release), Trace(engine_preset("full"), Mode.FAITHFUL, commands))
    assert flights == 1 or run.rows[2].outcome == Refused(Reason.WRONG_PHASE)
    assert [row.outcome for row in run.rows[-5:-2]] == [Refused(Reason.WRONG_PHASE)] * 3
    assert [row.outcome for row in run.rows[-2:]] == [Done()] * 2


def test_a_short_check_reaches_situations(vllm):
    system = vllm("0.33.0")
    plan = tiers.plan("smoke", presets=("hybrid", "drafts"), examples=3)
    result = campaign.run(system, plan)
    assert result.examples == 6
    reached = {clause for clause, tally in result.tallies.items() if tally.reached}
    assert {"BLK-1", "HIT-1", "WIN-1", "RUN-2", "READ-3", "PUB-1"} <= reached


def test_a_configuration_that_a_release_refuses_is_one_line(vllm):
    with pytest.raises(UnusableImplementation, match="refuses the configuration"):
        vllm("0.11.0").reset(engine_preset("unequal"))


# Where a trace conforms again; the others are still there in the last release.
FIXED = {
    "a_null_block_bears_a_hash": "0.14.0+async",
    "a_preempted_request_resumes_without_its_token_in_flight": "0.12.0+async",
    "a_reset_drops_the_next_token_of_a_request": "0.22.0+async",
    "a_reset_has_rejected_drafts_taken_back_from_a_new_start": "0.25.0+async",
    "a_turn_that_ends_with_a_step_in_flight_goes_on_too_far": "0.31.0+async",
    "a_window_is_freed_by_the_optimistic_count": "0.26.0+async",
    "a_session_keeps_the_hash_of_a_dropped_token": "0.32.0",
    "an_idle_session_asks_for_more_blocks_than_are_free": "0.21.0",
    "a_next_turn_keeps_the_first_turns_max_tokens": "0.31.0",
    "a_next_turn_keeps_a_token_of_an_accepted_round": "0.33.0",
    "a_request_preempted_in_its_own_step_runs_all_the_same": "0.12.0",
}


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_a_trace_violates_its_clause_and_conforms_where_it_was_fixed(vllm, path):
    trace = traces.load(path)
    first = path.parent.name.removeprefix("vllm-")
    run = replay(vllm(first), trace)
    assert run.violation is not None and run.violation.clause == trace.clause
    fixed, newest = FIXED.get(path.stem), "0.33.0" + "+async" * first.endswith("+async")
    later = replay(vllm(fixed if fixed and "KVSPEC_EVERY_RELEASE" in os.environ else newest), trace)
    assert (later.violation is None) == (fixed is not None)
