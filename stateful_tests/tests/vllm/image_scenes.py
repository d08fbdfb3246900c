"""Statements about the cache of an encoder's outputs, for the rows of scenes.py.

"A3 is kept for r1": the scheduler counts the image, the worker has it, and fewer embeddings are free. A
statement that begins with "the" spoils one fact and leaves the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from reference.blocks.facts import EncoderEntry, EncoderFacts
from reference.token_ids import embeddings_of


def encoder_of(size: int, users: dict[str, tuple[str, ...]]) -> EncoderFacts:
    """Return the facts of a cache that keeps images.

    size: of the cache (embeddings).
    users: image -> the requests that need it.
    """
    entries = tuple(EncoderEntry(image, int(image[1:]), names) for image, names in users.items())
    free = size - sum(entry.embeds for entry in entries)
    evictable = free + sum(entry.embeds for entry in entries if not entry.users)
    kept = tuple((entry.image, embeddings_of(entry.image)) for entry in entries)
    return EncoderFacts(free, evictable, entries, kept)


def _keep_output(scene: Any, image: str, names: str) -> None:
    scene.images[image] = tuple(names.split())


def _drop_output(scene: Any, image: str) -> None:
    del scene.images[image]


def _spoilt(change: Callable[[EncoderFacts, str], EncoderFacts]) -> Callable[..., None]:
    """Return the function of a statement that changes the facts of the encoder alone."""

    def spoil(scene: Any, value: str) -> None:
        scene.spoil(encoder=lambda facts: change(facts.encoder, value))

    return spoil


def _worker_lacks(encoder: EncoderFacts, image: str) -> EncoderFacts:
    return encoder._replace(kept=tuple((name, values) for name, values in encoder.kept if name != image))


def _worker_has(encoder: EncoderFacts, image: str) -> EncoderFacts:
    return encoder._replace(kept=(*encoder.kept, (image, embeddings_of(image))))


def _worker_has_other_embeddings(encoder: EncoderFacts, image: str) -> EncoderFacts:
    kept = ((name, (7,) if name == image else values) for name, values in encoder.kept)
    return encoder._replace(kept=tuple(kept))


_IMAGE = r"(?P<value>[A-Z]\d)"
IMAGE_STATEMENTS: dict[str, Callable[..., None]] = {
    r"(?P<image>[A-Z]\d) is kept for (?P<names>r\d( r\d)*)": _keep_output,
    r"(?P<image>[A-Z]\d) is kept": lambda scene, image: _keep_output(scene, image, ""),
    r"(?P<image>[A-Z]\d) is dropped": _drop_output,
    r"the step encodes (?P<value>[A-Z\d ]+)": _spoilt(
        lambda encoder, images: encoder._replace(encoded=tuple(images.split()))
    ),
    r"the free embeddings are (?P<value>-?\d+)": _spoilt(
        lambda encoder, count: encoder._replace(free=int(count))
    ),
    r"the evictable embeddings are (?P<value>\d+)": _spoilt(
        lambda encoder, count: encoder._replace(evictable=int(count))
    ),
    rf"the worker lacks {_IMAGE}": _spoilt(_worker_lacks),
    rf"the worker has {_IMAGE}": _spoilt(_worker_has),
    rf"the worker has other embeddings of {_IMAGE}": _spoilt(_worker_has_other_embeddings),
}
