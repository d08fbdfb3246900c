"""Two texts of the same tokens, distinguished by a namespace alone (extra_key, cache_salt or lora_id of a
request).

With the setting `namespaces` the shared texts b, d, f, ... are spelt with the tokens of a, c, e, ..., and
whoever's text begins with one of them asks for it in a namespace; there the two of a pair are exchanged.
Texts that differ in the specification by their tokens then differ in a release by namespace alone.

The setting names the field. "extra_key-or-lora_id" gives both texts of a pair a namespace of the same name:
the first of the two fields for a, c, e, ..., the second for b, d, f, ...
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from impl.loading.optional import optional
from reference.token_ids import POSITION_BITS, SHARED, serial_of, tree_key

SETTING = "namespaces"
NAME = "kvspec"
SAME_NAME = "same"  # of two fields
_PAIR = "-or-"


def begins_other(tokens: Sequence[int]) -> bool:
    """Return whether a text with this beginning is looked up in the namespace."""
    serial = serial_of(tokens[0]) if tokens else 0
    return serial >= SHARED and (serial - SHARED) % 2 == 1


def fields_of(setting: str, tokens: Sequence[int]) -> dict[str, str]:
    """Return the fields of a request for a text that begins like this, with their values."""
    field, _, second = setting.partition(_PAIR)
    if not field:
        return {}
    if begins_other(tokens):
        return {second: SAME_NAME} if second else {field: NAME}
    shared = bool(tokens) and serial_of(tokens[0]) >= SHARED
    return {field: SAME_NAME} if second and shared else {}


def key_fields_of(setting: str, tokens: Sequence[int]) -> dict[str, str]:
    """Return the fields of the tree's key for such a text: an adapter stands in the extra key."""
    fields = fields_of(setting, tokens)
    return {"extra_key" if name == "lora_id" else name: value for name, value in fields.items()}


def key_fields(setting: str) -> list[str]:
    """Return the fields of the tree's keys that tell namespaces apart."""
    return [name if name != "lora_id" else "extra_key" for name in setting.split(_PAIR) if name]


def exchange_texts(tokens: Iterable[int]) -> list[int]:
    """Return the tokens with the texts of each pair exchanged; twice is none."""
    other = 1 << POSITION_BITS
    return [token ^ other if serial_of(token) >= SHARED else token for token in tokens]


def elements_of(key: Any) -> list[int]:
    """Return the elements of a RadixKey as the specification has them (`tree_key`)."""
    salted = optional(key, "RadixKey.cache_salt") is not None
    inside = salted or key.extra_key not in (None, SAME_NAME)
    tokens = list(key.token_ids)
    bigram = bool(key.is_bigram)
    # up to 0.5.12, where a slice forgets that it has bigrams
    if tokens and isinstance(tokens[0], tuple):
        tokens = [first for first, _ in tokens] + [tokens[-1][1]]
        bigram = True
    return list(tree_key(exchange_texts(tokens) if inside else tokens, bigram))
