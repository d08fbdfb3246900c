"""What the stand-in for recurrent layers reads and writes for an entry of a batch."""

from types import SimpleNamespace

import pytest

from impl.vllm.states import RecurrentLayers
from reference.blocks.config import EngineConfig, LayerGroup
from reference.blocks.facts import Lane, StateUse, chain


@pytest.mark.parametrize(
    ("tokens", "writes"), [((), ()), ((5, 6), ((2, chain(chain(7, 5), 6)),))], ids=["none", "two"]
)
def test_an_entry_without_a_token_leaves_no_state(tokens, writes):
    """vLLM 0.27 schedules one: a padded round that is cut at a block of state."""
    layers = RecurrentLayers.__new__(RecurrentLayers)
    groups = LayerGroup(4), LayerGroup(4, state=True)
    layers.config = EngineConfig(groups, blocks=8, max_model_len=8, max_batched_tokens=8)
    layers.align, layers._checkpoints = False, None
    layers.memory = SimpleNamespace(state=lambda *_: 7, window=lambda *_: 7)
    lane = Lane("r1", 4, tokens, 0, (), ((1,), (2,)))
    (use,) = layers.entry(lane, False, 1)
    assert use == StateUse(1, 2, (7, 7), writes)
