"""Records, marks, pins and slots that are kept for what is over, or that nobody has any more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator

from reference.failures import AtCount, AtTransfer, AtTreeNode, Failure, failure
from reference.tiers.facts import RECORD_ONLY, TierRequestState
from reference.tiers.slot_owners import SlotOwners
from reference.tiers.slots import at_slot, slot_name


class Leaks(SlotOwners):
    """The part of a TierStep for what transfers and requests leave behind."""

    waiting: Collection[str]

    def leftovers(self) -> Iterator[Failure]:
        """Yield records, marks, pins and slots of transfers and requests that have ended."""
        if self.config.role:
            yield from self._unowned_failures()
        yield from self._unowned_slots({"state"} & {*self.config.pools})
        for name in self.after.asked:
            if name not in self.waiting:
                place = AtCount(name, "record")
                yield failure(f"no record of {name}, which waits no more", "there is one", place)
        for operation in self.after.operations:
            if operation.state == RECORD_ONLY:
                expected = f"{operation.label} is in flight, for it has a record"
                yield failure(expected, "it is not", AtTransfer(operation.job))
        if self.after.in_flight:
            return
        expected = "nothing is in flight: no record, no mark, no pin on the host"
        if self.after.reserved:
            place = AtCount("storage", "tokens being fetched", 0)
            yield failure(
                "nothing is in flight: no token counts as being fetched",
                f"{self.after.reserved} do",
                place,
            )
        for record in self.after.records:
            what = f"the {'load' if record.load else 'store'} of node {record.ack}"
            yield failure(expected, f"there is a record of {what}", AtTreeNode(record.ack))
        for node in self.after.nodes:
            for wrong, host, observed in (
                (node.storing != -1, True, "waits for a store"),
                (node.loading != -1, False, "waits for a load"),
                (any(node.pins.values()), True, "is pinned on the host"),
            ):
                if wrong:
                    yield failure(
                        expected, f"node {node.node} {observed}", AtTreeNode(node.node, host=host)
                    )

    def _unowned_failures(self) -> Iterator[Failure]:
        """Yield rows, slots of first tokens and device slots without an owner, on a server with one
        role."""
        after = self.after
        config = self.config
        first = "row of metadata" if config.prefill else "slot of a first token"
        rows = [request.row for request in after.requests]
        firsts = [request.first for request in after.requests]
        yield from _ownership_failures("row", config.rows, after.free_rows, rows)
        yield from _ownership_failures(first, config.metadata_rows, after.free_first, firsts)
        for request in after.requests:
            if (wrong := _WRONG_STATES.get(request.state)) is not None:
                expected, observed = wrong
                at = AtCount(request.name, "state")
                yield failure(f"{request.name} {expected}", observed, at)
        for name in sorted({*after.begun} - {request.name for request in after.requests}):
            at = AtCount(name, "record")
            yield failure(f"no record of parts of {name}, which is gone", "there is one", at)
        yield from self._unowned_slots(config.pools)

    def _unowned_slots(self, pools: Iterable[str]) -> Iterator[Failure]:
        """Yield device slots without an owner."""
        for pool in pools:
            for number in self.config.device_slots(pool):
                slot = False, pool, number
                if not self.who_has(slot):
                    want = f"{slot_name(slot)} is free, a node's or a request's"
                    yield failure(want, "nobody has it", at_slot(slot))


# States in which no request is left by a server with one role: what is expected of it, what is observed.
_WRONG_STATES = {
    TierRequestState.NOWHERE: ("is in a queue, or runs", "it is in none"),
    TierRequestState.BUSY: ("is free for a turn", "it waits for one that is gone"),
    TierRequestState.OVER: ("was closed, and keeps nothing", "it keeps KV"),
}


def _ownership_failures(
    resource: str, size: int, free: Iterable[int], owned: Iterable[int]
) -> Iterator[Failure]:
    """Yield the numbers with several owners, and how many have none.

    size: how many there are.
    owned: numbers that requests own, -1 for none.
    """
    owners = Counter([*free, *(number for number in owned if number >= 0)])
    for number, times in owners.items():
        if times > 1:
            want = f"{resource} {number} is free or of one request"
            yield failure(want, f"{times} have it", AtCount("server", resource, 1))
    if len(owners) != size:
        want = f"each {resource} of {size} is free or of one request"
        yield failure(want, f"{size - len(owners)} are lost", AtCount("server", resource, size))
