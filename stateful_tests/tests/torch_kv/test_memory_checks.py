"""The memory checks see what unbalances. That they wait for the device once: test_device."""

import pytest

from impl.torch_kv import TorchKV
from reference.commands import Admit, CheckBusy, Chunk, Command, Done, Extend, Open, Report, Submit
from reference.geometry import PRESETS, Geometry

PAGE4 = PRESETS["page4"]
TURN = (Open("s1"), Submit("r1", "s1", 10), Admit("r1"), Extend((Chunk("r1", 10),)))


def system_after(*commands: Command, geometry: Geometry = PAGE4) -> TorchKV:
    system = TorchKV()
    system.reset(geometry)
    for command in commands:
        assert isinstance(system.apply(command), Done), command
    return system


def report_of(system: TorchKV, command: Command | None = None) -> Report:
    return system.apply(command or CheckBusy(1)).report


def lost_page(system: TorchKV) -> None:
    system.store.full.take(1)


def lost_swa_page(system: TorchKV) -> None:
    system.store.swa.take(1)


def page_given_twice(system: TorchKV) -> None:
    system.store.full.give(system.store.full.free_pages()[:1].clone())


def lost_row(system: TorchKV) -> None:
    system.store.free_rows.pop()


def cursor_astray(system: TorchKV) -> None:
    system.store.cursors.lines[0, 1] += 4


@pytest.mark.parametrize(
    ("fault", "pools"),
    [
        (lost_page, "full"),
        (lost_swa_page, "swa"),
        (page_given_twice, "full"),
        (lost_row, "rows"),
        (cursor_astray, "full, swa"),
    ],
)
@pytest.mark.parametrize("level", [1, 2])
def test_a_memory_check_notices_each_imbalance(fault, pools, level):
    system = system_after(*TURN)
    assert report_of(system, CheckBusy(level)).alarm == ""
    fault(system)
    assert report_of(system, CheckBusy(level)).alarm == f"memory leak detected in {pools}"
