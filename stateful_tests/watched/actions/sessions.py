"""Actions of sessions, and of requests that wait."""

from __future__ import annotations

import re

from impl.sglang.server import events as log
from reference.commands import Abort, Close, Open, Reason, Submit
from reference.state import Session, text_cut, text_len
from stateful_tests.watched import deviations
from stateful_tests.watched.log_follower import LogFollower, Diverged, action
from stateful_tests.watched.violated_clauses import PageJudge
from stateful_tests.watched.kept_states import KeptStates
from stateful_tests.watched.log_facts import RequestSeen, SessionSeen

# A refusal for its size says how long the input is.
_TOO_LONG = re.compile(r"Input length \((\d+) tokens\)|input_len=(\d+)")
# Admission asks for more than a text and an output: a server may refuse what is this near to a limit.
_MARGIN = 16


@action(log.SessionOpened, commands="open")
def on_opened(follower: LogFollower, event: log.SessionOpened) -> None:
    if event.done:
        follower.do(Open(event.session))
        follower.sessions[event.session] = SessionSeen(event.times_out)
    elif follower.state.session(event.session) is None:
        follower.result.policy["open"] += 1


@action(log.CloseAsked, compared="it is closed by the next step, if no turn is in flight")
def on_close_asked(follower: LogFollower, event: log.CloseAsked) -> None:
    session = follower.state.session(event.session)
    if session is None:
        return
    follower.session_seen(event.session).close_requested = True
    if session.turn is None:
        follower.step.closed_sessions[event.session] = None
    follower.result.reach("a close while a turn is in flight", session.turn is not None)


@action(
    log.SessionClosed,
    guard="no turn is in flight; a client requested it, or its time is over",
    commands="close",
)
def on_closed(follower: LogFollower, event: log.SessionClosed) -> None:
    session = follower.state.session(event.session)
    session_seen = follower.session_seen(event.session)
    command = Close(event.session)
    if session is not None and not (session_seen.close_requested or session_seen.times_out):
        expected = f"{event.session} stays open: nobody has closed it, and it has no timeout"
        raise Diverged("SES-2", expected, "closed it", command)
    if session is not None and session.turn is not None:
        known = deviations.fault_of_orphaned_turn(follower.header, follower.request_seen(session.turn))
        expected = f"{event.session} stays until its turn {session.turn} ends"
        raise Diverged("SES-2", expected, "closed it", command, known)
    follower.do(command)
    del follower.sessions[event.session]
    follower.step.closed_sessions.pop(event.session, None)
    follower.pages.forget(event.session)
    follower.texts.history.pop(event.session, None)


def check_due_closes(follower: LogFollower) -> None:
    """Compare closes that no turn delays: they have happened by the next step."""
    for name in follower.step.closed_sessions:
        known = follower.session_seen(name).stays_busy
        expected = f"{name} is closed: none of its turns is in flight"
        follower.note_deviation(known, "SES-4", expected, "it is open", Close(name))
    follower.step.closed_sessions.clear()


@action(
    log.Submitted,
    guard="no turn of the session is in flight; one that is rejected: there is one; the pools hold the input",
    commands="submit (rejected: submit of a request by itself)",
    compared="origin; the input begins with the history",
)
def on_submitted(follower: LogFollower, event: log.Submitted) -> None:
    """Follow a submitted request. Raises Diverged for a turn beside another, an input of another length, or
    one that no server holds."""
    if event.rejected:
        _follow_rejected_turn(follower, event)
        if follower.header.tier is not None and follower.header.tier.storage:
            follower.note_interruption(event.request)  # it is matched at once, to ask the storage
        return
    command = Submit(event.request, event.session, event.new)
    session = follower.state.session(event.session)
    follower.requests[event.request] = RequestSeen()
    if session is not None and session.turn is not None:
        known = deviations.fault_of_orphaned_turn(follower.header, follower.request_seen(session.turn))
        expected = f"refused: {Reason.TURN_IN_FLIGHT.value}, as {session.turn} has not ended"
        raise Diverged("OUT-1", expected, "took the turn", command, known)
    if session is not None and follower.session_seen(session.name).text_unknown:
        _adopt_shown_text(follower, session, event)
    for divergence in follower.texts.note_input(event.request, event.session, event.ids):
        raise Diverged(*divergence, command)
    most = min(follower.header.full_tokens, follower.header.width)
    if event.tokens > most:
        input_text = f"its input has {event.tokens} tokens, and an empty server holds {most}"
        expected = f"{event.request} is refused: {input_text}"
        raise Diverged("PRO-3", expected, "takes it", command)
    follower.do(command)
    origin = follower.request(event.request).origin
    follower.result.compared += 1
    if origin != event.tokens:
        expected = f"{origin} tokens of input: the history and {event.new} new"
        raise Diverged("SES-1", expected, f"has {event.tokens}", command)


def _adopt_shown_text(follower: LogFollower, session: Session, event: log.Submitted) -> None:
    """Follow a known fault that has left other text in a session, as the length of its next input
    shows."""
    follower.session_seen(session.name).text_unknown = False
    follower.texts.history.pop(session.name, None)
    had = text_len(session.history)
    has = event.tokens - event.new
    if had == has or has < 0:
        return
    known = deviations.fault_of_orphaned_text(follower.header)
    expected = f"{had} tokens of history, without a turn that no longer counts"
    command = Submit(event.request, event.session, event.new)
    follower.note_deviation(known, "SES-1", expected, f"has {has}", command)
    serial = follower.state.serial + 1
    text = ((serial, has),) if has else ()
    state = follower.state.with_session(session._replace(history=text))
    follower.state = state._replace(serial=serial)


def _check_size_refusal(follower: LogFollower, event: log.Submitted, length: int) -> None:
    """Judge a refusal of an input as too long: an empty server must not hold it."""
    header = follower.header
    follower.result.reach("a prompt that is refused for its size")
    pools = [header.full_tokens, *([header.swa_tokens] if header.window is not None else [])]
    most = min(*pools, header.width) - header.width // 64 - 2 * header.page_size - _MARGIN
    if length <= most:
        expected = f"{event.request} is taken: an empty server holds {most} tokens at least"
        raise Diverged("PRO-3", expected, f"refuses its input of {length}")


def _follow_rejected_turn(follower: LogFollower, event: log.Submitted) -> None:
    """Follow a turn that was rejected: a request of one token runs instead, outside of the session."""
    if too_long := _TOO_LONG.search(event.why):
        _check_size_refusal(follower, event, int(too_long[1] or too_long[2]))
    session = follower.state.session(event.session)
    busy = session is not None and session.turn is not None
    if session is not None and not busy and "active request" in event.why:
        known = follower.session_seen(session.name).stays_busy
        expected = f"done: no turn of {session.name} is in flight"
        observed = f"refused: {Reason.TURN_IN_FLIGHT.value}"
        command = Submit(event.request, event.session, event.new)
        follower.note_deviation(known, "OUT-1", expected, observed, command)
    elif busy:
        follower.result.reach("a second turn that is rejected")
    else:
        follower.result.policy[f"submit: {event.why[:60] or 'rejected'}"] += 1
    if event.tokens != 1:
        raise Diverged("SES-2", f"{event.request} is rejected: it runs one token", f"runs {event.tokens}")
    follower.requests[event.request] = RequestSeen(rejected_by=event.session)
    follower.do(Submit(event.request, None, event.tokens))


@action(log.Requeued, guard="it was retracted")
def on_requeued(follower: LogFollower, event: log.Requeued) -> None:
    if event.request not in follower.step.retracted:
        raise Diverged("OUT-1", f"{event.request} is queued once", "queues it again")
    del follower.step.retracted[event.request]


@action(log.QueueAborted, guard="each of them waits", commands="abort of each")
def on_queue_aborted(follower: LogFollower, event: log.QueueAborted) -> None:
    for name in event.queued:
        if (request := follower.state.request(name)) is not None:
            follower.result.reach("an abort in the queue")
            follower.result.reach("an abort after a retract", request.started)
            abort_queued(follower, name)


def abort_given_up(follower: LogFollower) -> None:
    """Abort requests that were retracted and not queued again: the server's last resort is to drop
    them."""
    for name in follower.step.retracted:
        follower.result.reach("the last resort: the only request is given up")
        abort_queued(follower, name)
    follower.step.retracted.clear()


def abort_queued(follower: LogFollower, name: str) -> None:
    """Abort a waiting request."""
    request = follower.request(name)
    follower.note_interruption(name)
    request_seen = follower.requests.pop(name)
    session = follower.state.session(request.session or request_seen.rejected_by or request_seen.orphan_of)
    if session is not None and session.turn in (None, name):
        stays = deviations.fault_of_busy_session(follower.header, retracted=request.started)
        session_seen = follower.session_seen(session.name)
        session_seen.stays_busy = stays or session_seen.stays_busy
    keeps = follower.turn_session(request)
    follower.do(Abort(name))
    known = deviations.fault_of_orphaned_turn(follower.header, RequestSeen(retracts=1))
    if known and keeps is not None and request.started:
        expected = f"all that {keeps.name} keeps is wiped: {name} has written KV"
        follower.note_deviation(known, "SES-2", expected, "keeps its text", Abort(name))
        history = text_cut(request.text, request.origin + request.output)
        follower.state = follower.state.with_session(keeps._replace(history=history, turn=None))
        follower.session_seen(keeps.name).text_unknown = True


@action(
    log.Flushed,
    guard="nobody has a row but sessions between their turns, and who waits has no state",
    compared="the tree is empty; from here on sessions keep nothing",
)
def on_flushed(follower: LogFollower, event: log.Flushed) -> None:
    if event.tree:
        raise Diverged("OUT-1", "a flush leaves no token in the tree", f"{event.tree} are there")
    has = [r.name for r in follower.state.requests if r.cursors is not None]
    if has:
        raise Diverged("OUT-1", f"the cache is flushed once {has} have ended", "it is flushed")
    has = [name for name, request_seen in follower.requests.items() if request_seen.has_state]
    if has:
        expected = f"the cache is flushed once {has} have given back the slots of their states"
        raise Diverged("STA-6", expected, "it is flushed", known=deviations.fault_of_flush(follower.header))
    for session in follower.state.sessions:
        follower.result.reach("a flush of what sessions keep", session.slot is not None)
        follower.state = follower.state.with_session(session._replace(slot=None))
    follower.pages = PageJudge(follower.geometry)
    follower.kept_states = KeptStates(follower.header)
    follower.tier = None
    follower.reported_offsets.clear()  # what was lost is there again
