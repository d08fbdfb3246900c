"""Sizes of block-pool engines: which fit together, and which are drawn."""

import pytest

from reference.blocks.config import ENGINE_PRESETS, EngineConfig, LayerGroup
from reference.geometry import GeometryError
from impl.choices import RandomChoices
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


@pytest.mark.parametrize(
    "groups, blocks, longest",
    [
        ([LayerGroup(2)], 8, 14),  # of 16 tokens a page is to spare
        ([LayerGroup(2)], 6, 10),  # and of six blocks one
        ([LayerGroup(2), LayerGroup(4, 3)], 9, 8),  # 4 and 2 blocks, and one of each
        ([LayerGroup(2), LayerGroup(2, state=True)], 11, 10),  # 5 states of two requests
        ([LayerGroup(2, state=True)], 5, 15),
    ],
)
def test_an_empty_engine_has_room_for_a_text_and_a_block_of_each_group(groups, blocks, longest):
    config = EngineConfig(tuple(groups), 40, 16, 8)
    object.__setattr__(config, "blocks", blocks)
    room = [length for length in range(1, 17) if config.has_room_for(length)]
    assert room == [*range(1, longest + 1)]


def test_drawn_sizes_fit_together():
    for seed in range(300):
        for preset in ENGINE_PRESETS.values():
            drawn = draw_engine_config(RandomChoices(seed), preset)
            windows = ([g.window is None for g in each.groups] for each in (drawn, preset))
            assert len({*map(tuple, map(sorted, windows))}) == 1
