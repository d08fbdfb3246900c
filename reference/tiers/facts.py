"""Facts of a radix tree with a host tier after a command: nodes, slots, locks, transfers, records.

Tuples of plain numbers, as they come from a worker. Nodes, locks and transfers are numbered in the order in
which they came up; 0 is the root.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

Slots = dict[str, tuple[int, ...]]  # by pool
NO_SLOTS: Slots = {}  # not to be changed
METADATA = "metadata"  # the pool of what the last page of a prompt brings along


class TierNode(NamedTuple):
    """A node of the tree, without the root.

    start: position of its first token.
    stamps: its tokens.
    device, host: its slots, by pool; none where it has no KV there.
    locks, pins: its lock counts on the device and on the host.
    storing: number of the store that it waits for, -1 for none.
    hashed: the text, from the root on, that the hashes of its pages stand for; None where it has none.
    following: in a tree of bigrams, the token after its last one, which its key has as well.
    """

    node: int
    parent: int
    start: int
    stamps: tuple[int, ...]
    device: Slots
    host: Slots
    locks: dict[str, int]
    pins: dict[str, int]
    storing: int = -1
    loading: int = -1
    hashed: tuple[int, ...] | None = None
    following: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.start + len(self.stamps)


class TierPart(NamedTuple):
    """A token that a transfer moves."""

    pool: str
    device: int
    host: int


class TierTransfer(NamedTuple):
    """A transfer that is not acknowledged.

    load: from the host; otherwise to it.
    acks: numbers under which the cache waits for it.
    sent: to the copy engine; otherwise queued.
    copied: its KV has moved.
    completed: by the engine.
    stale: it is from before a reset.
    """

    job: int
    load: bool
    parts: tuple[TierPart, ...]
    acks: tuple[int, ...]
    sent: bool = False
    copied: bool = False
    completed: bool = False
    stale: bool = False

    @property
    def label(self) -> str:
        """Its name, such as "store 3"."""
        return f"{'load' if self.load else 'store'} {self.job}"


class TierRecord(NamedTuple):
    """The cache's record of a transfer until it is acknowledged.

    ack: its number, that of a node.
    nodes: those that it then publishes.
    """

    load: bool
    ack: int
    nodes: tuple[int, ...]


class TierUser(NamedTuple):
    """The holder of a lock.

    host: on host KV; otherwise on device KV.
    node: the last of its path.
    lock: the number of the lock.
    full_only: it has locked no SWA KV, or unlocked it since.
    """

    name: str
    host: bool
    node: int
    lock: int
    full_only: bool = False


class TierLock(NamedTuple):
    """A lock on device KV that the command took.

    path: the nodes of its path before the command split any of them.
    """

    lock: int
    path: tuple[TierNode, ...]


class TierOperation(NamedTuple):
    """An operation of the storage in progress: a prefetch, or a backup.

    job: its number, among transfers.
    back: from the host to the storage.
    name: the request that asked for it.
    state: what it waits for, such as "to read"; RECORD_ONLY where only a record of it is left.
    slots: host slots that it has, by pool.
    moving: host slots that the backend has still to read (in a backup all that it has not read) or to
        write, by pool.
    """

    job: int
    back: bool
    name: str
    state: str
    slots: Slots
    moving: Slots

    @property
    def label(self) -> str:
        """Its name, such as "prefetch 3 of h1"."""
        return f"backup {self.job}" if self.back else f"prefetch {self.job} of {self.name}"


RECORD_ONLY = "gone"  # the state of an operation of which only a record is left


class TierRequestState(StrEnum):
    """The state of a request on a server with one role, or of another owner of slots."""

    WAITS = "waits"
    """It waits for its prefill server."""
    GREETED = "greeted"
    """Its prefill server has answered, so it may take slots."""
    RECEIVES = "receives"
    RECEIVED = "received"
    FAILS = "fails"
    """Its transfer has failed."""
    HELD = "held"
    """It was given up, and its slots are kept."""
    RUNS = "runs"
    RETRACTED = "retracted"
    NOWHERE = "nowhere"
    """It is in no queue."""
    GONE = "gone"
    """Only its transfer is left."""
    IDLE = "idle"
    """A session on which no turn runs."""
    OVER = "over"
    """A session that was closed and has no turn."""
    BUSY = "busy"
    """A session that waits for a turn that is gone."""
    QUEUED = "queued"
    """On a server that only prefills: its next batch may have it."""
    COMPUTES = "computes"
    """It is between two chunks."""
    LAUNCHED = "launched"
    """It is in a batch whose result is not processed."""
    PARKED = "parked"
    """Its prompt is computed, and its decode server has not answered."""
    SENDS = "sends"
    """Its KV is on the way to its decode server."""
    HOLDS = "holds"
    """A lock holder with a slot for its recurrent state, of any server."""


# States of owners that are no requests.
_NOT_REQUESTS = (
    TierRequestState.IDLE,
    TierRequestState.OVER,
    TierRequestState.BUSY,
    TierRequestState.HOLDS,
)


class TierPage(NamedTuple):
    """A page that a command has written to the storage.

    key: number of its hash.
    slots: host slots.
    found: their stamps.
    wanted: stamps of the tokens that the hash stands for.
    """

    key: int
    pool: str
    slots: tuple[int, ...]
    found: tuple[int, ...]
    wanted: tuple[int, ...]


class TierRequest(NamedTuple):
    """A request of a server that only decodes or prefills, or another owner of slots.

    row: its row; -1 for none.
    first: the slot of its first token, on a prefill server its row of metadata; -1 for none.
    slots: its own device slots, by pool.
    kept: host slots of its KV while it is retracted, by pool.
    writing: device slots that the prefill server has still to write, by pool.
    due: pages that its decode server expects and that were not handed in to be sent.
    """

    name: str
    state: TierRequestState
    row: int
    first: int
    slots: Slots
    kept: Slots
    writing: Slots
    due: int = 0


class TierSend(NamedTuple):
    """Slots of one pool that were handed in to be sent to a decode server and are not read yet.

    job: its number.
    name: the request.
    position: position of the first slot, in the prompt.
    wanted: stamps of the prompt there, fewer than slots at its end.
    found: stamps in the slots. In the pool "metadata", slots are the request's row and stamps the numbers of
        rooms.
    """

    job: int
    name: str
    pool: str
    position: int
    slots: tuple[int, ...]
    wanted: tuple[int, ...]
    found: tuple[int, ...]


class TierRead(NamedTuple):
    """The KV that a forward pass finds at a position of its prefix.

    slot: -1 where there is none.
    """

    holder: str
    pool: str
    position: int
    slot: int
    found: int
    wanted: int


class TierFacts(NamedTuple):
    """A tree with a host tier at rest after a command.

    free, host_free: free slots by pool, as often as the lists have them.
    evictable: tokens that count as such on the device, by pool.
    memory, host_memory: the stamp of each slot.
    nodes: parents before children.
    reads: of an Insert whose request had a prefix.
    complaint: of the release's own check at rest, "" for none.
    loose: how its locks differ, see locks.py. With a storage: operations.
    stored: pages that the command has written.
    returned: host slots that wait to be freed.
    asked: requests that the cache has a record of.
    reserved: tokens that count as being fetched. On a server that only decodes or prefills: requests, each
        transfer that is not over with its request.
    free_rows, free_first: free rows, and free slots of first tokens, or rows of metadata.
    sends: what is to be read for decode servers.
    begun: requests of which it has a record that a part was sent.
    taken: locks of a round, which may split what it has locked.
    """

    nodes: tuple[TierNode, ...]
    free: Slots
    host_free: Slots
    evictable: dict[str, int]
    memory: Slots
    host_memory: Slots
    transfers: tuple[TierTransfer, ...] = ()
    records: tuple[TierRecord, ...] = ()
    users: tuple[TierUser, ...] = ()
    reads: tuple[TierRead, ...] = ()
    complaint: str = ""
    loose: tuple[str, ...] = ()
    operations: tuple[TierOperation, ...] = ()
    stored: tuple[TierPage, ...] = ()
    returned: Slots = NO_SLOTS
    asked: tuple[str, ...] = ()
    reserved: int = 0
    requests: tuple[TierRequest, ...] = ()
    free_rows: tuple[int, ...] = ()
    free_first: tuple[int, ...] = ()
    sends: tuple[TierSend, ...] = ()
    begun: tuple[str, ...] = ()
    taken: tuple[TierLock, ...] = ()

    @property
    def in_flight(self) -> bool:
        """Whether a transfer of the present cache is not acknowledged, a storage operation is in
        progress, or a request is there."""
        moving = any(not transfer.stale for transfer in self.transfers)
        has_requests = any(request.state not in _NOT_REQUESTS for request in self.requests)
        return moving or bool(self.operations) or has_requests
