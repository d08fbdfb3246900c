"""Stand-ins for the inputs and outputs of the batch processor (input_outputs.py): batches on the host, for
which no model runs.

Asynchronous batching uses the release's own class of pairs, over two of these batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from impl.bare import bare
from impl.stand_ins import Values

_PLACEHOLDER = -1  # TMP_TOKEN_ID: a token that a batch in flight samples


class BatchEntry(NamedTuple):
    """A request in a batch."""

    request: str
    #: first position that it computes
    start: int
    #: its tokens before
    text: tuple[int, ...]
    #: tokens that it computes
    inputs: tuple[int, ...]
    #: for each group, rows of the cache in the order of positions, as the release numbers them
    read: list[list[int]]
    write: list[list[int]]
    #: for each group, positions whose KV attention gets
    lengths: list[int]
    #: the batch samples a token for it
    samples: bool


class HostBatch:
    """One batch, in the place of ContinuousBatchingIOs.

    entries: its requests.
    tokens: those that it has sampled, in their order.
    req_id_to_new_token_position, carry_over_ids: as in the release.
    outputs: sampled tokens, int64 (1, M + 1) on the CPU, for at most M tokens of a batch.
    reads_cache: attention reads the cache; otherwise every entry begins a text, and nothing is read.
    """

    compute_stream = None

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self.requests_in_batch: Sequence[Any] = ()
        self.entries: list[BatchEntry] = []
        self.tokens: list[int] = []
        self.req_id_to_new_token_position: dict[str, int] = {}
        self.carry_over_ids = torch.full((cache.max_batch_tokens,), -1, dtype=torch.int32)
        self.reads_cache = False
        self.outputs = torch.zeros((1, cache.max_batch_tokens + 1), dtype=torch.int64)

    def prepare_batch_tensors(
        self,
        requests_in_batch: Sequence[Any],
        logits_processors: Any,
        use_decode_fast_path: bool,
        num_q_tokens: int,
        max_kv_read: int,
        use_padding: bool,
    ) -> None:
        """Note the batch, and move its requests on as the release does."""
        del logits_processors, use_decode_fast_path, num_q_tokens, use_padding
        self.requests_in_batch = requests_in_batch
        self.reads_cache = max_kv_read > 0
        self.entries = []
        self.tokens = []
        self.req_id_to_new_token_position = {}
        position = 0  # in the batch
        for future in requests_in_batch:
            state = future.state
            start = state.position_offset
            count = future.query_length
            allocators = self._cache.cache_allocators.values()
            read: list[list[int]] = [[] for _ in allocators]
            write: list[list[int]] = [[] for _ in allocators]
            lengths = [allocator.get_seqlen_k(start, count) for allocator in allocators]
            self._cache.extend_read_and_write_indices(state.request_id, start, count, read, write)
            text = tuple((state.initial_tokens + state.generated_tokens)[:start])
            inputs = tuple(state.tokens_to_process)
            samples = future.has_new_token
            self.entries.append(
                BatchEntry(
                    state.request_id,
                    start=start,
                    text=text,
                    inputs=inputs,
                    read=read,
                    write=write,
                    lengths=lengths,
                    samples=samples,
                )
            )
            state.position_offset += count
            position += count
            if samples:
                state.tokens_to_process = [_PLACEHOLDER]
                self.req_id_to_new_token_position[state.request_id] = position - 1

    def prepare_batch_update(self) -> tuple[Sequence[Any], list[int], None]:
        return self.requests_in_batch, self.tokens, None

    def fill_placeholders(self, inputs: Sequence[int]) -> None:
        """Replace the inputs of each entry by its part of `inputs`, which are those of all entries in a
        row."""
        begin = 0
        for index, entry in enumerate(self.entries):
            end = begin + len(entry.inputs)
            self.entries[index] = entry._replace(inputs=tuple(inputs[begin:end]))
            begin = end

    def keep_outputs(self) -> None:
        """Keep the sampled tokens where the next batch finds them."""
        self.outputs[0, : len(self.tokens)] = torch.tensor(self.tokens, dtype=torch.int64)


class LaunchedBatches:
    """The batches of a processor: one, or with asynchronous batching two in flight.

    overlapped: the release's ContinuousBatchingAsyncIOs; None without asynchronous batching.
    release_object: the processor's inputs_and_outputs.
    in_flight: number of batches without an update.
    """

    def __init__(self, overlapped: type | None, cache: Any) -> None:
        self.in_flight = 0
        self._most = 1 if overlapped is None else 2
        self._batches = [HostBatch(cache) for _ in range(self._most)]
        self.release_object: Any = self._batches[0]
        if overlapped is not None:
            done = Values(synchronize=lambda: None)
            self.release_object = bare(
                overlapped,
                current_pair=0,
                compute_stream=None,
                io_pairs=[Values(host_io=batch, d2h_over=done) for batch in self._batches],
                max_batch_tokens=cache.max_batch_tokens,
            )

    @property
    def in_step(self) -> bool:
        """Whether the loop has launched a batch and updates the oldest one next."""
        return self.in_flight == self._most

    def launch(self) -> HostBatch:
        """Return the batch that was prepared, with its inputs: the tokens that the batch before sampled are
        carried over by the release's own rule."""
        self.in_flight += 1
        if self._most == 1:
            return self._batches[0]
        pairs = self.release_object
        batch: HostBatch = pairs.io_pairs[pairs.current_pair].host_io
        before: HostBatch = pairs.io_pairs[1 - pairs.current_pair].host_io
        inputs = [token for entry in batch.entries for token in entry.inputs]
        row = torch.tensor([inputs], dtype=torch.int64)
        pairs.carry_over_tokens(row, batch.carry_over_ids, before.outputs)
        batch.fill_placeholders(row[0].tolist())
        pairs.swap_io_pairs()
        return batch

    @contextmanager
    def updating_the_oldest(self) -> Iterator[None]:
        """Have the processor find the oldest batch, which it updates. A batch alone in flight is in the other
        pair, as when the loop stops."""
        alone = self._most == 2 and self.in_flight == 1
        if alone:
            self.release_object.swap_io_pairs()
        yield  # an error ends the run
        if alone:
            self.release_object.swap_io_pairs()
        self.in_flight -= 1
