"""torch_kv over random commands: the same facts on every device, and no error in a checked run."""

from __future__ import annotations

import pytest
import torch

from impl.torch_kv import TorchKV
from reference import model
from reference.commands import Command, Done, Mode
from reference.geometry import PRESETS
from stateful_tests.generate.choice_source import RandomChoices
from stateful_tests.generate.next_command import finale, propose
from stateful_tests.generate.run_profile import draw_profile


def random_commands(preset: str, seed: int, steps: int = 40) -> list[Command]:
    """Commands as a client and a scheduler would give them, then everything ended."""
    source = RandomChoices(f"{preset} {seed}")
    profile = draw_profile(source, TorchKV().capabilities)
    state = model.initial(PRESETS[preset], Mode.FREE)
    commands: list[Command] = []
    for _ in range(steps):
        commands.append(propose(state, source, profile))
        state, _ = model.step(state, commands[-1])
    return commands + finale(state)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("preset", PRESETS)
def test_cuda_shows_what_cpu_shows(preset: str) -> None:
    here, there = TorchKV("cpu"), TorchKV("cuda")
    for seed in range(5):
        here.reset(PRESETS[preset])
        there.reset(PRESETS[preset])
        for command in random_commands(preset, seed):
            assert here.apply(command) == there.apply(command)
            assert here.view() == there.view(), command


@pytest.mark.parametrize("preset", PRESETS)
def test_a_checked_run_raises_nothing_and_ends_empty(preset: str) -> None:
    size = PRESETS[preset]
    system = TorchKV(checked=True)
    for seed in range(5):
        system.reset(size)
        outcomes = [system.apply(command) for command in random_commands(preset, seed)]
        assert any(isinstance(outcome, Done) for outcome in outcomes)
        view = system.view()
        assert sorted(view.free_full) == list(range(1, size.full_pages + 1))
        assert sorted(view.free_swa) == list(range(1, size.swa_pages + 1))
        assert sorted(view.free_rows) == list(range(size.rows))
        assert not any(view.full_to_swa)


def test_a_view_is_a_snapshot() -> None:
    system = TorchKV()
    system.reset(PRESETS["page2"])
    for command in random_commands("page2", 1):
        before = system.view()
        copy = repr(before)
        system.apply(command)
        assert repr(before) == copy
