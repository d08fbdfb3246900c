"""Shared parts of systems beside the commands: phases of a request, texts of prompts, refusals."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from reference.commands import DONE, Choice, Done, Freed, Prompt, Reason, Report, Submit
from reference.token_ids import shared_serial, text_serial, token_id

# What a command's method returns when it is done: what was chosen, or what it reports, and None for a plain
# "done".
Played = Sequence[Choice] | Report | Freed | None


class RequestPhase(Enum):
    """The phase of a request.

    QUEUED: submitted or retracted.
    ADMITTED: nothing extended since.
    """

    QUEUED = auto()
    ADMITTED = auto()
    EXTENDING = auto()
    RUNNING = auto()


# A running batch lists the request, and its KV is its own.
IN_BATCH = (RequestPhase.EXTENDING, RequestPhase.RUNNING)


class CommandRefused(Exception):
    """The command is refused for this reason, and nothing was touched. It stays internal to a system."""

    def __init__(self, reason: Reason) -> None:
        self.reason = reason


def require(condition: object, reason: Reason) -> None:
    """Refuse unless `condition` holds."""
    if not condition:
        raise CommandRefused(reason)


def done(played: Played) -> Done:
    """Return the outcome of a command that was carried out."""
    if not played:
        return DONE
    if isinstance(played, Report):
        return Done(report=played)
    return Done(freed=played) if isinstance(played, Freed) else Done(tuple(played))


def well_formed(prompt: Prompt) -> bool:
    """Return whether every piece has tokens, and a text called by one letter of a to z."""
    return all(p.tokens >= 1 and is_text(p.text) for p in prompt)


def is_text(name: str) -> bool:
    """Return whether it names a shared text."""
    return len(name) == 1 and "a" <= name <= "z"


def serial_of_turn(command: Submit, counted: int) -> int:
    """Return the serial of the tokens that a turn adds to its prompt. Refuses a text that is none (EMPTY).

    counted: of its Submit.
    """
    require(not command.answers or is_text(command.answers), Reason.EMPTY)
    return text_serial(command.answers, counted)


def spelled(prompt: Prompt, start: int = 0, most: int | None = None) -> list[int]:
    """Return the tokens of a prompt. Refuses one that is not well-formed (EMPTY).

    start: position of the first token in its text.
    most: the most tokens, from the beginning; None for all.
    """
    require(well_formed(prompt), Reason.EMPTY)
    tokens: list[int] = []
    for piece in prompt:
        count = piece.tokens if most is None else min(piece.tokens, most - len(tokens))
        serial = shared_serial(piece.text)
        next_position = start + len(tokens)
        tokens.extend(token_id(serial, position) for position in range(next_position, next_position + count))
    return tokens
