"""Two texts of the same tokens, distinguished by a namespace alone (extra_key or cache_salt of a request).

With the setting `namespaces` the shared texts b, d, f, ... are spelt with the tokens of a, c, e, ..., and
whoever's text begins with one of them asks for it in a namespace; there the two of a pair are exchanged.
Texts that differ in the specification by their tokens then differ in a release by namespace alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from impl.optional import optional
from reference.commands import POSITION_BITS, SHARED, serial_of, tree_key

SETTING = "namespaces"  # its values are names of a request's fields
NAME = "kvspec"


def begins_other(tokens: Sequence[int]) -> bool:
    """A text that begins like this is looked up in the namespace."""
    serial = serial_of(tokens[0]) if tokens else 0
    return serial >= SHARED and (serial - SHARED) % 2 == 1


def exchanged(tokens: Iterable[int]) -> list[int]:
    """The tokens with the texts of each pair exchanged; twice is none."""
    other = 1 << POSITION_BITS
    return [token ^ other if serial_of(token) >= SHARED else token for token in tokens]


def elements_of(key: Any) -> list[int]:
    """The elements of a RadixKey as the specification has them (`tree_key`)."""
    inside = key.extra_key is not None or optional(key, "RadixKey.cache_salt") is not None
    tokens, bigram = list(key.token_ids), bool(key.is_bigram)
    # up to 0.5.12, where a slice forgets that it has bigrams
    if tokens and isinstance(tokens[0], tuple):
        tokens, bigram = [first for first, _ in tokens] + [tokens[-1][1]], True
    return list(tree_key(exchanged(tokens) if inside else tokens, bigram))
