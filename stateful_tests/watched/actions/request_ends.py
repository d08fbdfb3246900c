"""Actions of ends: finish, abort and retract of a request that has a row."""

from __future__ import annotations

from impl.sglang.server import events as log
from reference.commands import Abort, Draft, Finish, Retract, SpecDecode
from reference.cursors import cut
from reference.state import Cursors, Phase, Request, Session, State, text_cut, text_len
from reference.rules.sessions import end_turn
from stateful_tests.watched import deviations
from stateful_tests.watched.log_follower import LogFollower, Diverged, action
from stateful_tests.watched.violated_clauses import Shown
from stateful_tests.watched.actions.batch_rounds import apply_unlogged_result, check_output_count


@action(
    log.Released,
    guard="it has a row, with these cursors, outputs and limit",
    commands="finish, retract or abort (spec_decode before it)",
    compared="cursors of the session's slot",
)
def on_released(follower: LogFollower, event: log.Released) -> None:
    """Follow the release of a request: its finish, abort or retraction. Raises Diverged where outputs, texts
    or cursors differ."""
    before = Cursors(*event.before)
    after = Cursors(*event.after) if event.after else None
    follower.note_interruption(event.request)
    queued = Phase.QUEUED, Phase.ADMITTED
    if event.reason is None and follower.request(event.request).phase in queued:
        _follow_queued_finish(follower, event, after)
        return
    follower.result.holes.update(deviations.uncomputed_positions(follower.header, event))
    accepted = apply_unlogged_result(follower, event.request, before) + follower.header.claims
    ahead = _last_of_a_mixed_batch(follower, event) if event.reason is not None else None
    rounds = follower.request_seen(event.request).rounds
    if event.reason is not None:
        rounds = rounds[1:]
    if follower.header.speculative and rounds:
        ahead = deviations.fault_of_longer_state(follower.header)  # by a round that is in flight
    follower.check_unmoved(event.request, before)
    _check_output_counts(follower, event, accepted)
    request = follower.request(event.request)
    request_seen = follower.request_seen(event.request)
    if request_seen.rejected_by is not None and event.session is not None:
        expected = f"{event.session} has nothing of {event.request}, which it has rejected"
        known = deviations.fault_of_rejected_turn(follower.header)
        raise Diverged("SES-2", expected, "releases it as its turn", known=known)
    shown_after = Shown({}, {} if request.session is None else {request.session: after})
    follower.result.reach("overshoot that is trimmed", (event.counted or event.outputs) < request.output)
    if event.reason is None:
        _apply_retract(follower, request, event.outputs, shown_after)
    elif event.reason == "FINISH_ABORT":
        follower.result.reach("an abort midway", request_seen.rejected_by is None)
        if request.session is not None and request_seen.retracts:
            follower.session_seen(request.session).text_unknown = True
        follower.do(Abort(event.request), shown=shown_after)
    elif event.counted == 0 and request.phase is Phase.RUNNING:
        state = _finished_without_output(follower.state, request)
        follower.follow_to(state, Finish(event.request, 0), shown_after)
    else:
        counted = event.outputs if event.counted is None else event.counted
        follower.do(Finish(event.request, counted), shown=shown_after)
    for divergence in follower.texts.check_end(event.request, event.ids, goes_on=event.reason is None):
        raise Diverged(*divergence)
    session = follower.turn_session(request)
    _follow_state(follower, event, request, session, ahead)
    if event.reason not in (None, "FINISH_ABORT") and session is not None:
        follower.session_seen(session.name).stays_busy = None
        follower.texts.note_history(event.request, session.name, event.ids, text_len(session.history))
    if event.reason is not None:
        del follower.requests[event.request]
    if after is None:
        follower.pages.forget(request.holder)
    else:
        follower.pages.cut(request.holder, after.kv_committed_len)


def _follow_state(
    follower: LogFollower, event: log.Released, request: Request, session: Session | None, ahead: str | None
) -> None:
    """Follow the recurrent state, which stays with the session or goes to the tree.

    ahead: the known fault by which it is of a longer text.
    """
    if session is not None and session.slot is not None:
        follower.session_seen(session.name).state_ahead = ahead
        if ahead is not None:
            follower.state = follower.state.with_session(session._replace(state=session.state + 1))
        elif event.reason is None and event.outputs < request.output:
            follower.session_seen(session.name).state_ahead = deviations.fault_of_state_ahead(follower.header)
    elif ahead is not None and (text := follower.texts.inputs.get(event.request)):
        committed = Cursors(*event.before).kv_committed_len
        follower.kept_states.note_end([*text, *(event.ids or ())][:committed], ahead)


def _follow_queued_finish(follower: LogFollower, event: log.Released, after: Cursors | None) -> None:
    """Follow a known fault: a waiting turn that its client aborts counts as its session's last."""
    request = follower.request(event.request)
    session = follower.turn_session(request)
    known_fault = deviations.fault_of_queued_abort(follower.header)
    if session is None:
        raise Diverged("OUT-1", f"{event.request} waits, and has no row", "gives one back")
    expected = f"{session.name} has nothing of {event.request}, which waits"
    follower.note_deviation(
        known_fault, "SES-2", expected, "keeps its text as that of a finished turn", Abort(event.request)
    )
    history = text_cut(request.text, request.origin + event.outputs)
    ended = session._replace(history=history, slot=after)
    follower.state = end_turn(follower.state.without_request(event.request), ended)
    follower.texts.note_history(event.request, session.name, event.ids, text_len(history))
    follower.session_seen(session.name).stays_busy = known_fault
    del follower.requests[event.request]


def _check_output_counts(follower: LogFollower, event: log.Released, accepted: int) -> None:
    """Compare the outputs at an end, and how many of them count: a stop is one of the `accepted` of the
    last round."""
    if event.reason is not None:
        in_flight = follower.request_seen(event.request).rounds[1:]
        check_output_count(follower, event.request, event.outputs, in_flight)
    least = event.outputs - max(0, accepted - 1)
    most = event.outputs if event.limit is None else min(event.outputs, event.limit)
    if event.reason == "FINISH_LENGTH" and event.limit is not None:
        least = most = event.limit
    if event.counted is not None and not least <= event.counted <= most:
        expected = f"between {least} and {most} outputs count for {event.request}"
        raise Diverged("LEN-2", expected, f"counts {event.counted}")


def _apply_retract(follower: LogFollower, request: Request, outputs: int, shown: Shown) -> None:
    request_seen = follower.request_seen(request.name)
    reach = follower.result.reach
    follower.step.retracted[request.name] = None
    request_seen.retracts += 1
    request_seen.matched = None
    request_seen.rounds.clear()
    reach("a retract")
    reach("a retract of a session's turn", request.session is not None)
    reach("a second retract of one request", request_seen.retracts == 2)
    reach("a retract before the first result", request.output == 1 and outputs == 0)
    # an operator who pauses the server has it retract prefills as well
    if request.phase is Phase.EXTENDING:
        reach("a retract between two chunks")
        follower.state = follower.state.with_request(request._replace(phase=Phase.RUNNING))
    follower.do(Retract(request.name, request.output - outputs), shown=shown)


def _last_of_a_mixed_batch(follower: LogFollower, event: log.Released) -> str | None:
    """Return the known fault by which the server does not count the token of a mixed batch that was a
    request's last; None if it does."""
    request = follower.request(event.request)
    rounds = follower.request_seen(event.request).rounds
    if not rounds or not rounds[0].mixed:
        return None
    cursors = request.cursors
    assert cursors is not None  # a round of it has run
    if (event.outputs, event.before[0]) != (request.output + 1, cursors.kv_committed_len):
        return None
    draft = Draft(event.request, cursors.kv_allocated_len - cursors.kv_committed_len, 1)
    follower.do(SpecDecode((draft,)))
    known = deviations.fault_of_mixed_batch(follower.header)
    computed = f"{event.request} has computed {cursors.kv_committed_len + 1} tokens"
    follower.note_deviation(known, "LEN-2", computed, f"counts {cursors.kv_committed_len}")
    follower.set_cursors(event.request, cursors)
    return known


def _finished_without_output(state: State, request: Request) -> State:
    """Return the state after a turn without output, which ends after its prefill; the token that it
    sampled is dropped."""
    assert request.cursors is not None
    session = state.session(request.session)
    state = state.without_request(request.name)
    if session is None:
        return state
    history = text_cut(request.text, request.origin)
    slot = cut(request.cursors, request.origin)
    return end_turn(state, session._replace(history=history, slot=slot))
