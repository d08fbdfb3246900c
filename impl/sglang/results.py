"""When the result of a launched batch is processed: at once, or one batch late (overlap scheduling).

Played after the releases' own loops. `event_loop_normal` processes a result before it plans the next batch.
`event_loop_overlap` (scheduler.py:1331 in 0.5.10, :1535 in 0.5.11, :1448 in 0.5.13, :2061 in 0.5.23) plans
and launches batch N+1 first, then processes the result of N. So N+1 is prepared without N's outputs: the sweep
takes `req.seqlen - 1`, a verify round is allocated for from kv_committed_len, and both lag. A request that N
finishes is in N+1 already, which has allocated for it; what N+1 says of it is skipped.

In commands: Decode and SpecDecode launch a round, and Finish or Retract tells afterwards what became of the
results. A Finish with outputs of the round before the last means that the last one was in flight; with
outputs of the last round, that no other was launched with this request (a prefill ran in its place, or 0.5.23
left it out: `_reqs_finishing_inflight`). in_flight of Retract is a round whose result is skipped. Until a
command tells, up to two results of a request wait here. The view shows them as processed, their tokens and what
they commit: all else that moves memory has moved at the launch.
"""

from __future__ import annotations

from impl.sglang.refusals import need
from impl.sglang.server import Result, Server, Turn
from reference.commands import Reason


class Results:
    """event_loop_normal: processed as soon as they are there, all of them as of a turn that goes on."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def arrived(self, turn: Turn, result: Result) -> None:
        """A batch was launched, and this is what it will have sampled for the request."""
        self.process(turn, result)

    def process(self, turn: Turn, result: Result) -> None:
        """process_batch_result_prefill and _decode up to where they release a finished request."""
        req, release = turn.req, self.server.release
        if self.server.spec and not result.prefill:
            release.commit(req, len(result.tokens))
        req.output_ids.extend(result.tokens)
        release.check_finished(req, len(result.tokens))
        if result.prefill and not req.finished():
            release.checkpoint(req, self.server.cache, chunked=False)

    def before_round(self, turn: Turn) -> None:
        """What has been processed when the next round of the request is prepared."""

    def before_finish(self, turn: Turn, outputs: int) -> None:
        """Process what comes before the output that ends the turn."""

    def before_retract(self, turn: Turn, lost: bool) -> None:
        """Process what a scheduler has processed that retracts the request now.

        lost: its step was launched, and so committed; its result will never be processed. Raises No
        where no scheduler comes to that.
        """
        # A verify round in flight has committed nothing where preparing it claims nothing.
        need(not (lost and self.server.spec and not self.server.release.claimed), Reason.UNFAITHFUL)
        if lost:
            turn.req.output_ids = turn.req.output_ids[:-1]

    def ending(self, turn: Turn) -> None:
        """The result that finds the request finished: its own mark (to_finish) or its length says so."""
        self.server.release.check_finished(turn.req)

    def skip(self, turn: Turn) -> None:
        """The request is finished or retracted: what results of it still come are skipped."""


class LateResults(Results):
    """event_loop_overlap: the result of N is processed when N+1 has been launched.

    The result of a prefill that hands its prompt to the radix tree is processed at once, as it is where the
    next batch is a prefill too and SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP is set, or another prefill
    comes between: what it moves belongs to no later command.
    """

    def arrived(self, turn: Turn, result: Result) -> None:
        if result.prefill and self.server.hands_prompt_in(turn):
            self.process(turn, result)
        else:
            turn.pending.append(result)

    def _process_all_but(self, turn: Turn, left: int) -> None:
        while len(turn.pending) > left:
            self.process(turn, turn.pending.pop(0))

    def before_round(self, turn: Turn) -> None:
        self._process_all_but(turn, 1)

    def before_finish(self, turn: Turn, outputs: int) -> None:
        done = len(turn.req.output_ids)
        # What was processed as of a turn that goes on did not end it.
        need(outputs > done or (outputs == done and not turn.pending), Reason.UNFAITHFUL)
        while turn.pending and len(turn.req.output_ids) + len(turn.pending[0].tokens) < outputs:
            self.process(turn, turn.pending.pop(0))

    def before_retract(self, turn: Turn, lost: bool) -> None:
        if lost:
            need(turn.pending and len(turn.pending[-1].tokens) == 1, Reason.UNFAITHFUL)
            # A slot that leaves out what the round computed first is as if the round had not been.
            counted = turn.pending[-1].prefill or not self.server.spec or self.server.release.counts_in_flight
            need(counted or turn.session is None, Reason.UNFAITHFUL)
        self._process_all_but(turn, int(lost))

    def ending(self, turn: Turn) -> None:
        if turn.pending:
            self.process(turn, turn.pending.pop(0))
        super().ending(turn)

    def skip(self, turn: Turn) -> None:
        for result in turn.pending:
            if self.server.spec and not result.prefill:
                self.server.release.skipped(turn.req, len(result.tokens))
        turn.pending.clear()
