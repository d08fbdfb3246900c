"""torch_kv where the device is not the host: what it shows there, what it moves, and what waits."""

from collections.abc import Callable
from functools import cache
from itertools import product
from msgspec.structs import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from impl.adapter import View
from impl.bugs import BUGS
from impl.torch_kv.counting_device import DeviceMixError, on_counting_device, counting, device
from impl.torch_kv import TorchKV
from reference import model
from reference.commands import (
    Admit, CheckBusy, CheckIdle, Chunk, Command, Decode, Draft, Extend, Mode, SpecDecode, Submit,
)  # fmt: skip
from reference.geometry import PRESETS, Geometry
from impl.choices import RandomChoices
from stateful_tests.generate.next_command import finale, propose
from stateful_tests.generate.run_profile import draw_profile
from stateful_tests.lockstep.lockstep import Lockstep
from stateful_tests.lockstep.replays import replay
from stateful_tests.lockstep.system_names import resolve
from stateful_tests.tests.support.night import NIGHT
from stateful_tests.traces.trace_files import load

REGRESSIONS = Path(__file__).parents[3] / "fixtures" / "regressions"
THERE = device()


def random_commands(preset: str, seed: int) -> list[Command]:
    """Commands as a client and a scheduler would give them, then everything ended."""
    source = RandomChoices(f"{preset} {seed}")
    profile = draw_profile(source, TorchKV().capabilities)
    commands = list[Command]()
    state = model.initial(PRESETS[preset], Mode.FREE)
    for _ in range(40):
        commands.append(propose(state, source, profile))
        state, _ = model.step(state, commands[-1])
    return commands + finale(state)


def shown_alike(here: TorchKV, there: TorchKV) -> None:
    for seed, preset in product(range(4) if NIGHT else [3], PRESETS):
        here.reset(PRESETS[preset])
        there.reset(PRESETS[preset])
        for command in random_commands(preset, seed):
            assert here.apply(command) == there.apply(command), command
            assert but_for_padding(here.view()) == but_for_padding(there.view()), command


def but_for_padding(view: View) -> View:
    """Which of several writes to the padding slot comes last is the device's affair."""
    return replace(view, full_stamps=view.full_stamps[1:], swa_stamps=view.swa_stamps[1:])


def test_a_counting_device_agrees_with_the_cpu_and_only_checks_wait():
    other = resolve("torch", device="counting")
    shown_alike(TorchKV(), other)
    waits = {name: waits for name, (_, waits) in other.most.items() if waits}
    assert waits == {"CheckBusy": 1, "CheckIdle": 1}
    most = {
        "Admit": 3, "Extend": 3, "Decode": 2, "SpecDecode": 2, "Launch": 2, "Settle": 2, "EvictSwa": 1,
        "Finish": 4, "Retract": 3,
        "Abort": 3, "Close": 1, "CheckBusy": 1, "CheckIdle": 1,
    }  # fmt: skip
    assert {name for name in most if other.most[name][0] > most[name]} == set()
    assert {name for name, (transfers, _) in other.most.items() if transfers} <= set(most)


class WaitsForChecksAlone(TorchKV):
    """On CUDA, where torch itself raises an error at whatever waits."""

    def apply(self, command):
        torch.cuda.set_sync_debug_mode(
            "default" if isinstance(command, CheckBusy | CheckIdle) else "error"
        )
        try:
            return super().apply(command)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_agrees_with_the_cpu_and_only_checks_wait():
    shown_alike(TorchKV(), WaitsForChecksAlone("cuda"))


def test_a_named_bug_shows_there_by_the_same_clause():
    for file in sorted(REGRESSIONS.glob("*.json"))[:: 1 if NIGHT else 3]:
        trace = load(file)
        if trace.bug in BUGS:
            violation = replay(on_counting_device(BUGS[trace.bug].system), trace).violation
            assert violation is not None and violation.clause == trace.clause, (file, violation)


ON_CPU = torch.tensor([1, 2, 0])


@cache
def on_device() -> torch.Tensor:
    """Made by the first test that asks: torch loads half of itself for the first operator there."""
    return torch.tensor([1, 2, 3]).to(THERE, non_blocking=True)


def waits(work: Callable[[], Any]) -> int:
    with counting() as counts:
        work()
    return len(counts.waits)


def test_reading_a_value_waits_for_the_device():
    x = on_device()
    for number, work in enumerate((
        x[0].item, x.tolist, x.cpu, x.nonzero, x.any().__bool__, x[1].__index__, x.__repr__,
        lambda: x[x > 1], lambda: x.clone().__setitem__(x > 1, 0), lambda: x.masked_select(x > 1),
        lambda: torch.unique(x), lambda: torch.equal(x, x), lambda: torch.repeat_interleave(x),
        lambda: ON_CPU.clone().copy_(x), lambda: ON_CPU.to(THERE), lambda: torch.tensor([1], device=THERE),
    )):  # fmt: skip
        assert waits(work) == 1, number


def test_operations_of_known_size_do_not_wait():
    x = on_device()
    for number, work in enumerate((
        lambda: x[1:].view(-1, 1), lambda: x.take(x - 1), lambda: torch.cat((x, x)), lambda: x + 1,
        lambda: torch.repeat_interleave(x, output_size=6), lambda: ON_CPU.to(THERE, non_blocking=True),
        lambda: x.clone().put_(x - 1, x), lambda: torch.zeros(2, device=THERE), lambda: len(x.split(1)),
    )):  # fmt: skip
        assert waits(work) == 0, number


def test_a_fresh_tensor_holds_anything():
    assert torch.empty(2, dtype=torch.int64, device=THERE).tolist() != [0, 0]


def test_devices_do_not_mix():
    other = on_device()
    for work in (other.add, other.take, other.__getitem__, ON_CPU.sub):
        with pytest.raises(DeviceMixError, match="on counting and on the CPU"):
            work(other if work == ON_CPU.sub else ON_CPU)
    # but for single numbers, as on a GPU
    assert (other + torch.tensor(1)).tolist() == [2, 3, 4]


class ReadsALength(TorchKV):
    def write_decoded(self, slots, tokens, fresh):
        super().write_decoded(slots[: int(tokens.numel() * slots[0].sign())], tokens, fresh)


class StaysOnTheHost(TorchKV):
    def write_decoded(self, slots, tokens, fresh):
        super().write_decoded(slots, torch.tensor(tokens.shape), fresh)


@pytest.mark.parametrize(
    "system, error",
    [
        (
            ReadsALength,
            "HostWaitError: _local_scalar_dense waits for the device at test_device.py:",
        ),
        (StaysOnTheHost, "DeviceMixError: put_ of tensors on counting and on the CPU at store.py:"),
    ],
)
def test_a_command_that_should_not_breaks_and_names_the_line(system, error):
    lockstep = Lockstep(on_counting_device(system), PRESETS["page4"], Mode.FREE)
    for command in (Submit("r", None, 3), Admit("r"), Extend((Chunk("r", 3),)), Decode(("r",))):
        lockstep.do(command)
    assert lockstep.violation is not None and lockstep.violation.observed.startswith(error)


def test_device_work_does_not_grow_with_the_batch():
    def operators(batch):
        system = TorchKV("counting")
        system.reset(Geometry(page_size=4, window=8, full_pages=400, swa_pages=400, rows=16, width=64))
        names = [f"r{i}" for i in range(batch)]
        for name in names:
            system.apply(Submit(name, None, 9))
            system.apply(Admit(name))
        chunks = [Extend(tuple(Chunk(name, tokens) for name in names)) for tokens in (6, 3)]
        verify = SpecDecode(tuple(Draft(name, 5, 2) for name in names))
        counts = []
        decode = Decode(tuple(names))
        ahead = SpecDecode((Draft(names[0], 2, 1),))  # the others decode without slots ahead
        for command in (*chunks, decode, ahead, decode, verify, verify):
            with counting(may_wait=0) as seen:
                system.apply(command)
            counts.append(sum(seen.operators.values()))
        return counts

    assert operators(2) == operators(16)
    assert all(for_one <= for_many for for_one, for_many in zip(operators(1), operators(2), strict=True))
