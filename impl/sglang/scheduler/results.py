"""When the result of a launched batch is processed: at once, or one batch late (overlap scheduling).

Played after the releases' own loops. `event_loop_normal` processes a result before it plans the next batch.
`event_loop_overlap` (scheduler.py:1331 in 0.5.10, :1535 in 0.5.11, :1448 in 0.5.13, :2061 in 0.5.23) plans
and launches batch N+1 first, then processes the result of N. So N+1 is prepared without N's outputs: window
eviction takes `req.seqlen - 1`, a verify round is allocated for from kv_committed_len, and both lag.
A request that N finishes is in N+1 already, which has allocated for it; its result of N+1 is skipped.

In commands: Decode and SpecDecode launch a round, and a later Finish or Retract says what became of the
results. A Finish with outputs of the round before the last means that the last one was in flight; with
outputs of the last round, that no other was launched with this request (a prefill ran in its place, or
0.5.23 left it out: `_reqs_finishing_inflight`). in_flight of Retract is a round whose result is skipped.
Until such a command, up to two results of a request wait here. The view shows them as processed, their tokens
and what they commit: all else that moves memory has moved at the launch. Launch and Settle state the same
explicitly: a result of a Launch is visible from its Settle on; a later command still determines whether the
turn goes on.
"""

from __future__ import annotations

from impl.sglang.scheduler.live_requests import LiveRequest, Result
from impl.sglang.scheduler.server import Server
from impl.vocabulary import require
from reference.commands import Reason


class Results:
    """Results of event_loop_normal. They are processed as soon as they are there, all of them as of a turn
    that goes on."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def note_launch(self, turn: LiveRequest, result: Result) -> None:
        """Note the tokens that a launched batch will have sampled for the request."""
        self.process(turn, result)

    def process(self, turn: LiveRequest, result: Result) -> None:
        """Process a result as process_batch_result_prefill and _decode do, up to the release of a finished
        request."""
        req = turn.req
        release = self.server.release
        if self.server.spec and not result.prefill:
            release.commit(req, len(result.tokens))
        self.add_outputs(turn, result.tokens)
        if self.server.tracker is not None and result.batch is not None:
            self.server.tracker.note_processed(req, result.batch, result.batch_index, len(result.tokens))
        if result.prefill and not req.finished():
            with self.server.results_of_prefill():
                release.checkpoint(req, self.server.cache, chunked=False)

    def add_outputs(self, turn: LiveRequest, tokens: list[int]) -> None:
        """Add the tokens to the request's outputs, which may end the turn."""
        turn.req.output_ids.extend(tokens)
        turn.last_result_len = len(tokens)
        self.server.release.check_finished(turn.req, len(tokens))

    def before_round(self, turn: LiveRequest) -> None:
        """Process the results that a server has processed when it prepares the request's next round."""

    def before_eviction(self, turn: LiveRequest, length: int) -> None:
        """Process the results that a server has processed when it evicts from the request; refuse an
        eviction up to a position that no scheduler evicts to."""

    def before_finish(self, turn: LiveRequest, outputs: int) -> None:
        """Process the results before the output that ends the turn."""

    def before_retract(self, turn: LiveRequest, lost: bool) -> None:
        """Process the results that a scheduler has processed when it retracts the request; refuse a retract
        that no scheduler makes.

        lost: the step was launched, and so committed, and its result will never be processed.
        """
        # A verify round in flight has committed nothing where preparing it claims nothing.
        verify = lost and self.server.spec and turn.output > 1
        require(not verify or self.server.release.claimed, Reason.UNFAITHFUL)
        if lost:
            turn.req.output_ids = turn.req.output_ids[:-1]

    def ending(self, turn: LiveRequest, stop: int | None = None) -> None:
        """Process the result that finds the request finished: by its own mark (to_finish), by its length,
        or by a stop token as output number `stop`."""
        if stop is None:
            self.server.release.check_finished(turn.req)
            return
        self.stops(turn, turn.req.output_ids[stop - 1])
        self.server.release.check_finished(turn.req, len(turn.req.output_ids) - stop + 1)

    def stops(self, turn: LiveRequest, token: int) -> None:
        """Make this token end the turn."""
        sampling = turn.req.sampling_params
        sampling.ignore_eos = False
        sampling.stop_token_ids = [token]

    def skip(self, turn: LiveRequest) -> None:
        """Skip the results still in flight of a finished or retracted request."""


class LateResults(Results):
    """Results of event_loop_overlap. The result of N is processed when N+1 has been launched.

    A prefill whose result hands the prompt to the radix tree is processed as soon as a round of the request
    is launched, for that shows; until then nothing else that would show it may happen to the request.
    """

    def note_launch(self, turn: LiveRequest, result: Result) -> None:
        if self._prompt_waits(turn):
            self.process(turn, turn.pending.pop(0))
        turn.pending.append(result)

    def _prompt_waits(self, turn: LiveRequest) -> bool:
        return any(result.prefill for result in turn.pending) and self.server.hands_prompt_in(turn)

    def _process_all_but(self, turn: LiveRequest, left_count: int) -> None:
        while len(turn.pending) > left_count and turn.pending[0].visible:
            self.process(turn, turn.pending.pop(0))

    def before_round(self, turn: LiveRequest) -> None:
        self._process_all_but(turn, 1)

    def before_eviction(self, turn: LiveRequest, length: int) -> None:
        require(not self._prompt_waits(turn) and len(turn.unsettled_results) < 2, Reason.UNFAITHFUL)
        # it is the window eviction of the next launch, whatever its result will be
        if turn.pending:
            require(length <= turn.fill - 1 - len(turn.pending[-1].tokens), Reason.UNFAITHFUL)
        self._process_all_but(turn, 1)

    def before_finish(self, turn: LiveRequest, outputs: int) -> None:
        done = len(turn.req.output_ids)
        # What was processed as of a turn that goes on did not end it.
        require(outputs > done or (outputs == done and not turn.pending), Reason.UNFAITHFUL)
        ahead = (
            turn.pending[1:]
            if turn.pending and outputs == done + len(turn.pending[0].tokens)
            else ()
        )
        require(all(self._is_counted(turn, result) for result in ahead), Reason.UNFAITHFUL)
        while turn.pending and len(turn.req.output_ids) + len(turn.pending[0].tokens) < outputs:
            self.process(turn, turn.pending.pop(0))

    def before_retract(self, turn: LiveRequest, lost: bool) -> None:
        if lost:
            require(turn.pending and len(turn.pending[-1].tokens) == 1, Reason.UNFAITHFUL)
            require(self._is_counted(turn, turn.pending[-1]), Reason.UNFAITHFUL)
        else:
            require(not self._prompt_waits(turn), Reason.UNFAITHFUL)
        self._process_all_but(turn, int(lost))

    def _is_counted(self, turn: LiveRequest, last: Result) -> bool:
        """Return whether the slot will count the token that this batch in flight computes first.

        A slot that does not may lawfully keep a token less, which no command says.
        """
        spec = self.server.spec and not last.prefill
        return turn.session is None or not spec or self.server.release.counts_in_flight

    def ending(self, turn: LiveRequest, stop: int | None = None) -> None:
        if turn.pending:
            last = turn.pending.pop(0)
            if stop is not None:
                self.stops(turn, [*turn.req.output_ids, *last.tokens][stop - 1])
            self.process(turn, last)
        super().ending(turn, stop)

    def skip(self, turn: LiveRequest) -> None:
        for result in turn.pending:
            if self.server.spec and not result.prefill:
                self.server.release.skip_round(turn.req, len(result.tokens))
        turn.pending.clear()
