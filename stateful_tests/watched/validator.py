"""Validation of one log: each event becomes commands beside the reference, which follows what the server
chose.

The server chooses whom it runs, how long, whom it retracts, what its tree holds and how far it sweeps. All
else is judged: outcomes, cursors after every command, histories, and at each step that every page and row has
an owner. After a parting the reference goes on with what the server shows, so that one fault is told once.
"""

from __future__ import annotations

from collections.abc import Iterable

from impl.sglang.server import events as log
from reference import given, model
from reference.commands import Abort, Finish, Mode, Retract
from reference.ledger import Cursors, Phase, Request, Session, free, holders, text_cut, text_len
from stateful_tests.watched import deviations as known
from stateful_tests.watched.beside import TABLE, reads
from stateful_tests.watched.judging import Shown, Verdict
from stateful_tests.watched.reader import Line
from stateful_tests.watched.results import Validated
from stateful_tests.watched.rounds import Rounds


_FREE = {pool: f"tokens of the {pool} pool free or the tree's" for pool in ("full", "SWA")}


class Validator(Rounds):
    """Reads the events of one log. Each method is a row of the table."""

    def run(self, lines: Iterable[Line]) -> Validated:
        """Read all of it."""
        for line in lines:
            self.read(line)
        return self.result

    def read(self, line: Line) -> None:
        """Read one line."""
        self._line = line
        self.result.events += 1
        if self._blind and not isinstance(line.event, log.Snapshot):
            self.result.skipped["events after two turns in one row"] += 1
        else:
            TABLE[type(line.event)].read(self, line.event)

    # -- ends ---------------------------------------------------------------------------------------

    @reads(log.Released, "finish, retract or abort (spec_decode before it)", "cursors of the session's slot")
    def _release(self, e: log.Released) -> None:
        request = self._request(e.request)
        if request is None:
            return
        self._interrupts(e.request)
        self._catch_up(e.request, Cursors(*e.before))
        if e.reason is not None:
            self._ends_mixed(e.request, e.outputs, Cursors(*e.before))
        self._stands(e.request, Cursors(*e.before))
        request = self.state.request(e.request)
        assert request is not None
        self._launched.pop(e.request, None)
        self._midway.discard(e.request)
        self._matched.pop(e.request, None)
        self._counts(e)
        if e.request in self._rejected and e.session is not None:
            want = f"{e.session} has nothing of {e.request}, which it has rejected"
            told = Verdict("SES-2", want, "releases it as its turn")
            self._ends(None, told, known.rejected_as_turn(self.header))
            return
        text = text_cut(request.text, request.origin + min(e.outputs, e.limit or e.outputs))
        if e.reason is not None and (whose := self._orphans.pop(e.request, None)) is not None:
            self.state = given.with_history(self.state, whose, text)
        kept = {} if request.session is None else {request.session: Cursors(*e.after) if e.after else None}
        self._reach("overshoot that is trimmed", (e.counted or e.outputs) < request.output)
        if e.reason == "FINISH_ABORT":
            if request.session is not None and self._retracts[e.request]:
                self._kept[request.session] = text
            self._reach("an abort midway", self._rejected.pop(e.request, None) is None)
            self._do(Abort(e.request), shown=Shown({}, kept))
        elif e.counted == 0 and request.phase is Phase.RUNNING:
            was, self.state = self.state, given.finished_without_output(self.state, e.request)
            self._follow(Finish(e.request, 0), was, Shown({}, kept))
        elif e.reason is not None:
            self._do(Finish(e.request, e.outputs if e.counted is None else e.counted), shown=Shown({}, kept))
        else:
            self._retract(request, e, kept)
        for found in self._texts.ends(e.request, e.ids, goes_on=e.reason is None):
            self._part(None, found)
        session = self.state.session(request.session)
        if e.reason not in (None, "FINISH_ABORT") and session is not None:
            self._busy.pop(session.name, None)
            self._texts.keeps(e.request, session.name, e.ids, text_len(session.history))
        if e.after is None:
            self._pages.forget(request.holder)
        else:
            self._pages.cut(request.holder, e.after[0])

    def _counts(self, e: log.Released) -> None:
        """Outputs at an end, and how many of them count."""
        if e.reason is not None:
            self._outputs(e.request, e.outputs)
        least = 0 if self.header.speculative else e.outputs  # a verify round may go beyond a stop
        most = e.outputs if e.limit is None else min(e.outputs, e.limit)
        if e.reason == "FINISH_LENGTH" and e.limit is not None:
            least = most = e.limit
        if e.counted is not None and not least <= e.counted <= most:
            told = f"between {least} and {most} outputs count for {e.request}"
            self._part(None, Verdict("LEN-2", told, f"counts {e.counted}"))

    def _retract(self, request: Request, e: log.Released, kept: dict[str, Cursors | None]) -> None:
        self._outside[e.request] = None
        self._retracts[e.request] += 1
        self._reach("a retract")
        self._reach("a second retract of one request", self._retracts[e.request] == 2)
        self._reach("a retract before the first result", request.output == 1 and e.outputs == 0)
        in_flight = request.output - e.outputs
        command = Retract(e.request, in_flight)
        self._do(command, shown=Shown({}, kept))

    @reads(log.Requeued, "", "")
    def _requeue(self, e: log.Requeued) -> None:
        self._outside.pop(e.request, None)

    @reads(log.QueueAborted, "abort of each that waits", "")
    def _abort(self, e: log.QueueAborted) -> None:
        for name in e.queued:
            if (request := self.state.request(name)) is not None:
                self._reach("an abort in the queue")
                self._reach("an abort after a retract", request.started)
                self._abort_queued(name)

    # -- steps --------------------------------------------------------------------------------------

    @reads(
        log.Stepped, "decode, or spec_decode of what it claims",
        "cursors of each lane; counts: free, waiting, open, locked",
    )  # fmt: skip
    def _step(self, e: log.Stepped) -> None:
        if e.lanes:
            (self._speculate if self.header.speculative else self._decode)(e.lanes)
        self._given_up()
        self._closes_wait()
        self.result.steps += 1
        if self._number is not None and e.number != self._number + 1:
            missing = f"steps {self._number + 1} to {e.number - 1} are missing"
            self.result.skipped[missing if e.number > self._number else f"step {e.number} comes again"] += 1
        self._number = e.number
        if self._unpaged:
            self.result.skipped[f"the pages of step {e.number - 1} are missing"] += 1
        self._unpaged = self.header.level == "pages"
        if len(self._lanes) != e.batch:
            want = f"a batch of {len(self._lanes)}, as the round was prepared"
            self._part(None, Verdict("OUT-1", want, f"runs one of {e.batch}"))
        self._lanes, self.result.prepared = set(), False
        left, size = free(self.state), self.header.page_size
        waiting = sum(r.phase in (Phase.QUEUED, Phase.ADMITTED) for r in self.state.requests)
        swa = left.swa * size if self.geometry.window else 0
        self._counted("OWN-3", _FREE["full"], left.full * size, e.full + e.tree_full)
        self._counted("OWN-3", _FREE["SWA"], swa, e.swa + e.tree_swa)
        self._counted("OWN-4", "rows free", left.rows, e.rows)
        self._counted("SES-2", "requests wait", waiting, e.queued)
        self._counted("SES-2", "sessions are open", len(self.state.sessions), e.sessions)
        self.result.compared += 1
        held = sum(h.cursors.cache_protected_len for h in holders(self.state)) if e.tree_locked else 0
        if e.tree_locked > held + self._locked:
            self._locked = e.tree_locked - held
            want = f"at most {held} tokens of the tree locked: who has a row protects no more"
            self._part(None, Verdict("TREE-6", want, f"{e.tree_locked} are"))

    @reads(log.Paged, "", "rows, free lists, mapping, tree")
    def _paged(self, e: log.Paged) -> None:
        self._unpaged = False
        for found in self._pages.judge(self.state, e):
            self._part(None, found)

    def _counted(self, clause: str, what: str, want: int, got: int) -> None:
        """Compare a count; one that is off is told when it changes, not again at every step."""
        self.result.compared += 1
        if got - want != self._off[what]:
            was = f", {self._off[what]:+} before" if self._off[what] else ""
            self._off[what] = got - want
            deviation = known.owned_twice(self.header, got - want) if clause == "OWN-3" else None
            self._part(None, Verdict(clause, f"{want} {what}", f"{got} ({got - want:+}{was})"), deviation)

    @reads(log.Snapshot, "", "nothing: what is there is taken as given")
    def _snapshot(self, e: log.Snapshot) -> None:
        if e.dropped:
            self.result.skipped["events that the watcher dropped"] += e.dropped
        if self.result.events > 1 and not e.dropped and not self._blind:
            return  # a new part of a log that was read from before: nothing is new
        self._begin(e)

    def _begin(self, e: log.Snapshot) -> None:
        """A state of the reference from a server in the middle of its life."""
        state, serial = model.initial(self.geometry, Mode.FAITHFUL), 0
        self._times_out.clear()
        self._midway = {r.request for r in e.requests}
        self._closing.clear()
        turns: dict[str, Request] = {}
        for r in e.requests:
            serial += 1
            cursors = None if r.cursors is None else Cursors(*r.cursors)
            session = None if r.rejected and r.queued else r.session
            request = given.request_of(r.request, session, serial, r.tokens, r.outputs, cursors, r.retracted)
            state = state.with_request(request)
            if session is not None:
                turns[session] = request
        for s in e.sessions:
            serial += 1
            turn = turns.get(s.session)
            slot = None if s.cursors is None else Cursors(*s.cursors)
            first = turn is not None and turn.phase is not Phase.QUEUED and s.tokens == 0 and not turn.started
            history = ((serial, s.tokens),) if s.tokens else ()
            name = turn.name if turn is not None else None
            state = state.with_session(Session(s.session, history, None if first else slot, name))
            self._times_out.update([s.session] if s.times_out else [])
            if stays := known.stays_busy(self.header, retracted=True):  # what came before is not known
                self._busy[s.session] = stays
            self._closing.update({s.session: True} if s.closing else {})
        self._texts.history = {s.session: s.ids for s in e.sessions if s.ids is not None}
        self.state = state._replace(serial=serial)
        self.result.given += len(e.requests) + len(e.sessions)
        for kept in (self._outside, self._sweeps, self._matched, self._launched):
            kept.clear()
        self._blind, self._number, self._unpaged = False, None, False

    @reads(log.HookFailed, "", "")
    def _failed(self, e: log.HookFailed) -> None:
        self.result.skipped[f"the watcher's hook {e.where} failed: {e.error}"[:120]] += 1
