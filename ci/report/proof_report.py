"""`kvspec prove` as data and as text: what is proved of the cursors for all lengths."""

import time
from collections.abc import Iterable

from rich.console import Console

from ci import Data
from ci.report import text_output
from stateful_tests.lockstep.exit_codes import ending
from stateful_tests.prove import obligations as proofs
from stateful_tests.prove import window_theorem
from stateful_tests.prove.obligations import ProofVerdict


def collect(names: Iterable[str]) -> Data:
    """Prove the obligations that `names` select; without a name all of them.

    Raises KeyError for a name that selects none.
    """
    selected = tuple(names)
    obligations = proofs.select_obligations(selected)
    began = time.perf_counter()
    collected = [
        {
            "name": proof.obligation.name,
            "claim": proof.obligation.claim,
            "verdict": proof.verdict.value,
            "counterexample": proof.counterexample or None,
            "note": proof.note,
            "seconds": round(proof.seconds, 3),
        }
        for proof in proofs.prove(obligations)
    ]
    counts = {
        verdict.value: sum(proof["verdict"] == verdict for proof in collected)
        for verdict in ProofVerdict
    }
    return {
        "format": "kvspec-proofs",
        "version": 2,
        "exit_code": ending(violated=counts[ProofVerdict.PROVED] < len(collected)),
        **counts,
        "seconds": round(time.perf_counter() - began, 3),
        "obligations": collected,
        "theorem": None if selected else window_theorem.PARAGRAPH,
    }


def text(out: Console, data: Data) -> None:
    """Print the whole report: a line for each obligation, then those that are not proved."""
    text_output.say(out, "For all page sizes, windows and lengths (z3):")
    for obligation in data["obligations"]:
        mark = "  " if obligation["verdict"] == ProofVerdict.PROVED else f"  {obligation['verdict'].upper()} "
        text_output.say(
            out, f"{mark}{obligation['name']}: {obligation['claim']} ({1000 * obligation['seconds']:.0f} ms)"
        )
        if obligation["verdict"] != ProofVerdict.PROVED:
            counterexample = (obligation["counterexample"] or {}).items()
            numbers = ", ".join(f"{name} {value}" for name, value in counterexample)
            line = f"    {obligation['note']}" + (f"; with {numbers}" if numbers else "")
            text_output.say(out, line, style="bold red")
    if data["theorem"] is not None:
        out.print()
        text_output.say(out, "When a turn comes back behind its window", style="bold")
        text_output.say(out, data["theorem"])
    out.print()
    not_proved = (ProofVerdict.REFUTED, ProofVerdict.UNDECIDED)
    bad = "".join(f", {data[verdict]} {verdict}" for verdict in not_proved if data[verdict])
    verdict = (
        f"{data['proved']} of {len(data['obligations'])} proved{bad} in {data['seconds']:.1f} s"
    )
    text_output.verdict(out, verdict, data)
