"""The device that copies KV between a whole scheduler's pools and its host tier: `CopyEngine` in the place of
`L2TransferEngine`. The run's seed decides how far its transfers come in each round of the event loop.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

from impl.choices import KeyedChoices, once_in, pick
from impl.sglang.parts.stand_ins import Bag
from impl.sglang.server.clients import POLICIES, STORAGES, Config
from impl.sglang.server.tier import TOKEN_BITS, pools_of, stamp
from impl.sglang.tiers.clock import ServerClock
from impl.sglang.tiers.copy_engine import CopyEngine, Event, Stream
from impl.sglang.tiers.storage import BACKUP, FETCH, QUERY, Hashes, Storage, stub_threads

OFTEN = (1, 1, 4, 15)  # in how many of 16 rounds a transfer moves on; the seed picks one
SECONDS = (5, 20, 100)  # that a round takes for waits that end in time; the seed picks one
DEVICE = Bag(Event=Event, Stream=Stream, current_stream=Stream)
FROM_HOST = "a load from the host"


def settings(config: Config) -> dict[str, Any]:
    """Return arguments of a server with this host tier."""
    return {
        "enable_hierarchical_cache": True,
        "hicache_ratio": config.host / 10,
        "hicache_write_policy": POLICIES[config.policy],
        "hicache_io_backend": "direct",
        "hicache_mem_layout": "page_first_direct" if config.states else "layer_first",
    }


class StampedSlots:
    """The stamps of a device pool as numbers, 0 for none; the model has them by slot."""

    def __init__(
        self, size: int, stamps: dict[int, tuple[int, int]], writers: dict[int, str]
    ) -> None:
        self.size = size
        self.stamps = stamps
        self.writers = writers

    def __getitem__(self, slot: int) -> int:
        found = self.stamps.get(slot)
        return 0 if found is None else stamp(*found)

    def __setitem__(self, slot: int, number: int) -> None:
        self.stamps.pop(slot, None)
        self.writers[slot] = FROM_HOST
        if number:
            self.stamps[slot] = number & (1 << TOKEN_BITS) - 1, (number >> TOKEN_BITS) - 1

    def __iter__(self) -> Iterator[int]:
        return (self[slot] for slot in range(self.size))


class PlacedHashes(Hashes):
    """Hashes of pages of a server, whose stamps have the position."""

    def stamps_of(self, tokens: list[int], inside: bool, start: int) -> tuple[int, ...]:
        del inside  # its clients are in no namespace
        return tuple(stamp(token, at) for at, token in enumerate(tokens, start))


def before_storage() -> PlacedHashes:
    """Replace the threads of the storage and the hashes of its pages, before the scheduler has a tree."""
    stub_threads(importlib.import_module("sglang.srt.managers.cache_controller"))
    hashes = PlacedHashes()
    setattr(importlib.import_module("sglang.srt.mem_cache.utils"), "get_native_hash", hashes.of)  # noqa: B010
    return hashes


class FakeTier:
    """Transfers of one scheduler.

    slots: the stamps in a pool of the device of this size, as numbers.
    hashes: of a storage's pages.
    """

    def __init__(
        self,
        scheduler: Any,
        slots: Callable[[str, int], Any],
        seed: int,
        config: Config,
        hashes: PlacedHashes | None,
    ) -> None:
        self.scheduler = scheduler
        cache = scheduler.tree_cache
        allocator = scheduler.token_to_kv_pool_allocator
        cache.load_back_threshold = 1  # of ten tokens, tuned for real texts
        self.counter = cache.cache_controller.layer_done_counter
        self.engine: CopyEngine = cache.cache_controller.l2_transfer_engine
        self.seed = seed
        self.often = pick(KeyedChoices(seed, 7), OFTEN)
        sizes = {"full": allocator.size}
        if scheduler.is_hybrid_swa:
            sizes = {"full": allocator.size_full, "swa": allocator.size_swa}
        self.engine.memory = {}
        self.engine.host = {}
        for pool, entry in zip(pools_of(scheduler), cache.host_pool_group.entries):
            entry.device_pool.pool = pool
            size = 0 if pool == "state" else sizes[pool] + scheduler.page_size
            self.engine.memory[pool] = slots(pool, size)
            self.engine.host[pool] = [0] * entry.host_pool.size

        self.storage: Storage | None = None
        self.clock = ServerClock()
        self.pace = pick(KeyedChoices(seed, 19), SECONDS)
        if hashes is not None:
            self.storage = Storage(cache, self.engine.host, scheduler.page_size, hashes)
            self.engine.storage = self.storage
            if STORAGES[config.storage] == "timeout":
                self.clock.install()
            self.storage.attach(STORAGES[config.storage], POLICIES[config.policy], self._attach)

    def _attach(
        self, backend: str, settings: str, _: Any, how_long: str, policy: str
    ) -> tuple[bool, str]:
        """Attach the storage by the scheduler's own command of an operator."""
        messages: Any = importlib.import_module("sglang.srt.managers.io_struct")
        attach_reply = self.scheduler.attach_hicache_storage_wrapped(
            messages.AttachHiCacheStorageReqInput(
                hicache_storage_backend=backend,
                hicache_storage_backend_extra_config_json=settings,
                hicache_storage_prefetch_policy=how_long,
                hicache_write_policy=policy,
            )
        )
        return attach_reply.success, attach_reply.message

    def _threads(self, now: int, last: bool) -> None:
        """Let the threads of the storage continue, each by a few stops; the backend may lose pages."""
        assert self.storage is not None
        for at, body in enumerate((QUERY, FETCH, BACKUP)):
            choices = KeyedChoices(self.seed, 17, now, at)
            for _ in range(8 if last else choices.upto(self.often)):
                loses = not last and once_in(choices, 8)
                self.storage.go_on(body, choices.upto(1) if loses else -1)

    def round(self, now: int, *, last: bool) -> None:
        """Advance transfers; in the last rounds each completes."""
        self.clock.now += self.pace
        if self.storage is not None:
            self._threads(now, last)
        for load, queue in self.engine.queues.items():
            for at in range(len(queue)):
                if not last and not self._moves(11, now, load, at):
                    break
                self.engine.complete(load)
            job = self.engine.next_to_copy(load)
            if job is not None and self._moves(13, now, load):
                self.engine.copy(job)

    def _moves(self, *about: int) -> bool:
        """Return whether a transfer moves on in a round."""
        return KeyedChoices(self.seed, *about).upto(15) < self.often

    @property
    def rests(self) -> bool:
        """Whether no transfer is in flight and the storage has nothing to do."""
        idle = self.storage is None or self.storage.rests
        return idle and not any(self.engine.queues.values())

    def waits(self, batch: Any) -> None:
        """Wait for the loads that were sent for a batch, as its forward pass does."""
        if batch.hicache_consumer_index >= 0:
            self.counter.events[batch.hicache_consumer_index].finish_event.synchronize()
