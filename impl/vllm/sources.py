"""The sources of requests in vLLM: `LoRARequest`, `cache_salt`, and the weights of its model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from impl.loading.function_cuts import cut
from impl.loading.optional import optional
from impl.self_scheduling.request_sources import RequestSources
from impl.stand_ins import Values
from impl.vllm.bare_connectors import Offloads, chunks_of
from impl.vllm.bare_scheduler import adapter_of
from impl.vllm.engine import Stamps
from impl.vllm.images import images_in, text_of
from impl.vllm.simple_offload import NULL_BLOCKS, PoolOffloads, hashes_of, resets_host
from impl.vllm.storage import primary_of
from impl.vocabulary import require
from reference.blocks.facts import ForeignKey
from reference.commands import Reason
from reference.kv_sources import KvSource

CORE = "vllm/v1/engine/core.py"
_RESET = "_reset_caches"


class Place(NamedTuple):
    """KV under a key of the cache.

    stamps: the stamps in its slots.
    block, chunk: its block or its chunk, -1 for the other one (see ForeignKey).
    """

    key: bytes
    stamps: Collection[int]
    block: int = -1
    chunk: int = -1


def reset_caches(root: Path) -> Callable[[Any, Any], bool]:
    """Return the release's own reset of the caches of a scheduler and its worker, for a server that sleeps
    or gets new weights.

    Since 0.17 this is `EngineCore._reset_caches`; before, the front end resets the prefix cache of a server
    without running requests.
    """
    release_resets = cut(root / CORE, frozenset({f"EngineCore.{_RESET}"}), {}).get(_RESET)

    def reset(scheduler: Any, worker: Any) -> bool:
        if release_resets is None:
            require(not scheduler.running, Reason.WRONG_PHASE)
            return bool(scheduler.reset_prefix_cache())
        if "reset_connector" in release_resets.__code__.co_varnames:
            require(resets_host(scheduler.connector), Reason.UNFAITHFUL)
        core = Values(
            reset_prefix_cache=scheduler.reset_prefix_cache,
            reset_mm_cache=_nothing,
            reset_encoder_cache=partial(_reset_encoder_cache, scheduler, worker),
        )
        release_resets(core)
        return True

    return reset


def _nothing() -> None:
    """Do nothing: the front end's cache of processed images is not driven."""


def _reset_encoder_cache(scheduler: Any, worker: Any) -> None:
    """Reset the scheduler's encoder cache and drop the worker's outputs, as EngineCore.reset_encoder_cache
    does."""
    optional(scheduler, "Scheduler.reset_encoder_cache", _nothing)()
    if isinstance(worker.encoder_cache, dict):
        worker.encoder_cache.clear()
    else:
        worker.reset_encoder_cache()


def request_fields(source: KvSource) -> dict[str, Any]:
    """Return the constructor arguments for a request with this source."""
    fields: dict[str, Any] = {}
    if source.salt:
        fields["cache_salt"] = source.salt
    if source.adapter:
        fields["lora_request"] = adapter_of(source.adapter, source.adapter_loads)
    return fields


def foreign_keys(
    sources: RequestSources, scheduler: Any, stamps: Stamps, places: Iterable[Place], names: Mapping[str, str]
) -> tuple[ForeignKey, ...]:
    """Return the keys of requests under which the cache finds KV of another source.

    stamps: the hashes of this engine. places: the KV under each key. names: the engine's name of a request
    -> its name in commands.
    """
    pictured = any(optional(r, "Request.mm_features", ()) for r in scheduler.requests.values())
    if sources.all_plain and not pictured:
        return ()
    keys = []
    by_key = dict[bytes, list[Place]]()
    for place in places:
        by_key.setdefault(place.key, []).append(place)
    for name, request in scheduler.requests.items():
        text = text_of(request)
        for key in (bytes(block_hash)[-16:] for block_hash in request.block_hashes):
            for place in by_key.get(key, ()):
                found_origin = stamps.origin_in(key, place.stamps)
                if found_origin is None:
                    continue
                own_source = str(sources.of(name))
                other = str(found_origin.source)
                if own_source == other:
                    # Then only images may differ; other changes of a text are not checked here.
                    own_source = images_in(text[: len(found_origin.text)])
                    other = images_in(found_origin.text)
                if own_source != other:
                    keys.append(ForeignKey(names[name], own_source, other, place.block, place.chunk))
    return tuple(keys)


def places_of(scheduler: Any, memory: Mapping[int, Any], worker_side: Any) -> Iterator[Place]:
    """Yield the KV under keys: blocks of the pool, and chunks of host memory.

    memory: block -> the group that wrote it, and its stamps. mover: the worker's side of the connector,
    None without one.
    """
    for block in scheduler.kv_cache_manager.block_pool.blocks:
        if block.block_hash is not None:  # the last 4 bytes name the group
            _, stamps = memory.get(block.block_id, (-1, ()))
            yield Place(block.block_hash[:-4][-16:], stamps, block=block.block_id)
    if isinstance(worker_side, PoolOffloads):
        for key, block in hashes_of(scheduler.connector.scheduler_manager.cpu_block_pool):
            chunk = block.block_id - NULL_BLOCKS
            held = worker_side.transfers.host.get(chunk, ())
            yield Place(key[:-4][-16:], [s for _, slots in held for s in slots], chunk=chunk)
    elif isinstance(worker_side, Offloads):
        manager = primary_of(scheduler.connector.connector_scheduler.manager)
        for key, chunk, pins in chunks_of(manager):
            if pins < 0:  # a store still writes it, so no load reads it
                continue
            held = worker_side.transfers.host.get(chunk, ())
            yield Place(key[:-4][:16], [s for _, slots in held for s in slots], chunk=chunk)
