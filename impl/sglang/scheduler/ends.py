"""The ends of turns: finishes, retracts and aborts, and what becomes of a turn that was rejected."""

from __future__ import annotations

from collections.abc import Sequence

from impl.sglang.parts import namespaces
from impl.sglang.parts.stand_ins import ForwardMode
from impl.sglang.scheduler.live_requests import LiveRequest
from impl.sglang.scheduler.on_server import OnServer
from impl.vocabulary import RequestPhase, require
from reference import commands as c
from reference.commands import Choice, Reason


class Ends(OnServer):
    """Finish, Retract and Abort."""

    def _kept_choices(
        self, turn: LiveRequest, allocated: int, target: int, first: int | None
    ) -> list[Choice]:
        """Return what the slot of a turn with so many slots has kept of it, if that is less than up to
        `target`; or that it counts up to `first`, with the token that a round in flight computes first."""
        slot = None if turn.session is None else self.server.slot(turn.session)
        if slot is None:
            return []
        committed, kept_len = self.release.cursors(slot)[:2]
        less = kept_len if kept_len < min(allocated, target) else None
        counts = first if committed == first else None
        return [] if less is counts is None else [Choice(turn.name, None, less, False, counts)]

    @staticmethod
    def _first_in_flight(turn: LiveRequest) -> int | None:
        """Return the position behind the first token that the oldest round in flight computes."""
        return turn.origin + turn.visible_output if turn.unsettled_results else None

    def finish(self, command: c.Finish) -> list[Choice]:
        turn = self._turn(command.request)
        require(turn.phase is RequestPhase.RUNNING, Reason.WRONG_PHASE)
        require(1 <= command.finished_len <= turn.visible_output, Reason.BAD_LENGTH)
        # Each token is looked at before the next is computed: no overlap, no drafts.
        all_count = self.server.states is None or command.finished_len == turn.visible_output
        require(all_count or self.overlap or self.server.spec, Reason.UNFAITHFUL)
        first = self._first_in_flight(turn)
        self.results.before_finish(turn, command.finished_len)
        stops = self._ends_by_stop(turn, command.finished_len)
        if not stops:
            # the turn was to have that many outputs, so that is what the client saw of it
            turn.req.sampling_params.max_new_tokens = command.finished_len
        allocated = self.release.cursors(turn.req).kv_allocated_len
        self._end(turn, command.finished_len if stops else None)
        return self._kept_choices(turn, allocated, turn.origin + command.finished_len, first)

    def _ends_by_stop(self, turn: LiveRequest, outputs: int) -> bool:
        """Return whether a stop token ends the turn. Where its last result has outputs behind the end, one
        does after an even number of outputs, and the limit does after an odd one."""
        done = len(turn.req.output_ids)
        last = len(turn.pending[0].tokens) if turn.pending else turn.last_result_len
        first = done if turn.pending else done - last
        return first < outputs < min(first + last, turn.visible_output) and outputs % 2 == 0

    def _retract(self, turn: LiveRequest) -> None:
        """Retract a request as ScheduleBatch.retract_decode does, if that picks this one of the running
        batch and the others continue; otherwise as retract_all and priority preemption do, which take
        any request."""
        running = [
            t
            for t in self.server.turns.values()
            if t.phase is RequestPhase.RUNNING and t is not turn
        ]
        others = [t for t in running if _standing(t) >= _standing(turn)]
        if others and self._fits(others):
            batch = self.server.new_batch([*others, turn], ForwardMode.DECODE)
            if self.release.retract_decode(batch) != ([turn.req], []):
                raise RuntimeError("retract_decode has taken other requests than by its order")
        else:
            self.release.retract(self.server.new_batch([turn], ForwardMode.DECODE))

    def _fits(self, turns: Sequence[LiveRequest], evicting: bool = False) -> bool:
        """Return whether the next step of these requests has room.

        evicting: evictable pages of the radix tree count as well.
        """
        page = self.server.geometry.page_size
        server = self.server
        pools = [
            p.available_size() // page for p in (server.full_pool, server.swa_pool) if p is not None
        ]
        room = min(server.free_counts()[1:] if evicting else pools)
        cursors = [server.cursors(t) for t in turns]
        if not server.spec:
            return sum(c.kv_committed_len % page == 0 for c in cursors) <= room
        ahead = self.release.draft_len
        ends = [self.release.spec_end(c, ahead, page) for c in cursors]
        needs = sum(-(-e // page) - -(-c.kv_allocated_len // page) for e, c in zip(ends, cursors))
        # Up to 0.5.12 what is allocated already does not count.
        return max(needs, 2 * -(-ahead // page) * len(turns)) <= room

    def _last_resort(self, turn: LiveRequest) -> bool:
        """Give up the one request that runs, as retract_decode does where its next step does not fit."""
        running = [t for t in self.server.turns.values() if t.phase is RequestPhase.RUNNING]
        if running != [turn] or self._fits(running, evicting=True):
            return False
        if any(result.prefill for result in turn.pending) and self.server.hands_prompt_in(turn):
            return False
        self.results.before_retract(turn, False)
        batch = self.server.new_batch(running, ForwardMode.DECODE)
        if self.release.retract_decode(batch) != ([], [turn.req]):
            return False
        self.results.skip(turn)
        self.server.scheduler.remove(turn.req)
        del self.server.turns[turn.name]
        self._reap()
        return True

    def retract(self, command: c.Retract) -> list[Choice]:
        turn = self._turn(command.request)
        require(turn.phase is RequestPhase.RUNNING, Reason.WRONG_PHASE)
        lost = command.in_flight
        first = self._first_in_flight(turn)
        require(0 <= lost <= (first is None), Reason.BAD_LENGTH)
        require(turn.visible_output > lost or not self.server.geometry.tree, Reason.BAD_LENGTH)
        require(self.server.states is None or not lost or self.overlap, Reason.UNFAITHFUL)
        target = turn.origin + turn.visible_output - lost
        self.results.before_retract(turn, bool(lost))
        allocated = self.release.cursors(turn.req).kv_allocated_len
        self._retract(turn)
        self.server.scheduler.remove(turn.req)
        self.results.skip(turn)
        turn.phase = RequestPhase.QUEUED
        turn.session_had_no_slot = False
        return self._kept_choices(turn, allocated, target, first)

    def abort(self, command: c.Abort) -> None:
        turn = self._turn(command.request)
        if command.marked:
            require(turn.phase is RequestPhase.QUEUED and not turn.started, Reason.WRONG_PHASE)
            self.server.require_room([(0, 1)], 1)
            if self.server.states is not None:
                self.server.states.require(
                    2 + self.server.states.buffers + self.server.owed_states()
                )
            turn.req.set_finish_with_abort("marked")
            # The one token is of no text: whoever is marked shares it, in no namespace.
            for field in namespaces.key_fields(self.server.namespace):
                setattr(turn.req, field, None)
            turn.in_namespace = False
            self._one_token_prefill(turn)
            del self.server.turns[turn.name]
            self._reap()
        elif turn.phase in (RequestPhase.QUEUED, RequestPhase.ADMITTED):
            # Scheduler.abort_request takes it out of the waiting queue, also when it waits after a
            # retract. There it has no lock.
            self._let_go(turn)
            self.release.abort_queued(turn.req, self.server.cache)
            del self.server.turns[turn.name]
            self._reap()
        elif not (turn.phase is RequestPhase.RUNNING and self._last_resort(turn)):
            turn.req.to_finish = self.release.batch.FINISH_ABORT()
            self._end(turn)

    def _end(self, turn: LiveRequest, stop: int | None = None) -> None:
        """Process the last result of a running request: it is found finished and is released.

        stop: of its outputs the one that is a stop token.
        """
        req = turn.req
        allocator = self.server.allocator
        allocator.free_group_begin()
        self.results.ending(turn, stop)
        self.release.end(req, self.server.cache)
        allocator.free_group_end()
        self.results.skip(turn)
        del self.server.turns[turn.name]
        self._reap()

    def _one_token_prefill(self, turn: LiveRequest) -> None:
        """Prefill the one token of a queued request that was marked aborted."""
        server = self.server
        req = turn.req
        self._match_and_lock(turn)
        self.release.set_chunk(req, turn.prefix, turn.fill)
        batch = server.new_batch([turn], ForwardMode.EXTEND)
        batch.prepare_for_extend()
        self._launch([turn], ForwardMode.EXTEND)
        if server.states is not None:
            server.states.run_deferred(batch)
        server.forward_batch(batch, [turn], [(turn.prefix, turn.fill)])
        req.output_ids.extend(server.sample(turn, 1))
        self.release.check_finished(req)
        with server.results_of_prefill():
            self.release.end(req, server.cache)


def _standing(turn: LiveRequest) -> tuple[int, int]:
    """Return the request's place in the order of retract_decode, which retracts the lowest first, and of
    equals the last of the batch."""
    return len(turn.req.output_ids), -turn.origin
