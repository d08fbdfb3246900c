"""step(state, command) -> (state, outcome): the specification as a function.

Immutable state in, immutable state out. One function per command checks the refusals in the order
in which `Reason` lists them and then says what is so afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from reference.commands import (
    Abort, Admit, CheckBusy, CheckIdle, Choice, Close, Command, Decode, Done, EvictSwa, Extend,
    Finish, Mode, Open, Outcome, Reason, Refused, Retract, SpecDecode, Submit,
)  # fmt: skip
from reference.accounts import in_batch, report
from reference.cursors import ceil_page, cut, resume, sweep, sweep_limit, window_live
from reference.geometry import Geometry
from reference.ledger import (
    ZERO, Cursors, Phase, Request, Scope, Session, State, free, text_cut, text_len,
)  # fmt: skip

# Raised when the specification is changed: traces carry it.
SPEC_VERSION = "1"


class ChoiceNotAllowed(Exception):
    """A system chose something that the specification does not leave to it (OUT-3)."""


class _No(Exception):
    """Internal: the command is refused for this reason."""

    def __init__(self, reason: Reason) -> None:
        self.reason = reason


def initial(geometry: Geometry, mode: Mode = Mode.FREE) -> State:
    """The empty state."""
    return State(Scope(geometry, mode))


def step(state: State, command: Command, choices: Sequence[Choice] = ()) -> tuple[State, Outcome]:
    """Carry out `command`, following `choices` where the specification leaves one.

    Returns the new state and Done, or the very same state and Refused. Raises ChoiceNotAllowed.
    """
    try:
        if isinstance(command, (CheckBusy, CheckIdle)):
            return state, _check(state, command)
        return _RULES[type(command)](state, command, {c.request: c for c in choices}), Done()
    except _No as no:
        return state, Refused(no.reason)


Choices = dict[str, Choice]


def _need(condition: object, reason: Reason) -> None:
    if not condition:
        raise _No(reason)


def _request(state: State, name: str) -> Request:
    request = state.request(name)
    if request is None:
        raise _No(Reason.UNKNOWN_REQUEST)
    return request


def _open(state: State, command: Open, _: Choices) -> State:
    taken = state.session(command.session) or state.request(command.session)
    _need(taken is None, Reason.SESSION_EXISTS)
    return state.with_session(Session(command.session))


def _submit(state: State, command: Submit, _: Choices) -> State:
    _need(command.tokens >= 1, Reason.EMPTY)
    session = state.session(command.session)
    _need(command.session is None or session is not None, Reason.UNKNOWN_SESSION)
    taken = state.request(command.request) or state.session(command.request)
    _need(taken is None, Reason.REQUEST_EXISTS)
    if session is not None:
        _need(not session.closing, Reason.SESSION_CLOSING)
        _need(session.turn is None, Reason.TURN_IN_FLIGHT)
    _need(command.rewind <= 0, Reason.SHRINKING_PREFIX)
    _need(command.rewind == 0, Reason.BAD_LENGTH)
    history = session.history if session is not None else ()
    origin = text_len(history) + command.tokens
    _need(origin <= state.scope.geometry.width, Reason.ROW_TOO_SHORT)
    serial = state.serial + 1
    state = state._replace(serial=serial).with_request(
        Request(command.request, command.session, serial, history, origin)
    )
    return state if session is None else state.with_session(session._replace(turn=command.request))


def _admit(state: State, command: Admit, _: Choices) -> State:
    request = _request(state, command.request)
    _need(request.phase in (Phase.QUEUED, Phase.ADMITTED), Reason.WRONG_PHASE)
    geometry = state.scope.geometry
    session = state.session(request.session)
    if session is None or session.slot is None:
        restored = ZERO
    else:
        key = request.origin + request.output - 1
        prefix = resume(session.slot, key, geometry.window or 0)
        restored = cut(session.slot, prefix)
        state = state.with_session(session._replace(slot=restored))
    return state.with_request(request._replace(phase=Phase.ADMITTED, cursors=restored))


def _allocate(state: State, grown: Iterable[tuple[Request, int]]) -> None:
    """Refuse unless every request of the batch can grow to the given kv_allocated_len."""
    geometry = state.scope.geometry
    pages = rows = 0
    for request, allocated in grown:
        _need(allocated <= geometry.width, Reason.ROW_TOO_SHORT)
        assert request.cursors is not None
        old = request.cursors.kv_allocated_len
        pages += (ceil_page(allocated, geometry.page_size) - ceil_page(old, geometry.page_size)) // (
            geometry.page_size
        )
        session = state.session(request.session)
        rows += old == 0 and (session is None or session.slot is None)
    left = free(state)
    _need(rows <= left.rows, Reason.NO_ROW)
    _need(pages <= left.full, Reason.OUT_OF_FULL)
    _need(geometry.window is None or pages <= left.swa, Reason.OUT_OF_SWA)


def _batch(state: State, names: Sequence[str], *phases: Phase) -> list[Request]:
    """The requests of a batch, distinct and all in one of `phases`."""
    _need(len(set(names)) == len(names), Reason.DUPLICATE_LANE)
    requests = [_request(state, name) for name in names]
    _need(all(r.phase in phases for r in requests), Reason.WRONG_PHASE)
    return requests


def _cursors(request: Request) -> Cursors:
    assert request.cursors is not None
    return request.cursors


def _own_sweep(state: State, request: Request, choices: Choices) -> Request:
    """A server may sweep inside an allocation, driven with the length committed before it."""
    choice = choices.get(request.name)
    cursors = _cursors(request)
    if choice is None or choice.swa_evicted_seqlen in (None, cursors.swa_evicted_seqlen):
        return request
    return _swept(state, request, cursors.kv_committed_len, choice.swa_evicted_seqlen)


def _swept(state: State, request: Request, length: int, chosen: int | None) -> Request:
    """The request after a sweep with `length`; `chosen` is where the system stopped."""
    geometry = state.scope.geometry
    window, page_size = geometry.window, geometry.page_size
    if window is None:
        raise ChoiceNotAllowed(f"{request.name}: swept without an SWA pool")
    before = _cursors(request)
    after = sweep(before, length, window, page_size)
    if chosen is not None and chosen != after.swa_evicted_seqlen:
        low = max(before.swa_evicted_seqlen, before.cache_protected_len)
        high = max(low, sweep_limit(length, window, page_size))
        if not low <= chosen <= high or chosen % page_size:
            raise ChoiceNotAllowed(
                f"{request.name}: swa_evicted_seqlen {chosen} after a sweep with length {length};"
                f" allowed are page boundaries in [{low}, {high}]"
            )
        after = before._replace(swa_evicted_seqlen=chosen)
    return request._replace(cursors=after, swept=max(request.swept, length))


def _extend(state: State, command: Extend, choices: Choices) -> State:
    _need(command.lanes and all(lane.tokens >= 1 for lane in command.lanes), Reason.EMPTY)
    names = [lane.request for lane in command.lanes]
    requests = _batch(state, names, Phase.ADMITTED, Phase.EXTENDING)
    grown = []
    for request, lane in zip(requests, command.lanes):
        length = _cursors(request).kv_committed_len + lane.tokens
        _need(length <= request.origin + request.output, Reason.BAD_LENGTH)
        grown.append((request, length))
    grown = [(_own_sweep(state, request, choices), length) for request, length in grown]
    for request, _ in grown:
        state = state.with_request(request)
    _allocate(state, grown)
    for request, length in grown:
        cursors = _cursors(request)._replace(kv_committed_len=length, kv_allocated_len=length)
        last = length == request.origin + request.output
        state = state.with_request(
            request._replace(
                cursors=cursors,
                started=True,
                output=request.output + last,
                phase=Phase.RUNNING if last else Phase.EXTENDING,
            )
        )
    return state


def _decode(state: State, command: Decode, choices: Choices) -> State:
    _need(command.requests, Reason.EMPTY)
    requests = _batch(state, command.requests, Phase.RUNNING)
    return _rounds(state, [(r, 1, 1) for r in requests], choices, may_allocate_ahead=False)


def _spec_decode(state: State, command: SpecDecode, choices: Choices) -> State:
    lanes = command.lanes
    _need(lanes and all(n.allocate >= 1 and n.accept >= 1 for n in lanes), Reason.EMPTY)
    requests = _batch(state, [lane.request for lane in lanes], Phase.RUNNING)
    _need(all(lane.accept <= lane.allocate for lane in lanes), Reason.BAD_LENGTH)
    rounds = [(r, lane.allocate, lane.accept) for r, lane in zip(requests, lanes)]
    return _rounds(state, rounds, choices, may_allocate_ahead=True)


def _rounds(
    state: State,
    rounds: Sequence[tuple[Request, int, int]],
    choices: Choices,
    *,
    may_allocate_ahead: bool,
) -> State:
    """A decode round: slots for `ahead` tokens past the commit, `accept` of them commit."""
    geometry = state.scope.geometry
    grown = []
    for request, ahead, _ in rounds:
        cursors = _cursors(request)
        _need(
            geometry.window is None
            or window_live(
                cursors.swa_evicted_seqlen,
                cursors.kv_committed_len,
                geometry.window,
            ),
            Reason.WINDOW_LOST,
        )
        allocated = max(cursors.kv_allocated_len, cursors.kv_committed_len + ahead)
        choice = choices.get(request.name)
        chosen = None if choice is None else choice.kv_allocated_len
        if chosen is not None and chosen != allocated:
            if not may_allocate_ahead or not allocated < chosen <= geometry.width:
                raise ChoiceNotAllowed(
                    f"{request.name}: kv_allocated_len {chosen} where {allocated} was needed"
                )
            allocated = chosen
        grown.append((request, allocated))
    grown = [(_own_sweep(state, request, choices), allocated) for request, allocated in grown]
    for request, _ in grown:
        state = state.with_request(request)
    _allocate(state, grown)
    for (request, allocated), (_, _, accept) in zip(grown, rounds):
        cursors = _cursors(request)
        cursors = cursors._replace(
            kv_committed_len=cursors.kv_committed_len + accept, kv_allocated_len=allocated
        )
        state = state.with_request(
            request._replace(
                cursors=cursors,
                output=request.output + accept,
                known=(request.known[1], request.output),
            )
        )
    return state


def _evict_swa(state: State, command: EvictSwa, choices: Choices) -> State:
    request = _request(state, command.request)
    _need(request.phase in (Phase.EXTENDING, Phase.RUNNING), Reason.WRONG_PHASE)
    _need(state.scope.geometry.window is not None, Reason.NO_SWA)
    cursors = _cursors(request)
    _need(0 <= command.length <= cursors.kv_allocated_len, Reason.BAD_LENGTH)
    faithful = state.scope.mode is Mode.FAITHFUL
    _need(not faithful or command.length <= cursors.kv_committed_len, Reason.UNFAITHFUL)
    choice = choices.get(request.name)
    chosen = None if choice is None else choice.swa_evicted_seqlen
    return state.with_request(_swept(state, request, command.length, chosen))


def _release(state: State, session: Session) -> State:
    """A turn has ended: its closing session goes with everything it has."""
    return state.without_session(session.name) if session.closing else state.with_session(session)


def _finish(state: State, command: Finish, _: Choices) -> State:
    request = _request(state, command.request)
    _need(request.phase is Phase.RUNNING, Reason.WRONG_PHASE)
    _need(1 <= command.finished_len <= request.output, Reason.BAD_LENGTH)
    target = request.origin + command.finished_len
    faithful = target >= request.swept and command.finished_len > request.known[0]
    _need(faithful or state.scope.mode is Mode.FREE, Reason.UNFAITHFUL)
    state = state.without_request(request.name)
    session = state.session(request.session)
    if session is None:
        return state
    return _release(
        state,
        session._replace(
            history=text_cut(request.text, target), slot=cut(_cursors(request), target), turn=None
        ),
    )


def _retract(state: State, command: Retract, _: Choices) -> State:
    request = _request(state, command.request)
    _need(request.phase is Phase.RUNNING, Reason.WRONG_PHASE)
    output = request.output - command.in_flight
    _need(command.in_flight in (0, 1) and output >= 1, Reason.BAD_LENGTH)
    target = request.origin + output
    _need(state.scope.mode is Mode.FREE or target - 1 >= request.swept, Reason.UNFAITHFUL)
    session = state.session(request.session)
    if session is not None:
        state = state.with_session(session._replace(slot=cut(_cursors(request), target)))
    return state.with_request(
        request._replace(phase=Phase.QUEUED, output=output, known=(output, output), cursors=None)
    )


def _abort(state: State, command: Abort, _: Choices) -> State:
    request = _request(state, command.request)
    if command.marked:
        _need(request.phase is Phase.QUEUED and not request.started, Reason.WRONG_PHASE)
        left = free(state)
        _need(left.rows >= 1, Reason.NO_ROW)
        _need(left.full >= 1, Reason.OUT_OF_FULL)
        _need(state.scope.geometry.window is None or left.swa >= 1, Reason.OUT_OF_SWA)
    state = state.without_request(request.name)
    session = state.session(request.session)
    if session is None:
        return state
    slot = None if request.started else session.slot
    return _release(state, session._replace(slot=slot, turn=None))


def _close(state: State, command: Close, _: Choices) -> State:
    session = state.session(command.session)
    if session is None:
        raise _No(Reason.UNKNOWN_SESSION)
    _need(not session.closing, Reason.SESSION_CLOSING)
    if session.turn is not None:
        return state.with_session(session._replace(closing=True))
    return state.without_session(session.name)


def _check(state: State, command: CheckBusy | CheckIdle) -> Done:
    """The memory checks look and change nothing (CHK-3)."""
    if isinstance(command, CheckBusy):
        _need(command.level in (0, 1, 2), Reason.BAD_LENGTH)
        return Done(report=report(state) if command.level else None)
    _need(not any(in_batch(r) for r in state.requests), Reason.NOT_IDLE)
    return Done(report=report(state))


_RULES: dict[type, Callable[..., State]] = {
    Open: _open,
    Submit: _submit,
    Admit: _admit,
    Extend: _extend,
    Decode: _decode,
    SpecDecode: _spec_decode,
    EvictSwa: _evict_swa,
    Finish: _finish,
    Retract: _retract,
    Abort: _abort,
    Close: _close,
}
