"""Faults that an author of a small engine makes, in copies of the example engines: a check finds them."""

import sys
import tomllib
import types
from pathlib import Path

import pytest

from impl import example_engine, own_tree_engine, windowed_engine
from stateful_tests.check.campaign import first_violation
from stateful_tests.check.tiers import plan
from stateful_tests.tests.support.night import NIGHT
from stateful_tests.tests.support.patched_code import replaced

ENGINES = {"example": example_engine, "windowed": windowed_engine, "own_tree": own_tree_engine}
FAULTS = tomllib.loads(Path(__file__).with_name("plausible_faults.toml").read_text())["fault"]
# `within`: the commands after which seed 0 of smoke finds it, at most. At night each, on ten seeds of pr.
CASES = [
    (each, seed)
    for each in FAULTS
    for seed in range(10 if NIGHT else 1)
    if NIGHT or "within" in each
]


@pytest.mark.parametrize(
    "fault, seed", CASES, ids=[f"{fault['says']}, seed {seed}" for fault, seed in CASES]
)
def test_a_check_finds_it(fault, seed, monkeypatch):
    file = _file(fault)
    module = types.ModuleType("an_engine_with_a_fault")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(replaced(file, fault["old"], fault["new"]), str(file), "exec"), vars(module))
    found = first_violation(module.make(), plan("pr" if NIGHT else "smoke", seed=seed))
    assert found is not None and (NIGHT or found[1] <= fault["within"]), found


def test_each_fault_is_of_one_place():
    assert all(replaced(_file(each), each["old"], each["new"]) for each in FAULTS)


def _file(fault):
    return Path(ENGINES[fault["engine"]].__file__)
