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
def opened(beside: LogFollower, e: log.SessionOpened) -> None:
    if e.done:
        beside.do(Open(e.session))
        beside.sessions[e.session] = SessionSeen(e.times_out)
    elif beside.state.session(e.session) is None:
        beside.result.policy["open"] += 1


@action(log.CloseAsked, compared="it is closed by the next step, if no turn is in flight")
def close_requested(beside: LogFollower, e: log.CloseAsked) -> None:
    session = beside.state.session(e.session)
    if session is None:
        return
    beside.of_session(e.session).close_requested = True
    if session.turn is None:
        beside.step.due[e.session] = None
    beside.result.reach("a close while a turn is in flight", session.turn is not None)


@action(
    log.SessionClosed,
    guard="no turn is in flight; a client requested it, or its time is over",
    commands="close",
)
def closed(beside: LogFollower, e: log.SessionClosed) -> None:
    session = beside.state.session(e.session)
    seen = beside.of_session(e.session)
    command = Close(e.session)
    if session is not None and not (seen.close_requested or seen.times_out):
        want = f"{e.session} stays open: nobody has closed it, and it has no timeout"
        raise Diverged("SES-2", want, "closed it", command)
    if session is not None and session.turn is not None:
        known = deviations.fault_of_orphaned_turn(beside.header, beside.of(session.turn))
        want = f"{e.session} stays until its turn {session.turn} ends"
        raise Diverged("SES-2", want, "closed it", command, known)
    beside.do(command)
    del beside.sessions[e.session]
    beside.step.due.pop(e.session, None)
    beside.pages.forget(e.session)
    beside.texts.history.pop(e.session, None)


def closes_happen(beside: LogFollower) -> None:
    """A close that no turn keeps waiting has happened by the next step."""
    for name in beside.step.due:
        known = beside.of_session(name).stays_busy
        want = f"{name} is closed: none of its turns is in flight"
        beside.deviates(known, "SES-4", want, "it is open", Close(name))
    beside.step.due.clear()


@action(
    log.Submitted,
    guard="no turn of the session is in flight; one that is rejected: there is one; the pools hold the input",
    commands="submit (rejected: submit of a request by itself)",
    compared="origin; the input begins with the history",
)
def submitted(beside: LogFollower, e: log.Submitted) -> None:
    if e.rejected:
        _rejected(beside, e)
        if beside.header.tier is not None and beside.header.tier.storage:
            beside.interrupts(e.request)  # it is matched at once, to ask the storage
        return
    command = Submit(e.request, e.session, e.new)
    session = beside.state.session(e.session)
    beside.requests[e.request] = RequestSeen()
    if session is not None and session.turn is not None:
        known = deviations.fault_of_orphaned_turn(beside.header, beside.of(session.turn))
        want = f"refused: {Reason.TURN_IN_FLIGHT.value}, as {session.turn} has not ended"
        raise Diverged("OUT-1", want, "took the turn", command, known)
    if session is not None and beside.of_session(session.name).text_unknown:
        _shows_text(beside, session, e)
    for found in beside.texts.asks(e.request, e.session, e.ids):
        raise Diverged(*found, command)
    most = min(beside.header.full_tokens, beside.header.width)
    if e.tokens > most:
        want = f"{e.request} is refused: its input has {e.tokens} tokens, and an empty server holds {most}"
        raise Diverged("PRO-3", want, "takes it", command)
    beside.do(command)
    origin = beside.request(e.request).origin
    beside.result.compared += 1
    if origin != e.tokens:
        want = f"{origin} tokens of input: the history and {e.new} new"
        raise Diverged("SES-1", want, f"has {e.tokens}", command)


def _shows_text(beside: LogFollower, session: Session, e: log.Submitted) -> None:
    """A known fault has left other text in a session, as the length of its next input shows."""
    beside.of_session(session.name).text_unknown = False
    beside.texts.history.pop(session.name, None)
    had, has = text_len(session.history), e.tokens - e.new
    if had == has or has < 0:
        return
    known = deviations.fault_of_orphaned_text(beside.header)
    want = f"{had} tokens of history, without a turn that no longer counts"
    command = Submit(e.request, e.session, e.new)
    beside.deviates(known, "SES-1", want, f"has {has}", command)
    serial = beside.state.serial + 1
    text = ((serial, has),) if has else ()
    state = beside.state.with_session(session._replace(history=text))
    beside.state = state._replace(serial=serial)


def _refused_for_its_size(beside: LogFollower, e: log.Submitted, length: int) -> None:
    """Judge a refusal of an input as too long: an empty server must not hold it."""
    header = beside.header
    beside.result.reach("a prompt that is refused for its size")
    pools = [header.full_tokens, *([header.swa_tokens] if header.window is not None else [])]
    most = min(*pools, header.width) - header.width // 64 - 2 * header.page_size - _MARGIN
    if length <= most:
        want = f"{e.request} is taken: an empty server holds {most} tokens at least"
        raise Diverged("PRO-3", want, f"refuses its input of {length}")


def _rejected(beside: LogFollower, e: log.Submitted) -> None:
    """It was refused as a turn; what runs is a request of one token, outside of the session."""
    if too_long := _TOO_LONG.search(e.why):
        _refused_for_its_size(beside, e, int(too_long[1] or too_long[2]))
    session = beside.state.session(e.session)
    busy = session is not None and session.turn is not None
    if session is not None and not busy and "active request" in e.why:
        known = beside.of_session(session.name).stays_busy
        want = f"done: no turn of {session.name} is in flight"
        observed = f"refused: {Reason.TURN_IN_FLIGHT.value}"
        beside.deviates(known, "OUT-1", want, observed, Submit(e.request, e.session, e.new))
    elif busy:
        beside.result.reach("a second turn that is rejected")
    else:
        beside.result.policy[f"submit: {e.why[:60] or 'rejected'}"] += 1
    if e.tokens != 1:
        raise Diverged("SES-2", f"{e.request} is rejected: it runs one token", f"runs {e.tokens}")
    beside.requests[e.request] = RequestSeen(rejected_by=e.session)
    beside.do(Submit(e.request, None, e.tokens))


@action(log.Requeued, guard="it was retracted")
def requeued(beside: LogFollower, e: log.Requeued) -> None:
    if e.request not in beside.step.outside:
        raise Diverged("OUT-1", f"{e.request} is queued once", "queues it again")
    del beside.step.outside[e.request]


@action(log.QueueAborted, guard="each of them waits", commands="abort of each")
def queue_aborted(beside: LogFollower, e: log.QueueAborted) -> None:
    for name in e.queued:
        if (request := beside.state.request(name)) is not None:
            beside.result.reach("an abort in the queue")
            beside.result.reach("an abort after a retract", request.started)
            abort_queued(beside, name)


def given_up(beside: LogFollower) -> None:
    """Retracted and not queued again: the server's last resort is to give the request up."""
    for name in beside.step.outside:
        beside.result.reach("the last resort: the only request is given up")
        abort_queued(beside, name)
    beside.step.outside.clear()


def abort_queued(beside: LogFollower, name: str) -> None:
    """A request that waits is given up."""
    request = beside.request(name)
    beside.interrupts(name)
    seen = beside.requests.pop(name)
    whose = beside.state.session(request.session or seen.rejected_by or seen.orphan_of)
    if whose is not None and whose.turn in (None, name):
        stays = deviations.fault_of_busy_session(beside.header, retracted=request.started)
        beside.of_session(whose.name).stays_busy = stays or beside.of_session(whose.name).stays_busy
    keeps = beside.session_of(request)
    beside.do(Abort(name))
    known = deviations.fault_of_orphaned_turn(beside.header, RequestSeen(retracts=1))
    if known and keeps is not None and request.started:
        want = f"all that {keeps.name} keeps is wiped: {name} has written KV"
        beside.deviates(known, "SES-2", want, "keeps its text", Abort(name))
        history = text_cut(request.text, request.origin + request.output)
        beside.state = beside.state.with_session(keeps._replace(history=history, turn=None))
        beside.of_session(keeps.name).text_unknown = True


@action(
    log.Flushed,
    guard="nobody has a row but sessions between their turns, and who waits has no state",
    compared="the tree is empty; from here on sessions keep nothing",
)
def flushed(beside: LogFollower, e: log.Flushed) -> None:
    if e.tree:
        raise Diverged("OUT-1", "a flush leaves no token in the tree", f"{e.tree} are there")
    has = [r.name for r in beside.state.requests if r.cursors is not None]
    if has:
        raise Diverged("OUT-1", f"the cache is flushed once {has} have ended", "it is flushed")
    has = [name for name, seen in beside.requests.items() if seen.has_state]
    if has:
        want = f"the cache is flushed once {has} have given back the slots of their states"
        raise Diverged("STA-6", want, "it is flushed", known=deviations.fault_of_flush(beside.header))
    for session in beside.state.sessions:
        beside.result.reach("a flush of what sessions keep", session.slot is not None)
        beside.state = beside.state.with_session(session._replace(slot=None))
    beside.pages, beside.kept_states = PageJudge(beside.geometry), KeptStates(beside.header)
    beside.tier = None
    beside.reported_offsets.clear()  # what was lost is there again
