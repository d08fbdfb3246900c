"""Faults of the physical side: free lists, rows, the mapping, what is written where."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from impl.bugs.register import bug
from impl.torch_kv.cursors import N, RowCursors, maximum, floor_divide
from impl.lazy import Tensor, torch
from impl.torch_kv.pool import PagePool
from impl.torch_kv.requests import KVRequest, KVSession
from impl.torch_kv.store import BatchSpan, KVStore, ragged
from impl.torch_kv.system import TorchKV


class _PoolFromZero(PagePool):
    first_page = 0


@bug("padding-page-handed-out", "OWN-2", "the free list starts at page 0")
class _PaddingPageHandedOut(KVStore):
    """Everybody's dummy writes land in somebody's KV. The free list is numbered from 0, so the padding page
    is handed out and the last page never. Visible from the start. Fix: number from 1."""

    pool_class = _PoolFromZero


@bug("free-list-duplicate", "OWN-2", "close gives a page back twice", TorchKV.close_now)
def _(self: TorchKV, session: KVSession) -> None:
    """Two requests get the same page much later. Close frees the pages of the slot and then the last page
    again, as the open page. Visible when a session with KV is closed. Fix: once."""
    slot = session.slot
    length = 0 if slot is None else slot.cursors.kv_allocated_len
    TorchKV.close_now(self, session)
    if slot is not None and length:
        last = self.store.req_to_token[slot.row, length - 1 : length].long()
        self.store.full.give(last // self.page_size)


@bug("lanes-share-new-pages", "OWN-1", "all lanes start at the batch's first page", KVStore._take)
def _(self: KVStore, pool: PagePool, start: Tensor, end: Tensor, pages: int) -> Tensor:
    """Two prompts of one prefill batch overwrite each other. Each entry takes its new pages from the start of
    the batch's pages, as if it were alone. Visible when two entries of a batch open a page. Fix: each entry
    starts where the one before ended."""
    own = ragged(torch.zeros_like(start), self.open_index(end) - self.open_index(start), pages)
    return KVStore._take(self, pool, start, end, pages).take(own)


class _PoolGivesOnePage(PagePool):
    def take(self, count: int) -> Tensor:
        return super().take(count)[:1].expand(count)


@bug("alloc-repeats-a-page", "OWN-1", "one new page for all of a chunk")
class _AllocRepeatsAPage(KVStore):
    """A long prompt overwrites itself. As many pages are taken as are needed and the first is used for all of
    them, so the row has it twice and the others are nowhere; every sum is right. Visible when an allocation
    takes two pages. Fix: each page once."""

    pool_class = _PoolGivesOnePage


class _PoolDropsTheNext(PagePool):
    def take(self, count: int) -> Tensor:
        taken = super().take(count).clone()
        if count and self.available:
            self._stack[self._top] = taken[0]
        return taken


@bug("alloc-drops-the-next-page", "OWN-1", "handed out and still free")
class _AllocDropsTheNextPage(KVStore):
    """A page is handed out again while its owner reads it. The free list loses the page behind the one that
    it hands out, so the latter is owned and free, the former nowhere; every sum is right. Visible at the
    first allocation that leaves a page. Fix: take off what is handed out."""

    pool_class = _PoolDropsTheNext


@bug("free-repeats-a-page", "FREE-1", "one page for all that is freed", KVStore._free_full)
def _(self: KVStore, pages: Tensor) -> None:
    """Two requests get the same page. Freeing a range puts its first page on the free list as often as there
    are pages in the range, and the others are nowhere; every sum is right. Visible when a free gives back two
    pages. Fix: each page once."""
    self.full.give(pages[:1].expand(len(pages)))
    self._unmap(pages)


@bug(
    "tail-ends-inside-a-page",
    "FREE-1",
    "the page of an unaligned kv_allocated_len is stranded",
    TorchKV.beyond,
    source="#31616",
)
def _(self: TorchKV, cursors: RowCursors[N], target: N) -> tuple[N, N, N]:
    """The pool shrinks by a page with each such turn. What lies past the target is freed up to
    kv_allocated_len, rounded down: the page that it ends in stays nobody's. Visible when overshoot ends in
    the middle of a page. Fix: round up."""
    start, swa_start, _ = TorchKV.beyond(self, cursors, target)
    return start, swa_start, cursors.kv_allocated_len // self.page_size


@bug("trim-frees-the-front", "FREE-1", "a trim takes from the wrong end")
class _TrimFreesTheFront(TorchKV):
    """The next turn reads KV that is free. Finish gives back as many pages as lie past the target, but from
    the front of the row: the slot names pages that are free, those past the target are nowhere; every sum is
    right. Visible when a finish frees something. Fix: free [ceil(target), ceil(A))."""

    def trim_overshoot(self, request: KVRequest, target: int) -> None:
        self.free_range(request, self.front, target)
        self.move([request], self.cap_kept, [target])

    def front(self, cursors: RowCursors[N], target: N) -> tuple[N, N, N]:
        """As many pages as `beyond` has, from the first of the row on."""
        first, swa_first, end = self.beyond(cursors, target)
        start = floor_divide(cursors.cache_protected_len, self.page_size)
        return start, start + swa_first - first, start + end - first


@bug("save-mixes-rows", "OWN-1", "a slot names another row's pages", TorchKV.save)
def _(self: TorchKV, session: KVSession, request: KVRequest) -> None:
    """Two conversations read each other's KV. Saving copies the row of another entry of the batch over the
    slot's own: the slot names pages of that row, its own are nowhere; every sum is right. Visible when a turn
    is saved while another row is in use. Fix: the slot keeps its own row."""
    TorchKV.save(self, session, request)
    assert session.slot is not None
    rows = [r.row for r in self.requests.values() if r.row is not None]
    if rows:
        self.store.req_to_token[session.slot.row] = self.store.req_to_token[rows[0]]


@bug(
    "alloc-takes-a-page-too-many",
    "OWN-3",
    "a chunk takes a page although it fits the open one",
    KVStore._take,
)
def _(self: KVStore, pool: PagePool, start: Tensor, end: Tensor, pages: int) -> Tensor:
    """A page is lost now and then. A chunk takes a page of each pool at least, also where it fits the room
    left in the open page; that page is written nowhere. Visible when a chunk fits the open page. Fix: count
    from the open page's end."""
    return KVStore._take(self, pool, start, end, pages if pages else min(1, pool.available))[:pages]


@bug(
    "alloc-skips-open-page", "OWN-5", "extend opens a page although one is open", KVStore.open_index
)
def _(self: KVStore, start: N) -> N:
    """A row has two pages where one belongs, and one of them is never freed. The first new page is found by
    rounding the length down, so the open page is left half full. Visible when an allocation starts inside a
    page. Fix: round up: fill the open page first."""
    return start // self.page_size


@bug("mapping-to-page-start", "MAP-1", "all slots of a page are mapped to its first", KVStore._map)
def _(self: KVStore, slots: Tensor, swa_slots: Tensor) -> None:
    """Tokens of a page overwrite each other's SWA KV. The mapping gets the SWA page's first slot for every
    slot of the full page: the offset in the page is lost. Visible with page_size above 1. Fix: add the
    offset."""
    KVStore._map(self, slots, swa_slots // self.page_size * self.page_size)


@bug("decode-forgets-mapping", "MAP-2", "decoded tokens have no SWA slot")
class _DecodeForgetsMapping(KVStore):
    """SWA layers forget every decoded token. Decode allocates in both pools and does not enter the pair in
    the mapping, so the SWA page is lost and its KV goes to padding. Visible at the first decode on a model
    with SWA. Fix: enter it, as extend does."""

    _decoding = False

    def alloc_decode(self, row: Tensor, start: Tensor, span: BatchSpan, pages: int) -> Tensor:
        self._decoding = True
        slots = super().alloc_decode(row, start, span, pages)
        self._decoding = False
        return slots

    def _map(self, slots: Tensor, swa_slots: Tensor) -> None:
        if not self._decoding:
            super()._map(slots, swa_slots)


@bug("sweep-keeps-mapping", "MAP-3", "a window eviction leaves its entries", KVStore._free_swa)
def _(self: KVStore, slots: Tensor) -> None:
    """A page of the SWA pool has two owners after a while. Window eviction frees SWA pages and leaves the
    entries that led there, so the next free through them frees somebody else's. Visible at once as an evicted
    slot that is still mapped. Fix: clear the entries with the page."""
    assert self.swa is not None
    self.swa.give(self.full_to_swa[slots] // self.page_size)


@bug("release-keeps-mapping", "MAP-4", "a freed page keeps an entry", KVStore.free)
def _(
    self: KVStore,
    row: Tensor,
    first: Tensor,
    swa_first: Tensor,
    end: Tensor,
    pages: int,
    swa_pages: int,
) -> None:
    """Nothing is wrong until an allocation forgets to overwrite it: then two tokens share an SWA slot.
    Freeing clears the entries of a page but for its last slot, as servers do that free a row up to
    kv_allocated_len and no further. Visible as an entry of a free full slot. Fix: clear the whole page."""
    entries = None if self.swa is None else self.full_to_swa.clone()
    KVStore.free(self, row, first, swa_first, end, pages, swa_pages)
    if pages and entries is not None:
        last = self._page_starts(row, first, end, pages) + self.page_size - 1
        self.full_to_swa[last] = entries[last]


@bug("swa-written-before-mapped", "READ-2", "SWA KV goes where the mapping led before")
class _SwaWrittenBeforeMapped(KVStore):
    """SWA layers read nothing of the latest tokens. The write uses a copy of the mapping from before the
    allocation, so new tokens go to padding. Visible at the first write to a page that has just been opened.
    Fix: map first, then write."""

    def alloc_extend(
        self, row: Tensor, start: Tensor, end: Tensor, span: BatchSpan, pages: int
    ) -> Tensor:
        self._stale = self.full_to_swa.clone()
        return super().alloc_extend(row, start, end, span, pages)

    def alloc_decode(self, row: Tensor, start: Tensor, span: BatchSpan, pages: int) -> Tensor:
        self._stale = self.full_to_swa.clone()
        return super().alloc_decode(row, start, span, pages)

    def _swa_slots(self, slots: Tensor) -> Tensor:
        return self._stale[slots]


# -- SWA slots for the tail of a prompt only ------------------------------------------------------


@bug(
    "tail-forgets-the-frontier",
    "MAP-2",
    "a prompt with SWA slots for its tail alone counts as not evicted",
    TorchKV.cursors_after_receive,
)
def _(self: TorchKV, cursors: RowCursors[N], tokens: N, live: N) -> RowCursors[N]:
    """A later window eviction frees the padding page. A prompt is received with SWA slots for its last window
    alone, and swa_evicted_seqlen stays where it was: below the tail nothing is mapped. Visible at once. Fix:
    what has no SWA slot counts as evicted."""
    return self.cursors_after_chunk(cursors, tokens)


@bug(
    "tail-cuts-the-window",
    "SWA-1",
    "a prompt gets SWA slots for less than a window",
    TorchKV.tail_from,
)
def _(self: TorchKV, request: KVRequest, end: int) -> int:
    """The first token after a prompt reads padding. Its SWA slots begin two pages late: in the window of the
    next token. Visible when the prompt is longer than a window and a page. Fix: begin where a window eviction
    would stop."""
    live = TorchKV.tail_from(self, request, end)
    reach = live > max(request.cursors.swa_evicted_seqlen, request.cursors.cache_protected_len)
    return live + 2 * self.page_size * reach


@bug(
    "tail-asks-for-all-the-room",
    "OUT-1",
    "a prompt is refused for SWA pages that it would not take",
    TorchKV.make_room,
)
def _(
    self: TorchKV,
    rows: Sequence[int | None],
    starts: Sequence[int],
    ends: Sequence[int],
    live: Sequence[int] | None = None,
    states: int = 0,
) -> None:
    """Long prompts are never admitted: the SWA pool must have room for all of them, though slots are taken
    for the last window alone. Visible when the SWA pool has less. Fix: require what is taken."""
    TorchKV.make_room(self, rows, starts, ends, states=states)


@bug(
    "tail-loses-the-head",
    "MAP-3",
    "a prompt takes SWA slots for all and says it has those of its tail",
)
class _TailLosesHead(TorchKV):
    """The SWA pool leaks with every prompt that is received. Slots are taken for all of it,
    swa_evicted_seqlen says that those before the tail have gone, and nobody frees them. Visible at once. Fix:
    take what the frontier says."""

    def tail_from(self, request: KVRequest, end: int) -> int:
        return max(request.cursors.swa_evicted_seqlen, request.cursors.cache_protected_len)

    def cursors_after_receive(self, cursors: RowCursors[N], tokens: N, live: N) -> RowCursors[N]:
        taken = super().cursors_after_receive(cursors, tokens, live)
        reach = self.floor(taken.kv_committed_len - (self.window or 0) - self.page_size)
        return taken._replace(swa_evicted_seqlen=maximum(live, reach))


@bug(
    "group-looks-up-at-its-end",
    "FREE-2",
    "frees that wait find their SWA pages too late",
    source="#36081",
)
class _GroupLooksUpAtItsEnd(KVStore):
    """The SWA pool fills up. What a batch frees waits for its end, noted by full slots; where these lead is
    looked up then, when their entries are cleared or lead elsewhere (sglang 0.5.18: a recovered tombstone has
    taken them). Visible when a request ends that has SWA pages. Fix: look up as each is freed."""

    _late: list[Tensor] | None = None

    def _free_swa(self, slots: Tensor) -> None:
        if self._late is None:
            super()._free_swa(slots)
        else:
            self._late.append(slots)

    @contextmanager
    def frees_wait(self) -> Iterator[None]:
        self._late = []
        with super().frees_wait():
            yield
        late = self._late
        self._late = None
        for slots in late:
            super()._free_swa(slots)


@bug("group-is-given-twice", "OWN-2", "frees that have waited wait again")
class _GroupIsGivenTwice(PagePool):
    """A page is in the free list twice. What waited for the end of a batch is given back, and noted still
    when the next batch begins. Visible at the end of the second batch that frees something. Fix: forget
    it."""

    _left: tuple[Tensor, ...] = ()

    def hold(self) -> None:
        super().hold()
        self._waiting = [*self._left]

    def release(self) -> None:
        self._left = tuple(self._waiting or ())
        super().release()
