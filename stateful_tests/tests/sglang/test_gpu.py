"""A release on a GPU, where its own Triton kernels run, shows what it shows on a CPU."""

import pytest
import torch

from impl.adapter import System, UnusableImplementation
from reference import model
from reference.commands import Broken, Mode, Refused
from reference.geometry import PRESETS
from stateful_tests.check.check_plans import sizes_for
from impl.choices import RandomChoices
from stateful_tests.generate.next_command import propose
from stateful_tests.generate.run_profile import MACHINES, draw_profile
from stateful_tests.lockstep.system_names import resolve


def play_both(here: System, there: System, machine: str, preset: str) -> int:
    """Random commands, until the release breaks. Returns how many."""
    source = RandomChoices(f"{machine} {preset}")
    geometry = sizes_for(machine, preset)
    profile = draw_profile(source, here.capabilities, machine)
    state = model.initial(geometry, Mode.FAITHFUL)
    here.reset(geometry)
    there.reset(geometry)
    for number in range(30):
        command = propose(state, source, profile)
        outcomes = here.apply(command), there.apply(command)
        if not isinstance(outcomes[0], Refused):  # a release refuses what its scheduler never does
            state, _ = model.step(state, command)
        if all(isinstance(outcome, Broken) for outcome in outcomes):
            return number
        assert outcomes[0] == outcomes[1], number
        assert here.view() == there.view(), command
    return 30


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    "version", ["0.5.10", "0.5.15", "0.5.22+overlap", "0.5.23", "0.5.23+overlap"]
)
def test_a_release_on_a_gpu_agrees_with_the_cpu(version, release):
    here = release(version)
    on_gpu = resolve(f"sglang=={version}", device="cuda")
    played = [
        play_both(here, on_gpu, machine, name)
        for machine in MACHINES
        for name, sizes in PRESETS.items()
        if here.capabilities.keeps_states(sizes)
    ]
    on_gpu.close()
    assert sum(played) > 15 * len(played)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_reported(release):
    release("0.5.23")  # else it is skipped
    with pytest.raises(UnusableImplementation, match="torch sees no CUDA device here"):
        resolve("sglang==0.5.23", device="cuda").reset(PRESETS["page1"])
