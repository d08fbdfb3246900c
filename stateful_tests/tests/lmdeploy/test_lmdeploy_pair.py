"""LMDeploy's prefill and decode server: its schedulers, loops and migration loop."""

import json

import pytest

from impl.adapter import UnusableImplementation
from reference.commands import Done, Mode, Reason, Refused
from reference.pairs.config import PAIR_PRESETS
from reference.system_kinds import PAIRS
from stateful_tests.lockstep.known_faults import FOLDER
from stateful_tests.lockstep.replays import replay
from stateful_tests.lockstep.run_results import Trace
from stateful_tests.lockstep.system_names import resolve
from stateful_tests.tests.support.commands import script
from stateful_tests.tests.support.modules_run import output_of
from stateful_tests.tests.support.planted_faults import checkout_with, planted_faults
from stateful_tests.traces import trace_files as traces

ANSWERED = "prefill r1 a3; advance P; advance P; advance P"


@pytest.fixture(scope="module")
def pair():
    try:
        system = resolve("lmdeploy==0.18.0+pair")
    except UnusableImplementation as error:
        pytest.skip(str(error))
    yield system
    system.close()


def rows(pair, text, preset="pair-token"):
    run = replay(pair, Trace(PAIR_PRESETS[preset], Mode.FAITHFUL, script(text, PAIRS)))
    assert run.violation is None
    return run.rows


def test_d_goes_on_behind_the_token_of_p(pair):
    text = f"{ANSWERED}; forward r2 of r1 for 1; land; deliver P; advance D; advance D; advance D"
    *_, forwarded, landed, delivered, computed, _, answered = rows(pair, text)
    assert "transfer 0 for r2: blocks 1 2 of P to 1 2 of D" in forwarded.tree
    assert any("computed 3" in line for line in landed.tree)
    assert "P gives back what r1 left" in delivered.tree
    assert "D: r2 computes [3, 4); samples 1" in computed.tree
    assert "D: r2 gets 1 token and ends: length" in answered.tree


def test_p_frees_what_was_read_once_its_loop_gives_that_a_turn(pair):
    """It gives others none between an output and the next batch, where a step is in flight."""
    text = (
        f"{ANSWERED}; forward r2 of r1 for 1; land; prefill r3 b8; prefill r4 c8; advance P; advance P;"
        " advance P; deliver P; advance P"
    )
    *_, delivered, advanced = rows(pair, text)
    assert "P gives back what r1 left" not in delivered.tree
    assert "P gives back what r1 left" in advanced.tree


def test_a_migration_begins_once_the_one_before_has_ended(pair):
    text = (
        "prefill r1 a3; prefill r2 b3; advance P; advance P; advance P; forward r3 of r1 for 1;"
        " forward r4 of r2 for 1; land"
    )
    *_, waiting, landed = rows(pair, text)
    assert "r4 has P's answer and has asked for nothing" in waiting.tree
    assert any(line.startswith("transfer 1 for r4") for line in landed.tree)


@pytest.mark.parametrize(
    "text, reason",
    [
        ("forget P", Reason.UNFAITHFUL),
        ("serve P r1 a3 for 2", Reason.UNFAITHFUL),
        ("deliver P", Reason.EMPTY),
        ("land", Reason.EMPTY),
        ("forward r2 of r1 for 1", Reason.UNKNOWN_REQUEST),
        (f"{ANSWERED}; forward r2 of r1 for 20", Reason.BAD_LENGTH),
        (f"{ANSWERED}; tick", Reason.WRONG_PHASE),
        (f"{ANSWERED}; drop r1; drop r1", Reason.UNKNOWN_REQUEST),
        (f"{ANSWERED}; forward r2 of r1 for 1; forward r3 of r1 for 1", Reason.WRONG_PHASE),
    ],
)
def test_what_a_pair_does_not_do_is_refused(pair, text, reason):
    *before, last = rows(pair, text)
    assert last.outcome == Refused(reason)
    assert {type(row.outcome) for row in before} <= {Done}


@pytest.mark.parametrize("preset", ["pair", "pair-hybrid", "pair-state"])
def test_a_pair_of_another_kind_is_refused_in_one_line(pair, preset):
    with pytest.raises(UnusableImplementation, match=r"first_token|recurrent state"):
        replay(pair, Trace(PAIR_PRESETS[preset], Mode.FAITHFUL, script("prefill r1 a3", PAIRS)))


@pytest.mark.parametrize(
    "path", sorted(FOLDER.glob("lmdeploy-*+pair/*.json")), ids=lambda path: path.stem
)
def test_a_known_fault_is_still_there(path, pair):
    trace = traces.load(path)
    assert trace.clause in replay(pair, trace).violation.clauses


def test_each_fault_is_seen_first_by_its_clause_and_the_release_conforms(pair):
    seen = json.loads(output_of("stateful_tests.tests.support.fault_runs", "lmdeploy+pair", "--replay"))
    faults = planted_faults("lmdeploy/pair_faults.toml")
    assert {name: each["with"][:1] for name, each in seen.items()} == {
        name: [fault.clause] for name, fault in faults.items()
    }
    assert [name for name, each in seen.items() if each["without"]] == []


def test_a_check_of_the_plain_way_names_what_only_a_pair_calls(pair, tmp_path, kvspec):
    """Such a fault was "nothing new" without a word, in a copy of a release."""
    fault = planted_faults("lmdeploy/pair_faults.toml")["blocks-are-exchanged"]
    checkout = checkout_with(pair.root, tmp_path / "copy", fault)
    _, _, errors = kvspec(
        "check", "--lmdeploy-path", str(checkout), "--preset", "full", "--examples", "1", "--steps", "2"
    )
    assert "differs from lmdeploy==0.18.0 and is not called here: " in errors
    assert "_migration_loop_migrate; check --impl lmdeploy+pair calls it" in errors
