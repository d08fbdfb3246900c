"""vLLM's releases themselves, where their files are available."""

from dataclasses import replace

import pytest

from impl.adapter import UnusableImplementation
from impl.vllm.api import RELEASES
from reference.blocks.commands import Add, ResetConnector, Schedule, Update
from reference.system_kinds import BLOCKS
from reference.tiers.commands import ResetCache
from reference.blocks.presets import engine_preset
from reference.commands import Abort, Done, Mode, Reason, Refused
from stateful_tests.check import campaign, check_plans
from stateful_tests.check.known_faults.causes import needs
from stateful_tests.check.known_faults.explanation import known_fault
from stateful_tests.lockstep import known_faults
from stateful_tests.lockstep.replays import replay
from stateful_tests.lockstep.run_results import Trace
from stateful_tests.lockstep.system_names import resolve
from stateful_tests.tests.support.night import NIGHT
from stateful_tests.traces import trace_files as traces
from stateful_tests.traces.notation import parse

TRACES = [
    trace
    for trace in known_faults.traces("vllm")
    if "pair" not in known_faults.ways_of(trace[0].parent.name)
]


@pytest.mark.parametrize("way", ["", "+async", "+v2", "+async+v2"])
def test_turns_drafts_and_a_reset_on_either_model_runner(vllm, way):
    text = (
        "add r1 a5 +1 for 4 (session); add r2 a4 for 6; schedule; update; schedule accept 2; update"
    )
    text += (
        "; reset_cache (running); schedule; update; more r1 a3 +1 for 3; schedule accept 1; update"
    )
    commands = [
        parse(line, BLOCKS) for line in text.split("; ") + ["schedule accept 1", "update"] * 9
    ]
    run = replay(
        vllm("0.33.0" + way), Trace(engine_preset("drafts"), Mode.FAITHFUL, tuple(commands))
    )
    given = [line for row in run.rows for line in row.tree if " gets " in line or "ends" in line]
    assert run.violation is None
    assert sum("r1" in line and "ends: length" in line for line in given) == 2
    assert "r2 is gone" in str(run.rows)


def test_an_update_with_nothing_in_flight_is_refused(vllm):
    run = replay(
        vllm("0.33.0"), Trace(engine_preset("full"), Mode.FAITHFUL, (Update(), Schedule()))
    )
    assert [type(row.outcome) for row in run.rows] == [Refused, Refused]


@pytest.mark.parametrize("release, flights", [("0.33.0", 1), ("0.33.0+async", 2)])
def test_only_aborts_of_clients_come_into_a_step(vllm, release, flights):
    """As in EngineCore: input is read between steps, aborts as soon as the model has run."""
    refused = (Add("r2", 1, 1), ResetCache(), Schedule())
    done = (Abort("r1"), Update())
    filled = [Schedule(), Update(), Schedule()] if flights == 2 else [Schedule()]
    commands = (Add("r1", 5, 3), *filled, *refused, *done)
    run = replay(vllm(release), Trace(engine_preset("full"), Mode.FAITHFUL, commands))
    assert flights == 1 or run.rows[2].outcome == Refused(Reason.WRONG_PHASE)
    assert [row.outcome for row in run.rows[-5:-2]] == [Refused(Reason.WRONG_PHASE)] * 3
    assert [row.outcome for row in run.rows[-2:]] == [Done()] * 2


def test_a_short_check_reaches_situations(vllm):
    system = vllm("0.33.0")
    plan = check_plans.plan("smoke", presets=("hybrid", "drafts"), examples=3)
    result = campaign.run(system, plan)
    assert result.examples == 6
    reached = {clause for clause, tally in result.tallies.items() if tally.reached}
    assert {"BLK-1", "HIT-1", "WIN-1", "RUN-2", "READ-3", "PUB-1"} <= reached


SHORT_STATES = replace(engine_preset("state-uncached"), groups=engine_preset("state").groups)


@pytest.mark.parametrize(
    ("release", "sizes", "message"),
    [
        ("0.11.0", engine_preset("unequal"), "refuses the configuration"),
        ("0.33.0", SHORT_STATES, "a block of state for max_model_len"),
    ],
)
def test_a_configuration_that_a_release_refuses_is_one_line(vllm, release, sizes, message):
    with pytest.raises(UnusableImplementation, match=message):
        vllm(release).reset(sizes)


def test_a_release_without_a_connector_is_not_driven_with_one():
    with pytest.raises(UnusableImplementation, match="there is no such file"):
        resolve("vllm==0.20.0+offload")


@pytest.mark.parametrize(
    ("release", "outcome"),
    [("0.21.0+offload", Refused(Reason.UNFAITHFUL)), ("0.22.0+offload", Done())],
)
def test_a_connector_is_reset_in_releases_that_can(vllm, release, outcome):
    trace = Trace(engine_preset("host"), Mode.FAITHFUL, (ResetConnector(),))
    assert replay(vllm(release), trace).rows[0].outcome == outcome


@pytest.mark.parametrize(("path", "fault"), TRACES, ids=lambda each: getattr(each, "stem", ""))
def test_a_trace_violates_its_clause_and_conforms_where_it_was_fixed(vllm, path, fault):
    trace = traces.load(path)
    first, _, way = path.parent.name.removeprefix("vllm-").partition("+")
    later = fault.fixed if fault.fixed and NIGHT else RELEASES[-1]
    for version in (first, later):
        system = vllm(f"{version}+{way}" if way else version)
        run = replay(system, trace)
        clause = run.violation and run.violation.clause
        expected = fault.clause_shown(trace.clause, version)
        if clause and expected is None and version != RELEASES[-1]:  # it has another fault
            another = known_fault(system, run)
            assert another is not None and another.id != fault.id, (version, clause)
        else:
            assert clause == expected, version


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        (
            "vllm-0.25.0+offload/a_preempted_request_is_loaded_in_the_next_step",
            ("a reset of the cache",),
        ),
        ("vllm-0.21.0+offload/a_next_turn_is_stored_from_the_first_turns_block", ("a next turn",)),
        (
            "vllm-0.21.0+offload/a_session_that_ends_has_one_block_twice_in_a_store",
            ("a next turn",),
        ),
        ("vllm-0.26.0+offload/a_last_token_opens_a_block_that_was_never_allocated", ()),
        (
            "vllm-0.15.0+async/a_turn_that_ends_with_a_step_in_flight_goes_on_too_far",
            ("a next turn",),
        ),
        (
            "vllm-0.31.0+async/a_turn_that_stops_with_a_step_in_flight_leaves_a_state_that_is_too_far",
            ("a next turn",),
        ),
        (
            "vllm-0.31.0+async/a_hit_within_a_block_bears_the_hash_of_the_whole_block_in_time",
            ("checkpoints within a chunk",),
        ),
        (
            "vllm-0.21.0+offload/a_sharer_of_a_failed_load_keeps_its_hash",
            ("a failed load", "a load for two"),
        ),
        ("vllm-0.21.0+async+offload/a_step_ahead_of_a_failed_load_is_answered", ("a failed load",)),
        (
            "vllm-0.11.0+async/a_preempted_request_resumes_without_its_token_in_flight",
            ("pools that run full",),
        ),
    ],
)
def test_a_known_trace_needs_nothing_by_accident(vllm, name, needed):
    """What it needs besides would be reported as new without that, in each release that has the fault."""
    trace = traces.load(known_faults.FOLDER / f"{name}.json")
    release = name.partition("/")[0].removeprefix("vllm-")
    assert needs(vllm(release), trace, trace.clause) == needed
