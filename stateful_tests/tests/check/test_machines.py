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
from stateful_tests.check.campaign import check_machine, plan, run, sizes_for
from stateful_tests.generate.run_profile import MACHINES
from stateful_tests.lockstep.lockstep import replay
from stateful_tests.lockstep.reference_system import ReferenceSystem
from stateful_tests.lockstep.results import Run
from stateful_tests.lockstep.systems import resolve
from stateful_tests.machines.hypothesis_machines import ClauseViolated, machine
from stateful_tests.shrink.minimise import minimise

EXAMPLES = {"sessions": 10, "tree": 5, "both": 5}


def _fitting(system: System, name: str, preset: str, mode: Mode) -> None:
    try:
        check_machine(system, name, sizes_for(name, preset))
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


def _drive(system: System, name: str, preset: str, mode: Mode, examples: int) -> Run | None:
    """Run a Hypothesis machine; a violation comes back at its smallest, by command."""
    driven = machine(name, lambda: system, sizes_for(name, preset), mode)
    # Shrinking by command is done below: it is faster, and the same for every trace.
    quick = settings(
        max_examples=examples, stateful_step_count=40, phases=(Phase.explicit, Phase.reuse, Phase.generate)
    )
    try:
        run_state_machine_as_test(driven, settings=quick)
    except ClauseViolated as found:
        return replay(system, minimise(system, found.trace, found.violation.clause))
    return None


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", MACHINES)
def test_machine(system: System, name: str, preset: str, mode: Mode) -> None:
    _fitting(system, name, preset, mode)
    found = _drive(system, name, preset, mode, EXAMPLES[name])
    if found is not None:
        pytest.fail(_told(found), pytrace=False)


@pytest.mark.parametrize(
    "name, bug",
    [
        ("sessions", "pr22897"),
        ("sessions", "pr22862-align"),
        ("sessions", "close-forgotten"),
        ("sessions", "sweep-into-window"),
        ("tree", "split-forgets-locks"),
        ("both", "slot-drops-the-lock"),
    ],
)
def test_the_machine_finds_bugs(name: str, bug: str) -> None:
    runs = (_drive(resolve(f"torch+{bug}"), name, "page4", mode, examples=100) for mode in Mode)
    assert any(found is not None for found in runs)


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", MACHINES)
def test_volume_run(system: System, name: str, preset: str, mode: Mode) -> None:
    """A small seeded campaign; a finding is told as its smallest trace."""
    _fitting(system, name, preset, mode)
    wanted = plan("smoke", presets=[preset], modes=[mode], machines=[name], examples=8, seed=1)
    result = run(system, wanted)
    if result.findings:
        pytest.fail("\n".join(_told(f.run) for f in result.findings), pytrace=False)


def test_the_model_satisfies_the_clauses() -> None:
    """Operational model against declarative clauses, with nothing else in between; all reached."""
    result = run(ReferenceSystem(), plan("smoke", examples=6, seed=2))
    assert not result.findings
    assert result.unreached == ()
