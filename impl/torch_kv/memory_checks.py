"""The memory checks: the sums of both pools and of the rows, in one pass on the device.

The host knows the rows in use and their owners. The lengths of all rows are read at once from the
cursors on the device, and the sums come back in one transfer.
"""

from __future__ import annotations

from collections.abc import Sequence

from impl.torch_kv.cursors import maximum
from impl.lazy import Tensor, torch
from impl.torch_kv.radix import PrefixRules
from impl.torch_kv.requests import KVRequest, KVSession, Slot
from impl.vocabulary import IN_BATCH, require
from reference.commands import Account, CheckBusy, CheckIdle, Entry, Reason, Report

HELD = "session_held"
UNCACHED = "uncached"
Named = list[tuple[str, KVRequest | Slot]]  # (session or request, owner of its row)


class MemoryChecks(PrefixRules):
    """The running batches, as a scheduler keeps them, and the checks that count from them.

    last_batch: the batch that ran last.
    running_batch: requests that were running when it was launched. After a decode of all of them both are
    the same object. A finished request stays in both until the next launch.
    """

    requests: dict[str, KVRequest]
    sessions: dict[str, KVSession]
    last_batch: list[KVRequest]
    running_batch: list[KVRequest]

    def launch(self, requests: Sequence[KVRequest]) -> None:
        """Launch a batch of these requests. The last batch is merged into the running requests."""
        self.running_batch = running = [
            request for request in self._merge_batches() if request.row is not None
        ]
        self.last_batch = running if set(requests) == set(running) else list(requests)

    def leave(self, request: KVRequest) -> None:
        """Remove a retracted request from the batches at once."""
        for batch in (self.last_batch, self.running_batch):
            if request in batch:
                batch.remove(request)

    # -- what a request or slot counts as ---------------------------------------------------------

    def batch_requests(self) -> list[KVRequest]:
        """Return requests of both batches, each once, because the two may be one object (#21499)."""
        # Separate from _merged, so that the fault check-counts-one-batch-twice can replace it.
        return self._merge_batches()

    def _merge_batches(self) -> list[KVRequest]:
        return list(dict.fromkeys((*self.running_batch, *self.last_batch)))

    def active(self) -> list[KVRequest]:
        """Return requests with KV of their own; a finished one has given it back (#22753)."""
        return [request for request in self.batch_requests() if request.row is not None]

    def active_rows(self) -> set[int | None]:
        """Return the rows that are counted through a request. Every check computes them anew."""
        return {request.row for request in self.active()}

    def held_slots(self) -> Named:
        """Return session slots that no batch uses. A lent slot counts through its request (#22213)."""
        active = self.active_rows()
        slots = [(s.name, s.slot) for s in self.sessions.values() if s.slot is not None]
        return [(name, slot) for name, slot in slots if slot.row not in active]

    def uncached_requests(self) -> Named:
        return [(request.name, request) for request in self.active()]

    # -- how much it counts -----------------------------------------------------------------------

    def counted_full(self, allocated: Tensor, evicted: Tensor, protected: Tensor) -> Tensor:  # noqa: ARG002
        """Return tokens of the full pool per row: whole pages past R (CHK-2)."""
        return self.ceil(allocated) - protected

    def counted_swa(self, allocated: Tensor, evicted: Tensor, protected: Tensor) -> Tensor:
        """Return tokens of the SWA pool per row: whole pages past R and E (CHK-2)."""
        return self.ceil(allocated) - self.ceil(maximum(protected, evicted))

    def amounts(self, held: Named, uncached: Named) -> Tensor:
        """Return tokens of each row, rows of slots first: int64 [pools, rows] on the device."""
        store = self.store
        rows = torch.tensor([h.row for _, h in (*held, *uncached)], dtype=torch.int64)
        rows = rows.to(store.device, non_blocking=True)
        lines = torch.cat(
            (
                store.slot_cursors.lines.index_select(0, rows[: len(held)]),
                store.cursors.lines.index_select(0, rows[len(held) :]),
            )
        )
        _, allocated, evicted, protected = lines.unbind(1)
        pools = [self.counted_full(allocated, evicted, protected)]
        if store.swa is not None:
            pools.append(self.counted_swa(allocated, evicted, protected))
        return torch.stack(pools)

    def report(self, *, log: bool = False) -> Report:
        """Count both pools and the rows. Waits for the device once.

        log: the report has an entry for each row.
        """
        store = self.store
        size = self.page_size
        held = self.held_slots()
        uncached = self.uncached_requests()
        counted = self.amounts(held, uncached).tolist()
        sizes = self.sizes()
        of_tree = sizes[:2], sizes[2:]
        accounts: list[Account] = []
        entries: list[Entry] = []
        names = [(HELD, name) for name, _ in held] + [(UNCACHED, name) for name, _ in uncached]
        pools = [("full", store.full)] + ([("swa", store.swa)] if store.swa is not None else [])
        for (name, pool), counts, (evictable, protected) in zip(pools, counted, of_tree):
            of_held = sum(counts[: len(held)])
            of_uncached = sum(counts[len(held) :])
            terms = evictable, protected, of_held, of_uncached
            accounts.append(Account(name, pool.available * size, *terms, pool.pages * size))
            if log:
                entries += [
                    Entry(name, *who, count) for who, count in zip(names, counts, strict=True)
                ]
        rows = Account(
            "rows",
            available=len(store.free_rows),
            evictable=0,
            protected=0,
            session_held=len(held),
            uncached=len(uncached),
            total=store.req_to_token.shape[0],
        )
        accounts.append(rows)
        if log:
            entries += [Entry("rows", *holder, 1) for holder in names]
        wrong = [a.pool for a in accounts if not a.balances]
        alarm = f"memory leak detected in {', '.join(wrong)}" if wrong else ""
        return Report(tuple(accounts), tuple(entries), alarm)

    # -- the commands -----------------------------------------------------------------------------

    def check_busy(self, command: CheckBusy) -> Report | None:
        require(command.level in (0, 1, 2), Reason.BAD_LENGTH)
        return self.report(log=command.level == 2) if command.level else None

    def check_idle(self, command: CheckIdle) -> Report:  # noqa: ARG002
        require(all(r.phase not in IN_BATCH for r in self.requests.values()), Reason.NOT_IDLE)
        return self.report()
