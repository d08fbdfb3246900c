"""transformers' own scheduler and paged cache, where its files are available."""

import json
from pathlib import Path

import pytest

from impl.adapter import UnusableImplementation
from reference.blocks.commands import Add, More, Schedule, Update
from reference.blocks.config import EngineConfig, LayerGroup
from reference.blocks.presets import engine_preset
from reference.commands import Abort, Done, Mode, Piece, Reason, Refused
from stateful_tests.lockstep.replays import replay
from stateful_tests.lockstep.run_results import Trace
from stateful_tests.lockstep.system_names import resolve
from stateful_tests.tests.support.modules_run import output_of
from stateful_tests.tests.support.planted_faults import planted_faults
from stateful_tests.traces import trace_files as traces

FAULTS = planted_faults("transformers_paging/faults.toml")
VERSION = "5.24.0"
FIXTURES = Path(__file__).parents[3] / "fixtures" / "releases"


@pytest.fixture(scope="module")
def system():
    try:
        made = resolve(f"transformers=={VERSION}")
    except UnusableImplementation as error:
        pytest.skip(str(error))
    yield made
    made.close()


@pytest.fixture(scope="module")
def overlapped():
    try:
        made = resolve(f"transformers=={VERSION}+async")
    except UnusableImplementation as error:
        pytest.skip(str(error))
    yield made
    made.close()


def outcomes(system, *commands, config=None):
    run = replay(system, Trace(config or engine_preset("full"), Mode.FAITHFUL, commands))
    assert run.violation is None
    return run


def test_a_second_request_goes_on_behind_the_blocks_of_the_first(system):
    step = Schedule(), Update()
    first = Add("r1", 2, 0, (Piece("a", 5),))
    second = Add("r2", 3, 0, (Piece("a", 5),))
    run = outcomes(system, first, *step, *step, second, *step, *step, *step)
    assert {type(row.outcome) for row in run.rows} == {Done}
    assert "r1 computes [0, 5); samples 1" in run.rows[1].tree
    assert "r2 computes [4, 5); samples 1" in run.rows[6].tree
    assert "r2 gets 1 token and ends: length" in run.rows[-1].tree


def test_clients_are_read_between_steps_and_sessions_are_not_there(system):
    more = More("r1", 1, 1)
    run = outcomes(
        system, Add("r1", 2, 3), more, Schedule(stop=("r1",)), Abort("r1"), Schedule(), Update()
    )
    assert run.rows[1].outcome == Refused(Reason.UNFAITHFUL)
    assert [row.outcome for row in run.rows[3:5]] == [Refused(Reason.WRONG_PHASE)] * 2
    assert "r1 gets 1 token and ends: stop" in run.rows[-1].tree


def test_an_undriven_setting_is_refused_in_one_line(system):
    with pytest.raises(UnusableImplementation, match="no window that is not a ring"):
        system.reset(engine_preset("window"))
    with pytest.raises(UnusableImplementation, match="blocks of one size"):
        system.reset(EngineConfig(
            (LayerGroup(2), LayerGroup(4, 6, ring=True)), blocks=20, max_model_len=16,
            max_batched_tokens=8,
        ))
    with pytest.raises(UnusableImplementation, match=r"4\.50\.0: there is no .*cache_allocators"):
        resolve("transformers==4.50.0")
    with pytest.raises(
        UnusableImplementation, match=r"\+async goes after a release of transformers"
    ):
        resolve(f"transformers=={VERSION}+v2")
    no_package = "there is no src/transformers or transformers in /nowhere"
    with pytest.raises(UnusableImplementation, match=no_package):
        resolve("transformers", checkout="/nowhere")


def test_a_copy_of_the_package_is_driven_as_a_clone_is(system, tmp_path):
    (tmp_path / "src").symlink_to(system.root)
    for folder in (system.root, tmp_path):
        made = resolve("transformers", checkout=str(folder))
        assert (made.root, made.release) == (system.root.resolve(), VERSION), folder
        made.close()


def test_a_request_without_blocks_restarts_with_its_outputs_as_prompt(system):
    config = EngineConfig(
        (LayerGroup(1),), blocks=6, max_model_len=6, max_batched_tokens=6, max_seqs=2, caching=False
    )
    step = Schedule(), Update()
    run = outcomes(system, Add("r1", 4, 2), Add("r2", 4, 2), *step * 12, config=config)
    assert any("PREEMPTED" in line for row in run.rows for line in row.tree)
    assert sum("ends: length" in line for row in run.rows for line in row.tree) == 2


@pytest.mark.parametrize(
    "path", sorted(FIXTURES.glob("transformers-5.23.0/*.json")), ids=lambda path: path.stem
)
def test_each_trace_violates_its_clause(system, path):
    trace = traces.load(path)
    assert replay(system, trace).violation.clause == trace.clause


def test_children_share_whole_blocks_and_have_a_copy_of_the_last(system):
    config = engine_preset("forks")
    step = Schedule(), Update()
    run = outcomes(
        system, Add("r1", 2, 0, (Piece("a", 6),), children=2), *step, *step, *step, config=config
    )
    assert run.rows[1].tree[0] == "r1 computes [0, 5)"  # all but the last token
    blocks = [line.split("blocks ")[1].split() for line in run.rows[2].tree if "blocks" in line]
    blocks += [run.rows[1].tree[1].split("blocks ")[1].split()]
    assert len({tuple(block[:2]) for block in blocks}) == 1
    assert len({block[2] for block in blocks}) == 3
    ends = [line for line in run.rows[-1].tree if "ends: length" in line]
    assert [line.split()[0] for line in ends] == ["r1", "r1.0", "r1.1"]


def test_a_child_without_room_waits_and_computes_the_prompt(system):
    config = EngineConfig(
        (LayerGroup(1),), blocks=5, max_model_len=5, max_batched_tokens=5, max_seqs=3,
        caching=False, children=2,
    )
    step = Schedule(), Update()
    added = Add("r1", 1, 0, (Piece("a", 2),), children=2)
    run = outcomes(system, added, *step, *step, *step, config=config)
    assert "r1.1 PREEMPTED, computed 0, blocks none" in run.rows[2].tree
    assert any("r1.1 computes [0, 2)" in line for row in run.rows for line in row.tree)
    assert sum("ends: length" in line for row in run.rows for line in row.tree) == 3


def test_a_request_that_is_cancelled_before_its_fork_has_no_children(system):
    config = EngineConfig(
        (LayerGroup(1),), blocks=6, max_model_len=6, max_batched_tokens=1, max_seqs=1, children=1
    )
    add = Add("r1", 1, 3, children=1)
    run = outcomes(system, add, Schedule(), Update(), Abort("r1"), config=config)
    assert run.rows[-1].tree == ("r1 is gone",)


def test_a_ring_keeps_the_window_and_no_more_blocks(system):
    config = EngineConfig(
        (LayerGroup(2, 3, ring=True),), blocks=2, max_model_len=16, max_batched_tokens=8,
        max_seqs=1, caching=False,
    )
    step = Schedule(), Update()
    run = outcomes(system, Add("r1", 4, 0, (Piece("a", 7),)), *step * 4, config=config)
    assert "r1 computes [0, 7); samples 1" in run.rows[1].tree  # longer than the ring
    blocks = [
        line.split("blocks ")[1] for row in run.rows for line in row.tree if "RUNNING" in line
    ]
    assert len(set(blocks)) == 1 and len(blocks[0].split()) == 2
    assert "r1 gets 1 token and ends: length" in run.rows[-1].tree


def test_a_request_that_finds_no_blocks_beside_a_ring_starts_again(system):
    groups = LayerGroup(1), LayerGroup(1, 2, ring=True)
    config = EngineConfig(groups, blocks=8, max_model_len=6, max_batched_tokens=6, max_seqs=2)
    step = Schedule(), Update()
    run = outcomes(system, Add("r1", 4, 2), Add("r2", 4, 2), *step * 12, config=config)
    assert any("PREEMPTED" in line for row in run.rows for line in row.tree)
    assert sum("ends: length" in line for row in run.rows for line in row.tree) == 2


def test_a_request_that_finds_no_blocks_goes_on_from_its_copy_in_host_memory(system):
    config = EngineConfig(
        (LayerGroup(1),), blocks=6, max_model_len=6, max_batched_tokens=6, max_seqs=2,
        caching=False, swap=6,
    )
    step = Schedule(), Update()
    run = outcomes(system, Add("r1", 4, 2), Add("r2", 4, 2), *step * 12, config=config)
    lines = [line for row in run.rows for line in row.tree]
    [swapped] = [line for line in lines if "SWAPPED" in line]
    name = swapped.split()[0]
    computed = int(swapped.split("computed ")[1].split(",")[0])
    starts = [int(line.split("[")[1].split(",")[0]) for line in lines if f"{name} computes" in line]
    assert computed in starts and starts == sorted({*starts})  # nothing is computed twice
    assert sum("ends: length" in line for line in lines) == 2


def test_a_request_without_room_in_host_memory_starts_again(system):
    config = EngineConfig(
        (LayerGroup(1),), blocks=6, max_model_len=6, max_batched_tokens=6, max_seqs=2,
        caching=False, swap=1,
    )
    step = Schedule(), Update()
    run = outcomes(system, Add("r1", 4, 2), Add("r2", 4, 2), *step * 12, config=config)
    assert any("PREEMPTED" in line for row in run.rows for line in row.tree)


def test_more_children_than_configured_are_refused(system):
    add = Add("r1", 1, 3, children=3)
    run = outcomes(system, add, config=engine_preset("forks"))
    assert run.rows[0].outcome == Refused(Reason.UNFAITHFUL)


def test_the_next_batch_is_launched_before_the_results_of_the_last_one(overlapped):
    run = outcomes(
        overlapped, Add("r1", 2, 3), Schedule(), Update(), Schedule(), Schedule(), Update(),
        Schedule(), Update(), Update(),
    )  # fmt: skip
    assert [row.outcome for row in run.rows[2:5:2]] == [Refused(Reason.WRONG_PHASE)] * 2
    assert "r1 computes [3, 4); samples 1" in run.rows[3].tree
    assert "r1 gets 1 token" in run.rows[5].tree
    assert "r1 gets 1 token and ends: length" in run.rows[7].tree
    assert isinstance(run.rows[8].outcome, Done)  # of the batch behind its end


@pytest.mark.parametrize(
    "path", sorted(FIXTURES.glob("transformers-*+async/*.json")), ids=lambda path: path.stem
)
def test_each_trace_of_asynchronous_batching_violates_its_clause(overlapped, path):
    trace = traces.load(path)
    assert replay(overlapped, trace).violation.clause == trace.clause


def test_each_fault_is_seen_first_by_its_clause_and_the_release_conforms(system):
    seen_by = json.loads(
        output_of("stateful_tests.tests.support.fault_runs", "transformers", "--replay")
    )
    assert {name: each["with"][:1] for name, each in seen_by.items()} == {
        name: [fault.clause] for name, fault in FAULTS.items() if not fault.mended
    }
    assert [name for name, each in seen_by.items() if each["without"]] == []
