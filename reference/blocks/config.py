"""The configuration of a block-pool engine: groups of layers, blocks, budgets. It is validated once, here.

A group is the layers that share a block table: full attention, a window, or recurrent state. Lengths are
tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from reference.geometry import GeometryError

BOUNDS = {
    "blocks": (1, 1 << 12),
    "max_model_len": (2, 1 << 12),
    "max_batched_tokens": (1, 1 << 12),
    "max_seqs": (1, 256),
    "drafts": (0, 16),
    "long_prefill": (0, 1 << 12),
    "host_chunks": (0, 1 << 12),
    "chunk_blocks": (1, 16),
    "retention": (-1, 1 << 12),
    "match": (0, 256),
    "checkpoints": (0, 256),
    "image": (0, 256),
    "encoder_cache": (0, 1 << 12),
    "encoder_budget": (0, 1 << 12),
    "children": (0, 16),
    "swap": (0, 1 << 12),
}
MAX_GROUPS = 8
MAX_SLOTS = 1 << 16


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers with one block table: tokens of a block, and how many positions a query sees (None: all).

    state: the layers are recurrent. A block then holds one state (reference.recurrent_states), the one after
    the last of its computed tokens; no query sees a position. drafter: the layers of a drafter are among
    them, and the engine's configuration says so. ring: the table is a ring of as many slots as the window:
    a position takes the slot of the one that has left the window, and no prefix is cached."""

    block_size: int
    window: int | None = None
    state: bool = False
    drafter: bool = False
    ring: bool = False

    def slot_of(self, position: int) -> tuple[int, int]:
        """Return the entry of a table that has a position, and the slot in its block."""
        if self.ring and self.window is not None:
            position %= self.window
        return divmod(position, self.block_size)

    def entries_of(self, start: int, end: int) -> Iterable[int]:
        """Return the entries of a table that have the positions from `start` to `end`."""
        if self.ring:
            return sorted({self.slot_of(position)[0] for position in range(start, end)})
        return range(start // self.block_size, -(-end // self.block_size) if start < end else 0)

    def first_kept(self, start: int, end: int) -> int:
        """Return the first position from `start` on whose slot no position before `end` has taken."""
        if self.ring and self.window is not None:
            return max(start, end - self.window)
        return start


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes and switches of one engine.

    blocks: blocks that can be allocated; the null block comes on top.
    max_model_len: longest text (tokens).
    max_batched_tokens: most tokens of one step, over all requests.
    max_seqs: most requests of one step.
    caching: the engine has a prefix cache.
    drafts: tokens that a drafter proposes for each round.
    eagle: the drafter writes KV of its own. Slots are allocated ahead, a cache hit leaves out its last block,
        and the drafter also runs behind a chunk of a prompt.
    chunked: a prompt may be computed in chunks.
    priority: waiting requests are ordered by priority, not by arrival.
    long_prefill: longest chunk of a prompt while other requests wait (tokens), 0 for no limit.

    host_chunks: chunks of host memory for offloaded blocks, 0 for none.
    chunk_blocks: blocks of a chunk.
    arc: chunks are evicted by ARC instead of LRU.
    sync_loads: a load may be done within the step that needs it; from a peer it always is.
    prompt_only: outputs are not offloaded.
    storage: offloaded blocks are also written to a storage, and hits are read back from it.
    simple: host memory is a second pool of blocks, whose chunks are blocks.
    lazy: a block is offloaded when it is about to be evicted, not once it is computed.
    peer: a peer has computed prompts, whose KV is loaded from it.
    fail_requests: a load that fails ends its request; otherwise the request is computed here.

    retention: the prefix cache keeps a state or a window every so many tokens; 0 for every block, -1 for
        proven boundaries alone.
    match: tokens of a hash, so that a hit may end within a block; 0 for a whole block.
    checkpoints: a chunk of a prompt also writes a state within it, at a multiple of so many tokens.

    image: embeddings of the largest image of a prompt, 0 without an encoder.
    encoder_cache: embeddings of images that are kept.
    encoder_budget: embeddings that one step may compute.
    whole_images: no chunk of a prompt ends within an image.

    children: most further answers that a request may ask for.
    swap: blocks of host memory for requests that give up their blocks. Such a request goes on from its copy;
        one that finds no room there computes its text again.

    Raises GeometryError when a size is out of bounds or the sizes do not fit together.
    """

    groups: tuple[LayerGroup, ...]
    blocks: int
    max_model_len: int
    max_batched_tokens: int
    max_seqs: int = 2
    caching: bool = True
    drafts: int = 0
    eagle: bool = False
    chunked: bool = True
    priority: bool = False
    long_prefill: int = 0
    host_chunks: int = 0
    chunk_blocks: int = 1
    arc: bool = False
    sync_loads: bool = False
    prompt_only: bool = False
    storage: bool = False
    simple: bool = False
    lazy: bool = False
    peer: bool = False
    fail_requests: bool = False
    retention: int = 0
    match: int = 0
    checkpoints: int = 0
    image: int = 0
    encoder_cache: int = 0
    encoder_budget: int = 0
    whole_images: bool = False
    children: int = 0
    swap: int = 0

    def __post_init__(self) -> None:
        if not 1 <= len(self.groups) <= MAX_GROUPS:
            raise GeometryError(
                "groups", f"must be 1 to {MAX_GROUPS} of them, not {len(self.groups)}"
            )
        self._check_groups()
        for name, (low, high) in BOUNDS.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise GeometryError(name, f"must be in [{low}, {high}], not {value}")
        if (
            self.blocks * max((g.block_size for g in self.groups if not g.state), default=1)
            > MAX_SLOTS
        ):
            raise GeometryError("blocks", f"the pool may hold at most {MAX_SLOTS} tokens")
        if self.eagle and not self.drafts:
            raise GeometryError("eagle", "needs drafts: a drafter that proposes nothing is none")
        if self.max_batched_tokens < self.max_seqs * (1 + self.drafts):
            rounds = f"a round of {self.max_seqs} requests with {self.drafts} drafts each"
            raise GeometryError("max_batched_tokens", f"must hold {rounds}")
        if not self.chunked and self.max_batched_tokens < self.max_model_len:
            raise GeometryError(
                "max_batched_tokens", "must hold a prompt of max_model_len where none is cut"
            )
        self._check_connector()
        self._check_states()
        self._check_encoder()
        if self.blocks < (need := sum(map(self.most_blocks, self.groups))):
            raise GeometryError("blocks", f"one request of max_model_len needs {need} of them")

    def _check_groups(self) -> None:
        """Raise GeometryError for a layer group that no engine has."""
        for at, group in enumerate(self.groups):
            if not 1 <= group.block_size <= 256:
                size = group.block_size
                raise GeometryError(f"groups[{at}].block_size", f"must be in [1, 256], not {size}")
            if group.window is not None and not 1 <= group.window <= 1 << 16:
                raise GeometryError(
                    f"groups[{at}].window", f"must be in [1, {1 << 16}], not {group.window}"
                )
            if group.state and group.window is not None:
                raise GeometryError(
                    f"groups[{at}].window", "goes without state: a recurrent layer has none"
                )
            if group.ring and group.window is None:
                raise GeometryError(f"groups[{at}].ring", "needs window, the slots of the ring")
            if group.drafter and (group.state or not self.eagle):
                raise GeometryError(
                    f"groups[{at}].drafter", "needs eagle, and layers that are not recurrent"
                )
        if sum(group.drafter for group in self.groups) > 1:
            raise GeometryError("groups", "a drafter has layers in one of them")

    def _check_connector(self) -> None:
        """Raise GeometryError for a connector that other sizes rule out."""
        if self.chunk_blocks > 1 and len({group.block_size for group in self.groups}) > 1:
            raise GeometryError(
                "chunk_blocks", "must be 1 where groups have blocks of several sizes"
            )
        if self.host_chunks and self.peer:
            raise GeometryError("peer", "goes without host_chunks: an engine has one connector")
        if self.peer and self.sync_loads and (len(self.groups) > 1 or self.groups[0].window):
            raise GeometryError(
                "sync_loads", "of a peer: goes with one group without window, whose lost blocks are named"
            )
        if self.storage and not self.host_chunks:
            raise GeometryError("storage", "needs host_chunks: it stands behind host memory")
        if self.lazy and not self.simple:
            raise GeometryError("lazy", "needs simple: other connectors offload what is computed")
        if self.simple:
            self._check_simple()
        if self.fail_requests and not self.peer:
            raise GeometryError("fail_requests", "needs peer: loads of that may fail")
        if self.host_chunks and not self.caching:
            raise GeometryError(
                "host_chunks", "needs caching: blocks are offloaded by their hashes"
            )

    def _check_simple(self) -> None:
        """Raise GeometryError where host memory cannot be a pool of blocks."""
        if not self.host_chunks:
            raise GeometryError("simple", "needs host_chunks: they are the blocks of its pool")
        if self.chunk_blocks > 1:
            raise GeometryError("chunk_blocks", "must be 1 with simple: a chunk is a block")
        others = "arc", "sync_loads", "prompt_only", "storage"
        if given := [name for name in others if getattr(self, name)]:
            raise GeometryError(given[0], "goes without simple: a pool of blocks has none")
        if all(group.state or group.window is not None for group in self.groups):
            raise GeometryError("simple", "needs a group of full attention, which hits are found by")

    def _check_states(self) -> None:
        """Check the sizes of recurrent groups and of hits within a block."""
        for name in ("retention", "match", "checkpoints"):
            if getattr(self, name) and not (self.caching and self.recurrent):
                raise GeometryError(name, "needs caching and a group with state")
        for at, group in enumerate(self.groups):
            if self.match and group.block_size % self.match:
                raise GeometryError(
                    "match", f"must divide groups[{at}].block_size, {group.block_size}"
                )
            if group.state and self.caching and group.block_size <= self.drafts:
                least = "a round of drafts ends in the next block at most"
                raise GeometryError(
                    f"groups[{at}].block_size", f"must be above {self.drafts}: {least}"
                )

    def _check_encoder(self) -> None:
        """Check that an image of the largest size fits, as a server makes sure when it starts."""
        for name in ("encoder_cache", "encoder_budget", "whole_images"):
            if getattr(self, name) and not self.image:
                raise GeometryError(name, "needs image, the embeddings of the largest one")
        for name in ("encoder_cache", "encoder_budget"):
            if getattr(self, name) < self.image:
                raise GeometryError(name, f"must hold an image of {self.image} embeddings")
        if self.whole_images and self.max_batched_tokens < self.image:
            raise GeometryError("max_batched_tokens", "must hold an image where none is cut")

    @property
    def recurrent(self) -> tuple[int, ...]:
        """The groups with recurrent state, by number."""
        return tuple(at for at, group in enumerate(self.groups) if group.state)

    @property
    def draft_group(self) -> int | None:
        """The group with the drafter's layers; None where no group has them, and their KV is not
        checked."""
        return next((at for at, group in enumerate(self.groups) if group.drafter), None)

    @property
    def connects(self) -> bool:
        """Whether the engine has a KV connector."""
        return self.host_chunks > 0 or self.peer

    @property
    def encodes(self) -> bool:
        """Whether prompts may have images."""
        return self.image > 0

    def has_room_for(self, length: int) -> bool:
        """Return whether an empty engine has blocks for a text and one spare block of each group, while
        as many requests as it runs at once have their states."""
        paged = [group for group in self.groups if not group.state]
        states = [
            self.max_seqs - 1 + self.most_blocks(group) for group in self.groups if group.state
        ]
        blocks = sum(1 + -(-length // group.block_size) for group in paged) + sum(states)
        page = max((group.block_size for group in paged), default=1)
        return length + page <= self.max_model_len and blocks <= self.blocks

    def most_blocks(self, group: LayerGroup) -> int:
        """Return the number of blocks of a group that one request may need, with two steps of the whole
        budget in flight."""
        if group.state:  # the running one, the one before, a copy on write and a checkpoint
            return 4 + self.drafts
        most = -(-self.max_model_len // group.block_size)
        if group.window is None:
            return most
        if group.ring:
            return min(most, -(-group.window // group.block_size))
        return min(
            most, -(-(group.window - 1 + 2 * self.max_batched_tokens) // group.block_size) + 1
        )


_ONE = LayerGroup(1)
_TWO = LayerGroup(2)
_FOUR = LayerGroup(4)
_NEAR = LayerGroup(2, 3)
_RING = LayerGroup(2, 5, ring=True)
_STATE = LayerGroup(2, state=True)
_WIDE = (_FOUR, LayerGroup(4, state=True))
_ALONE = LayerGroup(20, state=True)  # without caching a request has one state, whatever its length
# Tiny on purpose. The names say what is special.
ENGINE_PRESETS: dict[str, EngineConfig] = {
    "full": EngineConfig((_TWO,), 12, 16, 8, max_seqs=3),
    "window": EngineConfig((_NEAR,), 12, 16, 8, max_seqs=3),
    # fewer blocks than a longest text fills
    "small-window": EngineConfig((_NEAR,), 7, 24, 3, max_seqs=2),
    "hybrid": EngineConfig((_TWO, _NEAR), 20, 16, 8, max_seqs=3),
    "two-windows": EngineConfig((_TWO, _NEAR, LayerGroup(2, 6)), 30, 16, 8, max_seqs=3),
    "unequal": EngineConfig((_FOUR, LayerGroup(2, 5)), 18, 24, 12, max_seqs=3),
    "drafts": EngineConfig((_TWO, LayerGroup(2, 4)), 22, 18, 12, max_seqs=3, drafts=2),
    "eagle": EngineConfig((_TWO, LayerGroup(2, 4)), 22, 18, 12, max_seqs=3, drafts=2, eagle=True),
    "eagle-full": EngineConfig(
        (LayerGroup(2, drafter=True),), 12, 18, 12, max_seqs=3, drafts=2, eagle=True
    ),
    "eagle-window": EngineConfig(
        (_TWO, LayerGroup(2, 4, drafter=True)), 22, 18, 12, max_seqs=3, drafts=2, eagle=True
    ),
    "block1": EngineConfig((_ONE, LayerGroup(1, 2)), 34, 12, 8, max_seqs=2, drafts=1),
    "block16": EngineConfig((LayerGroup(16), LayerGroup(16, 20)), 10, 64, 32, max_seqs=3),
    "tight": EngineConfig((_TWO,), 8, 16, 12, max_seqs=3, priority=True, long_prefill=3),
    "uncached": EngineConfig((_TWO, _NEAR), 18, 16, 16, max_seqs=3, caching=False, chunked=False),
    # the default of LMDeploy
    "plain": EngineConfig((_TWO,), 12, 16, 8, max_seqs=3, caching=False),
    "host": EngineConfig((_TWO,), 10, 16, 8, max_seqs=3, host_chunks=6),
    "host-small": EngineConfig((_TWO,), 10, 16, 8, max_seqs=3, host_chunks=2, sync_loads=True),
    "host-chunks": EngineConfig(
        (_TWO,), 10, 16, 8, max_seqs=3, host_chunks=8, chunk_blocks=2, arc=True
    ),
    "host-hybrid": EngineConfig((_TWO, _NEAR), 20, 16, 8, max_seqs=3, host_chunks=16),
    "host-window": EngineConfig((_NEAR,), 12, 16, 8, max_seqs=3, host_chunks=8, prompt_only=True),
    "host-drafts": EngineConfig(
        (_TWO, LayerGroup(2, 4)), 22, 18, 12, max_seqs=3, drafts=2, host_chunks=12
    ),
    "host-eagle": EngineConfig(
        (LayerGroup(2, drafter=True), LayerGroup(2, 4)), 22, 18, 12, max_seqs=3, drafts=2, eagle=True,
        host_chunks=12,
    ),
    "storage": EngineConfig((_TWO,), 10, 16, 8, max_seqs=3, host_chunks=4, storage=True),
    "storage-chunks": EngineConfig(
        (_TWO,), 10, 16, 8, max_seqs=3, host_chunks=3, chunk_blocks=2, arc=True, storage=True
    ),
    "storage-hybrid": EngineConfig((_TWO, _NEAR), 20, 16, 8, max_seqs=3, host_chunks=10, storage=True),
    "storage-in-step": EngineConfig(
        (_TWO,), 8, 16, 12, max_seqs=3, priority=True, host_chunks=6, sync_loads=True, storage=True
    ),
    "storage-state": EngineConfig((_TWO, _STATE), 24, 20, 8, max_seqs=3, host_chunks=10, storage=True),
    "simple": EngineConfig((_TWO,), 10, 16, 8, max_seqs=3, host_chunks=6, simple=True),
    "simple-lazy": EngineConfig((_TWO,), 10, 16, 8, max_seqs=3, host_chunks=4, simple=True, lazy=True),
    "simple-tight": EngineConfig(
        (_TWO,), 8, 16, 12, max_seqs=3, priority=True, host_chunks=12, simple=True
    ),
    "simple-hybrid": EngineConfig((_TWO, _NEAR), 20, 16, 8, max_seqs=3, host_chunks=5, simple=True),
    "simple-unequal": EngineConfig(
        (_FOUR, LayerGroup(2, 5)), 18, 24, 12, max_seqs=3, host_chunks=12, simple=True
    ),
    "simple-lazy-hybrid": EngineConfig(
        (_TWO, _NEAR), 20, 16, 8, max_seqs=3, priority=True, host_chunks=8, simple=True, lazy=True
    ),
    "simple-drafts": EngineConfig(
        (_TWO, LayerGroup(2, 4)), 22, 18, 12, max_seqs=3, drafts=2, host_chunks=12, simple=True
    ),
    "simple-eagle": EngineConfig(
        (LayerGroup(2, drafter=True), LayerGroup(2, 4)), 22, 18, 12, max_seqs=3, drafts=2, eagle=True,
        host_chunks=12, simple=True,
    ),
    "simple-state": EngineConfig((_TWO, _STATE), 24, 20, 8, max_seqs=3, host_chunks=16, simple=True),
    "simple-state-fine": EngineConfig(_WIDE, 24, 28, 12, max_seqs=3, match=2, host_chunks=10, simple=True),
    "state": EngineConfig((_TWO, _STATE), 24, 20, 8, max_seqs=3),
    "state-tight": EngineConfig(
        (_TWO, _STATE), 14, 16, 8, max_seqs=3, priority=True, long_prefill=3
    ),
    "state-window": EngineConfig((_TWO, _NEAR, _STATE, _STATE), 40, 20, 8, max_seqs=3),
    "state-sparse": EngineConfig((_TWO, _STATE), 24, 20, 8, max_seqs=3, retention=-1),
    "state-fine": EngineConfig(_WIDE, 24, 28, 12, max_seqs=3, match=2),
    "state-export": EngineConfig(_WIDE, 26, 36, 24, max_seqs=3, match=2, checkpoints=2),
    "state-drafts": EngineConfig(_WIDE, 32, 28, 12, max_seqs=3, drafts=2, match=2),
    "state-eagle": EngineConfig(
        _WIDE, 18, 28, 12, max_seqs=3, drafts=2, eagle=True, priority=True, retention=-1
    ),
    "state-uncached": EngineConfig((_TWO, _ALONE), 32, 20, 12, max_seqs=3, caching=False, drafts=2),
    "peer": EngineConfig((_TWO,), 12, 16, 8, max_seqs=3, peer=True),
    "peer-fails": EngineConfig((_TWO,), 12, 16, 8, max_seqs=3, peer=True, fail_requests=True),
    "peer-in-step": EngineConfig((_TWO,), 12, 16, 8, max_seqs=3, peer=True, sync_loads=True),
    "peer-in-step-fails": EngineConfig(
        (_TWO,), 12, 16, 8, max_seqs=3, peer=True, sync_loads=True, fail_requests=True
    ),
    "peer-hybrid": EngineConfig((_TWO, _NEAR), 20, 16, 8, max_seqs=3, peer=True),
    "peer-drafts": EngineConfig((_TWO,), 12, 18, 12, max_seqs=3, drafts=2, peer=True),
    "image": EngineConfig(
        (_TWO,), 12, 16, 8, max_seqs=3, image=3, encoder_cache=6, encoder_budget=4
    ),
    "image-small": EngineConfig(
        (_FOUR,), 8, 20, 6, max_seqs=3, image=4, encoder_cache=4, encoder_budget=4
    ),
    "image-whole": EngineConfig(
        (_TWO, _NEAR), 20, 16, 6, max_seqs=3, image=4, encoder_cache=8, encoder_budget=8,
        whole_images=True,
    ),
    "image-tight": EngineConfig(
        (_TWO,), 8, 16, 12, max_seqs=3, priority=True, long_prefill=3,
        image=3, encoder_cache=6, encoder_budget=6,
    ),
    "image-drafts": EngineConfig(
        (_TWO,), 12, 18, 12, max_seqs=3, drafts=2, image=3, encoder_cache=6, encoder_budget=6
    ),
    "image-eagle": EngineConfig(
        (_TWO, LayerGroup(2, 4)), 22, 18, 12, max_seqs=3, drafts=2, eagle=True,
        image=3, encoder_cache=6, encoder_budget=6,
    ),
    "host-image": EngineConfig(
        (_TWO,), 10, 16, 8, max_seqs=3, host_chunks=6,
        image=3, encoder_cache=6, encoder_budget=4,
    ),
    "host-image-tight": EngineConfig(
        (_TWO,), 8, 16, 12, max_seqs=3, priority=True, host_chunks=12,
        image=3, encoder_cache=6, encoder_budget=6,
    ),
    "host-image-drafts": EngineConfig(
        (_TWO, _NEAR), 22, 18, 12, max_seqs=3, drafts=2, host_chunks=12, whole_images=True,
        image=3, encoder_cache=6, encoder_budget=6,
    ),
    "peer-image": EngineConfig(
        (_TWO,), 12, 16, 8, max_seqs=3, peer=True, image=3, encoder_cache=6, encoder_budget=4
    ),
    "host-priority": EngineConfig(
        (_TWO,), 8, 16, 12, max_seqs=3, priority=True, host_chunks=12, arc=True
    ),
    "host-state": EngineConfig((_TWO, _STATE), 24, 20, 8, max_seqs=3, host_chunks=16),
    "host-state-tight": EngineConfig(
        (_TWO, _STATE), 14, 16, 8, max_seqs=3, priority=True, host_chunks=6
    ),
    "host-state-drafts": EngineConfig(_WIDE, 22, 28, 12, max_seqs=3, drafts=2, host_chunks=10),
    "host-state-fine": EngineConfig(
        _WIDE, 18, 28, 12, max_seqs=3, drafts=2, match=2, host_chunks=10
    ),
    "ring": EngineConfig((_RING,), 8, 24, 6, max_seqs=4, caching=False),
    "ring-hybrid": EngineConfig((_TWO, _RING), 22, 16, 8, max_seqs=4),
    "ring-tight": EngineConfig((_RING, _TWO), 11, 16, 7, max_seqs=3),
    "ring-forks": EngineConfig((_TWO, _RING), 24, 16, 8, max_seqs=4, children=2),
    "forks": EngineConfig((_TWO,), 14, 16, 8, max_seqs=4, children=2),
    "swap": EngineConfig((_TWO,), 8, 16, 8, max_seqs=3, swap=8),
    "swap-small": EngineConfig((_TWO,), 8, 16, 8, max_seqs=4, caching=False, swap=3),
    "swap-ring": EngineConfig((_TWO, _RING), 11, 16, 8, max_seqs=3, swap=8),
    "swap-forks": EngineConfig((_TWO,), 9, 16, 8, max_seqs=4, children=2, swap=6),
    "forks-tight": EngineConfig((_TWO,), 8, 16, 12, max_seqs=4, children=2),
    "forks-uncached": EngineConfig((_TWO,), 14, 16, 8, max_seqs=4, caching=False, children=3),
}


def engine_preset(name: str) -> EngineConfig:
    """Return the preset called `name`. Raises GeometryError that lists the names."""
    try:
        return ENGINE_PRESETS[name]
    except KeyError:
        raise GeometryError(
            "preset", f"unknown {name!r:.40}; one of {', '.join(ENGINE_PRESETS)}"
        ) from None
