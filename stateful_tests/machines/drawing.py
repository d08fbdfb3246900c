"""Hypothesis makes the decisions of the generators that `kvspec check` uses: each is a draw of its own.

So Hypothesis's database keeps the decisions of a failing run, and its shrinker leaves fewer and lower ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from hypothesis import strategies as st

from reference.commands import Command, Mode
from reference.geometry import Geometry
from impl.choices import once_in, pick
from stateful_tests.generate.commands import HARNESSES
from stateful_tests.generate.next_command import next_of
from stateful_tests.generate.run_profile import RunProfile, draw_geometry, draw_profile, with_settings
from stateful_tests.machines.targets import MachineTarget

_Draw = Callable[[st.SearchStrategy[Any]], Any]
_whole_numbers = lru_cache(maxsize=None)(st.integers)
OUT_OF_TURN = None  # in the place of a kind


class DrawnChoices:
    """Decisions that Hypothesis draws."""

    def __init__(self, draw: _Draw) -> None:
        self._draw = draw

    def upto(self, high: int) -> int:
        return self._draw(_whole_numbers(0, high)) if high > 0 else 0


class Start(NamedTuple):
    """A run before its first command.

    profile: which commands are frequent, how many names there are.
    """

    geometry: Geometry
    mode: Mode
    profile: RunProfile


@st.composite
def starts(draw: _Draw) -> Start:
    """Return the sizes, the mode and the profile of a run of a machine."""
    target: MachineTarget = draw(st.runner()).target
    choices = DrawnChoices(draw)
    capabilities = target.system.capabilities
    machine, geometry, mode = pick(choices, target.configurations)
    profile = draw_profile(choices, capabilities, machine)
    if target.vary and once_in(choices, 4):
        geometry = draw_geometry(choices, geometry)
    return Start(with_settings(choices, geometry, capabilities), mode, profile)


# How much a kind must be called for to be offered, in percent of the one that is called for most.
THRESHOLDS = st.integers(0, 99)


@st.composite
def commands(draw: _Draw, kind: type | None) -> Command:
    """Return a command of one kind for the state now. OUT_OF_TURN returns one of any kind, which need not
    apply.

    Draws `machine.threshold` as well, by which the next rules are offered.
    """
    machine = draw(st.runner())
    choices = DrawnChoices(draw)
    if kind is OUT_OF_TURN:
        command = next_of(machine.enabled_commands(choices, invalid=True))
    else:
        command = HARNESSES[kind].draw(machine.enabled_commands(choices))
    machine.threshold = draw(THRESHOLDS)
    return command
