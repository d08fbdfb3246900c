"""What is proved for all lengths, that faults are refuted, and that z3 and CrossHair agree on which are."""

import itertools
import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("z3", reason="z3-solver is not installed")

import z3

from impl.bugs import BUGS
from reference import cursors
from reference.cursors import Cursors
from reference.state import swa_pages
from stateful_tests.prove import obligations as proofs
from stateful_tests.prove import window_theorem
from stateful_tests.prove.obligations import (
    OBLIGATIONS, ProofVerdict, SOURCES, select_obligations, prove,
)  # fmt: skip
from stateful_tests.prove.translation import NotTranslated, Translation, contracts
from stateful_tests.tests.support.night import NIGHT, some_at_night
from stateful_tests.tests.support.planted_faults import planted_faults

HOME = Path(__file__).parents[3]
FAULTS = planted_faults("prove/faults.toml").values()


def faulty_source(fault):
    """Return the module of the contracts with the fault in it."""
    [edit] = fault.edits
    return edit.text(HOME)


# Most seconds go to the window theorem, which has its small cases by day.
@pytest.mark.parametrize(
    "name", some_at_night(OBLIGATIONS, lambda name: name.startswith("window/hole-"))
)
def test_the_obligation_is_proved(name):
    (proof,) = prove([OBLIGATIONS[name]])
    assert (proof.verdict, proof.note) == (ProofVerdict.PROVED, "")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_refuted_with_small_numbers(fault):
    """And the numbers are true: Python's own arithmetic fails the contract for them."""
    faulty = ModuleType("faulty")
    exec(faulty_source(fault), vars(faulty))
    sources = {**SOURCES, "contract": faulty_source(fault)}
    for proof in prove(select_obligations(fault.caught_by), sources):
        assert proof.verdict == ProofVerdict.REFUTED and max(map(abs, proof.counterexample.values())) <= 8
        contract = proof.obligation.contract
        numbers = dict(proof.counterexample)
        if "c" in contract.arguments:
            numbers["c"] = faulty.Cursors(*(numbers.pop(name) for name in "CAER"))
        assert all(eval(line, vars(faulty), numbers) for line in contract.pre), proof
        result = getattr(faulty, contract.name)(**numbers)
        line = proof.note.removeprefix("fails: ")
        assert not eval(line, vars(faulty), numbers | {"_": result}), proof
    assert {*fault.bugs} <= {*BUGS}


def test_a_wrong_theorem_is_refuted():
    wrong = SOURCES["window"].replace(
        "(2 * page_size if margin == 1", "(3 * page_size if margin == 1", 1
    )
    refuted = ["window/cap-moves", "window/hole-resume", "window/hole-only-if"][: 3 if NIGHT else 1]
    for proof in prove(select_obligations([*refuted, "window/hole-if"]), {**SOURCES, "window": wrong}):
        is_refuted = proof.obligation.name in refuted
        assert proof.verdict == (ProofVerdict.REFUTED if is_refuted else ProofVerdict.PROVED), proof
        assert proof.obligation.name not in refuted or proof.counterexample["margin"] == 1, proof


def test_an_undecided_obligation_is_reported():
    """A contract that nothing meets proves nothing, and code beyond the translation is no proof."""
    right = "    pre: page_size > 0\n    post: _ >= length"
    nobody = SOURCES["contract"].replace(right, f"    pre: page_size < 0\n{right}", 1)
    contract = contracts(nobody)["ceil_page"]
    (proof,) = prove([proofs.Obligation("contract/ceil-page", "", contract)])
    assert proof.verdict == ProofVerdict.UNDECIDED and "no arguments" in proof.note
    rounds_up = "    return -(-length // page_size) * page_size"
    strange = SOURCES["contract"].replace(rounds_up, "    return pow(2, 3)")
    (proof,) = prove(select_obligations(["contract/ceil-page"]), {**SOURCES, "contract": strange})
    assert proof.verdict == ProofVerdict.UNDECIDED and proof.note == "NotTranslated: pow(2, 3)"


def test_assumptions_about_quotients_hold_in_python():
    """Python's own quotients meet all facts and lemmas: nothing is proved of nothing."""
    texts = (
        "x // P",
        "-(-x // P)",
        "x % P",
        "(x - y) // P",
        "(x + 3 * P - y) // P * P",
        "(y // P - x // P) * P",
    )
    for size, x, y in itertools.product((1, 2, 3), (-4, -1, 0, 3, 5), (-2, 0, 4)):
        translation = Translation({})
        names = {name: z3.Int(name) for name in ("x", "y", "P")}
        numbers = {"x": x, "y": y, "P": size}
        solver = z3.Solver()
        solver.add(
            *(translation.expression(text, names) == eval(text, {}, numbers) for text in texts)
        )
        solver.add(
            *translation.facts, *translation.lemmas(), *(names[n] == v for n, v in numbers.items())
        )
        assert solver.check() == z3.sat, numbers
    with pytest.raises(NotTranslated):
        Translation({}).expression("[1]", {})


@pytest.mark.parametrize("margin", window_theorem.MARGINS)
def test_the_window_theorem_holds_on_every_small_case(margin):
    """The condition as it is printed, the functions, and the reference in plain numbers."""
    policy = window_theorem.POLICIES[margin]
    holes = 0
    for size, window in itertools.product((1, 2, 3), (1, 2, 4)):
        lengths = itertools.product(range(7), range(14), range(7), (0, size))
        for committed, length, target, protected in lengths:
            if protected > min(committed, target):
                continue
            c = Cursors(committed, max(committed, length), 0, protected)
            slot = window_theorem.slot(c, length, target, window, size, margin)
            p = slot.kv_committed_len
            names = {"p": p, "L": length, "P": size, "W": window, "R": protected, "target": target}
            names |= {"max": max, "floor": lambda index, size=size: index // size * size}
            hole = _condition(policy.hole, names)
            assert (cursors.resume(slot, p, window) < p) == hole, names
            assert window_theorem.condition(c, length, target, p, window, size, margin) == hole, committed
            evicted = window_theorem.evicted(c, length, window, size, margin)
            assert (evicted.swa_evicted_seqlen > target) == _condition(policy.cap, names)
            assert not (hole and _condition(policy.never, names)), committed
            held = [index for index in range(committed + size) if window_theorem.has_swa(slot, index, size)]
            assert held == [
                index for index in range(committed + size) if index // size in swa_pages(slot, size)
            ]
            holes += hole
    assert holes > 50


def _condition(text: str, names: dict[str, Any]) -> bool:
    """Return a printed condition as an expression."""
    return bool(eval(text.replace("2P", "2 * P"), dict(names)))


# What CrossHair needs more than half a second for: at night.
_SLOW = {
    "a free starts inside a page",
    "evicted pages are freed again",
    "a window eviction reaches into the window",
}


def test_crosshair_agrees(tmp_path):
    """It refutes the contract that each fault breaks. In one process: each fault is a copy of the module."""
    pytest.importorskip("crosshair", reason="crosshair-tool is not installed")
    targets = {}
    for number, fault in enumerate(FAULTS):
        if fault.crosshair is None or (fault.name in _SLOW and not NIGHT):
            continue
        (tmp_path / f"fault{number}.py").write_text(faulty_source(fault))
        targets[f"fault{number}.{fault.crosshair}"] = fault.name
    missed = list(targets)
    for seconds in (0.4, 2, 8, 30):  # what a busy machine does not find at once
        refuted = _crosshair(tmp_path, seconds, *missed) if missed else ""
        missed = [t for t in missed if f"{t.partition('.')[0]}.py" not in refuted]
    assert [targets[t] for t in missed] == []


def test_crosshair_refutes_no_contract():
    """Within a bound: "not confirmed" is no failure, a counterexample is."""
    pytest.importorskip("crosshair", reason="crosshair-tool is not installed")
    assert _crosshair(HOME, 0.1, cursors.__file__) == ""


def _crosshair(folder: Path, seconds: float, *targets: str) -> str:
    """Return what CrossHair refutes, a line each."""
    command = [
        sys.executable,
        "-m",
        "crosshair",
        "check",
        "--per_condition_timeout",
        str(seconds),
        *targets,
    ]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(HOME)])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder, env=env)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


def test_both_engines_read_the_same_contracts():
    """Every function with a contract is an obligation, and every line of its contract is read."""
    read = contracts(SOURCES["contract"])
    for function in (
        f for f in vars(cursors).values() if getattr(f, "__module__", "") == cursors.__name__
    ):
        text = function.__doc__ or ""
        assert ("post:" in text) == (function.__name__ in read), function
        if found := read.get(function.__name__):
            assert (len(found.pre), len(found.post)) == (text.count("pre:"), text.count("post:")), function


# -- the command ----------------------------------------------------------------------------------


def test_prove_by_name(kvspec):
    code, out, err = kvspec("prove", "contract/cut", "window/cap-moves", "--json", "p.json")
    assert code == 0 and not err
    data = json.loads(Path("p.json").read_text())
    assert [o["name"] for o in data["obligations"]] == ["contract/cut", "window/cap-moves"]
    assert data["format"] == "kvspec-proofs"
    assert data["proved"] == 2
    assert data["theorem"] is None
    assert "2 of 2 proved" in out


def test_a_refuted_obligation_is_exit_1(kvspec, monkeypatch):
    faulty = {**SOURCES, "contract": faulty_source(next(iter(FAULTS)))}
    monkeypatch.setattr(proofs, "prove", partial(prove, sources=faulty))
    code, out, _ = kvspec("prove", "contract/cut", "contract/ceil-page")
    text = " ".join(out.split())
    assert code == 1
    assert "REFUTED contract/cut" in text
    assert "1 of 2 proved, 1 refuted" in text
    assert re.search(r"fails: .*; with C \d+, A \d+, E \d+, R \d+, target \d+", text)
