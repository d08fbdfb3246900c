"""0.5.22 and 0.5.23: one cache for all, with the sessions in it.

A session owns the record of what a request holds, `req.kv`, from the first row on and lends it to its
turns."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from impl.loading.function_cuts import cut
from impl.lazy import torch
from impl.sglang.parts import trees
from impl.sglang.parts.tracking import tracker_class
from impl.sglang.parts.stand_ins import SERVER_ARGS, Bag, checkpoint_grid
from impl.sglang.releases.v0_5_15_to_21 import Release0521
from reference.geometry import Geometry


class Release0522(Release0521):
    """0.5.22, with the tree's core in Python."""

    version = "0.5.22"
    tree = trees.UnifiedTree
    recurrent = True
    keeping = "checkpoint"
    keeps_slots = False
    chunk_ends = "extend_end"
    checkpoints = "checkpoint_kv_cache"
    waived: ClassVar[dict[str, str]] = {
        "CHK-2": "a session owns its KV while a turn runs on it as well, and counts it as session_held"
    }
    _tracker: type

    @classmethod
    def is_unified(cls, geometry: Geometry) -> bool:
        del geometry
        return True

    def _load_states(self, root: Path) -> None:
        processing = importlib.import_module(
            "sglang.srt.managers.scheduler_components.batch_result_processor"
        )
        self._at_end: dict[str, bool] = {}
        self._tracker = tracker_class(processing, self._at_end)
        names = frozenset({"prepare_mamba_track_for_verify", "_verify_commit_step_indices"})
        env = {**vars(self.batch), "Tuple": tuple}
        self._verify = cut(root / "sglang/srt/speculative/spec_utils.py", names, env)

    def _modules(self, load: Any) -> None:
        self.unified = load("sglang.srt.mem_cache.unified_radix_cache")

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
        getattr(self.common, self.checkpoints)(req, cache)

    def hand_in(self, req: Any, cache: Any, rows: Any, tree: trees.ReleaseTree) -> None:
        req.finished_reason = self.batch.FINISH_LENGTH(length=0)
        super().hand_in(req, cache, rows, tree)

    def mark_computed(self, req: Any, tokens: Sequence[int], row: int, evicted: int) -> None:
        super().mark_computed(req, tokens, row, evicted)
        if evicted:  # in decode, before which the checkpoint of its prefill has used this
            req.swa_branching_seqlen = None

    def keeps(self, req: Any) -> dict[str, bool]:
        """Return the arguments of a release, as before; a finished request whose last state a batch in flight
        may overwrite leaves the tree nothing, as the processing of its result says (extra_buffer_lazy)."""
        kept_pages = super().keeps(req)
        return {self.keeping: kept_pages[self.keeping] and self._at_end.pop(req.rid, True)}

    def prepare_spec(self, batch: Any, draft_len: int) -> None:
        if SERVER_ARGS.mamba.enable_mamba_extra_buffer_lazy:  # as spec_prepare_for_decode does
            most = SERVER_ARGS.max_speculative_num_draft_tokens
            batch.mamba_lazy_spec_prepare(checkpoint_grid(), most)
        super().prepare_spec(batch, draft_len)

    def has_states(self, rows: Any) -> bool:
        return hasattr(rows, "mamba_allocator")

    def make_state_rows(self, geometry: Geometry) -> Any:
        """Return rows of requests that have recurrent state: a layer whose states are one number each."""
        shape = Bag(conv=[(1, 1)], temporal=(1, 1, 1))
        params = Bag(shape=shape, dtype=Bag(conv=torch.float32, temporal=torch.int64), is_kda=False)
        return self.memory_pool.HybridReqToTokenPool(
            size=geometry.rows,
            mamba_size=geometry.states,
            mamba_spec_state_size=geometry.rows,
            max_context_len=geometry.width,
            device=SERVER_ARGS.device,
            enable_memory_saver=False,
            cache_params=params,
            mamba_layer_ids=[0],
            enable_mamba_extra_buffer=geometry.tracks and geometry.tree,
            enable_mamba_extra_buffer_lazy=geometry.lazy and geometry.tree,
            enable_overlap_schedule=not SERVER_ARGS.disable_overlap_schedule,
        )

    def make_tracker(self, cache: Any) -> Any:
        """Make the object that processes results of decode batches with tracked states."""
        return self._tracker(cache)

    def verify(self, batch: Any, accepted: Sequence[int]) -> list[tuple[int, int]]:
        """Prepare a verify round, and note what it has tracked. Returns for each entry the slot that gets a
        state for the tree, 0 for none, and after how many of its accepted tokens that is."""
        self._verify["prepare_mamba_track_for_verify"](batch)
        most = max(accepted)
        device = SERVER_ARGS.device
        steps = self._verify["_verify_commit_step_indices"](
            batch=batch,
            accept_index=torch.arange(len(accepted) * most, device=device).view(-1, most),
            accept_lens=torch.tensor(accepted, device=device),
            draft_token_num=most,
        )
        return [*zip(batch.mamba_track_indices.tolist(), (steps[1] + 1).tolist(), strict=True)]


class Release0523(Release0522):
    """0.5.23. A window eviction keeps whole pages of at least a window."""

    version = "0.5.23"
    watches_pairs = True

    def eviction_limit(self, length: int, window: int, page_size: int) -> int:
        window_pages = -(-max(window, page_size) // page_size) * page_size
        return max(0, length - 1 - window_pages) // page_size * page_size
