"""Proof obligations on the cursors for all page sizes, windows and lengths.

An obligation is the contract of one function: of `reference/cursors.py` ("contract/cut"), or of the theorem
on windows ("window/hole-if"). CrossHair searches the same contracts. How the rules put these functions
together is not proved; `kvspec explore` visits every state of small scopes instead.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import z3

from reference import cursors
from reference.cursors import Cursors
from stateful_tests.prove import window_theorem
from stateful_tests.prove.translation import Contract, NotTranslated, Translation, contracts

SMALL = (2, 8, None)  # bounds within which a counterexample is sought, in this order; none at last
_TIMEOUT_MS = 30_000
_MODULES = {"contract": cursors, "window": window_theorem}
SOURCES: dict[str, str] = {
    kind: Path(str(module.__file__)).read_text(encoding="utf-8")
    for kind, module in _MODULES.items()
}


class ProofVerdict(StrEnum):
    """The verdict on an obligation."""

    PROVED = "proved"
    REFUTED = "refuted"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Obligation:
    """A contract that has to be proved."""

    name: str
    claim: str
    contract: Contract

    @property
    def policies(self) -> tuple[int | None, ...]:
        """The values of `margin` that it is proved for; (None,) where there is no such argument."""
        return window_theorem.MARGINS if "margin" in self.contract.arguments else (None,)


@dataclass
class Proof:
    """The result of an obligation.

    counterexample: arguments for which a line of the contract fails (tokens).
    note: that line, or why nothing is decided.
    """

    obligation: Obligation
    verdict: ProofVerdict = ProofVerdict.PROVED
    seconds: float = 0.0
    counterexample: dict[str, int] = field(default_factory=dict)
    note: str = ""


def _obligations() -> Iterator[Obligation]:
    for kind, source in SOURCES.items():
        for name, contract in contracts(source).items():
            yield Obligation(f"{kind}/{name.replace('_', '-')}", contract.about, contract)


OBLIGATIONS = {obligation.name: obligation for obligation in _obligations()}


def select_obligations(names: Iterable[str]) -> list[Obligation]:
    """Return the obligations with these names or of these kinds, such as "contract/cut", "cut" or "window";
    all of them for no name. Raises KeyError for a name that selects none."""
    selected: dict[str, Obligation] = {}
    for name in names:
        keys = [key for key in OBLIGATIONS if name in (key, *key.split("/"))]
        if not keys:
            raise KeyError(name)
        selected |= {key: OBLIGATIONS[key] for key in keys}
    return list((selected or OBLIGATIONS).values())


def prove(
    obligations: Iterable[Obligation], sources: Mapping[str, str] = SOURCES
) -> Iterator[Proof]:
    """Prove obligations one after the other.

    sources: the text of both modules; a test passes one with a fault in it.
    """
    for obligation in obligations:
        proof = Proof(obligation)
        began = time.perf_counter()
        try:
            _prove(proof, sources)
        except (NotTranslated, KeyError, TypeError, z3.Z3Exception) as error:
            proof.verdict = ProofVerdict.UNDECIDED
            proof.note = f"{type(error).__name__}: {error}"
        proof.seconds = time.perf_counter() - began
        yield proof


def _prove(proof: Proof, sources: Mapping[str, str]) -> None:
    """Set the verdict of a proof. Each policy's formulas must be satisfiable, and each promise must follow
    from them."""
    contract = proof.obligation.contract
    for margin in proof.obligation.policies:
        translation = Translation.of(*sources.values())
        names: dict[str, Any] = {name: z3.Int(name) for name in contract.arguments}
        names |= {"c": Cursors(*map(z3.Int, "CAER"))} if "c" in names else {}
        names |= {"margin": margin} if margin is not None else {}
        preconditions = [translation.expression(line, names) for line in contract.pre]
        result = translation.call(contract.name, names)
        promised = [translation.expression(line, names | {"_": result}) for line in contract.post]
        preconditions += [*translation.facts, *translation.lemmas()]
        if (satisfiable := _check(preconditions)) != z3.sat:
            proof.verdict = ProofVerdict.UNDECIDED
            proof.note = "no arguments meet what the contract asks for"
            if satisfiable == z3.unknown:
                proof.note = "z3 cannot tell whether any arguments meet what the contract asks for"
            return
        for line, goal in zip(contract.post, promised):
            verdict = _check([*preconditions, z3.Not(goal)])
            if verdict == z3.unknown:
                proof.verdict = ProofVerdict.UNDECIDED
                proof.note = f"z3 gives no answer for: {line}"
            elif verdict == z3.sat:
                _refute(proof, line, [*preconditions, z3.Not(goal)], margin)
                return


def _solver(terms: list[Any]) -> Any:
    solver = z3.Solver()
    solver.set("timeout", _TIMEOUT_MS)
    solver.add(*terms)
    return solver


def _check(terms: list[Any]) -> Any:
    return _solver(terms).check()


def _refute(proof: Proof, line: str, terms: list[Any], margin: int | None) -> None:
    """Note in the proof small numbers for which the line fails, or that z3 finds none."""
    arguments = proof.obligation.contract.arguments
    numbers = ("CAER" if name == "c" else [name] for name in arguments)
    names = [number for several in numbers for number in several if number != "margin"]
    for bound in SMALL:
        solver = _solver(terms)
        if bound is not None:
            solver.add(*(z3.And(-bound <= z3.Int(name), z3.Int(name) <= bound) for name in names))
        if solver.check() == z3.sat:
            model = solver.model()
            counterexample = {
                name: model.eval(z3.Int(name), model_completion=True).as_long() for name in names
            }
            proof.verdict = ProofVerdict.REFUTED
            proof.note = f"fails: {line}"
            proof.counterexample = counterexample | ({"margin": margin} if margin is not None else {})
            return
    proof.verdict = ProofVerdict.UNDECIDED
    proof.note = f"z3 gives no numbers for which this fails: {line}"
