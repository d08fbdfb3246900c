"""The places of a failure, as rows of clauses state them."""

from collections.abc import Iterable

from reference.failures import Place
from reference.prefix_cache import path_text


def in_words(places: Iterable[Place]) -> str:
    """Such as "table r1 0 2, node a4 full": the fields that each has, in their order; paths as text."""
    parts = []
    for place in places:
        kind = type(place).__name__.removeprefix("At").lower()
        fields = (path_text(f) if isinstance(f, tuple) else str(f) for f in place if f is not None)
        parts.append(" ".join([kind, *fields]))
    return ", ".join(parts)
