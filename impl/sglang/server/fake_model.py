"""The forward pass of a whole scheduler, without a model: it writes stamps, reads what attention would read,
and samples what the clients' script says.

Recurrent layers go on from the state that the row leads to, which must be the one after all the tokens
before, and leave the one after their own (impl.sglang.scheduler.states). A state of another text, of another
length or of another request is noted.

A stamp is (token, position). Before each token the KV of the whole text so far is read through the row of
req_to_token, in the full pool and for the window in the SWA pool, and compared with the text.

Under overlap half of the rounds, by the seed, read as late as a device may: before the next round writes, or
when the result is processed. What the scheduler frees or gives away before that is read wrong. Not so a chunk
whose rest is to come on a server with a tree: 0.5.23 inserts it while it runs, and gives back SWA KV that its
first tokens read. That is harmless on CUDA: `_apply_war_barrier` of its scheduler holds back what it writes
next until that pass has read the mapping, and later passes write the slots. Other devices have no barrier by
default.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from impl.choices import KeyedChoices
from impl.sglang.releases.v0_5_10_to_14 import Release0510
from impl.sglang.scheduler.states import States
from impl.sglang.server.canary import Canary, ForwardPass
from impl.sglang.server.clients import Clients
from impl.sglang.server.fake_tier import FakeTier, StampedSlots
from impl.sglang.server.outcome import Misread
from impl.sglang.server.tier import stamp
from impl.sglang.server.progress import RequestHeadway, Stall, excess
from impl.sglang.tiers.copy_engine import StateStamps
from reference.recurrent_states import chained, describe_stamp, stamp_after

MOST = 500  # wrong reads that are kept of a run
UNCLEAN = -1  # the stamp of a slot before its first use
DECODES_BEFORE_EVICTION = 3  # rounds of decode after which a window has been evicted


class Read(NamedTuple):
    """A round's read of a request through `row`: the KV of `text`, for its tokens from `start` on."""

    request: Any
    row: int
    start: int
    text: list[int]


def _stamped_tokens(tokens: Sequence[int], start: int = 0) -> list[int]:
    """Return tokens from a position on, as their KV is stamped."""
    return [stamp(token, at) for at, token in enumerate(tokens, start)]


class Fold(NamedTuple):
    """A round's addition to the state of a request: `tokens` from position `start` on."""

    request: Any
    row: int
    start: int
    tokens: list[int]


class FakeModel:
    """The forward pass of one scheduler.

    draft: tokens of a verify round.
    chunk: those after which recurrent layers have a state that can be kept.
    misread: wrong reads, each position of a request once.
    """

    def __init__(
        self, scheduler: Any, release: Release0510, clients: Clients, draft: int, chunk: int = 0
    ) -> None:
        self.chunk = chunk
        self.release = release
        self.scheduler = scheduler
        self.clients = clients
        self.draft = draft
        self.allocator = scheduler.token_to_kv_pool_allocator
        self.window: int | None = scheduler.sliding_window_size if scheduler.is_hybrid_swa else None
        self.forwards = self.processed = 0
        self.misread: dict[tuple[str, str, int], Misread] = {}
        self.stamps: dict[str, dict[int, tuple[int, int]]] = {"full": {}, "swa": {}}
        self.writers: dict[str, dict[int, str]] = {"full": {}, "swa": {}}
        self._texts: dict[str, list[int]] = {}  # what has KV
        self._inputs: dict[str, int] = {}
        self._to_read: list[Read] = []  # by the round in flight
        self.canary: Canary | None = None
        self.tier: FakeTier | None = None
        self.headway = RequestHeadway()
        self._decoded: dict[str, int] = {}  # rounds of decode of a request since its prefill
        self.excess: Stall | None = None  # the first request that keeps more SWA KV than it may
        self.overlap = bool(scheduler.enable_overlap)
        self.tree = not scheduler.server_args.disable_radix_cache
        rows = scheduler.req_to_token_pool
        self.states = States(rows, None) if release.has_states(rows) else None
        if self.states is not None:
            for slot in range(rows.mamba_pool.size + 1):  # in none a text may begin as it is found
                self.states.put(slot, UNCLEAN)

        def process(*batch: Any, **named: Any) -> Any:
            self.processed += 1
            # else a later round is in flight, which goes on reading
            if self.processed == self.forwards:
                self._read_all()
            return type(scheduler).process_batch_result(scheduler, *batch, **named)  # hooked by now

        scheduler.process_batch_result = process

    # -- stamps -------------------------------------------------------------------------------------

    def slots(self, pool: str, size: int) -> Any:
        """Return the stamps in a pool as numbers, which a host tier copies."""
        if pool == "state":
            return StateStamps(self.states)
        return StampedSlots(size, self.stamps[pool], self.writers[pool])

    def _write(self, slots: torch.Tensor, tokens: Iterable[int], start: int, request: str) -> None:
        pools = {"full": slots.tolist()}
        if self.window:
            pools["swa"] = self.allocator.translate_loc_from_full_to_swa(slots).tolist()
        stamps = [(token, position) for position, token in enumerate(tokens, start)]
        for pool, places in pools.items():
            self.stamps[pool].update(zip(places, stamps))
            self.writers[pool].update(dict.fromkeys(places, request))

    def _shows(
        self,
        mode: str,
        requests: Sequence[Any],
        starts: Sequence[int],
        lengths: Sequence[int],
        tokens: Sequence[int],
        slots: torch.Tensor,
    ) -> None:
        """Have the release's own canary look at the round."""
        if self.canary is not None:
            self.canary.forward(
                self.forwards, ForwardPass(mode, requests, starts, lengths, tokens, slots)
            )

    def _reads(self, lanes: Iterable[tuple[Any, int, int, int]]) -> None:
        """Note the request, row, first position and end of each entry of a round."""
        self._to_read = [
            Read(request, row, start, self._texts[request.rid][:end])
            for request, row, start, end in lanes
        ]
        for request, _, _, text in self._to_read:
            self.headway.note_computed(request.rid, len(text), self.forwards)
        # its insert gives back SWA KV by then
        chunk = self.tree and self.scheduler.chunked_req is not None
        if not self.overlap or chunk or KeyedChoices(self.clients.seed, 5, self.forwards).upto(1):
            self._read_all(own=True)

    def _read_all(self, own: bool = False) -> None:
        """Read what the round in flight has not read yet, except for requests that have ended since.

        own: also read the round's own tokens, which a kernel has at hand.
        """
        reads = self._to_read
        self._to_read = []
        for request, row, start, text in reads:
            if self.release.row(request) == row and not request.finished():
                self._read(row, start, text if own else text[:start], request.rid)

    def _read(self, row: int, start: int, text: list[int], request: str) -> None:
        slots = self.scheduler.req_to_token_pool.req_to_token[row, : len(text)]
        self._compare("full", request, 0, slots.tolist(), text)
        if self.window:
            first = max(0, start - self.window)
            swa = self.allocator.translate_loc_from_full_to_swa(slots[first:]).tolist()
            self._compare("swa", request, first, swa, text)

    def _compare(
        self, pool: str, request: str, first: int, slots: list[int], text: list[int]
    ) -> None:
        stamps = self.stamps[pool]
        want = [(token, at) for at, token in enumerate(text[first:], first)]
        got = [stamps.get(slot) for slot in slots]
        if want == got:
            return
        for slot, wanted, found in zip(slots, want, got):
            key = request, pool, wanted[1]
            if wanted != found and key not in self.misread and len(self.misread) < MOST:
                writer = self.writers[pool].get(slot, "")
                self.misread[key] = Misread(self.forwards, *key, wanted, found, writer)

    # -- recurrent state ----------------------------------------------------------------------------

    def _folds(self, batch: Any, lanes: Sequence[Fold]) -> None:
        """Fold a round's tokens into the state of each entry. Operations that a prefill has deferred to its
        forward pass come first."""
        if self.states is None:
            return
        self.states.run_deferred(batch)
        for lane in lanes:
            self._continues(lane)
        stamps = [
            self.states.fold(entry.request.rid, entry.row, _stamped_tokens(entry.tokens, entry.start))
            for entry in lanes
        ]
        if batch.mamba_track_mask is not None:
            extends = batch.forward_mode.is_extend()
            track = batch.mamba_track_mask, batch.mamba_track_indices, batch.mamba_track_seqlens
            for at, (mask, slot) in enumerate(zip(*(column.tolist() for column in track[:2]))):
                # hybrid_linear_attn_backend.py, _init_track_ssm_indices: the last whole chunk
                if mask:
                    length = int(track[2][at]) - lanes[at].start if extends else 1
                    kept = length - length % self.chunk if extends else 1
                    self.states.put(slot, stamps[at][kept - 1])

    def _verifies(self, batch: Any, lanes: Sequence[Fold], accepted: Sequence[int]) -> None:
        """Compute a state after each token of a verify round, aside. The release says which one continues,
        and which is kept for the tree, once it knows the accepted tokens."""
        if self.states is None:
            return
        from sglang.srt.speculative import spec_utils

        spec_utils.prepare_mamba_track_for_verify(batch)
        for lane in lanes:
            self._continues(lane)
        own_stamps = [self.states.stamp_of(entry.row) for entry in lanes]
        stamps = [
            chained(_stamped_tokens(each.tokens, each.start), stamp)
            for each, (_, stamp) in zip(lanes, own_stamps)
        ]

        def keep(
            *,
            last_correct_step_indices: Any,
            mamba_track_indices: Any,
            mamba_steps_to_track: Any,
            **_: Any,
        ) -> None:
            assert self.states is not None
            for slot_of, steps in (
                ([slot for slot, _ in own_stamps], last_correct_step_indices.tolist()),
                (mamba_track_indices, mamba_steps_to_track),
            ):
                if slot_of is None:
                    continue
                for slot, step, lane in zip(slot_of, steps, stamps):
                    if step >= 0:
                        self.states.put(int(slot), lane[int(step)])

        draft = self.draft
        index = torch.arange(len(lanes) * draft).view(-1, draft)
        lens = torch.tensor(accepted, dtype=torch.int32)
        index[torch.arange(draft) >= lens[:, None]] = -1
        runner = self.scheduler.tp_worker.model_runner
        backend = SimpleNamespace(update_mamba_state_after_mtp_verify=keep)
        seam = SimpleNamespace(
            model_config=runner.model_config,
            req_to_token_pool=runner.req_to_token_pool,
            attn_backend=backend,
            model=None,
        )
        spec_utils.commit_mamba_states_after_verify(
            SimpleNamespace(model_runner=seam), batch, lens, index, draft
        )

    def _continues(self, lane: Fold) -> None:
        """Check that an entry continues from the state after all tokens before it. A wrong state is noted
        and corrected, so that each fault shows once."""
        assert self.states is not None
        name = lane.request.rid
        start = lane.start
        slot, actual_stamp = self.states.stamp_of(lane.row)
        text = chained(_stamped_tokens(self._texts[name]))
        key = (name, "state", start)
        if actual_stamp == (expected_stamp := stamp_after(text, start)):
            return
        last = (self._texts[name][start - 1], start - 1) if start else (0, -1)
        self.misread[key] = Misread(
            self.forwards, *key, last, None, found=f"slot {slot} {describe_stamp(actual_stamp, text)}"
        )
        self.states.put(slot, expected_stamp)

    # -- forward passes -----------------------------------------------------------------------------

    def begin_round(self, batch: Any) -> None:
        """Begin a round: it writes after the reads of the one before it, and after its loads from the
        host."""
        self._read_all()
        self.forwards += 1
        if self.tier is not None:
            self.tier.waits(batch)

    def _keeps(self, requests: Iterable[Any]) -> None:
        """Note how much SWA KV each request keeps; the first rounds after a prefill are not evicted."""
        if not self.window:
            return
        for request in requests:
            self._decoded[request.rid] += 1
            if self._decoded[request.rid] > DECODES_BEFORE_EVICTION and self.excess is None:
                page = self.allocator.page_size
                cursors = self.release.cursors(request)
                self.excess = excess(request.rid, cursors, self.window or 0, page, self.draft)

    def _says(self, name: str, length: int) -> int:
        """Return the token that is sampled after the first tokens of a request's text."""
        return self.clients.sampled_token(name, length - self._inputs[name] + 1)

    def extend(self, batch: Any) -> list[int]:
        """Run a prefill. The next token of each entry counts if its input is complete. In a mixed batch
        entries of one token follow, which continue their text."""
        ids = batch.input_ids.tolist()
        slots = batch.out_cache_loc
        written_len = 0
        lanes = list(zip(batch.reqs, batch.prefix_lens, batch.extend_lens))
        decoded = len(lanes) - len(batch.decoding_reqs or ())
        folds = list[Fold]()
        for at, (request, start, tokens) in enumerate(lanes):
            name = request.rid
            new = ids[written_len : written_len + tokens]
            if at < decoded:
                self._texts[name] = [*request.origin_input_ids, *request.output_ids][:start]
            self._texts[name][start:] = new
            self._inputs[name] = len(request.origin_input_ids)
            self._decoded[name] = 0
            self._write(slots[written_len : written_len + tokens], new, start, name)
            folds.append(Fold(request, self._row(request), start, new))
            written_len += tokens
        self._folds(batch, folds)
        self._shows("is_extend", batch.reqs, batch.prefix_lens, batch.extend_lens, ids, slots)
        self._reads(
            (request, self._row(request), start, start + tokens) for request, start, tokens in lanes
        )
        return [self._says(request.rid, start + tokens) for request, start, tokens in lanes]

    def _row(self, request: Any) -> int:
        row = self.release.row(request)
        assert row is not None
        return int(row)

    def decode(self, batch: Any) -> list[int]:
        """Run a round of one token per entry."""
        names = [request.rid for request in batch.reqs]
        lanes = list(zip(names, batch.req_pool_indices.tolist(), batch.seq_lens.tolist()))
        self._keeps(batch.reqs)
        for slot, token, (name, _, length) in zip(
            batch.out_cache_loc, batch.input_ids.tolist(), lanes
        ):
            self._write(slot.view(1), [token], length - 1, name)
            self._texts[name][length - 1 :] = [token]
        entries = zip(batch.reqs, lanes, batch.input_ids.tolist())
        self._folds(
            batch, [Fold(request, row, n - 1, [token]) for request, (_, row, n), token in entries]
        )
        starts = [length - 1 for _, _, length in lanes]
        tokens = batch.input_ids.tolist()
        self._shows(
            "is_decode_or_idle", batch.reqs, starts, [1] * len(lanes), tokens, batch.out_cache_loc
        )
        places = zip(batch.reqs, lanes)
        self._reads((request, row, length - 1, length) for request, (_, row, length) in places)
        return [self._says(name, length) for name, _, length in lanes]

    def verify(self, batch: Any, draft: int) -> tuple[list[list[int]], list[int]]:
        """Run a verify round. Returns the tokens that each entry samples, and how many were accepted."""
        rows = self.scheduler.req_to_token_pool.req_to_token
        sampled_tokens = []
        accepted = []
        computed: list[int] = []
        slots: list[torch.Tensor] = []
        folds: list[Fold] = []
        names = [request.rid for request in batch.reqs]
        lanes = list(zip(names, batch.req_pool_indices.tolist(), batch.seq_lens.tolist()))
        self._keeps(batch.reqs)
        bonus = batch.spec_info.bonus_tokens.tolist()
        for request, (name, row, length), token in zip(batch.reqs, lanes, bonus):
            accepted.append(self.clients.accepts(name, length - self._inputs[name], draft))
            right = [self._says(name, length + 1 + i) for i in range(draft)]
            written = [token, *right[: draft - 1]]
            slots.append(rows[row, length : length + draft].to(torch.int64))
            computed += written
            self._write(slots[-1], written, length, name)
            self._texts[name][length:] = written[: accepted[-1]]
            folds.append(Fold(request, row, length, written))
            sampled_tokens.append(right[: accepted[-1]])
        self._verifies(batch, folds, accepted)
        starts = [length for _, _, length in lanes]
        self._shows(
            "is_target_verify", batch.reqs, starts, [draft] * len(lanes), computed, torch.cat(slots)
        )
        ends = zip(batch.reqs, lanes, accepted)
        self._reads(
            (request, row, length, length + count) for request, (_, row, length), count in ends
        )
        return sampled_tokens, accepted

    def __call__(self, batch: Any, *_: Any, **__: Any) -> Any:
        """Run a forward pass, as TpModelWorker.forward_batch_generation does."""
        self.begin_round(batch)
        sampled = self.extend(batch) if batch.forward_mode.is_extend() else self.decode(batch)
        return result_of(torch.tensor(sampled, dtype=torch.int64))


def result_of(tokens: torch.Tensor, **more: Any) -> Any:
    """Return the release's own result of a forward pass."""
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.utils import GenerationBatchResult

    return GenerationBatchResult(
        logits_output=LogitsProcessorOutput(next_token_logits=None),
        next_token_ids=tokens,
        can_run_cuda_graph=False,
        **more,
    )
