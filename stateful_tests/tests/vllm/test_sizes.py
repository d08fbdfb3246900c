"""Sizes of block-pool engines: which fit together, and which are drawn."""

import pytest

from reference.blocks.config import ENGINE_PRESETS, EngineConfig, LayerGroup
from reference.geometry import GeometryError
from stateful_tests.generate.choice_source import RandomChoices
from stateful_tests.generate.engine_commands import draw_engine_config


@pytest.mark.parametrize(
    "changes, field",
    [
        ({"groups": ()}, "groups"),
        ({"groups": (LayerGroup(0),)}, r"groups\[0\].block_size"),
        ({"blocks": 2}, "blocks"),
        ({"eagle": True}, "eagle"),
        ({"drafts": 9}, "max_batched_tokens"),
        ({"chunked": False, "max_batched_tokens": 10}, "max_batched_tokens"),
    ],
)
def test_sizes_that_do_not_fit_name_their_field(changes, field):
    plain = {"groups": (LayerGroup(2),), "blocks": 8, "max_model_len": 16, "max_batched_tokens": 16}
    with pytest.raises(GeometryError, match=f"^{field}: "):
        EngineConfig(**(plain | changes))


def test_drawn_sizes_fit_together():
    for seed in range(300):
        for preset in ENGINE_PRESETS.values():
            drawn = draw_engine_config(RandomChoices(seed), preset)
            windows = ([g.window is None for g in each.groups] for each in (drawn, preset))
            assert len({*map(tuple, map(sorted, windows))}) == 1
