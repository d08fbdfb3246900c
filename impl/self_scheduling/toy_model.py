"""The model of engines that schedule by themselves: its next token follows from the stamp of a prefix."""

from __future__ import annotations


def greedy(stamp: int) -> int:
    """Return the most likely token after a prefix."""
    return 2 + hash((stamp, 1)) % 999_983


def other(stamp: int) -> int:
    """Return the token that the model samples if it rejects a draft."""
    return greedy(stamp) + 1_000_000
