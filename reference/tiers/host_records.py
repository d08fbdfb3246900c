"""Records of a tree's host tier that the clauses of any second tier read (reference.tiers.tier_records)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache

from reference.failures import AtCount, AtTransfer, AtTreeNode, Failure, count_text, failure
from reference.memoization import memoized
from reference.recurrent_states import chained
from reference.tiers.commands import ResetCache, TierCommand
from reference.tiers.facts import TierFacts, TierNode
from reference.tiers.locks import LockRange, Where, counts
from reference.tiers.tier_records import Count, HostUnit, KeptCopy, Source
from reference.tiers.slot_owners import SlotOwners
from reference.tiers.slots import Slot, at_slot, slot_name, stamp_in_slot, host_slots, source, target


class HostRecords(SlotOwners):
    """The part of a TierStep for copies, locks and transfers: a `HasTier` without `leftovers`."""

    command: TierCommand
    refused: bool
    before: TierFacts
    ranges: list[LockRange]

    @property
    def resets_tier(self) -> bool:
        """Whether the command has emptied the tree."""
        return isinstance(self.command, ResetCache) and not self.refused

    @property
    def kept_copy_counts(self) -> tuple[int, int]:
        """How many nodes had a copy on the host before the command, and how many have one now."""
        return _nodes_on_host(self.before), _nodes_on_host(self.after)

    @memoized
    def clauses_reached(self) -> frozenset[str]:
        """Return clauses of a second tier that could break at this step."""
        after = self.after
        users = any(user.node for user in self.after.users)
        copying = any(not job.copied for job in after.transfers)
        reachable = {
            "HOST-1": any(any(node.host.values()) for node in after.nodes),
            "HOST-2": bool(after.nodes),
            "HOST-3": users,
            "XFER-1": copying or any(op.back for op in after.operations),
            "XFER-2": bool(self.slots_being_written)
            or any(not op.back and op.moving for op in after.operations)
            or any(request.writing for request in after.requests),
            "XFER-3": self.before.in_flight and not after.in_flight,
        }
        return frozenset(name for name, could in reachable.items() if could)

    def rooms(self) -> Iterator[HostUnit]:
        """Yield the slots of host memory."""
        for pool in self.config.pools:
            for at in range(self.config.host_slots(pool)):
                slot = True, pool, at
                nodes = len(self.owners.get(slot, ()))
                others = self.pending_slots.get(slot, ())
                owner_text = _owner_text(nodes)
                for other in others:
                    owner_text += f", {other} has it"
                owners = nodes + len(others)
                free = self.free.get(slot, 0)
                yield HostUnit(slot_name(slot), at_slot(slot), owners, free, False, owner_text)

    def copies(self) -> Iterator[KeptCopy]:
        """Yield the KV and the state of each node, on either tier."""
        # SWA KV is sent anew to each request
        pools = ("full",) if self.config.decode else self.config.pools
        for node in self.after.nodes:
            for host, slots in ((True, node.host), (False, node.device)):
                for pool in pools:
                    if pool_slots := slots[pool]:
                        yield self._node_copy(node, host, pool, pool_slots)

    def _node_copy(self, node: TierNode, host: bool, pool: str, own: tuple[int, ...]) -> KeptCopy:
        """Return a node's copy in a pool of one tier. A slot that is not written yet counts as right."""
        unwritten = self.unwritten
        stamps = node.stamps
        if pool == "state":
            stamps = tuple(chained(self.texts[node.node])[-1:])
        memory = (self.after.host_memory if host else self.after.memory)[pool]
        stamps_found = tuple(
            stamps[i] if (host, pool, slot) in unwritten and i < len(stamps) else memory[slot]
            for i, slot in enumerate(own)
        )
        tier = "host" if host else "device"
        holds = (
            f"the {pool} KV of node {node.node} on the {tier} is that of its"
            f" {count_text(len(stamps), 'token')}"
        )
        place = "position"
        another = "KV of another token"
        first = node.start
        if pool == "state":
            holds = f"the state of node {node.node} on the {tier} is that after token {node.end}"
            place = "the state after token"
            first = node.end
            another = "another state"
        return KeptCopy(
            holds=holds,
            wanted=stamps,
            found=stamps_found,
            slot=lambda i: f"{slot_name((host, pool, own[i]))} of {place} {first + i}",
            at=lambda i: at_slot((host, pool, own[i])),
            missing="nothing",
            another=another,
        )

    def pins(self) -> Iterator[Count]:
        """Yield the lock counts of nodes that differ from the number of their users."""
        wanted = self.wanted_counts
        for node in self.after.nodes:
            for host, locks in ((False, node.locks), (True, node.pins)):
                for pool, actual in locks.items():
                    users = wanted[host, pool, node.node]
                    if actual != users and not self._may_count_nothing(node, host, pool, actual):
                        tier = "host" if host else "device"
                        at = AtTreeNode(node.node, pool, host)
                        what = pool if pool == "state" else f"{pool} KV"
                        kv = f"the {what} of node {node.node} on the {tier}"
                        yield Count(kv, at, _lock_text(users), _lock_text(actual))

    def _may_count_nothing(self, node: TierNode, host: bool, pool: str, actual: int) -> bool:
        """Return whether a node may count no lock: it counts locks on full KV only where the host has
        it, unless the policy is write_back."""
        back = self.config.policy == "write_back"
        return host and pool == "full" and not actual and not node.host[pool] and not back

    def sources(self) -> Iterator[Source]:
        """Yield the slots that transfers and storage operations have still to read."""
        moved = {
            (job.load, part) for job in self.before.transfers if not job.stale for part in job.parts
        }
        for job, part in self.moving(lambda job: not job.copied):
            yield self._read_source(job.label, source(job, part), (job.load, part) in moved)
        read = {(op.job, slot) for op in self.before.operations for slot in host_slots(op.moving)}
        for op in self.after.operations:
            if not op.back:
                continue
            for slot in host_slots(op.moving):
                yield self._read_source(op.label, slot, (op.job, slot) in read)

    def _read_source(self, transfer: str, slot: Slot, known: bool) -> Source:
        """Return the source that a transfer has still to read.

        known: it had it before the command, too.
        """
        owners = len(self.owners.get(slot, ()))
        lost = "it is free" if self.free[slot] else _owner_text(owners)
        now = stamp_in_slot(self.after, slot)
        before = stamp_in_slot(self.before, slot) if known else now
        return Source(
            transfer, slot_name(slot), at_slot(slot), before, now, "" if owners == 1 else lost
        )

    def taken_destinations(self) -> Iterator[Failure]:
        """Yield destinations of transfers that are free, or that have another owner."""
        for job, part in self.moving(lambda job: not job.completed):
            slot = target(job, part)
            owners = self.owners.get(slot, ())
            owner_count = len(owners) + len(self.holders.get(slot, ()))
            if owner_count != 1 or self.free[slot]:
                observed = self.owners_text(slot)
                expected = f"{slot_name(slot)} is kept for {job.label}"
                yield failure(expected, observed, at_slot(slot), AtTransfer(job.job))
        for operation in self.after.operations:
            if operation.back:
                continue
            for slot in host_slots(operation.moving):
                nodes = self.owners.get(slot, [])
                others = self.pending_slots.get(slot, [])
                if self.free[slot] or nodes or others != [operation.label]:
                    names = [*(f"node {node}" for node in nodes), *others]
                    observed = f"{' and '.join(names) or 'nobody'} has it"
                    if self.free[slot]:
                        observed = "it is free"
                    expected = f"{slot_name(slot)} is kept for {operation.label}"
                    yield failure(expected, observed, at_slot(slot), AtTransfer(operation.job))

        yield from self._peer_write_conflicts()

    def _peer_write_conflicts(self) -> Iterator[Failure]:
        """Yield device slots, rows and slots of first tokens that a prefill server has still to write,
        and that are not reserved for that request."""
        for at, request in enumerate(self.after.requests):
            for pool, pool_slots in request.writing.items():
                for number in pool_slots:
                    slot = False, pool, number
                    if self.holders.get(slot) != [at] or self.free[slot] or slot in self.owners:
                        name = slot_name(slot)
                        expected = f"{name} is kept for what the prefill server of {request.name} writes"
                        yield failure(expected, self.owners_text(slot), at_slot(slot))
            for resource, own_number, free in (
                ("row", request.row, self.after.free_rows),
                ("slot of a first token", request.first, self.after.free_first),
            ):
                if request.writing and (own_number < 0 or own_number in free):
                    want = f"{request.name} keeps its {resource} while its prefill server writes"
                    yield failure(want, "it is free", AtCount(request.name, resource))

    @memoized
    def wanted_counts(self) -> Counter[Where]:
        """The number of users that each node must count."""
        return counts(self.after, self.ranges, self.config.pools)


def _nodes_on_host(facts: TierFacts) -> int:
    return sum(any(node.host.values()) for node in facts.nodes)


def _lock_text(times: int) -> str:
    return f"locked {count_text(times, 'time')}"


@cache
def _owner_text(nodes: int) -> str:
    return f"{count_text(nodes, 'node')} {'has' if nodes == 1 else 'have'} it"
