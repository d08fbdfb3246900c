"""Faults of the memory checks themselves: pages are right, what is counted of them is not."""

from __future__ import annotations

from collections.abc import Sequence

from impl.bugs.register import FREE_ONLY, bug
from impl.torch_kv.memory_checks import Named
from impl.torch_kv.cursors import maximum
from impl.lazy import Tensor
from impl.torch_kv.requests import KVRequest, KVSession, Slot
from impl.torch_kv.system import TorchKV
from reference.commands import Command, Outcome, Report
from reference.geometry import Geometry


@bug("pr22213-double-count", "CHK-1", "a lent slot is counted twice", TorchKV.held_slots, source="#22213")
def _(self: TorchKV) -> Named:
    """A server under strict checks dies of a leak that is none. A lent slot goes on naming its row, so that
    an admission can be repeated, and is counted as session_held; the request that runs on the row is counted
    as uncached. Visible in a busy check as soon as a turn with a slot is in a batch, which takes a turn that
    was saved (finished or retracted) and admitted again. Fix: count a lent slot once."""
    return [(s.name, s.slot) for s in self.sessions.values() if s.slot is not None]


@bug("pr22753-stale-flag", "CHK-1", "a flag says who counts", source="#22753")
class _StaleFlag(TorchKV):
    """The first fix of #22213: restore marks the slot as active, save clears the mark, marked slots are not
    counted. When the scheduler rejects the admission, or the waiting turn is aborted, nothing clears it: no
    batch lists the row, and the slot is not counted either, so its tokens seem lost. Visible in any check
    after an admission that came to nothing. Fix: recompute who is active from the running batches at each
    check."""

    def reset(self, geometry: Geometry) -> None:
        self.is_active: set[str] = set()
        super().reset(geometry)

    def lend(self, request: KVRequest, slot: Slot) -> None:
        super().lend(request, slot)
        assert request.session is not None
        self.is_active.add(request.session.name)

    def save(self, session: KVSession, request: KVRequest) -> None:
        super().save(session, request)
        self.is_active.discard(session.name)

    def close_now(self, session: KVSession) -> None:
        super().close_now(session)
        self.is_active.discard(session.name)

    def held_slots(self) -> Named:
        slots = [(s.name, s.slot) for s in self.sessions.values() if s.slot is not None]
        return [(name, slot) for name, slot in slots if name not in self.is_active]


@bug("pr21499", "BROKEN", "one-pool sizes of a two-pool cache", source="#21499")
class _OnePoolSizes(TorchKV):
    """The busy check of a model with a window raises. It asks for protected_size() and evictable_size(),
    which a cache with two pools does not have. Visible at the first check that is switched on; models without
    a window are fine. Fix: check each pool by itself."""

    def report(self, *, log: bool = False) -> Report:
        if self.store.swa is not None:
            raise NotImplementedError("protected_size() of a cache with two pools")
        return super().report(log=log)


@bug("check-counts-one-batch-twice", "CHK-1", "last and running batch are one", TorchKV.batch_requests)
def _(self: TorchKV) -> list[KVRequest]:
    """After a decode of everybody the last batch and the running batch are the same object, and a check that
    walks both counts every request twice. Visible after any decode. Fix: each request once."""
    return self.last_batch + self.running_batch


@bug("check-trusts-the-batch", "CHK-1", "rows of finished requests stay active")
class _TrustsTheBatch(TorchKV):
    """With overlap scheduling the batch that is under way was launched before the result of the one before it
    was looked at, so it still lists a request that has finished. Its KV is in the slot; a check that takes
    the active rows from the batch's own tensors skips the slot, and skips the request as it has given its KV
    back. Visible in any check between the finish of a session's turn and the next launch. Fix: a finished
    request makes no row active."""

    def launch(self, requests: Sequence[KVRequest]) -> None:
        super().launch(requests)
        self.launched = {request: request.row for request in requests}

    def leave(self, request: KVRequest) -> None:
        super().leave(request)
        self.launched.pop(request, None)

    def active_rows(self) -> set[int | None]:
        return super().active_rows() | {*(self.launched.values() if self.last_batch else ())}


@bug("check-forgets-page-rounding", "CHK-1", "tokens instead of pages", TorchKV.counted_full)
def _(self: TorchKV, allocated: Tensor, evicted: Tensor, protected: Tensor) -> Tensor:
    """A leak of up to page_size - 1 tokens per request is reported. What a row holds is counted as A - R, but
    the pool gives out whole pages. Visible whenever a length is not a multiple of the page size. Fix: round A
    up."""
    return allocated - protected


@bug("check-ignores-the-sweep", "CHK-1", "evicted SWA tokens are counted", TorchKV.counted_swa)
def _(self: TorchKV, allocated: Tensor, evicted: Tensor, protected: Tensor) -> Tensor:
    """The SWA pool seems to hold more than it has. Its tokens are counted like those of the full pool, with
    what window eviction freed. Visible in any check after a window eviction that freed something. Fix: start
    at max(R, E)."""
    return self.counted_full(allocated, evicted, protected)


@bug(
    "check-frontier-inside-a-page",
    "CHK-1",
    "E is taken for a page boundary",
    TorchKV.counted_swa,
    modes=FREE_ONLY,
)
def _(self: TorchKV, allocated: Tensor, evicted: Tensor, protected: Tensor) -> Tensor:
    """The literal rule ceil(A) - max(R, E). A window eviction ends at a page boundary, but a finish or a
    restore caps E at a target inside a page, whose SWA half then is gone: the sum is a few tokens too many.
    Visible in a check after such a cut. Safe where no window eviction passes what the turn keeps, as a
    faithful scheduler guarantees. Fix: round max(R, E) up."""
    return self.ceil(allocated) - maximum(protected, evicted)


@bug("check-swaps-the-terms", "CHK-2", "held and uncached are mistaken for each other")
class _SwapsTheTerms(TorchKV):
    """The sums are right and the metrics are not: idle sessions show as running requests. Nothing alarms, as
    a wrong split balances. Visible in any check while a slot or a request holds something. Fix: name the
    terms by who holds."""

    def held_slots(self) -> Named:
        return [(r.name, r) for r in self.active()]

    def uncached_requests(self) -> Named:
        return super().held_slots()

    def amounts(self, held: Named, uncached: Named) -> Tensor:
        amounts = super().amounts(uncached, held)  # the cursor tables go by who has the row
        return amounts.roll(len(held), 1)


@bug("check-sweeps-too", "CHK-3", "the check tidies up", TorchKV.apply)
def _(self: TorchKV, command: Command) -> Outcome:
    """Lengths change when nobody ran. The check takes the chance to drop what was allocated ahead, as its
    author saw a leak there. Visible in a check while slots are allocated past the commit. Fix: look, do not
    touch."""
    outcome = TorchKV.apply(self, command)
    if getattr(outcome, "report", None) is not None:
        for request in self.active():
            if request.cursors.kv_allocated_len > request.cursors.kv_committed_len:
                self._trim(request, request.cursors.kv_committed_len)
    return outcome
