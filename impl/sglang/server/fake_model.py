"""The forward pass of a whole scheduler, without a model: it writes stamps, reads what attention would read,
and samples what the clients' script says.

A stamp is (token, position). Before each token the KV of the whole text so far is read through the row of
req_to_token, in the full pool and for the window in the SWA pool, and compared with the text.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from impl.sglang.server.clients import Clients


class Misread(NamedTuple):
    """Attention would have read something else: at `position` of a request, in a pool."""

    forward: int
    request: str
    pool: str
    position: int
    want: tuple[int, int]
    got: tuple[int, int] | None


class FakeModel:
    """The forward pass of one scheduler. misread: wrong reads, the first of each forward pass."""

    def __init__(self, scheduler: Any, clients: Clients) -> None:
        self.scheduler, self.clients = scheduler, clients
        self.allocator = scheduler.token_to_kv_pool_allocator
        self.window: int | None = scheduler.sliding_window_size if scheduler.is_hybrid_swa else None
        self.forwards = 0
        self.misread: list[Misread] = []
        self._full: dict[int, tuple[int, int]] = {}
        self._swa: dict[int, tuple[int, int]] = {}
        self._texts: dict[str, list[int]] = {}  # what has KV
        self._inputs: dict[str, int] = {}

    # -- stamps -------------------------------------------------------------------------------------

    def _write(self, slots: torch.Tensor, tokens: Iterable[int], positions: Iterable[int]) -> None:
        swa = self.allocator.translate_loc_from_full_to_swa(slots).tolist() if self.window else None
        for at, (slot, token, position) in enumerate(zip(slots.tolist(), tokens, positions)):
            self._full[slot] = (token, position)
            if swa is not None:
                self._swa[swa[at]] = (token, position)

    def _read(self, row: int, length: int, request: str) -> None:
        slots = self.scheduler.req_to_token_pool.req_to_token[row, :length]
        want = [(token, position) for position, token in enumerate(self._texts[request][:length])]
        self._compare("full", request, 0, want, [self._full.get(s) for s in slots.tolist()])
        if self.window:
            first = max(0, length - 1 - self.window)
            swa = self.allocator.translate_loc_from_full_to_swa(slots[first:]).tolist()
            self._compare("swa", request, first, want[first:], [self._swa.get(s) for s in swa])

    def _compare(
        self,
        pool: str,
        request: str,
        first: int,
        want: list[tuple[int, int]],
        got: list[tuple[int, int] | None],
    ) -> None:
        if want == got or (self.misread and self.misread[-1].forward == self.forwards):
            return
        at = next(i for i, (a, b) in enumerate(zip(want, got)) if a != b)
        self.misread.append(Misread(self.forwards, request, pool, first + at, want[at], got[at]))

    # -- forward passes -----------------------------------------------------------------------------

    def _sample(self, request: Any, outputs: int) -> int:
        return self.clients.says(request.rid, outputs + 1)

    def extend(self, batch: Any) -> list[int]:
        """A prefill; the next token of each lane, which counts if its input is complete."""
        ids, slots, sampled, done = batch.input_ids.tolist(), batch.out_cache_loc, [], 0
        for request, start, tokens in zip(batch.reqs, batch.prefix_lens, batch.extend_lens):
            name, kv = request.rid, getattr(request, "kv", None) or request
            known = [*request.origin_input_ids, *request.output_ids]
            self._texts[name] = known[:start] + ids[done : done + tokens]
            self._inputs[name] = len(request.origin_input_ids)
            self._write(slots[done : done + tokens], ids[done : done + tokens], range(start, start + tokens))
            done += tokens
            self._read(int(kv.req_pool_idx), start + tokens, name)
            sampled.append(self._sample(request, start + tokens - self._inputs[name]))
        return sampled

    def decode(self, batch: Any) -> list[int]:
        """A round of one token each."""
        ids, sampled = batch.input_ids.tolist(), []
        self._write(batch.out_cache_loc, ids, (batch.seq_lens - 1).tolist())
        for request, token, row, length in zip(
            batch.reqs, ids, batch.req_pool_indices.tolist(), batch.seq_lens.tolist()
        ):
            text = self._texts[request.rid]
            text[length - 1 :] = [token]
            self._read(row, length, request.rid)
            sampled.append(self._sample(request, length - self._inputs[request.rid]))
        return sampled

    def verify(self, batch: Any, draft: int) -> tuple[list[list[int]], list[int]]:
        """A verify round: the tokens that each lane samples, and how many were accepted."""
        rows = self.scheduler.req_to_token_pool.req_to_token
        newest = batch.spec_info.bonus_tokens.tolist()
        sampled, accepted = [], []
        for request, token, row, length in zip(
            batch.reqs, newest, batch.req_pool_indices.tolist(), batch.seq_lens.tolist()
        ):
            name = request.rid
            outputs = length - self._inputs[name]
            count = self.clients.accepts(name, outputs, draft)
            right = [self.clients.says(name, outputs + 2 + i) for i in range(draft)]
            written = [token, *right[: draft - 1]]
            text = self._texts[name]
            del text[length:]
            self._write(
                rows[row, length : length + draft].to(torch.int64), written, range(length, length + draft)
            )
            text += written[:count]
            self._read(row, length + count, name)
            sampled.append(right[:count])
            accepted.append(count)
        return sampled, accepted

    def __call__(self, batch: Any, *_: Any, **__: Any) -> Any:
        """TpModelWorker.forward_batch_generation."""
        self.forwards += 1
        sampled = self.extend(batch) if batch.forward_mode.is_extend() else self.decode(batch)
        return result_of(torch.tensor(sampled, dtype=torch.int64))


def result_of(tokens: torch.Tensor, **more: Any) -> Any:
    """The release's own result of a forward pass."""
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.utils import GenerationBatchResult

    return GenerationBatchResult(
        logits_output=LogitsProcessorOutput(next_token_logits=None), next_token_ids=tokens,
        can_run_cuda_graph=False,
        **more,
    )  # fmt: skip
