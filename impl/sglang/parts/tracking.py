"""The steps of a scheduler for tracked states when it processes the result of a decode batch.

The release's own SchedulerBatchResultProcessor says which state a request keeps for the tree, and where the
next one goes. What it does besides for a request that has finished, the driver plays
(scheduler/ends.py)."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from impl.lazy import Tensor, torch
from impl.sglang.parts.stand_ins import Bag


def tracker_class(module: ModuleType, at_end: dict[str, bool]) -> type:
    """Return the release's class, of which only `_handle_finish_state_updated_req` runs.

    module: of that class.
    at_end: gets, for each finished request by its id, whether the tree keeps what it has computed.
    """

    def release_kv_cache(req: Any, cache: Any, *, checkpoint: bool) -> None:
        """Note what the release asks for; the driver releases the request."""
        del cache
        at_end[req.rid] = checkpoint

    vars(module)["release_kv_cache"] = release_kv_cache
    vars(module)["BaseSpecWorker"] = type("BaseSpecWorker", (), {})

    def start(self: Any, cache: Any) -> None:
        for name, value in {
            "tree_cache": cache,
            "draft_worker": None,
            "model_worker": None,
        }.items():
            object.__setattr__(self, name, value)

    def note_processed(self: Any, req: Any, batch: Any, at: int, tokens: int) -> None:
        """Note that the result of entry `at` of a batch, with so many tokens, is in the request's outputs."""
        drafts = None if batch.spec_algorithm.is_none() else {at: tokens - 1}
        result = Bag(num_non_draft_tokens_per_req=1, num_correct_drafts_per_req_cpu=drafts)
        self._handle_finish_state_updated_req(req, batch, result, at, None)

    others = (
        f"_maybe_collect_{what}" for what in ("routed_experts", "indexer_topk", "customized_info")
    )
    members = {"__init__": start, "note_processed": note_processed, **dict.fromkeys(others, _nothing)}
    return type("Tracker", (module.SchedulerBatchResultProcessor,), members)


def without_pinning() -> None:
    """Allocate no pinned memory: there is no GPU, whatever a release asks for."""
    make = torch.tensor

    def tensor(*values: Any, pin_memory: bool = False, **kind: Any) -> Tensor:
        del pin_memory
        return make(*values, **kind)

    setattr(sys.modules["torch"], "tensor", tensor)  # noqa: B010
    setattr(torch.Tensor, "pin_memory", lambda values, *_: values)  # noqa: B010


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing with any arguments."""


def buffers_of(kv: Any) -> list[int]:
    """Return the slots that hold states for the tree, or will."""
    if kv.mamba_ping_pong_track_buffer is None:
        return []
    return [slot for slot in kv.mamba_ping_pong_track_buffer.tolist() if slot >= 0]


def tracked_states(kv: Any) -> list[tuple[int, int]]:
    """Return the slot of the last state that is kept for the tree, and after how many tokens that is."""
    if kv.mamba_ping_pong_track_buffer is None or kv.mamba_last_track_seqlen is None:
        return []
    return [
        (int(kv.mamba_ping_pong_track_buffer[kv.mamba_last_track_idx]), kv.mamba_last_track_seqlen)
    ]
