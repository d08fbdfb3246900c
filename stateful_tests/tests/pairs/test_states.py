"""Recurrent layers of a pair: their memory, sizes, what P leaves to D, and what is judged of a state."""

import ctypes
from dataclasses import replace
from types import SimpleNamespace

import pytest

from impl.adapter import UnusableImplementation
from impl.choices import RandomChoices
from impl.vllm.pair.memory import TensorMemory
from impl.vllm.pair.states import PairStateMemory
from reference.blocks.config import EngineConfig, LayerGroup
from reference.geometry import GeometryError
from reference.system_kinds import PAIRS
from reference.pairs.config import PAIR_PRESETS, PairConfig
from reference.pairs.step import PairStep, _wrong_states
from reference.recurrent_states import chained
from stateful_tests.check.known_faults.causes import without_needs
from stateful_tests.generate.pair_commands import draw_pair_config
from stateful_tests.lockstep.replays import replay
from stateful_tests.lockstep.system_names import resolve
from stateful_tests.shrink.minimise import _shrink_pair
from stateful_tests.tests.support.planted_faults import trace_of

RECURRENT = {name: config for name, config in PAIR_PRESETS.items() if config.recurrent}
STAMPS = chained(range(7, 12))
# groups
KV = 0
STATE = 1
CONFIG = EngineConfig(
    (LayerGroup(4), LayerGroup(4, state=True)), blocks=24, max_model_len=12, max_batched_tokens=12,
    drafts=2,
)


@pytest.fixture
def memory():
    return PairStateMemory(CONFIG)


@pytest.fixture(scope="module")
def pair():
    system = resolve("vllm==0.33.0+pair")
    yield system
    system.close()


# -- memory ---------------------------------------------------------------------------------------


def test_a_block_holds_the_state_or_the_kv_that_was_written(memory):
    memory.write_state(3, STATE, 41)
    memory.write_windows(3, STATE, [41, 42, 43])
    memory.stamp(4, KV, 4, 1, 51)
    assert memory.held()[3:6] == [(STATE, (41, 41, 42, 43)), (KV, (0, 51, 0, 0)), (-1, ())]


def test_kv_clears_a_state_and_a_state_clears_kv(memory):
    memory.write_state(3, STATE, 41)
    memory.write_windows(3, STATE, [41, 42, 43])
    memory.stamp(4, KV, 4, 1, 51)
    memory.stamp(3, KV, 4, 0, 61)
    memory.write_state(4, STATE, 71)
    assert memory.held()[3:5] == [(KV, (61, 0, 0, 0)), (STATE, (71, 0, 0, 0))]


def test_a_copied_block_holds_the_same(memory):
    memory.write_state(3, STATE, 41)
    memory.write_windows(3, STATE, [41, 42, 43])
    memory[5] = memory.get(3)
    assert memory.held()[5] == memory.held()[3]


@pytest.mark.parametrize(
    ("moved", "found"),
    [(slice(18, 20), (41, 0, 0, 0)), (slice(0, 12), (0, 0, 0, 0)), (slice(0, 20), (41, 41, 42, 43))],
    ids=["without its windows", "without B, C and the state", "whole"],
)  # fmt: skip
def test_a_state_sent_in_part_does_not_count(memory, moved, found):
    sender = PairStateMemory(CONFIG)
    sender.write_state(3, STATE, 41)
    sender.write_windows(3, STATE, [41, 42, 43])
    source = sender.tensor[3, moved]
    target = memory.tensor[6, moved]
    ctypes.memmove(target.data_ptr(), source.data_ptr(), 8 * len(source))
    parts = memory.state(6, STATE), *(memory.window(6, STATE, index) for index in range(3))
    assert parts == found


def test_a_projection_in_the_place_of_another_is_no_window(memory):
    memory.write_windows(3, STATE, [41, 42, 43])
    memory.windows[3, 2:4] = memory.windows[3, :2].clone()
    assert memory.window(3, STATE) == 0


# -- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECURRENT)
def test_drawn_sizes_fit_both_servers(name):
    for seed in range(50):
        drawn = draw_pair_config(RandomChoices(f"{name} {seed}"), RECURRENT[name])
        sizes = {group.block_size for group in drawn.prefill.groups}
        assert drawn.recurrent, f"seed {seed} has no states"
        assert drawn.decode.caching is RECURRENT[name].decode.caching, f"seed {seed}"
        assert len(sizes) == 1 or not drawn.prefill.caching, f"seed {seed} has blocks of {sizes}"


def test_draws_of_pairs_without_states_are_unchanged():
    drawn = draw_pair_config(RandomChoices("pair 1"), PAIR_PRESETS["pair-windows"])
    assert [group.state for group in drawn.prefill.groups] == [False] * 3


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"groups": (LayerGroup(2), LayerGroup(2))}, "windows and states"),
        ({"drafts": 1}, "a state has a window for each"),
    ],
    ids=["states", "drafts"],
)
def test_a_decode_server_with_other_states_or_drafts_makes_no_pair(changes, why):
    config = RECURRENT["pair-state"]
    with pytest.raises(GeometryError, match=why):
        replace(config, decode=replace(config.decode, **changes))


def test_servers_without_kv_make_no_pair():
    config = RECURRENT["pair-state"]
    without_kv = replace(config.prefill, groups=(LayerGroup(2, state=True),))
    with pytest.raises(GeometryError, match="must have KV"):
        replace(config, prefill=without_kv, decode=replace(without_kv, peer=True))


@pytest.mark.parametrize(
    ("groups", "caching", "why"),
    [((2, 4), True, "as many tokens as one of attention"), ((1, 16), False, "must hold a state")],
)
def test_sizes_that_no_server_has_are_unusable(pair, groups, caching, why):
    layers = LayerGroup(groups[0]), LayerGroup(groups[1], state=True)
    engine = EngineConfig(
        layers, blocks=40, max_model_len=16, max_batched_tokens=8, caching=caching, drafts=1
    )
    with pytest.raises(UnusableImplementation, match=why):
        pair.reset(PairConfig(engine, replace(engine, peer=True)))


# -- what a trace needs of a model, and the smallest one ------------------------------------------


def test_a_trace_without_recurrent_state_has_no_recurrent_layers():
    trace = trace_of(PAIRS, "prefill r1 a3", "pair-state-fine")
    sizes = without_needs(None, trace, ("recurrent state",)).sizes(PairConfig)
    assert not sizes.recurrent
    assert sizes.prefill.match == 0


def test_a_trace_without_caching_has_one_state_for_each_request():
    trace = trace_of(PAIRS, "prefill r1 a3", "pair-state-fine")
    sizes = without_needs(None, trace, ("a cached prefix",)).sizes(PairConfig)
    assert sizes.recurrent
    assert not (sizes.prefill.caching or sizes.decode.caching)
    assert sizes.decode.groups[STATE].block_size >= sizes.decode.max_model_len


def test_a_pair_shrinks_to_one_group_with_small_blocks():
    trace = trace_of(PAIRS, "prefill r1 a3", "pair-state-fine")

    def always(candidate):
        return candidate.commands

    assert [*_groups(_shrink_pair(None, always, trace))] == [(2, False), (2, False)]


def test_a_pair_keeps_the_state_that_its_violation_needs_as_it_shrinks():
    trace = trace_of(PAIRS, "prefill r1 a3", "pair-state-fine")

    def with_state(candidate):
        return candidate.commands if candidate.sizes(PairConfig).recurrent else None

    smaller = _shrink_pair(None, with_state, trace)
    assert [*_groups(smaller)] == [(2, False), (2, True)] * 2


def _groups(trace):
    for server in (trace.sizes(PairConfig).prefill, trace.sizes(PairConfig).decode):
        for group in server.groups:
            yield group.block_size, group.state


# -- what is judged -------------------------------------------------------------------------------


def test_the_prefill_server_leaves_the_last_token_to_the_decode_server(pair):
    text = "prefill r1 a5; serve P r2 b5 for 1; prefill r3 c1; advance P"
    run = replay(pair, trace_of(PAIRS, text, "pair-state"))
    request = run.history[-1].facts.prefill.requests
    assert run.violation is None
    assert {name: len(fact.tokens) for name, fact in request.items()} == {"r1": 4, "r2": 5, "r3": 1}


@pytest.mark.parametrize(
    ("held", "observed"),
    [
        ((STATE, (STAMPS[3], STAMPS[3])), None),
        ((STATE, (STAMPS[2], STAMPS[3])), "that of block 2: its recurrent state is that after token 3"),
        ((STATE, (STAMPS[3], 0)), "that of block 2: its convolution window was not written"),
        ((KV, STAMPS[:4]), "that of block 2: is none"),
    ],
    ids=["the state", "one of another length", "one without its window", "kv"],
)  # fmt: skip
def test_a_state_counts_as_sent_if_it_is_that_after_the_counted_tokens(held, observed):
    after = SimpleNamespace(memory=[(-1, ()), (KV, STAMPS[:4]), held])
    side = SimpleNamespace(config=CONFIG, after=after)
    wrong = next(_wrong_states(side, "r2", ((1,), (0, 2)), STAMPS, 4), None)
    assert (wrong and wrong.observed) == observed
    of_no_tokens = [*_wrong_states(side, "r2", ((1,), (0, 2)), STAMPS, 0)]
    assert of_no_tokens == [], "a request that counts no token needs no state"


def test_a_state_that_was_sent_wrongly_is_told_with_the_request_that_counts_it():
    side = SimpleNamespace(config=CONFIG, misread=lambda *_: None)
    side.after = SimpleNamespace(memory=[(-1, ()), (KV, STAMPS[:4]), (STATE, (STAMPS[2], STAMPS[3]))])
    request = SimpleNamespace(tables=((1,), (0, 2)))
    step = SimpleNamespace(
        sides={"D": side},
        record=SimpleNamespace(texts={"D": SimpleNamespace(bearers={"r2": SimpleNamespace(stamps=STAMPS)})}),
        after=SimpleNamespace(decode=SimpleNamespace(requests={"r2": request})),
        arrivals=lambda: [("r2", 4)],
    )
    [wrong] = PairStep.wrongly_sent(step)
    assert wrong.expected == (
        "D counts 4 tokens of r2 as sent by P: r2 finds the state after its first 4 tokens in group 1"
    )


def test_a_table_without_a_state_has_none():
    side = SimpleNamespace(config=CONFIG, after=SimpleNamespace(memory=[]))
    [wrong] = _wrong_states(side, "r2", ((1,), (0,)), STAMPS, 4)
    assert wrong.observed == "its table has no block"


# -- the drafter's KV, which is sent with that of the target --------------------------------------


@pytest.fixture(params=[TensorMemory, PairStateMemory])
def drafted(request):
    """A memory whose block 3 has KV of the target in slots 1 and 2, and of the drafter in slot 1."""
    memory = TensorMemory(9, 4) if request.param is TensorMemory else PairStateMemory(CONFIG)
    memory.stamp_drafted(3, KV, 4, 1, 61)
    memory.stamp(3, KV, 4, 1, 51)
    memory.stamp(3, KV, 4, 2, 52)
    return memory


def test_the_drafters_kv_stands_beside_the_targets(drafted):
    assert drafted.held()[3] == (KV, (0, 51, 52, 0))
    assert [drafted.drafted(3, KV, 4, index) for index in range(4)] == [0, 61, 0, 0]


def test_a_copied_block_has_the_drafters_kv_too(drafted):
    drafted[5] = drafted.get(3)
    assert drafted.held()[5] == drafted.held()[3]
    assert drafted.drafted(5, KV, 4, 1) == 61


def test_kv_of_another_group_clears_the_drafters(drafted):
    drafted.stamp(3, KV + 2, 4, 0, 71)
    assert drafted.held()[3] == (KV + 2, (71, 0, 0, 0))
    assert drafted.drafted(3, KV, 4, 1) == 0


def test_the_drafters_kv_of_another_group_clears_the_targets(drafted):
    drafted.stamp_drafted(3, KV + 2, 4, 0, 72)
    assert drafted.held()[3][0] < 0


PROMPT_OF_NINE = "serve P r1 a9 for 2"


def test_a_trace_without_drafts_has_no_drafter():
    trace = trace_of(PAIRS, PROMPT_OF_NINE, "pair-drafter")
    sizes = without_needs(None, trace, ("drafts",)).sizes(PairConfig)
    assert (sizes.prefill.draft_group, sizes.decode.drafts) == (None, 0)


def test_a_trace_without_chunks_has_a_budget_for_whole_prompts():
    trace = trace_of(PAIRS, PROMPT_OF_NINE, "pair-drafter")
    sizes = without_needs(None, trace, ("a prompt in chunks",)).sizes(PairConfig)
    assert sizes.prefill.max_batched_tokens >= 3 * 11


def test_a_trace_without_a_text_near_the_limit_has_room_for_drafts():
    trace = trace_of(PAIRS, PROMPT_OF_NINE, "pair-drafter")
    sizes = without_needs(None, trace, ("a text near max_model_len",)).sizes(PairConfig)
    assert sizes.decode.max_model_len >= 18


def test_chunks_and_the_limit_concern_servers_with_drafters_alone():
    trace = trace_of(PAIRS, PROMPT_OF_NINE, "pair-eagle")
    assert without_needs(None, trace, ("a prompt in chunks", "a text near max_model_len")) == trace


def test_servers_with_drafters_in_other_groups_are_no_pair():
    config = PAIR_PRESETS["pair-drafter"]
    groups = tuple(replace(group, drafter=not group.drafter) for group in config.decode.groups)
    with pytest.raises(GeometryError, match="the drafter's layers"):
        replace(config, decode=replace(config.decode, groups=groups))
