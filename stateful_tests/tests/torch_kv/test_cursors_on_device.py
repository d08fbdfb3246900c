"""Cursors of torch_kv: device and mirror agree, a drift is caught, nothing waits for the device."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from impl.torch_kv import TorchKV
from impl.torch_kv.cursors import Cursors, CursorTable, Lanes
from impl.torch_kv.sessions import Request, Slot
from impl.torch_kv.store import KVStore
from reference.commands import Admit, Chunk, Command, Decode, Draft, Extend, Mode, SpecDecode, Submit
from reference.geometry import PRESETS, Geometry
from stateful_tests.generate.choice_source import RandomChoices
from stateful_tests.generate.next_command import propose
from stateful_tests.generate.run_profile import draw_profile
from stateful_tests.lockstep.lockstep import Lockstep
from stateful_tests.tests.torch_kv.test_devices import random_commands


def holders(system: TorchKV) -> list[Request | Slot]:
    slots = [session.slot for session in system.sessions.values() if session.slot is not None]
    return [*slots, *(r for r in system.requests.values() if r.row is not None)]


@pytest.mark.parametrize("preset", PRESETS)
def test_the_mirror_is_what_the_device_has(preset: str) -> None:
    system = TorchKV()
    seen = 0
    for seed in range(5):
        system.reset(PRESETS[preset])
        for command in random_commands(preset, seed):
            system.apply(command)
            for holder in holders(system):
                assert holder.row is not None
                assert system.table_of(holder).lines[holder.row].tolist() == list(holder.cursors), command
                seen += 1
        assert not system.store.cursors.lines.any()  # so a row is taken with cursors of 0
    assert seen > 100


class MirrorStays(CursorTable):
    """Writes the device alone."""

    def move(self, lanes: Lanes, rule: Any) -> tuple[Cursors, Cursors]:
        before = [holder.cursors for holder in lanes.holders]
        moved = super().move(lanes, rule)
        for holder, cursors in zip(lanes.holders, before, strict=True):
            holder.cursors = cursors
        return moved


class DeviceStays(CursorTable):
    """Writes the mirror alone."""

    def move(self, lanes: Lanes, rule: Any) -> tuple[Cursors, Cursors]:
        lines = self.lines.clone()
        moved = super().move(lanes, rule)
        self.lines.copy_(lines)
        return moved


def drifting(table: type[CursorTable], name: str) -> TorchKV:
    """A system whose table of this name writes one side only."""

    class Store(KVStore):
        def __init__(self, geometry: Any, device: torch.device, checked: bool = False) -> None:
            super().__init__(geometry, device, checked)
            setattr(self, name, table(geometry.rows, device))

    return type("Drifting", (TorchKV,), {"store_class": Store})()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["cursors", "slot_cursors"])
@pytest.mark.parametrize("table", [MirrorStays, DeviceStays])
def test_a_side_that_drifts_is_caught(table: type[CursorTable], name: str) -> None:
    system = drifting(table, name)
    for seed in range(20):
        source = RandomChoices(f"drift {seed}")
        profile = draw_profile(source, system.capabilities)
        lockstep = Lockstep(system, PRESETS["page2"], Mode.FREE)
        for _ in range(60):
            lockstep.do(propose(lockstep.state, source, profile))
            if lockstep.violation is not None:
                return
    pytest.fail("no violation")


class Waits(TorchDispatchMode):
    """Counts operators that need a value, or a size, from the device."""

    names = frozenset({"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero"})

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.overloadpacket.__name__
        self.seen[name] += 1
        if name in self.names:
            self.found.append(name)
        if name == "repeat_interleave" and (kwargs or {}).get("output_size") is None:
            self.found.append(name)  # an unknown total is a size from the device
        if name in {"index", "index_put_"} and any(
            i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        ):
            self.found.append(name + " by mask")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("preset", ["page2", "no-swa"])
def test_no_command_waits_for_the_device(preset: str) -> None:
    system = TorchKV()
    waits = Waits()
    for seed in range(3):
        system.reset(PRESETS[preset])
        for command in random_commands(preset, seed):
            with waits:
                system.apply(command)
    assert waits.found == []
    assert waits.seen["put_"] > 50


def test_device_work_does_not_grow_with_the_batch() -> None:
    def operators(batch: int) -> list[int]:
        system = TorchKV()
        system.reset(Geometry(4, 8, 400, 400, rows=16, width=64))
        names = [f"r{i}" for i in range(batch)]
        for name in names:
            system.apply(Submit(name, None, 9))
            system.apply(Admit(name))

        def chunks(tokens: int) -> Command:
            return Extend(tuple(Chunk(name, tokens) for name in names))

        counts = []
        for command in (
            chunks(6), chunks(3), Decode(tuple(names)), SpecDecode(tuple(Draft(n, 5, 2) for n in names)),
            SpecDecode(tuple(Draft(n, 5, 2) for n in names)),
        ):  # fmt: skip
            with Waits() as waits:
                system.apply(command)
            counts.append(sum(waits.seen.values()))
        return counts

    assert operators(1) == operators(2) == operators(16)
