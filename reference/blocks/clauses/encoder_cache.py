"""Clauses of the cache of an encoder's outputs (ENC). An image such as "A3" is a letter and the number of its
embeddings."""

from __future__ import annotations

from collections.abc import Iterator

from reference.blocks.clauses.step import BlockStep, clause
from reference.failures import AtCount, AtNamed, Failure, count_text, failure
from reference.token_ids import embeddings_of, image_of, position_of

_ENCODED = AtCount("encoder", "encoded")


@clause(
    "ENC-1",
    "the encoder cache adds up",
    "Free embeddings and those of the images that are counted as kept make up the cache. The free ones and"
    " those that no request needs are what may be evicted.",
    why="One too few: an image waits for ever. One too many: the worker keeps more than its memory holds.",
    rule="blocks.facts",
    source="vllm EncoderCacheManager.num_free_slots, num_freeable_slots",
    needs=("images",),
    trigger=lambda s: s.after.encoder is not None and bool(s.after.encoder.entries),
)
def _cache_adds_up(step: BlockStep) -> Failure | None:
    encoder = step.after.encoder
    if encoder is None:
        return None
    size = step.config.encoder_cache
    free = size - sum(entry.embeds for entry in encoder.entries)
    if encoder.free != free or free < 0:
        expected = f"{count_text(max(0, free), 'embedding')} of {size} must be free beside the images kept"
        return failure(expected, f"{encoder.free} are", AtCount("encoder", "free", free))
    evictable = free + sum(entry.embeds for entry in encoder.entries if not entry.users)
    if encoder.evictable != evictable:
        expected = f"{count_text(evictable, 'embedding')} must be free or of images that nobody needs"
        return failure(expected, f"{encoder.evictable} are", AtCount("encoder", "evictable", evictable))
    return None


@clause(
    "ENC-2",
    "an image is kept for who needs it",
    "A request that an image is kept for has that image in its text, and holds blocks.",
    why=(
        "Nobody may evict an image that is kept for a request which is gone, or which waits with nothing: the"
        " cache stays full, and every other image waits."
    ),
    rule="blocks.facts",
    source="vllm EncoderCacheManager.cached, free; #31857",
    needs=("images",),
    trigger=lambda s: s.after.encoder is not None and any(e.users for e in s.after.encoder.entries),
)
def _image_is_kept_for_who_needs_it(step: BlockStep) -> Failure | None:
    encoder = step.after.encoder
    if encoder is None:
        return None
    for entry in encoder.entries:
        for name in entry.users:
            expected = f"image {entry.image} is kept for requests that have it and hold blocks"
            places = AtNamed("request", name), AtCount("encoder", entry.image)
            fact = step.after.requests.get(name)
            if fact is None:
                return failure(expected, f"it is kept for {name}, which is gone", *places)
            if not _has_whole_image(fact.tokens, entry.image):
                return failure(expected, f"it is kept for {name}, which has no such image", *places)
            if not any(block for row in fact.tables for block in row):
                observed = f"it is kept for {name}, which is {fact.status} and holds none"
                return failure(expected, observed, *places)
    return None


def _has_whole_image(text: tuple[int, ...], image: str) -> bool:
    tokens = embeddings_of(image)
    return any(
        text[index : index + len(tokens)] == tokens
        for index, token in enumerate(text)
        if image_of(token) == image[0]
    )


@clause(
    "ENC-3",
    "the worker keeps the images that the scheduler counts",
    "The worker keeps the embeddings of exactly the images that the scheduler counts as kept, and each"
    " image's are its own.",
    why=(
        "An image that is counted and not there is never encoded again: the batch that needs it ends the"
        " engine. One that is there and not counted is never dropped."
    ),
    rule="blocks.facts",
    source="vllm SchedulerOutput.scheduled_encoder_inputs, free_encoder_mm_hashes",
    needs=("images",),
    trigger=lambda s: s.after.encoder is not None and bool(s.after.encoder.kept),
)
def _worker_keeps_what_scheduler_counts(step: BlockStep) -> Failure | None:
    encoder = step.after.encoder
    if encoder is None:
        return None
    worker_images = dict(encoder.kept)
    counts = {entry.image for entry in encoder.entries}
    for image in sorted(counts | worker_images.keys()):
        place = AtCount("encoder", image)
        if image not in worker_images:
            expected = f"the worker keeps image {image}, which the scheduler counts as kept"
            return failure(expected, "the worker does not have it", place)
        if image not in counts:
            expected = f"the worker drops image {image}, which the scheduler does not count as kept"
            return failure(expected, "the worker has it", place)
        if worker_images[image] != embeddings_of(image):
            return failure(f"image {image} has its own embeddings", "it has others", place)
    return None


@clause(
    "ENC-4",
    "a step encodes what it lacks, within its budget",
    "A step encodes at most encoder_budget embeddings, each image once, and none that was kept for a request"
    " before.",
    why="The budget bounds the memory of a forward pass of the encoder, and what is kept costs nothing.",
    rule="blocks.config",
    source="vllm Scheduler._try_schedule_encoder_inputs, max_num_encoder_input_tokens",
    scope="An image that nobody needed may be evicted in a step that then encodes it.",
    needs=("images",),
    trigger=lambda s: s.after.encoder is not None and bool(s.after.encoder.encoded),
)
def _step_encodes_what_it_lacks(step: BlockStep) -> Failure | None:
    encoder = step.after.encoder
    if encoder is None:
        return None
    budget = step.config.encoder_budget
    total = sum(len(embeddings_of(image)) for image in encoder.encoded)
    if total > budget:
        expected = f"a step encodes at most {count_text(budget, 'embedding')}"
        return failure(expected, f"this one encodes {total}", _ENCODED)
    before = step.before.encoder.entries if step.before.encoder is not None else ()
    needed = {entry.image for entry in before if entry.users}
    for index, image in enumerate(encoder.encoded):
        if image in encoder.encoded[:index]:
            return failure(f"a step encodes image {image} once", "it does so again", _ENCODED)
        if image in needed:
            return failure(f"image {image} is kept, so no step encodes it", "this one does", _ENCODED)
    return None


@clause(
    "ENC-5",
    "no chunk ends within an image",
    "Where images are to be computed whole, an entry that has the first token of an image has its last.",
    why="Tokens of an image see each other in both directions: of a part, they see too few.",
    rule="blocks.config",
    source="vllm disable_chunked_mm_input, #52306",
    scope="A prefix of an image that the cache has is not computed again.",
    needs=("images",),
    trigger=lambda s: s.config.whole_images and any(map(image_of, _batch_inputs(s))),
)
def _no_chunk_ends_within_image(step: BlockStep) -> Failure | None:
    if not step.config.whole_images:
        return None
    for note in step.lanes:
        lane = note.lane
        end = lane.start + len(lane.tokens) - lane.drafts
        if 0 < end < len(note.text) and image_of(note.text[end]):
            index = position_of(note.text[end])  # within its image
            image_start = end - index
            if index > 0 and image_start >= lane.start:
                expected = f"{lane.request} computes its image at {image_start} whole"
                return failure(expected, f"it computes it up to {end}", AtCount(lane.request, "inputs"))
    return None


@clause(
    "ENC-6",
    "an image is kept until it is computed",
    "An image of which a running request has computed a part is kept for that request.",
    why=(
        "Its room is given to another image otherwise. The rest of its tokens then waits for room, and the"
        " encoder computes it a second time."
    ),
    rule="blocks.request_texts",
    source="vllm EncoderCacheManager.free_encoder_input",
    needs=("images",),
    trigger=lambda s: any(True for _ in _images_under_way(s)),
)
def _image_is_kept_until_it_is_computed(step: BlockStep) -> Failure | None:
    encoder = step.after.encoder
    if encoder is None:
        return None
    kept_for = {entry.image: entry.users for entry in encoder.entries}
    for name, image in _images_under_way(step):
        if name not in kept_for.get(image, ()):
            users = " and ".join(kept_for.get(image, ())) or "nobody"
            expected = f"{name} must keep image {image}, having computed a part of it"
            observed = f"image {image} is kept for {users}"
            return failure(expected, observed, AtNamed("request", name), AtCount("encoder", image))
    return None


def _images_under_way(step: BlockStep) -> Iterator[tuple[str, str]]:
    """Yield each running request whose confirmed length ends within an image, and that image."""
    for name, bearer, _ in step.held_tables():
        text = bearer.text
        end = bearer.sure_count
        if step.after.requests[name].status != "RUNNING" or end >= len(text):
            continue
        start = end - position_of(text[end])
        if image_of(text[end]) and start < end:
            yield name, _image_from(text, start)


def _image_from(text: list[int], start: int) -> str:
    """Name the image that begins at a position of a text. The ids of its tokens are consecutive."""
    tokens = enumerate(text[start:])
    size = next((at for at, token in tokens if token != text[start] + at), len(text) - start)
    return f"{image_of(text[start])}{size}"


def _batch_inputs(step: BlockStep) -> list[int]:
    """Return the input tokens of the batch."""
    return [token for lane in step.after.lanes for token in lane.tokens]
