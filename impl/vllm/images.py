"""Images in prompts, in the form that vLLM's front end sends: placeholders in the text and a feature each.

The encoder is a stand-in: its output for image "A" with three embeddings is the three tokens of that image,
so an input of the model identifies its embedding. The release's own code decides which outputs its cache
keeps, and which of them an input reads.
"""

from __future__ import annotations

import bisect
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from impl.loading.function_cuts import cut
from impl.loading.optional import optional
from impl.stand_ins import Values
from reference.blocks.facts import EncoderEntry, EncoderFacts
from reference.commands import Prompt
from reference.token_ids import embeddings_of, image_of, is_image, position_of

UTILS = "vllm/multimodal/utils.py"
FILES = (UTILS,)
PLACEHOLDER = 3  # token id in the place of each embedding, smaller than that of any token of a text
_RULES = frozenset({"get_mm_features_in_window", "strip_covered_mm_data"})
# Methods of the release's worker: every release has METHODS, some have OPTIONAL_METHODS.
METHODS = ("_batch_mm_inputs_from_scheduler", "_gather_mm_embeddings")
OPTIONAL_METHODS = ("_get_encoder_output_from_cache", "_process_encoder_cache_scheduler_output")


@dataclass
class ImageSpan:
    """The positions of an image's placeholders (multimodal/inputs.py: PlaceholderRange)."""

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
    """Return the release's functions that select the images in a part of a text, and those for the worker."""
    env = {"bisect": bisect, "replace": replace, "MultiModalKwargsItem": dict}
    return cut(root / UTILS, _RULES, env)


def stand_ins_by_module() -> dict[str, dict[str, Any]]:
    """Return stand-ins for the modules that a scheduler imports for a model with an encoder."""
    return {
        "vllm.multimodal": {"MULTIMODAL_REGISTRY": Values(supports_multimodal_inputs=lambda *_: True)},
        "vllm.multimodal.encoder_budget": {"MultiModalBudget": _budget},
    }  # fmt: skip


def _budget(config: Any, *_: Any, **__: Any) -> Any:
    """Return the sizes that a server computes when it starts (multimodal/encoder_budget.py)."""
    sizes = config.scheduler_config
    return Values(
        encoder_compute_budget=sizes.max_num_encoder_input_tokens,
        encoder_cache_size=sizes.encoder_cache_size,
        mm_max_toks_per_item={"image": sizes.encoder_cache_size},
    )


def with_placeholders(tokens: Sequence[int]) -> list[int]:
    """Return a text in the form that the front end sends: with a placeholder for each image token."""
    return [PLACEHOLDER if image_of(token) else token for token in tokens]


def features_of(prompt: Prompt) -> list[ImageFeature]:
    """Return the features of the images in a prompt, in the form that the front end sends."""
    features = []
    position = 0
    for piece in prompt:
        if is_image(piece.text):
            name = f"{piece.text}{piece.tokens}"
            span = ImageSpan(position, piece.tokens)
            features.append(ImageFeature({"image": name}, "image", name, span, name))
        position += piece.tokens
    return features


def with_images(tokens: Sequence[int], features: Sequence[Any] | None) -> list[int]:
    """Return the front end's tokens as a text of the specification: with image tokens instead of
    placeholders."""
    text = list(tokens)
    for feature in features or ():
        start = feature.mm_position.offset
        for index, token in enumerate(embeddings_of(feature.identifier), start):
            if index < len(text) and text[index] == PLACEHOLDER:
                text[index] = token
    return text


def text_of(request: Any) -> list[int]:
    """Return the text of the scheduler's request, with image tokens instead of placeholders."""
    return with_images(request._all_token_ids, optional(request, "Request.mm_features", ()))


def images_in(text: Sequence[int]) -> str:
    """Name the images of a text, such as "image A at 2"."""
    images = [
        f"image {image_of(token)} at {index}"
        for index, token in enumerate(text)
        if image_of(token) and position_of(token) == 0
    ]
    return ", ".join(images) or "no image"


def encoder_facts(scheduler: Any, encoder: Encoder, names: dict[str, str]) -> EncoderFacts:
    """Return the facts of the encoder cache.

    names: the release's id of a request -> its name in commands.
    """
    manager = scheduler.encoder_cache_manager
    entries = tuple(
        EncoderEntry(
            image, len(embeddings_of(image)), tuple(sorted(names.get(user, user) for user in users))
        )
        for image, users in manager.cached.items()
    )
    kept_images = ((image, tuple(map(int, output))) for image, output in encoder.outputs_kept.items())
    return EncoderFacts(
        manager.num_free_slots,
        manager.num_freeable_slots,
        entries,
        tuple(sorted(kept_images)),
        encoder.encoded,
    )


def with_embeddings(inputs: Sequence[int], read: dict[int, int]) -> tuple[int, ...]:
    """Return the inputs that the model computes with for a batch entry.

    inputs: the tokens of the entry. read: input index -> the embedding that the entry reads there.
    """
    placeholders = with_placeholders(inputs)
    return tuple(read.get(index, token) for index, token in enumerate(placeholders))


class Encoder:
    """The worker's side: it runs the encoder, and reads the embeddings that the release's own code gathers.

    encoded: hashes of the images that the last command has encoded.
    """

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.encoded: tuple[str, ...] = ()
        self._tensor = importlib.import_module("torch").tensor

    @property
    def outputs_kept(self) -> dict[str, Any]:
        """The outputs that the worker keeps, by image hash."""
        outputs: dict[str, Any] = self.worker.encoder_cache
        return outputs

    def images_to_encode(self, scheduled: Any) -> tuple[list[str], list[Any]]:
        """Return the hash and the data of each image that the scheduler has chosen and that the worker has
        data for."""
        hashes, items, *_ = self.worker._batch_mm_inputs_from_scheduler(scheduled)
        return hashes, items

    def encode(self, scheduled: Any) -> None:
        """Encode the chosen images and keep their outputs, in the place of the release's
        `execute_mm_encoder`."""
        hashes, items = self.images_to_encode(scheduled)
        for image_hash, (_, data) in zip(hashes, items):
            self.outputs_kept[image_hash] = self._tensor(embeddings_of(data["image"]))
        self.encoded = tuple(hashes)

    def gather_embeddings(self, scheduled: Any, shift: int = 0) -> dict[str, dict[int, int]]:
        """Return the embeddings that each request of the batch reads, by input index.

        shift: number of tokens that a drafter reads ahead.
        """
        if shift:
            embeddings, is_embedding = self.worker._gather_mm_embeddings(
                scheduled, shift_computed_tokens=shift
            )
        else:
            embeddings, is_embedding = self.worker._gather_mm_embeddings(scheduled)
        order = self.worker.input_batch.req_ids
        counts = {name: scheduled.num_scheduled_tokens[name] for name in order}
        return self.by_request(embeddings, is_embedding, counts)

    @staticmethod
    def by_request(embeddings: Any, is_embedding: Any, counts: dict[str, int]) -> dict[str, dict[int, int]]:
        """Return gathered embeddings by request and input index.

        counts: request -> number of inputs, in batch order.
        """
        values = iter([int(value) for tensor in embeddings for value in tensor])
        read: dict[str, dict[int, int]] = {}
        start = 0  # of the request's inputs in the batch
        for name, count in counts.items():
            indices = [index for index in range(count) if bool(is_embedding[start + index])]
            read[name] = {index: next(values) for index in indices}
            start += count
        return read
