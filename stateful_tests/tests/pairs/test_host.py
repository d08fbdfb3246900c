"""Servers of a pair with host memory: sizes, commands, which connector brings a prompt, what is judged."""

from collections import Counter
from dataclasses import replace

import pytest

from impl.adapter import UnusableImplementation
from impl.choices import RandomChoices
from reference.blocks.facts import HostFacts, Transfer
from reference.geometry import GeometryError
from reference.pairs.clauses import clauses_of
from reference.pairs.commands import HOST_COMMANDS
from reference.pairs.config import PAIR_PRESETS, PairConfig
from reference.pairs.facts import PairFacts
from reference.pairs.pair_record import NETWORK_JOBS, PairRecord
from reference.system_kinds import PAIRS
from stateful_tests.check import check_plans
from stateful_tests.check.known_faults.causes import without_needs
from stateful_tests.check.run_batches import RunBatch, with_stated_sizes
from stateful_tests.check.run_driver import drive
from reference.commands import Mode
from stateful_tests.generate.pair_commands import draw_pair_config
from stateful_tests.lockstep.pair_lockstep import PairLockstep
from stateful_tests.lockstep.replays import replay
from stateful_tests.lockstep.system_names import resolve
from stateful_tests.tests.pairs.scenes import KEEPS, LIFE
from stateful_tests.tests.support.planted_faults import trace_of

HOSTS = {name: config for name, config in PAIR_PRESETS.items() if config.with_host}
BOTH = PAIR_PRESETS["pair-host"]
# D has the prompt of r1 in its host memory and not in its blocks; P has promised the same prompt as r2.
STORED = (
    "serve D r1 a4 for 1; advance D; advance D; advance D; complete_host D; advance D; forget D;"
    " prefill r2 a4; advance P; advance P; forward r3 of r2 for 1; advance D"
)


@pytest.fixture(scope="module")
def pair():
    system = resolve("vllm==0.33.0+pair")
    yield system
    system.close()


def tree_of(run, command):
    return run.rows[command].tree


# -- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["storage", "simple"])
def test_a_server_of_a_pair_has_no_other_host_memory(size):
    prefill = replace(BOTH.prefill, **{size: True})
    with pytest.raises(GeometryError, match=f"prefill.{size}: goes without a peer"):
        replace(BOTH, prefill=prefill)


def test_a_pair_with_states_has_no_host_memory():
    state = PAIR_PRESETS["pair-state"]
    with pytest.raises(GeometryError, match=r"prefill\.host_chunks: goes without recurrent state"):
        replace(state, prefill=replace(state.prefill, host_chunks=2))


def test_the_order_needs_two_connectors():
    with pytest.raises(GeometryError, match="host_first: needs host_chunks of a server"):
        replace(PAIR_PRESETS["pair"], host_first=True)


def test_an_engine_by_itself_has_one_connector():
    system = resolve("vllm==0.33.0+offload")
    try:
        with pytest.raises(UnusableImplementation, match="goes without host_chunks but in a pair"):
            system.reset(BOTH.decode)
    finally:
        system.close()


@pytest.mark.parametrize("name", HOSTS)
def test_drawn_sizes_differ_and_keep_host_memory_where_it_is(name):
    drawn = [draw_pair_config(RandomChoices(seed), HOSTS[name]) for seed in range(20)]
    assert {pair_config.with_host for pair_config in drawn} == {HOSTS[name].with_host}
    assert len({*drawn}) > 10


def test_a_tree_without_the_connector_is_not_given_host_memory(pair):
    can = replace(
        pair.capabilities,
        commands=pair.capabilities.commands - {kind.__name__ for kind in HOST_COMMANDS},
    )
    of_vllm = {name for name, config in PAIR_PRESETS.items() if not config.first_token}
    assert {*PairLockstep.presets_for(pair.capabilities)} == of_vllm
    assert {*PairLockstep.presets_for(can)} == of_vllm - HOSTS.keys()
    assert "without host memory" in PairLockstep.unsupported(can, BOTH, ())
    assert PairLockstep.unsupported(pair.capabilities, BOTH, ()) == ""


# -- what is judged -------------------------------------------------------------------------------


def test_host_memory_is_judged_where_it_is():
    one = PAIR_PRESETS["pair-host-prefill"]
    clauses = {
        server: {name for name in clauses_of(one, server) if name.startswith("HOST")} for server in "PD"
    }
    assert clauses == {"P": {"HOST-1", "HOST-2", "HOST-3", "HOST-4"}, "D": set()}


def test_transfers_of_host_and_network_have_numbers_of_their_own():
    """D loads chunk 0 of its host and block 1 of P at once: block 1 counts as chunk -2."""
    _, facts = LIFE[6]
    load = Transfer(0, load=True, parts=((0, 2, 0, 0),), submitted=True)
    host = HostFacts(1, (), (((0, (5, 6)),),), (), (load,))
    both: PairFacts = facts._replace(decode=facts.decode._replace(host=host))
    merged = PairRecord(BOTH)._with_network("D", both)
    assert merged.host is not None
    assert merged.transfers == (
        load,
        Transfer(NETWORK_JOBS, load=True, parts=((0, 1, -2, 0),), submitted=True),
    )
    assert merged.host.memory[-2] == (KEEPS.memory[1],)
    assert (merged.host.chunks, merged.host.memory[0]) == (1, ((0, (5, 6)),))


def test_a_pair_is_not_at_rest_while_a_host_is_busy():
    _, facts = LIFE[-1]
    load = Transfer(0, load=False, parts=((0, 1, 0, 0),), submitted=True)
    host = HostFacts(1, (), (((-1, ()),),), (), (load,))
    record = PairRecord(BOTH)
    assert record._is_at_rest(facts)
    assert not record._is_at_rest(facts._replace(prefill=facts.prefill._replace(host=host)))


# -- runs -----------------------------------------------------------------------------------------


def test_the_peer_is_asked_first_and_host_memory_is_left_out(pair):
    run = replay(pair, trace_of(PAIRS, STORED, "pair-host"))
    assert run.violation is None
    assert "r3 waits for KV of P" in tree_of(run, -1)
    assert not any("load" in line for line in tree_of(run, -1))


def test_host_memory_that_is_asked_first_brings_the_prompt_and_p_is_told(pair):
    rest = "; shake D; complete_host D (load); advance D; deliver P; advance P"
    sizes = replace(BOTH, host_first=True)
    run = replay(pair, replace(trace_of(PAIRS, STORED + rest, "pair-host"), geometry=sizes))
    assert run.violation is None
    assert "r3 waits for nothing of P" in tree_of(run, 11)
    assert any("D: load 1: chunks 0 1 to blocks" in line for line in tree_of(run, 11))
    assert "P gives back what r2 left" in tree_of(run, -1)


def test_a_reset_of_host_memory_leaves_the_peer(pair):
    sizes = replace(BOTH, host_first=True)
    lines = STORED.replace("forget D;", "forget D; reset_host D;")
    run = replay(pair, replace(trace_of(PAIRS, lines, "pair-host"), geometry=sizes))
    assert run.violation is None
    assert any("chunks forgotten: 0 1" in line for row in run.rows for line in row.tree)
    assert "r3 waits for KV of P" in tree_of(run, -1)


def test_random_runs_move_kv_between_both_hosts_and_between_the_servers(pair):
    plan = check_plans.plan("smoke", examples=6, seed=1)
    carried_out: Counter[str] = Counter()
    for preset in ("pair-host", "pair-host-first"):
        batch = RunBatch(with_stated_sizes("pairs", preset, Mode.FAITHFUL), range(6))
        carried_out += Counter(drive(pair, plan, batch).carried_out)
    for name in ("CopyHost", "CompleteHost", "Land", "Forward"):
        assert carried_out[name] > 5, name


def test_a_trace_without_host_memory_has_none_of_its_commands(pair):
    trace = trace_of(PAIRS, STORED, "pair-host")
    without = without_needs(pair, trace, ("a host's memory",))
    assert without.sizes(PairConfig) == PAIR_PRESETS["pair"]
    assert len(without.commands) == len(trace.commands) - 1


def test_a_trace_without_caching_has_no_host_memory(pair):
    trace = trace_of(PAIRS, STORED, "pair-host")
    uncached = without_needs(pair, trace, ("a cached prefix",)).sizes(PairConfig)
    assert not uncached.decode.caching
    assert not uncached.with_host
