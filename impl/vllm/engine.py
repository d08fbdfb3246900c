"""A release's own scheduler with the sizes of an EngineConfig, and block hashes that name their tokens."""

from __future__ import annotations

from collections.abc import Callable, Container
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from impl.adapter import UnusableImplementation
from impl.loading.function_cuts import cut
from impl.process.failures import refuses
from impl.loading.optional import optional
from impl.stand_ins import Values
from impl.vllm.bare_scheduler import new_scheduler, settings_of
from impl.vllm.images import text_of
from reference.blocks.config import EngineConfig
from reference.blocks.facts import chained
from reference.kv_sources import PLAIN, KvSource


def plain(_: str) -> KvSource:
    """Return the plain source: no request has a source of its own."""
    return PLAIN


class KvOrigin(NamedTuple):
    """The source and the text that KV was computed from.

    text: all tokens up to its end, images included.
    """

    source: KvSource
    text: tuple[int, ...]


class Stamps:
    """A hash function for blocks, and a record of the tokens and sources behind each hash.

    A hash has 16 bytes. The hash of a block that joins several smaller ones is the concatenation of theirs.

    source: the source of the request that is being hashed.
    text: its text with image tokens, () if it has no images.
    weights: number of times that the model's weights were replaced.
    """

    def __init__(self) -> None:
        self.source = PLAIN
        self.text: tuple[int, ...] = ()
        self.weights = 0
        # hash -> origins of the requests that have it
        self._origins: dict[bytes, list[KvOrigin]] = {}
        self._stamps: dict[tuple[bytes, int, KvOrigin], tuple[int, ...]] = {}

    def __call__(self, hashed: Any) -> bytes:
        """Return the hash of (hash of the block before, tokens, further keys), the argument that vLLM
        passes to its own hash functions."""
        if not isinstance(hashed, tuple):
            return bytes(16)  # the hash of the empty prefix
        parent, tokens, extra = hashed
        if not isinstance(parent, bytes) or len(parent) != 16:
            parent = bytes(16)
        stamp = chained(tokens, int.from_bytes(parent[-8:], "big"))[-1]
        keyed = extra or any(parent[:8])
        ahead = hash((extra, parent)) & (1 << 61) - 1 if keyed else 0
        block_hash = ahead.to_bytes(8, "big") + stamp.to_bytes(8, "big")
        before = self._origins[parent][0].text if parent in self._origins else ()
        text = (*before, *tokens)
        origin = KvOrigin(self.source, self.text[: len(text)] or text)
        origins = self._origins.setdefault(block_hash, [])
        if origin not in origins:
            origins.append(origin)
        return block_hash

    def of_block(self, block_hash: bytes, size: int, stamps_in_block: Container[int] = ()) -> tuple[int, ...]:
        """Return the stamps of the tokens in the last block of a hashed text. The hash may be that of a
        partial block.

        size: block size (tokens). stamps_in_block: they decide between texts of several sources with this
        hash.
        """
        origin = self.origin_in(block_hash, stamps_in_block) or self._candidates(block_hash)[0]
        return self._stamps_of(block_hash, size, origin)

    def origin_in(self, block_hash: bytes, stamps_in_block: Container[int]) -> KvOrigin | None:
        """Return the origin of the KV in a block with this hash, None if the block has no KV of the hash.

        stamps_in_block: the stamps in the block.
        """
        candidates = self._candidates(block_hash)
        return next((o for o in candidates if self._stamps_of(block_hash, 1, o)[0] in stamps_in_block), None)

    def _candidates(self, block_hash: bytes) -> list[KvOrigin]:
        """Return the possible origins of the KV under a hash, those with the present weights first."""
        weights = range(self.weights, -1, -1)
        origins = self._origins[block_hash[-16:]]
        return [KvOrigin(o.source._replace(weights=w), o.text) for w in weights for o in origins]

    def _stamps_of(self, block_hash: bytes, size: int, origin: KvOrigin) -> tuple[int, ...]:
        key = block_hash, size, origin
        if key not in self._stamps:
            text = origin.text
            start = (len(text) - 1) // size * size
            self._stamps[key] = tuple(chained(text, origin.source.origin)[start:])
        return self._stamps[key]


def start(
    root: Path,
    config: EngineConfig,
    overlap: bool,
    stamps: Stamps,
    v2: bool = False,
    source_of: Callable[[str], KvSource] = plain,
    adapt: Callable[[Any], None] | None = None,
) -> tuple[Any, Callable[..., Any]]:
    """Return a scheduler of the release that this process has loaded, and the function that makes requests
    for it.

    root: the folder of the release. overlap: with the asynchronous scheduler. v2: for model runner V2.
    source_of: returns the source of a request by its engine name. adapt: changes the settings.

    Raises UnusableImplementation if a module of the release lacks a name that another imports, if the
    release refuses the configuration, and if it sets the state block size to max_model_len, as it does
    without prefix caching (mamba_block_size).
    """
    if not config.caching and any(
        g.block_size < config.max_model_len for g in config.groups if g.state
    ):
        raise UnusableImplementation(
            "without caching, this vLLM has a block of state for max_model_len"
        )
    try:
        _validate(root, settings_of(config, overlap=overlap, v2=v2), v2)
        around = partial(_hasher_for, stamps, source_of)
        return new_scheduler(config, overlap, stamps, v2, around, adapt)
    except ImportError as error:
        raise UnusableImplementation(
            f"its bookkeeping does not load: {type(error).__name__}: {error}"
        ) from error
    except Exception as error:
        if not refuses(error, root):
            raise
        message = " ".join(str(error).split())[:200] or type(error).__name__
        raise UnusableImplementation(f"this vLLM refuses the configuration: {message}") from error


def _hasher_for(
    stamps: Stamps, source_of: Callable[[str], KvSource], hasher: Callable[..., Any]
) -> Callable[..., Any]:
    """Return the release's hasher of a request's blocks, extended to tell `stamps` the source of the
    request."""

    def hash_blocks(request: Any) -> Any:
        stamps.source = source_of(request.request_id)._replace(weights=0)
        pictured = optional(request, "Request.mm_features", ())
        stamps.text = tuple(text_of(request)) if pictured else ()
        return hasher(request)

    return hash_blocks


# Validators of a server's configuration. The kept files of a release do not include this one.
_CONFIG = "vllm/config/vllm.py"
_VALIDATORS = frozenset(
    f"VllmConfig.{name}" for name in ("validate_block_size", "validate_mamba_block_size")
)


@lru_cache(maxsize=2)
def _validators(root: Path, v2: bool) -> tuple[Callable[..., Any], ...]:
    file = root / _CONFIG
    if not file.is_file():
        return ()
    env = {"envs": Values(VLLM_USE_V2_MODEL_RUNNER=v2)}
    return tuple(cut(file, _VALIDATORS, env).values())


def _validate(root: Path, settings: Any, v2: bool) -> None:
    """Run a checkout's own validators on the settings. A validator that reads a setting which a scheduler
    does not need is skipped."""
    cache = settings.cache_config
    if cache.mamba_block_size is not None and not cache.enable_prefix_caching:
        # A server has one block for a whole text. A larger block, which traces may have, behaves alike.
        cache.mamba_block_size = settings.model_config.max_model_len
    cache.block_size = cache.mamba_block_size
    if cache.block_size is None:
        return
    for validator in _validators(root, v2):
        try:
            validator(settings)
        except (AttributeError, NameError):
            continue
