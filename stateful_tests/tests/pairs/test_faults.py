"""Faults planted into vLLM 0.33.0 as a pair violate their clauses; runs of the pair are deterministic."""

import json
from contextlib import closing
from itertools import takewhile

import pytest

from impl.adapter import UnusableImplementation
from reference.blocks.config import EngineConfig
from reference.commands import Mode
from reference.system_kinds import PAIRS
from reference.pairs.config import PAIR_PRESETS, PairConfig
from stateful_tests.check import check_plans
from stateful_tests.check.run_driver import drive
from stateful_tests.check.run_batches import RunBatch, with_stated_sizes
from stateful_tests.generate.pair_commands import pair_finale
from stateful_tests.lockstep.driven_kinds import lockstep_on
from stateful_tests.lockstep.replays import replay
from stateful_tests.lockstep.system_names import resolve
from stateful_tests.tests.support.modules_run import output_of
from stateful_tests.tests.support.planted_faults import planted_faults, trace_of
from stateful_tests.traces import trace_files as traces
from stateful_tests.traces.notation import format_command, parse

FAULTS = planted_faults("pairs/faults.toml")
VERSION = "0.33.0"
# One request that P prefills and D decodes, up to its last output.
ONE_REQUEST = (
    "prefill r1 a4 +1; advance P; advance P; forward r2 of r1 for 2; advance D; shake D; advance D; move;"
    " tick seconds 5; advance D; land; deliver P; deliver P; advance P; advance D; advance D; advance D;"
    " advance D; advance D; advance D"
)


@pytest.fixture(scope="module")
def pair():
    system = resolve(f"vllm=={VERSION}+pair")
    yield system
    system.close()


def test_each_fault_violates_its_clause_and_the_release_conforms():
    shown = json.loads(output_of("stateful_tests.tests.support.fault_runs", "pairs", "--replay"))
    assert {name: each["with"][:1] for name, each in shown.items()} == {
        name: [fault.clause] for name, fault in FAULTS.items()
    }
    assert [name for name, each in shown.items() if each["without"]] == []


def test_a_request_served_by_both_servers_conforms_and_leaves_no_records(pair):
    run = replay(pair, trace_of(PAIRS, ONE_REQUEST, "pair"))
    facts = run.history[-1].facts
    assert run.violation is None
    assert any("r2 gets 1 token and ends" in line for row in run.rows for line in row.tree)
    assert (facts.records, facts.idle, facts.network_rests) == ((), ("P", "D"), True)
    assert not any(promise.held for promise in facts.promises)


@pytest.mark.parametrize("version", ["0.29.0", VERSION])
def test_a_failed_load_ends_its_request_under_the_fail_policy(version):
    """Up to 0.29 the worker reports only blocks, and the scheduler handles the report in the same command."""
    begin = "prefill r1 a1; advance P; advance P; forward r2 of r1 for 1; advance D; shake D; advance D; lose"
    try:
        system = resolve(f"vllm=={version}+pair")
    except UnusableImplementation as error:
        pytest.skip(str(error))
    with closing(system):
        run = replay(system, trace_of(PAIRS, f"{begin}; advance D", "pair-fails"))
    assert run.violation is None
    assert "D: r2 gets 0 tokens and ends: error" in run.rows[-1].tree


def test_finale_advances_an_idle_server_until_a_standstill_is_noticed(pair):
    """Without its turns a wait that no timeout ends is no standstill, and the run counts as unanswered."""
    lockstep = lockstep_on(pair, PAIR_PRESETS["pair-push"], Mode.FAITHFUL)
    opening = trace_of(PAIRS, "prefill r1 a1; forward r2 of r1 for 1; cancel P r1", "pair-push")
    for command in opening.commands:
        lockstep.do(command)
    for _ in range(40):
        if lockstep.violation is not None:
            break
        lockstep.do(pair_finale(lockstep.record, lockstep.facts))
    assert lockstep.violation is not None and lockstep.violation.clause == "PD-4"


def test_finale_lets_the_lease_expire_for_dropped_answers_with_push(pair):
    """The proxy drops both answers. The third prompt fits once the lease of their blocks has expired."""
    lockstep = lockstep_on(pair, PAIR_PRESETS["pair-push"], Mode.FAITHFUL)
    opening = trace_of(PAIRS, "prefill r1 a14; prefill r2 b14; prefill r3 c10", "pair-push")
    for command in opening.commands:
        lockstep.do(command)
    ends = (pair_finale(lockstep.record, lockstep.facts) for _ in range(120))
    for command in takewhile(bool, ends):
        lockstep.do(command)
    assert lockstep.violation is None and not lockstep.facts.prefill.requests


def test_two_batches_with_one_seed_are_identical(pair):
    plan = check_plans.plan("smoke", examples=2, seed=3)
    batch = RunBatch(with_stated_sizes("pairs", "pair", Mode.FAITHFUL), range(2))
    first, second = (drive(pair, plan, batch) for _ in range(2))
    assert first.runs == second.runs and first.carried_out == second.carried_out
    assert first.carried_out["Advance"] > 20


@pytest.mark.parametrize("name", [n for n, each in PAIR_PRESETS.items() if not each.first_token])
def test_every_preset_starts_and_prefills_a_request(pair, name):
    run = replay(pair, trace_of(PAIRS, "prefill r1 a3; advance P; advance P; advance P", name))
    assert run.violation is None
    assert any("P promises" in line for row in run.rows for line in row.tree)


def test_sizes_and_ways_that_the_release_refuses_are_unusable(pair):
    small = PAIR_PRESETS["pair-small-blocks"]
    with pytest.raises(UnusableImplementation, match="a multiple of the tokens of P's"):
        pair.reset(PairConfig(EngineConfig(small.decode.groups, blocks=10, max_model_len=16,
                                           max_batched_tokens=8),
                              PAIR_PRESETS["pair"].decode))  # fmt: skip
    with pytest.raises(UnusableImplementation, match="goes alone"):
        resolve(f"vllm=={VERSION}+async+pair")


def test_every_pair_command_survives_a_trace_file():
    lines = [
        "prefill r1 a2b1 +3 priority 2", "forward r2 of r1 for 3", "drop r1", "serve P r3 +2 for 4",
        "cancel D r2", "forget P (running)", "advance D accept 2 1 drafts 0 stop r2", "write P",
        "shake D (fails)", "move at 1", "land", "lose at 2", "deliver P", "tick seconds 5",
        "copy_host P", "complete_host D (load)", "reset_host D",
    ]  # fmt: skip
    trace = trace_of(PAIRS, "; ".join(lines), "pair-eagle")
    assert [*map(format_command, trace.commands)] == lines
    assert traces.loads(traces.dump(trace).encode(), "trace") == trace
    assert {type(parse(line, PAIRS)) for line in lines} == {*PAIRS.commands}
