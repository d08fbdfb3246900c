"""Facts of a system's physical view: owners, reads and leftovers, by role and position.

Clauses are predicates over a `Step` of `Facts`. Page ids appear only to be compared with each
other. The facts are gathered elsewhere; here is their shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

from reference.prefix_cache import path_text
from reference.memoization import memoized
from reference.state import Cursors


def pool_label(pool: str) -> str:
    """Return the name of a pool ("full", "swa") as sentences have it: "full" or "SWA"."""
    return "SWA" if pool == "swa" else pool


class SessionFacts(NamedTuple):
    """An open session: the text that its next turn starts with, and the cursors of its slot (None: no
    slot)."""

    history: Sequence[int]
    closing: bool
    slot: Cursors | None


class RequestFacts(NamedTuple):
    """A request that has not ended.

    cursors: None while it holds nothing.
    """

    session: str | None
    origin: int
    text: Sequence[int]
    cursors: Cursors | None


class HolderFacts(NamedTuple):
    """A holder of a row.

    full_read, swa_read: stamps that attention would find at positions 0 to kv_allocated_len; None in
        swa_read where no SWA slot is mapped.
    prefix: full slots below cache_protected_len.
    """

    row: int
    cursors: Cursors
    full_read: Sequence[int]
    swa_read: Sequence[int | None]
    prefix: Sequence[int] = ()


class NodeFacts(NamedTuple):
    """A node of the radix tree."""

    #: tokens from the root to its end; the last len(slots) are its own
    path: tuple[int, ...]
    #: slots of its tokens; swa_slots is empty where it shows none
    slots: Sequence[int]
    swa_slots: Sequence[int]
    #: entries of full_to_swa for its slots
    mapped: Sequence[int]
    #: stamps in these slots
    full_read: Sequence[int]
    swa_read: Sequence[int]
    #: full_locks, swa_locks, state_locks: lock counters
    full_locks: int
    swa_locks: int
    #: slot of the recurrent state at its end
    state: int | None = None
    state_locks: int = 0

    @property
    def start(self) -> int:
        return len(self.path) - len(self.slots)

    @property
    def live(self) -> bool:
        return bool(self.swa_slots)


class TreePage(NamedTuple):
    """A page of a tree node.

    slots: its full slots.
    has_swa: it has SWA KV; otherwise it is a tombstone.
    """

    slots: tuple[int, ...]
    has_swa: bool


class TreeFacts(NamedTuple):
    """The radix tree.

    nodes: in the order of their paths.
    lock_holders: name -> full slots that it has locked.
    sizes: the system's counters of evictable and protected tokens, those of the full pool before those of
    SWA.
    pages: path to the end of each page -> the page.
    """

    nodes: Sequence[NodeFacts]
    lock_holders: Mapping[str, Sequence[int]]
    sizes: tuple[int, int, int, int] | None
    pages: dict[tuple[int, ...], TreePage]


class Owned(NamedTuple):
    """Page `page` serves page number `at` of `holder`'s sequence. A page of the radix tree has the name
    of its path as its holder (prefix_cache.page_name)."""

    holder: str
    at: int
    page: int


_PLACE = itemgetter(0, 1)
_PAGE = itemgetter(2)


class _Pool(NamedTuple):
    size: int
    free: Sequence[int]
    owned: Sequence[Owned]


class Pool(_Pool):
    """One pool: pages 1..size exist (0 is padding).

    free: the free list, as the system has it.
    """

    @memoized
    def free_pages(self) -> frozenset[int]:
        return frozenset(self.free)

    @memoized
    def owned_once(self) -> frozenset[Owned]:
        return frozenset(self.owned)

    @memoized
    def places(self) -> frozenset[tuple[str, int]]:
        """Return the owned pages, as (holder, page number in its sequence)."""
        return frozenset(map(_PLACE, self.owned))

    @memoized
    def owner_of(self) -> dict[int, Owned]:
        """Page -> its owner; the last one where there are several."""
        return dict(zip(map(_PAGE, self.owned), self.owned))


class Torn(NamedTuple):
    """Slots of one page of a sequence that do not form a page, in order.

    holder: owner of the row, or "the tree".
    pool: "full" or "swa".
    start: position of the first slot (tokens).
    path: of slots of a tree node, the path to the last of them.
    """

    holder: str
    pool: str
    start: int
    slots: Sequence[int]
    path: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.slots_text}: {list(self.slots)}"

    @property
    def slots_text(self) -> str:
        """Return the slots as text, such as "SWA slots of r1 at [0, 2)"."""
        end = self.start + len(self.slots)
        return f"{pool_label(self.pool)} slots of {self.holder} at [{self.start}, {end})"


class StateFacts(NamedTuple):
    """Slots of recurrent state: 1..size exist (0 is padding)."""

    size: int
    #: the free list, as the system has it
    free: Sequence[int]
    #: the stamp in each slot
    stamps: Sequence[int]
    #: slot of each holder and of each node. A session and the turn that borrows its slot are one
    #: holder, unless each has a slot.
    holders: Mapping[str, int]
    nodes: Mapping[tuple[int, ...], int]
    #: request of the last batch -> the stamp that it continued from
    read: Mapping[str, int]
    #: further slots of holders
    buffers: Mapping[str, Sequence[int]] = {}
    #: those that hold a state for the tree, with the number of tokens before it
    tracked: Mapping[str, Sequence[tuple[int, int]]] = {}
    #: of each running request the tokens that it has computed: those whose results are processed, and
    #: those of all launched batches
    reached: Mapping[str, tuple[int, int]] = {}
    #: decode rounds are verify rounds
    verifies: bool = False

    def owners(self, slot: int) -> list[str]:
        """Name the owners of a slot; a free slot has none."""
        owners = [name for name, own_slot in self.holders.items() if own_slot == slot]
        for name, buffers in self.buffers.items():
            owners += [f"a buffer of {name}"] * list(buffers).count(slot)
        return owners + [path_text(path) for path, own_slot in self.nodes.items() if own_slot == slot]

    def stamp(self, slot: int) -> int:
        """Return the stamp in a slot, 0 for a slot that does not exist."""
        return self.stamps[slot] if 0 <= slot < len(self.stamps) else 0


class Facts(NamedTuple):
    """A system at rest."""

    sessions: dict[str, SessionFacts]
    requests: dict[str, RequestFacts]
    holders: dict[str, HolderFacts]
    pools: dict[str, Pool]
    rows: int
    free_rows: Sequence[int]
    #: pages of rows and tree nodes whose slots do not form a page in order
    torn: Sequence[Torn] = ()
    torn_swa: Sequence[Torn] = ()
    #: (holder, position) of live SWA positions without an SWA slot
    unmapped: Sequence[tuple[str, int]] = ()
    #: (full slot, SWA slot) of entries at positions whose SWA slot was evicted
    evicted_mapped: Sequence[tuple[int, int]] = ()
    #: (full slot, SWA slot) of entries of free full slots, and of slots past kv_allocated_len whose
    #: entry is not the one that follows in their page
    unused_mapped: Sequence[tuple[int, int]] = ()
    #: (full slot, SWA slot) of entries of live positions that point to the same SWA slot as another
    shared: Sequence[tuple[int, int]] = ()
    tree: TreeFacts | None = None
    states: StateFacts | None = None
