"""The machines as tests: the system that --impl names, beside the reference, on every preset.

Covers what few, deterministic examples reach. Fresh seeds and volume belong to `kvspec check`.
"""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from impl.adapter import System, UnusableImplementation
from reference.clauses import CLAUSES
from reference.commands import Mode
from reference.geometry import PRESETS
from stateful_tests.campaign import minimise, plan, run
from stateful_tests.lockstep import check_fits, replay
from stateful_tests.machines import ClauseViolated, session_machine
from stateful_tests.reference_system import ReferenceSystem
from stateful_tests.registry import resolve
from stateful_tests.results import Run


def _fitting(system: System, preset: str, mode: Mode) -> None:
    try:
        check_fits(system, PRESETS[preset])
    except UnusableImplementation as error:
        pytest.skip(str(error))
    if mode not in system.capabilities.modes:
        pytest.skip(f"{system.name} is not driven in {mode} mode")


def _told(found: Run) -> str:
    """A violation for whoever reads pytest's output; `kvspec check` tells more."""
    v = found.violation
    assert v is not None
    sentence = CLAUSES[v.clause].sentence if v.clause in CLAUSES else "the system itself failed"
    steps = [f"  {i} {row.command}" for i, row in enumerate(found.rows)]
    told = [f"{found.system} violates {', '.join(v.clauses)}: {sentence}", *steps]
    told += [f"  expected: {v.expected}", f"  observed: {v.observed}"]
    return "\n".join([*told, f"  {found.trace.geometry}, mode {found.trace.mode}"])


def _drive(system: System, preset: str, mode: Mode, examples: int) -> Run | None:
    """Run the Hypothesis machine; a violation comes back at its smallest, by command."""
    machine = session_machine(lambda: system, PRESETS[preset], mode)
    # Shrinking by command is done below: it is faster, and the same for every trace.
    quick = settings(
        max_examples=examples, stateful_step_count=40, phases=(Phase.explicit, Phase.reuse, Phase.generate)
    )
    try:
        run_state_machine_as_test(machine, settings=quick)
    except ClauseViolated as found:
        return replay(system, minimise(system, found.trace, found.violation.clause))
    return None


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("preset", PRESETS)
def test_session_machine(system: System, preset: str, mode: Mode) -> None:
    _fitting(system, preset, mode)
    found = _drive(system, preset, mode, examples=15)
    if found is not None:
        pytest.fail(_told(found), pytrace=False)


@pytest.mark.parametrize("bug", ["pr22897", "pr22862-align", "close-forgotten", "sweep-into-window"])
def test_the_machine_finds_bugs(bug: str) -> None:
    runs = (_drive(resolve(f"torch+{bug}"), "page4", mode, examples=100) for mode in Mode)
    assert any(found is not None for found in runs)


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("preset", PRESETS)
def test_volume_run(system: System, preset: str, mode: Mode) -> None:
    """A small seeded campaign; a finding is told as its smallest trace."""
    _fitting(system, preset, mode)
    result = run(system, plan("smoke", presets=[preset], modes=[mode], examples=12, seed=1))
    if result.findings:
        pytest.fail("\n".join(_told(f.run) for f in result.findings), pytrace=False)


def test_the_model_satisfies_the_clauses() -> None:
    """Operational model against declarative clauses, with nothing else in between; all reached."""
    result = run(ReferenceSystem(), plan("smoke", examples=12, seed=2))
    assert not result.findings
    assert result.unreached == ()
