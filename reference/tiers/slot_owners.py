"""The owners of each slot after a command: nodes, requests, the free lists, transfers and the storage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from reference.memoization import memoized
from reference.tiers.config import TierConfig
from reference.tiers.facts import TierFacts, TierNode, TierPart, TierTransfer
from reference.tiers.slots import Slot, host_slots, target


class SlotOwners:
    """The part of a TierStep for the owners of each slot, after the command."""

    config: TierConfig
    after: TierFacts

    @memoized
    def nodes(self) -> dict[int, TierNode]:
        """Return the nodes of the tree, by number."""
        return {node.node: node for node in self.after.nodes}

    @memoized
    def owners(self) -> dict[Slot, list[int]]:
        """The nodes that have each slot."""
        owners: dict[Slot, list[int]] = {}
        for node in self.after.nodes:
            for host, slots in ((False, node.device), (True, node.host)):
                for pool in self.config.pools:
                    for slot in slots[pool]:
                        owners.setdefault((host, pool, slot), []).append(node.node)
        return owners

    @memoized
    def free(self) -> Counter[Slot]:
        """The number of times that the free lists contain each slot."""
        found: Counter[Slot] = Counter()
        for host, lists in ((False, self.after.free), (True, self.after.host_free)):
            for pool, slots in lists.items():
                found.update((host, pool, slot) for slot in slots)
        return found

    @memoized
    def pending_slots(self) -> dict[Slot, list[str]]:
        """Host slots of storage operations, and slots that wait to be freed, each with its owners in
        words."""
        owners_by_slot: dict[Slot, list[str]] = {}
        for operation in self.after.operations:
            if operation.back:
                continue
            for slot in host_slots(operation.slots):
                owners_by_slot.setdefault(slot, []).append(operation.label)
        for slot in host_slots(self.after.returned):
            owners_by_slot.setdefault(slot, []).append("the queue of slots to free")
        for request in self.after.requests:
            for slot in host_slots(request.kept):
                owners_by_slot.setdefault(slot, []).append(f"{request.name}, which is retracted,")
        return owners_by_slot

    @memoized
    def holders(self) -> dict[Slot, list[int]]:
        """Return the requests that own each device slot, by index."""
        found: dict[Slot, list[int]] = {}
        for at, request in enumerate(self.after.requests):
            for pool, pool_slots in request.slots.items():
                for number in pool_slots:
                    found.setdefault((False, pool, number), []).append(at)
        return found

    def who_has(self, slot: Slot) -> list[str]:
        """Return the owners of a device slot, in words."""
        names = [f"node {node}" for node in self.owners.get(slot, ())]
        names += [self.after.requests[at].name for at in self.holders.get(slot, ())]
        return names + ["the free list"] * self.free[slot]

    def is_shared(self, slot: Slot) -> bool:
        """Return whether a device slot has several owners, the free list included."""
        owners = len(self.owners.get(slot, ())) + len(self.holders.get(slot, ()))
        return owners + self.free.get(slot, 0) > 1

    def owners_text(self, slot: Slot) -> str:
        """Return the owners of a device slot, as the observation of a failure."""
        names = self.who_has(slot)
        return f"{' and '.join(names) or 'nobody'} {'have' if len(names) > 1 else 'has'} it"

    @memoized
    def unwritten(self) -> set[Slot]:
        """Slots that a transfer has still to write: they hold nothing yet."""
        return {target(job, part) for job, part in self.moving(lambda job: not job.copied)}

    @memoized
    def slots_being_written(self) -> set[Slot]:
        """Slots that transfers write which have not completed."""
        return {target(job, part) for job, part in self.moving(lambda job: not job.completed)}

    def moving(
        self, which: Callable[[TierTransfer], bool]
    ) -> Iterator[tuple[TierTransfer, TierPart]]:
        """Yield the parts of transfers that `which` selects, without those of a cache that was reset."""
        for job in self.after.transfers:
            if not job.stale and which(job):
                for part in job.parts:
                    yield job, part

    @memoized
    def texts(self) -> dict[int, tuple[int, ...]]:
        """The text up to the end of each node."""
        found: dict[int, tuple[int, ...]] = {0: ()}
        for node in self.after.nodes:
            found[node.node] = (*found[node.parent], *node.stamps)
        return found
