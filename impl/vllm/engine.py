"""A release's own scheduler, started with the sizes of an EngineConfig, and hashes that tell their tokens."""

from __future__ import annotations

from collections.abc import Callable, Container
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from impl.adapter import UnusableImplementation
from impl.loading.isolation import cut
from impl.process.failures import refuses
from impl.loading.optional import optional
from impl.stand_ins import Values
from impl.vllm.bare_scheduler import made, settings_of
from impl.vllm.images import text_of
from reference.blocks.config import EngineConfig
from reference.blocks.facts import chained
from reference.kv_sources import PLAIN, KvSource


def plain(_: str) -> KvSource:
    """No request has a source of its own."""
    return PLAIN


class KvOrigin(NamedTuple):
    """The source and the text that KV was computed from. text: all tokens up to its end, images included."""

    source: KvSource
    text: tuple[int, ...]


class Stamps:
    """Hashes blocks so that a hash tells which tokens it is of, and keeps whose they are. A hash has 16
    bytes; that of a block of several is those of its parts, one behind the other.

    source, text: of the request whose blocks are hashed now; text: with the tokens of its images, () where
    it has none. weights: how often the model's weights were replaced.
    """

    def __init__(self) -> None:
        self.source = PLAIN
        self.text: tuple[int, ...] = ()
        self.weights = 0
        # hash -> what requests that have it compute from: source, and all tokens that it is of
        self._origins: dict[bytes, list[KvOrigin]] = {}
        self._stamps: dict[tuple[bytes, int, KvOrigin], tuple[int, ...]] = {}

    def __call__(self, of: Any) -> bytes:
        """The hash of (hash of the block before, tokens, further keys), as vLLM's own functions take it."""
        if not isinstance(of, tuple):
            return bytes(16)  # of the empty prefix
        parent, tokens, extra = of
        if not isinstance(parent, bytes) or len(parent) != 16:
            parent = bytes(16)
        stamp = chained(tokens, int.from_bytes(parent[-8:], "big"))[-1]
        keyed = extra or any(parent[:8])
        ahead = hash((extra, parent)) & (1 << 61) - 1 if keyed else 0
        made = ahead.to_bytes(8, "big") + stamp.to_bytes(8, "big")
        before = self._origins[parent][0].text if parent in self._origins else ()
        text = (*before, *tokens)
        origin = KvOrigin(self.source, self.text[: len(text)] or text)
        origins = self._origins.setdefault(made, [])
        if origin not in origins:
            origins.append(origin)
        return made

    def of_block(self, block_hash: bytes, size: int, found: Container[int] = ()) -> tuple[int, ...]:
        """The stamps of the tokens that a hash is of and that lie in its last block, which it may fill in
        part. found: what the block holds; it decides where texts of several sources have the hash."""
        origin = self.origin_in(block_hash, found) or self._candidates(block_hash)[0]
        return self._of(block_hash, size, origin)

    def origin_in(self, block_hash: bytes, found: Container[int]) -> KvOrigin | None:
        """What the KV that a block of this hash holds was computed from; None where it holds no KV of the
        hash."""
        candidates = self._candidates(block_hash)
        return next((o for o in candidates if self._of(block_hash, 1, o)[0] in found), None)

    def _candidates(self, block_hash: bytes) -> list[KvOrigin]:
        """What the KV under a hash may be computed from, with the present weights first."""
        weights = range(self.weights, -1, -1)
        origins = self._origins[block_hash[-16:]]
        return [KvOrigin(o.source._replace(weights=w), o.text) for w in weights for o in origins]

    def _of(self, block_hash: bytes, size: int, origin: KvOrigin) -> tuple[int, ...]:
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
    """A scheduler of the release that this process has loaded, and what makes a request for it.

    root: of its files. overlap: the asynchronous one; v2: as for model runner V2. source_of: of a request,
    by the name that the engine has for it. adapt: changes the settings.

    Raises UnusableImplementation where a module of the release lacks what another imports, and where the
    release refuses the configuration, or sets a block of state to max_model_len as it does without prefix
    caching (mamba_block_size).
    """
    if not config.caching and any(
        g.block_size < config.max_model_len for g in config.groups if g.state
    ):
        raise UnusableImplementation(
            "without caching, this vLLM has a block of state for max_model_len"
        )
    try:
        _validate(root, settings_of(config, overlap, v2), v2)
        around = partial(_hashed_for, stamps, source_of)
        return made(config, overlap, stamps, v2, around, adapt)
    except ImportError as error:
        raise UnusableImplementation(
            f"its bookkeeping does not load: {type(error).__name__}: {error}"
        ) from error
    except Exception as error:
        if not refuses(error, root):
            raise
        message = " ".join(str(error).split())[:200] or type(error).__name__
        raise UnusableImplementation(f"this vLLM refuses the configuration: {message}") from error


def _hashed_for(
    stamps: Stamps, source_of: Callable[[str], KvSource], hasher: Callable[..., Any]
) -> Callable[..., Any]:
    """The release's hasher of a request's blocks; the stamps know the source of the request."""

    def hash_blocks(request: Any) -> Any:
        stamps.source = source_of(request.request_id)._replace(weights=0)
        pictured = optional(request, "Request.mm_features", ())
        stamps.text = tuple(text_of(request)) if pictured else ()
        return hasher(request)

    return hash_blocks


# Of a server's configuration: what they refuse is not driven. A release's wheel is kept without this file.
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
    """Have a checkout's own validators judge the settings. They read more of a configuration than a scheduler
    does: one that reads what the settings do not have judges nothing here."""
    cache = settings.cache_config
    if cache.mamba_block_size is not None and not cache.enable_prefix_caching:
        # A server's one block for all of a text; a larger one, which traces may have, is no other.
        cache.mamba_block_size = settings.model_config.max_model_len
    cache.block_size = cache.mamba_block_size
    if cache.block_size is None:
        return
    for validator in _validators(root, v2):
        try:
            validator(settings)
        except (AttributeError, NameError):
            continue
