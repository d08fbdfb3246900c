"""The model runner: block tables as a worker keeps them, a stamp in every slot instead of KV, a model that
samples.

Of model runner V1 requests and tables are kept by the release's own `GPUModelRunner._update_states`, with a
plain batch in place of its tensors; `runner_v2` has the other. What the GPU does is ours: it runs batches in
the order in which they were scheduled, so a batch is run when it is scheduled, and its results wait until the
scheduler gets them.
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
    """Tokens of drafts are kept elsewhere."""

    def __setitem__(self, at: Any, tokens: Any) -> None:
        pass


class _Batch:
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
        """The requests by index."""
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
        """Indices are only names here."""

    refresh_metadata = condense


class _Counts(list[int]):
    def fill(self, value: int) -> None:
        self[:] = [value] * len(self)


class _Buffer:
    def __init__(self, size: int) -> None:
        self.np = _Counts([0] * size)


class _Worker(Values):
    """The `self` of the release's methods."""

    def __init__(self, size: int, drafts: int, overlap: bool) -> None:
        self.requests: dict[str, Any] = {}
        self.num_prompt_logprobs: dict[str, Any] = {}
        self.encoder_cache: dict[str, Any] = {}
        self.kv_caches: Any = None
        self.kv_cache_config: Any = None
        self.input_batch = _Batch(size)
        self.speculative_config = None
        self.use_async_scheduling = overlap
        self.use_async_spec_decode = overlap and drafts > 0
        self.is_pooling_model = self.uses_mrope = False
        self.uses_xdrope_dim = 0
        self.sampled_counts: list[int] = []
        self.prev_num_draft_tokens = _Buffer(size)
        # Of encoders, experts, reordered batches and memory, which is not zeroed here.
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
    """Texts begin at 0: requests have no source of their own (reference.kv_sources)."""
    del request
    return 0


class Ran(NamedTuple):
    """A batch that ran: its entries, and by request what the model sampled."""

    lanes: tuple[Lane, ...]
    sampled: dict[str, list[int]]


class SlotMemory(dict[int, tuple[int, list[int]]]):
    """For each block the group that last wrote it, and the stamps in its slots."""

    def stamp(self, block: int, group: int, size: int, at: int, value: int) -> None:
        """Write a slot of a block of `size` tokens. What another group has written in it is gone."""
        owner, slots = self.get(block, (-1, []))
        if owner != group:
            slots = [0] * size
            self[block] = (group, slots)
        slots[at] = value

    def stamp_drafted(self, block: int, group: int, size: int, at: int, value: int) -> None:
        """Write the drafter's KV of a slot: its stamps stand behind those of the block."""
        owner, slots = self.get(block, (-1, []))
        if owner != group or len(slots) < 2 * size:
            slots = [*slots, *[0] * (2 * size - len(slots))] if owner == group else [0] * 2 * size
            self[block] = (group, slots)
        slots[size + at] = value

    def drafted(self, block: int, group: int, size: int, at: int) -> int:
        """The stamp of the drafter's KV in a slot, 0 without any of this group."""
        owner, slots = self.get(block, (-1, []))
        return slots[size + at] if owner == group and len(slots) > size + at else 0


class ModelRunner:
    """A worker of any kind: KV, texts on the device, a model that samples.

    memory: a SlotMemory. text: of each request the tokens on the device, and their stamps. origin_of: the
    origin of a request's text. worker: what the release's methods take for `self`. encoder: of a model for
    images. drafter: one with KV of its own.
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
        """Keep KV elsewhere. memory: has what SlotMemory has."""
        self.memory = self.worker.kv_caches = memory

    @staticmethod
    def drafts(stamps: list[int], count: int) -> list[int]:
        drafts = []
        stamp = stamps[-1] if stamps else 0
        for _ in range(count):
            drafts.append(greedy(stamp))
            stamp = chain(stamp, drafts[-1])
        return drafts

    def run(self, scheduled: Any, accept: Sequence[int], stop: Sequence[str]) -> Ran:
        """Take over what the scheduler sends, run the model, and sample."""
        raise NotImplementedError

    def proposed(self, ran: Ran, most: int) -> dict[str, list[int]]:
        """Drafts that the scheduler gets after a batch."""
        raise NotImplementedError

    def put(self, name: str, tokens: Sequence[int]) -> None:
        self.text[name] = ([], [])
        self.keep(name, tokens)

    def keep(self, name: str, sampled: Sequence[int]) -> None:
        text, stamps = self.text[name]
        stamps += chained(sampled, stamps[-1] if stamps else self.origin_of(name))
        text += sampled

    def discard(self, name: str, tokens: int) -> None:
        """Keep so many tokens of a text: the scheduler has dropped results that came from a failed load."""
        for each in self.text[name]:
            del each[tokens:]

    def stamps(self, name: str, start: int, tokens: Sequence[int]) -> list[int]:
        """The stamp of what is before `start`, and those of tokens that are computed from there on."""
        known = self.text[name][1]
        before = 0 if start else self.origin_of(name)
        before = known[start - 1] if 0 < start <= len(known) else before
        return [before, *chained(tokens, before)]

    @staticmethod
    def sampled(stamp: int, drafts: Sequence[int], agreed: int) -> list[int]:
        """Return the tokens that the model samples behind a prefix: the drafts that it agrees with, and one
        more."""
        sampled: list[int] = []
        for draft in drafts:
            if len(sampled) == agreed or draft != greedy(stamp):
                break
            sampled.append(draft)
            stamp = chain(stamp, draft)
        sampled.append(greedy(stamp) if len(sampled) == len(drafts) else other(stamp))
        return sampled

    def prepare(self, scheduled: Any, previous: dict[str, int]) -> None:
        """Do a worker's steps between taking a batch over and its forward pass. previous: indices of requests
        of the batch before that have sampled, under asynchronous scheduling."""

    def forward(self, lanes: list[Lane]) -> list[Lane]:
        """The forward pass of a batch."""
        for lane in lanes:
            self.write(lane)
        return lanes

    def write(self, lane: Lane) -> None:
        """Stamp the slots of a batch entry. A position without a block goes where a 0 of a table leads."""
        _, *made = self.stamps(lane.request, lane.start, lane.tokens)
        for group, (sizes, row) in enumerate(zip(self.config.groups, lane.tables)):
            if sizes.state:
                continue
            size = sizes.block_size
            for position, value in enumerate(made, lane.start):
                at = position // size
                block = row[at] if 0 <= at < len(row) else 0
                self.memory.stamp(block, group, size, position % size, value)


class ModelRunnerV1(ModelRunner):
    """One worker, as `GPUModelRunner._update_states` keeps it. methods: those of the release."""

    def __init__(self, config: EngineConfig, overlap: bool, methods: dict[str, Any]) -> None:
        super().__init__(config, overlap)
        self.worker = _Worker(4 * config.max_seqs + 8, config.drafts, overlap)
        for name, method in methods.items():
            setattr(self.worker, name, MethodType(method, self.worker))
        self.worker.kv_caches = self.memory
        self.worker.kv_cache_config = config
        self.encoder = Encoder(self.worker) if config.encodes else None

    def run(self, scheduled: Any, accept: Sequence[int], stop: Sequence[str]) -> Ran:
        worker = self.worker
        batch = self.worker.input_batch
        before = dict(batch.req_id_to_index)
        previous = dict(batch.prev_req_id_to_index or {})
        correct: Callable[[], None] | None = worker._update_states(scheduled)
        computed = {
            name: batch.num_computed_tokens_cpu[at] for name, at in batch.req_id_to_index.items()
        }
        if correct is not None:
            correct()
        if scheduled.num_scheduled_tokens:
            self.prepare(scheduled, previous)
        added = {r.req_id for r in scheduled.scheduled_new_reqs} | set(batch.req_id_to_index) - set(
            before
        )
        added |= set(
            optional(scheduled.scheduled_cached_reqs, "CachedRequestData.resumed_req_ids", ())
        )
        lanes = []
        results = {}
        read: dict[str, dict[int, int]] = {}
        if self.encoder is not None:
            self.encoder.encode(scheduled)
            if scheduled.num_scheduled_tokens:
                read = self.encoder.gathered(scheduled)
        for at, (name, count) in enumerate(scheduled.num_scheduled_tokens.items()):
            state = worker.requests[name]
            index = batch.req_id_to_index[name]
            if name in added or name not in self.text:
                known = state.prompt_token_ids + state.output_token_ids
                self.put(name, with_images(known, state.mm_features) if self.encoder else known)
            self.discard(name, state.num_tokens)
            given = scheduled.scheduled_spec_decode_tokens.get(name, ())
            samples = computed[name] + count >= state.num_tokens
            real = not self.overlap or (name in previous and name not in added)
            agreed = accept[min(at, len(accept) - 1)] if accept else 0
            start = batch.num_computed_tokens_cpu[index]
            tokens, sampled = self._forward(name, start, count, given, real, agreed)
            if self.encoder is not None:
                tokens = with_embeddings(tokens, read[name])
            if not samples:
                sampled = []
            elif name in stop:
                sampled[-1] = STOP_TOKEN
            tables: Table = tuple(map(tuple, batch.rows[index]))
            lanes.append(Lane(name, start, tokens, len(given), tuple(sampled), tables))
            results[name] = sampled
        lanes = self.forward(lanes)
        if lanes and self.config.eagle:
            lanes = self._draft(lanes, scheduled, computed)
        for name, sampled in results.items():
            self._bookkeep(name, sampled)
        if self.overlap:
            batch.prev_req_id_to_index = {
                n: batch.req_id_to_index[n] for n, s in results.items() if s
            }
            worker.sampled_counts = [0] * len(batch.rows)
            for name, index in batch.prev_req_id_to_index.items():
                worker.sampled_counts[index] = len(results[name])
        return Ran(tuple(lanes), results)

    def _draft(self, lanes: list[Lane], scheduled: Any, computed: dict[str, int]) -> list[Lane]:
        """Run the drafter for a batch, as `sample_tokens` does before it remembers what was sampled."""
        read: dict[str, dict[int, int]] = {}
        if self.encoder is not None:
            read = self.encoder.gathered(scheduled, shift=1)
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
                given._replace(tokens=with_embeddings(given.tokens, read[lane.request]))
                for lane, given in zip(lanes, inputs)
            ]
        return drafter.run(lanes, inputs, self.config.drafts - 1)

    def proposed(self, ran: Ran, most: int) -> dict[str, list[int]]:
        """The drafts of each request of the batch, as `take_draft_token_ids` returns them.

        EAGLE also drafts behind a chunk that ends within a text, and gets the token behind the chunk. A
        lookup drafts only for requests that have sampled.
        """
        made = {}
        for lane in ran.lanes:
            known = self.text[lane.request][1]
            if not lane.sampled:
                known = known[: lane.start + len(lane.tokens) + 1]
            drafted = bool(lane.sampled) or self.config.eagle
            made[lane.request] = self.drafts(known, most if drafted else 0)
        return made

    def _forward(
        self, name: str, start: int, count: int, given: Sequence[int], real: bool, agreed: int
    ) -> tuple[tuple[int, ...], list[int]]:
        """Inputs of an entry, and what the model samples behind them. real: the drafts are a drafter's."""
        text, stamps = self.text[name]
        own = max(count - len(given), 0)
        inputs = [text[p] if 0 <= p < len(text) else UNKNOWN for p in range(start, start + own)]
        last = start + own - 1
        stamp = stamps[last] if 0 <= last < len(stamps) else 0
        drafts = self.drafts([stamp], len(given)) if self.overlap else list(given)
        inputs += drafts if real else [UNKNOWN] * len(given)
        return tuple(inputs), self.sampled(stamp, drafts if real else (), agreed)

    def _bookkeep(self, name: str, sampled: list[int]) -> None:
        """Remember what was sampled, as the worker does (_bookkeeping_sync)."""
        if not sampled:
            return
        self.keep(name, sampled)
        kept = [UNKNOWN] if self.overlap else sampled
        worker = self.worker
        worker.requests[name].output_token_ids.extend(kept)
        index = worker.input_batch.req_id_to_index[name]
        worker.input_batch.num_tokens_no_spec[index] += len(kept)
