"""A server that only decodes: the queues of requests whose prompt another server computes and sends here.

Both queues and the loop around them are the release's own, tree or none, pools and rows too. The prefill
server, whose answers, writes and failures are commands, is ours (played_prefill.py).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

from impl.lazy import torch

from impl.sglang.parts.stand_ins import SERVER_ARGS, Bag, ForwardMode
from impl.sglang.scheduler.live_requests import LiveRequest
from impl.sglang.scheduler.on_server import OnServer
from impl.sglang.tiers.played_prefill import FirstTokens, Peer, Peers
from impl.vocabulary import RequestPhase, require, spelled
from reference.commands import Close, Decode, Reason, Retract
from reference.tiers.commands import Arrive, Await, LastToken, Expire, FailPeer, Greet
from reference.tiers.config import TierConfig
from reference.tiers.facts import TierRequestState
from reference.token_ids import token_id

FIRST_THAT_RECEIVES = "0.5.22"
OUTPUT = 4  # tokens that a request may have, the first included
_DECODE = "sglang.srt.disaggregation.decode"
_UTILS = "sglang.srt.disaggregation.utils"
# seconds that slots are held for an aborted transfer: until a command says that they are over
HELD_FOR = 1e9


def take_role(config: TierConfig) -> None:
    """Set the role of the server as its command line does: it only decodes, only prefills, or does both."""
    for name in ("tp", "pp", "attn_dcp", "attn_tp"):
        setattr(SERVER_ARGS, f"{name}_size", 1)
        setattr(SERVER_ARGS, f"{name}_rank", 0)
    radix = config.decode == "radix"
    SERVER_ARGS.disaggregation_mode = config.role or "null"
    SERVER_ARGS.optimistic_prefill_attempts = config.attempts
    SERVER_ARGS.disaggregation_decode_enable_radix_cache = radix
    SERVER_ARGS.disaggregation_decode_retraction_backup = "cpu_tensor" if radix else "host_pool"
    SERVER_ARGS.disaggregation_decode_host_receive_threshold = 1
    SERVER_ARGS.disaggregation_decode_allocation_policy = "early"
    SERVER_ARGS.disaggregation_decode_polling_interval = 1
    SERVER_ARGS.attn_tp_group = Bag()


class DecodeSide(OnServer):
    """The driver's part for requests of a server that only decodes.

    arrivals: by name.
    """

    decode: Any
    peers: Peers
    first: FirstTokens
    arrivals: dict[str, LiveRequest]
    rooms: int
    loop: Any

    def start_decode_side(self, config: TierConfig, memory: dict[str, list[int]]) -> None:
        """Make the queues of a server that only decodes, over stand-ins for its event loop and its connection
        to prefill servers (SchedulerDisaggregationDecodeMixin).

        memory: the device's KV, by pool.
        """
        server = self.server
        cache = self.server.cache
        decode: Any = importlib.import_module(_DECODE)
        self.decode = decode
        self.peers = Peers(config, memory, decode.KVPoll, decode.StateType.SWA)
        self.first = FirstTokens(config.metadata_rows)
        self.arrivals = {}
        self.rooms = 0
        loop: Any = Bag(
            tp_worker=Bag(
                is_hybrid_swa=config.window is not None,
                model_runner=Bag(swa_max_total_num_tokens=config.swa_pages * config.page_size),
            ),
            sliding_window_size=config.window,
            running_batch=Bag(reqs=[]), waiting_queue=[], output_streamer=Bag(stream_output=lambda *_: None),
            batch_result_processor=Bag(_maybe_update_reasoning_tokens=lambda *_: None),
            spec_algorithm=Bag(is_none=lambda: True, build_disagg_draft_input=lambda *_: None),
            metrics_reporter=Bag(), random_seed=0, polling_count=0, polling_interval=1,
            req_to_token_pool=server.rows, tree_cache=cache, max_running_requests=config.rows,
            future_map=Bag(stash=lambda *_: None),
            grammar_manager=Bag(has_waiting_grammars=lambda: False, abort_requests=lambda _: None),
            ngram_embedding_manager=Bag(prepare_for_forward=lambda *_, **__: None),
            beam_coordinator=Bag(retire_group=lambda _: None), send_abort_output=lambda *_: None,
            ipc_channels=Bag(send_to_tokenizer=Bag(send_output=lambda *_: None)),  # up to 0.5.22
            disaggregation_mode=importlib.import_module(_UTILS).DisaggregationMode.DECODE,
            _verify_kv_checksums=lambda _: None,
        )  # fmt: skip
        self.release.aborts.lend(loop)
        self.loop = loop
        loop.running_batch.batch_size = lambda: len(loop.running_batch.reqs)
        loop.running_batch.is_empty = lambda: not loop.running_batch.reqs
        loop.collect_inflight_reqs = lambda: list(loop.running_batch.reqs)
        mixin = decode.SchedulerDisaggregationDecodeMixin
        loop._get_new_prebuilt_batch = lambda running: mixin._get_new_prebuilt_batch(loop, running)
        decode.DecodePreallocQueue._init_kv_manager = lambda _: self.peers
        decode.ScheduleBatch = Bag(init_new=self._prebuilt)
        transfers = decode.DecodeTransferQueue(self.first, self.first, loop, cache)
        transfers.enable_deferred_kv_release = True
        transfers.enable_staging = False
        transfers.deferred_kv_release_timeout = HELD_FOR
        queue = decode.DecodePreallocQueue(
            server.rows, server.allocator, None, self.first, self.first, loop, transfers, cache, 0, 0,
            config.full_pages * config.page_size, 1, "played",
        )  # fmt: skip
        queue.enable_staging = False
        loop.disagg_decode_prealloc_queue = queue
        loop.disagg_decode_transfer_queue = transfers

    @property
    def queue(self) -> Any:
        return self.loop.disagg_decode_prealloc_queue

    @property
    def transfers(self) -> Any:
        return self.loop.disagg_decode_transfer_queue

    def _prebuilt(self, reqs: Sequence[Any], *_: Any) -> Any:
        """Build the batch of received requests, as ScheduleBatch.init_new does."""
        turns = [next(t for t in self.arrivals.values() if t.req is req) for req in reqs]
        batch = self.server.new_batch(turns, ForwardMode.EXTEND)
        batch.spec_algorithm = self.loop.spec_algorithm
        return batch

    # -- commands ---------------------------------------------------------------------------------

    def await_prompt(self, command: Await) -> None:
        """Add a request to the queue (Scheduler._add_request_to_queue)."""
        server = self.server
        name = command.holder
        known = server.controller.get(name)
        require(name not in self.arrivals, Reason.REQUEST_EXISTS)
        require(known is None or command.resumable, Reason.REQUEST_EXISTS)
        require(known is None or not self.release.closing(known), Reason.SESSION_CLOSING)
        history_len = len(self.release.history(known)) if known is not None else 0
        tokens = spelled(command.prompt, history_len)
        require(tokens, Reason.EMPTY)
        sizes = server.geometry
        most = min(sizes.width, sizes.full_pages * sizes.page_size)
        require(history_len + len(tokens) + OUTPUT <= most, Reason.ROW_TOO_SHORT)
        if command.resumable and known is None:
            server.open_session(name)
        session = name if command.resumable else None
        req = server.new_request(f"{name}#{self.rooms + 1}", tokens, session, None)
        # The session has a turn that is over for everybody else; how a rejected one runs is not driven.
        require(req.to_finish is None, Reason.WRONG_PHASE)
        self.rooms += 1
        req.bootstrap_host = "prefill"
        req.bootstrap_port = 1
        req.bootstrap_room = self.rooms
        req.sampling_params.max_new_tokens = OUTPUT
        req.disagg_prefill_dp_rank = req.priority = 0
        self.peers.texts[self.rooms] = name, [*req.origin_input_ids]
        self.arrivals[name] = LiveRequest(self.release, name, session, self.rooms, req, history_len)
        self.queue.add(req)
        self._forget_ended()

    def greet(self, command: Greet) -> None:
        peer = self._peer(command.holder)
        require(not command.prefix, Reason.UNFAITHFUL)
        require(peer.state == self.peers.poll.Bootstrapping, Reason.WRONG_PHASE)
        peer.state = self.peers.poll.WaitingForInput

    def arrive(self, command: Arrive) -> None:
        """Write everything that the oldest request of that name still waits for."""
        room = min(
            (at for at, to in self.peers.writing.items() if to.name == command.holder), default=None
        )
        require(room is not None, Reason.EMPTY)
        assert room is not None
        to = self.peers.writing.pop(room)
        peer = self.peers.by_room[room]
        for pool, slot, token in to.slots:
            self.peers.memory[pool][slot] = token
        self.peers.drained[room] += 1
        if peer.state == self.peers.poll.Transferring and not peer.abort_notified:
            peer.state = self.peers.poll.Success
            position = len(self.peers.texts[room][1])
            self.first.rows[to.first] = token_id(room, position), room

    def fail_peer(self, command: FailPeer) -> None:
        peer = self._peer(command.holder)
        require(
            peer.state not in (self.peers.poll.Success, self.peers.poll.Failed), Reason.WRONG_PHASE
        )
        peer.state = self.peers.poll.Failed

    def expire(self, command: Expire) -> None:
        """Let the time run out for all transfers that were not drained: their peers will never write."""
        del command
        held = self.transfers._deferred_releases
        require(held, Reason.EMPTY)
        for entry in held:
            self.peers.writing.pop(entry[0].req.bootstrap_room, None)
        self.transfers._deferred_releases = [
            (each, start, 0.0, *more) for each, start, _, *more in held
        ]

    def process_queues(self) -> list[LiveRequest]:
        """Process the decode queues, and then let the oldest complete request begin to decode. Returns the
        requests that begin.

        One per command: an insert of a second request could split a node that the first has just locked.
        """
        self.loop.max_running_requests = len(self.loop.running_batch.reqs) + 1
        mixin = self.decode.SchedulerDisaggregationDecodeMixin
        mixin.process_decode_queue(self.loop)
        batch = mixin.get_new_prebuilt_batch(self.loop, self.loop.running_batch)
        begun = [t for t in self.arrivals.values() if batch is not None and t.req in batch.reqs]
        for turn in begun:
            turn.phase = RequestPhase.RUNNING
            self.loop.running_batch.reqs.append(turn.req)
        self._forget_ended()
        return begun

    def decode_round(self, command: Decode) -> list[LiveRequest]:
        """Decode as Driver.decode does; these requests have their outputs when it is over."""
        turns = self._running(command.requests)
        require(all(t.output < OUTPUT for t in turns), Reason.UNFAITHFUL)
        self.server.require_room([(t.fill - 1, t.fill) for t in turns], extend=False)
        self.server.new_batch(turns, ForwardMode.DECODE).prepare_for_decode()
        return turns

    def sample_tokens(self, turns: Sequence[LiveRequest]) -> None:
        for turn in turns:
            self.server.forward(turn, turn.fill - 1, turn.fill)
            turn.req.output_ids.extend(self.server.sample(turn, 1))

    def end(self, command: LastToken) -> None:
        [turn] = self._running([command.holder])
        turn.req.finished_reason = self.release.batch.FINISH_LENGTH(length=0)
        self._release(turn)

    def close_session(self, command: Close) -> None:
        session = self.server.controller.get(command.session)
        require(session is not None, Reason.UNKNOWN_SESSION)
        require(not self.release.closing(session), Reason.SESSION_CLOSING)
        self.server.controller.close(Bag(session_id=command.session))

    def retract_received(self, command: Retract) -> None:
        """Release a request (ScheduleBatch.release_req) and put it back into the queue; without a backup it
        is aborted."""
        [turn] = self._running([command.request])
        require(not command.in_flight, Reason.UNFAITHFUL)
        saved = self.server.new_batch([turn], ForwardMode.DECODE).release_req(0, 0)
        self.loop.running_batch.reqs.remove(turn.req)
        turn.phase = RequestPhase.QUEUED
        if saved:
            self.queue.add(turn.req, is_retracted=True)
        else:
            del self.arrivals[command.request]

    def abort_received(self, name: str) -> None:
        """Abort a request in whichever queue it is (Scheduler.abort_request)."""
        require(name in self.arrivals, Reason.UNKNOWN_REQUEST)
        turn = self.arrivals[name]
        require(turn.req.finished_reason is None, Reason.WRONG_PHASE)
        self.release.aborts.abort(self.loop, Bag(rid=turn.req.rid))
        if turn.req.to_finish is not None:  # a running request ends with its next result
            turn.req.finished_reason = turn.req.to_finish
            self._release(turn)
        elif not self._is_somewhere(turn.req):
            del self.arrivals[name]

    # -- what they share --------------------------------------------------------------------------

    def _release(self, turn: LiveRequest) -> None:
        self.release.common.release_kv_cache(turn.req, self.server.cache, checkpoint=True)
        self.loop.running_batch.reqs.remove(turn.req)
        del self.arrivals[turn.name]
        self._reap()

    def _running(self, names: Sequence[str]) -> list[LiveRequest]:
        require(names, Reason.EMPTY)
        require(len({*names}) == len(names), Reason.DUPLICATE_LANE)
        require(all(name in self.arrivals for name in names), Reason.UNKNOWN_REQUEST)
        turns = [self.arrivals[name] for name in names]
        require(all(turn.phase is RequestPhase.RUNNING for turn in turns), Reason.WRONG_PHASE)
        return turns

    def _peer(self, name: str) -> Peer:
        require(name in self.arrivals, Reason.UNKNOWN_REQUEST)
        return self.peers.by_room[self.arrivals[name].req.bootstrap_room]

    def _is_somewhere(self, req: Any) -> bool:
        return any(req is each for each, _ in self.requests_with_states())

    def requests_with_states(self) -> list[tuple[Any, TierRequestState]]:
        """Return the requests of all queues, with their states."""
        queue = self.queue
        transfers = self.transfers
        failed = self.peers.poll.Failed

        def waits(each: Any) -> TierRequestState:
            return TierRequestState.GREETED if each.waiting_for_input else TierRequestState.WAITS

        def or_fails(each: Any, state: TierRequestState) -> TierRequestState:
            return TierRequestState.FAILS if each.kv_receiver.state == failed else state

        return [
            *((entry.req, or_fails(entry, waits(entry))) for entry in queue.queue),
            *((entry.req, or_fails(entry, TierRequestState.RECEIVES)) for entry in transfers.queue),
            *((entry[0].req, TierRequestState.HELD) for entry in transfers._deferred_releases),
            *((req, TierRequestState.RETRACTED) for req in queue.retracted_queue),
            *((req, TierRequestState.RECEIVED) for req in self.loop.waiting_queue),
            *((req, TierRequestState.RUNS) for req in self.loop.running_batch.reqs),
        ]

    def idle(self) -> Iterator[tuple[str, Any, TierRequestState]]:
        """Yield the sessions without a running request, with the slot and the state that each keeps, None
        for nothing."""
        lent = {id(turn.req.kv) for turn in self.arrivals.values()}
        slots = self.release.slots(self.server.cache)
        for name in {**self.server.controller.sessions, **slots}:
            slot = slots.get(name)
            session = self.server.controller.get(name)
            if (slot is not None and id(slot.kv) in lent) or (
                slot is None and name in self.arrivals
            ):
                continue
            if name in self.arrivals:
                yield name, slot, TierRequestState.IDLE
            elif session is None or self.release.closing(session):
                yield name, slot, TierRequestState.OVER
            else:
                yield name, slot, TierRequestState.BUSY if session._inflight else TierRequestState.IDLE

    def _forget_ended(self) -> None:
        """Forget aborted requests that are in no queue."""
        known = {id(req) for req, _ in self.requests_with_states()}
        self.arrivals = {
            name: turn
            for name, turn in self.arrivals.items()
            if id(turn.req) in known or turn.req.finished_reason is None
        }
        self._reap()


class HostCopies(Bag):
    """`get_cpu_copy` and `load_cpu_copy` of one device pool, of which the copy holds stamps."""

    memory: list[int]
    cpu_offloading_chunk_size = 1 << 12

    def get_cpu_copy(self, indices: Any, **_: Any) -> list[list[list[Any]]]:
        """Return a layer of one chunk of one tensor."""
        return [[[torch.tensor([self.memory[slot] for slot in indices.tolist()])]]]

    def load_cpu_copy(self, copy: list[list[list[Any]]], indices: Any, **_: Any) -> None:
        stamps = [stamp for [tensor] in copy[0] for stamp in tensor.tolist()]
        for slot, stamp in zip(indices.tolist(), stamps, strict=True):
            self.memory[slot] = stamp
