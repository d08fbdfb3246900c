"""The places of a failure, as rows of clauses state them."""

from collections.abc import Iterable
from typing import Any

from reference.failures import Place
from reference.prefix_cache import path_text


def in_words(places: Iterable[Place]) -> str:
    """Such as "table r1 0 2, node a4 full": the fields that each has, in their order; paths as text,
    flags by their names."""
    parts = []
    for place in places:
        kind = type(place).__name__.removeprefix("At").lower()
        words = (_place_words(name, value) for name, value in zip(place._fields, place))
        parts.append(" ".join([kind, *filter(None, words)]))
    return ", ".join(parts)


def _place_words(name: str, value: Any) -> str:
    """Return a field of a place; a flag by its name."""
    if value is None or isinstance(value, bool):
        return name if value else ""
    if hasattr(value, "_fields"):  # a place on one of several servers
        return in_words([value])
    return path_text(value) if isinstance(value, tuple) else str(value)
