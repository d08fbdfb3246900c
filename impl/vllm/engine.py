"""A release's own scheduler, started with the sizes of an EngineConfig, and hashes that tell their tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from impl.adapter import UnusableImplementation
from impl.isolation import cut
from impl.process.failures import refuses
from impl.stand_ins import Values
from impl.vllm.bare_scheduler import made, settings_of
from reference.blocks.config import EngineConfig
from reference.blocks.facts import chain


class Stamps:
    """Hashes blocks so that a hash tells which tokens it is of: its last 8 bytes are the stamp of the last
    one.

    before: stamp -> the stamp of the token before it, and how many tokens it is of.
    """

    def __init__(self) -> None:
        self.before: dict[int, tuple[int, int]] = {0: (0, 0)}

    def __call__(self, of: Any) -> bytes:
        """The hash of (hash of the block before, tokens, further keys), as vLLM's own functions take it."""
        if not isinstance(of, tuple):
            return bytes(16)  # of the empty prefix
        parent, tokens, extra = of
        stamp = (
            int.from_bytes(parent[-8:], "big")
            if isinstance(parent, bytes) and len(parent) == 16
            else 0
        )
        for token in tokens:
            following = chain(stamp, token)
            self.before[following], stamp = (stamp, self.before[stamp][1] + 1), following
        ahead = hash((extra, parent)) & (1 << 61) - 1 if extra else 0
        return ahead.to_bytes(8, "big") + stamp.to_bytes(8, "big")

    def of_block(self, block_hash: bytes, size: int) -> tuple[int, ...]:
        """The stamps of the tokens that a hash is of and that lie in its last block, which it may fill in
        part."""
        stamp, stamps = int.from_bytes(block_hash[-8:], "big"), []
        for _ in range((self.before[stamp][1] - 1) % size + 1):
            stamps.append(stamp)
            stamp, _ = self.before[stamp]
        return tuple(reversed(stamps))


def start(
    root: Path,
    config: EngineConfig,
    overlap: bool,
    stamps: Stamps,
    v2: bool = False,
    adapt: Callable[[Any], None] | None = None,
) -> tuple[Any, Callable[..., Any]]:
    """A scheduler of the release that this process has loaded, and what makes a request for it.

    root: of its files. overlap: the asynchronous one; v2: as for model runner V2. adapt: changes the
    settings.

    Raises UnusableImplementation where the release refuses the configuration, or sets a block of state to
    max_model_len as it does without prefix caching (mamba_block_size).
    """
    if not config.caching and any(
        g.block_size < config.max_model_len for g in config.groups if g.state
    ):
        raise UnusableImplementation(
            "without caching, this vLLM has a block of state for max_model_len"
        )
    try:
        _validate(root, settings_of(config, overlap, v2), v2)
        return made(config, overlap, stamps, v2, adapt)
    except Exception as error:
        if not refuses(error, root):
            raise
        message = " ".join(str(error).split())[:200] or type(error).__name__
        raise UnusableImplementation(f"this vLLM refuses the configuration: {message}") from error


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
    settings.cache_config.block_size = settings.cache_config.mamba_block_size
    if settings.cache_config.block_size is None:
        return
    for validator in _validators(root, v2):
        try:
            validator(settings)
        except (AttributeError, NameError):
            continue
