"""0.5.23: one cache for all, with the sessions in it; what a request holds is one record, `req.kv`.

A session owns that record from the first row on and lends it to its turns.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, ClassVar

from impl.adapter import Cursors, UnusableImplementation
from impl.sglang.flat import Release0513
from reference.geometry import Geometry


class Release0523(Release0513):
    """0.5.23, with the tree's core in Python."""

    version = "0.5.23"
    scheduler = "Scheduler0523"
    session_cache = ("sglang.srt.mem_cache.unified_radix_cache", "UnifiedRadixCache")
    spec_file = "sglang/srt/speculative/eagle_utils.py"
    spec_prepare = "eagle_prepare_for_decode"
    claimed = 0
    core, tree = "python", "UnifiedTree"  # the latter of impl.sglang.trees
    waived: ClassVar[dict[str, str]] = {
        "CHK-2": "a session owns its KV while a turn runs on it as well, and counts it as session_held"
    }

    known: ClassVar[dict[str, str]] = {}

    @classmethod
    def is_in(cls, root: Path) -> bool:
        srt = root / "sglang/srt"
        return (
            (srt / "session/streaming_session.py").is_file()
            and (srt / "mem_cache/unified_cache/unified_tree_core.py").is_file()
            and not (srt / "mem_cache/swa_radix_cache.py").is_file()
        )

    def _import(self, root: Path) -> None:
        # How often decode sweeps is a setting; the default, every 128 tokens, would show nothing here.
        os.environ["SGLANG_SWA_EVICTION_INTERVAL"] = "1"
        super()._import(root)
        self.allocation = importlib.import_module("sglang.srt.mem_cache.allocation")

    def _modules(self, load: Any) -> None:
        self.radix_cache = load("sglang.srt.mem_cache.radix_cache")
        self.kinds = load("sglang.srt.mem_cache.unified_cache.component_type").ComponentType

    def _spec_environment(self) -> dict[str, Any]:
        modules = ("common", "allocation_sizing", "allocation")
        loaded = [importlib.import_module(f"sglang.srt.mem_cache.{name}") for name in modules]
        return {name: value for module in loaded for name, value in vars(module).items()}

    def _without_kernels(self) -> None:
        """The allocators compute with torch where Triton is not supported; one writer of rows does not."""
        from impl.sglang import doubles

        vars(self.allocation)["assign_req_to_token_pool_func"] = doubles.assign_rows

    # -- pools ------------------------------------------------------------------------------------

    def make_cache(self, rows: Any, allocator: Any, geometry: Geometry) -> Any:
        kinds = (self.kinds.FULL,) if geometry.window is None else (self.kinds.FULL, self.kinds.SWA)
        return self.session_cache_class(
            self.params.CacheInitParams(
                disable=not geometry.tree,
                req_to_token_pool=rows,
                token_to_kv_pool_allocator=allocator,
                page_size=geometry.page_size,
                sliding_window_size=geometry.window,
                tree_components=kinds,
                tree_core_backend=self.core,
            )
        )

    def make_tree(self, cache: Any, allocator: Any, geometry: Geometry) -> Any:
        from impl.sglang import trees

        if not geometry.tree:
            return None
        mapping = None if geometry.window is None else allocator.full_to_swa_index_mapping
        return getattr(trees, self.tree)(cache, mapping)

    def free_pages(self, pool: Any) -> list[int]:
        pages: list[int] = pool.get_all_free_pages().tolist()
        return pages

    # -- requests ---------------------------------------------------------------------------------

    def prefix(self, req: Any) -> int:
        length: int = req.prefix_len
        return length

    def hold(self, cache: Any, req: Any) -> None:
        req.lock = cache.lock(req.last_node)

    def set_chunk(self, req: Any, start: int, end: int) -> None:
        del start
        req.extend_end = end

    def checkpoint(self, req: Any, cache: Any, chunked: bool) -> None:
        del chunked
        self.common.checkpoint_kv_cache(req, cache)

    def end(self, req: Any, cache: Any) -> None:
        self.common.release_kv_cache(req, cache, checkpoint=True)

    def retract(self, batch: Any) -> None:
        batch.release_req(0, 0)

    def abort_queued(self, req: Any) -> None:
        if req.session is not None and req.session.streaming:
            req.session.abort_req()

    def drop(self, req: Any, cache: Any, start: int, end: int) -> None:
        cache.free_kv_row(req.kv, [(start, end)])

    def hand_in(self, req: Any, cache: Any, rows: Any) -> None:
        req.finished_reason = self.batch.FINISH_LENGTH(length=0)
        row = req.kv.req_pool_idx
        if not req.kv.kv_allocated_len:  # it fills no page, and a request of no length there is none
            cache.unlock(req.lock)
            return
        self.common.release_kv_cache(req, cache, checkpoint=True)
        rows.free_slots.remove(row)  # it was none of the pool's

    def computed(self, req: Any, tokens: Sequence[int], row: int, swept: int) -> None:
        req.origin_input_ids = self.ids(tokens)
        req.full_untruncated_fill_ids = req.origin_input_ids
        req.extend_end = len(tokens)
        kv = req.kv
        kv.req_pool_idx = row
        kv.kv_committed_len = kv.kv_allocated_len = len(tokens)
        kv.set_evicted_seqlen(self.kinds.SWA, swept)

    def sweep_limit(self, length: int, window: int, page_size: int) -> int:
        kept = -(-max(window, page_size) // page_size) * page_size
        return max(0, length - 1 - kept) // page_size * page_size

    def prepare_spec(self, batch: Any, draft_len: int) -> None:
        self.draft_len = draft_len
        self._prepare_spec(batch)

    def spec_end(self, cursors: Cursors, draft_len: int, page_size: int) -> int:
        end = max(cursors.kv_allocated_len, cursors.kv_committed_len + 2 * draft_len)
        return -(-end // page_size) * page_size

    def row(self, req: Any) -> int | None:
        row: int | None = req.kv.req_pool_idx
        return row

    def cursors(self, holder: Any) -> Cursors:
        kv = holder.kv
        return Cursors(
            kv.kv_committed_len, kv.kv_allocated_len, kv.max_evicted_seqlen, kv.cache_protected_len
        )

    def commit(self, req: Any, tokens: int) -> None:
        req.kv.kv_committed_len += tokens

    def skipped(self, req: Any, tokens: int) -> None:
        """Nothing: no round claims anything (_resolve_spec_v2_tokens)."""

    # -- sessions ---------------------------------------------------------------------------------

    def slot(self, cache: Any, session_id: str) -> Any:
        """The session's slot while it holds a row. During the first turn it only stands in for that turn."""
        slot = cache.session.slots.get(session_id)
        if slot is None or not slot.kv.holds_kv or slot.publishes_prompt:
            return None
        return slot


class RustCore0523(Release0523):
    """0.5.23 with the tree's core in Rust: an extension that the release's wheel brings for this Python."""

    core, tree = "rust", "RustTree"

    @classmethod
    def require(cls, root: Path) -> None:
        folder = root / "sglang/srt/mem_cache/rust_tree_core"
        if not any((folder / f"mem_cache{suffix}").is_file() for suffix in EXTENSION_SUFFIXES):
            raise UnusableImplementation(
                f"sglang {cls.version}+{cls.core}: {root} has no compiled core for this Python"
                " (one that an older kvspec has fetched has none: remove it)"
            )

    def make_cache(self, rows: Any, allocator: Any, geometry: Geometry) -> Any:
        cache = super().make_cache(rows, allocator, geometry)
        if cache._tree_core_backend != self.core:  # where the release's support of it ends it takes Python's
            raise UnusableImplementation(f"sglang {self.version}+{self.core}: not with this torch or system")
        return cache
