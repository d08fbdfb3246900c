"""RecurrentLayers.entry: the state that a batch entry reads, and the states that it leaves."""

from types import SimpleNamespace

import pytest

from impl.vllm.states import RecurrentLayers
from reference.blocks.config import EngineConfig, LayerGroup
from reference.blocks.facts import Lane, StateUse, chain


@pytest.mark.parametrize(
    ("tokens", "writes"), [((), ()), ((5, 6), ((2, chain(chain(7, 5), 6)),))], ids=["none", "two"]
)
def test_an_entry_leaves_one_state_after_its_tokens_and_without_tokens_none(tokens, writes):
    """vLLM 0.27 schedules entries without a token: padded rounds that are cut at a block of state."""
    layers = RecurrentLayers.__new__(RecurrentLayers)
    groups = LayerGroup(4), LayerGroup(4, state=True)
    layers.config = EngineConfig(groups, blocks=8, max_model_len=8, max_batched_tokens=8)
    layers.align = False
    layers._place_checkpoints = None
    layers.memory = SimpleNamespace(state=lambda *_: 7, window=lambda *_: 7)
    lane = Lane("r1", 4, tokens, 0, (), ((1,), (2,)))
    [use] = layers.entry(lane, accepted=1, is_round=False)
    assert use == StateUse(group=1, block=2, found=(7, 7), writes=writes)
