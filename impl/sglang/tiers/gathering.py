"""The facts of a release's tree with its host tier: nodes, slots, locks, transfers, records."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

from impl.loading.optional import optional
from impl.sglang.parts.namespaces import elements_of
from impl.sglang.parts.tracking import buffers_of
from impl.sglang.scheduler.live_requests import LiveRequest, LockHolder
from impl.sglang.scheduler.server import Server
from impl.sglang.tiers.api import lock_deviations
from impl.sglang.tiers.copy_engine import POOLS, CopyEngine, parts_of, slots_of
from impl.sglang.tiers.decode_side import DecodeSide
from impl.sglang.tiers.gathering_roles import DecodeGatherer, PrefillGatherer
from impl.sglang.tiers.gathering_storage import StorageGatherer
from impl.sglang.tiers.numbering import Numbers
from impl.sglang.tiers.prefill_side import PrefillSide
from impl.sglang.tiers.storage import Storage
from reference.recurrent_states import chained, stamp_after
from reference.tiers.config import TierConfig
from reference.tiers.facts import (
    TierFacts, TierLock, TierNode, TierPart, TierRead, TierRecord,
    TierRequest, TierRequestState, TierTransfer, TierUser,
)  # fmt: skip
from reference.token_ids import token_of, tokens_of




class Gatherer:
    """Looks at one tree; what it numbers keeps its number for the run."""

    def __init__(
        self,
        release: Any,
        server: Server,
        config: TierConfig,
        copies: CopyEngine,
        storage: Storage | None = None,
        side: DecodeSide | None = None,
        sends: PrefillSide | None = None,
    ) -> None:
        """Keep the parts of a server whose facts are gathered.

        storage: the one behind its host tier.
        side, sends: what a server has that only decodes or only prefills.
        """
        self.release = release
        self.server = server
        self.config = config
        self.storage = storage
        self.cache: Any = server.cache
        self.controller = self.cache.cache_controller
        self.copies = copies
        kinds = importlib.import_module("sglang.srt.mem_cache.unified_radix_cache").ComponentType
        known = {"full": kinds.FULL, "swa": kinds.SWA, "state": kinds.MAMBA}
        self.kinds = {pool: known[pool] for pool in config.pools}
        group = self.cache.host_pool_group
        self.host_pools = (
            dict(zip(self.kinds, (e.host_pool for e in group.entries))) if group else {}
        )
        self.nodes = Numbers()
        self.locks = Numbers()
        self.jobs = Numbers()
        self.behind = (
            StorageGatherer(self.cache, storage, copies, self.jobs, [*self.kinds])
            if storage is not None
            else None
        )
        self.role: DecodeGatherer | PrefillGatherer | None = None
        if side is not None:
            self.role = DecodeGatherer(side, release, server, config, copies)
        elif sends is not None:
            self.role = PrefillGatherer(sends, release, server, config, copies)
        self.device_pools = {"full": server.full_pool, "swa": server.swa_pool}
        self.taken: list[tuple[Any, tuple[TierNode, ...]]] = []
        if sends is not None:
            self._note_locks()

    def _note_locks(self) -> None:
        """Have each lock that the tree takes on the device noted with the path that it has then."""
        lock_of_cache = self.cache.lock

        def lock(node: Any, *more: Any, **named: Any) -> Any:
            taken = lock_of_cache(node, *more, **named)
            self.taken.append((taken, tuple(self._path(node))))
            return taken

        self.cache.lock = lock

    def _path(self, handle: Any) -> Iterator[TierNode]:
        """Yield the nodes from the root, which is left out, to one."""
        nodes: list[Any] = []
        node = self.core.node_by_id(handle)
        while node is not self.core.root_node:
            nodes.append(node)
            node = node.parent
        parent = start = 0
        for node in reversed(nodes):
            fact = self.node(node, parent, start)
            parent = fact.node
            start = fact.end
            yield fact

    @property
    def core(self) -> Any:
        """The object that has the nodes."""
        return optional(self.cache, "UnifiedRadixCache.tree_core", self.cache)

    @property
    def root(self) -> int:
        """The root's number in the release."""
        return _id(self.core.root_node)

    def gather(self, reads: tuple[TierRead, ...]) -> TierFacts:
        """Return the facts of the tree, of both tiers and of what moves between them.

        reads: what the last command's request read.
        """
        transfers = tuple(self._transfers())
        operations = () if self.behind is None else self.behind.operations()
        memory = {pool: tuple(self.copies.memory[pool]) for pool in self.kinds}
        return TierFacts(
            nodes=tuple(self._nodes()),
            free={pool: self._free(pool) for pool in self.kinds},
            host_free={pool: tuple(_host_free(self.host_pools.get(pool))) for pool in self.kinds},
            evictable=self._evictable(),
            memory=memory,
            host_memory={pool: tuple(self.copies.host[pool]) for pool in self.kinds},
            transfers=transfers,
            records=tuple(self._records()),
            users=tuple(self._users()),
            reads=reads,
            complaint="" if transfers or operations else self._complaint(),
            loose=lock_deviations(self.release.version),
            operations=operations,
            **({} if self.behind is None else self.behind.storage_facts()),
            **self._of_requests(),
        )

    def _free(self, pool: str) -> tuple[int, ...]:
        if pool == "state":
            return slots_of(self.server.rows.mamba_allocator.free_slots)
        size = self.config.page_size
        pages = self.release.free_pages(self.device_pools[pool])
        return tuple(page * size + index for page in pages for index in range(size))

    def _evictable(self) -> dict[str, int]:
        if self.server.tree is None:
            return dict.fromkeys(self.kinds, 0)
        sizes = self.server.tree.sizes()
        states = self.cache.mamba_evictable_size() if "state" in self.kinds else 0
        counted = {"full": sizes.full_evictable, "swa": sizes.swa_evictable, "state": states}
        return {pool: counted[pool] for pool in self.kinds}

    # -- the tree ---------------------------------------------------------------------------------

    def _nodes(self) -> Iterator[TierNode]:
        root = self.core.root_node
        waiting = [(child, 0, 0) for child in root.children.values()]
        while waiting:
            node, parent, start = waiting.pop()
            fact = self.node(node, parent, start)
            yield fact
            waiting += [(child, fact.node, fact.end) for child in node.children.values()]

    def node(self, node: Any, parent: int, start: int) -> TierNode:
        """Return the node of this number, which begins at a position under its parent."""
        parts = {pool: node.component_data[kind] for pool, kind in self.kinds.items()}
        return TierNode(
            self.nodes.of(node.id),
            parent=parent,
            start=start,
            stamps=self.stamps(node, start),
            device={pool: slots_of(part.value) for pool, part in parts.items()},
            host={pool: slots_of(part.host_value) for pool, part in parts.items()},
            locks={pool: part.lock_ref for pool, part in parts.items()},
            pins={pool: part.host_lock_ref for pool, part in parts.items()},
            storing=self._mark(node, "write_through_pending_id"),
            loading=self._mark(node, "load_back_pending_id"),
            hashed=self._text_of_hashes(node.hash_value),
            following=tokens_of(elements_of(node.key))[len(node.key) :],
        )

    def stamps(self, node: Any, start: int) -> tuple[int, ...]:
        """Return the stamps of the KV of a node that begins at a position."""
        del start
        return tuple(map(token_of, elements_of(node.key)))

    def _text_of_hashes(self, hashes: Sequence[str] | None) -> tuple[int, ...] | None:
        """Return the text that a node's hashes stand for; of two that do not follow each other both."""
        if self.storage is None or hashes is None:
            return None
        size = self.config.page_size
        texts = [*map(self.storage.hashes.text, hashes)]
        for one, following in pairwise(texts):
            if following[:-size] != one:
                return (*one, *following)
        before = texts[0][:-size] if texts else ()
        return (*before, *(stamp for text in texts for stamp in text[-size:]))

    def _mark(self, node: Any, name: str) -> int:
        mark = optional(node, f"UnifiedTreeNode.{name}")
        return -1 if mark is None else self.nodes.of(mark)

    def _users(self) -> Iterator[TierUser]:
        """Yield the locks on the tree, each with its holder: requests, stores, loads, prefetches and
        backups."""
        for name, holder in self.server.lock_holders.items():
            req = holder.req
            lock = optional(req, "Req.lock") or optional(req, "Req.lock_receipt")
            key = (
                id(lock) if lock is not None else (name, _id(req.last_node), req.swa_uuid_for_lock)
            )
            yield self._user(name, host=False, node=req.last_node, key=key, lock=lock)
        for ack, record in self.cache.ongoing_write_through.items():
            if record.lock_params is not None:
                lock = record.lock_params
                name = f"store of {self.nodes.of(ack)}"
                yield self._user(name, host=False, node=record[0], key=id(lock), lock=lock)
        for ack, record in self.cache.ongoing_load_back.items():
            name = f"load of {self.nodes.of(ack)}"
            for host in (False, True):
                lock = (record[1], record[2])[host] if len(record) > 2 else record[1]
                yield self._user(name, host=host, node=record[0], key=id(lock), lock=lock)
        if self.behind is not None:
            for request, prefetch in self.cache.ongoing_prefetch.items():
                lock = prefetch.anchor_lock_params
                name = f"prefetch of {request.rid}"
                yield self._user(name, host=True, node=prefetch.anchor_node_id, key=id(lock), lock=lock)
            for node, lock in self.cache.ongoing_backup.values():
                yield self._user(
                    f"backup of {self.nodes.of(node)}",
                    host=True,
                    node=node,
                    key=id(lock),
                    lock=lock,
                )
        locks = self.role.locks() if self.role is not None else ()
        for name, lock in locks:
            user = self._user(name, host=False, node=lock.node, key=id(lock), lock=lock)
            yield user._replace(
                full_only=lock.swa_released or bool(lock.receipt.skipped_lock_components)
            )

    def _user(self, name: str, host: bool, node: Any, key: Any, lock: Any) -> TierUser:
        root = _id(node) == self.root
        return TierUser(
            name, host, 0 if root else self.nodes.of(_id(node)), self.locks.of(key, lock)
        )

    # -- transfers --------------------------------------------------------------------------------

    def _transfers(self) -> Iterator[TierTransfer]:
        """Yield the transfers between the tiers: those on the device or with an ack that waits, then those in
        the controller's queues."""
        controller = self.controller
        if controller is None:
            return
        waiting = *controller.ack_write_queue, *controller.ack_load_queue
        acks = {id(ack.finish_event): ack for ack in waiting}
        self.copies.completed = [job for job in self.copies.completed if id(job.finish) in acks]
        for job in (*self.copies.queues[False], *self.copies.queues[True], *self.copies.completed):
            ack = acks.get(id(job.finish))
            ids = tuple(map(self.nodes.of, ack.node_ids)) if ack is not None else ()
            number = self.jobs.of(id(job), job)
            yield TierTransfer(
                number,
                job.load,
                tuple(job.parts),
                ids,
                sent=True,
                copied=job.copied,
                completed=job.completed,
                stale=ack is None,
            )
        for load, queue in ((False, controller.write_queue), (True, controller.load_queue)):
            for operation in queue:
                parts = tuple(_parts(operation))
                if id(operation) not in self.jobs:
                    self.copies.clear_targets(load, parts)
                number = self.jobs.of(id(operation), operation)
                yield TierTransfer(
                    number, load, parts, tuple(map(self.nodes.of, operation.node_ids))
                )

    def _records(self) -> Iterator[TierRecord]:
        for ack, record in self.cache.ongoing_write_through.items():
            node_ids = optional(record, "_OngoingWriteThrough.publish_node_ids") or [_id(record[0])]
            yield TierRecord(load=False, ack=self.nodes.of(ack), nodes=tuple(map(self.nodes.of, node_ids)))
        for ack, record in self.cache.ongoing_load_back.items():
            yield TierRecord(load=True, ack=self.nodes.of(ack), nodes=(self.nodes.of(_id(record[0])),))

    def _holders_of_states(self) -> Iterator[TierRequest]:
        if "state" not in self.kinds:
            return
        for name, holder in self.server.lock_holders.items():
            if holder.req.kv.holds_mamba:
                slots = int(holder.req.kv.mamba_pool_idx), *buffers_of(holder.req.kv)
                yield TierRequest(
                    name,
                    state=TierRequestState.HOLDS,
                    row=-1,
                    first=-1,
                    slots={"state": slots},
                    kept={},
                    writing={},
                )

    # -- a server with one role ---------------------------------------------------------------------

    def _of_requests(self) -> dict[str, Any]:
        """Return the facts of requests of a server with one role, or of holders of recurrent states."""
        if self.role is None:
            return {"requests": tuple(self._holders_of_states())}
        facts = self.role.facts()
        if isinstance(self.role, PrefillGatherer):
            facts["taken"] = self._locks_taken(self.role.side)
        return facts

    def _locks_taken(self, side: PrefillSide) -> tuple[TierLock, ...]:
        """Return the locks of the last command that a request still has."""
        held = {id(turn.req.lock) for turn in side.arrivals.values()}
        taken = [each for each in self.taken if id(each[0]) in held]
        self.taken = []
        return tuple(TierLock(self.locks.of(id(lock), lock), path) for lock, path in taken)

    # -- reads and checks -------------------------------------------------------------------------

    def decoding(self, turn: LiveRequest, end: int) -> Iterator[TierRead]:
        """Yield what the query at position `end` finds of the text before it."""
        row = self.server.rows.req_to_token[turn.req.kv.req_pool_idx, :end].tolist()
        for position, (slot, wanted) in enumerate(zip(row, turn.text)):
            yield TierRead(
                turn.name, "full", position, slot, self.copies.memory["full"][slot], wanted
            )
            if self.config.window is not None and position > end - self.config.window:
                swa = int(self.server.allocator.full_to_swa_index_mapping[slot])
                stamp = self.copies.memory["swa"][swa] if swa > 0 else 0
                yield TierRead(turn.name, "swa", position, swa, stamp, wanted)

    def reads(self, holder: LockHolder) -> Iterator[TierRead]:
        """Yield what the forward pass of a request finds of its prefix: full KV, and SWA KV in its window."""
        name = next((n for n, each in self.server.lock_holders.items() if each is holder), "")
        slots = holder.slots.tolist()
        window = self.config.window
        for position, (slot, wanted) in enumerate(zip(slots, holder.tokens)):
            yield TierRead(name, "full", position, slot, self.copies.memory["full"][slot], wanted)
            if window is not None and position >= len(slots) - window:
                swa = int(self.server.allocator.full_to_swa_index_mapping[slot])
                stamp = self.copies.memory["swa"][swa] if swa > 0 else 0
                yield TierRead(name, "swa", position, swa, stamp, wanted)
        if "state" in self.kinds and (end := len(slots)):
            slot = self._state_behind(holder.req)
            stamp = self.copies.memory["state"][slot] if slot else 0
            yield TierRead(
                name, "state", end - 1, slot, stamp, stamp_after(chained(holder.tokens), end)
            )

    def _state_behind(self, req: Any) -> int:
        """Return the slot of the state that a request continues from behind its prefix, 0 for none. This is
        its own slot if a state was loaded for it, otherwise that of the matched node."""
        if req.kv.holds_mamba:
            return int(req.kv.mamba_pool_idx)
        own_state = self.core.get_component_device_value(_id(req.last_node), self.kinds["state"])
        return 0 if own_state is None else int(own_state)

    def _complaint(self) -> str:
        """Return the complaint of the release's own check at rest."""
        try:
            self.cache.sanity_check()
        except AssertionError as error:
            return " ".join(str(error).split())[:300]
        return ""


def _id(node: Any) -> int:
    """Return a node's number by the release; up to 0.5.16 handles are nodes."""
    number: int = optional(node, "UnifiedTreeNode.id", node)
    return number


def _host_free(pool: Any) -> list[int]:
    """Return a host pool's free slots, as its lists have them; none where there is no pool."""
    if pool is None:
        return []
    lists = [pool.free_slots, *(optional(pool, "HostKVCache.release_slots") or [])]
    slots: list[int] = torch.cat(lists).tolist()
    return slots


def _parts(operation: Any) -> Iterator[TierPart]:
    """Yield the parts that a queued operation will move."""
    yield from parts_of("full", operation.device_indices, operation.host_indices)
    for more in operation.pool_transfers or ():
        if more.indices_from_pool is None:
            pool = POOLS[more.name.value]
            yield from parts_of(pool, more.device_indices, more.host_indices)
