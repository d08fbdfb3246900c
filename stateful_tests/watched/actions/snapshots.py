"""The action of a snapshot: the reference is compared with it, or begins with it."""

from __future__ import annotations

from collections import Counter

from impl.sglang.server import events as log
from reference import model
from reference.clauses.step import cursors_text
from reference.commands import Mode
from reference.state import Cursors, Phase, Request, Session, State, text_len
from stateful_tests.watched import deviations
from stateful_tests.watched.actions.prefill import detach_orphan
from stateful_tests.watched.actions.batch_rounds import check_output_count
from stateful_tests.watched.log_follower import LogFollower, Diverged, action
from stateful_tests.watched.log_facts import RequestSeen, RoundSeen, SessionSeen, StepSeen


@action(log.Snapshot, compared="sessions and requests; after a mismatch they are taken as given")
def on_snapshot(follower: LogFollower, event: log.Snapshot) -> None:
    """Compare a snapshot of the server with the reference's state, or resume from it where the log could not
    be followed."""
    for r in event.requests:
        request = follower.state.request(r.request)
        if (
            follower.follows
            and request is not None
            and request.session is not None
            and r.session is None
        ):
            detach_orphan(follower, request)
    result = follower.result
    state_shown = _state_of(follower, event)
    if event.dropped:
        result.skipped["events that the watcher dropped"] += event.dropped
    if result.events > 1 and follower.follows and not event.dropped:
        unknown = {name for name, session_seen in follower.sessions.items() if session_seen.text_unknown}
        expected_values = _shown_values(follower.state, unknown)
        shown_values = _shown_values(state_shown, unknown)
        result.compared += len(shown_values)
        for clause, value_name in expected_values | shown_values:
            expected = expected_values.get((clause, value_name), "none")
            observed = shown_values.get((clause, value_name), "none")
            if expected != observed:
                raise Diverged(clause, f"{value_name}: {expected}", observed)
    elif not result.ended:  # two turns write into one row: no state is that
        _resume(follower, event, state_shown)
    if not result.ended:
        _compare_snapshot(follower, event)


def resume_at_snapshot(follower: LogFollower, event: log.Snapshot) -> None:
    """Resume at a snapshot that differs from the reference: the mismatch is reported."""
    _resume(follower, event, _state_of(follower, event))


def resume_when_idle(follower: LogFollower, event: log.Stepped) -> None:
    """Resume at a step of an idle server, as at a snapshot of it: no request runs, waits or has a row,
    and no session is open."""
    busy = event.batch or event.queued or event.sessions or event.rows != follower.header.rows
    if busy or follower.result.ended or follower.header.level == "pages":
        return
    empty = log.Snapshot(0, [], [])
    step = follower.step
    _resume(follower, empty, _state_of(follower, empty))
    follower.step.number = step.number
    follower.step.at = step.at
    follower.step.judged = step.judged


def _compare_snapshot(follower: LogFollower, event: log.Snapshot) -> None:
    """Compare the values of a snapshot besides the state: outputs that count, closes to come, slots of
    turns, texts."""
    for r in event.requests:
        if follower.tells_results:
            check_output_count(follower, r.request, r.outputs, follower.request_seen(r.request).rounds)
        waits = follower.request(r.request).phase in (Phase.QUEUED, Phase.ADMITTED)
        if waits != r.queued:
            raise Diverged("OUT-1", f"{r.request} waits: {waits}", str(r.queued))
    for s in event.sessions:
        if s.closing != (requested := follower.session_seen(s.session).close_requested):
            raise Diverged(
                "SES-2", f"a close of {s.session} was requested: {requested}", str(s.closing)
            )
        session = follower.state.session(s.session)
        assert session is not None  # as the states were compared
        turn = follower.state.request(session.turn)
        if turn is not None and s.cursors is not None:
            if Cursors(*s.cursors) not in (session.slot, turn.cursors):
                expected = f"slot of {s.session}: {session.slot} or {turn.cursors}"
                raise Diverged("LEN-4", expected, f"{s.cursors}")
    for divergence in follower.texts.check_snapshot(event):
        raise Diverged(*divergence)


def _shown_values(state: State, unknown: set[str]) -> dict[tuple[str, str], str]:
    """Return the values that a snapshot shows of a state, by clause and subject.

    unknown: sessions with unknown text.
    """
    values = {}
    for r in state.requests:
        waits = r.phase in (Phase.QUEUED, Phase.ADMITTED)
        values["OUT-1", f"{r.name} waits"] = str(waits)
        values["SES-1", f"tokens of input of {r.name}"] = str(r.origin)
        if not waits:
            values["LEN-4", r.name] = cursors_text(r.cursors)
        if r.phase is Phase.RUNNING:
            values["SES-1", f"outputs of {r.name}"] = str(r.output)
    for s in state.sessions:
        values["SES-2", f"open session {s.name}"] = f"turn {s.turn}"
        if s.turn is None:
            values["SES-2", f"slot of {s.name}"] = cursors_text(s.slot)
            if s.name not in unknown:
                values["SES-1", f"tokens of history of {s.name}"] = str(text_len(s.history))
    return values


def _state_of(follower: LogFollower, event: log.Snapshot) -> State:
    """Return the reference's state of a server in the middle of its life."""
    state = model.initial(follower.geometry, Mode.FAITHFUL)
    serial = 0
    turns: dict[str, Request] = {}
    of_sessions = Counter(r.session for r in event.requests)
    for r in event.requests:
        serial += 1
        rejected = r.rejected and (r.queued or of_sessions[r.session] > 1)  # else it is aborted
        if (request_seen := follower.requests.get(r.request)) is not None:
            rejected = request_seen.rejected_by is not None
        request = _request_of(r, None if rejected else r.session, serial)
        state = state.with_request(request)
        if request.session is not None:
            turns[request.session] = request
    for s in event.sessions:
        serial += 1
        turn = turns.get(s.session)
        slot = None if s.cursors is None else Cursors(*s.cursors)
        name = turn.name if turn is not None else None
        history = ((serial, s.tokens),) if s.tokens else ()
        committed = slot.kv_committed_len if slot is not None else 0
        state = state.with_session(Session(s.session, history, slot, name, state=committed))
    return state._replace(serial=serial)


def _resume(follower: LogFollower, event: log.Snapshot, state: State) -> None:
    """Resume with the values of a snapshot."""
    # what came before is not known
    stays_busy = deviations.fault_of_busy_session(follower.header, retracted=True)
    requests = {r.request: r for r in event.requests}
    follower.requests = {name: _request_facts(follower, r, state) for name, r in requests.items()}
    follower.sessions = {}
    for s in event.sessions:
        of_another = s.turn is not None and (
            s.turn not in requests or requests[s.turn].session != s.session
        )
        follower.sessions[s.session] = SessionSeen(s.times_out, s.closing, stays_busy, of_another)
    follower.texts.begin(event)
    mismatches = len(follower.result.mismatches)
    follower.step = StepSeen(number=None, joined_late=True, at=follower.step.at, judged=mismatches)
    follower.state = state
    follower.follows = True
    follower.result.given += len(event.requests) + len(event.sessions)


def _request_facts(follower: LogFollower, r: log.RequestState, state: State) -> RequestSeen:
    """Return the facts that a log of a request's whole life would show."""
    request = state.request(r.request)
    assert request is not None
    ahead = request.output - r.outputs
    rounds = []
    # the result of what was retracted is nobody's
    waited_for = follower.tells_results and not r.queued
    for kind in reversed(r.rounds if waited_for else []):
        verifies = follower.header.speculative and kind != "prefill"
        counted = follower.header.claims if verifies else min(ahead, 1)
        ahead -= counted
        rounds.append(RoundSeen(counted, kind == "mixed"))
    by = follower.request_seen(r.request).rejected_by
    if by is None and r.rejected and request.session is None:
        by = r.session or ""
    return RequestSeen(by, int(r.retracted), joined_late=True, rounds=rounds[::-1])


def _request_of(r: log.RequestState, session: str | None, serial: int) -> Request:
    """Return the state of a request in a snapshot. The newest output of a running one has no KV yet."""
    if r.cursors is None:
        return Request(
            r.request,
            session=session,
            serial=serial,
            history=(),
            origin=r.tokens,
            output=r.outputs,
            phase=Phase.QUEUED,
            started=r.retracted,
        )
    cursors = Cursors(*r.cursors)
    phase = Phase.EXTENDING
    outputs = r.outputs
    if not r.extends:
        phase = Phase.RUNNING
        outputs = max(outputs, cursors.kv_committed_len - r.tokens + 1)
    return Request(
        r.request,
        session=session,
        serial=serial,
        history=(),
        origin=r.tokens,
        output=outputs,
        phase=phase,
        started=True,
        cursors=cursors,
    )
