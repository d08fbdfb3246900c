"""The lines of a watcher's log, typed: the contract between the watcher and whoever reads.

After the header each line is a JSON array: the running number of the line, and the event, an array of its
name and its fields in the order that stands here and in the header. Cursors
are four numbers: kv_committed_len, kv_allocated_len, swa_evicted_seqlen,
cache_protected_len. `ids` are None but in logs of level `pages`.
"""

from __future__ import annotations

from typing import Literal, Union, get_args

from msgspec import Struct

from reference.tiers.facts import TierFacts, TierNode

FORMAT = "kvspec-watch"
VERSION = 8
# In version 3 no step says when it was, in 4 no pages have slots of recurrent state, in 5 no flush is noted,
# in 6 a line is an event without a number, in 7 servers of pairs are not watched.
READABLE = (3, 4, 5, 6, 7, 8)
NUMBERED = 7  # the first version whose lines have running numbers

Cells = tuple[int, int, int, int]  # C, A, E, R
Lane = tuple[str, int, int, int, int]  # a request and its cursors


class TierHeader(Struct, forbid_unknown_fields=True):
    """A host tier.

    full_tokens, swa_tokens: of the host.
    policy: when KV is copied there.
    storage: how long a request waits for pages of a storage behind it, "" for none.
    states: slots of the host.
    """

    full_tokens: int
    swa_tokens: int
    policy: str
    storage: str = ""
    states: int = 0


class WatchHeader(Struct, forbid_unknown_fields=True):
    """The first line of each file. Pools and widths in tokens.

    part: which file of its process this is.
    claims: tokens of a verify round that are committed as it is launched, before any result.
    states: slots of recurrent state.
    tracks: those that a request has besides its own, where its state is kept on the way.
    lazy: it may have one more for a while.
    tier: in host memory, where the log shows it.
    role: of a server of a pair, whose log has its transfers and no batches.
    fields: of each event.
    """

    format: str
    version: int
    level: Literal["lengths", "pages"]
    process: int
    engine: str
    release: str
    page_size: int
    window: int | None
    full_tokens: int
    swa_tokens: int
    rows: int
    width: int
    tree: bool
    overlap: bool
    speculative: bool
    claims: int = 0
    states: int = 0
    tracks: int = 0
    lazy: bool = False
    tier: TierHeader | None = None
    role: Literal["", "prefill", "decode"] = ""
    part: int = 1
    fields: dict[str, list[str]] = {}


class _Event(Struct, tag_field="event", array_like=True, forbid_unknown_fields=True, gc=False):
    """The base of all lines but the header."""


class SessionOpened(_Event, tag="open"):
    """A client wants a streaming session.

    done: it was opened.
    times_out: it may close by itself.
    """

    session: str
    done: bool
    times_out: bool = False


class CloseAsked(_Event, tag="close"):
    """A client closes a session; it goes when no turn is in flight."""

    session: str


class SessionClosed(_Event, tag="closed"):
    """A session is gone, and what it kept was given back."""

    session: str


class Submitted(_Event, tag="submit"):
    """A request was queued.

    tokens: of its input, `new` of them from the client.
    rejected: it runs a prefill of one token by itself, and its client gets an error.
    """

    request: str
    session: str | None
    tokens: int
    new: int
    rejected: bool
    why: str = ""
    ids: list[int] | None = None


class Requeued(_Event, tag="requeue"):
    """A retracted request is queued again."""

    request: str


class Admitted(_Event, tag="admit"):
    """The scheduler looked at a waiting request, or at the next chunk of one; it may not be scheduled."""

    request: str
    session: str | None
    prefix: int
    cursors: Cells


class Extended(_Event, tag="extend"):
    """A prefill: request, tokens that were there, tokens of this chunk, cursors after."""

    lanes: list[tuple[str, int, int, Cells]]


class Resulted(_Event, tag="result"):
    """Results were processed: request, outputs now, cursors now, new token ids (none at level `lengths`)."""

    lanes: list[tuple[str, int, Cells, list[int]]]


class Swept(_Event, tag="evict_swa"):
    """A window eviction that moved something: driven with `length`."""

    request: str
    length: int
    cursors: Cells


class Checkpointed(_Event, tag="insert"):
    """The tree took over pages of a running request."""

    request: str
    cursors: Cells


class Released(_Event, tag="release"):
    """A request gave its row back, or to its session.

    reason: why it ended, None for a retract.
    counted: outputs that count where it is known.
    limit: the most outputs that its client wants.
    before: its cursors.
    after: those of its session's slot, if that keeps a row.
    """

    request: str
    session: str | None
    reason: str | None
    inserts: bool
    outputs: int
    counted: int | None
    before: Cells
    after: Cells | None
    limit: int | None = None
    ids: list[int] | None = None


class QueueAborted(_Event, tag="abort"):
    """Requests that waited were given up."""

    queued: list[str]


class Flushed(_Event, tag="flush"):
    """The cache was emptied: the tree, and what sessions kept between their turns.

    tree: tokens that the tree still has, of both pools.
    """

    tree: int


class SessionState(Struct, forbid_unknown_fields=True):
    """A session in a snapshot.

    cursors: of its slot, if it keeps a row.
    turn: the unfinished request whose text it has.
    """

    session: str
    tokens: int
    closing: bool
    cursors: Cells | None
    ids: list[int] | None = None
    times_out: bool = False
    turn: str | None = None


class RequestState(Struct, forbid_unknown_fields=True):
    """An unfinished request in a snapshot.

    extends: a part of its prefill is to come.
    rounds: those whose results are to come, the oldest first.
    mixed: a decode entry beside a prefill.
    """

    request: str
    session: str | None
    queued: bool
    tokens: int
    outputs: int
    rejected: bool
    retracted: bool
    cursors: Cells | None
    ids: list[int] | None = None
    rounds: list[Literal["prefill", "decode", "mixed"]] = []
    extends: bool = False


class Snapshot(_Event, tag="snapshot"):
    """The whole state, now and then, where a file begins, and where `dropped` events were lost before."""

    dropped: int
    sessions: list[SessionState]
    requests: list[RequestState]


class Stepped(_Event, tag="step"):
    """The scheduler has decided on a batch: its size, who waits, open sessions, free tokens and rows, tokens
    that the tree holds and that locks pin (full).

    lanes: of a round of one token each (in a mixed batch beside the prefill that an `extend` has), request
        and cursors after; with speculation slots were taken for a verify round, and what is accepted comes
        with its result.
    states: slots of recurrent state that are free or the tree's.
    at: Unix time in seconds.
    """

    number: int
    batch: int
    queued: int
    sessions: int
    full: int
    swa: int
    rows: int
    tree_full: int
    tree_swa: int
    tree_locked: int
    lanes: list[Lane]
    states: int = 0
    at: float = 0.0


class ShownStates(Struct, forbid_unknown_fields=True):
    """Slots of recurrent state at a step.

    held: of a request, or of a session that may lend it, the slot of its own state, and those of states for
        the tree behind it.
    tracked: which of these has one now, and after how many tokens.
    nodes: of each node of the tree, None of one without.
    """

    free: list[int]
    held: dict[str, list[int]]
    tracked: dict[str, tuple[int, int]]
    nodes: list[int | None]


class Paged(_Event, tag="pages"):
    """The pages at a step, at level `pages`.

    owners: row, cursors and slots of everybody who has a row.
    nodes: path, slots, SWA slots, locks per pool.
    states: of a model with recurrent layers.
    """

    owners: dict[str, tuple[int, Cells, list[int]]]
    free_full: list[int]
    free_rows: list[int]
    free_swa: list[int] | None = None
    mapping: list[int] | None = None
    nodes: list[tuple[list[int], list[int], list[int], int, int]] | None = None
    states: ShownStates | None = None


class Tiered(_Event, tag="tier"):
    """The tree with its host tier, after its transfers were polled.

    locked: of each new lock its number, whether it is on the host, and the nodes that it was taken on, from
        the root.
    """

    facts: TierFacts
    locked: list[tuple[int, bool, list[TierNode]]]


class Queued(_Event, tag="queue"):
    """A server of a pair was asked.

    room: under which both servers know the request.
    tokens: of its input.
    at: Unix time in seconds.
    """

    request: str
    room: int
    tokens: int
    at: float


class KVSent(_Event, tag="send"):
    """A prefill server has given the KV of tokens [start, end) to its transfer engine.

    last: nothing follows.
    pages: of the full pool, None at level `lengths`.
    """

    request: str
    room: int
    start: int
    end: int
    last: bool
    pages: list[int] | None = None


class KVNamed(_Event, tag="name"):
    """A decode server has told its peer where to write the KV of tokens [start, end).

    pages: as of `send`.
    """

    request: str
    room: int
    start: int
    end: int
    pages: list[int] | None = None


class KVArrived(_Event, tag="arrive"):
    """A decode server counts what it has named as received.

    pages: that the request has there now.
    """

    request: str
    room: int
    pages: list[int] | None = None


class KVGivenBack(_Event, tag="give_back"):
    """A request whose KV was sent or named gives it back.

    status: of its room at this server, "" where there is none.
    pages: that the request has there until then.
    """

    request: str
    room: int
    status: str
    pages: list[int] | None = None


class Rested(_Event, tag="rest"):
    """A server of a pair has nothing to do.

    tokens: of the full pool that are neither free nor evictable.
    kept: what else it keeps, and how much.
    rooms: by table of its connection to the peer.
    at: as of `queue`.
    """

    tokens: int
    kept: dict[str, str]
    rooms: dict[str, list[int]]
    at: float


class HookFailed(_Event, tag="failed"):
    """The watcher could not note something."""

    where: str
    error: str


Event = Union[
    SessionOpened, CloseAsked, SessionClosed, Submitted, Requeued, Admitted, Extended, Resulted, Swept,
    Checkpointed, Released, QueueAborted, Flushed, Snapshot, Stepped, Paged, Tiered, Queued, KVSent, KVNamed,
    KVArrived, KVGivenBack, Rested, HookFailed,
]  # fmt: skip
FIELDS = {str(e.__struct_config__.tag): list(e.__struct_fields__) for e in get_args(Event)}
