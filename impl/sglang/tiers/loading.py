"""A release with its host tier, loaded alone, and what its assembler of pools makes."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar

from impl.adapter import UnusableImplementation
from impl.loading.function_cuts import cut
from impl.sglang.parts import stand_ins
from impl.sglang.parts.aborts import Aborts
from impl.sglang.parts.modules import ASSEMBLER, WITH_TIERS, install
from impl.sglang.parts.stand_ins import Bag
from impl.sglang.releases.catalogue import TABLE, supported_release
from impl.sglang.releases.v0_5_15_to_21 import Unified
from impl.sglang.releases.variants import variant
from impl.sglang.tiers.copy_engine import CopyEngine, Event, Stream
from impl.sglang.tiers.api import FIRST_IN_RUST, FIRST_RELEASE, FIRST_WITH_STATES
from impl.sglang.tiers.clock import ServerClock
from impl.sglang.tiers.decode_side import FIRST_THAT_RECEIVES
from impl.sglang.tiers.prefill_side import FIRST_THAT_SENDS
from impl.sglang.tiers.queue_utilities import utilities
from impl.sglang.tiers.storage import FIRST_WITH_STORAGE, Hashes, stub_threads
from impl.stand_ins import accepted_arguments
from reference.geometry import Geometry
from reference.tiers.config import TierConfig

_CACHE = "sglang.srt.mem_cache"


class _Tiered(Unified):
    """The changes of a host tier in a release: its tree is the unified one, and the tier is loaded with
    it."""

    stores: ClassVar[bool] = False  # a storage behind the host is driven
    receives: ClassVar[bool] = False  # a server that only decodes is driven
    sends: ClassVar[bool] = False  # a server that only prefills is driven
    keeps_states: ClassVar[bool] = False  # recurrent state is driven
    files: Path
    clock: ServerClock
    hashes: Hashes
    policy: Path
    scheduler_file: Path
    prefill_aborts: Aborts

    @classmethod
    def is_unified(cls, geometry: Geometry) -> bool:
        return geometry.tree or cls.receives

    def _install(self, root: Path) -> None:
        self.files = root
        provided = stand_ins.stand_ins_by_module()
        provided[ASSEMBLER] = {"attach_hybrid_pool_to_unified_cache": _attach}
        provided["sglang.srt.disaggregation.utils"] |= utilities()
        install(root, provided, modules=WITH_TIERS)

    def _import(self, root: Path) -> None:
        super()._import(root)
        load = importlib.import_module
        controller: Any = load("sglang.srt.managers.cache_controller")
        controller.device_module = Bag(Event=Event, Stream=Stream, current_stream=Stream)
        controller.L2TransferEngine = CopyEngine
        stub_threads(controller)
        self.clock = ServerClock()
        self.clock.install()
        self.hashes = Hashes()
        utils: Any = load(f"{_CACHE}.utils")
        utils.get_native_hash = self.hashes.of
        self.unified.atexit = Bag(register=lambda _: None)
        self.base = load(f"{_CACHE}.base_prefix_cache")
        managers = root / "sglang/srt/managers"
        self.policy = managers / "schedule_policy.py"
        self.scheduler_file = managers / "scheduler.py"
        if self.sends:
            self.prefill_aborts = Aborts(root, self, prefills=True)

    def admission(self, cache: Any) -> Callable[..., Any]:
        """Return PrefillAdder._lock_node, which holds a node while a load is prepared."""
        lock = _function(self.policy, "PrefillAdder._lock_node")
        assert lock is not None
        return partial(contextmanager(lock), Bag(tree_cache=cache))

    def prefetching(self, cache: Any) -> Callable[[Any], Any]:
        """Return Scheduler._prefetch_kvcache, which asks the storage for a request that waits."""
        ask = _function(self.scheduler_file, "Scheduler._prefetch_kvcache")
        assert ask is not None
        return partial(
            ask, Bag(tree_cache=cache, enable_hicache_storage=True, enable_lmcache=False)
        )


def tiered_release(spec: str, core: str = "") -> Any:
    """Return the release with its host tier, with the core of its tree in Rust where `core` is "rust";
    raises UnusableImplementation where it is not driven so.

    spec: as `supported_release` takes it.
    """
    release = supported_release(spec)
    order = list(TABLE)
    version = release.version
    if core:
        first_release = FIRST_IN_RUST
        before = "its locks on SWA KV and on the host break, which are not told"
    else:
        first_release = FIRST_RELEASE
        before = "there is no mem_cache/l2_transfer.py"
    if order.index(version) < order.index(first_release):
        way = f"+{core}+hicache" if core else "+hicache"
        raise UnusableImplementation(
            f"sglang {version}{way}: driven from {first_release} on; before {before}"
        )
    stores = order.index(version) >= order.index(FIRST_WITH_STORAGE)
    receives = order.index(version) >= order.index(FIRST_THAT_RECEIVES)
    sends = order.index(version) >= order.index(FIRST_THAT_SENDS)
    states = order.index(version) >= order.index(FIRST_WITH_STATES)
    if core:
        release = variant(release, core)
    facts = {
        "__doc__": release.__doc__,
        "stores": stores,
        "receives": receives,
        "sends": sends,
        "keeps_states": states,
    }
    return type(f"Tiered{release.__name__}", (_Tiered, release), facts)


def _host_pool(base: Any, slots: int, page_size: int) -> Any:
    """Return a release's host pool without memory: only its allocator."""

    def no_memory(self: Any) -> None:
        self.page_size = page_size
        self.size = slots
        self.page_num = slots // page_size
        self.device = "cpu"
        self.layout = "layer_first"
        self.layer_num = 1
        self.size_per_token = 1
        self.dcp_size = 1
        self.dcp_rank = 0
        self.pin_memory = False
        self.device_pool = None
        self.can_use_write_back_jit = False
        self.lock = threading.RLock()
        self.clear()

    kind: Any = type("HostPool", (base,), {"__init__": no_memory})
    kind.__abstractmethods__ = frozenset()
    return kind()


def _make_object(kind: Any, **values: Any) -> Any:
    """Return an object of a release's class, of those arguments that it takes."""
    return kind(**accepted_arguments(kind, values))


def _attach(cache: Any, params: Any, server_args: Any, *, load_cache_event: Any, **_: Any) -> None:
    """Build what `attach_hybrid_pool_to_unified_cache` does for full attention, and for that with a
    window."""
    load = importlib.import_module
    config = server_args.tiers
    assert isinstance(config, TierConfig)
    host = load(f"{_CACHE}.pool_host")
    names = load(f"{_CACHE}.hicache_storage").PoolName
    group = host if hasattr(host, "HostPoolGroup") else load(f"{_CACHE}.memory_pool_host")
    kinds = load(f"{_CACHE}.unified_radix_cache").ComponentType
    allocator = params.token_to_kv_pool_allocator
    page = params.page_size

    def counter(*_: Any) -> None:
        """Register nothing: no layer waits on this device."""

    device = {
        pool: Bag(pool=pool, device="cpu", layer_num=1, register_layer_transfer_counter=counter)
        for pool in config.pools
    }
    kv = allocator.get_kvcache()
    if kv is None:
        kv = allocator._kvcache = Bag()
    kv.device = "cpu"
    kv.layer_num = 1
    kv.register_layer_transfer_counter = counter
    pools = {
        pool: _host_pool(host.HostKVCache, config.host_slots(pool), config.slots_of_page(pool))
        for pool in config.pools
    }
    kind = group.PoolEntry
    entries = [
        _make_object(
            kind,
            name=names.KV,
            host_pool=pools["full"],
            device_pool=device["full"],
            layer_mapper=lambda _: 0,
            is_primary_index_anchor=True,
        )
    ]
    if config.window is not None:
        kv.full_kv_pool = device["full"]
        kv.swa_kv_pool = device["swa"]
        swa = allocator.swa_attn_allocator
        entries.append(_make_object(
            kind, name=names.SWA, host_pool=pools["swa"], device_pool=device["swa"], layer_mapper=lambda _: 0,
            host_evict_fn=lambda n: cache.evict_host(n, kinds.SWA), device_alloc_fn=swa.alloc,
            device_evict_fn=_room(cache, server_args.files, "swa", "swa_num_tokens"), device_free_fn=swa.free,
        ))  # fmt: skip
    if config.states:
        states = cache.req_to_token_pool.mamba_allocator
        entries.append(_make_object(
            kind, name=names.MAMBA, host_pool=pools["state"], device_pool=device["state"],
            layer_mapper=lambda _: 0, device_alloc_fn=states.alloc,
            host_evict_fn=lambda n: cache.evict_host(n, kinds.MAMBA),
            device_evict_fn=_room(cache, server_args.files, "mamba", "mamba_num"), device_free_fn=states.free,
        ))  # fmt: skip
    cache.host_pool_group = group.HostPoolGroup(entries)
    controller = load(f"{_CACHE}.hybrid_cache.hybrid_cache_controller").HybridCacheController
    cache.cache_controller = _make_object(
        controller, token_to_kv_pool_allocator=allocator, mem_pool_host=cache.host_pool_group, page_size=page,
        tp_group=None, load_cache_event=load_cache_event, write_policy=config.policy, io_backend="direct",
        transfer_layer_id_max=1, transfer_layer_num=1,
    )  # fmt: skip
    of_pools = {"full": kinds.FULL, "swa": kinds.SWA, "state": kinds.MAMBA}
    for pool in config.pools:
        name = "mamba_pool_host" if pool == "state" else f"{pool}_kv_pool_host"
        setattr(cache, name, pools[pool])
        setattr(cache.components[of_pools[pool]], f"_{name}", pools[pool])


@lru_cache(maxsize=8)
def _function(file: Path, name: str) -> Callable[..., Any] | None:
    """Return a function of a release's file, or `Class.name`; None where it is not there."""
    env = {"get_memory": lambda: stand_ins.SERVER_ARGS}
    return cut(file, frozenset({name}), env).get(name.rpartition(".")[2])


def _room(cache: Any, files: Path, kind: str, parameter: str) -> Callable[[int], Any]:
    """Return the function that makes room for SWA KV, or a state, that is loaded back."""
    file = files.joinpath(*ASSEMBLER.split(".")).with_suffix(".py")
    if (own_function := _function(file, f"_evict_{kind}_for_device_alloc")) is not None:
        return partial(own_function, cache)
    params = importlib.import_module(f"{_CACHE}.base_prefix_cache").EvictParams
    return lambda n: cache.evict(params(**{parameter: n}))
