"""Situations: kind of command, outcome, and the case of its rule, in words.

`situation` is a pure function of one step and cheap, so that exhaustive and random runs count the same
things.
"""

from __future__ import annotations

from reference.commands import Command, Outcome, Reason, Refused
from reference.commands import kind_name as kind_name
from reference.state import State
from stateful_tests.coverage.conjunctions import conjunctions
from stateful_tests.generate.commands import HARNESSES
from stateful_tests.generate.commands.harness import Labels
from stateful_tests.generate.commands.shared_cases import LATE


def situations(was: State, command: Command, outcome: Outcome, now: State) -> set[str]:
    """Return all that a step meets: its situation, and what meets in it of several."""
    return {situation(was, command, outcome, now), *conjunctions(was, command, outcome, now)}


def situation(was: State, command: Command, outcome: Outcome, now: State) -> str:
    """Return the situation of one step of the reference, such as "finish, turn, target inside a page"."""
    kind = type(command)
    if isinstance(outcome, Refused):
        text = _PLAIN.get((kind, outcome.reason))
        if text is None:
            case = HARNESSES[kind].refusals.get(outcome.reason)
            text = _refusal_text(kind, outcome.reason, case is not None and case.applies(was, command))
            if case is None:
                _PLAIN[kind, outcome.reason] = text
        return text
    harness = HARNESSES[kind]
    labels = harness.case(was, command, now)
    if harness.tells_late and LATE.applies(was, command):
        labels = (*labels, LATE.label)
    return _text(kind, labels)


_TEXTS: dict[object, str] = {}
_PLAIN: dict[tuple[type, Reason], str] = {}  # of refusals that are all alike


def _refusal_text(kind: type, reason: Reason, special: bool = False) -> str:
    key = (kind, reason, special)
    if key not in _TEXTS:
        label = f", {HARNESSES[kind].refusals[reason].label}" if special else ""
        _TEXTS[key] = f"{kind_name(kind)}, refused: {reason.value}{label}"
    return _TEXTS[key]


def _text(kind: type, labels: Labels) -> str:
    key = (kind, labels)
    if key not in _TEXTS:
        _TEXTS[key] = ", ".join([kind_name(kind), *(label for label in labels if label)])
    return _TEXTS[key]
