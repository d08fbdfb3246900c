"""Validation of one log: each event becomes commands beside the reference, which follows what the server
chose.

The server chooses whom it runs, how long, whom it retracts, what its tree holds and how far it sweeps. All
else is judged: outcomes, cursors after every command, histories, and at each step that every page and row has
an owner. After a parting the reference goes on with what the server shows, so that one fault is told once.
"""

from __future__ import annotations

from collections.abc import Iterable

from reference import given, model
from reference.commands import (
    Abort, Admit, Choice, Chunk, Close, Command, Decode, Draft, EvictSwa, Extend, Finish, Mode, Open,
    Reason, Retract, SpecDecode, Submit,
)  # fmt: skip
from reference.ledger import Cursors, Phase, Request, Session, free, holders, text_cut
from stateful_tests.watched import deviations as known
from stateful_tests.watched import events as log
from stateful_tests.watched.beside import Beside
from stateful_tests.watched.judging import Shown, Verdict
from stateful_tests.watched.reader import Line
from stateful_tests.watched.results import Validated
from stateful_tests.watched.table import TABLE, reads


class Validator(Beside):
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

    # -- sessions -----------------------------------------------------------------------------------

    @reads(log.SessionOpened, "open", "")
    def _open(self, e: log.SessionOpened) -> None:
        if e.done:
            self._do(Open(e.session))
        elif self.state.session(e.session) is None:
            self.result.policy["open"] += 1

    @reads(log.CloseAsked, "", "the session is gone at last (at the end of a run that says so)")
    def _close_asked(self, e: log.CloseAsked) -> None:
        session = self.state.session(e.session)
        self._reach("a close while a turn is in flight", session is not None and session.turn is not None)

    @reads(log.SessionClosed, "close", "no turn is in flight")
    def _closed(self, e: log.SessionClosed) -> None:
        session = self.state.session(e.session)
        if session is not None and session.turn is not None:
            want = f"{e.session} stays until its turn {session.turn} ends"
            self._orphan(session, Close(e.session), Verdict("SES-2", want, "closed it"), ends=True)
            return
        self._do(Close(e.session))
        self._pages.forget(e.session)

    @reads(
        log.Submitted, "submit (rejected: submit of a request by itself)", "origin; that a rejection is due"
    )
    def _submit(self, e: log.Submitted) -> None:
        session = self.state.session(e.session)
        if e.rejected:
            self._reject(e, session)
            return
        command = Submit(e.request, e.session, e.new)
        if session is not None and session.turn is not None:
            want = f"refused: {Reason.TURN_IN_FLIGHT.value}, as {session.turn} has not ended"
            self._orphan(session, command, Verdict("OUT-1", want, "took the turn"), ends=True)
            return
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
        self._part(command, found, deviation)
        self._blind = ends
        self.result.ended = (deviation or "") if ends else self.result.ended
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
            self._part(Submit(e.request, e.session, e.new), told)
        elif not busy:
            self.result.policy[f"submit: {e.why[:60] or 'rejected'}"] += 1
        else:
            self._reach("a second turn that is rejected")
        if e.session is not None:
            self._rejected[e.request] = e.session
        self._do(Submit(e.request, None, max(1, e.tokens)))

    # -- prefill ------------------------------------------------------------------------------------

    @reads(log.Admitted, "admit, if the session has a slot", "whose turn it is; cursors of the request")
    def _admit(self, e: log.Admitted) -> None:
        request = self._request(e.request)
        session = self.state.session(request.session) if request is not None else None
        if request is None:
            return
        self._interrupts(e.request)
        if session is not None and e.session is None:
            want = f"{e.request} goes on as the turn of {session.name}"
            told = Verdict("SES-2", want, "as a request of nobody's")
            self._orphan(session, Admit(e.request), told, ends=False)
            request = self.state.request(e.request) or request
        if request.phase in (Phase.QUEUED, Phase.ADMITTED):
            if (slot := self._slot(request)) is not None:
                self._reach("a turn that resumes")
                self._reach("a tail that admission frees", slot.kv_allocated_len > e.prefix)
                cursors = Cursors(*e.cursors)
                self._pages.cut(str(request.session), cursors.kv_committed_len)
                self._do(Admit(e.request), shown=Shown({e.request: cursors}, {str(request.session): cursors}))
            else:
                self._matched[e.request] = e.prefix

    @reads(log.Extended, "admit of those without a slot, extend", "prefix and cursors of each lane")
    def _extend(self, e: log.Extended) -> None:
        shown: dict[str, Cursors] = {}
        for name, prefix, _, cells in e.lanes:
            request = self._request(name)
            if request is None:
                return
            if request.phase is Phase.QUEUED:
                self._do(Admit(name))
                if self.header.tree:
                    self._match(name, prefix, Cursors(*cells))
            shown[name] = self._with_protected(name, Cursors(*cells))
            request = self.state.request(name)
            have = request.cursors.kv_committed_len if request is not None and request.cursors else 0
            self.result.compared += 1
            if have != prefix:
                self._part(None, Verdict("LEN-4", f"{name} goes on at {have}", f"goes on at {prefix}"))
        self._reach("a prefill of several requests", len(e.lanes) > 1)
        lanes = tuple(Chunk(name, tokens) for name, _, tokens, _ in e.lanes)
        sweeps = [self._sweeps.pop(name) for name, *_ in e.lanes if name in self._sweeps]
        self._do(Extend(lanes), *sweeps, shown=Shown(shown, {}))
        phases = [request.phase for name in shown if (request := self.state.request(name))]
        self._reach("a chunked prefill", Phase.EXTENDING in phases)

    def _match(self, name: str, prefix: int, got: Cursors) -> None:
        """The tree gave an admitted request its prefix: how much is the tree's choice."""
        protected = got.cache_protected_len
        self._reach("a prefix from the tree", prefix > 0)
        if protected % self.header.page_size or protected > prefix:
            self._part(
                None, Verdict("LEN-1", "cache_protected_len of whole pages, in the prefix", str(protected))
            )
        self.state = given.matched(self.state, name, prefix)
        if protected != prefix:
            self.state = given.protected(self.state, name, protected)

    def _with_protected(self, name: str, got: Cursors) -> Cursors:
        """What the server shows; a sweep inside what is the tree's has swept nothing, and moves E alone."""
        request = self.state.request(name)
        if not self.header.tree or request is None or request.cursors is None:
            return got
        mine = request.cursors
        if max(got.swa_evicted_seqlen, mine.swa_evicted_seqlen) <= mine.cache_protected_len:
            self.state = given.with_cursors(
                self.state, name, mine._replace(swa_evicted_seqlen=got.swa_evicted_seqlen)
            )
        return got

    @reads(log.Checkpointed, "", "only cache_protected_len moves, up and by whole pages (E inside of it)")
    def _insert(self, e: log.Checkpointed) -> None:
        got = Cursors(*e.cursors)
        self._catch_up(e.request, got)  # a request that ends inserts before its release is told
        request = self._request(e.request)
        if request is None or request.cursors is None or request.cursors == got:
            return
        mine, length = request.cursors, got.cache_protected_len
        if self.geometry.window and got.swa_evicted_seqlen > max(length, mine.swa_evicted_seqlen):
            frontier = Choice(e.request, swa_evicted_seqlen=got.swa_evicted_seqlen)
            self._do(EvictSwa(e.request, mine.kv_committed_len), frontier)
            mine = self.state.request(e.request).cursors or mine  # type: ignore[union-attr]
        whole = (
            mine.cache_protected_len <= length <= mine.kv_committed_len and not length % self.header.page_size
        )
        want = mine._replace(cache_protected_len=length)
        if max(want.swa_evicted_seqlen, got.swa_evicted_seqlen) <= length:
            want = want._replace(swa_evicted_seqlen=got.swa_evicted_seqlen)
        self.result.compared += 1
        if not whole or want != got:
            told = (
                f"C {mine[0]}, A {mine[1]}, E {mine[2]}, R from {mine[3]} to a page boundary up to {mine[0]}"
            )
            self._part(None, Verdict("TREE-12" if want == got else "LEN-4", told, f"shows {tuple(got)}"))
        self.state = given.with_cursors(self.state, e.request, got)

    # -- rounds -------------------------------------------------------------------------------------

    @reads(log.Decoded, "decode", "cursors of each lane")
    def _decode(self, e: log.Decoded) -> None:
        self._given_up()
        names = [name for name, _ in e.lanes]
        shown = {name: self._with_protected(name, Cursors(*cells)) for name, cells in e.lanes}
        if all(self._request(name) for name in names):
            self._do(Decode(tuple(names)), shown=Shown(shown, {}))

    @reads(log.Speculated, "", "slots are taken: only kv_allocated_len moves, up and within the row")
    def _speculate(self, e: log.Speculated) -> None:
        self._given_up()
        for name, cells in e.lanes:
            request, got = self._request(name), self._with_protected(name, Cursors(*cells))
            if request is None or request.cursors is None:
                continue
            mine = (self.state.request(name) or request).cursors
            assert mine is not None
            self.result.compared += 1
            ahead = (
                max(mine.kv_allocated_len, mine.kv_committed_len + 1)
                <= got.kv_allocated_len
                <= self.header.width
            )
            if not ahead or got != mine._replace(kv_allocated_len=got.kv_allocated_len):
                want = f"{name}: {tuple(mine)} with kv_allocated_len up to {self.header.width}"
                self._part(None, Verdict("LEN-4", want, f"shows {tuple(got)}"))
            if request.phase is not Phase.RUNNING:
                told = Verdict("OUT-1", f"refused: {Reason.WRONG_PHASE.value}", f"runs a round of {name}")
                self._part(None, told)
            self.state = given.with_cursors(self.state, name, got)

    @reads(log.Resulted, "spec_decode with what was accepted", "outputs and cursors of each lane")
    def _result(self, e: log.Resulted) -> None:
        drafts: list[Draft] = []
        shown: dict[str, Cursors] = {}
        for name, _, cells, _ in e.lanes:
            draft = self._accepted(name, Cursors(*cells))
            if draft is not None:
                drafts.append(draft)
                shown[name] = Cursors(*cells)
        self._reach("a verify round that accepts several", any(draft.accept > 1 for draft in drafts))
        if drafts:
            self._do(SpecDecode(tuple(drafts)), shown=Shown(shown, {}))
        for name, outputs, _, _ in e.lanes:
            self._outputs(name, outputs)

    def _accepted(self, name: str, got: Cursors) -> Draft | None:
        """The lane of a verify round whose result moved the commit to what the server shows."""
        request = self.state.request(name)
        if request is None or request.cursors is None or not self.header.speculative:
            return None
        mine = request.cursors
        accept = got.kv_committed_len - mine.kv_committed_len
        if accept <= 0 or request.phase is not Phase.RUNNING:
            return None
        return Draft(name, max(1, mine.kv_allocated_len - mine.kv_committed_len), accept)

    def _catch_up(self, name: str, got: Cursors) -> None:
        """The result of a verify round that is not told yet has moved this request's commit."""
        draft = self._accepted(name, got)
        if draft is not None:
            mine = self.state.request(name)
            assert mine is not None and mine.cursors is not None
            moved = mine.cursors._replace(kv_committed_len=got.kv_committed_len)
            self._do(SpecDecode((draft,)), shown=Shown({name: moved}, {}))

    def _outputs(self, name: str, outputs: int) -> None:
        """How many outputs the server counts: all, under overlap perhaps without that of a prefill."""
        request = self.state.request(name)
        if request is None or request.phase is not Phase.RUNNING:
            return
        self.result.compared += 1
        if not request.output - self.header.overlap <= outputs <= request.output:
            told = Verdict("SES-1", f"{name} has {request.output} outputs", f"counts {outputs}")
            self._part(None, told)

    @reads(log.Swept, "evict_swa, or a choice of the extend that follows", "how far; cursors")
    def _sweep(self, e: log.Swept) -> None:
        self._reach("a window sweep")
        request, got = self._request(e.request), Cursors(*e.cursors)
        if request is None:
            return
        choice = Choice(e.request, swa_evicted_seqlen=got.swa_evicted_seqlen)
        if request.phase in (Phase.EXTENDING, Phase.RUNNING):
            self._do(EvictSwa(e.request, e.length), choice, shown=Shown({e.request: got}, {}))
        else:
            self._sweeps[e.request] = choice

    # -- ends ---------------------------------------------------------------------------------------

    @reads(log.Released, "finish, retract or abort (spec_decode before it)", "cursors of the session's slot")
    def _release(self, e: log.Released) -> None:
        request = self._request(e.request)
        if request is None:
            return
        self._interrupts(e.request)
        self._catch_up(e.request, Cursors(*e.before))
        request = self.state.request(e.request)
        assert request is not None
        self._matched.pop(e.request, None)
        if e.reason is not None and (whose := self._orphans.pop(e.request, None)) is not None:
            outputs = e.outputs if e.limit is None else min(e.outputs, e.limit)
            text = text_cut(request.text, request.origin + outputs)
            self.state = given.with_history(self.state, whose, text)
        kept = {} if request.session is None else {request.session: Cursors(*e.after) if e.after else None}
        self._reach("overshoot that is trimmed", (e.counted or e.outputs) < request.output)
        if e.reason == "FINISH_ABORT":
            self._reach("an abort midway", self._rejected.pop(e.request, None) is None)
            self._do(Abort(e.request), shown=Shown({}, kept))
        elif e.counted == 0 and request.phase is Phase.RUNNING:
            was, self.state = self.state, given.finished_without_output(self.state, e.request)
            self._follow(Finish(e.request, 0), was, Shown({}, kept))
        elif e.reason is not None:
            self._do(Finish(e.request, e.outputs if e.counted is None else e.counted), shown=Shown({}, kept))
        else:
            self._retract(request, e, kept)
        if e.after is None:
            self._pages.forget(request.holder)
        else:
            self._pages.cut(request.holder, e.after[0])

    def _retract(self, request: Request, e: log.Released, kept: dict[str, Cursors | None]) -> None:
        self._outside[e.request] = None
        self._retracts[e.request] += 1
        self._reach("a retract")
        self._reach("a second retract of one request", self._retracts[e.request] == 2)
        self._reach("a retract before the first result", request.output == 1 and e.outputs == 0)
        in_flight = request.output - e.outputs
        command = Retract(e.request, in_flight)
        if request.phase is Phase.RUNNING and request.output == 1 and e.outputs == 0:
            was, self.state = self.state, given.retracted_before_first_result(self.state, e.request)
            self._follow(command, was, Shown({}, kept))
        else:
            self._do(command, shown=Shown({}, kept))

    @reads(log.Requeued, "", "")
    def _requeue(self, e: log.Requeued) -> None:
        self._outside.pop(e.request, None)

    def _given_up(self) -> None:
        """Retracted and not queued again: the server's last resort is to give the request up."""
        for name in list(self._outside):
            self._reach("the last resort: the only request is given up")
            self._abort_queued(name)
        self._outside.clear()

    @reads(log.QueueAborted, "abort of each that waits", "")
    def _abort(self, e: log.QueueAborted) -> None:
        for name in e.queued:
            if (request := self.state.request(name)) is not None:
                self._reach("an abort in the queue")
                self._reach("an abort after a retract", request.started)
                self._abort_queued(name)

    def _abort_queued(self, name: str) -> None:
        request = self.state.request(name)
        assert request is not None
        session = self.state.session(request.session)
        self._interrupts(name)
        self._rejected.pop(name, None)
        self._matched.pop(name, None)
        self._do(Abort(name))
        if session is not None and session.slot is not None and request.started:
            want = f"all that {session.name} keeps is wiped: {name} has written KV"
            deviation = known.orphaned(self.header, retracted=True, rejected=False)
            self._part(Abort(name), Verdict("SES-2", want, "keeps slot and text"), deviation)
            self.state = known.kept_as_finished(self.state, session, request)

    # -- steps --------------------------------------------------------------------------------------

    @reads(log.Stepped, "", "counts: free, waiting, open, locked; at level `pages` rows, lists, mapping")
    def _step(self, e: log.Stepped) -> None:
        self._given_up()
        self.result.steps += 1
        if self._number and e.number != self._number + 1:
            missing = f"steps {self._number + 1} to {e.number - 1} are missing"
            self.result.skipped[missing if e.number > self._number else f"step {e.number} comes again"] += 1
        self._number = e.number
        left, size = free(self.state), self.header.page_size
        waiting = sum(r.phase in (Phase.QUEUED, Phase.ADMITTED) for r in self.state.requests)
        swa = left.swa * size if self.geometry.window else 0
        what = "tokens of the {} pool free or the tree's"
        self._counted("OWN-3", what.format("full"), left.full * size, e.full + e.tree_full)
        self._counted("OWN-3", what.format("SWA"), swa, e.swa + e.tree_swa)
        self._counted("OWN-4", "rows free", left.rows, e.rows)
        self._counted("SES-2", "requests wait", waiting, e.queued)
        self._counted("SES-2", "sessions are open", len(self.state.sessions), e.sessions)
        held = sum(holder.cursors.cache_protected_len for holder in holders(self.state))
        self.result.compared += 1
        if e.tree_locked > held + self._locked:
            self._locked = e.tree_locked - held
            want = f"at most {held} tokens of the tree locked: who has a row protects no more"
            self._part(None, Verdict("TREE-6", want, f"{e.tree_locked} are"))
        if e.owners is not None:
            for found in self._pages.judge(self.state, e):
                self._part(None, found)

    def _counted(self, clause: str, what: str, want: int, got: int) -> None:
        """Compare a count; one that is off is told when it changes, not again at every step."""
        self.result.compared += 1
        if got - want != self._off[what]:
            was = f", {self._off[what]:+} before" if self._off[what] else ""
            self._off[what] = got - want
            self._part(None, Verdict(clause, f"{want} {what}", f"{got} ({got - want:+}{was})"))

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
        self.state = state._replace(serial=serial)
        self.result.given += len(e.requests) + len(e.sessions)
        self._outside.clear()
        self._sweeps.clear()
        self._blind = False

    @reads(log.HookFailed, "", "")
    def _failed(self, e: log.HookFailed) -> None:
        self.result.skipped[f"the watcher's hook {e.where} failed: {e.error}"[:120]] += 1
