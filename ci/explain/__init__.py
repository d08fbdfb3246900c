"""One sentence on why the state at a violation is impossible, made from facts of the run.

For each clause: which page, cursor or node is at stake, since which command it is as it is, who else has it,
and what the rules say. Where nothing better is known, expected and observed in words.
"""

from __future__ import annotations

from typing import NamedTuple

from ci.explain import cursors, pages, tree
from ci.explain import lifecycle as life
from ci.explain.history import Claim, Past
from stateful_tests.lockstep.results import Run
from stateful_tests.traces.notation import format_command as describe
from stateful_tests.traces.notation import format_outcome as say

_RULES = pages.RULES | cursors.RULES | life.RULES | tree.RULES


class Argument(NamedTuple):
    """text: the sentence. claims: what it says of the past."""

    text: str
    claims: tuple[Claim, ...] = ()


def argue(run: Run) -> Argument | None:
    """The argument of a run's violation; None if there is none to make."""
    violation = run.violation
    if violation is None or len(run.history) < 2:
        return None
    step = run.history[-1].step
    if step is None:
        row = run.rows[violation.step]
        told = f"command {violation.step} ({describe(row.command)}) makes the system fail"
        return Argument(f"{told}, {violation.observed.rstrip('.')}; by the rules it is {say(row.outcome)}.")
    past = Past(run, violation, step)
    rule = _RULES.get(violation.clause)
    try:
        text = rule(past) if rule is not None else None
    except (LookupError, AssertionError, StopIteration):
        text = None  # a view that is odd in more ways than the clause says: expected and observed remain
    return Argument(past.words(f"{text or _fallback(past)}."), tuple(past.claims))


def _fallback(past: Past) -> str:
    expected, observed = past.violation.expected, past.violation.observed.replace("\n", "; ")
    return f"after {past.here} the rules want: {expected}; the system shows: {observed}"
