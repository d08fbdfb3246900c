"""One sentence on why the state at a violation is impossible, made from facts of the run.

For each clause: which page, cursor or node is at stake, since which command it is as it is, who else has it,
and what the rules say. A clause without words of its own gets expected, observed, and the story of the places
that its failure names. Nothing here decides whether a clause holds, and nothing prints.
"""

from typing import Any, NamedTuple

from ci.explain import blocks, cursors, lifecycle, pages, tree
from ci.explain.history import Claim, History, Past
from ci.explain.places import story
from reference.blocks.clauses import BlockStep
from reference.commands import Broken
from stateful_tests.lockstep.results import Run
from stateful_tests.traces.notation import format_command as describe
from stateful_tests.traces.notation import format_outcome as say

MAX_PLACES = 2  # of a clause without words of its own: the thing itself, and what explains it

_RULES = pages.RULES | cursors.RULES | lifecycle.RULES | tree.RULES


class Explanation(NamedTuple):
    """text: the sentence. claims: what it says of the past."""

    text: str
    claims: tuple[Claim, ...] = ()


def explanation_of(run: Run) -> Explanation | None:
    """Why the end of a violated run is impossible; None if there is nothing to explain."""
    violation = run.violation
    if violation is None or len(run.history) < 2:
        return None
    step = run.history[-1].step
    if step is None:
        row = run.rows[violation.step]
        failed = f"command {violation.step} ({describe(row.command)}) makes the system fail"
        failed += f", {violation.observed.rstrip('.')}"
        ruled = "" if isinstance(row.outcome, Broken) else f"; by the rules it is {say(row.outcome)}"
        return Explanation(f"{failed}{ruled}.")
    past: Any = Past(run, violation) if isinstance(step, BlockStep) else History(run, violation, step)
    rule = blocks.rule if isinstance(step, BlockStep) else _RULES.get(violation.clause)
    try:
        text = rule(past) if rule is not None else None
    except (LookupError, AssertionError, StopIteration):
        text = None  # a view that is odd in more ways than the clause says: expected and observed remain
    return Explanation(past.words(f"{text or _fallback(past)}."), tuple(past.claims))


def _fallback(past: Past) -> str:
    expected, observed = past.violation.expected, past.violation.observed.replace("\n", "; ")
    told = [f"after {past.here} the rules want: {expected}", f"the system shows: {observed}"]
    stories = (story(past, place) for place in past.violation.failure.at[:MAX_PLACES])
    return "; ".join([*told, *filter(None, stories)])
