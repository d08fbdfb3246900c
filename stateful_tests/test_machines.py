"""The machines as tests: the system that --impl names, beside the reference, on every preset.

Covers what few, deterministic examples reach. Fresh seeds and volume belong to `kvspec check`.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from impl.adapter import System, UnusableImplementation
from reference.commands import Mode
from reference.geometry import PRESETS
from stateful_tests.campaign import plan, run
from stateful_tests.lockstep import check_fits
from stateful_tests.machines import session_machine
from stateful_tests.reference_system import ReferenceSystem


def _fitting(system: System, preset: str, mode: Mode) -> None:
    try:
        check_fits(system, PRESETS[preset])
    except UnusableImplementation as error:
        pytest.skip(str(error))
    if mode not in system.capabilities.modes:
        pytest.skip(f"{system.name} is not driven in {mode} mode")


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("preset", PRESETS)
def test_session_machine(system: System, preset: str, mode: Mode) -> None:
    _fitting(system, preset, mode)
    machine = session_machine(lambda: system, PRESETS[preset], mode)
    run_state_machine_as_test(machine, settings=settings(max_examples=15, stateful_step_count=30))


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("preset", PRESETS)
def test_volume_run(system: System, preset: str, mode: Mode) -> None:
    """A small seeded campaign; any finding is printed as its smallest trace."""
    _fitting(system, preset, mode)
    result = run(system, plan("smoke", presets=[preset], modes=[mode], examples=12, seed=1))
    assert not result.findings, [(f.clause, f.run.trace.commands, f.run.violation) for f in result.findings]


def test_the_model_satisfies_the_clauses() -> None:
    """Operational model against declarative clauses, with nothing else in between; all reached."""
    result = run(ReferenceSystem(), plan("smoke", examples=12, seed=2))
    assert not result.findings
    assert result.unreached == ()
