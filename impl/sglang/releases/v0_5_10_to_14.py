"""0.5.10 to 0.5.14: a request carries its cursors itself, sessions wrap the cache.

One class each, for all that differs between them: where the release keeps its session code, how its
scheduler calls it, and where its cursors live.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, ClassVar

from impl.sglang.parts import memory_checks
from impl.sglang.releases.release_pools import ReleasePools
from impl.sglang.releases.release_requests import ReleaseRequests


class Release0510(ReleasePools, ReleaseRequests):
    """0.5.10. The session registers a request when it is created, and is closed at once.

    What it does stands in its bases; later releases override that.
    """

    version = "0.5.10"
    # The facts of its API that are as in another release: name of the fact -> that release (facts.py).
    facts: ClassVar[dict[str, str]] = {}
    # What it has renamed: "Req.prefix_len" -> "matched_len", or "release_kv_cache" -> "give_back". The left
    # name is that of api.py and of all other code here.
    renamed: ClassVar[dict[str, str]] = {}
    # Pools that its busy check does not count: see Capabilities.
    uncounted: frozenset[str] = frozenset({"swa", "rows"})
    # Clauses that are not checked on it: see Capabilities.
    waived: ClassVar[dict[str, str]] = {}
    # Its servers of pairs can be watched.
    watches_pairs = False


class Release0511(Release0510):
    """0.5.11. Turns in flight are known to the session; a close waits for them."""

    version = "0.5.11"
    scheduler = memory_checks.Scheduler0511
    session_cache = ("sglang.srt.session.streaming_session", "StreamingSession")
    session_controller = "sglang.srt.session.session_controller"
    uncounted: frozenset[str] = frozenset({"rows"})
    checkpoints = "maybe_cache_unfinished_req"
    claimed = 1
    counts_in_flight = True
    spare_page_per_lane = False

    def eviction_limit(self, length: int, window: int, page_size: int) -> int:
        # A page is kept, so that what ends up in the radix tree can be matched again.
        return super().eviction_limit(max(0, length - page_size), window, page_size)

    def checkpoint(self, req: Any, cache: Any, chunked: bool) -> None:
        getattr(self.common, self.checkpoints)(req, cache, **({"chunked": True} if chunked else {}))

    def closing(self, session: Any) -> bool:
        return bool(session.close_on_finish)


class Release0512(Release0511):
    """0.5.12. The same modules; a round that is skipped gives back its claim."""

    version = "0.5.12"
    swa_tail = True

    def skip_round(self, req: Any, tokens: int) -> None:
        del tokens
        if req.finished():  # what preparing the round claimed is given back
            self.commit(req, 0)


class Release0513(Release0512):
    """0.5.13. Allocators are a package, the memory checks objects of their own; token ids are arrays."""

    version = "0.5.13"
    scheduler = memory_checks.Scheduler0513
    checker = (
        "sglang.srt.managers.scheduler_components.invariant_checker",
        "SchedulerInvariantChecker",
    )
    observer = (
        "sglang.srt.managers.scheduler_components.pool_stats_observer",
        "SchedulerPoolStatsObserver",
    )
    chunks = "inflight_middle_chunks"
    looks = "update_finish_state"
    paged_allocator = "sglang.srt.mem_cache.allocator.paged"
    swa_allocators = "sglang.srt.mem_cache.allocator.swa"

    def _import_checks(self, load: Any) -> None:
        """Load the memory checks: objects that a stand-in of the scheduler makes."""
        made = {}
        for part, (module, name) in {"checker": self.checker, "observer": self.observer}.items():
            made[part] = getattr(load(module), name)
            if not isinstance(made[part], type):  # inert: the file is not there
                raise ImportError(f"no {module}")
        self.scheduler_class = type("Scheduler", (self.scheduler,), {"parts": made})

    def ids(self, tokens: Sequence[int]) -> Any:
        return array("q", tokens)

    def set_chunk(self, req: Any, start: int, end: int) -> None:
        req.set_extend_input_len(end - start)
        req.fill_len = end

    def _mark_prefilled(self, req: Any) -> None:
        req.full_untruncated_fill_ids = req.origin_input_ids
        req.fill_len = len(req.origin_input_ids)


class Release0514(Release0513):
    """0.5.14. The same modules and rules."""

    version = "0.5.14"
    chunk_ends = "fill_len"

    def keeps(self, req: Any) -> dict[str, bool]:
        return {self.keeping: self.is_prefilled(req)}

    def committed_len(self, session: Any) -> int | None:
        # A turn appends to the array of the last one; what counts of that is noted apart.
        length: int = session.committed_origin_len
        return length
