"""0.5.15 to 0.5.22: on the way to one cache for all, and to one record of what a request holds.

Without a tree the sessions are around a chunk cache, as before; the unified tree has them in it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from impl.adapter import Cursors
from impl.loading import renamed
from impl.loading.function_cuts import cut
from impl.sglang.parts import stand_ins, trees
from impl.sglang.releases.v0_5_10_to_14 import Release0510, Release0511, Release0514
from reference.geometry import Geometry


class Unified(Release0511):
    """A release whose server may have UnifiedRadixCache, the tree that has the sessions in it."""

    tree: ClassVar[type[trees.ComponentTree]] = trees.ComponentTree
    unified: Any

    def _modules(self, load: Any) -> None:
        super()._modules(load)
        self.unified = load("sglang.srt.mem_cache.unified_radix_cache")

    @classmethod
    def is_unified(cls, geometry: Geometry) -> bool:
        return geometry.tree and geometry.window is not None  # mem_cache/registry.py

    def make_cache(self, rows: Any, allocator: Any, geometry: Geometry) -> Any:
        if not self.is_unified(geometry):
            return super().make_cache(rows, allocator, geometry)
        kinds = self.unified.ComponentType
        parts = (kinds.FULL,) if geometry.window is None else (kinds.FULL, kinds.SWA)
        parts += (kinds.MAMBA,) if geometry.states else ()
        tracks = {"enable_mamba_extra_buffer": geometry.tracks} if geometry.states else {}
        params = self._cache_params(rows, allocator, geometry, tree_components=parts, **tracks)
        return self.unified.UnifiedRadixCache(params)

    def make_tree(self, cache: Any, allocator: Any, geometry: Geometry) -> Any:
        if not geometry.tree or not self.is_unified(geometry):
            return super().make_tree(cache, allocator, geometry)
        mapping = None if geometry.window is None else allocator.full_to_swa_index_mapping
        return self.tree(cache, mapping)

    def slot(self, cache: Any, session_id: str) -> Any:
        return super().slot(self._sessions(cache), session_id)

    def _sessions(self, cache: Any) -> Any:
        """Return the owner of the slots: the tree's sessions, or the sessions around a cache."""
        return cache.session if isinstance(cache, self.unified.UnifiedRadixCache) else cache


class Release0515(Release0514):
    """0.5.15. The result of a verify round commits what it accepted; a window is evicted up to max(W, P)."""

    version = "0.5.15"
    spec_file = "sglang/srt/speculative/eagle_utils.py"
    spec_prepare = "eagle_prepare_for_decode"
    chunk_ends = "extend_range.end"
    claimed = 0

    def set_chunk(self, req: Any, start: int, end: int) -> None:
        req.set_extend_range(start, end)

    def _mark_prefilled(self, req: Any) -> None:
        req.full_untruncated_fill_ids = req.origin_input_ids
        self.set_chunk(req, 0, len(req.origin_input_ids))

    def eviction_limit(self, length: int, window: int, page_size: int) -> int:
        return max(0, length - 1 - max(window, page_size)) // page_size * page_size

    def prepare_spec(self, batch: Any, draft_len: int) -> None:
        self.draft_len = draft_len
        self._prepare_spec(batch)

    def spec_end(self, cursors: Cursors, draft_len: int, page_size: int) -> int:
        return max(cursors.kv_allocated_len, super().spec_end(cursors, draft_len, page_size))

    def skip_round(self, req: Any, tokens: int) -> None:
        """Do nothing: no round claims tokens (_resolve_spec_v2_tokens)."""


class Release0516(Unified, Release0515):
    """0.5.16. `req.kv` has A and E (kv_allocated_len, swa_evicted_seqlen); a window has the unified tree."""

    version = "0.5.16"
    places: ClassVar[dict[str, str]] = Release0510.places | {
        name: f"kv.{name}" for name in ("kv_allocated_len", "swa_evicted_seqlen")
    }

    def _load_allocation(self, load: Any) -> Any:
        return load("sglang.srt.mem_cache.allocation")

    # -- requests ---------------------------------------------------------------------------------

    def hand_in(self, req: Any, cache: Any, rows: Any, tree: trees.ReleaseTree) -> None:
        del rows, tree
        cache.cache_finished_req(req, kv_len_to_handle=self.cursors(req).kv_committed_len)

    def mark_computed(self, req: Any, tokens: Sequence[int], row: int, evicted: int) -> None:
        if req.kv is None:
            req.kv = self.batch.ReqKvInfo(kv_allocated_len=0, swa_evicted_seqlen=0)
        super().mark_computed(req, tokens, row, evicted)

    def planned_batch(self, plan: Any) -> Any:
        return plan.batch_to_run

    def spec_end(self, cursors: Cursors, draft_len: int, page_size: int) -> int:
        return -(-super().spec_end(cursors, draft_len, page_size) // page_size) * page_size

    def cells(self) -> Callable[[Any], tuple[int, int, int, int]]:
        read = super().cells()

        def cells(holder: Any) -> tuple[int, int, int, int]:
            if holder.kv is None:  # before it has a row
                return holder.kv_committed_len, 0, 0, holder.cache_protected_len
            return read(holder)

        return cells


class Release0517(Release0516):
    """0.5.17. The unified tree knows its nodes by numbers; an unlock is given what its lock skipped."""

    version = "0.5.17"
    tree = trees.NumberedTree


class Release0518(Release0517):
    """0.5.18. What a prefill batch frees waits for its end."""

    version = "0.5.18"
    groups_prefill = True


class Release0519(Release0518):
    """0.5.19. What a request holds is one record, shared with its session; one tree for all models."""

    version = "0.5.19"
    places: ClassVar[dict[str, str]] = {name: f"kv.{name}" for name in Release0510.places}
    _role: Any
    _tail: Callable[..., Any]

    def _load_received(self, root: Path) -> None:
        name = renamed.in_uses("DecodePreallocQueue._swa_tail_len", self.renamed)
        self._role = stand_ins.Bag()
        utilities = vars(importlib.import_module("sglang.srt.utils"))
        env = {**utilities, "get_disagg": lambda: self._role}
        functions = cut(root / "sglang/srt/disaggregation/decode.py", frozenset({name}), env)
        self._tail = functions[name.rpartition(".")[2]]

    def received_tail(self, length: int, geometry: Geometry, allocator: Any) -> int:
        self._role.disaggregation_decode_enable_radix_cache = geometry.tree
        scheduler = stand_ins.Bag(
            sliding_window_size=geometry.window,
            server_args=self._role,  # 0.5.19
        )
        queue = stand_ins.Bag(
            scheduler=scheduler,
            token_to_kv_pool_allocator=allocator,
            _uses_swa_tail_prealloc=lambda: True,
        )
        return int(self._tail(queue, length))

    @classmethod
    def is_unified(cls, geometry: Geometry) -> bool:
        return geometry.tree

    def cells(self) -> Callable[[Any], tuple[int, int, int, int]]:
        return Release0510.cells(self)  # the record is always there

    def shown_tree(self, cache: Any, mapping: Any) -> trees.ReleaseTree:
        if cache._tree_core_backend == "rust":
            return trees.RustUnifiedTree(cache, mapping)
        return super().shown_tree(cache, mapping)

    def retract(self, batch: Any) -> None:
        batch.release_req(0, 0)

    def retract_decode(self, batch: Any) -> tuple[list[Any], list[Any]]:
        batch.filter_batch = lambda **_: None
        retracted, _, aborted = batch.retract_decode()
        return retracted, aborted

    def drop(self, req: Any, cache: Any, start: int, end: int) -> None:
        cache.free_kv_row(req.kv, [(start, end)])

    def slot(self, cache: Any, session_id: str) -> Any:
        slot = self._sessions(cache).slots.get(session_id)
        return slot if slot is not None and slot.kv.holds_kv else None


class Release0520(Release0519):
    """0.5.20. A lock gives a receipt for its unlock."""

    version = "0.5.20"
    tree = trees.ReceiptTree

    def free_pages(self, pool: Any) -> list[int]:
        pages: list[int] = pool.get_all_free_pages().tolist()
        return pages

    def hold(self, cache: Any, req: Any) -> None:
        req.lock_receipt = cache.inc_lock_ref(req.last_node).to_dec_params()


class Release0521(Release0520):
    """0.5.21. The older trees are gone; every component has its own E."""

    version = "0.5.21"
    places: ClassVar[dict[str, str]] = Release0519.places | {
        "swa_evicted_seqlen": "kv.max_evicted_seqlen"
    }

    def _modules(self, load: Any) -> None:
        self.chunk_cache = load("sglang.srt.mem_cache.chunk_cache")
        self.unified = load("sglang.srt.mem_cache.unified_radix_cache")

    def hand_in(self, req: Any, cache: Any, rows: Any, tree: trees.ReleaseTree) -> None:
        # it fills no page: a request of no length there is none
        if not self.cursors(req).kv_allocated_len:
            tree.unlock(req)
            return
        row = self.row(req)
        self.end(req, cache)
        rows.free_slots.remove(row)  # it was none of the pool's

    def set_eviction_cursor(self, req: Any, evicted: int) -> None:
        req.kv.set_evicted_seqlen(self.unified.ComponentType.SWA, evicted)
