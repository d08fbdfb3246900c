"""States that a request keeps for the tree while its own goes on: a model that tracks."""

from __future__ import annotations

from impl.bugs.register import bug
from impl.torch_kv.requests import KVRequest
from impl.torch_kv.system import TorchKV
from impl.vocabulary import RequestPhase
from reference.commands import SpecDecode


@bug(
    "length-moves-without-its-write",
    "STA-8",
    "a request keeps a state that was never written",
    TorchKV.track,
    source="#29973",
)
def _(self: TorchKV, request: KVRequest, length: int) -> None:
    """A later hit goes on from the state of another text. The cursor of the buffers moves in every decode
    that ends a page, and the mask of the batch, which is stale, leaves the copy out. Visible when a decode
    ends a page. Fix: move the cursor with the write."""
    if request.phase is RequestPhase.RUNNING:
        request.buffers.append((request.buffers.pop(0)[0], length))
    else:
        TorchKV.track(self, request, length)


@bug(
    "kept-state-is-written-again",
    "STA-8",
    "the next state goes into the slot of the last",
    TorchKV.track,
)
def _(self: TorchKV, request: KVRequest, length: int) -> None:
    """A request that ends within the next page hands a state of more tokens to the tree. A decode writes into
    the slot that is kept, and the request goes on calling it by the length before. Visible at the second page
    that a decode ends. Fix: take the buffers in turns."""
    last, kept = request.buffers[-1]
    if request.phase is RequestPhase.RUNNING and kept:
        _keep_in(self, request, last)
    else:
        TorchKV.track(self, request, length)


@bug(
    "round-keeps-the-state-of-its-end",
    "STA-8",
    "a verify round keeps the state behind the end of a page",
    TorchKV.spec_decode,
    source="#27998",
)
def _(self: TorchKV, command: SpecDecode) -> object:
    """A hit goes on as if tokens behind it were said twice. A verify round that ends a page keeps the state
    after all that it has accepted. Visible when a round accepts tokens past the end of a page. Fix: keep the
    state of the step that ends the page."""
    before = {
        draft.request: self.requests[draft.request].state_len
        for draft in command.lanes
        if draft.request in self.requests
    }
    done = TorchKV.spec_decode(self, command)
    for name, start in before.items():
        request = self.requests[name]
        for slot, kept in request.buffers:
            if kept > start:
                _keep_in(self, request, slot)
    return done


def _keep_in(self: TorchKV, request: KVRequest, slot: int) -> None:
    """The state as it is now, in a slot."""
    assert self.states is not None and request.state is not None
    self.states.copy(request.state, slot)


@bug(
    "rejected-drafts-are-kept",
    "STA-8",
    "a state is kept behind drafts that were rejected",
    TorchKV.spec_decode,
)
def _(self: TorchKV, command: SpecDecode) -> object:
    """A request says that it keeps a state after more tokens than it has. A verify round takes the end of a
    page from the drafts that it computes, not from those that it accepts. Visible when the end of a page lies
    among rejected drafts. Fix: count those that were accepted."""
    done = TorchKV.spec_decode(self, command)
    for draft in command.lanes:
        request = self.requests[draft.request]
        start = request.state_len - draft.accept
        length = self.tracked_end(start, start + draft.allocate)
        if request.buffers and length > request.state_len:
            self.track(request, length)
    return done


@bug(
    "finish-donates-the-newest-state",
    "STA-3",
    "a finish donates a state of more tokens than its key",
)
class _DonatesTheNewest(TorchKV):
    """Every later hit answers as if the prompt had a token more. A request that is stopped before its last
    computed token hands over the state that it kept last, which lies behind the stop. Visible when the stop
    lies below the last end of a page. Fix: donate the last state that the key still holds."""

    def tracked_len(self, request: KVRequest, length: int) -> int:
        return length

    def take_tracked(self, request: KVRequest, length: int) -> int:
        return request.buffers.pop()[0]


@bug(
    "inserted-state-stays-with-its-request",
    "STA-6",
    "the tree and a request share a slot",
    TorchKV.take_tracked,
)
def _(self: TorchKV, request: KVRequest, length: int) -> int:
    """A cached state changes under whoever matches it. A prompt that goes into the tree hands over the slot
    that keeps its state, and will write its next one there. Visible after the first prefill of a page. Fix:
    take another slot in its place."""
    return next(slot for slot, kept in request.buffers if kept == length)


@bug(
    "finish-frees-what-it-donates",
    "STA-6",
    "a state that a finish donates is freed as well",
    TorchKV.donate,
)
def _(self: TorchKV, request: KVRequest, length: int) -> int | None:
    """A cached state is overwritten by the next request. A finish hands a slot to the tree and gives all
    slots of the request back. Visible when a decode has ended a page before the finish. Fix: all but that
    one."""
    kept = [slot for slot, at in request.buffers if at == length]
    return kept[0] if kept else TorchKV.donate(self, request, length)


@bug(
    "retract-keeps-its-buffers",
    "STA-7",
    "a retracted request holds slots while it waits",
    TorchKV.drop_retracted,
)
def _(self: TorchKV, request: KVRequest) -> None:
    """Others find no slot although nothing runs. A retract gives the running state's slot back and forgets
    those that are kept for the tree. Visible after a retract. Fix: give all slots back."""
    buffers = request.buffers
    request.buffers = []
    TorchKV.drop_retracted(self, request)
    request.buffers = buffers


@bug(
    "finish-loses-its-buffers",
    "STA-7",
    "slots that were kept for the tree are lost",
    TorchKV.free_buffers,
)
def _(self: TorchKV, request: KVRequest) -> None:
    """With each request that ends two slots fewer are left, until none runs. Whoever ends forgets the slots
    that it kept for the tree. Visible at the first end. Fix: give them back."""
    request.buffers = []
