"""Sizes of servers with a host tier, and traces with them."""

from dataclasses import replace

import pytest

from reference.commands import Mode
from reference.geometry import GeometryError
from reference.tiers.config import TierConfig, tier_preset
from stateful_tests.lockstep.run_results import Trace
from stateful_tests.tests.tiers.lines import ROUND, commands
from stateful_tests.traces.trace_files import TraceError, dump, loads


def test_a_trace_is_written_and_read():
    trace = Trace(tier_preset("tier-page4-back"), Mode.FAITHFUL, commands(ROUND))
    assert loads(dump(trace).encode(), "trace") == trace
    wrong = dump(trace).replace('"policy": "write_back"', '"policy": "never"')
    with pytest.raises(TraceError, match=r"\$\.config\.policy: must be one of 'write_through'"):
        loads(wrong.encode(), "trace")


@pytest.mark.parametrize(("field", "value"), [
    ("page_size", 0), ("window", 0), ("full_pages", 0), ("swa_pages", 5000), ("host_pages", 0),
    ("host_swa_pages", 0), ("width", 0), ("policy", "never"), ("storage", "never"), ("decode", "never"),
    ("rows", 2),
])  # fmt: skip
def test_sizes_that_cannot_be_are_named(field, value):
    with pytest.raises(GeometryError) as error:
        replace(tier_preset("tier-window"), **{field: value})
    assert error.value.field == field


def test_a_server_that_only_decodes_has_rows_and_no_storage():
    for changes, field in (
        ({"rows": 0}, "rows"),
        ({"storage": "best_effort"}, "storage"),
        ({"host_pages": 3}, "host_pages"),
        ({"prefill": "radix"}, "prefill"),
    ):
        with pytest.raises(GeometryError) as error:
            replace(tier_preset("decode"), **changes)
        assert error.value.field == field


def test_a_server_that_only_prefills_has_rows_and_no_host_tier():
    for changes, field in (
        ({"rows": 0}, "rows"),
        ({"storage": "best_effort"}, "storage"),
        ({"host_pages": 3}, "host_pages"),
        ({"attempts": 9}, "attempts"),
        ({"attempts": -1}, "attempts"),
        ({"prefill": "never"}, "prefill"),
        ({"states": 2, "host_states": 2, "page_size": 1}, "states"),
    ):
        with pytest.raises(GeometryError) as error:
            replace(tier_preset("prefill"), **changes)
        assert error.value.field == field
    for changes, field in (({"overlap": True}, "overlap"), ({"attempts": 1}, "attempts")):
        with pytest.raises(GeometryError) as error:
            replace(tier_preset("tier"), **changes)
        assert error.value.field == field


def test_a_tree_without_a_window_has_no_swa_pool():
    for pages, field in (((3, 0), "swa_pages"), ((0, 3), "host_swa_pages")):
        with pytest.raises(GeometryError) as error:
            TierConfig(
                page_size=1,
                window=None,
                full_pages=4,
                swa_pages=pages[0],
                host_pages=4,
                host_swa_pages=pages[1],
                width=8,
            )
        assert error.value.field == field


@pytest.mark.parametrize(("changes", "field"), [
    ({"states": 0, "host_states": 0}, "tracks"), ({"tracks": False}, "states"),
    ({"host_states": 0}, "host_states"),
])  # fmt: skip
def test_a_longer_page_needs_states_that_are_tracked(changes, field):
    with pytest.raises(GeometryError) as error:
        replace(tier_preset("tier-track-window"), **changes)
    assert error.value.field == field


def test_a_slot_of_a_state_is_no_page():
    sizes = tier_preset("tier-track-window")
    assert (sizes.device_slots("state"), sizes.host_slots("state")) == (range(1, 15), 6)
    assert (sizes.device_slots("full"), sizes.host_slots("full")) == (range(2, 30), 36)
