"""Facts of a block-pool engine after a command: what stands in its pool and its tables, what the model ran.

Tuples of plain numbers, as they come from a worker. Block 0 is the null block. Requests are called as
commands call them.
"""

from __future__ import annotations

from typing import NamedTuple

from reference.states import chain as chain
from reference.states import chained as chained

# for each group the blocks of a request, by index in its sequence
Table = tuple[tuple[int, ...], ...]


class RequestFact(NamedTuple):
    """A request that the scheduler knows. status: as the engine calls it; PREEMPTED holds nothing, PAUSED
    keeps its blocks. computed: its own count, which may run ahead of results. tables: of the cache manager,
    null blocks included."""

    status: str
    tokens: tuple[int, ...]
    computed: int
    tables: Table


class StateUse(NamedTuple):
    """A batch entry's use of its recurrent state in one group. block: the one that it continues from, -1 for
    an entry that begins a text. found: what stands there, the stamp of each part of a state
    (`reference.states`), 0 where nothing of this group does. writes: (block, stamp) of each state that it
    leaves, in the order of its tokens."""

    group: int
    block: int
    found: tuple[int, ...]
    writes: tuple[tuple[int, int], ...]


class Lane(NamedTuple):
    """A request in a batch that ran. start: the first position that the runner computed; tokens: its
    inputs, the last `drafts` of them drafts; sampled: what the model gave back, accepted drafts first, none
    for a chunk of a prompt that goes on. tables: the runner's own. states: one for each recurrent group."""

    request: str
    start: int
    tokens: tuple[int, ...]
    drafts: int
    sampled: tuple[int, ...]
    tables: Table
    states: tuple[StateUse, ...] = ()


class Output(NamedTuple):
    """The engine's answer to a client for one step. finished: why the turn ended, "" if it goes on."""

    request: str
    tokens: tuple[int, ...]
    finished: str


class Published(NamedTuple):
    """A hash that a block bears: for which group, and the stamps of those tokens that it is of that lie in
    this block, from its first slot on. Engines that match parts of blocks have hashes of parts."""

    block: int
    group: int
    stamps: tuple[int, ...]


class ForeignKey(NamedTuple):
    """A key of a request under which the cache finds KV of another source.

    source: of the request; found: of the KV; both in words. block: that has the KV, or chunk: of host
    memory; the other is -1.
    """

    request: str
    source: str
    found: str
    block: int = -1
    chunk: int = -1


# group, block, chunk of host memory, index of the block in the chunk
Part = tuple[int, int, int, int]


class Transfer(NamedTuple):
    """A job between blocks and host memory that the scheduler has started and not seen completed. load: from
    the host, else to it. submitted: to the device; copied: its KV was moved; completed: by the device;
    stale: from before a reset of host memory, so that the scheduler only waits for its end."""

    job: int
    load: bool
    parts: tuple[Part, ...]
    submitted: bool = False
    copied: bool = False
    completed: bool = False
    stale: bool = False


class HostKey(NamedTuple):
    """A chunk that is kept under a hash. stamps: of the tokens that it is of, from the chunk's first slot on.
    pins: loads that read it, -1 while it is written."""

    chunk: int
    group: int
    stamps: tuple[int, ...]
    pins: int


class HostFacts(NamedTuple):
    """Host memory. chunks: that were handed out at least once. memory: for each of them, by block, the group
    that the KV is of (-1: none) and its stamps. records: what the connector keeps for nobody, in words.
    failed: requests whose load has failed, until the engine is notified."""

    chunks: int
    free: tuple[int, ...]
    memory: tuple[tuple[tuple[int, tuple[int, ...]], ...], ...]
    keys: tuple[HostKey, ...]
    transfers: tuple[Transfer, ...]
    records: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()


class BlockFacts(NamedTuple):
    """An engine at rest after a command.

    refs: ref count of each block. free: the free queue in its order. memory: for each block the group that
    last wrote it (-1: none), and the stamps in its slots: of a token each, or of a state and its windows.
    mapped: for each block that the cache's map names, how often it does. leftovers: requests that tables are
    kept for and the scheduler does not know.
    lanes: of a Schedule; outputs: of an Update; reset: whether a ResetCache or NewWeights has
    forgotten all. steps_in_flight:
    batches whose results wait; results_due: the oldest are taken next, as nothing more can be scheduled
    before; in_step: in the very step that has scheduled, so that of what clients do only aborts come before.
    kept: blocks of requests that are gone, which a step or a transfer in flight still uses, once for each
    table that named them. host: None without host memory. merges: blocks of equal text are made one, so that
    two entries of a batch may write the same. unheard: clients are not heard before the next Schedule.
    released: requests that gave all their blocks back in this command, whatever they have got since.
    pinned: blocks outside of tables that requests keep for a connector, by request.
    copies: of a Schedule, (from, to) of blocks that its step copies before it runs.
    foreign_keys: keys of requests under which the cache has KV of another source (reference.sources).
    """

    refs: tuple[int, ...]
    free: tuple[int, ...]
    memory: tuple[tuple[int, tuple[int, ...]], ...]
    published: tuple[Published, ...]
    mapped: dict[int, int]
    requests: dict[str, RequestFact]
    leftovers: tuple[str, ...] = ()
    lanes: tuple[Lane, ...] = ()
    outputs: tuple[Output, ...] = ()
    reset: bool = False
    steps_in_flight: int = 0
    results_due: bool = False
    in_step: bool = False
    kept: tuple[int, ...] = ()
    host: HostFacts | None = None
    merges: bool = False
    unheard: bool = False
    released: tuple[str, ...] = ()
    pinned: tuple[tuple[str, int], ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    foreign_keys: tuple[ForeignKey, ...] = ()

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """Transfers in flight."""
        return self.host.transfers if self.host is not None else ()
