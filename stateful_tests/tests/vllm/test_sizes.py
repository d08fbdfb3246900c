"""Sizes of block-pool engines: which fit together, and which are drawn."""

import ast
import inspect
import traceback
from dataclasses import replace

import pytest

from impl.choices import RandomChoices
from reference.blocks import config as engine_config
from reference.blocks.config import EngineConfig, LayerGroup
from reference.blocks.presets import ENGINE_PRESETS
from reference.geometry import GeometryError
from stateful_tests.generate.engine_profile import EngineProfile, draw_engine_config, fit_config
from stateful_tests.tests.support.night import NIGHT

FULL = LayerGroup(2)
WINDOW = LayerGroup(2, 3)
RING = LayerGroup(2, 3, ring=True)
STATE = LayerGroup(2, state=True)
DRAFTER = LayerGroup(2, drafter=True)
PLAIN = EngineConfig((FULL,), blocks=64, max_model_len=16, max_batched_tokens=16)
HOST = {"host_chunks": 4}
DRAFTS = {"drafts": 1, "eagle": True}
IMAGES = {"image": 3, "encoder_cache": 3, "encoder_budget": 3}
# what is changed in PLAIN, the field that the refusal names, a part of its reason
REFUSALS = [
    ({"groups": ()}, "groups", "1 to 8 groups, not 0"),
    ({"groups": (FULL,) * 9}, "groups", "1 to 8 groups, not 9"),
    ({"groups": (FULL, LayerGroup(0))}, "groups[1].block_size", "in [1, 256], not 0"),
    ({"groups": (LayerGroup(257),)}, "groups[0].block_size", "in [1, 256], not 257"),
    ({"groups": (LayerGroup(2, 0),)}, "groups[0].window", "in [1, 65536], not 0"),
    ({"groups": (LayerGroup(2, 3, state=True),)}, "groups[0].window", "goes without state"),
    ({"groups": (LayerGroup(2, ring=True),)}, "groups[0].ring", "needs window"),
    ({"groups": (DRAFTER,)}, "groups[0].drafter", "needs eagle"),
    ({"groups": (replace(STATE, drafter=True),), **DRAFTS}, "groups[0].drafter", "not recurrent"),
    ({"groups": (replace(RING, drafter=True),), **DRAFTS}, "groups[0].drafter", "without ring"),
    ({"groups": (DRAFTER, DRAFTER), **DRAFTS}, "groups", "only one group"),
    ({"blocks": 0}, "blocks", "in [1, 4096], not 0"),
    ({"retention": -2}, "retention", "in [-1, 4096], not -2"),
    ({"groups": (LayerGroup(256),), "blocks": 257}, "blocks", "at most 65536 tokens"),
    ({"eagle": True}, "eagle", "needs drafts"),
    ({"drafts": 9}, "max_batched_tokens", "a round of 2 requests with 9 drafts each"),
    ({"chunked": False, "max_batched_tokens": 10}, "max_batched_tokens", "at least max_model_len"),
    ({"chunk_blocks": 2}, "chunk_blocks", "needs host_chunks"),
    ({"arc": True}, "arc", "needs host_chunks"),
    ({"prompt_only": True}, "prompt_only", "needs host_chunks"),
    ({"peer": True, "arc": True}, "arc", "needs host_chunks"),
    ({"sync_loads": True}, "sync_loads", "needs host_chunks or peer"),
    ({"groups": (FULL, LayerGroup(4)), "chunk_blocks": 2, **HOST}, "chunk_blocks", "several sizes"),
    ({"peer": True, "sync_loads": True, "groups": (WINDOW,)}, "sync_loads", "a single group without window"),
    ({"peer": True, "sync_loads": True, "groups": (FULL, FULL)}, "sync_loads", "a single group"),
    ({"storage": True}, "storage", "needs host_chunks"),
    ({"lazy": True}, "lazy", "needs simple"),
    ({"simple": True}, "simple", "needs host_chunks"),
    ({"simple": True, "chunk_blocks": 2, **HOST}, "chunk_blocks", "must be 1 with simple"),
    ({"simple": True, "arc": True, **HOST}, "arc", "goes without simple"),
    ({"simple": True, "sync_loads": True, **HOST}, "sync_loads", "goes without simple"),
    ({"simple": True, "prompt_only": True, **HOST}, "prompt_only", "goes without simple"),
    ({"simple": True, "storage": True, **HOST}, "storage", "goes without simple"),
    ({"simple": True, "groups": (WINDOW, STATE), **HOST}, "simple", "a group of full attention"),
    ({"fail_requests": True}, "fail_requests", "needs peer"),
    ({"caching": False, **HOST}, "host_chunks", "needs caching"),
    ({"retention": -1}, "retention", "a group with state"),
    ({"match": 2}, "match", "a group with state"),
    ({"checkpoints": 2, "groups": (STATE,), "caching": False}, "checkpoints", "needs caching"),
    ({"match": 2, "groups": (STATE, LayerGroup(3))}, "match", "must divide groups[1].block_size, 3"),
    ({"drafts": 2, "groups": (FULL, STATE)}, "groups[1].block_size", "must be above 2"),
    ({"encoder_cache": 3}, "encoder_cache", "needs image"),
    ({"encoder_budget": 3}, "encoder_budget", "needs image"),
    ({"whole_images": True}, "whole_images", "needs image"),
    ({**IMAGES, "encoder_cache": 2}, "encoder_cache", "an image of 3 embeddings"),
    ({**IMAGES, "encoder_budget": 2}, "encoder_budget", "an image of 3 embeddings"),
    ({**IMAGES, "whole_images": True, "max_batched_tokens": 2}, "max_batched_tokens", "images are not split"),
    ({"blocks": 7}, "blocks", "needs 8 blocks"),
]


def refusal(changes: dict[str, object]) -> GeometryError:
    with pytest.raises(GeometryError) as raised:
        replace(PLAIN, **changes)
    return raised.value


def line_of_requirement(error: GeometryError) -> int:
    """Return the line of the call of `_require` that refused the sizes."""
    frames = traceback.extract_tb(error.__traceback__)
    assert frames[-1].name == "_require"
    return frames[-2].lineno


@pytest.mark.parametrize("changes, field, reason", REFUSALS)
def test_sizes_that_do_not_fit_are_refused_with_their_field_and_the_reason(changes, field, reason):
    error = refusal(changes)
    assert error.field == field
    assert reason in error.reason


def test_each_requirement_of_sizes_has_a_row():
    tree = ast.parse(inspect.getsource(engine_config))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    required = {call.lineno for call in calls if ast.unparse(call.func) == "_require"}
    assert len(required) > 30
    assert required == {line_of_requirement(refusal(changes)) for changes, _, _ in REFUSALS}


def test_what_only_a_connector_has_is_accepted_with_one():
    replace(PLAIN, **HOST, chunk_blocks=2, arc=True, sync_loads=True, prompt_only=True)
    replace(PLAIN, peer=True, sync_loads=True)
    replace(PLAIN, groups=(DRAFTER, RING), **DRAFTS)


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
    config = EngineConfig(tuple(groups), blocks=40, max_model_len=16, max_batched_tokens=8)
    object.__setattr__(config, "blocks", blocks)
    room = [length for length in range(1, 17) if config.has_room_for(length)]
    assert room == [*range(1, longest + 1)]


def test_drawn_sizes_fit_together():
    for seed in range(300 if NIGHT else 100):
        for preset in ENGINE_PRESETS.values():
            drawn = draw_engine_config(RandomChoices(seed), preset)
            windows = ([g.window is None for g in each.groups] for each in (drawn, preset))
            assert len({*map(tuple, map(sorted, windows))}) == 1


@pytest.mark.parametrize(("name", "blocks"), [("state-fine", 11), ("state", 24), ("state-drafts", 32)])
def test_a_pool_is_small_where_hits_within_a_block_meet_busy_clients(name, blocks):
    """The copy of such a hit may be the one block that a request needs."""
    calm = EngineProfile(
        names=("r1",), texts="a", sessions=0, abort=0, reset=0, stop=0, accept=0, long=False, busy=False,
        overlong=False, slow=1, forget=0, fails=0, alike=0,
    )  # fmt: skip
    preset = ENGINE_PRESETS[name]
    assert fit_config(preset, calm) == preset
    assert fit_config(preset, replace(calm, busy=True)).blocks == blocks
