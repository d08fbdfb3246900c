"""Token ids: whose token one is and at which position, and the keys that a radix tree makes of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

POSITION_BITS = 20
TOKEN_BITS = 32  # of an element of a tree's key: a bigram has two tokens
# The serial of shared text "a"; b, c, ... follow. All ids fit in 32 bits. A run with so many submits is
# refused (stateful_tests/lockstep/lockstep.py), as two texts would have one serial.
SHARED = 4000
# The serial of image "A"; B, C, ... follow.
IMAGES = 4030


def token_id(serial: int, position: int) -> int:
    """Return the token at `position` of a conversation, as written by the `serial`-th accepted Submit.

    Client and sampler are deterministic functions of these two, so that every system produces the
    same text and a stamp in a slot tells whose token it holds. `serial` counts from 1; the texts that
    prompts share have serials of their own (shared_serial).
    """
    return serial << POSITION_BITS | position


def serial_of(token: int) -> int:
    """Return the serial of a token's text."""
    return token >> POSITION_BITS


def position_of(token: int) -> int:
    """Return the position of a token in its text."""
    return token & (1 << POSITION_BITS) - 1


def shared_serial(text: str) -> int:
    """Return the serial of the shared text called by one letter of a to z."""
    return SHARED + ord(text) - ord("a")


def is_image(name: str) -> bool:
    """Return whether a piece of a prompt is an image, which has a name of one letter of A to Z."""
    return len(name) == 1 and "A" <= name <= "Z"


def image_tokens(image: str, count: int) -> list[int]:
    """Return the tokens of an image: one for each of the `count` embeddings that the encoder makes of
    it, wherever it occurs in a prompt. An engine has a placeholder in their places."""
    serial = IMAGES + ord(image) - ord("A")
    return [token_id(serial, position) for position in range(count)]


def embeddings_of(image: str) -> tuple[int, ...]:
    """Return the tokens of an image such as "A3": a letter, and the number of its embeddings."""
    return tuple(image_tokens(image[0], int(image[1:])))


def image_of(token: int) -> str:
    """Return the image of a token, "" for a token of a text."""
    number = serial_of(token) - IMAGES
    return chr(ord("A") + number) if 0 <= number < 26 else ""


def text_serial(answers: str, serial: int) -> int:
    """Return the serial of the tokens that a request adds to its prompt: that of a shared text, or of
    its Submit."""
    return shared_serial(answers) if answers else serial


def shared_text(serial: int) -> str:
    """Return the letter of a shared text."""
    return chr(ord("a") + serial - SHARED)


def tree_key(tokens: Iterable[int], bigram: bool) -> tuple[int, ...]:
    """Return a radix tree's key for these tokens: the tokens, or pairs of each token with the next. Among
    pairs the last token has no key, because with EAGLE the draft model's KV of a token depends on the next
    token too."""
    return tuple(a << TOKEN_BITS | b for a, b in pairwise(tokens)) if bigram else tuple(tokens)


def tokens_of(key: Sequence[int]) -> tuple[int, ...]:
    """Return the tokens of a radix tree's key: one more than it has pairs."""
    last = [second_of(key[-1])] if key and is_bigram(key[-1]) else []
    return (*map(token_of, key), *last)


def token_of(key: int) -> int:
    """Return the token whose KV the tree keeps under one element of a key."""
    return key >> TOKEN_BITS or key


def is_bigram(key: int) -> bool:
    """Return whether an element of a key is a pair of tokens."""
    return bool(key >> TOKEN_BITS)


def second_of(key: int) -> int:
    """Return the second token of a pair."""
    return key & (1 << TOKEN_BITS) - 1
