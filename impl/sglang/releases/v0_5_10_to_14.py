"""0.5.10 to 0.5.14: a request carries its cursors itself, sessions wrap the cache.

One class each, for all that differs between them: where the release keeps its session code, how its
scheduler calls it, and where its cursors live.
"""

from __future__ import annotations

import importlib
import os
from array import array
from collections import defaultdict
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar

from impl.adapter import Cursors, UnusableImplementation
from impl.loading.isolation import cut, loaded
from impl.lazy import torch
from impl.sglang.parts import stand_ins, memory_checks, trees
from impl.sglang.parts.aborts import Aborts
from impl.sglang.parts.stand_ins import SERVER_ARGS
from impl.sglang.parts.modules import install
from impl.sglang.parts.tracking import without_pinning
from impl.sglang.releases.objects import Objects
from reference.geometry import Geometry


class Release0510(Objects):
    """0.5.10. The session registers a request when it is created, and is closed at once."""

    version = "0.5.10"
    session_controller = "sglang.srt.managers.session_controller"
    checker = (
        "sglang.srt.managers.scheduler_runtime_checker_mixin",
        "SchedulerRuntimeCheckerMixin",
    )
    # where the sizes of pools are counted, if apart
    observer: ClassVar[tuple[str, str] | None] = None
    scheduler: ClassVar[type[memory_checks.Scheduler]] = memory_checks.Scheduler0510
    paged_allocator = "sglang.srt.mem_cache.allocator"
    swa_allocators = "sglang.srt.mem_cache.swa_memory_pool"
    spec_file = "sglang/srt/speculative/eagle_info_v2.py"
    spec_prepare = "EagleDraftInputV2Mixin.prepare_for_decode"

    def has_states(self, rows: Any) -> bool:
        """Whether a server's rows lead to slots of recurrent state that are known here."""
        del rows
        return False

    # Tokens that preparing a speculative round commits already (the result adds accepted - claimed).
    claimed = 0
    # A turn retracted with a verify round in flight has the token committed that the round computes first.
    counts_in_flight = False
    # Processing the results of a prefill batch frees all at its end (process_batch_result_prefill).
    groups_prefill = False
    core = "python"  # what its tree is written in
    # The facts of its API that are as in another release: name of the fact -> that release (facts.py).
    facts: ClassVar[dict[str, str]] = {}
    # What it has renamed: "Req.prefix_len" -> "matched_len", or "release_kv_cache" -> "give_back". The left
    # name is that of api.py and of all other code here.
    renamed: ClassVar[dict[str, str]] = {}
    # How a request calls where the last chunk of a prefill ended, as the scheduler looks it up ("": where the
    # cache ends), the chunks that are under way, and the look at its last outputs.
    chunk_ends = ""
    chunks = "is_chunked"
    looks = "check_finished"
    # a request knows the slots of what it matched, not only how many (prefix_indices)
    keeps_slots = True
    # The argument of release_kv_cache that says whether the tree keeps what the request has computed.
    keeping = "is_insert"
    # The function of mem_cache.common that the scheduler calls after a prefill ("": the cache's own method).
    checkpoints = ""
    # Pools that its busy check does not count: see Capabilities.
    uncounted: frozenset[str] = frozenset({"swa", "rows"})
    # Clauses that are not checked on it: see Capabilities.
    waived: ClassVar[dict[str, str]] = {}
    # The paged two-pool allocator declines an extend that leaves no page to spare per entry.
    spare_page_per_lane = True
    # A received prompt may have SWA slots for its tail alone (alloc_extend_swa_tail).
    swa_tail = False
    # It can be driven with recurrent state (make_state_rows), where the tree keeps no other than the last.
    recurrent = False
    # Its servers of pairs can be watched.
    watches_pairs = False

    @classmethod
    def require(cls, root: Path) -> None:
        """Raise UnusableImplementation where the files under `root` are not all that it takes."""

    def __init__(self, root: Path | None = None) -> None:
        """Import the release; the process is its own from now on.

        root: None to load nothing, and to read objects of the release that this process has already.
        Raises UnusableImplementation when the files do not load.
        """
        if root is None:
            return
        self._install(root)
        stand_ins.take_defaults(root)
        try:
            self._import(root)
            if not stand_ins.on_gpu():
                self._without_kernels()
            loaded("impl/sglang/parts/modules.py")
        except (ImportError, AttributeError, KeyError, OSError, SyntaxError) as error:
            raise UnusableImplementation(
                f"sglang {self.version}: its bookkeeping does not load: {type(error).__name__}: {error}"
            ) from error

    def _install(self, root: Path) -> None:
        install(root, stand_ins.provided(), stand_ins.on_gpu())

    def _import(self, root: Path) -> None:
        os.environ["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] = self.core  # read from 0.5.19 on
        load = importlib.import_module
        self.common = load("sglang.srt.mem_cache.common")
        self.allocation = self._load_allocation(load)
        self.allocator = load(self.paged_allocator)
        self.swa_allocator = load(self.swa_allocators)
        self.token_allocator = load("sglang.srt.mem_cache.allocator")
        self.swa_pool = load("sglang.srt.mem_cache.swa_memory_pool")
        self.memory_pool = load("sglang.srt.mem_cache.memory_pool")
        self._modules(load)
        self.params = load("sglang.srt.mem_cache.cache_init_params")
        self.batch = load("sglang.srt.managers.schedule_batch")
        self.controller = load(self.session_controller)
        module, name = self.session_cache
        self.session_cache_class = getattr(load(module), name)
        self._import_checks(load)
        self._load_rounds(root, load)
        self._load_received(root)
        self._load_states(root)
        self.aborts = Aborts(root, self)

    def _load_allocation(self, load: Any) -> Any:
        """The module that allocates slots of a request."""
        return load("sglang.srt.mem_cache.common")

    def _load_rounds(self, root: Path, load: Any) -> None:
        """Cut out what prepares a verify round."""
        self.draft_len = 1  # what get_alloc_len_per_decode answers; set before each round
        lengths = {
            "get_alloc_len_per_decode": lambda *_: self.draft_len,
            "get_alloc_reserve_per_decode": lambda *_: 2 * self.draft_len,
        }
        for owner in (self.batch, load("sglang.srt.managers.utils")):
            vars(owner).update(lengths)
        env = {**self._spec_environment(), "torch": torch, **lengths}
        prepare = cut(root / self.spec_file, frozenset({self.spec_prepare}), env)
        self._prepare_spec = prepare[self.spec_prepare.rpartition(".")[2]]

    def _load_received(self, root: Path) -> None:
        """Cut out how much SWA KV a received prompt gets; here it is a copy (received_tail)."""

    def _load_states(self, root: Path) -> None:
        """Load what moves recurrent states."""

    def _modules(self, load: Any) -> None:
        """The caches that this release has."""
        self.chunk_cache = load("sglang.srt.mem_cache.chunk_cache")
        self.radix_cache = load("sglang.srt.mem_cache.radix_cache")
        self.swa_radix_cache = load("sglang.srt.mem_cache.swa_radix_cache")

    def _spec_environment(self) -> dict[str, Any]:
        """The names that the over-allocation of a verify round may use, wherever they are defined."""
        alike: defaultdict[str, Any] = defaultdict(
            lambda: self.allocation.alloc_paged_token_slots_extend
        )
        found: dict[str, Any] = {"ALLOC_EXTEND_FUNCS": alike}
        for name in ("common", "allocation_sizing", "allocation"):
            found |= vars(importlib.import_module(f"sglang.srt.mem_cache.{name}"))
        return found

    def _without_kernels(self) -> None:
        stand_ins.without_kernels(self.allocator)
        if "assign_req_to_token_pool_func" in vars(self.allocation):  # imported from 0.5.16 on
            self.allocation.assign_req_to_token_pool_func = stand_ins.assign_rows
        without_pinning()

    def _import_checks(self, load: Any) -> None:
        """The memory checks: the release's class on top of a stand-in of the scheduler."""
        module, name = self.checker
        checks = getattr(load(module), name)
        if not isinstance(checks, type):  # inert: the file is not there
            raise ImportError(f"no {module}")
        self.scheduler_class = type(name, (self.scheduler, checks), {"checks": checks})

    @classmethod
    def is_unified(cls, geometry: Geometry) -> bool:
        """Whether a server of these sizes has one cache, UnifiedRadixCache, with the sessions in it."""
        del geometry
        return False

    # -- pools ------------------------------------------------------------------------------------

    def make_allocator(self, full: int, swa: int | None, page_size: int, need_sort: bool) -> Any:
        """The allocator of one pool, or of two.

        full, swa: their sizes (tokens). need_sort: pages are allocated in ascending order. Raises
        UnusableImplementation on a GPU, whose kernels are compiled for pages of a power of two alone.
        """
        if page_size & (page_size - 1) and stand_ins.on_gpu():
            pages = f"pages of a power of two, not of {page_size}"
            raise UnusableImplementation(
                f"sglang {self.version}: its kernels on a GPU take {pages}"
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
        raise NotImplementedError(f"{self.version} with {len(accepted)} states of {batch}")

    def make_cache(self, rows: Any, allocator: Any, geometry: Geometry) -> Any:
        """The release's session cache around its radix tree, or its chunk cache where there is no tree."""
        params = self._cache_params(rows, allocator, geometry)
        if geometry.tree:
            kinds = self.radix_cache.RadixCache, self.swa_radix_cache.SWARadixCache
        else:
            kinds = self.chunk_cache.ChunkCache, self.chunk_cache.SWAChunkCache
        return self.session_cache_class(kinds[geometry.window is not None](params))

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
        """The radix tree in `cache` (impl.sglang.parts.trees), None where there is none."""
        if not geometry.tree:
            return None
        if geometry.window is None:
            return trees.ReleaseTree(cache, None)
        return trees.SWARadixTree(cache, allocator.full_to_swa_index_mapping)

    def make_scheduler(self, rows: Any, allocator: Any, cache: Any, geometry: Geometry) -> Any:
        """The release's memory checks on a stand-in of its scheduler."""
        return self.scheduler_class(self.batch.ScheduleBatch, rows, allocator, cache, geometry)

    def make_controller(self, cache: Any) -> Any:
        return self.controller.SessionController(cache)

    # -- requests ---------------------------------------------------------------------------------

    def prefix(self, req: Any) -> int:
        """Tokens that the next chunk finds in the cache."""
        return len(req.prefix_indices)

    def hold(self, cache: Any, req: Any) -> None:
        """Admission's lock where there is no tree; it holds nothing."""
        cache.inc_lock_ref(req.last_node)

    def end(self, req: Any, cache: Any) -> None:
        """Give back what a finished request has, or hand it to its session or the tree."""
        self.common.release_kv_cache(req, cache, **self.keeps(req))

    def keeps(self, req: Any) -> dict[str, bool]:
        """Return the arguments of release_kv_cache for a finished request: none, it keeps all."""
        del req
        return {}

    def prefilled(self, req: Any) -> bool:
        """Not aborted between two chunks, when it keeps nothing (process_pending_chunked_abort)."""
        return bool(self.chunk_end(req) >= len(req.full_untruncated_fill_ids))

    def chunk_end(self, req: Any) -> int:
        """Return the end of the last chunk of a prefill."""
        return int(attrgetter(self.chunk_ends)(req)) if self.chunk_ends else self.prefix(req)

    def park(self, req: Any, cache: Any) -> None:
        """A chunk that does not fit is left out of this batch (add_chunked_req), and looked at before the
        next (get_next_batch_to_run): what has computed nothing new goes into no tree."""
        req.init_next_round_input()
        if self.chunk_end(req) > self.prefix(req):
            self.checkpoint(req, cache, chunked=True)

    def retract(self, batch: Any) -> None:
        """Take the first request of `batch` out of the running ones, under memory pressure."""
        batch.release_req(0, 0, SERVER_ARGS)

    def retract_decode(self, batch: Any) -> tuple[list[Any], list[Any]]:
        """Retract as the scheduler does where the next step of `batch` does not fit: (retracted, given
        up)."""
        batch.filter_batch = lambda **_: None  # the others are in no other batch than in this one
        retracted, _, aborted = batch.retract_decode(SERVER_ARGS)
        return retracted, aborted

    def abort_queued(self, req: Any, cache: Any) -> None:
        """Scheduler.abort_request on a request that waits."""
        self.aborts.waiting(req, cache)

    def received_tail(self, length: int, geometry: Geometry, allocator: Any) -> int:
        """The number of tokens of a received prompt that get SWA slots.

        A copy of DecodePreallocQueue._swa_tail_len, in which a server with a tree
        (--disaggregation-decode-enable-radix-cache) reserves none yet.
        """
        del allocator
        size = geometry.page_size
        window = geometry.window or 0
        first = length - 1 - max(window, size) if geometry.tree else length - window
        return length - max(0, first) // size * size

    def drop(self, req: Any, cache: Any, start: int, end: int) -> None:
        """Free positions [start, end) of a lock holder that the tree did not take."""
        rows = cache.req_to_token_pool.req_to_token
        cache.token_to_kv_pool_allocator.free(rows[self.row(req), start:end])

    def hand_in(self, req: Any, cache: Any, rows: Any, tree: trees.ReleaseTree) -> None:
        """A lock holder has finished: what it has computed goes into the tree, its lock is given back."""
        del rows, tree
        cache.cache_finished_req(req)

    def ids(self, tokens: Sequence[int]) -> Any:
        """Token ids as this release's requests and keys carry them."""
        return list(tokens)

    def set_chunk(self, req: Any, start: int, end: int) -> None:
        """The next prefill computes [start, end) of the request's text (PrefillAdder)."""
        req.set_extend_input_len(end - start)
        req.fill_ids = req.fill_ids[:end]

    def in_chunks(self, req: Any, more: int) -> None:
        """One more (or less) chunk of the request is under way that is not its last."""
        setattr(req, self.chunks, getattr(req, self.chunks) + more)

    def check_finished(self, req: Any, accepted: int = 1) -> None:
        """Have the request look at its last `accepted` outputs."""
        getattr(req, self.looks)(accepted)

    def take(self, cache: Any, start: int, end: int, before: Any) -> Any:
        """Slots for positions [start, end), evicted for where there are too few; as alloc_for_extend does.

        start: a page boundary. before: slots of the positions below it.
        """
        if cache.page_size == 1:
            return self.allocation.alloc_token_slots(cache, end - start)
        first, last = torch.tensor([start]), torch.tensor([end])
        return self.allocation.alloc_paged_token_slots_extend(
            tree_cache=cache,
            prefix_lens=first.to(before.device),
            prefix_lens_cpu=first,
            seq_lens=last.to(before.device),
            seq_lens_cpu=last,
            last_loc=before[-1:] if start else torch.tensor([-1], device=before.device),
            extend_num_tokens=end - start,
        )

    def computed(self, req: Any, tokens: Sequence[int], row: int, evicted: int) -> None:
        """Leave `req` as a request that has computed `tokens` in `row`, and was evicted up to `evicted`."""
        req.origin_input_ids = self.ids(tokens)
        self._filled(req)
        self.put(req, "req_pool_idx", row)
        self.put(req, "kv_committed_len", len(tokens))
        self.put(req, "kv_allocated_len", len(tokens))
        self.eviction_cursor(req, evicted)

    def eviction_cursor(self, req: Any, evicted: int) -> None:
        """Have the request's swa_evicted_seqlen at `evicted`."""
        self.put(req, "swa_evicted_seqlen", evicted)

    def _filled(self, req: Any) -> None:
        """All of the request's input has been prefilled."""
        req.fill_ids = req.origin_input_ids

    def eviction_limit(self, length: int, window: int, page_size: int) -> int:
        """How far window eviction can be in a request of `length` tokens, the last one decoded (tokens)."""
        return max(0, length - 1 - window) // page_size * page_size

    def checkpoint(self, req: Any, cache: Any, chunked: bool) -> None:
        """Call the scheduler's checkpoint after a chunk, and after the last one."""
        cache.cache_unfinished_req(req, **({"chunked": True} if chunked else {}))

    def prepare_spec(self, batch: Any, draft_len: int) -> None:
        """The release's own over-allocation for a verify round, 2 * draft_len past the commit."""
        self.draft_len = draft_len
        self._prepare_spec(None, batch)

    def spec_end(self, cursors: Cursors, draft_len: int, page_size: int) -> int:
        """kv_allocated_len after the over-allocation of a verify round."""
        del page_size
        return cursors.kv_committed_len + 2 * draft_len

    def commit(self, req: Any, tokens: int) -> None:
        """Commit tokens as processing a verify round's result does."""
        self.put(
            req, "kv_committed_len", self.cursors(req).kv_committed_len + tokens - self.claimed
        )

    def skipped(self, req: Any, tokens: int) -> None:
        """Process a verify round of a request that has finished, or was retracted, as the scheduler does.

        _resolve_spec_overlap_token_ids asks for neither and commits it.
        """
        self.commit(req, tokens)


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

    def skipped(self, req: Any, tokens: int) -> None:
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
        """The memory checks: an object that a stand-in of the scheduler makes."""
        made = {}
        for what, (module, name) in {"checker": self.checker, "observer": self.observer}.items():
            made[what] = getattr(load(module), name)
            if not isinstance(made[what], type):  # inert: the file is not there
                raise ImportError(f"no {module}")
        self.scheduler_class = type("Scheduler", (self.scheduler,), {"parts": made})

    def ids(self, tokens: Sequence[int]) -> Any:
        return array("q", tokens)

    def set_chunk(self, req: Any, start: int, end: int) -> None:
        req.set_extend_input_len(end - start)
        req.fill_len = end

    def _filled(self, req: Any) -> None:
        req.full_untruncated_fill_ids = req.origin_input_ids
        req.fill_len = len(req.origin_input_ids)


class Release0514(Release0513):
    """0.5.14. The same modules and rules."""

    version = "0.5.14"
    chunk_ends = "fill_len"

    def keeps(self, req: Any) -> dict[str, bool]:
        return {self.keeping: self.prefilled(req)}

    def committed(self, session: Any) -> int | None:
        # A turn appends to the array of the last one; what counts of that is noted apart.
        length: int = session.committed_origin_len
        return length
