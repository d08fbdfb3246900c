"""SGLang's own KV canary (`--kv-canary`) on the rounds of a whole scheduler, as a second opinion.

It keeps a token, a position and a hash of what came before for each slot, and compares them along the rows
that a forward pass reads. Its torch reference runs on a CPU; what stands in here are streams, events and the
check of the order of its own calls, which is a Triton kernel.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from impl.sglang.releases.v0_5_10_to_14 import Release0510
from impl.sglang.server.outcome import Complaint

SETTINGS: dict[str, Any] = {"kv_canary": "log", "kv_canary_sweep_interval": 1}  # of the server
_MODES = ("is_decode_or_idle", "is_target_verify", "is_draft_extend_v2", "is_extend")
_MOST = 500  # violations that are kept of a run


class ForwardPass(NamedTuple):
    """The work of a forward pass.

    For each entry it has the request and the numbers of present and computed tokens; for all computed
    tokens id and slot.

    mode: the canary's name for it.
    """

    mode: str
    requests: Sequence[Any]
    starts: Sequence[int]
    lengths: Sequence[int]
    tokens: Sequence[int]
    slots: torch.Tensor


def install() -> None:
    """Make the canary run in this process, before a scheduler is built."""
    future = importlib.import_module("sglang.srt.kv_canary.runner.future_tensor").FutureTensors
    phases = importlib.import_module("sglang.srt.utils.phase_checker").SimplePhaseChecker
    idle = SimpleNamespace(synchronize=lambda: None, wait_stream=lambda *_: None)
    setattr(torch.cpu, "Stream", lambda *_, **__: idle)  # noqa: B010  (the canary makes one for its copies)
    phases.update = lambda *_, **__: None

    def at_once(cls: Any, tensors: Any, /, **_: Any) -> Any:
        data = tensors if isinstance(tensors, dict) else {"__dummy_key__": tensors}
        copies = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in data.items()}
        return cls(_data=copies, _event=idle)

    future.device_to_host = classmethod(at_once)


class Canary:
    """The canary of one scheduler.

    seen: its violations, the first _MOST.
    """

    def __init__(self, scheduler: Any, release: Release0510, draft: int) -> None:
        self.release = release
        self.draft = draft
        self.rows = scheduler.req_to_token_pool.req_to_token
        self.allocator = scheduler.token_to_kv_pool_allocator
        self.manager = scheduler.tp_worker.model_runner.canary_manager
        self.manager.mark_init_finished()
        self.seen: list[Complaint] = []

    def forward(self, number: int, run: ForwardPass) -> None:
        """Run a forward pass between two looks of the canary."""
        spans = list(zip(run.starts, run.lengths))
        starts = _int64(run.starts)
        lengths = _int64(run.lengths)
        batch = SimpleNamespace(
            forward_mode=SimpleNamespace(**{mode: lambda mode=mode: mode == run.mode for mode in _MODES}),
            batch_size=len(spans),
            req_pool_indices=_int64([self.release.row(request) for request in run.requests]),
            positions=_int64([at for start, length in spans for at in range(start, start + length)]),
            input_ids=_int64(run.tokens), out_cache_loc=_int64(run.slots),
            seq_lens=starts, seq_lens_cpu=starts, extend_prefix_lens=starts, extend_seq_lens=lengths,
            spec_info=SimpleNamespace(draft_token_num=self.draft),
            req_all_ids_lens=None, req_all_ids_flat=None,
        )  # fmt: skip
        manager = self.manager
        outside = manager.with_ops_outside_graph(
            single_forward_indices=[0], maybe_inaccurate_forward_batch=batch
        )
        with outside, manager.with_active_single_forward_manager(0):
            manager.post_ops_maybe_inside_graph(batch, manager.pre_ops_maybe_inside_graph(batch))
        self._note(number, run)

    def _note(self, number: int, run: ForwardPass) -> None:
        """Note the canary's new findings, in its own words, each with its request."""
        reporter = importlib.import_module("sglang.srt.kv_canary.runner.violation_reporter")
        log = self.manager._device_state.violation_log
        end = min(int(log.violation_write_index), _MOST)
        for fields in log.violation_ring[len(self.seen) : end].tolist():
            text = reporter._format_violation(
                row=fields, total=end, ring_overflow=False, step_when_pumped=number
            )
            says = text.splitlines()[0].partition(": ")[2]
            self.seen.append(Complaint(number, *self._whose(run, fields[1], "_SWA" in says), says))

    def _whose(self, run: ForwardPass, slot: int, swa: bool) -> tuple[str, int]:
        """Return the request of the batch that reads a slot, and at which position."""
        for request, start in zip(run.requests, run.starts):
            slots = self.rows[self.release.row(request), :start].to(torch.int64)
            if swa:
                slots = self.allocator.translate_loc_from_full_to_swa(slots)
            if found := (slots == slot).nonzero().flatten().tolist():
                return request.rid, found[0]
        return "", -1


def _int64(values: Any) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int64).contiguous()
