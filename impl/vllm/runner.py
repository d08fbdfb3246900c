"""The model runner: a worker's block tables, a stamp in every slot instead of KV, and a model that samples.

With model runner V1 the release's own `GPUModelRunner._update_states` updates requests and block tables, with
a plain batch instead of its tensors; see `runner_v2` for the other. The GPU is a stand-in. It runs batches in
the order in which they were scheduled, so a batch runs when it is scheduled, and its results wait until the
scheduler takes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, NamedTuple

from impl.loading.optional import optional
from impl.self_scheduling.toy_model import greedy, other
from impl.stand_ins import Values
from impl.vllm.drafter import Drafter, DrafterV1
from impl.vllm.images import Encoder, with_embeddings, with_images
from reference.blocks.commands import STOP_TOKEN
from reference.blocks.config import EngineConfig
from reference.blocks.facts import Lane, Table, chain, chained

UNKNOWN = -1  # a token that the worker does not have


class _Ignored:
    """A buffer that drops its writes: the runner keeps the tokens of drafts elsewhere."""

    def __setitem__(self, at: Any, tokens: Any) -> None:
        pass


def batch_rows(config: EngineConfig) -> int:
    """Return the rows of a persistent batch: room for requests that a step adds before it removes others."""
    return 4 * config.max_seqs + 8


class PersistentBatch:
    """The persistent batch (gpu_input_batch.py): an index for each request, and its block table."""

    def __init__(self, size: int) -> None:
        self.req_id_to_index: dict[str, int] = {}
        self.prev_req_id_to_index: dict[str, int] | None = None
        self.num_computed_tokens_cpu = [0] * size
        self.num_tokens_no_spec = [0] * size
        self.num_tokens = [0] * size
        self.num_prompt_tokens = [0] * size
        self.rows: list[list[list[int]]] = [[] for _ in range(size)]
        self.block_table = self
        self.token_ids_cpu = self.is_token_ids = _Ignored()
        self.spec_token_ids: list[list[int]] = [[] for _ in range(size)]

    @property
    def req_ids(self) -> list[str]:
        """The requests of the batch, by index."""
        return sorted(self.req_id_to_index, key=self.req_id_to_index.__getitem__)

    def append_row(self, blocks: Sequence[Sequence[int]], index: int) -> None:
        for row, more in zip(self.rows[index], blocks):
            row.extend(more)

    def add_request(self, state: Any) -> None:
        index = next(i for i in range(len(self.rows)) if i not in self.req_id_to_index.values())
        self.req_id_to_index[state.req_id] = index
        self.rows[index] = [list(blocks) for blocks in state.block_ids]
        self.num_computed_tokens_cpu[index] = state.num_computed_tokens
        self.num_prompt_tokens[index] = state.num_prompt_tokens
        self.num_tokens_no_spec[index] = self.num_tokens[index] = state.num_tokens

    def remove_request(self, name: str) -> None:
        self.req_id_to_index.pop(name, None)

    def update_req_spec_token_ids(self, state: Any, scheduled: dict[str, list[int]]) -> None:
        state.prev_num_draft_len = len(scheduled.get(state.req_id, ()))

    def condense(self) -> None:
        """Do nothing: rows may have gaps here."""

    refresh_metadata = condense


class _Counts(list[int]):
    def fill(self, value: int) -> None:
        self[:] = [value] * len(self)


class _Buffer:
    def __init__(self, size: int) -> None:
        self.np = _Counts([0] * size)


class _Worker(Values):
    """The stand-in that the release's methods have as `self`."""

    def __init__(self, size: int, drafts: int, overlap: bool) -> None:
        """Set what GPUModelRunner._update_states and its helpers read.

        size: rows of the batch.
        drafts: tokens for each round.
        """
        self.requests: dict[str, Any] = {}
        self.num_prompt_logprobs: dict[str, Any] = {}
        self.encoder_cache: dict[str, Any] = {}
        self.kv_caches: Any = None
        self.kv_cache_config: Any = None
        self.input_batch = PersistentBatch(size)
        self.speculative_config = None
        self.use_async_scheduling = overlap
        self.use_async_spec_decode = overlap and drafts > 0
        self.is_pooling_model = self.uses_mrope = False
        self.uses_xdrope_dim = 0
        self.sampled_counts: list[int] = []
        self.prev_num_draft_tokens = _Buffer(size)
        # Encoders, experts, reordered batches and zeroing of memory are not driven here.
        self.routed_experts_initialized = False
        self._draft_token_ids = ()  # not None: the drafter has run
        self.late_interaction_runner = Values(
            on_requests_finished=_nothing, register_request=_nothing, clear=_nothing
        )
        self._may_reorder_batch = self._on_request_state_removed = _nothing
        self._zero_block_ids = self._process_encoder_cache_scheduler_output = _nothing
        self.is_multimodal_pruning_enabled = False

    def _get_valid_sampled_token_count(self) -> list[int]:
        return self.sampled_counts


def _nothing(*_: Any, **__: Any) -> None:
    pass


def no_origin(request: str) -> int:
    """Return 0, the origin of all texts without a source of their own (reference.kv_sources)."""
    del request
    return 0


class Ran(NamedTuple):
    """A batch that ran.

    lanes: its entries.
    sampled: request -> the tokens that the model sampled.
    """

    lanes: tuple[Lane, ...]
    sampled: dict[str, list[int]]


class SlotMemory(dict[int, tuple[int, list[int]]]):
    """Block -> the group that last wrote it, and the stamps in its slots."""

    def stamp(self, block: int, group: int, size: int, slot: int, value: int) -> None:
        """Write the KV of a slot of a block. Slots of another group in the block are cleared.

        size: block size (tokens).
        """
        owner, slots = self.get(block, (-1, []))
        if owner != group:
            slots = [0] * size
            self[block] = (group, slots)
        slots[slot] = value

    def stamp_drafted(self, block: int, group: int, size: int, slot: int, value: int) -> None:
        """Write the drafter's KV of a slot. Its stamps follow those of the block."""
        owner, slots = self.get(block, (-1, []))
        if owner != group:
            slots = [0] * (2 * size)
            self[block] = (group, slots)
        elif len(slots) < 2 * size:
            slots = [*slots, *[0] * (2 * size - len(slots))]
            self[block] = (group, slots)
        slots[size + slot] = value

    def drafted(self, block: int, group: int, size: int, slot: int) -> int:
        """Return the stamp of the drafter's KV in a slot, 0 if this group has none there."""
        owner, slots = self.get(block, (-1, []))
        return slots[size + slot] if owner == group and len(slots) > size + slot else 0


class ModelRunner:
    """A worker of either kind: KV, the texts on the device, and a model that samples.

    memory: a SlotMemory.
    text: request -> the tokens on the device, and their stamps.
    origin_of: returns the origin of a request's text.
    worker: the `self` of the release's methods.
    encoder: the encoder of a model for images, None for a model of text.
    drafter: a drafter with KV of its own, None without one.
    """

    worker: Any
    encoder: Encoder | None = None
    drafter: Drafter | None = None

    def __init__(self, config: EngineConfig, overlap: bool) -> None:
        self.config = config
        self.overlap = overlap
        self.memory: Any = SlotMemory()
        self.text: dict[str, tuple[list[int], list[int]]] = {}
        self.origin_of: Callable[[str], int] = no_origin

    def use(self, memory: Any) -> None:
        """Keep KV in another memory.

        memory: has the interface of SlotMemory.
        """
        self.memory = self.worker.kv_caches = memory

    @staticmethod
    def drafts(stamps: list[int], count: int) -> list[int]:
        """Return drafts for a text: the tokens that the model would sample.

        stamps: those of the text.
        """
        drafts = []
        stamp = stamps[-1] if stamps else 0
        for _ in range(count):
            drafts.append(greedy(stamp))
            stamp = chain(stamp, drafts[-1])
        return drafts

    def run(self, scheduled: Any, accept: Sequence[int], stop: Sequence[str]) -> Ran:
        """Apply the scheduler's output to the batch, run the model, and sample.

        accept: number of drafts that the model accepts, by batch position; the last one also holds for all
        entries behind. stop: requests that sample a stop token.
        """
        raise NotImplementedError

    def propose_drafts(self, ran: Ran, most: int) -> dict[str, list[int]]:
        """Return the drafts that the scheduler receives after a batch.

        most: drafts of a request.
        """
        raise NotImplementedError

    def put(self, name: str, tokens: Sequence[int]) -> None:
        self.text[name] = ([], [])
        self.keep(name, tokens)

    def keep(self, name: str, sampled: Sequence[int]) -> None:
        text, stamps = self.text[name]
        stamps += chained(sampled, stamps[-1] if stamps else self.origin_of(name))
        text += sampled

    def discard(self, name: str, tokens: int) -> None:
        """Shorten a text to a number of tokens: the scheduler has dropped results that came from a failed
        load."""
        for piece in self.text[name]:
            del piece[tokens:]

    def stamps(self, name: str, start: int, tokens: Sequence[int]) -> list[int]:
        """Return the stamp before position `start`, followed by those of the tokens that are computed from
        there on."""
        known = self.text[name][1]
        before = 0
        if start == 0:
            before = self.origin_of(name)
        elif 0 < start <= len(known):
            before = known[start - 1]
        return [before, *chained(tokens, before)]

    @staticmethod
    def sample_tokens(stamp: int, drafts: Sequence[int], agreed: int) -> list[int]:
        """Return the tokens that the model samples after a prefix: the accepted drafts, and one more token.

        agreed: number of drafts that it accepts at most.
        """
        sampled: list[int] = []
        for draft in drafts:
            if len(sampled) == agreed or draft != greedy(stamp):
                break
            sampled.append(draft)
            stamp = chain(stamp, draft)
        sampled.append(greedy(stamp) if len(sampled) == len(drafts) else other(stamp))
        return sampled

    def prepare(self, scheduled: Any, previous: dict[str, int]) -> None:
        """Run a hook between the update of the batch and its forward pass.

        previous: request -> index in the batch before, for requests that have sampled there under
            asynchronous scheduling.
        """

    def forward(self, lanes: list[Lane]) -> list[Lane]:
        """Run the forward pass of a batch, and return its entries."""
        for lane in lanes:
            self.write(lane)
        return lanes

    def write(self, lane: Lane) -> None:
        """Stamp the slots of a batch entry. A position without a block is written to block 0, the padding
        of a table row."""
        _, *stamps = self.stamps(lane.request, lane.start, lane.tokens)
        for group, (sizes, row) in enumerate(zip(self.config.groups, lane.tables)):
            if sizes.state:
                continue
            size = sizes.block_size
            for position, stamp in enumerate(stamps, lane.start):
                entry = position // size
                block = row[entry] if 0 <= entry < len(row) else 0
                self.memory.stamp(block, group, size, position % size, stamp)


class ModelRunnerV1(ModelRunner):
    """The worker with model runner V1, around `GPUModelRunner._update_states`.

    methods: the release's.
    """

    def __init__(self, config: EngineConfig, overlap: bool, methods: dict[str, Any]) -> None:
        super().__init__(config, overlap)
        self.worker = _Worker(batch_rows(config), config.drafts, overlap)
        for name, method in methods.items():
            setattr(self.worker, name, MethodType(method, self.worker))
        self.worker.kv_caches = self.memory
        self.worker.kv_cache_config = config
        self.encoder = Encoder(self.worker) if config.encodes else None

    def run(self, scheduled: Any, accept: Sequence[int], stop: Sequence[str]) -> Ran:
        """Run a scheduled batch as GPUModelRunner.execute_model does: update states, compute, sample.

        accept: accepted drafts of each entry.
        stop: requests that sample the stop token.
        """
        worker = self.worker
        batch = self.worker.input_batch
        before = dict(batch.req_id_to_index)
        previous = dict(batch.prev_req_id_to_index or {})
        correct: Callable[[], None] | None = worker._update_states(scheduled)
        computed = {
            name: batch.num_computed_tokens_cpu[entry] for name, entry in batch.req_id_to_index.items()
        }
        if correct is not None:
            correct()
        if scheduled.num_scheduled_tokens:
            self.prepare(scheduled, previous)
        added = {new.req_id for new in scheduled.scheduled_new_reqs}
        added |= set(batch.req_id_to_index) - set(before)
        cached = scheduled.scheduled_cached_reqs
        added |= set(optional(cached, "CachedRequestData.resumed_req_ids", ()))
        lanes = []
        results = {}
        read: dict[str, dict[int, int]] = {}
        if self.encoder is not None:
            self.encoder.encode(scheduled)
            if scheduled.num_scheduled_tokens:
                read = self.encoder.gather_embeddings(scheduled)
        for entry, (name, count) in enumerate(scheduled.num_scheduled_tokens.items()):
            state = worker.requests[name]
            index = batch.req_id_to_index[name]
            if name in added or name not in self.text:
                known = state.prompt_token_ids + state.output_token_ids
                self.put(name, with_images(known, state.mm_features) if self.encoder else known)
            self.discard(name, state.num_tokens)
            drafts = scheduled.scheduled_spec_decode_tokens.get(name, ())
            samples = computed[name] + count >= state.num_tokens
            real = not self.overlap or (name in previous and name not in added)
            agreed = accept[min(entry, len(accept) - 1)] if accept else 0
            start = batch.num_computed_tokens_cpu[index]
            tokens, sampled = self._forward(name, start, count, drafts, real, agreed)
            if self.encoder is not None:
                tokens = with_embeddings(tokens, read[name])
            if not samples:
                sampled = []
            elif name in stop:
                sampled[-1] = STOP_TOKEN
            tables: Table = tuple(map(tuple, batch.rows[index]))
            lanes.append(Lane(name, start, tokens, len(drafts), tuple(sampled), tables))
            results[name] = sampled
        lanes = self.forward(lanes)
        if lanes and self.config.eagle:
            lanes = self._draft(lanes, scheduled, computed)
        for name, sampled in results.items():
            self._bookkeep(name, sampled)
        if self.overlap:
            batch.prev_req_id_to_index = {
                name: batch.req_id_to_index[name] for name, sampled in results.items() if sampled
            }
            worker.sampled_counts = [0] * len(batch.rows)
            for name, index in batch.prev_req_id_to_index.items():
                worker.sampled_counts[index] = len(results[name])
        return Ran(tuple(lanes), results)

    def _draft(self, lanes: list[Lane], scheduled: Any, computed: dict[str, int]) -> list[Lane]:
        """Run the drafter for a batch, as `sample_tokens` does before its bookkeeping."""
        read: dict[str, dict[int, int]] = {}
        if self.encoder is not None:
            read = self.encoder.gather_embeddings(scheduled, shift=1)
        drafter = self.drafter
        longest = max(computed[lane.request] + len(lane.tokens) for lane in lanes)
        if not isinstance(drafter, DrafterV1) or not drafter.fits(longest):
            return lanes
        batch = self.worker.input_batch
        rows = [batch.req_id_to_index[lane.request] for lane in lanes]
        lengths = [batch.num_tokens_no_spec[row] for row in rows]
        inputs = drafter.inputs(lanes, self.worker.requests, lengths)
        if self.encoder is not None:
            inputs = [
                entry._replace(tokens=with_embeddings(entry.tokens, read[lane.request]))
                for lane, entry in zip(lanes, inputs)
            ]
        return drafter.run(lanes, inputs, self.config.drafts - 1)

    def propose_drafts(self, ran: Ran, most: int) -> dict[str, list[int]]:
        """Return the drafts of each request of the batch, as `take_draft_token_ids` does.

        EAGLE also drafts after a prefill chunk that ends within a text, and gets the token behind the
        chunk. A lookup drafts only for requests that have sampled.
        """
        drafts = {}
        for lane in ran.lanes:
            stamps = self.text[lane.request][1]
            if not lane.sampled:
                stamps = stamps[: lane.start + len(lane.tokens) + 1]
            is_drafted = bool(lane.sampled) or self.config.eagle
            drafts[lane.request] = self.drafts(stamps, most if is_drafted else 0)
        return drafts

    def _forward(
        self, name: str, start: int, count: int, scheduled: Sequence[int], real: bool, agreed: int
    ) -> tuple[tuple[int, ...], list[int]]:
        """Return the inputs of an entry, and the tokens that the model samples after them.

        scheduled: the scheduled drafts.
        real: they are from a drafter, not placeholders.
        """
        text, stamps = self.text[name]
        own_count = max(count - len(scheduled), 0)
        inputs = [text[p] if 0 <= p < len(text) else UNKNOWN for p in range(start, start + own_count)]
        last = start + own_count - 1
        stamp = stamps[last] if 0 <= last < len(stamps) else 0
        drafts = self.drafts([stamp], len(scheduled)) if self.overlap else list(scheduled)
        inputs += drafts if real else [UNKNOWN] * len(scheduled)
        return tuple(inputs), self.sample_tokens(stamp, drafts if real else (), agreed)

    def _bookkeep(self, name: str, sampled: list[int]) -> None:
        """Append the sampled tokens to the request and the batch, as `_bookkeeping_sync` does."""
        if not sampled:
            return
        self.keep(name, sampled)
        kept_tokens = (
            [UNKNOWN] if self.overlap else sampled
        )  # on the CPU, asynchronous scheduling has no token yet
        worker = self.worker
        worker.requests[name].output_token_ids.extend(kept_tokens)
        index = worker.input_batch.req_id_to_index[name]
        worker.input_batch.num_tokens_no_spec[index] += len(kept_tokens)
