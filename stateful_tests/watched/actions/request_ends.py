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
from stateful_tests.watched.actions.batch_rounds import catches_up, counts_outputs


@action(
    log.Released,
    guard="it has a row, with these cursors, outputs and limit",
    commands="finish, retract or abort (spec_decode before it)",
    compared="cursors of the session's slot",
)
def released(beside: LogFollower, e: log.Released) -> None:
    before, after = Cursors(*e.before), Cursors(*e.after) if e.after else None
    beside.interrupts(e.request)
    if e.reason is None and beside.request(e.request).phase in (Phase.QUEUED, Phase.ADMITTED):
        _finished_in_the_queue(beside, e, after)
        return
    beside.result.holes.update(deviations.uncomputed_positions(beside.header, e))
    accepted = catches_up(beside, e.request, before) + beside.header.claims
    ahead = _last_of_a_mixed_batch(beside, e) if e.reason is not None else None
    if beside.header.speculative and beside.of(e.request).rounds[e.reason is not None :]:
        ahead = deviations.fault_of_longer_state(beside.header)  # by a round that is in flight
    beside.stands(e.request, before)
    _counts(beside, e, accepted)
    request = beside.request(e.request)
    seen = beside.of(e.request)
    if seen.rejected_by is not None and e.session is not None:
        want = f"{e.session} has nothing of {e.request}, which it has rejected"
        known = deviations.fault_of_rejected_turn(beside.header)
        raise Diverged("SES-2", want, "releases it as its turn", known=known)
    shown = Shown({}, {} if request.session is None else {request.session: after})
    beside.result.reach("overshoot that is trimmed", (e.counted or e.outputs) < request.output)
    if e.reason is None:
        _retracted(beside, request, e.outputs, shown)
    elif e.reason == "FINISH_ABORT":
        beside.result.reach("an abort midway", seen.rejected_by is None)
        if request.session is not None and seen.retracts:
            beside.of_session(request.session).text_unknown = True
        beside.do(Abort(e.request), shown=shown)
    elif e.counted == 0 and request.phase is Phase.RUNNING:
        state = _finished_without_output(beside.state, request)
        beside.follows_to(state, Finish(e.request, 0), shown)
    else:
        beside.do(Finish(e.request, e.outputs if e.counted is None else e.counted), shown=shown)
    for found in beside.texts.ends(e.request, e.ids, goes_on=e.reason is None):
        raise Diverged(*found)
    session = beside.session_of(request)
    _keeps_state(beside, e, request, session, ahead)
    if e.reason not in (None, "FINISH_ABORT") and session is not None:
        beside.of_session(session.name).stays_busy = None
        beside.texts.keeps(e.request, session.name, e.ids, text_len(session.history))
    if e.reason is not None:
        del beside.requests[e.request]
    if after is None:
        beside.pages.forget(request.holder)
    else:
        beside.pages.cut(request.holder, after.kv_committed_len)


def _keeps_state(
    beside: LogFollower, e: log.Released, request: Request, session: Session | None, ahead: str | None
) -> None:
    """The recurrent state stays with the session, or goes to the tree. ahead: the known fault by which it is
    of a longer text."""
    if session is not None and session.slot is not None:
        beside.of_session(session.name).state_ahead = ahead
        if ahead is not None:
            beside.state = beside.state.with_session(session._replace(state=session.state + 1))
        elif e.reason is None and e.outputs < request.output:
            beside.of_session(session.name).state_ahead = deviations.fault_of_state_ahead(beside.header)
    elif ahead is not None and (text := beside.texts.inputs.get(e.request)):
        committed = Cursors(*e.before).kv_committed_len
        beside.kept_states.ends([*text, *(e.ids or ())][:committed], ahead)


def _finished_in_the_queue(beside: LogFollower, e: log.Released, after: Cursors | None) -> None:
    """A known fault: a turn that waits, and whose client gives it up, counts as its session's last."""
    request = beside.request(e.request)
    session = beside.session_of(request)
    known = deviations.fault_of_queued_abort(beside.header)
    if session is None:
        raise Diverged("OUT-1", f"{e.request} waits, and has no row", "gives one back")
    want = f"{session.name} has nothing of {e.request}, which waits"
    beside.deviates(
        known, "SES-2", want, "keeps its text as that of a finished turn", Abort(e.request)
    )
    history = text_cut(request.text, request.origin + e.outputs)
    kept = session._replace(history=history, slot=after)
    beside.state = end_turn(beside.state.without_request(e.request), kept)
    beside.texts.keeps(e.request, session.name, e.ids, text_len(history))
    beside.of_session(session.name).stays_busy = known
    del beside.requests[e.request]


def _counts(beside: LogFollower, e: log.Released, accepted: int) -> None:
    """Outputs at an end, and how many of them count: a stop is one of the `accepted` of the last round."""
    if e.reason is not None:
        counts_outputs(beside, e.request, e.outputs, beside.of(e.request).rounds[1:])
    least = e.outputs - max(0, accepted - 1)
    most = e.outputs if e.limit is None else min(e.outputs, e.limit)
    if e.reason == "FINISH_LENGTH" and e.limit is not None:
        least = most = e.limit
    if e.counted is not None and not least <= e.counted <= most:
        want = f"between {least} and {most} outputs count for {e.request}"
        raise Diverged("LEN-2", want, f"counts {e.counted}")


def _retracted(beside: LogFollower, request: Request, outputs: int, shown: Shown) -> None:
    seen = beside.of(request.name)
    reach = beside.result.reach
    beside.step.outside[request.name] = None
    seen.retracts += 1
    seen.matched = None
    seen.rounds.clear()
    reach("a retract")
    reach("a retract of a session's turn", request.session is not None)
    reach("a second retract of one request", seen.retracts == 2)
    reach("a retract before the first result", request.output == 1 and outputs == 0)
    # an operator who pauses the server has it retract prefills as well
    if request.phase is Phase.EXTENDING:
        reach("a retract between two chunks")
        beside.state = beside.state.with_request(request._replace(phase=Phase.RUNNING))
    beside.do(Retract(request.name, request.output - outputs), shown=shown)


def _last_of_a_mixed_batch(beside: LogFollower, e: log.Released) -> str | None:
    """A known fault: the server does not count the token of a mixed batch that was a request's last. Its
    name, if it is one."""
    request = beside.request(e.request)
    rounds = beside.of(e.request).rounds
    if not rounds or not rounds[0].mixed:
        return None
    mine = request.cursors
    assert mine is not None  # a round of it has run
    if (e.outputs, e.before[0]) != (request.output + 1, mine.kv_committed_len):
        return None
    draft = Draft(e.request, mine.kv_allocated_len - mine.kv_committed_len, 1)
    beside.do(SpecDecode((draft,)))
    known = deviations.fault_of_mixed_batch(beside.header)
    computed = f"{e.request} has computed {mine.kv_committed_len + 1} tokens"
    beside.deviates(known, "LEN-2", computed, f"counts {mine.kv_committed_len}")
    beside.moves(e.request, mine)
    return known


def _finished_without_output(state: State, request: Request) -> State:
    """A turn that may have no output ends after its prefill; the token that it sampled is nobody's."""
    assert request.cursors is not None
    session = state.session(request.session)
    state = state.without_request(request.name)
    if session is None:
        return state
    history = text_cut(request.text, request.origin)
    slot = cut(request.cursors, request.origin)
    return end_turn(state, session._replace(history=history, slot=slot))
