"""One sentence on why the state at a violation is impossible, made from facts of the run.

The failure of a clause names its places and, where the places do not show it, what the command does wrong
(`Failure.head`). The rest is alike for all clauses: since when each place is in its state, until when it was
in another, and its other owners. Failures of outcomes, memory checks, matches and the order of evictions have
no places: refusal_reasons.py words them. Nothing here decides whether a clause holds, and nothing prints.
"""

from typing import NamedTuple

from ci.explain import refusal_reasons
from ci.explain.fact_history import Claim, History, Past
from ci.explain.place_history import of_kind, stories
from impl.process.failures import fails_at_start, failed_in_command
from reference.clauses.step import Step
from reference.commands import Broken
from reference.system_kinds import kind_of_config
from stateful_tests.lockstep.run_moments import AnyMoment
from stateful_tests.lockstep.run_results import Run
from stateful_tests.traces.notation import format_command as describe
from stateful_tests.traces.notation import format_outcome as say


class Because(NamedTuple):
    """The reason why the end of a run is impossible.

    text: the sentence.
    claims: its statements about the past.
    """

    text: str
    claims: tuple[Claim, ...] = ()


def because(run: Run) -> Because | None:
    """Return why the end of a violated run is impossible; None if there is nothing to explain, or if
    this replay does not show the violation."""
    violation = run.violation
    if violation is None or len(run.history) < 2 or len(run.rows) != violation.step + 1:
        return None
    step = run.history[-1].step
    row = run.rows[violation.step]
    if violation.clause == "TRACE":
        reason = refusal_reasons.refusal(run, violation.step)
        text = f"command {violation.step} ({describe(row.command)}): {violation.expected}"
        text += f", {violation.observed}"
        return Because(f"{text}: {reason}." if reason else f"{text}.")
    here = f"command {violation.step} ({describe(row.command)})"
    if step is None:
        broke = violation.observed.rstrip(".")
        failed = _failure_sentence(here, broke)
        alone = isinstance(row.outcome, Broken) or not failed_in_command(broke)
        ruled = "" if alone else f"; expected: {say(row.outcome)}"
        return Because(f"{failed}{ruled}.")
    modelled = kind_of_config(run.trace.geometry).modelled
    past: Past[AnyMoment] = Past(run, violation, run.history)
    if modelled:
        assert isinstance(step, Step)
        past = History(run, violation, step)
    try:
        text = (
            _engine_sentence(past)
            if not isinstance(past, History)
            else refusal_reasons.reason(past) or _place_sentence(past)
        )
    except (LookupError, AssertionError, StopIteration):
        text = _expected_sentence(past)  # a view that is odd in more ways than the clause says
    if "BROKEN" in violation.clauses:
        broke = violation.failure_of("BROKEN").observed.rstrip(".")
        text = f"{_failure_sentence(here, broke)}, and leaves this: {text}"
    return Because(past.words(f"{text}."), tuple(past.claims))


def _failure_sentence(here: str, broke: str) -> str:
    """Return how the system fails.

    here: the command.
    broke: the failure.
    """
    if fails_at_start(broke):
        return f"no command has a part in it: {broke}"
    if not failed_in_command(broke):
        return f"after {here}: {broke}"
    return f"{here} makes the system fail, {broke}"


def _place_sentence(past: Past[AnyMoment]) -> str:
    """Return the clause's own head, and the stories of its places."""
    head = past.violation.failure.head
    since = past.violation.since
    sentence = "; ".join(stories(past))
    checked = f"; the check fails from {past.command(since)} on" if since is not None else ""
    if head:
        return f"{past.here} {head}{f': {sentence}' if sentence else checked}"
    if not sentence:
        return _expected_sentence(past)
    expectation = "" if " must " in sentence else f"; expected: {past.violation.expected}"
    return f"{sentence if past.here in sentence else f'after {past.here} {sentence}'}{expectation}"


def _engine_sentence(past: Past[AnyMoment]) -> str:
    observed = past.violation.observed
    expected = past.violation.expected
    sentence = [
        f"{past.here}: {observed}, where {expected}",
        *stories(past),
        *of_kind(past).events(past),
    ]
    return "; ".join(filter(None, sentence))


def _expected_sentence(past: Past[AnyMoment]) -> str:
    expected = past.violation.expected
    observed = past.violation.observed.replace("\n", "; ")
    return f"after {past.here} expected: {expected}; observed: {observed}"
