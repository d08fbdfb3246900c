"""Pools, caches and the objects around them, made of a release's own classes as 0.5.10 does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from impl.adapter import UnusableImplementation
from impl.lazy import torch
from impl.sglang.parts import stand_ins, trees
from impl.sglang.parts.stand_ins import SERVER_ARGS
from impl.sglang.releases.loaded_modules import LoadedModules
from reference.geometry import Geometry


class ReleasePools(LoadedModules):
    """The part of a release's class that makes what a server has."""

    # The paged two-pool allocator declines an extend that leaves no page to spare per entry.
    spare_page_per_lane = True
    # Whether it can be driven with recurrent state (make_state_rows). The tree then keeps only the state at
    # the end of a text.
    recurrent = False

    def has_states(self, rows: Any) -> bool:
        """Return whether a server's rows lead to slots of recurrent state that are known here."""
        del rows
        return False

    @classmethod
    def is_unified(cls, geometry: Geometry) -> bool:
        """Return whether a server of these sizes has one cache, UnifiedRadixCache, with the sessions in
        it."""
        del geometry
        return False

    def make_allocator(self, full: int, swa: int | None, page_size: int, need_sort: bool) -> Any:
        """Return the allocator of one pool, or of two. Raises UnusableImplementation on a GPU if page_size is
        not a power of two: the kernels are compiled for those alone.

        full, swa: their sizes (tokens).
        need_sort: pages are allocated in ascending order.
        """
        if page_size & (page_size - 1) and stand_ins.on_gpu():
            raise UnusableImplementation(
                f"sglang {self.version}: its kernels on a GPU take pages of a power of two, not {page_size}"
            )
        kind: dict[str, Any] = {
            "dtype": torch.float16,
            "device": SERVER_ARGS.device,
            "need_sort": need_sort,
        }
        if swa is not None:
            pool = stand_ins.kv_pool(self.swa_pool.SWAKVPool)
            return self.swa_allocator.SWATokenToKVPoolAllocator(
                size=full, size_swa=swa, page_size=page_size, kvcache=pool, **kind
            )
        if page_size == 1:
            return self.token_allocator.TokenToKVPoolAllocator(full, kvcache=None, **kind)
        return self.allocator.PagedTokenToKVPoolAllocator(full, page_size, kvcache=None, **kind)

    def make_rows(self, rows: int, width: int) -> Any:
        return self.memory_pool.ReqToTokenPool(
            size=rows, max_context_len=width, device=SERVER_ARGS.device, enable_memory_saver=False
        )

    def make_state_rows(self, geometry: Geometry) -> Any:
        """Make the pool of rows with slots of recurrent state, in releases where these are driven."""
        raise NotImplementedError(f"{self.version} with {geometry.states} states")

    def make_tracker(self, cache: Any) -> Any:
        """Make the object that processes results of decode batches with tracked states."""
        raise NotImplementedError(f"{self.version} with states that are tracked")

    def verify(self, batch: Any, accepted: Sequence[int]) -> list[tuple[int, int]]:
        """Return what a verify round keeps of each entry for the tree, on a server that tracks states."""
        del batch, accepted
        raise NotImplementedError(f"sglang {self.version}: verify rounds with tracked states")

    def make_cache(self, rows: Any, allocator: Any, geometry: Geometry) -> Any:
        """Make the release's session cache around its radix tree, or around its chunk cache without one."""
        params = self._cache_params(rows, allocator, geometry)
        windowed = geometry.window is not None
        if geometry.tree:
            radix = self.swa_radix_cache.SWARadixCache if windowed else self.radix_cache.RadixCache
            return self.session_cache_class(radix(params))
        chunk = self.chunk_cache.SWAChunkCache if windowed else self.chunk_cache.ChunkCache
        return self.session_cache_class(chunk(params))

    def _cache_params(self, rows: Any, allocator: Any, geometry: Geometry, **more: Any) -> Any:
        return self.params.CacheInitParams(
            disable=not geometry.tree,
            req_to_token_pool=rows,
            token_to_kv_pool_allocator=allocator,
            page_size=geometry.page_size,
            sliding_window_size=geometry.window,
            is_eagle=geometry.bigram,
            **more,
        )

    def make_tree(self, cache: Any, allocator: Any, geometry: Geometry) -> Any:
        """Return the radix tree in `cache` (impl.sglang.parts.trees), None where there is none."""
        if not geometry.tree:
            return None
        if geometry.window is None:
            return trees.ReleaseTree(cache, None)
        return trees.SWARadixTree(cache, allocator.full_to_swa_index_mapping)

    def make_scheduler(self, rows: Any, allocator: Any, cache: Any, geometry: Geometry) -> Any:
        """Return the release's memory checks on a stand-in of its scheduler."""
        return self.scheduler_class(self.batch.ScheduleBatch, rows, allocator, cache, geometry)

    def make_controller(self, cache: Any) -> Any:
        return self.controller.SessionController(cache)
