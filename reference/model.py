"""step(state, command) -> (state, outcome): the specification as a function.

Immutable state in, immutable state out. What each command does, and is refused for, is in `rules/`.
"""

from __future__ import annotations

from collections.abc import Sequence

from reference.commands import Choice, Command, Mode, Outcome, Reason, Refused
from reference.geometry import Geometry
from reference.state import RunConfig, State
from reference.prefix_cache import Effects, no_effects
from reference.rules.rule_definition import RULES, Refusal, RuleContext
from reference.rules.rule_definition import ChoiceNotAllowed as ChoiceNotAllowed
from reference.radix_tree import Tree

# Raised when the specification is changed: traces carry it.
SPEC_VERSION = "1"
_NO_EFFECTS = no_effects()  # of a refusal, and where there is no tree: nobody changes it
_NO_CHOICES: dict[str, Choice] = {}
_REFUSED = {reason: Refused(reason) for reason in Reason}


def initial(geometry: Geometry, mode: Mode = Mode.FREE) -> State:
    """Return the empty state."""
    states = bool(geometry.states)
    tree = Tree(geometry.page_size, geometry.window, states=states) if geometry.tree else None
    return State(RunConfig(geometry, mode), tree=tree)


def step(state: State, command: Command, choices: Sequence[Choice] = ()) -> tuple[State, Outcome]:
    """Carry out `command`, following `choices` where the specification leaves one.

    Returns the new state and Done, or the very same state and Refused. Raises ChoiceNotAllowed.
    """
    return step_with_effects(state, command, choices)[:2]


def step_with_effects(
    state: State, command: Command, choices: Sequence[Choice] = ()
) -> tuple[State, Outcome, Effects]:
    """Carry out `command` as `step` does, and also return the pages that the tree gave back or adopted."""
    effects = no_effects() if state.tree is not None else _NO_EFFECTS
    context = RuleContext({c.request: c for c in choices} if choices else _NO_CHOICES, effects)
    try:
        return (
            RULES[type(command)].carry_out(state, command, context),
            context.done,
            context.effects,
        )
    except Refusal as refusal:
        return state, _REFUSED[refusal.args[0]], _NO_EFFECTS
