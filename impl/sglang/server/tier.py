"""The host tier of a whole scheduler (HiCache): what the watcher notes of it.

When the scheduler has polled its transfers, and when it has decided on a batch, the log gets the tree's facts
(reference.tiers.facts), if they have changed: nodes, slots, locks, transfers and records. A new lock is noted
with the path that it was taken on. Every node and slot is looked at in every round, so this is for tests.
"""

from __future__ import annotations

import functools
import importlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from impl.sglang.parts.namespaces import elements_of
from impl.sglang.parts.tracking import buffers_of
from impl.sglang.releases.v0_5_10_to_14 import Release0510
from impl.sglang.server.events import Event, TierHeader, Tiered
from impl.sglang.server.tried_releases import TIERS
from impl.sglang.tiers.copy_engine import CopyEngine, parts_of
from impl.sglang.tiers.gathering import Gatherer
from impl.sglang.tiers.rust_gathering import RustGatherer
from reference.tiers.config import MAX_SLOTS
from reference.tiers.facts import TierFacts, TierNode, TierPart, TierRequest, TierRequestState, TierUser

_PATH = "kvspec_path"  # an attribute of a lock's receipt: the nodes that it was taken on
TOKEN_BITS = 20  # of a stamp


def stamp(token: int, position: int) -> int:
    """Return the stamp of a token's KV at a position."""
    return (position + 1) << TOKEN_BITS | token


def has_tier(scheduler: Any, release: Release0510) -> bool:
    """Return whether the scheduler has a host tier that can be looked at: one of a test's size, and with
    states only what the clauses know."""
    tried = release.version in TIERS and bool(scheduler.enable_hierarchical_cache)
    tree = scheduler.tree_cache
    if not tried or (tree.supports_mamba() and (scheduler.page_size > 1 or tree.enable_storage)):
        return False
    sizes = [entry.host_pool.size for entry in tree.host_pool_group.entries]
    return bool(max(*sizes, scheduler.token_to_kv_pool_allocator.size) <= MAX_SLOTS)


def header(scheduler: Any) -> TierHeader:
    """Return the header of a log for the tier. Pools in tokens."""
    tree = scheduler.tree_cache
    sizes = dict(zip(pools_of(scheduler), (e.host_pool.size for e in tree.host_pool_group.entries)))
    waits = tree.prefetch_stop_policy if tree.enable_storage else ""
    policy = tree.cache_controller.write_policy
    return TierHeader(sizes["full"], sizes.get("swa", 0), policy, waits, sizes.get("state", 0))


def pools_of(scheduler: Any) -> tuple[str, ...]:
    """Return the pools of both tiers, in the order of the host's."""
    exists = {
        "full": True, "swa": scheduler.is_hybrid_swa, "state": scheduler.tree_cache.supports_mamba(),
    }  # fmt: skip
    return tuple(pool for pool, is_there in exists.items() if is_there)


class _Submitted:
    """A transfer that the release's own engine has; its KV has moved when its event says so."""

    def __init__(self, load: bool, parts: list[TierPart], finish: Any) -> None:
        self.load = load
        self.parts = parts
        self.finish = finish

    @property
    def completed(self) -> bool:
        return bool(self.finish.query())

    copied = completed


class _Noted:
    """The release's own copy engine, watched: its transfers, in the shape of ours.

    pools: the device's pool, its slots and the host's, by name; what slots hold is not known.
    """

    def __init__(self, engine: Any, pools: dict[str, tuple[Any, int, int]]) -> None:
        self.queues: dict[bool, deque[_Submitted]] = {False: deque(), True: deque()}
        self.completed: list[_Submitted] = []
        self.memory = {pool: [0] * device for pool, (_, device, _) in pools.items()}
        self.host = {pool: [0] * host for pool, (_, _, host) in pools.items()}
        self._pools = [(pool, of) for pool, (of, _, _) in pools.items()]
        for load, name in ((False, "submit_device_to_host"), (True, "submit_host_to_device")):
            setattr(engine, name, self._noting(getattr(engine, name), load))

    def _noting(self, submit: Callable[..., Any], load: bool) -> Callable[..., Any]:
        def noting(transfers: Iterable[Any], *more: Any, **named: Any) -> Any:
            transfer_list = [*transfers]
            done = submit(transfer_list, *more, **named)
            parts = [
                part
                for each in transfer_list
                for pool, of in self._pools
                if each.device_pool is of
                for part in parts_of(pool, each.device_indices, each.host_indices)
            ]
            self.completed.append(_Submitted(load, parts, done.finish_event))
            return done

        return noting

    def clear_targets(self, load: bool, parts: Sequence[TierPart]) -> None:
        """Forget what a queued transfer writes."""


class TierReader(Gatherer):
    """Notes one scheduler's host tier.

    put: has an event written.
    failed: notes that this failed.
    """

    def __init__(
        self,
        scheduler: Any,
        release: Release0510,
        put: Callable[[Event], None],
        failed: Callable[[str, Exception], None],
    ) -> None:
        self.scheduler = scheduler
        self._put = put
        self._failed = failed
        tree = scheduler.tree_cache
        allocator = scheduler.token_to_kv_pool_allocator
        window = scheduler.sliding_window_size if scheduler.is_hybrid_swa else None
        split = window is not None
        pools = {"full": allocator.full_attn_allocator if split else allocator}
        if split:
            pools["swa"] = allocator.swa_attn_allocator
        if "state" in pools_of(scheduler):
            pools["state"] = scheduler.req_to_token_pool.mamba_allocator
        server = SimpleNamespace(
            cache=tree,
            full_pool=pools["full"],
            swa_pool=pools.get("swa"),
            tree=None,
            lock_holders={},
            rows=scheduler.req_to_token_pool,
        )
        copies = tree.cache_controller.l2_transfer_engine
        self.stamped = isinstance(copies, CopyEngine)
        if not self.stamped:
            entries = dict(zip(pools, tree.host_pool_group.entries))
            copies = _Noted(copies, {
                pool: (each.device_pool, pools[pool].size + scheduler.page_size, each.host_pool.size)
                for pool, each in entries.items()
            })  # fmt: skip
        config = SimpleNamespace(window=window, page_size=scheduler.page_size, pools=(*pools,))
        storage = getattr(copies, "storage", None)
        super().__init__(release, server, config, copies, storage)  # type: ignore[arg-type]
        self._last: TierFacts | None = None
        self._batch: Any = None
        self._shown_locks: set[int] = set()  # locks
        self._paths: list[tuple[int, bool, list[TierNode]]] = []
        self._hook()

    def _hook(self) -> None:
        self._hook_locks()
        self.cache.check_hicache_events = self._after(self.cache.check_hicache_events, self.note)

    def _hook_locks(self) -> None:
        core = self.core
        base = importlib.import_module("sglang.srt.mem_cache.base_prefix_cache")
        for name in ("inc_lock_ref", "inc_host_lock_ref"):
            setattr(core, name, self._after(getattr(core, name), self._note_lock))
        kind = base.IncLockRefResult
        kind.to_dec_params = self._after(kind.to_dec_params, _keeps_path)

    def _after(self, call: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
        @functools.wraps(call)
        def noting(*given: Any, **named: Any) -> Any:
            result = call(*given, **named)
            try:
                note(result, *given)
            except Exception as error:
                self._failed(f"tier {call.__name__}", error)
            return result

        return noting

    def _note_lock(self, result: Any, node_id: int, *_: Any) -> None:
        """Note the path that a lock pins, from the root."""
        path = list[Any]()
        start = 0
        found = list[TierNode]()
        node = self.core.node_by_id(node_id)
        while node is not self.core.root_node:
            path.insert(0, node)
            node = node.parent
        for node in path:
            found.append(self.node(node, found[-1].node if found else 0, start))
            start = found[-1].end
        setattr(result, _PATH, found)

    def note(self, batch: Any, *_: Any) -> None:
        """Look at the tree.

        batch: the next one, if the scheduler has decided on it.
        """
        self._paths = []
        self._batch = batch
        facts = self.gather(())
        if facts != self._last or self._paths:
            self._last = facts
            self._put(Tiered(facts, self._paths))
        if self.storage is not None:
            self.storage.written.clear()

    def again(self) -> None:
        """Begin anew: a reader from here on knows neither the tree nor its locks."""
        self._last = None
        self._shown_locks.clear()

    def stamps(self, node: Any, start: int) -> tuple[int, ...]:
        count = len(elements_of(node.key))
        if not self.stamped:
            return (0,) * count
        tokens = list(node.key.token_ids)[:count]  # of a pair the first
        return tuple(stamp(token, at) for at, token in enumerate(tokens, start))

    def _holders_of_states(self) -> Iterator[TierRequest]:
        """Yield running requests and sessions with a state; a turn on its session's state once."""
        if "state" not in self.kinds:
            return
        holders = [(request.rid, request.kv) for request in self._requests() if not request.finished()]
        holders += [(name, slot.kv) for name, slot in self.release.slots(self.cache).items()]
        seen = set[int]()
        for name, kv in holders:
            if kv.holds_mamba and id(kv) not in seen:
                seen.add(id(kv))
                own_slots = int(kv.mamba_pool_idx), *buffers_of(kv)
                yield TierRequest(name, TierRequestState.HOLDS, -1, -1, {"state": own_slots}, {}, {})

    def _evictable(self) -> dict[str, int]:
        return dict.fromkeys(self.kinds, 0)

    def _users(self) -> Iterator[TierUser]:
        yield from super()._users()
        for name, lock in self._holders():
            user = self._user(name, False, lock.node, id(lock), lock)
            only = lock.swa_released or bool(lock.receipt.skipped_lock_components)
            yield user._replace(full_only=only)

    def _holders(self) -> Iterator[tuple[str, Any]]:
        """Yield the requests and sessions with a lock on the tree."""
        seen = set[int]()
        holders = [(request.rid, request) for request in self._requests()]
        for name, each in (*holders, *self.release.slots(self.cache).items()):
            if each.lock is not None and id(each.lock) not in seen:
                seen.add(id(each.lock))
                yield name, each.lock

    def _requests(self) -> list[Any]:
        """Return the requests of all batches and queues."""
        scheduler = self.scheduler
        batches = [scheduler.running_batch, scheduler.last_batch, self._batch]
        batches += [batch for batch, _ in vars(scheduler).get("result_queue", ())]
        requests = [request for batch in batches if batch is not None for request in batch.reqs]
        requests += [scheduler.chunked_req] if scheduler.chunked_req is not None else []
        return [*requests, *scheduler.waiting_queue]

    def _user(self, name: str, host: bool, node: Any, key: Any, lock: Any) -> TierUser:
        user = super()._user(name, host, node, key, lock)
        if user.lock not in self._shown_locks:
            self._shown_locks.add(user.lock)
            path = getattr(getattr(lock, "receipt", lock), _PATH, None)
            if path is not None:
                self._paths.append((user.lock, host, path))
        return user


class RustTierReader(RustGatherer, TierReader):
    """Reads a tree with its core in Rust, which shows no path when a lock is taken."""

    def _hook_locks(self) -> None:
        """Full locks on the device begin at the root, however a path is split. The core tells no others."""


def tier_reader(
    scheduler: Any,
    release: Release0510,
    put: Callable[[Event], None],
    failed: Callable[[str, Exception], None],
) -> TierReader:
    """Return the reader of the scheduler's host tier; see TierReader."""
    rust = scheduler.tree_cache._tree_core_backend == "rust"
    return (RustTierReader if rust else TierReader)(scheduler, release, put, failed)


def _keeps_path(receipt: Any, lock: Any) -> None:
    setattr(receipt, _PATH, getattr(lock, _PATH))
