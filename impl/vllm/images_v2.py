"""Images under model runner V2.

The release's own EncoderCache and EncoderRunner keep features and outputs, choose the images to encode, and
gather the embeddings of a batch. The encoder is a stand-in, as in `images`.
"""

from __future__ import annotations

import importlib
from typing import Any

from impl.bare import bare
from impl.loading.optional import optional
from impl.vllm.images import Encoder

FILES = tuple(f"vllm/v1/worker/gpu/mm/{name}.py" for name in ("encoder_cache", "encoder_runner"))
MODULES = tuple(file.removesuffix(".py").replace("/", ".") for file in FILES)


class EncoderV2(Encoder):
    """The encoder of a `GPUModelRunner`. The constructor gives the runner its encoder cache."""

    def __init__(self, worker: Any) -> None:
        super().__init__(worker)
        cache, runner = map(importlib.import_module, MODULES)
        worker.encoder_cache = cache.EncoderCache()
        self._runner = bare(runner.EncoderRunner)
        self._runner.encoder_cache = worker.encoder_cache
        self._runner.is_realtime = False

    @property
    def outputs_kept(self) -> dict[str, Any]:
        outputs: dict[str, Any] = self.worker.encoder_cache.encoder_outputs
        return outputs

    def update(self, scheduled: Any) -> None:
        """Apply the scheduler's updates of image data, as `execute_model` does."""
        updates = optional(scheduled, "SchedulerOutput.encoder_input_updates", {})
        for request, of_request in updates.items():
            self.worker.encoder_cache.update_encoder_inputs(request, of_request)

    def images_to_encode(self, scheduled: Any) -> tuple[list[str], list[Any]]:
        hashes, items = self._runner.prepare_mm_inputs(scheduled.scheduled_encoder_inputs)
        return hashes, items

    def embeddings_read(self, batch: Any, shift: int = 0) -> dict[str, dict[int, int]]:
        """Return the embeddings that each request of the batch reads (see Encoder.gather_embeddings).

        batch: an InputBatch.
        """
        embeddings, is_embedding = self._runner.gather_mm_embeddings(
            batch.req_ids,
            batch.num_tokens,
            batch.num_scheduled_tokens,
            batch.query_start_loc_np,
            batch.prefill_len_np,
            batch.num_computed_tokens_np,
            draft_lookahead=shift,
        )
        counts = dict(zip(batch.req_ids, batch.num_scheduled_tokens.tolist()))
        return self.by_request(embeddings, is_embedding, counts)
