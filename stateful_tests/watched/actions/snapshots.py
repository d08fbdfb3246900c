"""The action of a snapshot: the reference is compared with it, or begins with it."""

from __future__ import annotations

from collections import Counter

from impl.sglang.server import events as log
from reference import model
from reference.clauses.step import cursors_text
from reference.commands import Mode
from reference.state import Cursors, Phase, Request, Session, State, text_len
from stateful_tests.watched import deviations
from stateful_tests.watched.actions.prefill import orphaned
from stateful_tests.watched.actions.batch_rounds import counts_outputs
from stateful_tests.watched.log_follower import LogFollower, Diverged, action
from stateful_tests.watched.log_facts import RequestSeen, RoundSeen, SessionSeen, StepSeen


@action(log.Snapshot, compared="sessions and requests; after a mismatch they are taken as given")
def snapshot(beside: LogFollower, e: log.Snapshot) -> None:
    for r in e.requests:
        request = beside.state.request(r.request)
        if (
            beside.follows
            and request is not None
            and request.session is not None
            and r.session is None
        ):
            orphaned(beside, request)
    result = beside.result
    given = _state_of(beside, e)
    if e.dropped:
        result.skipped["events that the watcher dropped"] += e.dropped
    if result.events > 1 and beside.follows and not e.dropped:
        unknown = {name for name, seen in beside.sessions.items() if seen.text_unknown}
        mine, theirs = _shown(beside.state, unknown), _shown(given, unknown)
        result.compared += len(theirs)
        for clause, what in mine | theirs:
            want, got = mine.get((clause, what), "none"), theirs.get((clause, what), "none")
            if want != got:
                raise Diverged(clause, f"{what}: {want}", got)
    elif not result.ended:  # two turns write into one row: no state is that
        _begin(beside, e, given)
    if not result.ended:
        _compared(beside, e)


def begins(beside: LogFollower, e: log.Snapshot) -> None:
    """Go on with a snapshot that shows what the reference does not expect: the mismatch is reported."""
    _begin(beside, e, _state_of(beside, e))


def begins_empty(beside: LogFollower, e: log.Stepped) -> None:
    """Go on at a step of a server that nobody uses, as at a snapshot of it: nobody runs, waits or has a row,
    and no session is open."""
    busy = e.batch or e.queued or e.sessions or e.rows != beside.header.rows
    if busy or beside.result.ended or beside.header.level == "pages":
        return
    empty = log.Snapshot(0, [], [])
    step = beside.step
    _begin(beside, empty, _state_of(beside, empty))
    beside.step.number, beside.step.at, beside.step.judged = step.number, step.at, step.judged


def _compared(beside: LogFollower, e: log.Snapshot) -> None:
    """Compare what a snapshot shows besides the state: outputs that count, closes to come, slots of turns,
    texts."""
    for r in e.requests:
        if beside.tells_results:
            counts_outputs(beside, r.request, r.outputs, beside.of(r.request).rounds)
        waits = beside.request(r.request).phase in (Phase.QUEUED, Phase.ADMITTED)
        if waits != r.queued:
            raise Diverged("OUT-1", f"{r.request} waits: {waits}", str(r.queued))
    for s in e.sessions:
        if s.closing != (requested := beside.of_session(s.session).close_requested):
            raise Diverged(
                "SES-2", f"a close of {s.session} was requested: {requested}", str(s.closing)
            )
        session = beside.state.session(s.session)
        assert session is not None  # as the states were compared
        turn = beside.state.request(session.turn)
        if turn is not None and s.cursors is not None:
            if Cursors(*s.cursors) not in (session.slot, turn.cursors):
                want = f"slot of {s.session}: {session.slot} or {turn.cursors}"
                raise Diverged("LEN-4", want, f"{s.cursors}")
    for found in beside.texts.shows(e):
        raise Diverged(*found)


def _shown(state: State, unknown: set[str]) -> dict[tuple[str, str], str]:
    """Return the values that a snapshot shows of a state, by clause and subject. unknown: sessions whose
    text is not."""
    found = {}
    for r in state.requests:
        waits = r.phase in (Phase.QUEUED, Phase.ADMITTED)
        found["OUT-1", f"{r.name} waits"] = str(waits)
        found["SES-1", f"tokens of input of {r.name}"] = str(r.origin)
        if not waits:
            found["LEN-4", r.name] = cursors_text(r.cursors)
        if r.phase is Phase.RUNNING:
            found["SES-1", f"outputs of {r.name}"] = str(r.output)
    for s in state.sessions:
        found["SES-2", f"open session {s.name}"] = f"turn {s.turn}"
        if s.turn is None:
            found["SES-2", f"slot of {s.name}"] = cursors_text(s.slot)
            if s.name not in unknown:
                found["SES-1", f"tokens of history of {s.name}"] = str(text_len(s.history))
    return found


def _state_of(beside: LogFollower, e: log.Snapshot) -> State:
    """The reference's state of a server in the middle of its life."""
    state = model.initial(beside.geometry, Mode.FAITHFUL)
    serial = 0
    turns: dict[str, Request] = {}
    of_sessions = Counter(r.session for r in e.requests)
    for r in e.requests:
        serial += 1
        rejected = r.rejected and (r.queued or of_sessions[r.session] > 1)  # else it is aborted
        if (seen := beside.requests.get(r.request)) is not None:
            rejected = seen.rejected_by is not None
        request = _request_of(r, None if rejected else r.session, serial)
        state = state.with_request(request)
        if request.session is not None:
            turns[request.session] = request
    for s in e.sessions:
        serial += 1
        turn = turns.get(s.session)
        slot = None if s.cursors is None else Cursors(*s.cursors)
        name = turn.name if turn is not None else None
        history = ((serial, s.tokens),) if s.tokens else ()
        kept = slot.kv_committed_len if slot is not None else 0
        state = state.with_session(Session(s.session, history, slot, name, state=kept))
    return state._replace(serial=serial)


def _begin(beside: LogFollower, e: log.Snapshot, given: State) -> None:
    """Go on with what a snapshot shows."""
    # what came before is not known
    stays_busy = deviations.fault_of_busy_session(beside.header, retracted=True)
    requests = {r.request: r for r in e.requests}
    beside.requests = {name: _seen(beside, r, given) for name, r in requests.items()}
    beside.sessions = {}
    for s in e.sessions:
        of_another = s.turn is not None and (
            s.turn not in requests or requests[s.turn].session != s.session
        )
        beside.sessions[s.session] = SessionSeen(s.times_out, s.closing, stays_busy, of_another)
    beside.texts.begins(e)
    found = len(beside.result.mismatches)
    beside.step = StepSeen(number=None, joined_late=True, at=beside.step.at, judged=found)
    beside.state = given
    beside.follows = True
    beside.result.given += len(e.requests) + len(e.sessions)


def _seen(beside: LogFollower, r: log.RequestState, given: State) -> RequestSeen:
    """Return what a log of its whole life would show of a request."""
    request = given.request(r.request)
    assert request is not None
    ahead = request.output - r.outputs
    rounds = []
    # the result of what was retracted is nobody's
    waited_for = beside.tells_results and not r.queued
    for kind in reversed(r.rounds if waited_for else []):
        verifies = beside.header.speculative and kind != "prefill"
        counted = beside.header.claims if verifies else min(ahead, 1)
        ahead -= counted
        rounds.append(RoundSeen(counted, kind == "mixed"))
    by = beside.of(r.request).rejected_by
    if by is None and r.rejected and request.session is None:
        by = r.session or ""
    return RequestSeen(by, int(r.retracted), joined_late=True, rounds=rounds[::-1])


def _request_of(r: log.RequestState, session: str | None, serial: int) -> Request:
    """The state of a request in a snapshot. The newest output of a running one has no KV yet."""
    if r.cursors is None:
        return Request(
            r.request, session, serial, (), r.tokens, r.outputs, Phase.QUEUED, r.retracted
        )
    cursors = Cursors(*r.cursors)
    phase = Phase.EXTENDING
    outputs = r.outputs
    if not r.extends:
        phase = Phase.RUNNING
        outputs = max(outputs, cursors.kv_committed_len - r.tokens + 1)
    return Request(r.request, session, serial, (), r.tokens, outputs, phase, True, cursors=cursors)
