"""Presets of block-pool engines: tiny sizes by name, which says what is special about them."""

from __future__ import annotations

from reference.blocks.config import EngineConfig, LayerGroup
from reference.geometry import GeometryError

_ONE = LayerGroup(1)
_TWO = LayerGroup(2)
_FOUR = LayerGroup(4)
_NEAR = LayerGroup(2, 3)
_RING = LayerGroup(2, 5, ring=True)
_STATE = LayerGroup(2, state=True)
_WIDE = (_FOUR, LayerGroup(4, state=True))
_ALONE = LayerGroup(20, state=True)  # without caching a request has one state, whatever its length
ENGINE_PRESETS: dict[str, EngineConfig] = {
    "full": EngineConfig((_TWO,), blocks=12, max_model_len=16, max_batched_tokens=8, max_seqs=3),
    "window": EngineConfig((_NEAR,), blocks=12, max_model_len=16, max_batched_tokens=8, max_seqs=3),
    # fewer blocks than a longest text fills
    "small-window": EngineConfig(
        (_NEAR,), blocks=7, max_model_len=24, max_batched_tokens=3, max_seqs=2
    ),
    "hybrid": EngineConfig(
        (_TWO, _NEAR), blocks=20, max_model_len=16, max_batched_tokens=8, max_seqs=3
    ),
    "two-windows": EngineConfig(
        (_TWO, _NEAR, LayerGroup(2, 6)), blocks=30, max_model_len=16, max_batched_tokens=8,
        max_seqs=3,
    ),
    "unequal": EngineConfig(
        (_FOUR, LayerGroup(2, 5)), blocks=18, max_model_len=24, max_batched_tokens=12, max_seqs=3
    ),
    "drafts": EngineConfig(
        (_TWO, LayerGroup(2, 4)), blocks=22, max_model_len=18, max_batched_tokens=12, max_seqs=3,
        drafts=2,
    ),
    "eagle": EngineConfig(
        (_TWO, LayerGroup(2, 4)), blocks=22, max_model_len=18, max_batched_tokens=12, max_seqs=3,
        drafts=2, eagle=True,
    ),
    "eagle-full": EngineConfig(
        (LayerGroup(2, drafter=True),), blocks=12, max_model_len=18, max_batched_tokens=12,
        max_seqs=3, drafts=2, eagle=True,
    ),
    "eagle-window": EngineConfig(
        (_TWO, LayerGroup(2, 4, drafter=True)), blocks=22, max_model_len=18, max_batched_tokens=12,
        max_seqs=3, drafts=2, eagle=True,
    ),
    "block1": EngineConfig(
        (_ONE, LayerGroup(1, 2)), blocks=34, max_model_len=12, max_batched_tokens=8, max_seqs=2,
        drafts=1,
    ),
    "block16": EngineConfig(
        (LayerGroup(16), LayerGroup(16, 20)), blocks=10, max_model_len=64, max_batched_tokens=32,
        max_seqs=3,
    ),
    "tight": EngineConfig(
        (_TWO,), blocks=8, max_model_len=16, max_batched_tokens=12, max_seqs=3, priority=True,
        long_prefill=3,
    ),
    "uncached": EngineConfig(
        (_TWO, _NEAR), blocks=18, max_model_len=16, max_batched_tokens=16, max_seqs=3,
        caching=False, chunked=False,
    ),
    # the default of LMDeploy
    "plain": EngineConfig(
        (_TWO,), blocks=12, max_model_len=16, max_batched_tokens=8, max_seqs=3, caching=False
    ),
    "host": EngineConfig(
        (_TWO,), blocks=10, max_model_len=16, max_batched_tokens=8, max_seqs=3, host_chunks=6
    ),
    "host-small": EngineConfig(
        (_TWO,), blocks=10, max_model_len=16, max_batched_tokens=8, max_seqs=3, host_chunks=2,
        sync_loads=True,
    ),
    "host-chunks": EngineConfig(
        (_TWO,), blocks=10, max_model_len=16, max_batched_tokens=8, max_seqs=3, host_chunks=8,
        chunk_blocks=2, arc=True,
    ),
    "host-hybrid": EngineConfig(
        (_TWO, _NEAR), blocks=20, max_model_len=16, max_batched_tokens=8, max_seqs=3, host_chunks=16
    ),
    "host-window": EngineConfig(
        (_NEAR,), blocks=12, max_model_len=16, max_batched_tokens=8, max_seqs=3, host_chunks=8,
        prompt_only=True,
    ),
    "host-drafts": EngineConfig(
        (_TWO, LayerGroup(2, 4)), blocks=22, max_model_len=18, max_batched_tokens=12, max_seqs=3,
        drafts=2, host_chunks=12,
    ),
    "host-eagle": EngineConfig(
        (LayerGroup(2, drafter=True), LayerGroup(2, 4)), blocks=22, max_model_len=18,
        max_batched_tokens=12, max_seqs=3, drafts=2, eagle=True, host_chunks=12,
    ),
    "storage": EngineConfig(
        (_TWO,), blocks=10, max_model_len=16, max_batched_tokens=8, max_seqs=3, host_chunks=4,
        storage=True,
    ),
    "storage-chunks": EngineConfig(
        (_TWO,), blocks=10, max_model_len=16, max_batched_tokens=8, max_seqs=3, host_chunks=3,
        chunk_blocks=2, arc=True, storage=True,
    ),
    "storage-hybrid": EngineConfig(
        (_TWO, _NEAR), blocks=20, max_model_len=16, max_batched_tokens=8, max_seqs=3,
        host_chunks=10, storage=True,
    ),
    "storage-in-step": EngineConfig(
        (_TWO,), blocks=8, max_model_len=16, max_batched_tokens=12, max_seqs=3, priority=True,
        host_chunks=6, sync_loads=True, storage=True,
    ),
    "storage-state": EngineConfig(
        (_TWO, _STATE), blocks=24, max_model_len=20, max_batched_tokens=8, max_seqs=3,
        host_chunks=10, storage=True,
    ),
    "simple": EngineConfig(
        (_TWO,), blocks=10, max_model_len=16, max_batched_tokens=8, max_seqs=3, host_chunks=6,
        simple=True,
    ),
    "simple-lazy": EngineConfig(
        (_TWO,), blocks=10, max_model_len=16, max_batched_tokens=8, max_seqs=3, host_chunks=4,
        simple=True, lazy=True,
    ),
    "simple-tight": EngineConfig(
        (_TWO,), blocks=8, max_model_len=16, max_batched_tokens=12, max_seqs=3, priority=True,
        host_chunks=12, simple=True,
    ),
    "simple-hybrid": EngineConfig(
        (_TWO, _NEAR), blocks=20, max_model_len=16, max_batched_tokens=8, max_seqs=3, host_chunks=5,
        simple=True,
    ),
    "simple-unequal": EngineConfig(
        (_FOUR, LayerGroup(2, 5)), blocks=18, max_model_len=24, max_batched_tokens=12, max_seqs=3,
        host_chunks=12, simple=True,
    ),
    "simple-lazy-hybrid": EngineConfig(
        (_TWO, _NEAR), blocks=20, max_model_len=16, max_batched_tokens=8, max_seqs=3, priority=True,
        host_chunks=8, simple=True, lazy=True,
    ),
    "simple-drafts": EngineConfig(
        (_TWO, LayerGroup(2, 4)), blocks=22, max_model_len=18, max_batched_tokens=12, max_seqs=3,
        drafts=2, host_chunks=12, simple=True,
    ),
    "simple-eagle": EngineConfig(
        (LayerGroup(2, drafter=True), LayerGroup(2, 4)), blocks=22, max_model_len=18,
        max_batched_tokens=12, max_seqs=3, drafts=2, eagle=True, host_chunks=12, simple=True,
    ),
    "simple-state": EngineConfig(
        (_TWO, _STATE), blocks=24, max_model_len=20, max_batched_tokens=8, max_seqs=3,
        host_chunks=16, simple=True,
    ),
    "simple-state-fine": EngineConfig(
        _WIDE, blocks=24, max_model_len=28, max_batched_tokens=12, max_seqs=3, match=2,
        host_chunks=10, simple=True,
    ),
    "state": EngineConfig(
        (_TWO, _STATE), blocks=24, max_model_len=20, max_batched_tokens=8, max_seqs=3
    ),
    "state-tight": EngineConfig(
        (_TWO, _STATE), blocks=14, max_model_len=16, max_batched_tokens=8, max_seqs=3,
        priority=True, long_prefill=3,
    ),
    "state-window": EngineConfig(
        (_TWO, _NEAR, _STATE, _STATE), blocks=40, max_model_len=20, max_batched_tokens=8, max_seqs=3
    ),
    "state-sparse": EngineConfig(
        (_TWO, _STATE), blocks=24, max_model_len=20, max_batched_tokens=8, max_seqs=3, retention=-1
    ),
    "state-fine": EngineConfig(
        _WIDE, blocks=24, max_model_len=28, max_batched_tokens=12, max_seqs=3, match=2
    ),
    "state-export": EngineConfig(
        _WIDE, blocks=26, max_model_len=36, max_batched_tokens=24, max_seqs=3, match=2,
        checkpoints=2,
    ),
    "state-drafts": EngineConfig(
        _WIDE, blocks=32, max_model_len=28, max_batched_tokens=12, max_seqs=3, drafts=2, match=2
    ),
    "state-eagle": EngineConfig(
        _WIDE, blocks=18, max_model_len=28, max_batched_tokens=12, max_seqs=3, drafts=2, eagle=True,
        priority=True, retention=-1,
    ),
    "state-uncached": EngineConfig(
        (_TWO, _ALONE), blocks=32, max_model_len=20, max_batched_tokens=12, max_seqs=3,
        caching=False, drafts=2,
    ),
    "peer": EngineConfig(
        (_TWO,), blocks=12, max_model_len=16, max_batched_tokens=8, max_seqs=3, peer=True
    ),
    "peer-fails": EngineConfig(
        (_TWO,), blocks=12, max_model_len=16, max_batched_tokens=8, max_seqs=3, peer=True,
        fail_requests=True,
    ),
    "peer-in-step": EngineConfig(
        (_TWO,), blocks=12, max_model_len=16, max_batched_tokens=8, max_seqs=3, peer=True,
        sync_loads=True,
    ),
    "peer-in-step-fails": EngineConfig(
        (_TWO,), blocks=12, max_model_len=16, max_batched_tokens=8, max_seqs=3, peer=True,
        sync_loads=True, fail_requests=True,
    ),
    "peer-hybrid": EngineConfig(
        (_TWO, _NEAR), blocks=20, max_model_len=16, max_batched_tokens=8, max_seqs=3, peer=True
    ),
    "peer-drafts": EngineConfig(
        (_TWO,), blocks=12, max_model_len=18, max_batched_tokens=12, max_seqs=3, drafts=2, peer=True
    ),
    "image": EngineConfig(
        (_TWO,), blocks=12, max_model_len=16, max_batched_tokens=8, max_seqs=3, image=3,
        encoder_cache=6, encoder_budget=4,
    ),
    "image-small": EngineConfig(
        (_FOUR,), blocks=8, max_model_len=20, max_batched_tokens=6, max_seqs=3, image=4,
        encoder_cache=4, encoder_budget=4,
    ),
    "image-whole": EngineConfig(
        (_TWO, _NEAR), blocks=20, max_model_len=16, max_batched_tokens=6, max_seqs=3, image=4,
        encoder_cache=8, encoder_budget=8, whole_images=True,
    ),
    "image-tight": EngineConfig(
        (_TWO,), blocks=8, max_model_len=16, max_batched_tokens=12, max_seqs=3, priority=True,
        long_prefill=3, image=3, encoder_cache=6, encoder_budget=6,
    ),
    "image-drafts": EngineConfig(
        (_TWO,), blocks=12, max_model_len=18, max_batched_tokens=12, max_seqs=3, drafts=2, image=3,
        encoder_cache=6, encoder_budget=6,
    ),
    "image-eagle": EngineConfig(
        (_TWO, LayerGroup(2, 4)), blocks=22, max_model_len=18, max_batched_tokens=12, max_seqs=3,
        drafts=2, eagle=True, image=3, encoder_cache=6, encoder_budget=6,
    ),
    "host-image": EngineConfig(
        (_TWO,), blocks=10, max_model_len=16, max_batched_tokens=8, max_seqs=3, host_chunks=6,
        image=3, encoder_cache=6, encoder_budget=4,
    ),
    "host-image-tight": EngineConfig(
        (_TWO,), blocks=8, max_model_len=16, max_batched_tokens=12, max_seqs=3, priority=True,
        host_chunks=12, image=3, encoder_cache=6, encoder_budget=6,
    ),
    "host-image-drafts": EngineConfig(
        (_TWO, _NEAR), blocks=22, max_model_len=18, max_batched_tokens=12, max_seqs=3, drafts=2,
        host_chunks=12, whole_images=True, image=3, encoder_cache=6, encoder_budget=6,
    ),
    "peer-image": EngineConfig(
        (_TWO,), blocks=12, max_model_len=16, max_batched_tokens=8, max_seqs=3, peer=True, image=3,
        encoder_cache=6, encoder_budget=4,
    ),
    "host-priority": EngineConfig(
        (_TWO,), blocks=8, max_model_len=16, max_batched_tokens=12, max_seqs=3, priority=True,
        host_chunks=12, arc=True,
    ),
    "host-state": EngineConfig(
        (_TWO, _STATE), blocks=24, max_model_len=20, max_batched_tokens=8, max_seqs=3,
        host_chunks=16,
    ),
    "host-state-tight": EngineConfig(
        (_TWO, _STATE), blocks=14, max_model_len=16, max_batched_tokens=8, max_seqs=3,
        priority=True, host_chunks=6,
    ),
    "host-state-drafts": EngineConfig(
        _WIDE, blocks=22, max_model_len=28, max_batched_tokens=12, max_seqs=3, drafts=2,
        host_chunks=10,
    ),
    "host-state-fine": EngineConfig(
        _WIDE, blocks=18, max_model_len=28, max_batched_tokens=12, max_seqs=3, drafts=2, match=2,
        host_chunks=10,
    ),
    "ring": EngineConfig(
        (_RING,), blocks=8, max_model_len=24, max_batched_tokens=6, max_seqs=4, caching=False
    ),
    "ring-hybrid": EngineConfig(
        (_TWO, _RING), blocks=22, max_model_len=16, max_batched_tokens=8, max_seqs=4
    ),
    "ring-tight": EngineConfig(
        (_RING, _TWO), blocks=11, max_model_len=16, max_batched_tokens=7, max_seqs=3
    ),
    "ring-forks": EngineConfig(
        (_TWO, _RING), blocks=24, max_model_len=16, max_batched_tokens=8, max_seqs=4, children=2
    ),
    "forks": EngineConfig(
        (_TWO,), blocks=14, max_model_len=16, max_batched_tokens=8, max_seqs=4, children=2
    ),
    "swap": EngineConfig(
        (_TWO,), blocks=8, max_model_len=16, max_batched_tokens=8, max_seqs=3, swap=8
    ),
    "swap-small": EngineConfig(
        (_TWO,), blocks=8, max_model_len=16, max_batched_tokens=8, max_seqs=4, caching=False, swap=3
    ),
    "swap-ring": EngineConfig(
        (_TWO, _RING), blocks=11, max_model_len=16, max_batched_tokens=8, max_seqs=3, swap=8
    ),
    "swap-forks": EngineConfig(
        (_TWO,), blocks=9, max_model_len=16, max_batched_tokens=8, max_seqs=4, children=2, swap=6
    ),
    "forks-tight": EngineConfig(
        (_TWO,), blocks=8, max_model_len=16, max_batched_tokens=12, max_seqs=4, children=2
    ),
    "forks-uncached": EngineConfig(
        (_TWO,), blocks=14, max_model_len=16, max_batched_tokens=8, max_seqs=4, caching=False,
        children=3,
    ),
}


def engine_preset(name: str) -> EngineConfig:
    """Return the preset called `name`. Raises GeometryError that lists the names."""
    try:
        return ENGINE_PRESETS[name]
    except KeyError:
        raise GeometryError(
            "preset", f"unknown {name!r:.40}; one of {', '.join(ENGINE_PRESETS)}"
        ) from None
