"""LMDeploy's own scheduler and maker of batches, where its files are available."""

import json
from contextlib import closing
from dataclasses import replace

import pytest

from impl.adapter import UnusableImplementation
from impl.lmdeploy.copied import COPIED
from reference.blocks.commands import Add, More, NewWeights, Schedule, Update
from reference.blocks.config import EngineConfig, LayerGroup
from reference.blocks.presets import engine_preset
from reference.commands import Abort, Done, Mode, Piece, Reason, Refused
from reference.system_kinds import BLOCKS
from stateful_tests.check import check_plans
from stateful_tests.check.run_driver import drive
from stateful_tests.check.run_batches import RunBatch
from stateful_tests.check.known_faults.explanation import explaining_masks, known_fault
from stateful_tests.check.known_faults.masks import masks
from stateful_tests.check.known_faults.trace_reductions import remove_paused_requests
from stateful_tests.check.plan_order import configurations, planned_runs
from stateful_tests.lockstep.known_faults import FOLDER
from stateful_tests.lockstep.replays import replay
from stateful_tests.lockstep.run_results import Trace
from stateful_tests.lockstep.system_names import resolve
from stateful_tests.tests.support.modules_run import output_of
from stateful_tests.tests.support.planted_faults import checkout_with, planted_faults
from stateful_tests.traces import trace_files as traces
from stateful_tests.traces.notation import parse

FAULTS = planted_faults("lmdeploy/faults.toml")
VERSION = "0.18.0"


@pytest.fixture(scope="module")
def system():
    try:
        made = resolve(f"lmdeploy=={VERSION}")
    except UnusableImplementation as error:
        pytest.skip(str(error))
    yield made
    made.close()


@pytest.fixture(scope="module")
def with_store(system):
    del system  # skips where the release is not available
    made = resolve(f"lmdeploy=={VERSION}+store")
    yield made
    made.close()


def carry_out(system, *commands, config=None):
    run = replay(system, Trace(config or engine_preset("full"), Mode.FAITHFUL, commands))
    assert run.violation is None
    return run


def test_a_check_drives_the_corpus(system):
    """Its lines for engines that schedule by themselves; of these, this one is driven the fastest."""
    plan = check_plans.for_system(check_plans.plan("smoke"), system)
    planned = configurations(system, plan)
    corpus = next(runs for runs in planned if runs.machine == check_plans.CORPUS)
    driven = drive(system, plan, RunBatch(corpus, range(planned_runs(system, plan, corpus))))
    assert sum(driven.carried_out.values()) > 100


def test_a_worker_that_sleeps_forgets_its_batch(system):
    """Else it goes on with an aborted request beside the first one of the new weights."""
    first, second = (Add(name, 2, 0, (Piece("a", 1),)) for name in ("r1", "r2"))
    aborted = first, Schedule(), Abort("r1"), Schedule(), Update(), NewWeights()
    run = carry_out(system, *aborted, second, Schedule(), Schedule(), Update())
    assert "r2 computes [1, 2); samples 1" in run.rows[-2].tree


def test_a_batch_is_dispatched_before_the_output_of_the_one_before(system):
    add = Add("r1", 2, 0, (Piece("a", 5),))
    run = carry_out(system, add, Schedule(), Schedule(), Update(), Schedule(), Update())
    assert "r1 computes [0, 5); samples 1" in run.rows[1].tree
    assert "r1 computes [5, 6); samples 1" in run.rows[2].tree
    assert run.rows[3].tree == ("r1 gets 1 token",)
    assert "r1 gets 1 token and ends: length" in run.rows[5].tree


def test_a_second_request_goes_on_behind_the_blocks_of_the_first(system):
    first = Add("r1", 1, 0, (Piece("a", 5),))
    second = Add("r2", 1, 0, (Piece("a", 5),))
    step = Schedule(), Update()
    run = carry_out(
        system, first, Schedule(), *step, Schedule(), second, Update(), Schedule(), *step
    )
    assert {type(row.outcome) for row in run.rows} == {Done}
    assert any("r2 computes [4, 5); samples 1" in row.tree for row in run.rows)


def test_a_state_is_kept_where_a_prompt_ends_also_within_a_block(system):
    first = Add("r1", 1, 0, (Piece("a", 5),))
    second = Add("r2", 1, 0, (Piece("a", 7),))
    step = Schedule(), Update()
    run = carry_out(system, first, Schedule(), *step, Schedule(), second, Update(), Schedule(), *step,
                      config=replace(engine_preset("state"), retention=-1))  # fmt: skip
    assert any("r2 computes [5, 7); samples 1" in row.tree for row in run.rows)


def test_clients_are_heard_while_the_loop_waits(system):
    run = carry_out(
        system, Add("r1", 4, 3), More("r1", 1, 1), Update(), Schedule(), Schedule(), Update(), Abort("r1"),
        Schedule(), Abort("r1"),
    )  # fmt: skip
    refused = [row.outcome.reason for row in run.rows if isinstance(row.outcome, Refused)]
    assert refused == [Reason.UNFAITHFUL, Reason.EMPTY, Reason.WRONG_PHASE]
    assert "r1 is gone" in run.rows[-1].tree


def test_a_paused_request_keeps_its_blocks_until_others_need_them(system):
    config = EngineConfig(
        (LayerGroup(2),), blocks=5, max_model_len=8, max_batched_tokens=4, max_seqs=2, caching=False
    )
    step = Schedule(), Update()
    run = carry_out(
        system, Add("r1", 5, 2), Add("r2", 5, 2), Schedule(), *step * 16, config=config
    )
    lines = [line for row in run.rows for line in row.tree]
    assert any("PAUSED" in line for line in lines)
    assert sum("ends: length" in line for line in lines) == 2


# r1 is stored; r2 takes all blocks, so that the trie forgets the text of r1, and r3 has it again.
LOADING = (
    "add r1 a8 for 1; schedule; schedule; complete; schedule; add r2 b13 for 1; update; schedule; update;"
    " schedule; complete; update; schedule; complete; update; schedule; add r3 a12 for 1; update; schedule;"
    " update; schedule"
)
SMALL = EngineConfig(
    groups=(LayerGroup(2),), blocks=8, max_model_len=14, max_batched_tokens=8, max_seqs=2, host_chunks=12
)


def lines_after_a_load_begins(system, text):
    commands = [parse(line, BLOCKS) for line in f"{LOADING}; {text}".split("; ")]
    rows = carry_out(system, *commands, config=SMALL).rows
    begins = next(at for at, row in enumerate(rows) if any(" to blocks " in line for line in row.tree))
    return [line for row in rows[begins:] for line in row.tree]


def test_a_request_goes_on_behind_what_a_load_brings(with_store):
    text = "complete (load); update; schedule; update; schedule; update; schedule"
    assert "r3 computes [8, 12); samples 1" in lines_after_a_load_begins(with_store, text)


def test_what_a_failed_load_was_to_bring_is_computed(with_store):
    text = "fail blocks 1; update; schedule; update; schedule; update; schedule"
    assert "r3 computes [0, 8)" in lines_after_a_load_begins(with_store, text)


def test_an_aborted_request_keeps_its_blocks_until_its_load_ends(with_store):
    text = "abort r3; update; schedule; complete (load); update; schedule; update; schedule; update"
    lines = lines_after_a_load_begins(with_store, text)
    assert "load 4 completes" in lines and "load 4 has ended" in lines


def test_sizes_that_no_store_goes_with_are_refused_in_one_line(with_store):
    for name in ("host-hybrid", "host-drafts"):
        with pytest.raises(UnusableImplementation, match="goes with full attention alone"):
            with_store.reset(engine_preset(name))
    for name in ("storage", "simple", "host-small"):
        with pytest.raises(UnusableImplementation, match="the store keeps single blocks"):
            with_store.reset(engine_preset(name))


def test_a_worker_that_starts_loads_otherwise_is_a_doubt(with_store, tmp_path):
    worker = "lmdeploy/pytorch/kv_connector/mooncake/store/worker.py"
    text = (with_store.root / worker).read_text(encoding="utf-8")
    file = tmp_path / worker
    file.parent.mkdir(parents=True)
    file.write_text(text.replace("receiver.add_request(request)", "receiver.add_request(request, event)"))
    [doubt] = COPIED.doubts(tmp_path)
    assert "starts of loads in the worker" in doubt and "add_request(request, event)" in doubt


def test_a_fault_near_a_known_one_is_new_where_the_base_does_the_same(system, tmp_path):
    """The known one names a state by a token too few as well, behind a decode in flight."""
    checkout = checkout_with(
        system.root, tmp_path / "checkout", FAULTS["checkpoint-is-of-a-token-less"]
    )
    groups = LayerGroup(16), LayerGroup(16, state=True)
    commands = Add("r1", 1, 0, (Piece("a", 3),)), Schedule(), Schedule()
    trace = Trace(EngineConfig(
        groups, blocks=6, max_model_len=4, max_batched_tokens=2, max_seqs=1
    ), Mode.FAITHFUL, commands)
    with closing(resolve("lmdeploy", checkout=str(checkout))) as tree:
        violation = replay(tree, trace).violation
        assert violation is not None and violation.clause == "STA-3"
        known = list(masks(tree, system))
        assert any(mask.holds and "STA-3" in mask.fault.clauses for mask in known)
        assert explaining_masks(tree, system, known, trace, violation) == []


def test_a_fault_beside_a_known_one_is_new_where_it_violates_more(with_store, tmp_path):
    """The known one violates PUB-1 as well, where pools run full; there is no load without that."""
    fault = FAULTS["failed-load-leaves-the-cursor"]
    checkout = checkout_with(with_store.root, tmp_path / "checkout", fault)
    with closing(resolve("lmdeploy+store", checkout=str(checkout))) as tree:
        run = replay(tree, fault.trace())
        known = list(masks(tree, with_store))
        assert any(mask.holds and "PUB-1" in mask.fault.clauses for mask in known)
        assert {"PUB-1", "HIT-1"} <= {*run.violation.clauses}
        assert explaining_masks(tree, with_store, known, run.trace, run.violation) == []
        assert known_fault(tree, run) is None


def test_a_paused_request_is_left_out_with_its_commands(with_store):
    trace = traces.load(FOLDER / "lmdeploy-0.16.0" / "a_paused_request_is_matched_behind_its_blocks.json")
    less = remove_paused_requests(with_store, trace)
    assert {c.request for c in less.commands if isinstance(c, Add)} == {"r2", "r3"}
    assert remove_paused_requests(with_store, less) == less


def test_an_undriven_setting_is_refused_in_one_line(system):
    for name in ("hybrid", "state-window", "state-export", "uncached"):
        with pytest.raises(UnusableImplementation, match="one group, and one with state; chunked"):
            system.reset(engine_preset(name))
    with pytest.raises(UnusableImplementation, match=r"a store of KV goes with \+store"):
        system.reset(engine_preset("host"))
    with pytest.raises(UnusableImplementation, match="drafts go with full attention alone"):
        system.reset(replace(engine_preset("state"), drafts=1))
    with pytest.raises(UnusableImplementation, match=r"\+store or \+pair goes after a release of lmdeploy"):
        resolve(f"lmdeploy=={VERSION}+async")
    with pytest.raises(UnusableImplementation, match="there is no lmdeploy in /nowhere"):
        resolve("lmdeploy", checkout="/nowhere")


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(FOLDER.glob("lmdeploy-*/*.json")) if "+pair" not in path.parent.name],
    ids=lambda path: path.stem,
)
def test_a_known_fault_is_still_there(path, system, with_store):
    trace = traces.load(path)
    shown_on = with_store if trace.geometry.connects else system
    assert trace.clause in replay(shown_on, trace).violation.clauses


def test_each_fault_is_seen_first_by_its_clause_and_the_release_conforms(system):
    seen = json.loads(output_of("stateful_tests.tests.support.fault_runs", "lmdeploy", "--replay"))
    assert {name: each["with"][:1] for name, each in seen.items()} == {
        name: [fault.clause] for name, fault in FAULTS.items() if not fault.mended
    }
    assert [name for name, each in seen.items() if each["without"]] == []
