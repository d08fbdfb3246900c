"""Requests under a release's scheduler, as that of 0.5.10 handles them: chunks, rounds, ends, retractions."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from impl.adapter import Cursors
from impl.lazy import torch
from impl.sglang.parts import trees
from impl.sglang.parts.stand_ins import SERVER_ARGS
from impl.sglang.releases.loaded_modules import LoadedModules
from reference.geometry import Geometry


class ReleaseRequests(LoadedModules):
    """The part of a release's class that does with a request what its scheduler does."""

    # Tokens that preparing a speculative round commits already (the result adds accepted - claimed).
    claimed = 0
    # A turn retracted with a verify round in flight has the token committed that the round computes first.
    counts_in_flight = False
    # Processing the results of a prefill batch frees all at its end (process_batch_result_prefill).
    groups_prefill = False
    # The attribute with the end of the last chunk of a prefill ("": the cached prefix ends there).
    chunk_ends = ""
    # The attribute that counts the chunks under way.
    chunks = "is_chunked"
    # The method that looks at the last outputs.
    looks = "check_finished"
    # A request knows the slots of what it matched, not only how many (prefix_indices).
    keeps_slots = True
    # The argument of release_kv_cache that says whether the tree keeps what the request has computed.
    keeping = "is_insert"
    # The function of mem_cache.common that the scheduler calls after a prefill ("": the cache's own method).
    checkpoints = ""
    # A received prompt may have SWA slots only for its tail (alloc_extend_swa_tail).
    swa_tail = False

    def prefix(self, req: Any) -> int:
        """Return the number of tokens that the next chunk finds in the cache."""
        return len(req.prefix_indices)

    def hold(self, cache: Any, req: Any) -> None:
        """Take the lock that an admission takes also without a tree, where it pins nothing."""
        cache.inc_lock_ref(req.last_node)

    def end(self, req: Any, cache: Any) -> None:
        """Give back what a finished request has, or hand it to its session or the tree."""
        self.common.release_kv_cache(req, cache, **self.keeps(req))

    def keeps(self, req: Any) -> dict[str, bool]:
        """Return the arguments of release_kv_cache for a finished request: none, it keeps all."""
        del req
        return {}

    def is_prefilled(self, req: Any) -> bool:
        """Return whether its prefill is over: not if it is aborted between two chunks, and then it keeps
        nothing (process_pending_chunked_abort)."""
        return bool(self.chunk_end(req) >= len(req.full_untruncated_fill_ids))

    def chunk_end(self, req: Any) -> int:
        """Return the end of the last chunk of a prefill."""
        return int(attrgetter(self.chunk_ends)(req)) if self.chunk_ends else self.prefix(req)

    def park(self, req: Any, cache: Any) -> None:
        """Leave a chunk that does not fit out of this batch (add_chunked_req), and look at it before the next
        (get_next_batch_to_run): a request that has computed nothing new is not inserted into the tree."""
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
        """Abort a request that waits (Scheduler.abort_request)."""
        self.aborts.waiting(req, cache)

    def received_tail(self, length: int, geometry: Geometry, allocator: Any) -> int:
        """Return the number of tokens of a received prompt that get SWA slots.

        A copy of DecodePreallocQueue._swa_tail_len, in which a server with a tree
        (--disaggregation-decode-enable-radix-cache) reserves none yet.
        """
        del allocator
        size = geometry.page_size
        window = geometry.window or 0
        window_begin = length - 1 - max(window, size) if geometry.tree else length - window
        return length - max(0, window_begin) // size * size

    def drop(self, req: Any, cache: Any, start: int, end: int) -> None:
        """Free positions [start, end) of a lock holder that the tree did not take."""
        rows = cache.req_to_token_pool.req_to_token
        cache.token_to_kv_pool_allocator.free(rows[self.row(req), start:end])

    def hand_in(self, req: Any, cache: Any, rows: Any, tree: trees.ReleaseTree) -> None:
        """Finish a lock holder: insert what it has computed into the tree, and release its lock."""
        del rows, tree
        cache.cache_finished_req(req)

    def ids(self, tokens: Sequence[int]) -> Any:
        """Return token ids as this release's requests and keys carry them."""
        return list(tokens)

    def set_chunk(self, req: Any, start: int, end: int) -> None:
        """Set what the next prefill computes: [start, end) of the request's text (PrefillAdder)."""
        req.set_extend_input_len(end - start)
        req.fill_ids = req.fill_ids[:end]

    def count_chunk(self, req: Any, more: int) -> None:
        """Count chunks of the request that are under way and not its last.

        more: 1 or -1.
        """
        setattr(req, self.chunks, getattr(req, self.chunks) + more)

    def check_finished(self, req: Any, accepted: int = 1) -> None:
        """Have the request look at its last `accepted` outputs."""
        getattr(req, self.looks)(accepted)

    def take(self, cache: Any, start: int, end: int, before: Any) -> Any:
        """Allocate slots for positions [start, end), and evict if there are too few, as alloc_for_extend
        does.

        start: a page boundary.
        before: slots of the positions below it.
        """
        if cache.page_size == 1:
            return self.allocation.alloc_token_slots(cache, end - start)
        first = torch.tensor([start])
        last = torch.tensor([end])
        return self.allocation.alloc_paged_token_slots_extend(
            tree_cache=cache,
            prefix_lens=first.to(before.device),
            prefix_lens_cpu=first,
            seq_lens=last.to(before.device),
            seq_lens_cpu=last,
            last_loc=before[-1:] if start else torch.tensor([-1], device=before.device),
            extend_num_tokens=end - start,
        )

    def mark_computed(self, req: Any, tokens: Sequence[int], row: int, evicted: int) -> None:
        """Leave `req` as a request that has computed `tokens` in `row`, and was evicted up to `evicted`."""
        req.origin_input_ids = self.ids(tokens)
        self._mark_prefilled(req)
        self.put(req, "req_pool_idx", row)
        self.put(req, "kv_committed_len", len(tokens))
        self.put(req, "kv_allocated_len", len(tokens))
        self.set_eviction_cursor(req, evicted)

    def set_eviction_cursor(self, req: Any, evicted: int) -> None:
        """Have the request's swa_evicted_seqlen at `evicted`."""
        self.put(req, "swa_evicted_seqlen", evicted)

    def _mark_prefilled(self, req: Any) -> None:
        """Mark all of the request's input as prefilled."""
        req.fill_ids = req.origin_input_ids

    def eviction_limit(self, length: int, window: int, page_size: int) -> int:
        """Return the position up to which window eviction can be in a request of `length` tokens, the last
        one decoded."""
        return max(0, length - 1 - window) // page_size * page_size

    def checkpoint(self, req: Any, cache: Any, chunked: bool) -> None:
        """Call the scheduler's checkpoint after a chunk, and after the last one."""
        cache.cache_unfinished_req(req, **({"chunked": True} if chunked else {}))

    def prepare_spec(self, batch: Any, draft_len: int) -> None:
        """Allocate for a verify round by the release's own rule, 2 * draft_len past the commit."""
        self.draft_len = draft_len
        self._prepare_spec(None, batch)

    def spec_end(self, cursors: Cursors, draft_len: int, page_size: int) -> int:
        """Return kv_allocated_len after the over-allocation of a verify round."""
        del page_size
        return cursors.kv_committed_len + 2 * draft_len

    def commit(self, req: Any, tokens: int) -> None:
        """Commit tokens as processing a verify round's result does."""
        self.put(
            req, "kv_committed_len", self.cursors(req).kv_committed_len + tokens - self.claimed
        )

    def skip_round(self, req: Any, tokens: int) -> None:
        """Process a verify round of a request that has finished, or was retracted, as the scheduler does.

        _resolve_spec_overlap_token_ids asks for neither and commits it.
        """
        self.commit(req, tokens)
