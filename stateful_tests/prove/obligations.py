"""What is proved of the cursors for all page sizes, windows and lengths, by name, and how to prove it.

Obligations come from three places: the contracts in reference/cursors.py ("contract/cut"; CrossHair reads
them as well), the properties of every rule of the model ("order/extend"), and the theorem on windows
("hole-if/default"). The code that is proved is the reference's own, see `symbolic_reference`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from reference import cursors
from reference.commands import Mode
from stateful_tests.lockstep import lockstep
from stateful_tests.lockstep.reference_system import ReferenceSystem
from stateful_tests.lockstep.results import Run, Trace
from stateful_tests.prove.counterexamples import trace_of
from stateful_tests.prove.integers import Int, NotLinear
from stateful_tests.prove.path_exploration import (
    START, ExploredPath, Model, NotPositive, Undecided, assume, refute, solver_of,
)  # fmt: skip
from stateful_tests.prove.properties import PROPERTIES, arguments, contract
from stateful_tests.prove.symbolic_reference import Edits, SymbolicReference
from stateful_tests.prove.transitions import RULES, Move, moves_of
from stateful_tests.prove.window_theorem import PARTS

PROVED, REFUTED, UNDECIDED = "proved", "refuted", "undecided"


@dataclass(frozen=True)
class Obligation:
    """A statement to be proved. rule, property: of one about a rule. clauses: whose arithmetic it is."""

    name: str
    claim: str
    clauses: tuple[str, ...] = ()
    rule: str = ""
    property: str = ""


@dataclass
class Proof:
    """What became of an obligation.

    paths: of the code that it was proved for. counterexample: small values for which it fails. trace:
    commands that lead there from the empty state, and run: the same on the reference; None where no short
    run gets there, or a state alone is at fault. note: why it is undecided.
    """

    obligation: Obligation
    verdict: str
    seconds: float
    paths: int = 0
    counterexample: Model | None = None
    trace: Trace | None = None
    run: Run | None = None
    note: str = ""


@dataclass(frozen=True)
class Limit:
    """What does not hold in free mode, though it is easily taken for granted.

    claim: refuted there, as property of a rule. instead: what the reference does. makes_it_so: the
    assumption, and `proved_by` the obligations that prove the claim under it.
    """

    name: str
    claim: str
    property: str
    rule: str
    instead: str
    makes_it_so: str
    proved_by: tuple[str, ...]


_FAITHFUL = "a sweep sees at most what is committed, and at most what a later finish or retract keeps"
LIMITS: tuple[Limit, ...] = (
    Limit(
        "literal-resume", "A turn resumes at min(C, key).", "literal-resume", "admit",
        "it starts again from R where the window behind that is swept (SWA-2, SWA-3)",
        _FAITHFUL, ("literal-resume/admit", "hole-faithful/default", "hole-faithful/0.5.10"),
    ),
    Limit(
        "next-window", "A sweep keeps the window of the next token.", "next-window", "evict_swa",
        "who was swept past its commit may end, not decode (window_lost)",
        "a sweep sees at most what is committed", ("next-window/evict_swa", "next-window/own-sweep"),
    ),
    Limit(
        "below-target", "E is at most the target when a turn ends.", "cap-moves-nothing", "finish",
        "finish, retract and admit cap it (LEN-2, LEN-3; #22900)",
        _FAITHFUL, ("cap-moves-nothing/finish", "cap-moves-nothing/retract", "cap-moves-nothing/admit"),
    ),
    Limit(
        "whole-frontier", "E is a page boundary in slots too.", "whole-frontier", "finish",
        "pages start at ceil(E), and memory checks round max(R, E) up (CHK-2)",
        _FAITHFUL, ("whole-frontier/finish", "whole-frontier/retract", "whole-frontier/admit"),
    ),
)  # fmt: skip


def _contracts(cursors: Any) -> dict[str, Any]:
    """Functions with a contract that says something of the result, by the name of their obligation."""
    named = {n: f for n, f in vars(cursors).items() if callable(f) and f.__module__ == cursors.__name__}
    return {f"contract/{n.replace('_', '-')}": f for n, f in named.items() if contract(f)["post"]}


def _first_line(function: Any) -> str:
    return str(function.__doc__).strip().split("\n")[0]


def _obligations() -> Iterator[Obligation]:
    for name, function in _contracts(cursors).items():
        yield Obligation(name, _first_line(function))
    for prop in PROPERTIES.values():
        for rule in prop.rules:
            yield Obligation(f"{prop.name}/{rule}", prop.claim, prop.clauses, rule, prop.name)
    for part in PARTS:
        yield Obligation(part.name, part.claim, ("SWA-2",))


OBLIGATIONS: dict[str, Obligation] = {o.name: o for o in _obligations()}
# A name stands for itself, for all that begin with it (a property), or for all that end with it (a rule).
GROUPS: tuple[str, ...] = tuple(dict.fromkeys(part for name in OBLIGATIONS for part in name.split("/")))


def chosen(names: Iterable[str]) -> list[Obligation]:
    """The obligations that the names stand for; all of them when there are none. Raises KeyError."""
    found: dict[str, Obligation] = {}
    for name in names:
        those = [o for o in OBLIGATIONS.values() if name == o.name or name in o.name.split("/")]
        if not those:
            raise KeyError(name)
        found |= {o.name: o for o in those}
    return list(found.values()) or list(OBLIGATIONS.values())


class Prover:
    """Proves obligations of one text of the reference. edits: faults put into that text.

    exploring: seconds that went into running the rules on every path, before anything was asked.
    """

    def __init__(self, edits: Edits | None = None) -> None:
        self.ref = SymbolicReference(edits)
        self.exploring = 0.0
        self._moves = moves_of(self.ref)
        self._parts = {part.name: part for part in PARTS}
        self._contracts = _contracts(self.ref.cursors)

    def prove(self, obligations: Iterable[Obligation], *, traces: bool = True) -> Iterator[Proof]:
        """Each in turn. traces: look for commands that lead to a counterexample, and replay them."""
        todo = list(obligations)
        proofs: dict[str, Proof] = {}
        for group in dict.fromkeys((o.rule, _mode(o)) for o in todo if o.rule):
            mine = [o for o in todo if o.rule and (o.rule, _mode(o)) == group]
            proofs |= self._prove_rule(*group, mine)
        for obligation in todo:
            proof = proofs.get(obligation.name) or self._prove_one(obligation)
            if traces and proof.verdict == REFUTED and obligation.rule:
                self._trace(proof, _mode(obligation))
            yield proof

    def _prove_rule(self, rule: str, mode: Mode, obligations: list[Obligation]) -> dict[str, Proof]:
        """All that is asked of a rule in a mode: path by path, so that a solver learns each path once."""
        proofs = {o.name: Proof(o, PROVED, 0.0) for o in obligations}
        began = time.perf_counter()
        try:
            paths = self._moves(RULES[rule], mode)
        except _FAULTS as error:
            for proof in proofs.values():
                proof.verdict, proof.note = UNDECIDED, _said(error)
            return proofs
        finally:
            self.exploring += time.perf_counter() - began
        for path in paths:
            solver = solver_of(path)
            for proof in proofs.values():
                if proof.verdict == PROVED:
                    prop = PROPERTIES[proof.obligation.property]
                    with _asked(proof):
                        shown = _shown(path.result, prop.any)
                        _ask(proof, partial(prop.holds, path.result), shown, path, solver)
        for proof in proofs.values():
            _not_vacuous(proof)
        return proofs

    def _prove_one(self, obligation: Obligation) -> Proof:
        proof = Proof(obligation, PROVED, 0.0)
        with _asked(proof):
            part = self._parts.get(obligation.name)
            if part is not None:
                names = ("P", "W", "C", "A", "E", "R", "L", "target", "key", "position", "p")
                _ask(proof, lambda: part.holds(self.ref), {name: Int.of(name) for name in names})
            else:
                function = self._contracts[obligation.name]
                values = {n: self._argument(n) for n in arguments(function)}
                for number in range(len(contract(function)["post"])):
                    if proof.verdict == PROVED:
                        _ask(proof, partial(_kept, function, values, number), _flat(values))
        _not_vacuous(proof)
        return proof

    def _argument(self, name: str) -> Any:
        return self.ref.cursors.Cursors(*map(Int.of, "CAER")) if name == "c" else Int.of(name)

    def _trace(self, proof: Proof, mode: Mode) -> None:
        asked = proof.obligation
        story = f"Refuted: {asked.claim} ({asked.name})"
        try:
            proof.trace = trace_of(self.ref, asked.rule, mode, PROPERTIES[asked.property].holds, story)
        except _FAULTS as error:
            proof.note = _said(error)
        if proof.trace is not None:
            proof.run = lockstep.replay(ReferenceSystem(), proof.trace)

    def limit(self, limit: Limit) -> Proof:
        """The claim of a limit in free mode: to be refuted, with a trace."""
        prop = PROPERTIES[limit.property]
        obligation = Obligation(limit.name, limit.claim, prop.clauses, limit.rule, limit.property)
        proof = self._prove_rule(limit.rule, Mode.FREE, [obligation])[limit.name]
        if proof.verdict == REFUTED:
            self._trace(proof, Mode.FREE)
        return proof


# What a fault in the reference's text may run into.
_FAULTS = (Undecided, NotLinear, NotPositive, AssertionError, AttributeError, TypeError, NameError)


def _mode(obligation: Obligation) -> Mode:
    return PROPERTIES[obligation.property].mode if obligation.rule else Mode.FREE


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


@contextmanager
def _asked(proof: Proof) -> Iterator[None]:
    """Time it, and turn what cannot be decided into a verdict."""
    began = time.perf_counter()
    try:
        yield
    except _FAULTS as error:
        proof.verdict, proof.note = UNDECIDED, _said(error)
    finally:
        proof.seconds += time.perf_counter() - began


def _ask(
    proof: Proof,
    goal: Callable[[], Any],
    shown: Mapping[str, Any],
    base: ExploredPath[Any] = START,
    solver: Any = None,
) -> None:
    answer = refute(goal, shown, base, solver)
    proof.paths += answer.paths
    if answer.model is not None:
        proof.verdict, proof.counterexample = REFUTED, answer.model


def _not_vacuous(proof: Proof) -> None:
    """What holds on no path at all is no proof."""
    if proof.verdict == PROVED and not proof.paths:
        proof.verdict, proof.note = UNDECIDED, "there is no path on which its assumptions hold"


def _kept(function: Any, values: Mapping[str, Any], number: int) -> Any:
    """One line of a function's contract: what it says of the result, given what it asks for."""
    lines = contract(function)
    for expression in lines["pre"]:
        assume(eval(expression, function.__globals__, dict(values)))
    result = function(**values)
    return eval(lines["post"][number], function.__globals__, {**values, "_": result})


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Names of single integers: c is four of them."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= dict(zip(value._fields, value)) if hasattr(value, "_fields") else {name: value}
    return flat


def _shown(move: Move, any_of: str) -> dict[str, Any]:
    """What is shown of a move that does wrong."""
    shown: dict[str, Any] = {"page_size": Int.of("P"), "window": Int.of("W")}
    for when, c in (("before", move.before), ("after", move.after)):
        shown |= {f"{name} {when}": value for name, value in zip(c._fields, c)}
    more = {"target": move.target, "swept with": move.swept, any_of: Int.of(any_of)}
    return shown | {name: value for name, value in more.items() if name and value is not None}
