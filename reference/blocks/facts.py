"""Facts of a block-pool engine after a command: its pool, its block tables, and what the model ran.

They are tuples of plain numbers, as a worker sends them. Block 0 is the null block. Requests have the names
that commands give them.
"""

from __future__ import annotations

from typing import NamedTuple

from reference.recurrent_states import chain as chain
from reference.recurrent_states import chained as chained

# For each group the blocks of a request, by index in its sequence.
Table = tuple[tuple[int, ...], ...]
# For each block the group that last wrote it (-1: none), and the stamps in its slots.
Memory = tuple[tuple[int, tuple[int, ...]], ...]


class RequestFact(NamedTuple):
    """A request that the scheduler knows.

    status: the engine's name of its state; PREEMPTED holds no blocks, PAUSED keeps them, SWAPPED has a copy
        of them in host memory.
    tokens: its text.
    computed: the request's count of computed tokens, which may run ahead of results.
    tables: block tables of the cache manager, null blocks included.
    """

    status: str
    tokens: tuple[int, ...]
    computed: int
    tables: Table


class StateUse(NamedTuple):
    """A batch entry's use of its recurrent state in one group.

    block: the block with the state from which it continues, -1 for an entry that begins a text.
    found: stamp of each part of that state (`reference.recurrent_states`), 0 for a part of another group.
    writes: (block, stamp) of each state that it writes, in the order of its tokens.
    """

    group: int
    block: int
    found: tuple[int, ...]
    writes: tuple[tuple[int, int], ...]


class DraftUse(NamedTuple):
    """A batch entry's use of the KV of the drafter's layers, which are in one group.

    first: the first position that they read.
    found: stamps of their KV from there to the entry's start; 0 for a slot without. The
    stamp of their KV at a position is that of the text up to the next token.
    end: past the last position that they write.
    """

    group: int
    first: int
    found: tuple[int, ...]
    end: int


class Found(NamedTuple):
    """The KV that attention got for a batch entry in a group: stamps from position `first` to its end."""

    group: int
    first: int
    stamps: tuple[int, ...]


class Lane(NamedTuple):
    """An entry of a batch that ran."""

    request: str
    #: the first position that the runner computed
    start: int
    #: its inputs, the last `drafts` of which are drafts
    tokens: tuple[int, ...]
    drafts: int
    #: tokens that the model returned, accepted drafts first; none for a chunk that is not the last
    sampled: tuple[int, ...]
    #: block tables of the runner
    tables: Table
    #: the use of recurrent state, one for each recurrent group
    states: tuple[StateUse, ...] = ()
    #: the use of the drafter's KV; None where no drafter with KV ran
    draft: DraftUse | None = None
    #: the KV that attention got, of engines that show it. A ring does not have it afterwards.
    found: tuple[Found, ...] = ()


class Output(NamedTuple):
    """The engine's answer to a client for one step.

    finished: why the turn ended, "" if it goes on.
    """

    request: str
    tokens: tuple[int, ...]
    finished: str


class Published(NamedTuple):
    """A hash under which the prefix cache finds a block.

    stamps: stamps of the hashed tokens that lie in this block, from its first slot on. Engines that match
    parts of blocks have hashes of parts.
    """

    block: int
    group: int
    stamps: tuple[int, ...]


class ForeignKey(NamedTuple):
    """A key of a request under which the cache finds KV of another source.

    source: the source of the request, in words.
    found: the source of the KV, in words.
    block, chunk: the block or the chunk of host memory with that KV; the other one is -1.
    """

    request: str
    source: str
    found: str
    block: int = -1
    chunk: int = -1


# (group, block, chunk of host memory, index of the block in the chunk)
Part = tuple[int, int, int, int]


class Transfer(NamedTuple):
    """A transfer between blocks and host memory that the scheduler has started and not seen completed.

    load: from the host; otherwise a store to the host.
    submitted: it was submitted to the device.
    copied: its KV was moved.
    completed: the device has completed it.
    stale: it was started before a reset of host memory, so that the scheduler only waits for its end.
    """

    job: int
    load: bool
    parts: tuple[Part, ...]
    submitted: bool = False
    copied: bool = False
    completed: bool = False
    stale: bool = False


class HostKey(NamedTuple):
    """A chunk of host memory that is kept under a hash.

    stamps: stamps of the hashed tokens, from the chunk's first slot on.
    pins: number of loads that read it, -1 while it is written.
    """

    chunk: int
    group: int
    stamps: tuple[int, ...]
    pins: int


class StorageJob(NamedTuple):
    """A job of the storage's threads that the engine has started and not seen done.

    load: chunks are read from the storage into host memory; otherwise they are written to it.
    done: the threads are through with it.
    """

    job: int
    load: bool
    chunks: tuple[int, ...]
    done: bool


class StoredChunk(NamedTuple):
    """A chunk in the storage.

    stamps: stamps of the tokens that its hash is of.
    memory: (group, stamps) of each of its blocks, as in HostFacts.
    """

    group: int
    stamps: tuple[int, ...]
    memory: tuple[tuple[int, tuple[int, ...]], ...]


class HostFacts(NamedTuple):
    """Host memory, and the storage behind it."""

    #: number of chunks that were handed out at least once
    chunks: int
    #: free chunks
    free: tuple[int, ...]
    #: (group, stamps) of each block of each of these chunks; group -1 for a block without KV
    memory: tuple[tuple[tuple[int, tuple[int, ...]], ...], ...]
    keys: tuple[HostKey, ...]
    transfers: tuple[Transfer, ...]
    #: records that the connector keeps for no request, in words
    records: tuple[str, ...] = ()
    #: requests whose load has failed, until the engine is notified
    failed: tuple[str, ...] = ()
    #: blocks that a load within a step has not brought, and blocks computed from these, until the
    #: engine is notified
    lost: tuple[int, ...] = ()
    #: jobs of the storage that have not ended
    jobs: tuple[StorageJob, ...] = ()
    #: chunks in the storage
    stored: tuple[StoredChunk, ...] = ()
    #: chunks for which the engine has asked the storage in this command; it hears of them in the next step
    lookups: int = 0
    #: loads write behind the steps that were launched before them, as on one stream
    loads_wait: bool = False


class EncoderEntry(NamedTuple):
    """An image of which the scheduler counts the embeddings as kept.

    image: its letter and the number of its embeddings, as "A3".
    users: requests that need it; without any it may be evicted.
    """

    image: str
    embeds: int
    users: tuple[str, ...]


class EncoderFacts(NamedTuple):
    """The cache of an encoder's outputs. Sizes are embeddings.

    free: that no image has.
    evictable: that no request needs, the free ones included.
    entries: images that the scheduler counts as kept.
    kept: images that the worker keeps, and the embeddings of each.
    encoded: images that the step of a Schedule has encoded.
    """

    free: int
    evictable: int
    entries: tuple[EncoderEntry, ...]
    kept: tuple[tuple[str, tuple[int, ...]], ...]
    encoded: tuple[str, ...] = ()


class SwapFacts(NamedTuple):
    """Host memory for requests that have given up their blocks.

    free: its free blocks.
    memory: group and stamps of each block, as in BlockFacts. Block 0 is none.
    tables: block tables in host memory, by request.
    """

    free: tuple[int, ...]
    memory: Memory
    tables: dict[str, Table]


class BlockFacts(NamedTuple):
    """An engine at rest after a command."""

    #: reference count of each block
    refs: tuple[int, ...]
    #: the free queue in its order
    free: tuple[int, ...]
    #: for each block the group that last wrote it (-1: none) and the stamps in its slots: one for
    #: each token, or those of a state and its windows
    memory: tuple[tuple[int, tuple[int, ...]], ...]
    #: hashes in the prefix cache
    published: tuple[Published, ...]
    #: how often the cache's map names a block, for each block that it names
    mapped: dict[int, int]
    #: requests that the scheduler knows, by name
    requests: dict[str, RequestFact]
    #: requests that have block tables and that the scheduler does not know
    leftovers: tuple[str, ...] = ()
    #: entries of the batch of a Schedule
    lanes: tuple[Lane, ...] = ()
    #: answers of an Update
    outputs: tuple[Output, ...] = ()
    #: a ResetCache or NewWeights has emptied the cache
    reset: bool = False
    #: number of batches whose results were not taken
    steps_in_flight: int = 0
    #: the oldest results are taken next, because nothing can be scheduled before
    results_due: bool = False
    #: the results are taken in the step that scheduled them, so that clients can only abort before
    in_step: bool = False
    #: blocks of requests that are gone and that a step or a transfer in flight still uses, once for
    #: each table that named them
    kept: tuple[int, ...] = ()
    #: host memory, None without it
    host: HostFacts | None = None
    #: blocks of equal text are merged, so that two entries of a batch may write the same block
    merges: bool = False
    #: commands of clients are not handled before the next Schedule
    unheard: bool = False
    #: requests that gave all their blocks back in this command, even if they have new ones
    released: tuple[str, ...] = ()
    #: (request, block) of blocks outside of tables that requests keep for a connector
    pinned: tuple[tuple[str, int], ...] = ()
    #: (from, to) of blocks that the step of a Schedule copies before it runs
    copies: tuple[tuple[int, int], ...] = ()
    #: keys of requests under which the cache has KV of another source (reference.kv_sources)
    foreign_keys: tuple[ForeignKey, ...] = ()
    #: the cache of an encoder's outputs, None without images
    encoder: EncoderFacts | None = None
    #: positions past max_model_len that a round may compute, of an engine that never cuts its
    #: drafts
    overrun: int = 0
    #: batches are padded, so that one may have no token
    padded: bool = False
    #: host memory for requests that have given up their blocks, None without it
    swap: SwapFacts | None = None

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """Transfers in flight."""
        return self.host.transfers if self.host is not None else ()

    @property
    def kv_moves(self) -> bool:
        """Whether KV moves between tiers, or a storage is asked for it."""
        host = self.host
        return host is not None and bool(host.transfers or host.jobs or host.lookups)
