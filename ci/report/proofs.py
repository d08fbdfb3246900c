"""`kvspec prove` as data and as text: what is proved of the cursors for all lengths, and what is not so."""

import time
from collections.abc import Iterable
from typing import Any

from rich.console import Console

from ci import Data
from ci.report import render
from ci.report.data import replay_data, told
from reference.ledger import Cursors
from stateful_tests.prove import obligations as proofs
from stateful_tests.prove import window_theorem
from stateful_tests.prove.obligations import Limit, Proof


def collect(names: Iterable[str]) -> Data:
    """Prove the obligations that `names` stand for; without a name all of them, and refute what is not so.

    Raises KeyError for a name that stands for none.
    """
    asked = tuple(names)
    obligations = proofs.chosen(asked)
    began = time.perf_counter()
    prover = proofs.Prover()
    found = [_proof(proof) for proof in prover.prove(obligations)]
    limits = [] if asked else [_limit(limit, prover.limit(limit)) for limit in proofs.LIMITS]
    counts = {verdict: sum(one["verdict"] == verdict for one in found) for verdict in _VERDICTS}
    stale = [one["name"] for one in limits if one["verdict"] != proofs.REFUTED]
    sound = counts[proofs.PROVED] == len(found) and not stale
    return {
        "format": "kvspec-proofs",
        "version": 1,
        "exit_code": 0 if sound else 1,
        **counts,
        "seconds": round(time.perf_counter() - began, 3),
        "running_the_rules_s": round(prover.exploring, 3),
        "obligations": found,
        "limits": limits,
        "theorem": None if asked else _theorem(),
    }


_VERDICTS = (proofs.PROVED, proofs.REFUTED, proofs.UNDECIDED)


def _proof(proof: Proof) -> Data:
    asked = proof.obligation
    return {
        **told(asked, "name claim"),
        "clauses": list(asked.clauses),
        **told(proof, "verdict paths counterexample note"),
        "seconds": round(proof.seconds, 4),
        "replay": None if proof.run is None else replay_data(asked.name, proof.run),
    }


def _limit(limit: Limit, proof: Proof) -> Data:
    return _proof(proof) | told(limit, "instead makes_it_so") | {"proved_by": list(limit.proved_by)}


def _theorem() -> Data:
    return {
        "paragraph": window_theorem.PARAGRAPH,
        "conditions": {policy.name: policy.conditions for policy in window_theorem.POLICIES},
        "proved_by": [part.name for part in window_theorem.PARTS],
    }


# As text.


def text(out: Console, data: Data) -> None:
    """The whole report. Proofs of one kind stand together."""
    _kinds(out, data["obligations"])
    for shown in data["obligations"]:
        if shown["verdict"] != proofs.PROVED:  # a state, and commands that lead there if some do
            out.print()
            claim = f"{shown['verdict']}: {shown['name']}. {shown['claim']}"
            render.say(out, claim, style="bold red")
            _counterexample(out, shown)
    if data["limits"]:
        _limits(out, data["limits"])
    if data["theorem"] is not None:
        out.print()
        render.say(out, "When a turn comes back behind its window", style="bold")
        render.say(out, data["theorem"]["paragraph"])
    out.print()
    bad = "".join(f", {data[verdict]} {verdict}" for verdict in _VERDICTS[1:] if data[verdict])
    verdict = f"{data['proved']} of {len(data['obligations'])} proved{bad}"
    if stale := [shown["name"] for shown in data["limits"] if shown["verdict"] != proofs.REFUTED]:
        verdict += f"; no longer refuted in free mode: {', '.join(stale)}"
    took = f" in {data['seconds']:.1f} s, {data['running_the_rules_s']:.1f} s of it to run the rules"
    render.verdict(out, verdict + took, data)


def _kinds(out: Console, obligations: list[Data]) -> None:
    """A paragraph for each property, with the rules that it is proved for."""
    render.say(
        out,
        "For all page sizes, windows and lengths, and every state that the rules reach: by induction, each"
        " rule from any state that order, text, frontier and window (in faithful mode also faithful) allow.",
    )
    kinds: dict[str, list[Data]] = {}
    for shown in obligations:
        kinds.setdefault(shown["name"].split("/")[0], []).append(shown)
    for kind, those in kinds.items():
        out.print()
        clauses = f" ({', '.join(those[0]['clauses'])})" if those[0]["clauses"] else ""
        same = len({shown["claim"] for shown in those}) == 1
        head = those[0]["claim"] if same else _HEADS.get(kind, "")
        render.say(out, f"{kind}{clauses}" + (f": {head}" if head else ""), style="bold")
        for shown in () if same else those:
            name = shown["name"].split("/")[1]
            render.labelled(out, {name: f"{shown['claim']} {_verdict(shown)}"})
        if same:
            each = (f"{shown['name'].partition('/')[2] or kind} {_verdict(shown)}" for shown in those)
            render.say(out, f"  {', '.join(each)}")


_HEADS = {
    "contract": "the contracts in reference/cursors.py, which CrossHair searches too",
    "hole-only-if": "here and below, a row is swept with length L, cut at a target, and goes on at p ="
    " min(C, key)",
}


def _verdict(shown: Data) -> str:
    mark = "" if shown["verdict"] == proofs.PROVED else f"{shown['verdict'].upper()}, "
    return f"({mark}{1000 * shown['seconds']:.0f} ms)"


def _counterexample(out: Console, shown: Data) -> None:
    if shown["counterexample"] is not None:
        render.labelled(out, {"counterexample": _values(shown["counterexample"])})
    if shown["note"]:
        render.say(out, f"  {shown['note']}")
    if shown["replay"] is not None:
        render.say(out, "  Commands that lead to such a state, as the reference carries them out:")
        render.run(out, shown["replay"])
    elif shown["verdict"] == proofs.REFUTED:
        render.say(out, "  No short run from the empty state shows it: the state above is all there is.")


def _values(model: dict[str, int]) -> str:
    """Such as "page_size 1; before C 3, A 6; after C 2, A 2": what belongs together stands together."""
    groups: dict[str, list[str]] = {}
    for name, value in model.items():
        what, _, when = name.partition(" ")
        moment = when if when in ("before", "after") else ""
        groups.setdefault(moment, []).append(f"{_SHORT.get(what, name)} {value}")
    return "; ".join(f"{moment} {', '.join(those)}".strip() for moment, those in groups.items())


_SHORT = dict(zip(Cursors._fields, "CAER"))


def _limits(out: Console, limits: list[Data]) -> None:
    out.print()
    render.say(out, "What is not so in free mode, and what makes it so", style="bold")
    for shown in limits:
        words: dict[str, Any] = {
            shown["name"]: shown["claim"],
            "the rules": shown["instead"],
            "it is so if": f"{shown['makes_it_so']}; proved: {', '.join(shown['proved_by'])}",
        }
        out.print()
        render.labelled(out, words)
        _counterexample(out, shown)
