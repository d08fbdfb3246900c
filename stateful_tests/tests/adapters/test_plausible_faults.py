"""Faults that an author of a small engine makes, in copies of the example engines: a check finds them."""

import sys
import types
from pathlib import Path

import pytest

from stateful_tests.check.campaign import first_violation
from stateful_tests.check.check_plans import plan
from stateful_tests.tests.support.night import NIGHT
from stateful_tests.tests.support.planted_faults import planted_faults

HOME = Path(__file__).parents[3]
FAULTS = planted_faults("adapters/plausible_faults.toml").values()
# By day those with a bound, on seed 0 of smoke; at night each, on ten seeds of pr.
CASES = [
    (each, seed)
    for each in FAULTS
    for seed in range(10 if NIGHT else 1)
    if NIGHT or each.within is not None
]


@pytest.mark.parametrize(
    "fault, seed", CASES, ids=[f"{fault.name}, seed {seed}" for fault, seed in CASES]
)
def test_a_check_finds_the_plausible_fault(fault, seed, monkeypatch):
    [edit] = fault.edits
    module = types.ModuleType("an_engine_with_a_fault")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(edit.text(HOME), edit.file, "exec"), vars(module))
    violation = first_violation(module.make(), plan("pr" if NIGHT else "smoke", seed=seed))
    assert violation is not None and (NIGHT or violation[1] <= fault.within), violation


def test_each_fault_is_of_one_place():
    assert all(edit.text(HOME) for each in FAULTS for edit in each.edits)
