"""How the driver refuses: a release refuses nothing by itself, so the rules are looked at first."""

from __future__ import annotations

from reference.commands import Piece, Prompt, Reason, shared_serial, token_id


class No(Exception):
    """Internal: the command is refused for this reason; nothing was touched."""

    def __init__(self, reason: Reason) -> None:
        self.reason = reason


def need(condition: object, reason: Reason) -> None:
    """Refuse unless `condition` holds."""
    if not condition:
        raise No(reason)


def spelled(prompt: Prompt, start: int = 0) -> list[int]:
    """The tokens of `prompt` where it begins at position `start`. Refuses one that is none (EMPTY)."""
    tokens: list[int] = []
    for piece in prompt:
        need(_is_text(piece), Reason.EMPTY)
        serial, at = shared_serial(piece.text), start + len(tokens)
        tokens += [token_id(serial, at + i) for i in range(piece.tokens)]
    return tokens


def _is_text(piece: Piece) -> bool:
    return piece.tokens >= 1 and len(piece.text) == 1 and "a" <= piece.text <= "z"
