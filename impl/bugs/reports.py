"""Faults of the past: each names the change upstream that has or fixed it."""

from __future__ import annotations


from impl.bugs.register import FREE_ONLY, bug
from impl.torch_kv.cursors import N, RowCursors
from impl.torch_kv.requests import KVRequest, KVSession, Slot
from impl.torch_kv.system import TorchKV


@bug(
    "pr22900",
    "LEN-2",
    "finish caps two cursors of three",
    TorchKV.cap_kept,
    source="sgl-project/sglang#22900",
    modes=FREE_ONLY,
)
def _(self: TorchKV, cursors: RowCursors[N], target: N) -> RowCursors[N]:
    """The SWA pool leaks slowly. Finish and retract cap committed and allocated length at the target but
    leave swa_evicted_seqlen above it, so slots written later in between look evicted and are never freed.
    Visible after a window eviction past the target, which takes one driven beyond the commit. Fix: cap all
    three."""
    capped = TorchKV.cap_kept(self, cursors, target)
    return capped._replace(swa_evicted_seqlen=cursors.swa_evicted_seqlen)


@bug(
    "pr22897",
    "LEN-2",
    "finish does not trim",
    TorchKV.trim_overshoot,
    source="sgl-project/sglang#22897",
)
def _(self: TorchKV, request: KVRequest, target: int) -> None:
    """The next turn reads KV of tokens that are not in the conversation. A verify round overshoots the
    finished length, and the slot is saved as it stands: overshoot committed and allocated, while the next
    input leaves it out. Visible when speculation runs past finished_len. Fix: trim to target at finish."""


@bug(
    "pr22862-tail",
    "LEN-3",
    "admit leaves the tail to be overwritten",
    source="sgl-project/sglang#22862",
)
class _Pr22862Tail(TorchKV):
    """A token leaks on every retract, a draft tail on every speculative turn. Restore hands out the prefix
    but frees nothing behind it; the next extend allocates from the prefix on and overwrites row entries that
    still name slots. Visible when the slot holds more than the prefix. Fix: free the tail on admit."""

    def free_tail(self, slot: Slot, prefix: int) -> None:
        pass

    def lend(self, request: KVRequest, slot: Slot) -> None:
        super().lend(request, slot)
        prefix = self.resume_length(request, self.key_length(request))
        self.put(request, request.cursors._replace(kv_committed_len=prefix))


@bug("pr22862-align", "FREE-1", "freeing starts inside a page", source="sgl-project/sglang#22862")
class _Pr22862Align(TorchKV):
    """Pages are corrupted with page_size above 1. Trimming frees from the target itself; a paged allocator
    frees whole pages, so the page that holds the last kept tokens goes too and is handed to somebody else.
    Visible when the target is inside a page. Fix: start at the next page boundary."""

    def free_start(self, target: N) -> N:
        return self.floor(target)

    def free_beyond(self, holder: KVRequest | Slot, target: int) -> None:
        if target < holder.cursors.kv_allocated_len:
            super().free_beyond(holder, target)


@bug(
    "pr22862-prefix",
    "LEN-3",
    "the last token is left out twice",
    TorchKV.key_length,
    source="sgl-project/sglang#22862",
)
def _(self: TorchKV, request: KVRequest) -> int:
    """Every restore comes out one token short, which is recomputed for nothing. The key excludes the last
    input token already, and the prefix takes one off again. Visible when the key is no longer than what is
    committed, as after a retract. Fix: take the key's length as it is."""
    return max(0, TorchKV.key_length(self, request) - 1)


@bug(
    "pr22213-tail",
    "LEN-2",
    "retract keeps what was allocated ahead",
    TorchKV.drop_overallocated,
    source="sgl-project/sglang#22213",
)
def _(self: TorchKV, request: KVRequest, target: int) -> None:
    """Memory stays short although requests are retracted. Retract saves the slot as it stands and skips the
    tail that speculation allocated ahead of the commit. Visible when kv_allocated_len is above the retracted
    text. Fix: trim as finish does."""


@bug(
    "pr20070",
    "LEN-3",
    "protected length taken from the prefix",
    TorchKV.lend,
    source="sgl-project/sglang#20070",
)
def _(self: TorchKV, request: KVRequest, slot: Slot) -> None:
    """A crash with page_size above 1, a leak with 1. Restore sets cache_protected_len to the length of the
    restored prefix, which is neither page-aligned nor owned by any tree, so the release starts there. Visible
    with the first restored prefix. Fix: keep the length that the tree gave."""
    TorchKV.lend(self, request, slot)
    prefix = request.cursors.kv_committed_len
    self.put(request, request.cursors._replace(cache_protected_len=prefix))


@bug(
    "pr22273",
    "SES-2",
    "an aborted request writes itself into the slot",
    TorchKV.run_marked,
    source="sgl-project/sglang#22273",
)
def _(self: TorchKV, request: KVRequest) -> None:
    """The memory held by sessions turns negative and a conversation loses its KV. A request marked aborted
    while queued still runs a one-token prefill, and finishing that saves its one token over the session's
    slot. Visible with any such abort in a session. Fix: detach it from the session first."""
    if request.session is None:
        TorchKV.run_marked(self, request)
    else:
        self.save(request.session, self.prefill_marked(request))


@bug(
    "pr22790-history",
    "SES-2",
    "a midway abort saves the aborted turn",
    TorchKV.wipe,
    source="sgl-project/sglang#22790",
)
def _(self: TorchKV, session: KVSession, request: KVRequest) -> None:
    """After an abort the next turn resumes on KV of the aborted turn. The abort saves the running
    lengths into the slot, while the history ends at the turn before. Visible when a turn is aborted after its
    first extend. Fix: wipe the session's KV, keep its history."""
    if request.row is not None:
        self.save(session, request)


@bug(
    "pr22790-row-twice",
    "OWN-4",
    "a midway abort returns the row twice",
    TorchKV.wipe,
    source="sgl-project/sglang#22790",
)
def _(self: TorchKV, session: KVSession, request: KVRequest) -> None:
    """Two conversations share a row of req_to_token and read each other. The abort returns the row with the
    session's KV and once more with the request. Visible at any midway abort in a session. Fix: one of the two
    owns the row."""
    held = self.holder_of_session(session, request)
    row = None if held is None else held.row
    TorchKV.wipe(self, session, request)
    if row is not None:
        self.store.free_rows.append(row)


@bug(
    "pr22790-row-never",
    "END-1",
    "a midway abort keeps the row",
    TorchKV.wipe,
    source="sgl-project/sglang#22790",
)
def _(self: TorchKV, session: KVSession, request: KVRequest) -> None:
    """After some aborts no request is admitted any more: the rows are used up. The abort frees the pages and
    leaves the row to a slot that it then drops. Visible at any midway abort in a session; with others still
    running it shows as a row that is neither free nor held. Fix: return it, once."""
    held = self.holder_of_session(session, request)
    if held is not None:
        self.release_pages(held)
    session.slot = None
