"""What the machines with a radix tree draw: prompts that meet what is there, and an end to everything."""

from collections import Counter
from dataclasses import replace

import pytest

from impl.adapter import Capabilities
from reference import model
from reference.commands import Admit, Chunk, Command, Extend, Insert, Match, Mode, Refused, Submit, prompt_len
from reference.geometry import PRESETS
from reference.state import State
from reference.prefix_cache import key_of, lock_holders
from stateful_tests.generate.choice_source import RandomChoices
from stateful_tests.generate.next_command import finale, propose
from stateful_tests.generate.prompts import (
    draw_evicted, draw_prompt, input_of, joined, known, shortened, spelt,
)  # fmt: skip
from stateful_tests.generate.run_profile import draw_profile
from stateful_tests.lockstep.tree_diff import tree_changes
from stateful_tests.traces.files import prompt_of, prompt_text

PAGE4 = replace(PRESETS["page4"], tree=True)


def after(*commands: Command) -> State:
    state = model.initial(PAGE4)
    for command in commands:
        state, outcome = model.step(state, command)
        assert not isinstance(outcome, Refused), outcome
    return state


def test_prompts_are_cut_joined_and_read_back():
    prompt = prompt_of("a8b4a1")
    assert spelt(key_of(prompt)) == prompt
    assert [prompt_text(shortened(prompt, n)) for n in (0, 3, 8, 9, 99)] == ["", "a3", "a8", "a8b1", "a8b4a1"]
    assert prompt_text(joined(prompt, prompt_of("a2c1"), ())) == "a8b4a3c1"


def test_what_is_known_is_spelt_as_far_as_it_is_shared():
    state = after(
        Insert("h1", prompt_of("a8b4")), Submit("r1", None, 3, prompt=prompt_of("a8c2")), Admit("r1"),
        Extend((Chunk("r1", 5),)), Submit("r2", None, 2),
    )  # fmt: skip
    assert input_of(state.requests[0]) == prompt_of("a8c2")
    assert input_of(state.requests[1]) == ()
    assert {prompt_text(p) for p in known(state)} == {"a4", "a8", "a8b4", "a8c2"}


@pytest.mark.parametrize("longest", [1, 3, 4, 9, 32])
def test_prompts_are_well_formed_and_fit(longest):
    state = after(Insert("h1", prompt_of("a8b4")), Match("h2", prompt_of("a4")))
    source = RandomChoices(longest)
    for _ in range(300):
        prompt = draw_prompt(state, source, "abc", longest)
        assert 1 <= prompt_len(prompt) <= longest
        assert all(piece.tokens >= 1 for piece in prompt)
        assert prompt == joined(prompt), "pieces that follow each other have different texts"
        on = draw_prompt(state, source, "abc", max(4, longest), after=prompt_of("a4"))
        assert shortened(on, 4) == prompt_of("a4")


def test_a_sweep_stays_within_its_limit():
    state = after(Insert("h1", prompt_of("a16"), 16))
    source = RandomChoices(0)
    drawn = Counter(draw_evicted(state, source, key_of(prompt_of("a16b4")), 0, 12) for _ in range(300))
    assert set(drawn) <= set(range(13))
    assert all(drawn[length] > 10 for length in (0, 4, 8, 12)), "into the tombstone, page by page"


def test_a_lock_is_told_when_it_is_taken_and_no_more():
    """A release that shapes its own tree lets the reference pin less, between two commands."""
    insert, match = Insert("h1", prompt_of("a4")), Match("h2", prompt_of("a4"))
    was, now = after(insert), after(insert, match)
    told = ("h2 locks [0, 4): pins 4 SWA tokens, a window needs 4",)
    less = now._replace(tree=now.tree._replace(locks=tuple(k._replace(swa_from=3) for k in now.tree.locks)))
    assert (tree_changes(was, now), tree_changes(now, less)) == (told, ())
    assert tree_changes(was, less) == ("h2 locks [0, 4): pins 1 SWA token, a window needs 4",)


@pytest.mark.parametrize("machine", ["sessions", "tree", "both"])
def test_a_finale_leaves_nothing_behind(machine):
    for run in range(20):
        source = RandomChoices(f"reach/{machine}/{run}")
        profile = draw_profile(source, Capabilities(), machine)
        geometry = replace(tuple(PRESETS.values())[run % len(PRESETS)], tree=True)
        state = model.initial(geometry, tuple(Mode)[run % 2])
        for _ in range(50):
            state, _ = model.step(state, propose(state, source, profile))
        for command in finale(state):
            state, _ = model.step(state, command)
        assert state.tree is not None and not state.tree.children and not state.tree.locks
        assert not state.sessions and not state.requests and not lock_holders(state)
