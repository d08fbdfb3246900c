"""0.5.23: one cache for all, with the sessions in it.

A session owns the record of what a request holds, `req.kv`, from the first row on and lends it to its turns.
"""

from __future__ import annotations

from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, ClassVar

from impl.adapter import UnusableImplementation
from impl.sglang.releases.v0_5_16_to_20 import Release0520
from reference.geometry import Geometry


class Release0523(Release0520):
    """0.5.23, with the tree's core in Python."""

    version = "0.5.23"
    has = "session/streaming_session.py mem_cache/unified_cache/unified_tree_core.py"
    lacks = "mem_cache/swa_radix_cache.py"
    tree = "UnifiedTree"  # of impl.sglang.parts.trees
    keeping, keeps_slots = "checkpoint", False
    waived: ClassVar[dict[str, str]] = {
        "CHK-2": "a session owns its KV while a turn runs on it as well, and counts it as session_held"
    }

    @classmethod
    def is_unified(cls, geometry: Geometry) -> bool:
        del geometry
        return True

    @classmethod
    def where(cls, attribute: str) -> str:
        return "kv.max_evicted_seqlen" if attribute == "swa_evicted_seqlen" else f"kv.{attribute}"

    def _modules(self, load: Any) -> None:
        self.unified = load("sglang.srt.mem_cache.unified_radix_cache")

    # -- pools ------------------------------------------------------------------------------------

    def make_cache(self, rows: Any, allocator: Any, geometry: Geometry) -> Any:
        return self._make_unified(rows, allocator, geometry, tree_core_backend=self.core)

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

    def midway(self, req: Any) -> bool:
        return bool(req.extend_end < len(req.full_untruncated_fill_ids))

    def abort_queued(self, req: Any) -> None:
        if req.session is not None and req.session.streaming:
            req.session.abort_req()

    def hand_in(self, req: Any, cache: Any, rows: Any) -> None:
        req.finished_reason = self.batch.FINISH_LENGTH(length=0)
        row = req.kv.req_pool_idx
        if not req.kv.kv_allocated_len:  # it fills no page, and a request of no length there is none
            cache.unlock(req.lock)
            return
        self.common.release_kv_cache(req, cache, checkpoint=True)
        rows.free_slots.remove(row)  # it was none of the pool's

    def _give_row(self, req: Any, length: int, row: int, swept: int) -> None:
        kv = req.kv
        kv.req_pool_idx = row
        kv.kv_committed_len = kv.kv_allocated_len = length
        kv.set_evicted_seqlen(self.unified.ComponentType.SWA, swept)

    def sweep_limit(self, length: int, window: int, page_size: int) -> int:
        kept = -(-max(window, page_size) // page_size) * page_size
        return max(0, length - 1 - kept) // page_size * page_size

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
