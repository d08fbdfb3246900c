"""The scheduler's steps: admit, extend, decode, speculate, evict. All entries of a batch are checked before
any of them changes."""

from __future__ import annotations

from collections.abc import Sequence

from impl.torch_kv.memory_checks import MemoryChecks
from impl.torch_kv.cursors import Lanes, N, RowCursors, maximum
from impl.lazy import Tensor, torch
from impl.torch_kv.requests import KVRequest
from impl.torch_kv.states import BUFFERS
from impl.vocabulary import IN_BATCH, Played, RequestPhase, require
from reference import commands as c
from reference.commands import Reason
from reference.token_ids import token_id


class Steps(MemoryChecks):
    """Batched steps of requests.

    width: cells of a row (tokens).
    """

    requests: dict[str, KVRequest]
    width: int

    def admit(self, command: c.Admit) -> None:
        [request] = self._lanes((command.request,), RequestPhase.QUEUED, RequestPhase.ADMITTED)
        self.restore(request)
        request.phase = RequestPhase.ADMITTED

    def extend(self, command: c.Extend) -> Played:
        """Prefill the next chunks of a batch's prompts, and decode the requests beside them."""
        requests = self._that_may_extend(command)
        lanes = {lane.request: lane for lane in command.lanes}
        decodes = [request for request in requests if request.phase is RequestPhase.RUNNING]
        prompts = [request for request in requests if request.phase is not RequestPhase.RUNNING]
        starts = [request.cursors.kv_committed_len for request in prompts]
        ends = [start + lanes[r.name].tokens for r, start in zip(prompts, starts, strict=True)]
        rows = [request.row for request in (*prompts, *decodes)]
        live = [
            self.tail_from(request, end) if lanes[request.name].tail else start
            for request, start, end in zip(prompts, starts, ends, strict=True)
        ]
        decoded = self._allocated_lens(decodes)
        require(not self.window_lost(decodes), Reason.WINDOW_LOST)
        states = self.states_taken(prompts)
        self.make_room(
            rows, starts + decoded, ends + self._after_decode(decodes), live + decoded, states
        )
        self.take_rows([request for request in prompts if request.row is None])
        for of_tails in (False, True):
            these = [request for request in prompts if lanes[request.name].tail is of_tails]
            if these:
                self.prefill(these, [lanes[request.name].tokens for request in these], of_tails)
        if decodes:
            self.compute_next(decodes)
        self.insert_unfinished(prompts)
        for request, end in zip(prompts, ends, strict=True):
            request.started = True
            request.phase = RequestPhase.EXTENDING
            if end == len(request.text):  # the prompt is in: one token is sampled
                request.phase = RequestPhase.RUNNING
                request.sample(1)
        self.launch(requests)
        return None

    def _that_may_extend(self, command: c.Extend) -> list[KVRequest]:
        """Return the requests of a batch that prefills, or refuse it for another reason than memory."""
        require(command.lanes and all(lane.tokens >= 1 for lane in command.lanes), Reason.EMPTY)
        names = [lane.request for lane in command.lanes]
        requests = self._lanes(
            names, RequestPhase.ADMITTED, RequestPhase.EXTENDING, RequestPhase.RUNNING
        )
        decodes = [request for request in requests if request.phase is RequestPhase.RUNNING]
        lanes = list(zip(requests, command.lanes, strict=True))
        tails = [request for request, lane in lanes if lane.tail]
        started = any(r in decodes or self.has_started(r) for r in tails)
        has_prefill = len(decodes) < len(requests)
        require(has_prefill and not self.has_late_results(decodes) and not started, Reason.WRONG_PHASE)
        require(not tails or self.window is not None, Reason.NO_SWA)
        fits = all(r.cursors.kv_committed_len + lane.tokens <= len(r.text) for r, lane in lanes)
        require(fits, Reason.BAD_LENGTH)
        return requests

    def prefill(
        self, requests: Sequence[KVRequest], tokens: list[int], received: bool = False
    ) -> None:
        """Allocate and write the next tokens[i] positions of requests with rows.

        received: the KV comes from another server, which sends SWA KV only for the last window.
        """
        store = self.store
        starts = [request.cursors.kv_committed_len for request in requests]
        ends = [start + count for start, count in zip(starts, tokens, strict=True)]
        live = (
            [self.tail_from(r, end) for r, end in zip(requests, ends, strict=True)]
            if received
            else []
        )
        stamps = self._stamps(requests, tokens, tokens)
        arguments = (tokens, live) if received else (tokens,)
        lanes = Lanes(store.device, requests, *arguments, tail=stamps)
        before, after = store.cursors.move(
            lanes, self.cursors_after_receive if received else self.cursors_after_chunk
        )
        # From the prefix on, whatever the row names there.
        start = before.kv_committed_len
        end = after.kv_allocated_len
        span = store.span(lanes.row, start, lanes.columns[0], tokens)
        if received:
            first_positions, counts = (
                lanes.columns[1],
                [end - first_positions for first_positions, end in zip(live, ends, strict=True)],
            )
            tail = store.span(lanes.row, first_positions, end - first_positions, counts)
            pages = [store.pages(first_positions, ends) for first_positions in (starts, live)]
            slots = store.alloc_tail(span, tail, start, first_positions, end, pages)
        else:
            slots = store.alloc_extend(lanes.row, start, end, span, store.pages(starts, ends))
        store.write(slots, lanes.tail)
        self.fold(requests, starts, ends)

    def has_started(self, request: KVRequest) -> bool:
        """Return whether the request has KV that is not the tree's."""
        return request.cursors.kv_allocated_len > request.cursors.cache_protected_len

    def tail_from(self, request: KVRequest, end: int) -> int:
        """Return the first position with an SWA slot in a received tail: where window eviction would stop."""
        return self.cursors_after_eviction(
            request.cursors, self.eviction_reach(request.cursors, end)
        ).swa_evicted_seqlen

    def cursors_after_receive(self, cursors: RowCursors[N], tokens: N, live: N) -> RowCursors[N]:
        """Return the cursors behind a received chunk, whose SWA KV begins at `live`: positions before count
        as evicted."""
        return self.cursors_after_chunk(cursors, tokens)._replace(swa_evicted_seqlen=live)

    def cursors_after_chunk(self, cursors: RowCursors[N], tokens: N) -> RowCursors[N]:
        """Return the cursors behind a chunk: C and A at its end (LEN-4)."""
        end = cursors.kv_committed_len + tokens
        return RowCursors(end, end, cursors.swa_evicted_seqlen, cursors.cache_protected_len)

    def decode(self, command: c.Decode) -> Played:
        require(command.requests, Reason.EMPTY)
        requests = self._lanes(command.requests, RequestPhase.RUNNING)
        require(not self.has_late_results(requests), Reason.WRONG_PHASE)
        require(not self.window_lost(requests), Reason.WINDOW_LOST)
        self.make_room(
            [r.row for r in requests], self._allocated_lens(requests), self._after_decode(requests)
        )
        self.compute_next(requests)
        self.launch(requests)
        return None

    def compute_next(self, requests: Sequence[KVRequest]) -> None:
        """Allocate and write the newest token of running requests, and sample one token each."""
        store = self.store
        starts = self._allocated_lens(requests)
        ends = self._after_decode(requests)
        ones = [1] * len(requests)
        lanes = Lanes(store.device, requests, tail=self._stamps(requests, ones, ones))
        before, _ = store.cursors.move(lanes, self.cursors_after_decode)
        span = store.span_of_one(lanes.row, before.kv_committed_len)
        fresh = [i for i, end in enumerate(ends) if end > starts[i]]  # the others have slots ahead
        if len(fresh) == len(requests):  # A is C in every entry
            slots = store.alloc_decode(
                lanes.row, before.kv_allocated_len, span, store.pages(starts, ends)
            )
        else:
            if fresh:
                pick = torch.tensor(fresh, dtype=torch.int64).to(store.device, non_blocking=True)
                row = lanes.row.take(pick)
                start = before.kv_allocated_len.take(pick)
                store.alloc_decode(
                    row, start, store.span_of_one(row, start), store.pages(starts, ends)
                )
            slots = store.slots(span)
        self.write_decoded(slots, lanes.tail, fresh)
        committed = [request.cursors.kv_committed_len for request in requests]
        self.fold(requests, [length - 1 for length in committed], committed)
        for request in requests:
            request.sample(1)

    @staticmethod
    def _allocated_lens(requests: Sequence[KVRequest]) -> list[int]:
        return [request.cursors.kv_allocated_len for request in requests]

    def _after_decode(self, requests: Sequence[KVRequest]) -> list[int]:
        """Return the kv_allocated_len of requests after one more token."""
        return [self.cursors_after_decode(request.cursors).kv_allocated_len for request in requests]

    def cursors_after_decode(self, cursors: RowCursors[N]) -> RowCursors[N]:
        """Return the cursors after one more token: A grows unless a draft has allocated ahead (LEN-4)."""
        committed, allocated, evicted, protected = cursors
        return RowCursors(committed + 1, maximum(allocated, committed + 1), evicted, protected)

    def write_decoded(self, slots: Tensor, tokens: Tensor, fresh: list[int]) -> None:  # noqa: ARG002
        """Write the token of every entry: a slot allocated ahead holds a rejected draft (READ-1).

        fresh: the entries with a newly allocated slot.
        """
        self.store.write(slots, tokens)

    def has_late_results(self, requests: Sequence[KVRequest], most: int = 0) -> bool:
        """Return whether a request has more than `most` results in flight."""
        return any(len(request.in_flight) > most for request in requests)

    def spec_decode(self, command: c.SpecDecode) -> Played:
        requests = self.verify(command.lanes, [self.commits(draft) for draft in command.lanes])
        for request, draft in zip(requests, command.lanes, strict=True):
            request.sample(draft.accept)
        return None

    def launch_ahead(self, command: c.Launch) -> Played:
        """Launch a verify round without its result: all its drafts count as committed until that comes."""
        requests = self.verify(command.lanes, [draft.allocate for draft in command.lanes], most_late=1)
        for request, draft in zip(requests, command.lanes, strict=True):
            request.in_flight.append(draft)
        return None

    def settle(self, command: c.Settle) -> None:
        """Take the oldest result: rejected drafts no longer count as committed."""
        [request] = self._lanes((command.request,), RequestPhase.RUNNING)
        require(request.in_flight, Reason.WRONG_PHASE)
        draft = request.in_flight.pop(0)
        self.move([request], self.cursors_after_reject, [draft.allocate - draft.accept])
        request.sample(draft.accept)

    def cursors_after_reject(self, cursors: RowCursors[N], rejected: N) -> RowCursors[N]:
        """Return the cursors without the rejected drafts (LEN-4)."""
        return cursors._replace(kv_committed_len=cursors.kv_committed_len - rejected)

    def verify(
        self, drafts: Sequence[c.Draft], taken: list[int], most_late: int = 0
    ) -> list[KVRequest]:
        """Run a verify round in which each entry commits `taken` tokens. Returns its requests."""
        require(drafts and all(d.allocate >= 1 and d.accept >= 1 for d in drafts), Reason.EMPTY)
        requests = self._lanes([draft.request for draft in drafts], RequestPhase.RUNNING)
        require(not self.has_late_results(requests, most_late), Reason.WRONG_PHASE)
        require(all(draft.accept <= draft.allocate for draft in drafts), Reason.BAD_LENGTH)
        rejected = [self.write_lag(request) for request in requests]
        computed = [r.cursors.kv_committed_len - n for r, n in zip(requests, rejected, strict=True)]
        starts = self._allocated_lens(requests)
        ahead = [draft.allocate for draft in drafts]
        numbers = zip(requests, ahead, taken, rejected, strict=True)
        ends = [self.cursors_after_round(r.cursors, *of_lane).kv_allocated_len for r, *of_lane in numbers]
        require(not self.window_lost(requests), Reason.WINDOW_LOST)
        self.make_room([r.row for r in requests], starts, ends)
        store = self.store
        counts = [end - start for start, end in zip(computed, ends, strict=True)]
        stamps = self._stamps(requests, counts, [draft.accept for draft in drafts], computed)
        lanes = Lanes(store.device, requests, ahead, taken, rejected, tail=stamps)
        before, after = store.cursors.move(lanes, self.cursors_after_round)
        start = before.kv_allocated_len
        end = after.kv_allocated_len
        grown = [end - start for start, end in zip(starts, ends, strict=True)]
        span = store.span(lanes.row, start, end - start, grown)
        slots = store.alloc_extend(lanes.row, start, end, span, store.pages(starts, ends))
        if starts != computed:  # some slots were allocated before
            base = before.kv_committed_len - lanes.columns[2]
            slots = store.slots(store.span(lanes.row, base, end - base, counts))
        store.write(slots, lanes.tail)
        accepted = [start + draft.accept for start, draft in zip(computed, drafts, strict=True)]
        self.fold(requests, computed, accepted)
        self.launch(requests)
        return requests

    def write_lag(self, request: KVRequest) -> int:
        """Return how far below C a round begins to write: behind the tokens that the device has accepted
        (READ-1)."""
        return request.rejected

    def cursors_after_round(self, cursors: RowCursors[N], ahead: N, taken: N, rejected: N) -> RowCursors[N]:  # noqa: ARG002
        """Return the cursors after a verify round: A at least C + ahead, and `taken` more tokens committed.
        With rounds in flight C is past all that they may accept (LEN-5)."""
        committed, allocated, evicted, protected = cursors
        return RowCursors(
            committed + taken, maximum(allocated, committed + ahead), evicted, protected
        )

    def commits(self, draft: c.Draft) -> int:
        """Return the tokens that a verify round commits: the accepted, not the drafted (LEN-4)."""
        return draft.accept

    def evict_swa(self, command: c.EvictSwa) -> Played:
        [request] = self._lanes((command.request,), *IN_BATCH)
        require(self.window is not None, Reason.NO_SWA)
        require(0 <= command.length <= request.cursors.kv_allocated_len, Reason.BAD_LENGTH)
        self.evict_window(request, command.length)
        return self.eviction_choice(request)

    def eviction_choice(self, request: KVRequest) -> Played:  # noqa: ARG002
        """Return window eviction's choice (OUT-3): none, the specification's default."""
        return None

    def _lanes(self, names: Sequence[str], *phases: RequestPhase) -> list[KVRequest]:
        """Return the requests of a batch, or refuse: each once, known, in one of these phases."""
        require(len(set(names)) == len(names), Reason.DUPLICATE_LANE)
        requests = [self.requests[name] for name in names if name in self.requests]
        require(len(requests) == len(names), Reason.UNKNOWN_REQUEST)
        require(all(request.phase in phases for request in requests), Reason.WRONG_PHASE)
        return requests

    def window_lost(self, requests: Sequence[KVRequest]) -> bool:
        """Return whether a window eviction ran past C in an entry: that request may end, not continue
        (SWA-2)."""
        return not all(self.window_live(self.evicted_end(r.cursors), r.settled) for r in requests)

    def make_room(
        self,
        rows: Sequence[int | None],
        starts: Sequence[int],
        ends: Sequence[int],
        live: Sequence[int] | None = None,
        states: int = 0,
    ) -> None:
        """Make room for positions [starts[i], ends[i]), or refuse before anything changes.

        live: their first positions in the SWA pool, if these differ.
        states: slots of recurrent state.
        """
        require(max(ends) <= self.width, Reason.ROW_TOO_SHORT)
        require(rows.count(None) <= len(self.store.free_rows), Reason.NO_ROW)
        self.room_for(
            self.store.pages(starts, ends), self.store.pages(live or starts, ends), states
        )

    def states_taken(self, prompts: Sequence[KVRequest]) -> int:
        """Return the slots of recurrent state that a prefill needs: for requests without one, for buffers,
        and for the copies that the tree gets."""
        copies = (
            sum(self.slot_of(request) is None for request in prompts)
            if self.tree is not None
            else 0
        )
        buffers = 0
        if self.tracks:
            buffers = BUFFERS * sum(request.row is None for request in prompts)
        return sum(request.state is None for request in prompts) + copies + buffers

    def _stamps(
        self,
        requests: Sequence[KVRequest],
        counts: list[int],
        real: list[int],
        starts: Sequence[int] = (),
    ) -> list[int]:
        """Return the tokens of each request's next counts[i] positions; 0, for rejected drafts, past real[i].

        starts: their first positions, if not kv_committed_len.
        """
        stamps: list[int] = []
        starts = starts or [request.cursors.kv_committed_len for request in requests]
        for request, count, good, start in zip(requests, counts, real, starts, strict=True):
            # Accepted drafts are written before the text has them: their ids follow from positions.
            text = request.text[start : start + good]
            stamps += text
            stamps += [token_id(request.serial, p) for p in range(start + len(text), start + good)]
            stamps += [0] * (count - good)
        return stamps
