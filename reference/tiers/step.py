"""One command on a tree with a host tier, with what its clauses ask about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from reference.failures import (
    AtCount,
    AtSlot,
    AtTransfer,
    AtTreeNode,
    Failure,
    Place,
    counted,
    failure,
)
from reference.headway import Standstill
from reference.remembered import remembered
from reference.tiers.commands import ResetCache, TierCommand
from reference.tiers.config import TierConfig
from reference.tiers.facts import (
    METADATA,
    RECORD_ONLY,
    Slots,
    TierFacts,
    TierNode,
    TierPart,
    TierRequest,
    TierRequestState,
    TierSend,
    TierTransfer,
)
from reference.states import chained
from reference.tiers.locks import LockRange, Where, counts
from reference.tiers.progress import WAITING
from reference.tiers.records import KeptCopy, Count, HostUnit, Source

Slot = tuple[bool, str, int]  # on the host, pool, slot


@dataclass(eq=False)
class TierStep:
    """before, after: facts. refused: the command changed nothing. ranges: what users have locked, after.
    waiting: who has asked a storage, after. standstill: of a Poll on a server with one role, while a
    request waits."""

    config: TierConfig
    command: TierCommand
    refused: bool
    before: TierFacts
    after: TierFacts
    ranges: list[LockRange]
    waiting: Collection[str] = ()
    standstill: Standstill | None = None

    @property
    def unanswered(self) -> dict[str, str]:
        """The state of each request that has no answer."""
        return {each.name: each.state for each in self.after.requests if each.state in WAITING}

    @property
    def room(self) -> str:
        """Name what is free or can be evicted."""
        free = {pool: len(slots) for pool, slots in self.after.free.items()}
        for pool, tokens in self.after.evictable.items():
            free[pool] = free.get(pool, 0) + tokens
        rows = counted(len(self.after.free_rows), "row")
        return f"{', '.join(f'{pool} {tokens}' for pool, tokens in free.items())} tokens and {rows} free"

    @remembered
    def nodes(self) -> dict[int, TierNode]:
        """After the command, by number."""
        return {node.node: node for node in self.after.nodes}

    @remembered
    def owners(self) -> dict[Slot, list[int]]:
        """The nodes that have each slot."""
        owners: dict[Slot, list[int]] = {}
        for node in self.after.nodes:
            for host, slots in ((False, node.device), (True, node.host)):
                for pool in self.config.pools:
                    for slot in slots[pool]:
                        owners.setdefault((host, pool, slot), []).append(node.node)
        return owners

    @remembered
    def free(self) -> Counter[Slot]:
        """How often the free lists have each slot."""
        found: Counter[Slot] = Counter()
        for host, lists in ((False, self.after.free), (True, self.after.host_free)):
            for pool, slots in lists.items():
                found.update((host, pool, slot) for slot in slots)
        return found

    @remembered
    def held_back(self) -> dict[Slot, list[str]]:
        """Host slots that operations of the storage have, and those that wait to be freed."""
        found: dict[Slot, list[str]] = {}
        for operation in self.after.operations:
            if operation.back:
                continue
            for slot in host_slots(operation.slots):
                found.setdefault(slot, []).append(operation.called)
        for slot in host_slots(self.after.returned):
            found.setdefault(slot, []).append("the queue of slots to free")
        for request in self.after.requests:
            for slot in host_slots(request.kept):
                found.setdefault(slot, []).append(f"{request.name}, which is retracted,")
        return found

    @remembered
    def holders(self) -> dict[Slot, list[int]]:
        """The requests which have each device slot for themselves, by their place."""
        found: dict[Slot, list[int]] = {}
        for at, request in enumerate(self.after.requests):
            for pool, own in request.slots.items():
                for number in own:
                    found.setdefault((False, pool, number), []).append(at)
        return found

    def who_has(self, slot: Slot) -> list[str]:
        """The owners of a device slot, in words."""
        names = [f"node {node}" for node in self.owners.get(slot, ())]
        names += [self.after.requests[at].name for at in self.holders.get(slot, ())]
        return names + ["the free list"] * self.free[slot]

    def is_shared(self, slot: Slot) -> bool:
        """Whether several have a device slot, or one and the free list."""
        owners = len(self.owners.get(slot, ())) + len(self.holders.get(slot, ()))
        return owners + self.free.get(slot, 0) > 1

    def had_by(self, slot: Slot) -> str:
        """The owners of a device slot, as the observation of a failure."""
        names = self.who_has(slot)
        return f"{' and '.join(names) or 'nobody'} {'have' if len(names) > 1 else 'has'} it"

    @remembered
    def unwritten(self) -> set[Slot]:
        """Slots that a transfer has still to write: they hold nothing yet."""
        return {target(job, part) for job, part in self.moving(lambda job: not job.copied)}

    @remembered
    def unfinished(self) -> set[Slot]:
        """Slots that a transfer writes which has not completed."""
        return {target(job, part) for job, part in self.moving(lambda job: not job.completed)}

    @remembered
    def wanted_counts(self) -> Counter[Where]:
        """How many users each node has to count."""
        return counts(self.after, self.ranges, self.config.pools)

    def moving(
        self, which: Callable[[TierTransfer], bool]
    ) -> Iterator[tuple[TierTransfer, TierPart]]:
        """The parts of those transfers of the present cache that `which` picks."""
        for job in self.after.transfers:
            if not job.stale and which(job):
                for part in job.parts:
                    yield job, part

    # -- what clauses of any second tier ask (records.py) ------------------------------------------

    @property
    def resets_tier(self) -> bool:
        return isinstance(self.command, ResetCache) and not self.refused

    @property
    def kept_copies(self) -> tuple[int, int]:
        before, now = (
            sum(any(n.host.values()) for n in facts.nodes) for facts in (self.before, self.after)
        )
        return before, now

    @remembered
    def reached(self) -> frozenset[str]:
        """Clauses of a second tier that could break at this step."""
        after = self.after
        users = any(user.node for user in self.after.users)
        copying = any(not job.copied for job in after.transfers)
        found = {
            "HOST-1": any(any(node.host.values()) for node in after.nodes),
            "HOST-2": bool(after.nodes),
            "HOST-3": users,
            "XFER-1": copying or any(op.back for op in after.operations),
            "XFER-2": bool(self.unfinished)
            or any(not op.back and op.moving for op in after.operations)
            or any(request.writing for request in after.requests),
            "XFER-3": self.before.in_flight and not after.in_flight,
        }
        return frozenset(name for name, could in found.items() if could)

    def rooms(self) -> Iterator[HostUnit]:
        for pool in self.config.pools:
            for at in range(self.config.host_slots(pool)):
                slot = True, pool, at
                nodes = len(self.owners.get(slot, ()))
                others = self.held_back.get(slot, ())
                owned = _having(nodes)
                for other in others:
                    owned += f", {other} has it"
                owners = nodes + len(others)
                free = self.free.get(slot, 0)
                yield HostUnit(called(slot), at_slot(slot), owners, free, False, owned)

    def copies(self) -> Iterator[KeptCopy]:
        # SWA KV is sent anew to each request
        pools = ("full",) if self.config.decode else self.config.pools
        for node in self.after.nodes:
            for host, slots in ((True, node.host), (False, node.device)):
                for pool in pools:
                    if own := slots[pool]:
                        yield self._copy(node, host, pool, own)

    @remembered
    def texts(self) -> dict[int, tuple[int, ...]]:
        """The text up to the end of each node."""
        found: dict[int, tuple[int, ...]] = {0: ()}
        for node in self.after.nodes:
            found[node.node] = (*found[node.parent], *node.stamps)
        return found

    def _copy(self, node: TierNode, host: bool, pool: str, own: tuple[int, ...]) -> KeptCopy:
        where = (host, pool)
        unwritten = self.unwritten
        stamps = node.stamps
        if pool == "state":
            stamps = tuple(chained(self.texts[node.node])[-1:])
        memory = (self.after.host_memory if host else self.after.memory)[pool]
        found = tuple(
            stamps[i] if (host, pool, slot) in unwritten and i < len(stamps) else memory[slot]
            for i, slot in enumerate(own)
        )
        tier = "host" if host else "device"
        holds = (
            f"the {pool} KV of node {node.node} on the {tier} is that of its"
            f" {counted(len(stamps), 'token')}"
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
            holds,
            stamps,
            found,
            lambda i: f"{called((*where, own[i]))} of {place} {first + i}",
            lambda i: at_slot((*where, own[i])),
            "nothing",
            another,
        )

    def pins(self) -> Iterator[Count]:
        wanted = self.wanted_counts
        for node in self.after.nodes:
            for host, locks in ((False, node.locks), (True, node.pins)):
                for pool, got in locks.items():
                    users = wanted[host, pool, node.node]
                    if got != users and not self._harmless(node, host, pool, got):
                        tier = "host" if host else "device"
                        at = AtTreeNode(node.node, pool, host)
                        what = pool if pool == "state" else f"{pool} KV"
                        kv = f"the {what} of node {node.node} on the {tier}"
                        want, seen = (f"locked {counted(n, 'time')}" for n in (users, got))
                        yield Count(kv, at, want, seen)

    def _harmless(self, node: TierNode, host: bool, pool: str, got: int) -> bool:
        """Whether a lock may count nothing on a node: it counts full KV only where the host has it, unless
        the policy is write_back."""
        back = self.config.policy == "write_back"
        return host and pool == "full" and not got and not node.host[pool] and not back

    def sources(self) -> Iterator[Source]:
        moved = {
            (job.load, part) for job in self.before.transfers if not job.stale for part in job.parts
        }
        for job, part in self.moving(lambda job: not job.copied):
            yield self._source(job.called, source(job, part), (job.load, part) in moved)
        read = {(op.job, slot) for op in self.before.operations for slot in host_slots(op.moving)}
        for op in self.after.operations:
            if not op.back:
                continue
            for slot in host_slots(op.moving):
                yield self._source(op.called, slot, (op.job, slot) in read)

    def _source(self, transfer: str, slot: Slot, known: bool) -> Source:
        """Return the source that a transfer has still to read. known: it had it before the command, too."""
        owners = len(self.owners.get(slot, ()))
        lost = "it is free" if self.free[slot] else _having(owners)
        now = held(self.after, slot)
        before = held(self.before, slot) if known else now
        return Source(
            transfer, called(slot), at_slot(slot), before, now, "" if owners == 1 else lost
        )

    def taken(self) -> Iterator[Failure]:
        for job, part in self.moving(lambda job: not job.completed):
            slot = target(job, part)
            owners = self.owners.get(slot, ())
            owned = len(owners) + len(self.holders.get(slot, ()))
            if owned != 1 or self.free[slot]:
                got = self.had_by(slot)
                want = f"{called(slot)} is kept for {job.called}"
                yield failure(want, got, at_slot(slot), AtTransfer(job.job))
        for operation in self.after.operations:
            if operation.back:
                continue
            for slot in host_slots(operation.moving):
                nodes = self.owners.get(slot, [])
                others = self.held_back.get(slot, [])
                if self.free[slot] or nodes or others != [operation.called]:
                    names = [*(f"node {node}" for node in nodes), *others]
                    got = (
                        "it is free"
                        if self.free[slot]
                        else f"{' and '.join(names) or 'nobody'} has it"
                    )
                    want = f"{called(slot)} is kept for {operation.called}"
                    yield failure(want, got, at_slot(slot), AtTransfer(operation.job))

        yield from self._taken_from_peers()

    def _taken_from_peers(self) -> Iterator[Failure]:
        """Yield what a prefill server has still to write and is not kept for that request alone."""
        for at, request in enumerate(self.after.requests):
            for pool, own in request.writing.items():
                for number in own:
                    slot = False, pool, number
                    if self.holders.get(slot) != [at] or self.free[slot] or slot in self.owners:
                        want = f"{called(slot)} is kept for what the prefill server of {request.name} writes"
                        yield failure(want, self.had_by(slot), at_slot(slot))
            for what, own_number, free in (
                ("row", request.row, self.after.free_rows),
                ("slot of a first token", request.first, self.after.free_first),
            ):
                if request.writing and (own_number < 0 or own_number in free):
                    want = f"{request.name} keeps its {what} while its prefill server writes"
                    yield failure(want, "it is free", AtCount(request.name, what))

    # -- what is handed to a decode server (PD) ----------------------------------------------------

    def needed(self) -> Iterator[TierSend]:
        """Parts that were handed in to be sent and are not read yet."""
        yield from self.after.sends

    def arrived(self) -> Iterator[TierSend | TierRequest]:
        """Parts that this command handed in, and requests of which all was."""
        yield from self._handed_in()
        for request in self.after.requests:
            if request.due < 0 or request.state == TierRequestState.SENDS:
                yield request

    def _handed_in(self) -> list[TierSend]:
        known = {send.job for send in self.before.sends}
        return [send for send in self.after.sends if send.job not in known]

    def lost(self) -> Iterator[Failure]:
        """Yield slots of such parts that are free, or were written."""
        was = {send.job: send.found for send in self.before.sends}
        for send in self.after.sends:
            at_first = was.get(send.job, send.found)
            for at, slot in enumerate(send.slots):
                want = f"{_of_send(send, at)} stays as it is until it is read for {send.name}"
                if self._is_free(send.pool, slot):
                    yield failure(want, "it is free", _at_sent(send, slot))
                elif at < len(send.found) and send.found[at] != at_first[at]:
                    yield failure(want, "it was written", _at_sent(send, slot))

    def _is_free(self, pool: str, slot: int) -> bool:
        if pool == METADATA:
            return slot in self.after.free_first
        return bool(self.free[False, pool, slot])

    def wrongly_sent(self) -> Iterator[Failure]:
        """Yield parts that hold other KV than that of their place, and requests of which too little or too
        much was handed in."""
        for send in self._handed_in():
            for at, (found, wanted) in enumerate(zip(send.found, send.wanted, strict=True)):
                if found != wanted:
                    slot = send.slots[at]
                    want = f"{_of_send(send, at)} is sent as {_place(send, at)} of {send.name}"
                    got = "KV of another token" if found else "nothing"
                    if send.pool == METADATA:
                        got = "what another request left" if found else "nothing"
                    yield failure(want, f"it holds {got}", _at_sent(send, slot))
        for request in self.after.requests:
            if request.due < 0 or (request.due and request.state == TierRequestState.SENDS):
                want = f"each page that the decode server of {request.name} expects is handed in once"
                more = "too few" if request.due > 0 else "too many"
                got = f"{abs(request.due)} {more}"
                yield failure(want, got, AtCount(request.name, "pages to send"))

    def _lost(self) -> Iterator[Failure]:
        """Yield what nobody owns on a server with one role: rows, slots of first tokens, device slots."""
        after = self.after
        config = self.config
        first = "row of metadata" if config.prefill else "slot of a first token"
        for what, size, free, own in (
            ("row", config.rows, after.free_rows, [r.row for r in after.requests]),
            (
                first,
                config.metadata_rows,
                after.free_first,
                [r.first for r in after.requests],
            ),
        ):
            owners = Counter([*free, *(number for number in own if number >= 0)])
            for number, times in owners.items():
                if times > 1:
                    want = f"{what} {number} is free or of one request"
                    yield failure(want, f"{times} have it", AtCount("server", what, 1))
            if len(owners) != size:
                want = f"each {what} of {size} is free or of one request"
                yield failure(want, f"{size - len(owners)} are lost", AtCount("server", what, size))
        for request in after.requests:
            if request.state == TierRequestState.NOWHERE:
                at = AtCount(request.name, "state")
                yield failure(f"{request.name} is in a queue, or runs", "it is in none", at)
            if request.state == TierRequestState.BUSY:
                at = AtCount(request.name, "state")
                yield failure(
                    f"{request.name} is free for a turn", "it waits for one that is gone", at
                )
            if request.state == TierRequestState.OVER:
                at = AtCount(request.name, "state")
                yield failure(f"{request.name} was closed, and keeps nothing", "it keeps KV", at)
        for name in sorted({*after.begun} - {request.name for request in after.requests}):
            at = AtCount(name, "record")
            yield failure(f"no record of parts of {name}, which is gone", "there is one", at)
        yield from self._nobodys(config.pools)

    def _nobodys(self, pools: Iterable[str]) -> Iterator[Failure]:
        """Slots of the device that nobody has."""
        page = self.config.page_size
        for pool in pools:
            for number in range(page, (self.config.pages(pool) + 1) * page):
                slot = False, pool, number
                if not self.who_has(slot):
                    want = f"{called(slot)} is free, a node's or a request's"
                    yield failure(want, "nobody has it", at_slot(slot))

    def left_over(self) -> Iterator[Failure]:
        if self.config.role:
            yield from self._lost()
        yield from self._nobodys({"state"} & {*self.config.pools})
        for name in self.after.asked:
            if name not in self.waiting:
                at = AtCount(name, "record")
                yield failure(f"no record of {name}, which waits no more", "there is one", at)
        for operation in self.after.operations:
            if operation.state == RECORD_ONLY:
                expected = f"{operation.called} is in flight, for it has a record"
                yield failure(expected, "it is not", AtTransfer(operation.job))
        if self.after.in_flight:
            return
        expected = "nothing is in flight: no record, no mark, no pin on the host"
        if self.after.reserved:
            at = AtCount("storage", "tokens being fetched", 0)
            yield failure(
                "nothing is in flight: no token counts as being fetched",
                f"{self.after.reserved} do",
                at,
            )
        for record in self.after.records:
            what = f"the {'load' if record.load else 'store'} of node {record.ack}"
            yield failure(expected, f"there is a record of {what}", AtTreeNode(record.ack))
        for node in self.after.nodes:
            for wrong, host, got in (
                (node.storing != -1, True, "waits for a store"),
                (node.loading != -1, False, "waits for a load"),
                (any(node.pins.values()), True, "is pinned on the host"),
            ):
                if wrong:
                    yield failure(
                        expected, f"node {node.node} {got}", AtTreeNode(node.node, host=host)
                    )


def _of_send(send: TierSend, at: int) -> str:
    """Such as "device full slot 5"."""
    if send.pool == METADATA:
        return f"row {send.slots[at]} of metadata"
    return called((False, send.pool, send.slots[at]))


def _place(send: TierSend, at: int) -> str:
    return METADATA if send.pool == METADATA else f"position {send.position + at}"


def _at_sent(send: TierSend, slot: int) -> Place:
    if send.pool == METADATA:
        return AtCount(send.name, "row of metadata", slot)
    return at_slot((False, send.pool, slot))


def host_slots(slots: Slots) -> Iterator[Slot]:
    """Slots of the host, one by one."""
    for pool, own in slots.items():
        for slot in own:
            yield True, pool, slot


def held(facts: TierFacts, slot: Slot) -> int:
    """The stamp in a slot, 0 for none."""
    host, pool, at = slot
    return (facts.host_memory if host else facts.memory)[pool][at]


def source(job: TierTransfer, part: TierPart) -> Slot:
    """The slot that a transfer reads."""
    return (True, part.pool, part.host) if job.load else (False, part.pool, part.device)


def target(job: TierTransfer, part: TierPart) -> Slot:
    """The slot that a transfer writes."""
    return (False, part.pool, part.device) if job.load else (True, part.pool, part.host)


@cache
def _having(nodes: int) -> str:
    return f"{counted(nodes, 'node')} {'has' if nodes == 1 else 'have'} it"


@cache
def called(slot: Slot) -> str:
    """Such as "host swa slot 5"."""
    return f"{'host' if slot[0] else 'device'} {slot[1]} slot {slot[2]}"


@cache
def at_slot(slot: Slot) -> AtSlot:
    """A slot as the place of a failure."""
    host, pool, number = slot
    return AtSlot(pool, number, host)
