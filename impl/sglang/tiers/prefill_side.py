"""A server that only prefills: the queues of requests whose KV goes to another server, and its loop.

Queues, results, sends, failures and retries are the release's own, tree or none, pools and rows too. Commands
say which requests a batch has, and what the decode server and the network do (played_decode.py).
"""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from impl.lazy import torch

from impl.sglang.parts.stand_ins import Bag, ForwardMode, SpecAlgorithm
from impl.sglang.scheduler.live_requests import LiveRequest
from impl.sglang.scheduler.on_server import OnServer
from impl.sglang.scheduler.server import Server
from impl.sglang.tiers.copy_engine import Event
from impl.sglang.tiers.played_decode import MetadataRows, Sender, Senders
from impl.vocabulary import CommandRefused, require, spelled
from reference.commands import Extend, Reason
from reference.tiers.commands import Arrive, Await, FailPeer, Greet
from reference.tiers.config import TierConfig
from reference.tiers.facts import TierRequestState
from reference.token_ids import token_id

FIRST_THAT_SENDS = "0.5.23"
_PREFILL = "sglang.srt.disaggregation.prefill"
_UTILS = "sglang.srt.disaggregation.utils"


class _Unmeasured:
    """Times of a request: nobody reads metrics."""

    trace_ctx = Bag(abort=lambda **_: None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


class PrefillSide(OnServer):
    """A server that only prefills.

    arrivals: requests by name.
    loop: the scheduler.
    late: batches whose results are not processed.
    """

    release: Any

    def __init__(self, release: Any, server: Server, config: TierConfig) -> None:
        """Make the bootstrap queue of a server that only prefills, over stand-ins for its event loop and its
        connection to decode servers (SchedulerDisaggregationPrefillMixin)."""
        self.release = release
        self.server = server
        self.config = config
        self.overlap = config.overlap
        module: Any = importlib.import_module(_PREFILL)
        # commands order what runs: events and streams of a GPU do nothing
        cuda = Bag(Event=Event, current_stream=lambda: None)
        module.torch = Bag(**{**vars(importlib.import_module("torch")), "cuda": cuda})
        self.mixin = module.SchedulerDisaggregationPrefillMixin
        self.senders = Senders(config, module.KVPoll, module.StateType.SWA, self._slots_being_written)
        self.rows_of_metadata = MetadataRows(config.metadata_rows)
        self.arrivals: dict[str, LiveRequest] = {}
        self.aborted: set[str] = set()
        self.rooms = 0
        self.late: deque[tuple[Any, Any]] = deque()
        self.loop = loop = self._scheduler()
        module.PrefillBootstrapQueue._init_kv_manager = lambda _: self.senders
        loop.disagg_prefill_bootstrap_queue = module.PrefillBootstrapQueue(
            None, None, self.rows_of_metadata, self.rows_of_metadata, 0, 1, 0, loop, None, "played"
        )
        self._batch: list[tuple[LiveRequest, int]] = []
        self.before_forward: Callable[[LiveRequest, int], None] = lambda *_: None

    def _scheduler(self) -> Any:
        """Return the scheduler: the release's mixin on stand-ins for the rest."""
        server = self.server
        kind = type("PrefillScheduler", (Bag, self.mixin), {})
        tokens = self.config.full_pages * self.config.page_size
        kv = server.allocator.get_kvcache()
        if kv is None:
            kv = server.allocator._kvcache = Bag()
        kv.request_window = None
        loop: Any = kind(
            tp_worker=Bag(model_runner=Bag(effective_logical_max_total_num_tokens=tokens)),
            kv_shard_widening=1, sliding_window_size=self.config.window, enable_overlap=self.overlap,
            enable_staging=False, waiting_queue=[], chunked_req=None, _pending_chunked_abort_req=None,
            disagg_prefill_inflight_queue=[], disagg_prefill_pending_chunk_rids=set(),
            disagg_metadata_buffers=self.rows_of_metadata,
            req_to_metadata_buffer_idx_allocator=self.rows_of_metadata,
            req_to_token_pool=server.rows, tree_cache=server.cache,
            token_to_kv_pool_allocator=server.allocator,
            running_batch=Bag(reqs=[], batch_is_full=False), last_reqs=[], processed_tokens_counter=0,
            spec_algorithm=SpecAlgorithm(on=False), forward_stream=None,
            attn_cp_cpu_group=None, attn_tp_cpu_group=None,
            output_streamer=Bag(stream_output=lambda *_: None), send_abort_output=lambda *_: None,
            batch_result_processor=Bag(
                snapshot_auxiliary_output_starts=lambda *_: None, move_logprobs_to_cpu=lambda **_: None,
            ),
            metrics_reporter=Bag(
                report_prefill_stats=lambda **_: None, increment_prefill_retries=lambda _: None,
            ),
            dp_attn_adapter=Bag(maybe_prepare_mlp_sync_batch=lambda batch: batch),
            grammar_manager=Bag(abort_requests=lambda _: None),
            beam_coordinator=Bag(retire_group=lambda _: None),
            ipc_channels=Bag(send_to_tokenizer=Bag(send_output=lambda *_: None)),
            maybe_send_health_check_signal=lambda: None, _process_hicache_events=lambda **_: None,
            disaggregation_mode=importlib.import_module(_UTILS).DisaggregationMode.PREFILL,
        )  # fmt: skip
        self.release.prefill_aborts.lend(loop)
        loop.abort_request = lambda asked: self.release.prefill_aborts.abort(loop, asked)
        loop.collect_inflight_reqs = lambda: {*loop.last_reqs}
        loop.get_new_batch_prefill = self._plan_batch
        return loop

    # -- commands ---------------------------------------------------------------------------------

    def await_prompt(self, command: Await) -> None:
        """Add a request to the queue (Scheduler._add_request_to_queue)."""
        name = command.holder
        require(name not in self.arrivals, Reason.REQUEST_EXISTS)
        require(not command.resumable, Reason.UNFAITHFUL)
        tokens = spelled(command.prompt)
        require(tokens, Reason.EMPTY)
        sizes = self.server.geometry
        pages = [sizes.full_pages, *([sizes.swa_pages] if sizes.window is not None else [])]
        require(len(tokens) < min(sizes.width, min(pages) * sizes.page_size), Reason.ROW_TOO_SHORT)
        self.rooms += 1
        req = self.server.new_request(f"{name}#{self.rooms}.", tokens, None, None)
        req.time_stats = _Unmeasured()
        req.sampling_params.ignore_eos = False
        req.bootstrap_host = "decode"
        req.bootstrap_room = self.rooms
        req.disagg_prefill_dp_rank = 0
        self.senders.prompts[self.rooms] = name, [*req.origin_input_ids]
        self.arrivals[name] = LiveRequest(self.release, name, None, self.rooms, req, 0)
        self.loop.disagg_prefill_bootstrap_queue.add(req, 1)

    def greet(self, command: Greet) -> None:
        sender = self._sender(command.holder)
        require(sender.state == self.senders.poll.Bootstrapping, Reason.WRONG_PHASE)
        is_whole_pages = command.prefix % self.config.page_size == 0
        require(is_whole_pages and 0 <= command.prefix < len(sender.text), Reason.BAD_LENGTH)
        sender.prefix = command.prefix
        sender.state = self.senders.poll.WaitingForInput

    def arrive(self, command: Arrive) -> None:
        """Have the network read everything that the sender was given; if the prompt is complete, the decode
        server has it."""
        sender = self._sender(command.holder)
        require(sender.parts, Reason.EMPTY)
        sender.parts.clear()
        if sender.due == 0:
            sender.state = self.senders.poll.Success

    def fail_peer(self, command: FailPeer) -> None:
        sender = self._sender(command.holder)
        poll = self.senders.poll
        require(sender.state not in (poll.Success, poll.Failed), Reason.WRONG_PHASE)
        sender.give_up()

    def abort(self, name: str) -> None:
        """Abort a request in whichever queue it is (Scheduler.abort_request)."""
        require(name in self.arrivals, Reason.UNKNOWN_REQUEST)
        require(name not in self.aborted, Reason.WRONG_PHASE)
        self.aborted.add(name)
        self.loop.abort_request(Bag(rid=self.arrivals[name].req.rid))
        self._forget_ended()

    def extend(self, command: Extend) -> None:
        """Run a round of the loop with a batch of these requests, as far as the scheduler still has them
        and there is room. A chunk that is not the last one ends with a page (PrefillAdder)."""
        names = [lane.request for lane in command.lanes]
        require(
            names and all(lane.tokens >= 1 and not lane.tail for lane in command.lanes), Reason.EMPTY
        )
        require(len({*names}) == len(names), Reason.DUPLICATE_LANE)
        require(all(name in self.arrivals for name in names), Reason.UNKNOWN_REQUEST)
        turns = [self.arrivals[name] for name in names]
        chunked = self.loop.chunked_req
        require(chunked is None or turns[0].req is chunked, Reason.WRONG_PHASE)
        waiting = {id(req) for req in self.loop.waiting_queue}
        require(
            all(turn.req is chunked or id(turn.req) in waiting for turn in turns), Reason.WRONG_PHASE
        )
        self._round([(turn, lane.tokens) for turn, lane in zip(turns, command.lanes, strict=True)])

    def poll(self) -> None:
        """Run a round of the loop without a batch."""
        self._round([])

    # -- the loop ---------------------------------------------------------------------------------

    def _round(self, requests: list[tuple[LiveRequest, int]]) -> None:
        """Run event_loop_normal_disagg_prefill or event_loop_overlap_disagg_prefill once."""
        loop = self.loop
        self._batch = requests
        loop.waiting_queue.extend(loop.disagg_prefill_bootstrap_queue.pop_bootstrapped())
        # Of the last batch a round looks only at whom to leave out where it would decode.
        plan = loop.get_next_disagg_prefill_batch_to_run(loop.running_batch, None)
        batch = plan.batch_to_run
        if batch is not None:
            for req in batch.reqs:
                loop.maybe_send_cached_prefix_chunk(req)
            self.late.append((batch, self._run(batch)))
        before = len(loop.last_reqs) > 0
        if self.late and (before or not self.overlap):
            loop.process_batch_result_disagg_prefill(*self.late.popleft())
        loop.process_disagg_prefill_inflight_queue()
        loop.last_reqs = [] if batch is None else [*batch.reqs]
        self._forget_ended()

    def _plan_batch(self, running: Any) -> Any:
        """Plan a batch of the requests that a command names (Scheduler.get_new_batch_prefill)."""
        loop = self.loop
        batch = None
        if entries := self._fitting():
            turns = [turn for turn, _ in entries]
            loop.waiting_queue = [
                req for req in loop.waiting_queue if all(req is not turn.req for turn in turns)
            ]
            last, end = entries[-1]
            loop.chunked_req = last.req if end < last.fill else None
            if loop.chunked_req is not None:
                loop.chunked_req.inflight_middle_chunks += 1
            batch = self.server.new_batch(turns, ForwardMode.EXTEND)
            batch.prepare_for_extend()
        return Bag(batch_to_run=batch, running_batch=running)

    def _fitting(self) -> list[tuple[LiveRequest, int]]:
        """Choose the requests of the batch, each with the token up to which it is computed: first the request
        between two chunks, and nobody behind one that goes on. Each matches, and locks what it finds
        (PrefillAdder)."""
        loop = self.loop
        entries: list[tuple[LiveRequest, int]] = []
        spans: list[tuple[int, int]] = []
        size = self.config.page_size
        rows = 0
        for turn, tokens in self._batch:
            req = turn.req
            goes_on = req is loop.chunked_req
            if not goes_on and all(req is not queued for queued in loop.waiting_queue):
                continue  # it has failed, or was aborted
            if goes_on:
                req.init_next_round_input()
            else:
                self._match_and_lock(turn)
            end = min(turn.prefix + tokens, turn.fill)
            if end < turn.fill:
                end = end // size * size
            try:
                require(end > turn.prefix, Reason.EMPTY)
                rows_with_turn = rows if goes_on else rows + 1
                self.server.require_room([*spans, (turn.prefix, end)], rows_with_turn)
            except CommandRefused:
                if goes_on:
                    return []
                self.server.cache.unlock(req.lock)
                req.lock = None
                continue
            self.release.set_chunk(req, turn.prefix, end)
            entries.append((turn, end))
            spans.append((turn.prefix, end))
            rows = rows_with_turn
            if end < turn.fill:
                break
        return entries

    def _slots_being_written(self, pool: str) -> set[int]:
        """Return slots that forward passes write whose results are not processed."""
        unread: set[int] = set()
        for batch, _ in self.late:
            slots = batch.out_cache_loc
            if pool == "swa":
                slots = self.server.allocator.full_to_swa_index_mapping[slots]
            unread.update(slots.tolist())
        return unread

    def _run(self, batch: Any) -> Any:
        """Run a batch (Scheduler.run_batch): the KV of each chunk is computed after its prefix was read."""
        turns = [next(t for t in self.arrivals.values() if t.req is req) for req in batch.reqs]
        for turn in turns:
            self.before_forward(turn, turn.prefix)
        tokens = []
        for turn in turns:
            end = turn.req.extend_end
            self.server.forward(turn, turn.prefix, end)
            tokens.append(token_id(turn.serial, end))
        return Bag(
            logits_output=None, next_token_ids=torch.tensor(tokens), extend_input_len_per_req=None,
            extend_logprob_start_len_per_req=None, copy_done=None, auxiliary_host_output=None,
            routed_experts_output=None, indexer_topk_output=None, next_draft_input=batch.spec_info,
            can_run_cuda_graph=False,
        )  # fmt: skip

    # -- looking ----------------------------------------------------------------------------------

    def sender(self, turn: LiveRequest) -> Sender:
        return self.senders.by_room[turn.req.bootstrap_room]

    def _sender(self, name: str) -> Sender:
        require(name in self.arrivals, Reason.UNKNOWN_REQUEST)
        return self.sender(self.arrivals[name])

    def requests_with_states(self) -> Iterator[tuple[Any, TierRequestState]]:
        """Yield the requests of all queues, with their states; the first state of a request counts."""
        loop = self.loop
        poll = self.senders.poll

        def or_fails(req: Any, state: TierRequestState) -> TierRequestState:
            failed = self.senders.by_room[req.bootstrap_room].state == poll.Failed
            return TierRequestState.FAILS if failed else state

        for req in loop.disagg_prefill_bootstrap_queue.queue:
            greeted = self.senders.by_room[req.bootstrap_room].state == poll.WaitingForInput
            yield req, or_fails(req, TierRequestState.GREETED if greeted else TierRequestState.WAITS)
        for req in loop.waiting_queue:
            yield req, or_fails(req, TierRequestState.QUEUED)
        if loop.chunked_req is not None:
            yield loop.chunked_req, TierRequestState.COMPUTES
        for req in loop.disagg_prefill_inflight_queue:
            parked = TierRequestState.PARKED if req.pending_bootstrap else TierRequestState.SENDS
            yield req, or_fails(req, parked)
        for batch, _ in self.late:
            yield from ((req, TierRequestState.LAUNCHED) for req in batch.reqs)

    def _forget_ended(self) -> None:
        """Forget requests that have ended and are in no queue."""
        known = {id(req) for req, _ in self.requests_with_states()}
        ended = {
            name
            for name, turn in self.arrivals.items()
            if id(turn.req) not in known
            and (turn.req.finished_reason is not None or name in self.aborted)
        }
        for name in ended:
            del self.arrivals[name]
        self.aborted -= ended
