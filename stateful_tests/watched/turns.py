"""How events of sessions and of waiting requests are read."""

from __future__ import annotations

from impl.sglang.server import events as log
from reference import given
from reference.commands import Abort, Close, Command, Open, Reason, Submit
from reference.ledger import Session, text_len
from stateful_tests.watched import deviations as known
from stateful_tests.watched.beside import Beside, reads
from stateful_tests.watched.judging import Verdict


class Turns(Beside):
    """Each method is a row of the table."""

    # -- sessions -----------------------------------------------------------------------------------

    @reads(log.SessionOpened, "open", "")
    def _open(self, e: log.SessionOpened) -> None:
        if e.done:
            self._do(Open(e.session))
            self._times_out.update([e.session] if e.times_out else [])
        elif self.state.session(e.session) is None:
            self.result.policy["open"] += 1

    @reads(log.CloseAsked, "", "it is closed at once, if no turn is in flight")
    def _close_asked(self, e: log.CloseAsked) -> None:
        session = self.state.session(e.session)
        in_flight = session is not None and session.turn is not None
        self._reach("a close while a turn is in flight", in_flight)
        self._closing[e.session] = in_flight

    @reads(log.SessionClosed, "close", "no turn is in flight; somebody asked for it, or its time is over")
    def _closed(self, e: log.SessionClosed) -> None:
        session = self.state.session(e.session)
        asked = self._closing.pop(e.session, None) is not None or e.session in self._times_out
        self._times_out.discard(e.session)
        if session is not None and not asked:
            want = f"{e.session} stays open: nobody has closed it, and it has no timeout"
            self._part(Close(e.session), Verdict("SES-2", want, "closed it"))
        if session is not None and session.turn is not None:
            want = f"{e.session} stays until its turn {session.turn} ends"
            self._orphan(session, Close(e.session), Verdict("SES-2", want, "closed it"), ends=True)
            return
        self._busy.pop(e.session, None)
        self._do(Close(e.session))
        self._pages.forget(e.session)
        self._texts.history.pop(e.session, None)

    def _closes_wait(self) -> None:
        """A close that nothing keeps waiting has happened by the next step."""
        for name, waits in self._closing.items():
            if not waits and self.state.session(name) is not None:
                self._closing[name] = True
                want = f"{name} is closed: none of its turns is in flight"
                self._part(Close(name), Verdict("SES-4", want, "it is open"), self._busy.get(name))

    @reads(
        log.Submitted, "submit (rejected: submit of a request by itself)", "origin; that a rejection is due"
    )
    def _submit(self, e: log.Submitted) -> None:
        session = self.state.session(e.session)
        if e.rejected:
            self._reject(e, session)
            return
        for found in self._texts.asks(e.request, e.session, e.ids):
            self._part(None, found)
        command = Submit(e.request, e.session, e.new)
        if session is not None and session.turn is not None:
            want = f"refused: {Reason.TURN_IN_FLIGHT.value}, as {session.turn} has not ended"
            self._orphan(session, command, Verdict("OUT-1", want, "took the turn"), ends=True)
            return
        kept = self._kept.pop(e.session or "", None)
        if session is not None and kept is not None and text_len(kept) + e.new == e.tokens:
            told = Verdict("SES-1", "the history without the turn that was aborted", f"has {e.tokens} tokens")
            self._part(command, told, known.orphaned(self.header, retracted=True, rejected=False))
            self.state = given.with_history(self.state, session.name, kept)
        if self._do(command):
            origin = self._origin(e.request)
            if origin != e.tokens:
                told = Verdict(
                    "SES-1", f"{origin} tokens of input: the history and {e.new} new", f"has {e.tokens}"
                )
                self._part(command, told)
                request = self.state.request(e.request)
                assert request is not None
                self.state = self.state.with_request(request._replace(origin=e.tokens))
            self.result.compared += 1

    def _orphan(self, session: Session, command: Command, found: Verdict, *, ends: bool) -> None:
        """The server no longer counts a turn as its session's. ends: others may write into its row."""
        assert session.turn is not None
        retracted, rejected = self._retracts[session.turn] > 0, session.turn in self._interrupted
        deviation = known.orphaned(self.header, retracted=retracted, rejected=rejected)
        (self._ends if ends else self._part)(command, found, deviation)
        self.state = known.without_turn(self.state, session)
        self._orphans[session.turn] = session.name

    def _origin(self, name: str) -> int:
        request = self.state.request(name)
        assert request is not None
        return request.origin

    def _reject(self, e: log.Submitted, session: Session | None) -> None:
        """It was refused as a turn; what runs is a request of one token, outside of the session."""
        busy = session is not None and session.turn is not None
        if session is not None and not busy and "active request" in e.why:
            told = Verdict(
                "OUT-1", f"done: no turn of {session.name} is in flight", "refused: turn_in_flight"
            )
            self._part(Submit(e.request, e.session, e.new), told, self._busy.get(session.name))
        elif not busy:
            self.result.policy[f"submit: {e.why[:60] or 'rejected'}"] += 1
        else:
            self._reach("a second turn that is rejected")
        if e.session is not None:
            self._rejected[e.request] = e.session
        self._do(Submit(e.request, None, max(1, e.tokens)))

    # -- requests that wait ---------------------------------------------------------------------------

    def _given_up(self) -> None:
        """Retracted and not queued again: the server's last resort is to give the request up."""
        for name in list(self._outside):
            self._reach("the last resort: the only request is given up")
            self._abort_queued(name)
        self._outside.clear()

    def _abort_queued(self, name: str) -> None:
        request = self.state.request(name)
        assert request is not None
        session = self.state.session(request.session)
        self._interrupts(name)
        counted = request.session or self._orphans.get(name)
        whose = self.state.session(self._rejected.pop(name, counted))
        if whose is not None and whose.turn in (None, name):
            stays = known.stays_busy(self.header, retracted=request.started)
            self._busy.update({whose.name: stays} if stays else {})
        self._matched.pop(name, None)
        self._do(Abort(name))
        if session is not None and session.slot is not None and request.started:
            want = f"all that {session.name} keeps is wiped: {name} has written KV"
            deviation = known.orphaned(self.header, retracted=True, rejected=False)
            self._part(Abort(name), Verdict("SES-2", want, "keeps slot and text"), deviation)
            self.state = known.kept_as_finished(self.state, session, request)
