"""Images in prompts, as vLLM's front end hands them over: placeholders in the text, and a feature for each.

The encoder is ours: of image "A" with three embeddings it makes the three tokens of that image, so that an
input of the model tells which embedding it is. What of the cache of its outputs is kept, and which of them an
input reads, is the release's own.
"""

from __future__ import annotations

import bisect
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from impl.isolation import cut
from impl.stand_ins import Values
from reference.blocks.facts import EncoderEntry, EncoderFacts
from reference.commands import Prompt
from reference.token_ids import image_of, image_tokens, is_image, position_of

UTILS = "vllm/multimodal/utils.py"
FILES = (UTILS,)
PLACEHOLDER = 3  # the token in the place of each embedding; no text has so small a one
_RULES = frozenset({"get_mm_features_in_window", "strip_covered_mm_data"})
# methods of the worker
METHODS = ("_batch_mm_inputs_from_scheduler", "_gather_mm_embeddings")
OPTIONAL_METHODS = ("_get_encoder_output_from_cache", "_process_encoder_cache_scheduler_output")


@dataclass
class ImageSpan:
    """Where the placeholders of an image stand (multimodal/inputs.py: PlaceholderRange)."""

    offset: int
    length: int
    is_embed: None = None

    def get_num_embeds(self) -> int:
        return self.length

    def get_embeds_indices_in_range(self, start: int, end: int) -> tuple[int, int]:
        return start, end


@dataclass
class ImageFeature:
    """An image of a request (multimodal/inputs.py: MultiModalFeatureSpec)."""

    data: dict[str, str] | None
    modality: str
    identifier: str
    mm_position: ImageSpan
    mm_hash: str | None = None


def rules(root: Path) -> dict[str, Callable[..., Any]]:
    """The release's functions that say which images a part of a text has, and which the worker gets."""
    env = {"bisect": bisect, "replace": replace, "MultiModalKwargsItem": dict}
    return cut(root / UTILS, _RULES, env)


def provided() -> dict[str, dict[str, Any]]:
    """Modules of a model with an encoder."""
    return {
        "vllm.multimodal": {"MULTIMODAL_REGISTRY": Values(supports_multimodal_inputs=lambda *_: True)},
        "vllm.multimodal.encoder_budget": {"MultiModalBudget": _budget},
    }  # fmt: skip


def _budget(config: Any, *_: Any, **__: Any) -> Any:
    """The sizes that a server has settled when it starts (multimodal/encoder_budget.py)."""
    sizes = config.scheduler_config
    return Values(
        encoder_compute_budget=sizes.max_num_encoder_input_tokens,
        encoder_cache_size=sizes.encoder_cache_size,
        mm_max_toks_per_item={"image": sizes.encoder_cache_size},
    )


def with_placeholders(tokens: Sequence[int]) -> list[int]:
    """The tokens that the front end sends for those of a text with images."""
    return [PLACEHOLDER if image_of(token) else token for token in tokens]


def features_of(prompt: Prompt) -> list[ImageFeature]:
    """The images of a prompt."""
    features = []
    at = 0
    for piece in prompt:
        if is_image(piece.text):
            name = f"{piece.text}{piece.tokens}"
            span = ImageSpan(at, piece.tokens)
            features.append(ImageFeature({"image": name}, "image", name, span, name))
        at += piece.tokens
    return features


def embeddings(name: str) -> list[int]:
    """The encoder's output for an image such as "A3"."""
    return image_tokens(name[0], int(name[1:]))


def with_images(tokens: Sequence[int], features: Sequence[Any] | None) -> list[int]:
    """The text of these tokens, with those of the images in the places of their placeholders."""
    text = list(tokens)
    for feature in features or ():
        start = feature.mm_position.offset
        for at, token in enumerate(embeddings(feature.identifier), start):
            if at < len(text) and text[at] == PLACEHOLDER:
                text[at] = token
    return text


def images_in(text: Sequence[int]) -> str:
    """The images of a text, in words: "image A at 2"."""
    found = [
        f"image {image_of(token)} at {at}"
        for at, token in enumerate(text)
        if image_of(token) and position_of(token) == 0
    ]
    return ", ".join(found) or "no image"


def encoder_facts(scheduler: Any, encoder: Encoder, names: dict[str, str]) -> EncoderFacts:
    """The cache of the encoder's outputs. names: of requests, as commands call them."""
    manager = scheduler.encoder_cache_manager
    entries = tuple(
        EncoderEntry(
            image, len(embeddings(image)), tuple(sorted(names.get(user, user) for user in users))
        )
        for image, users in manager.cached.items()
    )
    kept = ((image, tuple(map(int, output))) for image, output in encoder.worker.encoder_cache.items())
    return EncoderFacts(
        manager.num_free_slots, manager.num_freeable_slots, entries, tuple(sorted(kept)), encoder.encoded
    )


def with_embeddings(inputs: Sequence[int], read: dict[int, int]) -> tuple[int, ...]:
    """The inputs of a batch entry. inputs: as its text has them. read: the embeddings that it reads in the
    places of placeholders, by index."""
    placeholders = with_placeholders(inputs)
    return tuple(read.get(at, token) for at, token in enumerate(placeholders))


class Encoder:
    """The worker's part: it runs the encoder, and reads what the release's own code gathers. encoded:
    images, by the last command."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.encoded: tuple[str, ...] = ()
        self._tensor = importlib.import_module("torch").tensor

    def encode(self, scheduled: Any) -> None:
        """As `_execute_mm_encoder`, for the images that the scheduler has chosen and the worker has."""
        hashes, items, *_ = self.worker._batch_mm_inputs_from_scheduler(scheduled)
        for key, (_, data) in zip(hashes, items):
            self.worker.encoder_cache[key] = self._tensor(embeddings(data["image"]))
        self.encoded = tuple(hashes)

    def gathered(self, scheduled: Any, shift: int = 0) -> dict[str, dict[int, int]]:
        """The embeddings that each entry of the batch reads, by index among its inputs.

        shift: a drafter reads so many tokens ahead.
        """
        if shift:
            found, places = self.worker._gather_mm_embeddings(scheduled, shift_computed_tokens=shift)
        else:
            found, places = self.worker._gather_mm_embeddings(scheduled)
        values = iter([int(value) for each in found for value in each])
        read: dict[str, dict[int, int]] = {}
        at = 0
        for name in self.worker.input_batch.req_ids:
            count = scheduled.num_scheduled_tokens[name]
            inside = [i for i in range(count) if bool(places[at + i])]
            read[name] = {i: next(values) for i in inside}
            at += count
        return read
