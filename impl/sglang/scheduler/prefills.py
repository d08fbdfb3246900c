"""Admit and Extend: a request matches and locks a prefix, and its input is computed in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from impl.lazy import torch

from impl.sglang.parts.stand_ins import SERVER_ARGS, ForwardMode
from impl.sglang.scheduler.live_requests import LiveRequest, Result
from impl.sglang.scheduler.on_server import OnServer
from impl.vocabulary import RequestPhase, require
from reference import commands as c
from reference.commands import Choice, Reason


class _Chunk(NamedTuple):
    """A chunk of a request's input that ends at `end` (tokens)."""

    turn: LiveRequest
    end: int

    @property
    def last(self) -> bool:
        return self.end == self.turn.fill


class _Batch(NamedTuple):
    """The batch of a prefill.

    decodes: entries of one token each beside the chunks.
    received: another server has computed the one chunk.
    """

    entries: list[LiveRequest]  # all, in the order of the command
    chunks: list[_Chunk]
    decodes: list[LiveRequest]
    received: bool


class Prefills(OnServer):
    """Admit and Extend."""

    def admit(self, command: c.Admit) -> None:
        turn = self._turn(command.request)
        require(turn.phase in (RequestPhase.QUEUED, RequestPhase.ADMITTED), Reason.WRONG_PHASE)
        if self.server.states is not None:
            lent = turn.session is not None and self.server.slot(turn.session) is not None
            new = turn.phase is RequestPhase.QUEUED and not lent
            self.server.states.require_for_match(turn.req, lent, self.server.owed_states(), new)
        self._let_go(turn)
        turn.req.init_next_round_input(self.server.cache)
        if self.server.tree is not None and self.release.row(turn.req) is None:
            # What was matched is locked from here on: between the two nothing would keep it.
            self.server.tree.lock(turn.req)
            turn.locked = True
        turn.phase = RequestPhase.ADMITTED

    def extend(self, command: c.Extend) -> list[Choice]:
        batch = self._batch_of(command)
        evicted = self._eviction_lengths(batch.entries)
        spans = self._plan_chunks(batch)
        self._run_prefill(batch, spans)
        launched = self._eviction_lengths(batch.entries)
        self._process_results(batch)
        late = {choice.request for choice in self._window_evictions(batch.entries, launched)}
        evictions = self._own_evictions(batch.entries, evicted, launched)
        if batch.received and not evictions:
            evictions = [Choice(batch.chunks[0].turn.name, evicted[0])]
        return [replace(choice, after=choice.request in late) for choice in evictions]

    def _batch_of(self, command: c.Extend) -> _Batch:
        """Return the batch that the command asks for; refuse what no scheduler launches."""
        lanes = command.lanes
        require(lanes and all(lane.tokens >= 1 for lane in lanes), Reason.EMPTY)
        may = RequestPhase.ADMITTED, RequestPhase.EXTENDING, RequestPhase.RUNNING
        entries = self._lanes([lane.request for lane in lanes], *may)
        decodes = [turn for turn in entries if turn.phase is RequestPhase.RUNNING]
        tokens_of = {lane.request: lane.tokens for lane in lanes}
        runs = {turn.name for turn in decodes}
        received = [lane.request for lane in lanes if lane.tail]
        require(len(decodes) < len(entries) and runs.isdisjoint(received), Reason.WRONG_PHASE)
        require(all(tokens_of[turn.name] == 1 for turn in decodes), Reason.BAD_LENGTH)
        chunks = [
            _Chunk(turn, self._chunk_from(turn) + tokens_of[turn.name])
            for turn in entries
            if turn.phase is not RequestPhase.RUNNING
        ]
        require(all(chunk.end <= chunk.turn.fill for chunk in chunks), Reason.BAD_LENGTH)
        self._window(decodes)
        require(not (decodes and self.server.spec), Reason.UNFAITHFUL)
        if self.server.tracker is not None:
            # A chunk ends with a page (_plan_chunked_prefill); only one that goes on gets what decodes leave.
            page = self.server.geometry.page_size
            goes_on = {RequestPhase.EXTENDING} if decodes else set()
            ends = (c.last or c.end % page == 0 or c.turn.phase in goes_on for c in chunks)
            require(all(ends), Reason.UNFAITHFUL)
        require(not received or self._is_received(chunks), Reason.UNFAITHFUL)
        self._require_room(chunks, decodes)
        # a window eviction keeps clear of the chunk in flight, which is at most that long
        if self.overlap:
            longest = max(tokens_of.values())
            SERVER_ARGS.chunked_prefill_size = max(SERVER_ARGS.chunked_prefill_size, longest)
        if decodes:
            self._kind_of_run(spec=False)
        return _Batch(entries, chunks, decodes, bool(received))

    def _require_room(self, chunks: Sequence[_Chunk], decodes: Sequence[LiveRequest]) -> None:
        """Refuse a batch for which there are too few rows, pages or state slots."""
        fresh = sum(self.release.row(chunk.turn.req) is None for chunk in chunks)
        spans = [(chunk.turn.prefix, chunk.end) for chunk in chunks]
        self.server.require_room([*spans, *((turn.fill - 1, turn.fill) for turn in decodes)], fresh)
        if self.server.states is not None:
            copies = sum(self.server.hands_prompt_in(chunk.turn) for chunk in chunks)
            copies += self.server.owed_states()
            self.server.states.require_for_prefill([chunk.turn.req for chunk in chunks], copies)

    def _plan_chunks(self, batch: _Batch) -> list[tuple[int, int]]:
        """Match and lock the prefixes of the requests, and set the positions that each chunk computes
        (PrefillAdder)."""
        spans = []
        for turn, end in batch.chunks:
            if turn.locked:
                # matched when it was admitted; from here on the lock goes with the row
                turn.locked = False
            elif turn.phase is RequestPhase.ADMITTED:
                self._match_and_lock(turn)
            else:  # it goes on with what it has
                turn.req.init_next_round_input()
            spans.append((turn.prefix, end))
            self.release.set_chunk(turn.req, turn.prefix, end)
            if end < turn.fill:
                self.release.count_chunk(turn.req, 1)
        return spans

    def _run_prefill(self, batch: _Batch, spans: Sequence[tuple[int, int]]) -> None:
        """Prepare the batch, and run it (Scheduler._get_new_batch_prefill)."""
        server = self.server
        turns = [chunk.turn for chunk in batch.chunks]
        for turn in turns:
            if turn.session is not None and self.release.row(turn.req) is None:
                turn.session_had_no_slot = server.slot(turn.session) is None
        prefill = server.new_batch(turns, ForwardMode.EXTEND)
        if batch.received:
            self._receive(prefill, turns[0], *spans[0])
        else:
            prefill.prepare_for_extend()
        if batch.decodes:
            for turn in batch.decodes:
                self.results.before_round(turn)
            running = server.new_batch(batch.decodes, ForwardMode.DECODE)
            running.prepare_for_decode()
            if (
                running.input_ids is None
            ):  # in some weeks the scheduler gives a batch its last tokens
                running.input_ids = torch.tensor([turn.text[-1] for turn in batch.decodes])
            prefill.mix_with_running(running)
        self._launch(batch.entries, ForwardMode.EXTEND)
        if server.states is not None:
            server.states.run_deferred(prefill)
        server.forward_batch(prefill, turns, spans)

    def _process_results(self, batch: _Batch) -> None:
        """Process the results of the batch, and insert the chunks that are not the last of their prompt
        into the tree."""
        server = self.server
        with server.results_of_prefill(all(chunk.last for chunk in batch.chunks)):
            for chunk in batch.chunks:
                turn = chunk.turn
                turn.started = True
                if chunk.last:
                    turn.phase = RequestPhase.RUNNING
                    self.results.note_launch(turn, Result(server.sample(turn, 1), prefill=True))
                else:
                    self.release.count_chunk(turn.req, -1)
                    turn.phase = RequestPhase.EXTENDING
                    self.release.checkpoint(turn.req, server.cache, chunked=True)
            for turn in batch.decodes:
                server.forward(turn, turn.fill - 1, turn.fill)
                self.results.note_launch(turn, Result(server.sample(turn, 1)))

    def _is_received(self, chunks: Sequence[_Chunk]) -> bool:
        """Return whether the command is a whole input by itself, of which only the tree has a part: as on a
        server that only decodes, with pages of several tokens."""
        [chunk, *others] = chunks
        turn = chunks[0].turn
        new = turn.phase is RequestPhase.ADMITTED and self.release.row(turn.req) is None
        paged = self.server.swa_pool is not None and self.server.geometry.page_size > 1
        return paged and new and not others and chunk.last

    def _receive(self, batch: Any, turn: LiveRequest, start: int, end: int) -> None:
        """Allocate SWA slots for the last window alone, as alloc_for_decode_prealloc of
        disaggregation/decode.py does."""
        geometry = self.server.geometry
        allocator = self.server.allocator
        live = max(start, end - self.release.received_tail(end, geometry, allocator))

        def alloc_extend(*lengths: Any, num_new_pages: Any = None) -> Any:  # noqa: ARG001
            return allocator.alloc_extend_swa_tail(*lengths, swa_tail_len=end - live)

        allocator.alloc_extend = alloc_extend
        try:
            batch.prepare_for_extend()
        finally:
            del allocator.alloc_extend
        if live > start:
            self.release.set_eviction_cursor(turn.req, live)

    def _chunk_from(self, turn: LiveRequest) -> int:
        """Return the start of the next chunk: the committed length, less the token to recompute.

        A release may prefill from earlier (0.5.10 matches one token less than it could); the chunk
        still ends where it was asked to end, as a scheduler that prefills the rest would have it.
        """
        if turn.phase is RequestPhase.EXTENDING or self.release.row(turn.req) is None:
            return turn.prefix
        return min(self.release.cursors(turn.req).kv_committed_len, turn.fill - 1)
