"""Machines with a radix tree: drawn prompts fit, new locks are shown, and a finale empties everything."""

from dataclasses import replace

import pytest

from impl.adapter import Capabilities
from reference import model
from reference.commands import Command, Insert, Match, Mode, Refused, prompt_len
from reference.geometry import PRESETS
from reference.state import State
from reference.prefix_cache import lock_holders
from impl.choices import RandomChoices
from stateful_tests.generate.next_command import finale, propose
from stateful_tests.generate.prompts import draw_prompt, join_prompts, shorten
from stateful_tests.generate.run_profile import draw_profile
from stateful_tests.lockstep.tree_diff import tree_changes
from stateful_tests.traces.trace_files import prompt_of

PAGE4 = replace(PRESETS["page4"], tree=True)


def after(*commands: Command) -> State:
    """Return the state after commands, none of which may be refused."""
    state = model.initial(PAGE4)
    for command in commands:
        state, outcome = model.step(state, command)
        assert not isinstance(outcome, Refused), outcome
    return state


@pytest.mark.parametrize("longest", [1, 3, 4, 9, 32])
def test_prompts_are_well_formed_and_fit(longest):
    state = after(Insert("h1", prompt_of("a8b4")), Match("h2", prompt_of("a4")))
    source = RandomChoices(longest)
    for _ in range(300):
        prompt = draw_prompt(state, source, "abc", longest)
        assert 1 <= prompt_len(prompt) <= longest
        assert all(piece.tokens >= 1 for piece in prompt)
        assert prompt == join_prompts(prompt), "pieces that follow each other have different texts"
        longer = draw_prompt(state, source, "abc", max(4, longest), after=prompt_of("a4"))
        assert shorten(longer, 4) == prompt_of("a4")


def test_a_new_lock_is_shown_and_a_lock_that_pins_less_than_before_is_not():
    """Between two commands the reference may pin less: for a release that shapes its own tree."""
    insert = Insert("h1", prompt_of("a4"))
    unlocked = after(insert)
    locked = after(insert, Match("h2", prompt_of("a4")))
    less_pinned = locked._replace(
        tree=locked.tree._replace(locks=tuple(k._replace(swa_from=3) for k in locked.tree.locks))
    )
    shown = tree_changes(unlocked, locked)
    assert shown == ("h2 locks [0, 4): pins 4 SWA tokens, a window needs 4",)
    assert tree_changes(locked, less_pinned) == ()
    shown = tree_changes(unlocked, less_pinned)
    assert shown == ("h2 locks [0, 4): pins 1 SWA token, a window needs 4",)


@pytest.mark.parametrize("machine", ["sessions", "tree", "both"])
def test_a_finale_ends_sessions_and_requests_and_empties_the_tree(machine):
    for run in range(20):
        source = RandomChoices(f"reach/{machine}/{run}")
        profile = draw_profile(source, Capabilities(), machine)
        geometry = replace(tuple(PRESETS.values())[run % len(PRESETS)], tree=True)
        state = model.initial(geometry, tuple(Mode)[run % 2])
        for _ in range(50):
            state, _ = model.step(state, propose(state, source, profile))
        for command in finale(state):
            state, _ = model.step(state, command)
        assert state.tree is not None, run
        assert not state.tree.children, run
        assert not state.tree.locks, run
        assert not state.sessions, run
        assert not state.requests, run
        assert not lock_holders(state), run
