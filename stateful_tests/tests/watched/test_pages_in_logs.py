"""Logs that state pages and slots: each has one owner, or is free."""

import pytest

from stateful_tests.tests.support.written_logs import FIXTURES, lines_of, validate


PAGES = FIXTURES / "sglang-0.5.23-pages.jsonl"


def test_a_page_that_is_owned_and_free_is_noticed(written):
    lines = lines_of(PAGES)
    line_index = next(n for n, line in enumerate(lines) if line.get("owners"))
    slots = next(iter(lines[line_index]["owners"].values()))[2]
    lines[line_index]["free_full"].append(slots[-1] // lines[0]["page_size"])
    assert validate(written(lines)).unexplained[0].clause == "OWN-1"


def test_a_mapping_to_a_slot_behind_the_swa_pool_is_none(written):
    lines = lines_of(PAGES)
    line_index = next(n for n, line in enumerate(lines) if line.get("owners"))
    slot = next(iter(lines[line_index]["owners"].values()))[2][-1]
    lines[line_index]["mapping"][slot] = lines[0]["swa_tokens"] + lines[0]["page_size"]
    assert validate(written(lines)).unexplained[0].clause == "MAP-2"


STATES_IN_PAGES = FIXTURES / "sglang-0.5.23-pages_and_states.jsonl"


@pytest.mark.parametrize("change", ["free again", "lost", "of two", "of a node"])
def test_slots_of_recurrent_state_are_free_or_have_one_owner(change, written):
    lines = lines_of(STATES_IN_PAGES)
    states = next(n["states"] for n in lines[1:] if n.get("owners") and any(n["states"]["nodes"]))
    [first, *_] = states["held"].values()
    if change == "free again":
        states["free"].append(first[0])
    elif change == "lost":
        states["free"].pop()
    elif change == "of two":
        first[0] = first[1]
    else:
        states["nodes"] = [first[0], *states["nodes"][1:]]
    assert "STA-6" in {mismatch.clause for mismatch in validate(written(lines)).unexplained}
