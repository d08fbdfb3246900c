"""The action of a snapshot: what the reference has is compared with it, or begins with it."""

from __future__ import annotations

from collections.abc import Iterator

from impl.sglang.server import events as log
from reference import model
from reference.clauses.step import cursors_text
from reference.commands import Mode
from reference.ledger import Cursors, Phase, Request, Session, text_len
from stateful_tests.watched import deviations
from stateful_tests.watched.beside import Beside, Diverged
from stateful_tests.watched.judging import Verdict
from stateful_tests.watched.mapping import action
from stateful_tests.watched.seen import RequestSeen, SessionSeen

_WAITS = (Phase.QUEUED, Phase.ADMITTED)


@action(log.Snapshot, compared="sessions and requests; after a mismatch they are taken as given")
def snapshot(beside: Beside, e: log.Snapshot) -> None:
    result = beside.result
    if e.dropped:
        result.skipped["events that the watcher dropped"] += e.dropped
    if result.events > 1 and beside.follows and not e.dropped:
        for found in _differences(beside, e):
            raise Diverged(*found)
    elif not result.ended:  # two turns write into one row: no state is that
        _begin(beside, e)


def _differences(beside: Beside, e: log.Snapshot) -> Iterator[Verdict]:
    """Where the reference is not what a snapshot shows."""
    state, requests = beside.state, {r.request: r for r in e.requests}
    mine = {r.name: r for r in state.requests}
    beside.result.compared += len(requests) + len(e.sessions)
    if mine.keys() != requests.keys():
        yield Verdict("SES-2", f"requests {sorted(mine)}"[:200], f"has {sorted(requests)}"[:200])
        return
    for name, shown in requests.items():
        request, cursors = mine[name], Cursors(*shown.cursors) if shown.cursors else None
        if (request.phase in _WAITS) != shown.queued:
            observed = "it waits" if shown.queued else "it runs"
            yield Verdict("OUT-1", f"{name} is {request.phase.value}", observed)
        if request.origin != shown.tokens:
            yield Verdict("SES-1", f"{name} has {request.origin} tokens of input", f"has {shown.tokens}")
        if cursors is not None and request.cursors != cursors:
            want = f"{name}: {cursors_text(request.cursors)}"
            yield Verdict("LEN-4", want, f"shows {cursors_text(cursors)}")
    kept = {s.session: s for s in e.sessions}
    open_sessions = {s.name: s for s in state.sessions}
    if kept.keys() != open_sessions.keys():
        yield Verdict("SES-2", f"sessions {sorted(open_sessions)}"[:200], f"has {sorted(kept)}"[:200])
        return
    for name, shown_session in kept.items():
        session = open_sessions[name]
        if session.turn is None:
            yield from _session_differs(beside, session, shown_session)


def _session_differs(beside: Beside, session: Session, shown: log.SessionState) -> Iterator[Verdict]:
    """Where a session without a turn is not what a snapshot shows."""
    cursors = Cursors(*shown.cursors) if shown.cursors else None
    if session.slot != cursors:
        want = f"slot of {session.name}: {cursors_text(session.slot)}"
        yield Verdict("SES-2", want, f"shows {cursors_text(cursors)}")
    history = text_len(session.history)
    if history != shown.tokens and not beside.of_session(session.name).text_unknown:
        yield Verdict("SES-1", f"{history} tokens of history in {session.name}", f"has {shown.tokens}")


def _begin(beside: Beside, e: log.Snapshot) -> None:
    """A state of the reference from a server in the middle of its life."""
    seen, stays_busy = beside.seen, deviations.stays_busy(beside.header, retracted=True)
    state, serial = model.initial(beside.geometry, Mode.FAITHFUL), 0
    rejected = {name for name, each in seen.requests.items() if each.rejected}
    seen.requests.clear()
    seen.sessions.clear()
    seen.outside.clear()
    seen.due.clear()
    turns: dict[str, Request] = {}
    for r in e.requests:
        serial += 1
        was_rejected = r.request in rejected or (r.rejected and r.queued)
        request = _request_of(r, None if was_rejected else r.session, serial)
        seen.requests[r.request] = RequestSeen(
            r.session, was_rejected, retracts=int(r.retracted), rounds=list(r.rounds)
        )
        state = state.with_request(request)
        if request.session is not None:
            turns[request.session] = request
    for s in e.sessions:
        serial += 1
        turn = turns.get(s.session)
        slot = None if s.cursors is None else Cursors(*s.cursors)
        first = turn is not None and turn.phase is not Phase.QUEUED and s.tokens == 0 and not turn.started
        name = turn.name if turn is not None else None
        history = ((serial, s.tokens),) if s.tokens else ()
        state = state.with_session(Session(s.session, history, None if first else slot, name))
        seen.sessions[s.session] = SessionSeen(
            name, s.times_out, s.closing, stays_busy, text_unknown=s.turn not in (None, name)
        )
    beside.texts.history = {s.session: s.ids for s in e.sessions if s.ids is not None}
    beside.state = state._replace(serial=serial)
    beside.result.given += len(e.requests) + len(e.sessions)
    beside.step.number, beside.step.unpaged = None, False
    beside.step.entries.clear()
    beside.follows = True


def _request_of(r: log.RequestState, session: str | None, serial: int) -> Request:
    """It runs once its whole input has KV; its newest output has none yet."""
    tokens, outputs = r.tokens, r.outputs
    if r.cursors is None:
        return Request(r.request, session, serial, (), tokens, outputs, Phase.QUEUED, r.retracted)
    cursors = Cursors(*r.cursors)
    computed = cursors.kv_committed_len
    whole = tokens if not r.retracted else max(tokens, tokens + outputs)
    extends = computed < whole - (outputs > 0 and not r.retracted)
    phase = Phase.EXTENDING if extends else Phase.RUNNING
    if not extends:
        outputs = max(outputs, computed - tokens + 1)
    return Request(r.request, session, serial, (), tokens, outputs, phase, True, cursors=cursors)
