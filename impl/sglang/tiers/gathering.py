"""The facts of a release's tree with its host tier: nodes, slots, locks, transfers, records."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

from impl.optional import optional
from impl.sglang.parts.namespaces import elements_of
from impl.sglang.scheduler.live_requests import LiveRequest, LockHolder
from impl.sglang.scheduler.server import Server
from impl.sglang.tiers.api import loose
from impl.sglang.tiers.copy_engine import CopyEngine, parts_of
from impl.sglang.tiers.decode_side import DecodeSide
from impl.sglang.tiers.prefill_side import PrefillSide
from impl.sglang.tiers.storage import BACKUP, FETCH, QUERY, Storage
from reference.states import chained, stamp_after
from reference.tiers.config import TierConfig
from reference.tiers.facts import (
    METADATA, RECORD_ONLY, TierFacts, TierLock, TierNode, TierOperation, TierPart, TierRead, TierRecord,
    TierRequest, TierRequestState, TierSend, TierTransfer, TierUser,
)  # fmt: skip
from reference.token_ids import token_of, tokens_of


_POOLS = {"swa": "swa", "mamba": "state"}  # by PoolName of the release, besides that of full KV


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
        self.release = release
        self.server = server
        self.config = config
        self.storage = storage
        self.cache: Any = server.cache
        self.controller = self.cache.cache_controller
        self.copies = copies
        self.side = side
        self.sends = sends
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
        # prefetches whose slots were seen: they hold nothing at first
        self.staged: set[int] = set()
        self.device_pools = {"full": server.full_pool, "swa": server.swa_pool}
        self.taken: list[tuple[Any, tuple[TierNode, ...]]] = []
        if sends is not None:
            self._note_locks()

    def _note_locks(self) -> None:
        """Have each lock that the tree takes on the device noted with the path that it has then."""
        own = self.cache.lock

        def lock(node: Any, *more: Any, **named: Any) -> Any:
            taken = own(node, *more, **named)
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
            found = self.node(node, parent, start)
            parent, start = found.node, found.end
            yield found

    @property
    def core(self) -> Any:
        """The object that has the nodes."""
        return optional(self.cache, "UnifiedRadixCache.tree_core", self.cache)

    @property
    def root(self) -> int:
        """The root's number by the release."""
        return _id(self.core.root_node)

    def gather(self, reads: tuple[TierRead, ...]) -> TierFacts:
        transfers = tuple(self._transfers())
        operations = self._operations()
        memory = {pool: tuple(self.copies.memory[pool]) for pool in self.kinds}
        return TierFacts(
            tuple(self._nodes()), {pool: self._free(pool) for pool in self.kinds},
            {pool: tuple(_host_free(self.host_pools.get(pool))) for pool in self.kinds}, self._evictable(),
            memory, {pool: tuple(self.copies.host[pool]) for pool in self.kinds}, transfers,
            tuple(self._records()), tuple(self._users()), reads,
            "" if transfers or operations else self._complaint(), loose(self.release.version), operations,
            **(self._kept_for_storage() if self.storage is not None else {}),
            **self._of_requests(),
        )  # fmt: skip

    def _free(self, pool: str) -> tuple[int, ...]:
        if pool == "state":
            return slots_of(self.server.rows.mamba_allocator.free_slots)
        size = self.config.page_size
        pages = self.release.free_pages(self.device_pools[pool])
        return tuple(page * size + at for page in pages for at in range(size))

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
            found = self.node(node, parent, start)
            yield found
            waiting += [(child, found.node, found.end) for child in node.children.values()]

    def node(self, node: Any, parent: int, start: int) -> TierNode:
        """The node, which begins at a position under the node of that number."""
        parts = {pool: node.component_data[kind] for pool, kind in self.kinds.items()}
        return TierNode(
            self.nodes.of(node.id),
            parent,
            start,
            self.stamps(node, start),
            {pool: slots_of(part.value) for pool, part in parts.items()},
            {pool: slots_of(part.host_value) for pool, part in parts.items()},
            {pool: part.lock_ref for pool, part in parts.items()},
            {pool: part.host_lock_ref for pool, part in parts.items()},
            self._mark(node, "write_through_pending_id"),
            self._mark(node, "load_back_pending_id"),
            self._hashed(node.hash_value),
            tokens_of(elements_of(node.key))[len(node.key) :],
        )

    def stamps(self, node: Any, start: int) -> tuple[int, ...]:
        """Return the stamps of the KV of a node that begins at a position."""
        del start
        return tuple(map(token_of, elements_of(node.key)))

    def _hashed(self, hashes: Sequence[str] | None) -> tuple[int, ...] | None:
        """The text that a node's hashes stand for; of two that do not follow each other both."""
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
        for name, holder in self.server.lock_holders.items():
            req = holder.req
            lock = optional(req, "Req.lock") or optional(req, "Req.lock_receipt")
            key = (
                id(lock) if lock is not None else (name, _id(req.last_node), req.swa_uuid_for_lock)
            )
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
        if self.storage is not None:
            for request, asked in self.cache.ongoing_prefetch.items():
                lock = asked.anchor_lock_params
                yield self._user(
                    f"prefetch of {request.rid}", True, asked.anchor_node_id, id(lock), lock
                )
            for node, lock in self.cache.ongoing_backup.values():
                yield self._user(f"backup of {self.nodes.of(node)}", True, node, id(lock), lock)

        if (side := self.side or self.sends) is not None:
            yield from self._of_role(side)

    def _of_role(self, side: DecodeSide | PrefillSide) -> Iterator[TierUser]:
        holders = [(name, turn.req.lock) for name, turn in side.arrivals.items()]
        slots = self.release.slots(self.cache).items()
        holders += [(_session(name), slot.lock) for name, slot in slots]
        for name, lock in holders:
            if lock is not None:
                user = self._user(name, False, lock.node, id(lock), lock)
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
                True,
                job.copied,
                job.completed,
                ack is None,
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
            named = optional(record, "_OngoingWriteThrough.publish_node_ids") or [_id(record[0])]
            yield TierRecord(False, self.nodes.of(ack), tuple(map(self.nodes.of, named)))
        for ack, record in self.cache.ongoing_load_back.items():
            yield TierRecord(True, self.nodes.of(ack), (self.nodes.of(_id(record[0])),))

    def _holders_of_states(self) -> Iterator[TierRequest]:
        if "state" not in self.kinds:
            return
        for name, holder in self.server.lock_holders.items():
            if holder.req.kv.holds_mamba:
                slot = int(holder.req.kv.mamba_pool_idx)
                yield TierRequest(
                    name, TierRequestState.HOLDS, -1, -1, {"state": (slot,)}, {}, {}
                )

    # -- a storage behind the host ------------------------------------------------------------------

    def _operations(self) -> tuple[TierOperation, ...]:
        """Those that are in a queue, at a thread, or of which the cache has a record."""
        if self.storage is None:
            return ()
        states: dict[int, tuple[Any, str]] = {}
        for operation, state in self._at_work():
            states.setdefault(id(operation), (operation, state))
        for asked in self.cache.ongoing_prefetch.values():
            states.setdefault(id(asked.operation), (asked.operation, RECORD_ONLY))
        found = [self._operation(*each) for each in states.values()]
        there = {operation.id for operation, _ in states.values()}
        for number in self.cache.ongoing_backup.keys() - there:
            found.append(TierOperation(self.jobs.of(("backup", number)), True, "", RECORD_ONLY, {}, {}))
        return tuple(sorted(found))

    def _at_work(self) -> Iterator[tuple[Any, str]]:
        assert self.storage is not None
        controller = self.controller
        for name, waits, body, works in (
            ("prefetch_queue", "to ask", QUERY, "asks"),
            ("prefetch_buffer", "to read", FETCH, "reads"),
            ("backup_queue", "to write", BACKUP, "writes"),
        ):
            if (operation := self.storage.thread(body).operation) is not None:
                yield operation, works
            yield from (
                (operation, waits) for operation in getattr(controller, name).queue if operation
            )
        yield from ((operation, "answered") for operation in controller.prefetch_hit_queue.queue)
        yield from ((ack.operation, "done") for ack in controller.ack_prefetch_queue.queue)
        yield from ((operation, "done") for operation in controller.ack_backup_queue.queue)

    def _operation(self, operation: Any, state: str) -> TierOperation:
        assert self.storage is not None
        handle = optional(operation, "PrefetchOperation.handle")
        host = operation.host_indices
        if handle is None:
            slots = _of_pools(host, operation.pool_transfers)
            done = self.storage.thread(BACKUP).done if state == "writes" else set()
            moving = {
                pool: tuple(slot for slot in own if (pool, slot) not in done)
                for pool, own in slots.items()
                if state != "done"
            }
            number = self.jobs.of(("backup", operation.id))
            return TierOperation(number, True, "", state, slots, moving)
        asked = self.cache.ongoing_prefetch.get(handle)
        if asked is not None and asked.operation is operation:
            transfers = (transfer for each in asked.comp_xfers.values() for transfer in each)
            slots = _of_pools(asked.host_indices, transfers)
        elif host is None:
            slots = {}
        else:  # what it has not read is freed when it is over
            left = () if operation.pool_transfers_done else operation.pool_transfers
            slots = _of_pools(host[operation.completed_tokens :], left)
        call = self.storage.thread(FETCH).call if state == "reads" else None
        moving = {pool: tuple(own) for pool, own in (call or {}).items()}
        number = self.jobs.of(id(operation), operation)
        if host is not None and number not in self.staged:
            self.staged.add(number)
            for pool, own in slots.items():
                for slot in own:
                    self.copies.host[pool][slot] = 0
        return TierOperation(number, False, handle.rid, state, slots, moving)

    def _kept_for_storage(self) -> dict[str, Any]:
        assert self.storage is not None
        cache = self.cache
        controller = self.controller
        queues = (
            controller.host_mem_release_queue,
            *controller.extra_host_mem_release_queues.values(),
        )
        returned = {
            pool: tuple(slot for slots in each.queue for slot in slots.tolist())
            for pool, each in zip(self.kinds, queues, strict=True)
        }
        asked = {*cache.ongoing_prefetch, *cache.prefetch_loaded_tokens_by_reqid}
        return {
            "stored": tuple(self.storage.written),
            "returned": returned,
            "asked": tuple(sorted(request.rid for request in asked)),
            "reserved": int(controller.prefetch_tokens_occupied),
        }

    # -- a server that only decodes ----------------------------------------------------------------

    def _of_requests(self) -> dict[str, Any]:
        """Return the facts of requests of a server with one role, or of holders of recurrent states."""
        if self.side is not None:
            return self._received()
        if self.sends is not None:
            return self._sent(self.sends)
        return {"requests": tuple(self._holders_of_states())}

    def _received(self) -> dict[str, Any]:
        """Its requests, and transfers that are under way for requests that are gone."""
        assert self.side is not None
        side = self.side
        found = []
        rooms = set()
        states = {id(req): state for req, state in side.where()}
        first = {id(each.req): each.metadata_buffer_index for each in self.side.transfers.queue}
        first |= {id(entry[0].req): entry[3] for entry in side.transfers._deferred_releases}
        for name, turn in side.arrivals.items():
            req = turn.req
            room = turn.req.bootstrap_room
            rooms.add(room)
            holds = req.kv is not None and req.kv.holds_kv
            found.append(TierRequest(
                name, states.get(id(req), TierRequestState.NOWHERE), req.kv.req_pool_idx if holds else -1,
                first.get(id(req), -1), self._own(req) if holds else {}, self._retracted(req),
                self._writing(room),
            ))  # fmt: skip
        for name, slot, state in side.idle():
            row = -1
            own = {}
            kept = {}
            if slot is not None and slot.kv.holds_kv:
                row = slot.kv.req_pool_idx
                own = self._own(slot)
                kept = self._retracted(slot)
            if slot is not None or state is TierRequestState.BUSY:
                found.append(TierRequest(_session(name), state, row, -1, own, kept, {}))
        for room, to in side.peers.writing.items():
            if room not in rooms:
                found.append(TierRequest(to.name, TierRequestState.GONE, -1, -1, {}, {}, self._writing(room)))
        return {
            "requests": tuple(found),
            "free_rows": tuple(self.server.rows.free_slots),
            "free_first": tuple(side.first.free_slots),
        }

    def _sent(self, side: PrefillSide) -> dict[str, Any]:
        """The requests of a server that only prefills, and what is still to be read for their decode
        servers."""
        states: dict[int, TierRequestState] = {}
        for req, state in side.where():
            states.setdefault(id(req), state)
        found = []
        for name, turn in side.arrivals.items():
            req = turn.req
            holds = req.kv.holds_kv
            found.append(TierRequest(
                name, states.get(id(req), TierRequestState.NOWHERE), req.kv.req_pool_idx if holds else -1,
                req.metadata_buffer_index, self._own(req) if holds else {}, {}, {}, side.sender(turn).due,
            ))  # fmt: skip
        memory = self.copies.memory
        sends = []
        for sender in side.senders.by_room.values():
            for part in sender.parts:
                if part.pool == METADATA:
                    stamps = [side.rows_of_metadata.room_in(slot) for slot in part.slots]
                else:
                    # what is handed in before it is written may be read before
                    own = memory[part.pool]
                    stamps = [0 if slot in part.early else own[slot] for slot in part.slots]
                sends.append(TierSend(
                    part.job, sender.name, part.pool, part.position, tuple(part.slots), tuple(part.wanted),
                    tuple(stamps[: len(part.wanted)]),
                ))  # fmt: skip
        begun = {rid.partition("#")[0] for rid in side.loop.disagg_prefill_pending_chunk_rids}
        return {
            "requests": tuple(found),
            "free_rows": tuple(self.server.rows.free_slots),
            "free_first": tuple(side.rows_of_metadata.free_slots),
            "sends": tuple(sends),
            "begun": tuple(sorted(begun)),
            "taken": self._locks_taken(side),
        }

    def _locks_taken(self, side: PrefillSide) -> tuple[TierLock, ...]:
        """The locks of the last command that a request still has."""
        held = {id(turn.req.lock) for turn in side.arrivals.values()}
        taken = [each for each in self.taken if id(each[0]) in held]
        self.taken = []
        return tuple(TierLock(self.locks.of(id(lock), lock), path) for lock, path in taken)

    def _own(self, req: Any) -> dict[str, tuple[int, ...]]:
        """Device slots of a request that the tree has not: of whole pages as the pool hands them out."""
        kv = req.kv
        size = self.config.page_size
        cells = self.server.rows.req_to_token[kv.req_pool_idx, : kv.kv_allocated_len].tolist()
        pages = dict.fromkeys(cell // size for cell in cells[kv.cache_protected_len :])
        found = {"full": tuple(page * size + at for page in pages for at in range(size))}
        if self.config.window is not None:
            mapping = self.server.allocator.full_to_swa_index_mapping
            mapped = (int(mapping[cell]) for cell in cells[kv.cache_protected_len :])
            swa = dict.fromkeys(slot // size for slot in mapped if slot > 0)
            found["swa"] = tuple(page * size + at for page in swa for at in range(size))
        return found

    def _writing(self, room: int) -> dict[str, tuple[int, ...]]:
        assert self.side is not None
        to = self.side.peers.writing.get(room)
        found: dict[str, list[int]] = {}
        if to is not None:
            for pool, slot, _ in to.slots:
                found.setdefault(pool, []).append(slot)
        return {pool: tuple(slots) for pool, slots in found.items()}

    def _retracted(self, req: Any) -> dict[str, tuple[int, ...]]:
        backup = optional(req.kv, "ReqKvInfo.retraction_backup")
        if backup is None or backup.host_indices is None:
            return {}
        return _of_pools(backup.host_indices, backup.pool_transfers)

    def decoding(self, turn: LiveRequest, end: int) -> Iterator[TierRead]:
        """Yield what the query at position `end` finds of the text before it."""
        row = self.server.rows.req_to_token[turn.req.kv.req_pool_idx, :end].tolist()
        for position, (slot, wanted) in enumerate(zip(row, turn.text)):
            yield TierRead(
                turn.name, "full", position, slot, self.copies.memory["full"][slot], wanted
            )
            if self.config.window is not None and position > end - self.config.window:
                swa = int(self.server.allocator.full_to_swa_index_mapping[slot])
                found = self.copies.memory["swa"][swa] if swa > 0 else 0
                yield TierRead(turn.name, "swa", position, swa, found, wanted)

    # -- reads and checks -------------------------------------------------------------------------

    def reads(self, holder: LockHolder) -> Iterator[TierRead]:
        """Yield what the forward pass of a request finds of its prefix: full KV, and SWA KV in its window."""
        name = next((n for n, each in self.server.lock_holders.items() if each is holder), "")
        slots = holder.slots.tolist()
        window = self.config.window
        for position, (slot, wanted) in enumerate(zip(slots, holder.tokens)):
            yield TierRead(name, "full", position, slot, self.copies.memory["full"][slot], wanted)
            if window is not None and position >= len(slots) - window:
                swa = int(self.server.allocator.full_to_swa_index_mapping[slot])
                found = self.copies.memory["swa"][swa] if swa > 0 else 0
                yield TierRead(name, "swa", position, swa, found, wanted)
        if "state" in self.kinds and (end := len(slots)):
            slot = self._state_behind(holder.req)
            found = self.copies.memory["state"][slot] if slot else 0
            yield TierRead(
                name, "state", end - 1, slot, found, stamp_after(chained(holder.tokens), end)
            )

    def _state_behind(self, req: Any) -> int:
        """The slot from which a request goes on behind its prefix: its own, where one was loaded for it, else
        that of the node that it has matched; 0 for none."""
        if req.kv.holds_mamba:
            return int(req.kv.mamba_pool_idx)
        own = self.core.get_component_device_value(_id(req.last_node), self.kinds["state"])
        return 0 if own is None else int(own)

    def _complaint(self) -> str:
        """Return the complaint of the release's own check at rest."""
        try:
            self.cache.sanity_check()
        except AssertionError as error:
            return " ".join(str(error).split())[:300]
        return ""


def _session(name: str) -> str:
    return f"session {name}"


def _id(node: Any) -> int:
    """A node's number by the release; up to 0.5.16 handles are nodes."""
    number: int = optional(node, "UnifiedTreeNode.id", node)
    return number


def slots_of(value: Any) -> tuple[int, ...]:
    return () if value is None else tuple(value.tolist())


def _host_free(pool: Any) -> list[int]:
    """A host pool's free slots, as its lists have them; none where there is no pool."""
    if pool is None:
        return []
    lists = [pool.free_slots, *(optional(pool, "HostKVCache.release_slots") or [])]
    slots: list[int] = torch.cat(lists).tolist()
    return slots


def _of_pools(full: Any, transfers: Iterable[Any] | None) -> dict[str, tuple[int, ...]]:
    """Host slots of an operation of the storage, by pool."""
    slots = {"full": slots_of(full)}
    for each in transfers or ():
        if each.indices_from_pool is None and each.host_indices is not None:
            slots["swa"] = slots_of(each.host_indices)
    return slots


def _parts(operation: Any) -> Iterator[TierPart]:
    """Yield the parts that a queued operation will move."""
    yield from parts_of("full", operation.device_indices, operation.host_indices)
    for more in operation.pool_transfers or ():
        if more.indices_from_pool is None:
            pool = _POOLS[more.name.value]
            yield from parts_of(pool, more.device_indices, more.host_indices)
