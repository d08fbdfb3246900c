"""What is proved for all lengths, that faults are refuted, and that the engines agree on which are."""

import itertools
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("z3", reason="z3-solver is not installed")

from ci.report import proofs as told
from impl.bugs import BUGS, broken
from reference import cursors
from reference.commands import Done
from reference.ledger import Cursors
from stateful_tests.lockstep import lockstep
from stateful_tests.prove import obligations as proofs
from stateful_tests.prove import window_theorem
from stateful_tests.prove.integers import Int, NotLinear
from stateful_tests.prove.obligations import (
    LIMITS, OBLIGATIONS, PROVED, REFUTED, UNDECIDED, Obligation, Prover, chosen,
)  # fmt: skip
from stateful_tests.prove.path_exploration import Abandoned, NotPositive, assume, explore, refute
from stateful_tests.prove.properties import contract
from stateful_tests.prove.symbolic_reference import SymbolicReference, edited
from stateful_tests.tests.prove.arithmetic_mutants import FAULTS

X, Y, P = Int.of("x"), Int.of("y"), Int.of("P")
HOME = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def everything():
    """The whole command, as data."""
    return told.collect(())


# The proofs.


def test_everything_is_proved(everything):
    open_ones = [o["name"] for o in everything["obligations"] if o["verdict"] != PROVED or not o["paths"]]
    assert not open_ones and everything["exit_code"] == 0
    assert len(everything["obligations"]) == len(OBLIGATIONS) >= 130


def test_what_is_not_so_has_a_trace_and_an_assumption(everything):
    assert len(everything["limits"]) == len(LIMITS)
    for limit in everything["limits"]:
        assert limit["verdict"] == REFUTED
        assert limit["replay"]["verdict"] == "conforms" and limit["replay"]["trace"]["mode"] == "free"
        assert {row["outcome"] for row in limit["replay"]["rows"]} == {"done"}
        assert set(limit["proved_by"]) <= set(OBLIGATIONS)
    faithful = {f"{limit.property}/{limit.rule}" for limit in LIMITS}
    assert faithful <= {name for limit in LIMITS for name in limit.proved_by}


@pytest.mark.parametrize("policy", window_theorem.POLICIES, ids=lambda policy: policy.name)
def test_the_window_theorem_on_every_small_case(policy):
    """The condition, as it is printed, against the reference in plain numbers."""
    holes = 0
    for size, window in itertools.product((1, 2, 3), (1, 2, 4)):
        lengths = itertools.product(range(7), range(14), range(7), (0, size))
        for committed, length, target, protected in lengths:
            if protected > min(committed, target):
                continue
            c = Cursors(committed, max(committed, length), 0, protected)
            swept = cursors.sweep(c, length, window, size)
            if policy.pages == 1:
                furthest = max(protected, cursors.sweep_limit(length, window, size))
                swept = c._replace(swa_evicted_seqlen=furthest)
            slot = cursors.cut(swept, target)
            p = slot.kv_committed_len
            names = {"p": p, "L": length, "P": size, "W": window, "R": protected, "target": target}
            names |= {"max": max, "floor": lambda at, size=size: at // size * size}
            hole = _condition(policy.hole, names)
            assert (cursors.resume(slot, p, window) < p) == hole, names
            assert (swept.swa_evicted_seqlen > target) == _condition(policy.cap, names)
            assert not (hole and _condition(policy.never, names))
            holes += hole
    assert holes > 50


def _condition(text: str, names: dict[str, Any]) -> bool:
    """A printed condition as an expression."""
    return bool(eval(text.replace("2P", "2 * P"), dict(names)))


# Faults.


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_refuted_with_small_numbers_and_a_trace(fault):
    found = list(Prover(fault.edits).prove(chosen(fault.refuted)))
    assert [proof.verdict for proof in found] == [REFUTED] * len(fault.refuted)
    for proof in found:
        assert proof.counterexample is not None and max(map(abs, proof.counterexample.values())) <= 8
        if not proof.obligation.rule:
            continue
        assert proof.trace is not None and proof.run is not None
        assert proof.run.violation is None, "the reference is right where the faulty text is not"
        assert {type(row.outcome) for row in proof.run.rows[:-1]} == {Done}
        for bug in fault.bugs:
            assert proof.trace.mode in BUGS[bug].modes
            assert lockstep.replay(broken(bug), proof.trace).violation is not None, bug


def test_a_fault_is_refuted_in_the_whole_as_well():
    """What else fails with it; and what a fault breaks for good is reported, not raised."""
    fault = FAULTS[0]
    found = Prover(fault.edits).prove(chosen(["caps", "order"]), traces=False)
    refuted = {proof.obligation.name for proof in found if proof.verdict == REFUTED}
    ends = ("finish", "retract", "admit")
    assert refuted == {f"{prop}/{rule}" for prop in ("caps", "order") for rule in ends}
    right, wrong = "    return length // page_size * page_size", "    return page_size * length * length"
    edits = {"reference.cursors": [(right, wrong)]}
    (proof,) = Prover(edits).prove([OBLIGATIONS["contract/floor-page"]])
    assert proof.verdict == UNDECIDED and proof.note.startswith("NotLinear")


# What it needs more than half a second for: at night.
_SLOW = {
    "a free starts inside a page", "swept pages are freed again", "a sweep reaches into the window",
}  # fmt: skip


def test_crosshair_agrees(tmp_path):
    """It refutes the contract that each fault of the arithmetic breaks, as z3 does.

    In one process: each fault is a copy of the module.
    """
    pytest.importorskip("crosshair", reason="crosshair-tool is not installed")
    targets = {}
    for number, fault in enumerate(FAULTS):
        if fault.crosshair is None or (fault.name in _SLOW and "KVSPEC_EVERY_RELEASE" not in os.environ):
            continue
        text = edited("reference.cursors", fault.edits["reference.cursors"])
        (tmp_path / f"fault{number}.py").write_text(text)
        targets[f"fault{number}.{fault.crosshair}"] = fault.name
    missed = list(targets)
    for seconds in (0.4, 2, 8, 30):  # what a busy machine does not find at once
        found = _crosshair(tmp_path, seconds, *missed) if missed else ""
        missed = [t for t in missed if f"{t.partition('.')[0]}.py" not in found]
    assert [targets[t] for t in missed] == []


def test_crosshair_refutes_no_contract():
    """Within a bound: "not confirmed" is no failure, a counterexample is."""
    pytest.importorskip("crosshair", reason="crosshair-tool is not installed")
    assert _crosshair(HOME, 0.2, cursors.__file__) == ""


def _crosshair(folder: Path, seconds: float, *targets: str) -> str:
    """What it refutes, a line each."""
    command = [sys.executable, "-m", "crosshair", "check", "--per_condition_timeout", str(seconds), *targets]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(HOME)])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder, env=env)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


def test_both_engines_read_the_same_contracts():
    """Every function with a contract is an obligation, and every line of its contract is read."""
    for function in (f for f in vars(cursors).values() if getattr(f, "__module__", "") == cursors.__name__):
        text, read = function.__doc__ or "", contract(function)
        assert [len(read[line]) for line in ("pre", "post")] == [text.count("pre:"), text.count("post:")]
        assert not read["post"] or f"contract/{function.__name__.replace('_', '-')}" in OBLIGATIONS


# The engine.


def test_an_edit_of_what_is_not_edited_is_refused():
    with pytest.raises(ValueError, match="reference\\.cursor: is none of the modules that are edited"):
        SymbolicReference({"reference.cursor": [("a", "b")]})


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_what_is_said_of_quotients_is_so(size):
    """Python's own results meet all that is assumed of symbolic ones: nothing is proved of nothing."""
    ref = SymbolicReference()

    def results(x, y, p, of):
        return [
            x // p, -(-x // p), x % p, (x - y) // p, (x + 3 * p - y) // p * p, (y // p - x // p) * p,
            of.ceil_page(x, p), of.floor_page(y, p), of.window_start(x, 2), of.sweep_limit(x, 2, p),
        ]  # fmt: skip

    for x, y in itertools.product(range(-5, 6), repeat=2):
        def agree(x=x, y=y):
            assume(size == P, x == X, y == Y)
            numbers = results(x, y, size, cursors)
            assume(*(one == other for one, other in zip(results(X, Y, P, ref.cursors), numbers)))

        assert len(list(explore(agree))) == 1, (x, y)


def test_every_path_is_taken_once():
    def sign():
        if X > 0:
            return "more"
        return "less" if X < 0 else "none"

    assert sorted(path.result for path in explore(sign)) == ["less", "more", "none"]


def test_what_is_assumed_and_cannot_be_proves_nothing():
    assert refute(lambda: assume(X > 2, X < 1), {}).paths == 0
    prover = Prover()
    nothing = {"pre": ["page_size > 0", "page_size < 0"], "post": ["False"]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proofs, "contract", lambda function: nothing)
        (proof,) = prover.prove([OBLIGATIONS["contract/ceil-page"]])
    assert proof.verdict == UNDECIDED and "no path" in proof.note


@pytest.mark.parametrize(
    "work, wrong",
    [
        (lambda: X // P, NotPositive),
        (lambda: X // 0, NotPositive),
        (lambda: X * Y, NotLinear),
        (lambda: X // 3, NotLinear),
    ],
)
def test_what_would_not_be_python_is_refused(work, wrong):
    with pytest.raises(wrong):
        list(explore(work))


def test_a_refutation_is_of_numbers_that_there_are():
    """Not of a product that is none: 2 divides no odd number, whatever P is called."""

    def odd():
        assume(P > 0, X > 0)
        return X // P * P == X

    answer = refute(odd, {"x": X, "P": P}).model
    assert answer is not None and answer["x"] % answer["P"]


def test_abandoned_runs_leave_nothing_behind():
    def work():
        if X > 0:
            raise Abandoned
        return 1

    assert [path.result for path in explore(work)] == [1]
    assert refute(partial(bool, True), {}).paths == 1


# The command.


def test_prove_by_name(kvspec):
    code, out, err = kvspec("prove", "caps", "contract/cut", "--json", "p.json")
    assert code == 0 and not err
    data = json.loads(Path("p.json").read_text())
    names = [o["name"] for o in data["obligations"]]
    assert names == ["caps/admit", "caps/finish", "caps/retract", "contract/cut"]
    assert data["format"] == "kvspec-proofs" and data["proved"] == 4 and data["theorem"] is None
    assert all(o["seconds"] >= 0 and o["paths"] for o in data["obligations"])
    assert all(text in out for text in ("caps (LEN-2", "admit (", "contract: ", "cut ("))
    assert "4 of 4 proved" in out


def test_the_whole_report(kvspec, everything, monkeypatch):
    monkeypatch.setattr(told, "collect", lambda names: everything)
    code, out, _ = kvspec("prove")
    assert code == 0
    text = " ".join(out.split())
    assert " ".join(window_theorem.PARAGRAPH.split()) in text
    for words in ("order (LEN-1)", "literal-resume", "it is so if", "retract r ", "145 of 145 proved"):
        assert words.replace("145", str(len(OBLIGATIONS))) in text
    code, out, err = kvspec("prove", "--json", "-")
    data = json.loads(out)
    assert code == 0 and data["theorem"]["conditions"]["default"]["hole"].startswith("p > R and L >=")
    assert "proved" in err


def test_obligations_are_listed(kvspec):
    code, out, _ = kvspec("prove", "--list", "--json", "l.json")
    listed = [row["id"] for row in json.loads(Path("l.json").read_text())]
    assert code == 0 and listed == [*OBLIGATIONS] and all(name in out for name in listed)


def test_a_refuted_obligation_is_exit_1(kvspec, monkeypatch):
    monkeypatch.setattr(proofs, "Prover", partial(Prover, FAULTS[0].edits))
    code, out, _ = kvspec("prove", "caps/finish", "contract/cut")
    text = " ".join(out.split())
    assert code == 1 and "refuted: caps/finish" in text and "2 refuted" in text
    assert "finish r keep" in text and "counterexample page_size 1" in text
    assert "No short run" not in text.split("refuted: contract/cut")[0]


def test_unusable_names_and_files(kvspec):
    code, out, err = kvspec("prove", "nonsense")
    assert code == 2 and not out
    assert err == "kvspec: unknown obligation 'nonsense'; kvspec prove --list names them\n"
    assert kvspec("prove", "cap")[2].endswith("names them; is it caps?\n")
    assert kvspec("prove", "caps", "--json", "no/such/folder.json")[0] == 2


def test_a_stale_limit_is_exit_1(kvspec, monkeypatch):
    """A claim that is said not to hold, and does, is reported."""
    limit = proofs.LIMITS[0]
    sound = proofs.Proof(Obligation(limit.name, limit.claim), PROVED, 0.0, 1)
    monkeypatch.setattr(Prover, "limit", lambda self, limit: sound)
    monkeypatch.setattr(proofs, "chosen", lambda names: chosen(["contract/cut"]))
    code, out, _ = kvspec("prove")
    assert code == 1 and "no longer refuted in free mode" in " ".join(out.split())
