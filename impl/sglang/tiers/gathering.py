"""The facts of a release's tree with its host tier: nodes, slots, locks, transfers, records."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import torch

from impl.sglang.parts.namespaces import elements_of
from impl.sglang.scheduler.server import LockHolder, Server
from impl.sglang.tiers.copy_engine import CopyEngine, parts_of
from reference.commands import token_of
from reference.tiers.config import TierConfig
from reference.tiers.facts import TierFacts, TierNode, TierPart, TierRead, TierRecord, TierTransfer, TierUser


class Numbers:
    """Things of a run, numbered from 1 on in the order in which they came up; each is kept, so that no other
    gets its identity."""

    def __init__(self) -> None:
        self.known: dict[Any, tuple[int, Any]] = {}

    def of(self, key: Any, thing: Any = None) -> int:
        return self.known.setdefault(key, (len(self.known) + 1, thing))[0]

    def __contains__(self, key: Any) -> bool:
        return key in self.known


class Gatherer:
    """Looks at one tree; what it numbers keeps its number for the run."""

    def __init__(self, release: Any, server: Server, config: TierConfig) -> None:
        self.release, self.server, self.config = release, server, config
        self.cache: Any = server.cache
        self.controller = self.cache.cache_controller
        self.copies: CopyEngine = self.controller.l2_transfer_engine
        kinds = importlib.import_module("sglang.srt.mem_cache.unified_radix_cache").ComponentType
        self.kinds = {"full": kinds.FULL, "swa": kinds.SWA} if config.window else {"full": kinds.FULL}
        pools = (entry.host_pool for entry in self.cache.host_pool_group.entries)
        self.host_pools = dict(zip(self.kinds, pools))
        self.nodes, self.locks, self.jobs = Numbers(), Numbers(), Numbers()
        self.device_pools = {"full": server.full_pool, "swa": server.swa_pool}

    @property
    def core(self) -> Any:
        """What has the nodes."""
        return getattr(self.cache, "tree_core", self.cache)

    def gather(self, reads: tuple[TierRead, ...]) -> TierFacts:
        transfers = tuple(self._transfers())
        memory = {pool: tuple(self.copies.memory[pool]) for pool in self.kinds}
        return TierFacts(
            tuple(self._nodes()), {pool: self._free(pool) for pool in self.kinds},
            {pool: tuple(_host_free(self.host_pools[pool])) for pool in self.kinds}, self._evictable(),
            memory, {pool: tuple(self.copies.host[pool]) for pool in self.kinds}, transfers,
            tuple(self._records()), tuple(self._users()), reads,
            "" if transfers else self._complaint(), self.release.loose,
        )  # fmt: skip

    def _free(self, pool: str) -> tuple[int, ...]:
        size = self.config.page_size
        pages = self.release.free_pages(self.device_pools[pool])
        return tuple(page * size + at for page in pages for at in range(size))

    def _evictable(self) -> dict[str, int]:
        assert self.server.tree is not None
        sizes = self.server.tree.sizes()
        return dict(zip(self.kinds, (sizes.full_evictable, sizes.swa_evictable)))

    # -- the tree ---------------------------------------------------------------------------------

    def _nodes(self) -> Iterator[TierNode]:
        root = self.core.root_node
        waiting = [(child, 0, 0) for child in root.children.values()]
        while waiting:
            node, parent, start = waiting.pop()
            stamps = tuple(map(token_of, elements_of(node.key)))
            number = self.nodes.of(node.id)
            parts = {pool: node.component_data[kind] for pool, kind in self.kinds.items()}
            yield TierNode(
                number, parent, start, stamps,
                {pool: _slots(part.value) for pool, part in parts.items()},
                {pool: _slots(part.host_value) for pool, part in parts.items()},
                {pool: part.lock_ref for pool, part in parts.items()},
                {pool: part.host_lock_ref for pool, part in parts.items()},
                self._mark(node, "write_through_pending_id"), self._mark(node, "load_back_pending_id"),
            )  # fmt: skip
            waiting += [(child, number, start + len(stamps)) for child in node.children.values()]

    def _mark(self, node: Any, name: str) -> int:
        mark = getattr(node, name, None)
        return -1 if mark is None else self.nodes.of(mark)

    def _users(self) -> Iterator[TierUser]:
        for name, holder in self.server.lock_holders.items():
            req = holder.req
            lock = getattr(req, "lock", None) or getattr(req, "lock_receipt", None)
            key = id(lock) if lock is not None else (name, _id(req.last_node), req.swa_uuid_for_lock)
            yield self._user(name, False, req.last_node, key, lock)
        for ack, record in self.cache.ongoing_write_through.items():
            if record.lock_params is not None:
                lock = record.lock_params
                yield self._user(f"store of {self.nodes.of(ack)}", False, record[0], id(lock), lock)
        for ack, record in self.cache.ongoing_load_back.items():
            name = f"load of {self.nodes.of(ack)}"
            for host in (False, True):
                lock = (record[1], record[2])[host] if len(record) > 2 else record[1]
                yield self._user(name, host, record[0], id(lock), lock)

    def _user(self, name: str, host: bool, node: Any, key: Any, lock: Any) -> TierUser:
        root = _id(node) == _id(self.core.root_node)
        return TierUser(name, host, 0 if root else self.nodes.of(_id(node)), self.locks.of(key, lock))

    # -- transfers --------------------------------------------------------------------------------

    def _transfers(self) -> Iterator[TierTransfer]:
        controller = self.controller
        waiting = *controller.ack_write_queue, *controller.ack_load_queue
        acks = {id(ack.finish_event): ack for ack in waiting}
        self.copies.completed = [job for job in self.copies.completed if id(job.finish) in acks]
        for job in (*self.copies.queues[False], *self.copies.queues[True], *self.copies.completed):
            ack = acks.get(id(job.finish))
            ids = tuple(map(self.nodes.of, ack.node_ids)) if ack is not None else ()
            number = self.jobs.of(id(job), job)
            yield TierTransfer(
                number, job.load, tuple(job.parts), ids, True, job.copied, job.completed, ack is None
            )
        for load, queue in ((False, controller.write_queue), (True, controller.load_queue)):
            for operation in queue:
                parts = tuple(_parts(operation))
                if id(operation) not in self.jobs:
                    self.copies.nothing_there(load, parts)
                number = self.jobs.of(id(operation), operation)
                yield TierTransfer(number, load, parts, tuple(map(self.nodes.of, operation.node_ids)))

    def _records(self) -> Iterator[TierRecord]:
        for ack, record in self.cache.ongoing_write_through.items():
            named = getattr(record, "publish_node_ids", None) or [_id(record[0])]
            yield TierRecord(False, self.nodes.of(ack), tuple(map(self.nodes.of, named)))
        for ack, record in self.cache.ongoing_load_back.items():
            yield TierRecord(True, self.nodes.of(ack), (self.nodes.of(_id(record[0])),))

    # -- reads and checks -------------------------------------------------------------------------

    def reads(self, holder: LockHolder) -> Iterator[TierRead]:
        """What the forward pass of a request finds of its prefix: full KV, and SWA KV in its window."""
        name = next((n for n, each in self.server.lock_holders.items() if each is holder), "")
        slots, window = holder.slots.tolist(), self.config.window
        for position, (slot, wanted) in enumerate(zip(slots, holder.tokens)):
            yield TierRead(name, "full", position, slot, self.copies.memory["full"][slot], wanted)
            if window is not None and position >= len(slots) - window:
                swa = int(self.server.allocator.full_to_swa_index_mapping[slot])
                found = self.copies.memory["swa"][swa] if swa > 0 else 0
                yield TierRead(name, "swa", position, swa, found, wanted)

    def _complaint(self) -> str:
        """What the release's own check says at rest."""
        try:
            self.cache.sanity_check()
        except AssertionError as error:
            return " ".join(str(error).split())[:300]
        return ""


def _id(node: Any) -> int:
    """A node's number by the release; up to 0.5.16 handles are nodes."""
    number: int = getattr(node, "id", node)
    return number


def _slots(value: Any) -> tuple[int, ...]:
    return () if value is None else tuple(value.tolist())


def _host_free(pool: Any) -> list[int]:
    """A host pool's free slots, as its lists have them."""
    lists = [pool.free_slots, *(getattr(pool, "release_slots", None) or [])]
    slots: list[int] = torch.cat(lists).tolist()
    return slots


def _parts(operation: Any) -> Iterator[TierPart]:
    """What a queued operation will move."""
    yield from parts_of("full", operation.device_indices, operation.host_indices)
    for more in operation.pool_transfers or ():
        if more.indices_from_pool is None:
            yield from parts_of("swa", more.device_indices, more.host_indices)
