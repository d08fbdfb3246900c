"""The configuration of a block-pool engine: groups of layers, blocks, budgets. It is validated when it is
made.

A group is the layers that share a block table: full attention, a window, or recurrent state. Lengths are
tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass

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
MAX_BLOCK_SIZE = 256  # tokens
MAX_WINDOW = 1 << 16  # tokens
MAX_SLOTS = 1 << 16  # tokens in all blocks of a pool


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers with one block table."""

    #: tokens of a block
    block_size: int
    #: positions that a query sees, itself included; None for all
    window: int | None = None
    #: The layers are recurrent. A block then holds one state (reference.recurrent_states), the one after the
    #: last of its computed tokens; no query sees a position.
    state: bool = False
    #: The layers of a drafter are among them, and the engine's configuration says so.
    drafter: bool = False
    #: The table is a ring of as many slots as the window: a position takes the slot of the one that has left
    #: the window, and no prefix is cached.
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
    """Sizes and switches of one engine. Raises GeometryError when a size is out of bounds or the sizes do
    not fit together.
    """

    groups: tuple[LayerGroup, ...]
    _: KW_ONLY
    #: blocks that can be allocated; the null block comes on top
    blocks: int
    #: longest text (tokens)
    max_model_len: int
    #: most tokens of one step, over all requests
    max_batched_tokens: int
    #: most requests of one step
    max_seqs: int = 2
    #: The engine has a prefix cache.
    caching: bool = True
    #: tokens that a drafter proposes for each round
    drafts: int = 0
    #: The drafter writes KV of its own. Slots are allocated ahead, a cache hit leaves out its last block, and
    #: the drafter also runs behind a chunk of a prompt.
    eagle: bool = False
    #: A prompt may be computed in chunks.
    chunked: bool = True
    #: Waiting requests are ordered by priority, not by arrival.
    priority: bool = False
    #: longest chunk of a prompt while other requests wait (tokens), 0 for no limit
    long_prefill: int = 0

    #: chunks of host memory for offloaded blocks, 0 for none
    host_chunks: int = 0
    #: blocks of a chunk
    chunk_blocks: int = 1
    #: Chunks are evicted by ARC instead of LRU.
    arc: bool = False
    #: A load may be done within the step that needs it; from a peer it always is.
    sync_loads: bool = False
    #: Outputs are not offloaded.
    prompt_only: bool = False
    #: Offloaded blocks are also written to a storage, and hits are read back from it.
    storage: bool = False
    #: Host memory is a second pool of blocks, whose chunks are blocks (vLLM's SimpleCPUOffloadConnector).
    simple: bool = False
    #: A block is offloaded when it is about to be evicted, not once it is computed.
    lazy: bool = False
    #: A peer has computed prompts, whose KV is loaded from it. With host_chunks as well only a server of a
    #: pair has both.
    peer: bool = False
    #: A load that fails ends its request; otherwise the request is computed here.
    fail_requests: bool = False

    #: interval at which the prefix cache keeps a state or a window (tokens); 0 for every block, -1 only
    #: for proven boundaries
    retention: int = 0
    #: tokens of a hash, so that a hit may end within a block; 0 for a whole block
    match: int = 0
    #: A chunk of a prompt also writes a state within it, at a multiple of so many tokens; 0 for none.
    checkpoints: int = 0

    #: embeddings of the largest image of a prompt, 0 without an encoder
    image: int = 0
    #: embeddings of images that are kept
    encoder_cache: int = 0
    #: embeddings that one step may compute
    encoder_budget: int = 0
    #: No chunk of a prompt ends within an image.
    whole_images: bool = False

    #: most further answers that a request may ask for
    children: int = 0
    #: blocks of host memory for requests that give up their blocks. Such a request goes on from its copy; one
    #: that finds no room there computes its text again.
    swap: int = 0

    def __post_init__(self) -> None:
        self._check_groups()
        for name, (low, high) in BOUNDS.items():
            value = getattr(self, name)
            _require(low <= value <= high, name, f"must be in [{low}, {high}], not {value}")
        self._check_steps()
        self._check_connector()
        self._check_states()
        self._check_encoder()
        needed = sum(map(self.most_blocks, self.groups))
        _require(
            self.blocks >= needed, "blocks", f"one request of max_model_len needs {needed} blocks"
        )

    def _check_groups(self) -> None:
        """Raise GeometryError for layer groups that no engine has."""
        number = len(self.groups)
        _require(
            1 <= number <= MAX_GROUPS, "groups", f"must have 1 to {MAX_GROUPS} groups, not {number}"
        )
        for index, group in enumerate(self.groups):
            self._check_group(f"groups[{index}]", group)
        with_drafter = sum(group.drafter for group in self.groups)
        _require(with_drafter <= 1, "groups", "only one group may have the drafter's layers")

    def _check_group(self, name: str, group: LayerGroup) -> None:
        """Raise GeometryError for a layer group that no engine has.

        name: the group's, in messages.
        """
        size = group.block_size
        window = group.window
        _require(
            1 <= size <= MAX_BLOCK_SIZE,
            f"{name}.block_size",
            f"must be in [1, {MAX_BLOCK_SIZE}], not {size}",
        )
        _require(
            window is None or 1 <= window <= MAX_WINDOW,
            f"{name}.window",
            f"must be in [1, {MAX_WINDOW}], not {window}",
        )
        _require(
            window is None or not group.state,
            f"{name}.window",
            "goes without state: a recurrent layer has none",
        )
        _require(
            window is not None or not group.ring,
            f"{name}.ring",
            "needs window, the slots of the ring",
        )
        if group.drafter:
            _require(
                self.eagle and not group.state,
                f"{name}.drafter",
                "needs eagle, and layers that are not recurrent",
            )
            _require(
                not group.ring,
                f"{name}.drafter",
                "goes without ring: no release that is driven has both",
            )

    def _check_steps(self) -> None:
        """Raise GeometryError for a pool that is too large to judge, or a step that is too small."""
        longest_block = max(
            (group.block_size for group in self.groups if not group.state), default=1
        )
        _require(
            self.blocks * longest_block <= MAX_SLOTS,
            "blocks",
            f"the pool may hold at most {MAX_SLOTS} tokens",
        )
        _require(
            self.drafts > 0 or not self.eagle,
            "eagle",
            "needs drafts: a drafter that proposes nothing is none",
        )
        _require(
            self.max_batched_tokens >= self.max_seqs * (1 + self.drafts),
            "max_batched_tokens",
            f"must hold a round of {self.max_seqs} requests with {self.drafts} drafts each",
        )
        _require(
            self.chunked or self.max_batched_tokens >= self.max_model_len,
            "max_batched_tokens",
            "must be at least max_model_len where prompts are not chunked",
        )

    def _check_connector(self) -> None:
        """Raise GeometryError for a connector that other sizes rule out."""
        connector = "host_chunks: without host memory there is no connector that has it"
        _require(self.host_chunks or self.chunk_blocks == 1, "chunk_blocks", f"needs {connector}")
        _require(self.host_chunks or not self.arc, "arc", f"needs {connector}")
        _require(self.host_chunks or not self.prompt_only, "prompt_only", f"needs {connector}")
        _require(
            self.connects or not self.sync_loads,
            "sync_loads",
            "needs host_chunks or peer: nothing is loaded",
        )
        _require(
            self.chunk_blocks == 1 or len({group.block_size for group in self.groups}) == 1,
            "chunk_blocks",
            "must be 1 where groups have blocks of several sizes",
        )
        _require(
            not (self.peer and self.sync_loads and not self.host_chunks)
            or (len(self.groups) == 1 and not self.groups[0].window),
            "sync_loads",
            "with peer: needs a single group without window; only there does vLLM name the blocks that a load"
            " lost",
        )
        _require(
            self.host_chunks or not self.storage,
            "storage",
            "needs host_chunks: a storage stands behind host memory",
        )
        _require(
            self.simple or not self.lazy,
            "lazy",
            "needs simple: other connectors offload what is computed",
        )
        if self.simple:
            self._check_simple()
        _require(
            self.peer or not self.fail_requests,
            "fail_requests",
            "needs peer: only loads from a peer can fail",
        )
        _require(
            self.caching or not self.host_chunks,
            "host_chunks",
            "needs caching: blocks are offloaded by their hashes",
        )

    def _check_simple(self) -> None:
        """Raise GeometryError where host memory cannot be a pool of blocks."""
        _require(self.host_chunks, "simple", "needs host_chunks: they are the blocks of its pool")
        _require(
            self.chunk_blocks == 1, "chunk_blocks", "must be 1 with simple: a chunk is a block"
        )
        for name in ("arc", "sync_loads", "prompt_only", "storage"):
            _require(
                not getattr(self, name), name, "goes without simple: a pool of blocks has none"
            )
        _require(
            any(not group.state and group.window is None for group in self.groups),
            "simple",
            "needs a group of full attention: hits are looked up in one",
        )

    def _check_states(self) -> None:
        """Raise GeometryError for sizes of recurrent groups, and of hits within a block, that do not fit."""
        for name in ("retention", "match", "checkpoints"):
            _require(
                not getattr(self, name) or (self.caching and self.recurrent),
                name,
                "needs caching and a group with state",
            )
        for index, group in enumerate(self.groups):
            _require(
                not self.match or group.block_size % self.match == 0,
                "match",
                f"must divide groups[{index}].block_size, {group.block_size}",
            )
            _require(
                not (group.state and self.caching) or group.block_size > self.drafts,
                f"groups[{index}].block_size",
                f"must be above {self.drafts}: a round of drafts ends in the next block at most",
            )

    def _check_encoder(self) -> None:
        """Raise GeometryError where the largest image does not fit, as a server does when it starts."""
        for name in ("encoder_cache", "encoder_budget", "whole_images"):
            _require(
                self.image or not getattr(self, name),
                name,
                "needs image, the embeddings of the largest one",
            )
        for name in ("encoder_cache", "encoder_budget"):
            _require(
                getattr(self, name) >= self.image,
                name,
                f"must hold an image of {self.image} embeddings",
            )
        _require(
            not self.whole_images or self.max_batched_tokens >= self.image,
            "max_batched_tokens",
            "must hold the largest image where images are not split",
        )

    @property
    def recurrent(self) -> tuple[int, ...]:
        """The indices of the groups with recurrent state."""
        return tuple(index for index, group in enumerate(self.groups) if group.state)

    @property
    def draft_group(self) -> int | None:
        """The index of the group with the drafter's layers; None where no group has them, and their KV is
        not checked."""
        return next((index for index, group in enumerate(self.groups) if group.drafter), None)

    @property
    def connects(self) -> bool:
        """Whether the engine has a KV connector."""
        return self.host_chunks > 0 or self.peer

    @property
    def encodes(self) -> bool:
        """Whether prompts may have images."""
        return self.image > 0

    def has_room_for(self, length: int) -> bool:
        """Return whether an empty engine can run a text of `length` tokens: each paged group has blocks for
        it and a spare one, while max_seqs requests have their states."""
        paged = [group for group in self.groups if not group.state]
        states = [
            self.max_seqs - 1 + self.most_blocks(group) for group in self.groups if group.state
        ]
        blocks = sum(1 + -(-length // group.block_size) for group in paged) + sum(states)
        longest_block = max((group.block_size for group in paged), default=1)
        return length + longest_block <= self.max_model_len and blocks <= self.blocks

    def most_blocks(self, group: LayerGroup) -> int:
        """Return the number of blocks of a group that one request may need, with two steps of the whole
        budget in flight."""
        if group.state:
            running = previous = copy_on_write = checkpoint = 1
            return running + previous + copy_on_write + checkpoint + self.drafts
        whole_text = -(-self.max_model_len // group.block_size)
        if group.window is None:
            return whole_text
        if group.ring:
            return min(whole_text, -(-group.window // group.block_size))
        seen_and_in_flight = group.window - 1 + 2 * self.max_batched_tokens
        return min(whole_text, -(-seen_and_in_flight // group.block_size) + 1)


def _require(holds: object, field: str, reason: str) -> None:
    """Raise GeometryError for a field unless a requirement holds."""
    if not holds:
        raise GeometryError(field, reason)
