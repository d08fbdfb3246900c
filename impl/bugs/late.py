"""Faults around results that arrive later: rounds in flight, and what ends in between."""

from __future__ import annotations

from impl.bugs.register import bug
from impl.torch_kv.cursors import N, RowCursors, maximum, minimum
from impl.torch_kv.requests import KVRequest
from impl.torch_kv.system import TorchKV
from impl.vocabulary import Played
from reference.commands import Choice, Launch


@bug(
    "launch-takes-slots-for-one-round",
    "LEN-5",
    "a launch forgets the round in flight",
    TorchKV.cursors_after_round,
)
def _(self: TorchKV, cursors: RowCursors[N], ahead: N, taken: N, rejected: N) -> RowCursors[N]:
    """A token's KV lands in padding or in a slot of a former request. A launch takes slots from where the
    device is now, which the server cannot know; the round before may have accepted more. Visible when a round
    is launched behind another. Fix: take slots past all that rounds in flight may accept."""
    after = TorchKV.cursors_after_round(self, cursors, ahead, taken, rejected)
    allocated = cursors.kv_allocated_len
    start = cursors.kv_committed_len - rejected
    return after._replace(kv_allocated_len=maximum(allocated, start + ahead))


@bug("settle-keeps-the-claim", "LEN-4", "a result takes nothing back", TorchKV.cursors_after_reject)
def _(self: TorchKV, cursors: RowCursors[N], rejected: N) -> RowCursors[N]:
    """The conversation reads KV of drafts that were rejected. What a launch has counted as committed stays so
    when its result is there. Visible when a result rejects a draft. Fix: take back what was not accepted."""
    return cursors


@bug(
    "round-starts-at-the-claim",
    "READ-1",
    "a round in flight is taken for accepted",
    TorchKV.write_lag,
)
def _(self: TorchKV, request: KVRequest) -> int:
    """Tokens after a rejected draft read its KV. The next round is written behind all that the one in flight
    has drafted, not behind what that accepts. Visible when a round is launched behind one that rejects a
    draft. Fix: the device continues from its own lengths."""
    return 0


@bug(
    "launch-sweeps-by-the-claim",
    "SWA-1",
    "a window eviction goes by what rounds in flight have claimed",
    TorchKV.launch_ahead,
)
def _(self: TorchKV, command: Launch) -> Played:
    """SWA layers lose the oldest tokens of the window. A launch evicts with kv_committed_len, which counts
    what is drafted; when most of it is rejected, the next token reads what was freed. Visible when
    more than a page is drafted past a window. Fix: evict with what is committed by results that are there."""
    TorchKV.launch_ahead(self, command)
    if self.window is None:
        return None
    requests = [self.requests[draft.request] for draft in command.lanes]
    for request in requests:
        self.evict_window(request, request.cursors.kv_committed_len)
    return tuple(Choice(r.name, swa_evicted_seqlen=r.cursors.swa_evicted_seqlen) for r in requests)


@bug(
    "retract-keeps-results",
    "OUT-1",
    "a result outlives the retract of its request",
    TorchKV.skip_results,
)
def _(self: TorchKV, request: KVRequest) -> None:
    """A retracted request has tokens twice. The result of a round that was in flight is processed when the
    request runs again, after it has computed those tokens anew (sglang 0.5.10 commits it without a look at
    whose it is). Visible when a request is retracted with a round in flight and runs again. Fix: nobody
    processes it."""


@bug(
    "finish-counts-the-last-token",
    "LEN-2",
    "a turn's last token is taken for computed",
    TorchKV.cap_kept,
    source="#28754",
)
def _(self: TorchKV, cursors: RowCursors[N], target: N) -> RowCursors[N]:
    """The next turn reads a slot that nobody has written. The last token of a turn was sampled and has no KV,
    unless a round is in flight that computes it first. The slot counts it either way (sglang 0.5.15 to
    0.5.23). Visible when a turn ends, or is retracted, that has slots ahead. Fix: what was committed, capped
    at target."""
    after = TorchKV.cap_kept(self, cursors, target)
    return after._replace(kv_committed_len=minimum(after.kv_allocated_len, target))
