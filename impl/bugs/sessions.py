"""Faults in the rules of sessions, lengths, window eviction and freed ranges."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from impl.bugs.register import FREE_ONLY, bug
from impl.torch_kv.cursors import N, RowCursors, maximum, floor_divide
from impl.lazy import Tensor, torch
from impl.torch_kv.requests import KVRequest, KVSession, Slot
from impl.torch_kv.system import TorchKV
from impl.vocabulary import CommandRefused, Played, RequestPhase
from reference.commands import MEMORY_REASONS, Choice, Draft, EvictSwa, Extend


@bug("restore-not-idempotent", "SES-3", "lending empties the slot", TorchKV.lend)
def _(self: TorchKV, request: KVRequest, slot: Slot) -> None:
    """A turn whose admission the scheduler repeats starts over on an empty row. The first restore takes the
    row out of the slot, so the second finds none and takes a fresh one. Visible when a turn with a slot is
    admitted twice. Fix: the slot goes on naming its row while it is lent."""
    TorchKV.lend(self, request, slot)
    if request.phase is RequestPhase.ADMITTED and self.store.free_rows:
        request.row = self.store.free_rows.pop()
        self.put(request, request.cursors)


@bug("second-turn-accepted", "OUT-1", "a second turn while one runs", TorchKV.turn_in_flight)
def _(self: TorchKV, session: KVSession) -> bool:
    """Two turns of one session run at once over one row. Submit does not look for a turn in flight. Visible
    at the second submit. Fix: refuse it until the first has ended."""
    return False


@bug(
    "decode-past-lost-window",
    "OUT-1",
    "decode goes on without its window",
    TorchKV.window_lost,
    modes=FREE_ONLY,
)
def _(self: TorchKV, requests: Sequence[KVRequest]) -> bool:
    """A token is computed from padding. A window eviction driven past the commit freed slots that the next
    token reads, and decode does not look. Visible only when window evictions may run ahead of the commit.
    Fix: refuse to decode; the turn may still be finished, retracted or aborted."""
    return False


@bug("batch-not-atomic", "OUT-2", "a refused batch keeps its first lanes", TorchKV.extend)
def _(self: TorchKV, command: Extend) -> Played:
    """The scheduler retries a prefill batch and some prompts are prefilled twice. Lanes are prefilled one by
    one until one does not fit, and the earlier ones are not undone. Visible when a batch of two or more
    runs out of pages or rows and its first entry alone fits. Fix: check the whole batch first."""
    try:
        return TorchKV.extend(self, command)
    except CommandRefused as refused:
        if refused.reason in MEMORY_REASONS:
            with suppress(CommandRefused):
                for lane in command.lanes:
                    TorchKV.extend(self, Extend((lane,)))
        raise


@bug("sweep-off-the-page", "SWA-1", "window eviction does not round")
class _SweepOffThePage(TorchKV):
    """A page is evicted in part. The policy stops exactly window and page behind the length and says so,
    without rounding down to a page. Visible with page_size above 1. Fix: round down."""

    def eviction_reach(self, cursors: RowCursors[int], length: int) -> int:
        assert self.window is not None
        return length - self.window - self.page_size

    def eviction_choice(self, request: KVRequest) -> Played:
        return (Choice(request.name, swa_evicted_seqlen=request.cursors.swa_evicted_seqlen),)


@bug("sweep-reports-what-it-aimed-at", "OUT-3", "the reported frontier is not rounded")
class _SweepReportsWhatItAimedAt(TorchKV):
    """A reader of the report counts a page as evicted in part. Window eviction rounds down to a page,
    what it reports does not. Visible with page_size above 1. Fix: report where it stopped."""

    def evict_swa(self, command: EvictSwa) -> Played:
        super().evict_swa(command)
        assert self.window is not None
        aimed = command.length - self.window - self.page_size
        evicted = self.requests[command.request].cursors.swa_evicted_seqlen
        return (Choice(command.request, swa_evicted_seqlen=max(aimed, evicted)),)


@bug(
    "decode-commits-without-slot",
    "LEN-1",
    "decode trusts that slots are ahead",
    TorchKV.cursors_after_decode,
)
def _(self: TorchKV, cursors: RowCursors[N]) -> RowCursors[N]:
    """A token's KV lands in padding or in a slot of a former request. Decode commits without allocating, as
    if a draft had always allocated ahead. Visible at the first decode whose kv_allocated_len equals its
    kv_committed_len. Fix: allocate when nothing is ahead."""
    committed, allocated, evicted, protected = cursors
    past_row = committed >= self.width  # it still outgrows the row, so that the decode is refused
    return RowCursors(committed + 1, allocated + 1 * past_row, evicted, protected)


@bug("restore-caps-request-only", "LEN-3", "the slot keeps the lengths of before")
class _RestoreCapsRequestOnly(TorchKV):
    """After an admission is taken back, the tail is freed a second time. free_tail caps the request's
    cursors and forgets the slot's. Visible when the slot held more than the prefix. Fix: cap both sides."""

    def free_tail(self, slot: Slot, prefix: int) -> None:
        self._before = slot.cursors
        super().free_tail(slot, prefix)

    def lend(self, request: KVRequest, slot: Slot) -> None:
        super().lend(request, slot)
        self.put(slot, self._before)


@bug("spec-commits-drafts", "LEN-4", "rejected drafts are committed", TorchKV.commits)
def _(self: TorchKV, draft: Draft) -> int:
    """The conversation reads KV of drafts that were rejected. A verify round commits what it allocated
    instead of what was accepted. Visible when a round accepts less than it drafts. Fix: commit the accepted
    tokens."""
    return draft.allocate


@bug("output-not-cut", "SES-1", "history keeps what came after the stop", TorchKV.history_after)
def _(self: TorchKV, request: KVRequest, target: int) -> list[int]:
    """The next turn's input holds words that the client never saw. Finish trims the KV and keeps the whole
    output as history. Visible when finished_len is below the output. Fix: cut the output."""
    return list(request.text)


@bug("close-while-running", "SES-2", "close does not wait for the turn", TorchKV.must_defer_close)
def _(self: TorchKV, session: KVSession) -> bool:
    """A running turn writes into pages of others. Close releases the session's KV at once although a turn
    uses it. Visible when a session is closed with a turn in flight. Fix: defer it."""
    return False


@bug("close-forgotten", "SES-4", "a deferred close never happens", TorchKV.close_is_due)
def _(self: TorchKV, session: KVSession) -> bool:
    """Closed sessions keep their KV for ever. Close marks the session as closing, and the end of the turn
    ignores the mark. Visible when a turn ends in a closing session. Fix: close it when its turn ends."""
    return False


@bug(
    "abort-keeps-retracted-kv",
    "SES-2",
    "an abort in the queue takes a retracted turn for a new one",
    TorchKV.wipes,
)
def _(self: TorchKV, request: KVRequest) -> bool:
    """The next turn resumes on KV of a turn that was aborted. Abort leaves the slot alone because the request
    waits in the queue, but it is there after a retract and the slot holds its tokens. Visible when a
    retracted turn is aborted before its next extend. Fix: wipe whatever has extended."""
    return request.started and request.phase is not RequestPhase.QUEUED


@bug(
    "release-stops-at-commit", "FREE-1", "a release forgets what was allocated ahead", TorchKV.owned_pages
)
def _(self: TorchKV, cursors: RowCursors[N]) -> tuple[N, N, N]:
    """Pages leak with every request that ends on a draft tail. The release frees up to kv_committed_len.
    Visible when kv_allocated_len is a page further. Fix: free up to the latter."""
    return TorchKV.owned_pages(self, self.cap_cursors(cursors, cursors.kv_committed_len))


@bug(
    "release-stops-inside-a-page",
    "FREE-1",
    "a release frees whole pages below kv_allocated_len",
    TorchKV.owned_pages,
    source="#31616",
)
def _(self: TorchKV, cursors: RowCursors[N]) -> tuple[N, N, N]:
    """Every request whose length is unaligned leaks a page. The release rounds kv_allocated_len down, and
    the page that it ends in belongs to nobody. Visible when a request ends inside a page. Fix: round up."""
    first, swa_first, _ = TorchKV.owned_pages(self, cursors)
    end = floor_divide(self.floor(cursors.kv_allocated_len), self.page_size)
    return first, swa_first, maximum(end, maximum(first, swa_first))


@bug("trim-forgets-swa", "FREE-2", "a trim frees one pool of two", TorchKV.swa_free_start)
def _(self: TorchKV, target: N, evicted: N) -> N:
    """The SWA pool fills up, the full pool does not. Trimming frees the full pages of the tail and drops
    their mapping, so that nothing leads to the SWA pages any more. Visible when a trim frees a page on a
    model with SWA. Fix: free both sides."""
    past_the_row = target * 0 + self.ceil(self.width)  # an int or a tensor, as target is
    return maximum(target, past_the_row)


@bug(
    "cut-frees-swept-twice",
    "OWN-2",
    "a trim frees what a window eviction has freed",
    TorchKV.swa_free_start,
    modes=FREE_ONLY,
)
def _(self: TorchKV, target: N, evicted: N) -> N:
    """The padding page turns up in the free list. The SWA side of a trim starts at the target although the
    eviction went further: the mapping there is 0, and 0 is freed. Visible when a window eviction ran past the
    target, so with window evictions driven beyond the commit. Fix: start at swa_evicted_seqlen."""
    return self.free_start(target)


@bug("release-splits-a-page", "OWN-2", "a row is freed in two parts that meet inside a page", modes=FREE_ONLY)
class _ReleaseSplitsAPage(TorchKV):
    """A page is in the free list twice. What a window eviction has passed is freed in the full pool alone,
    the rest in both, each part in whole pages: the page that the frontier falls into belongs to both. Visible
    when a slot is closed whose swa_evicted_seqlen is inside a page: a trim capped it at a target that a
    window eviction had passed. Fix: free that page once; or, as sglang 0.5.20 does, trim at the page boundary
    below target if a window eviction has passed target."""

    def release_pages(self, holder: KVRequest | Slot) -> None:
        self.free_range(holder, self.evicted_range)
        self.free_range(holder, self.live_range)

    def evicted_range(self, cursors: RowCursors[N]) -> tuple[N, N, N]:
        """Return the pages below the frontier."""
        first, swa_first, _ = self.owned_pages(cursors)
        return first, swa_first, swa_first

    def live_range(self, cursors: RowCursors[N]) -> tuple[N, N, N]:
        """Return the full pages from the frontier's on, and the SWA pages from the next page boundary on."""
        _, _, evicted, protected = cursors
        _, swa_first, end = self.owned_pages(cursors)
        return floor_divide(maximum(protected, evicted), self.page_size), swa_first, end


@bug(
    "cut-stops-at-the-page",
    "LEN-2",
    "a trim gives the page back that target falls into",
    TorchKV._trim,
)
def _(self: TorchKV, request: KVRequest, target: int) -> None:
    """The next turn computes tokens again that were there. A turn is cut at the page boundary below its
    target, whether a window eviction has passed that or not. Visible when target is inside a page. Fix: only
    where nothing past the protected prefix can be resumed."""
    TorchKV._trim(self, request, self.floor(target))


@bug(
    "sweep-moves-back",
    "MAP-2",
    "a shorter window eviction forgets the longer one",
    TorchKV.cursors_after_eviction,
)
def _(self: TorchKV, cursors: RowCursors[N], reach: N) -> RowCursors[N]:
    """Evicted slots count as owned again and are freed twice. The frontier is computed from the length alone,
    so a window eviction driven with less than the last one moves it back. Visible when lengths of window
    evictions fall. Fix: never below swa_evicted_seqlen."""
    evicted = TorchKV.cursors_after_eviction(self, cursors, reach)
    return evicted._replace(swa_evicted_seqlen=maximum(cursors.cache_protected_len, reach))


@bug("sweep-into-window", "SWA-1", "window eviction reaches a page too far", TorchKV.eviction_reach)
def _(self: TorchKV, cursors: RowCursors[int], length: int) -> int:
    """SWA layers lose the oldest tokens of the window. The frontier is rounded up instead of down. Visible
    once a window eviction has something to free. Fix: stop short of the window, at a page boundary."""
    assert self.window is not None
    reach = self.floor(length - self.window + 1) + self.page_size
    if reach > cursors.kv_allocated_len:  # slots that were never allocated are not freed
        return TorchKV.eviction_reach(self, cursors, length)
    return reach


@bug(
    "resume-on-dead-window",
    "SWA-2",
    "restore does not look at the window",
    TorchKV.resume_length,
    modes=FREE_ONLY,
)
def _(self: TorchKV, request: KVRequest, key_length: int) -> int:
    """A resumed turn attends to padding. The prefix is as long as what is committed, although a window
    eviction has freed SWA KV that its next token reads. Visible when a window eviction ran past the point
    where the turn resumes, so with window evictions driven beyond the commit. Fix: start again from the
    protected prefix."""
    slot = self.slot_of(request)
    assert slot is not None
    return min(slot.cursors.kv_committed_len, key_length)


@bug(
    "decode-trusts-rejected-drafts",
    "READ-1",
    "decode skips slots that were written before",
    TorchKV.write_decoded,
)
def _(self: TorchKV, slots: Tensor, tokens: Tensor, fresh: list[int]) -> None:
    """A token reads KV of a draft that was rejected. Decode writes only where it allocates, and the slot
    behind the commit is there already, with the draft's KV. Visible when a decode follows a verify round that
    accepted less than it drafted. Fix: write every committed position."""
    lanes = torch.tensor(fresh, dtype=torch.int64).to(tokens.device, non_blocking=True)
    TorchKV.write_decoded(self, slots.take(lanes), tokens.take(lanes), fresh)


@bug(
    "retract-keeps-the-lengths",
    "REF-1",
    "a retracted request keeps its lengths",
    TorchKV.drop_retracted,
)
def _(self: TorchKV, request: KVRequest) -> None:
    """A request that waits says that it has KV. Retract gives pages and row back and leaves the request's
    cursors as they were: code that reads them before its next admission counts tokens of other requests.
    Visible after the retract of an ordinary request. No clause covers the cursors of a request
    without KV: the comparison with the reference (REF-1) finds it. Fix: set them back."""
    cursors = request.cursors
    TorchKV.drop_retracted(self, request)
    request.cursors = cursors
