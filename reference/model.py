"""step(state, command) -> (state, outcome): the specification as a function.

Immutable state in, immutable state out. One function per command checks the refusals in the order
in which `Reason` lists them and then says what is so afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from reference.accounts import report
from reference.commands import (
    Abort,
    Admit,
    CheckBusy,
    CheckIdle,
    Choice,
    Close,
    Command,
    Decode,
    Done,
    Evict,
    EvictSwa,
    Extend,
    Finish,
    Freed,
    Insert,
    Match,
    Mode,
    Open,
    Outcome,
    Reason,
    Refused,
    Retract,
    SpecDecode,
    Submit,
    Unlock,
    prompt_len,
)  # fmt: skip
from reference.cursors import ceil_page, cut, floor_page, lost_below, resume, sweep, sweep_limit, window_live
from reference.geometry import Geometry
from reference.ledger import (
    IN_BATCH,
    ZERO,
    Cursors,
    Phase,
    Request,
    RunConfig,
    Session,
    State,
    free,
    text_cut,
    text_len,
    text_tokens,
)  # fmt: skip
from reference.prefix_cache import (
    Effects,
    evicted,
    extended,
    lock_holders,
    inserted,
    key_of,
    matched,
    prompt_kept,
    text_left,
    unlocked,
    well_formed,
    with_room,
)  # fmt: skip
from reference.tree import Tree

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
    tree = Tree(geometry.page_size, geometry.window) if geometry.tree else None
    return State(RunConfig(geometry, mode), tree=tree)


Choices = dict[str, Choice]


@dataclass(slots=True)
class _Turn:
    """What a rule is given besides state and command: choices to follow; effects and outcome to fill in."""

    choices: Choices
    effects: Effects = field(default_factory=Effects)
    done: Done = field(default_factory=Done)


def step(state: State, command: Command, choices: Sequence[Choice] = ()) -> tuple[State, Outcome]:
    """Carry out `command`, following `choices` where the specification leaves one.

    Returns the new state and Done, or the very same state and Refused. Raises ChoiceNotAllowed.
    """
    return step_with_effects(state, command, choices)[:2]


def step_with_effects(
    state: State, command: Command, choices: Sequence[Choice] = ()
) -> tuple[State, Outcome, Effects]:
    """`step`, and which pages the tree gave back or took over."""
    turn = _Turn({c.request: c for c in choices})
    try:
        return _RULES[type(command)](state, command, turn), turn.done, turn.effects
    except _No as no:
        return state, Refused(no.reason), Effects()


def _need(condition: object, reason: Reason) -> None:
    if not condition:
        raise _No(reason)


def _request(state: State, name: str) -> Request:
    request = state.request(name)
    if request is None:
        raise _No(Reason.UNKNOWN_REQUEST)
    return request


def _taken(state: State, name: str) -> bool:
    """Some session, request or lock holder is called that."""
    known = state.session(name) or state.request(name)
    return known is not None or name in lock_holders(state)


def _open(state: State, command: Open, _: _Turn) -> State:
    _need(not _taken(state, command.session), Reason.SESSION_EXISTS)
    return state.with_session(Session(command.session))


def _submit(state: State, command: Submit, _: _Turn) -> State:
    new = prompt_len(command.prompt) + command.tokens
    _need(well_formed(command.prompt) and command.tokens >= 0 and new >= 1, Reason.EMPTY)
    session = state.session(command.session)
    _need(command.session is None or session is not None, Reason.UNKNOWN_SESSION)
    _need(not _taken(state, command.request), Reason.REQUEST_EXISTS)
    if session is not None:
        _need(not session.closing, Reason.SESSION_CLOSING)
        _need(session.turn is None, Reason.TURN_IN_FLIGHT)
    _need(command.rewind <= 0, Reason.SHRINKING_PREFIX)
    _need(command.rewind == 0, Reason.BAD_LENGTH)
    history = session.history if session is not None else ()
    origin = text_len(history) + new
    _need(origin <= state.config.geometry.width, Reason.ROW_TOO_SHORT)
    serial = state.serial + 1
    state = state._replace(serial=serial).with_request(
        Request(command.request, command.session, serial, extended(history, command.prompt), origin)
    )
    return state if session is None else state.with_session(session._replace(turn=command.request))


def _admit(state: State, command: Admit, _: _Turn) -> State:
    request = _request(state, command.request)
    _need(request.phase in (Phase.QUEUED, Phase.ADMITTED), Reason.WRONG_PHASE)
    geometry = state.config.geometry
    session = state.session(request.session)
    key = request.origin + request.output - 1
    if session is None or session.slot is None:
        restored = ZERO
        if state.tree is not None:
            state, length = matched(state, request.holder, tuple(text_tokens(request.text, key)))
            restored = Cursors(length, length, 0, length)
    else:
        prefix = resume(session.slot, key, geometry.window or 0)
        restored = cut(session.slot, prefix)
        state = state.with_session(session._replace(slot=restored))
    return state.with_request(request._replace(phase=Phase.ADMITTED, cursors=restored))


def _allocate(state: State, grown: Iterable[tuple[Request, int]], turn: _Turn) -> State:
    """Room for every request of the batch to grow to the given kv_allocated_len, or a refusal."""
    geometry = state.config.geometry
    pages = rows = 0
    for request, allocated in grown:
        _need(allocated <= geometry.width, Reason.ROW_TOO_SHORT)
        assert request.cursors is not None
        old = request.cursors.kv_allocated_len
        pages += (ceil_page(allocated, geometry.page_size) - ceil_page(old, geometry.page_size)) // (
            geometry.page_size
        )
        session = state.session(request.session)
        rows += request.phase is Phase.ADMITTED and (session is None or session.slot is None)
    _need(rows <= free(state).rows, Reason.NO_ROW)
    return _room(state, pages, turn)


def _room(state: State, pages: int, turn: _Turn) -> State:
    """The state with so many pages free in each pool, or a refusal."""
    found = with_room(state, pages, turn.effects)
    if isinstance(found, Reason):
        raise _No(found)
    return found


def _batch(state: State, names: Sequence[str], *phases: Phase) -> list[Request]:
    """The requests of a batch, distinct and all in one of `phases`."""
    _need(len(set(names)) == len(names), Reason.DUPLICATE_LANE)
    requests = [_request(state, name) for name in names]
    _need(all(r.phase in phases for r in requests), Reason.WRONG_PHASE)
    return requests


def _cursors(request: Request) -> Cursors:
    assert request.cursors is not None
    return request.cursors


def _own_sweep(state: State, request: Request, choices: Choices, *, after: bool = False) -> Request:
    """A server may sweep inside an allocation, driven with the length committed before it; inside a prefill
    `after` the forward pass instead, driven with the length committed then."""
    choice = choices.get(request.name)
    cursors = _cursors(request)
    if choice is None or choice.swa_evicted_seqlen in (None, cursors.swa_evicted_seqlen):
        return request
    if choice.after is not after:
        return request
    return _swept(state, request, cursors.kv_committed_len, choice.swa_evicted_seqlen)


def _swept(state: State, request: Request, length: int, chosen: int | None) -> Request:
    """The request after a sweep with `length`; `chosen` is where the system stopped."""
    geometry = state.config.geometry
    window, page_size = geometry.window, geometry.page_size
    if window is None:
        raise ChoiceNotAllowed(f"{request.name}: swept without an SWA pool")
    before = _cursors(request)
    after = sweep(before, length, window, page_size)
    if chosen == before.swa_evicted_seqlen:
        return request._replace(swept=max(request.swept, length))  # there was nothing to do
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


def _extend(state: State, command: Extend, turn: _Turn) -> State:
    _need(command.lanes and all(lane.tokens >= 1 for lane in command.lanes), Reason.EMPTY)
    names = [lane.request for lane in command.lanes]
    requests = _batch(state, names, Phase.ADMITTED, Phase.EXTENDING)
    grown = []
    for request, lane in zip(requests, command.lanes):
        length = _cursors(request).kv_committed_len + lane.tokens
        _need(length <= request.origin + request.output, Reason.BAD_LENGTH)
        grown.append((request, length))
    grown = [(_own_sweep(state, request, turn.choices), length) for request, length in grown]
    for request, _ in grown:
        state = state.with_request(request)
    state = _allocate(state, grown, turn)
    for request, length in grown:
        cursors = _cursors(request)._replace(kv_committed_len=length, kv_allocated_len=length)
        last = length == request.origin + request.output
        request = request._replace(
            cursors=cursors,
            started=True,
            output=request.output + last,
            phase=Phase.RUNNING if last else Phase.EXTENDING,
        )
        state = state.with_request(_own_sweep(state, request, turn.choices, after=True))
    for name in names if state.tree is not None else ():
        request = _request(state, name)
        session = state.session(request.session)
        if session is None or session.slot is None:  # later turns stay outside of the tree
            state = prompt_kept(state, request, turn.effects)
    return state


def _decode(state: State, command: Decode, turn: _Turn) -> State:
    _need(command.requests, Reason.EMPTY)
    requests = _batch(state, command.requests, Phase.RUNNING)
    return _rounds(state, [(r, 1, 1) for r in requests], turn, may_allocate_ahead=False)


def _spec_decode(state: State, command: SpecDecode, turn: _Turn) -> State:
    lanes = command.lanes
    _need(lanes and all(n.allocate >= 1 and n.accept >= 1 for n in lanes), Reason.EMPTY)
    requests = _batch(state, [lane.request for lane in lanes], Phase.RUNNING)
    _need(all(lane.accept <= lane.allocate for lane in lanes), Reason.BAD_LENGTH)
    rounds = [(r, lane.allocate, lane.accept) for r, lane in zip(requests, lanes)]
    return _rounds(state, rounds, turn, may_allocate_ahead=True)


def _rounds(
    state: State,
    rounds: Sequence[tuple[Request, int, int]],
    turn: _Turn,
    *,
    may_allocate_ahead: bool,
) -> State:
    """A decode round: slots for `ahead` tokens past the commit, `accept` of them commit."""
    geometry = state.config.geometry
    grown = []
    for request, ahead, _ in rounds:
        cursors = _cursors(request)
        _need(
            geometry.window is None
            or window_live(lost_below(cursors), cursors.kv_committed_len, geometry.window),
            Reason.WINDOW_LOST,
        )
        allocated = max(cursors.kv_allocated_len, cursors.kv_committed_len + ahead)
        choice = turn.choices.get(request.name)
        chosen = None if choice is None else choice.kv_allocated_len
        if chosen is not None and chosen != allocated:
            if not may_allocate_ahead or not allocated < chosen <= geometry.width:
                raise ChoiceNotAllowed(
                    f"{request.name}: kv_allocated_len {chosen} where {allocated} was needed"
                )
            allocated = chosen
        grown.append((request, allocated))
    grown = [(_own_sweep(state, request, turn.choices), allocated) for request, allocated in grown]
    for request, _ in grown:
        state = state.with_request(request)
    state = _allocate(state, grown, turn)
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


def _evict_swa(state: State, command: EvictSwa, turn: _Turn) -> State:
    request = _request(state, command.request)
    _need(request.phase in (Phase.EXTENDING, Phase.RUNNING), Reason.WRONG_PHASE)
    _need(state.config.geometry.window is not None, Reason.NO_SWA)
    cursors = _cursors(request)
    _need(0 <= command.length <= cursors.kv_allocated_len, Reason.BAD_LENGTH)
    faithful = state.config.mode is Mode.FAITHFUL
    _need(not faithful or command.length <= cursors.kv_committed_len, Reason.UNFAITHFUL)
    choice = turn.choices.get(request.name)
    chosen = None if choice is None else choice.swa_evicted_seqlen
    return state.with_request(_swept(state, request, command.length, chosen))


def _release(state: State, session: Session) -> State:
    """A turn has ended: its closing session goes with everything it has."""
    if session.closing:
        return unlocked(state.without_session(session.name), session.name)
    return state.with_session(session)


def _finish(state: State, command: Finish, turn: _Turn) -> State:
    request = _request(state, command.request)
    _need(request.phase is Phase.RUNNING, Reason.WRONG_PHASE)
    _need(1 <= command.finished_len <= request.output, Reason.BAD_LENGTH)
    target = request.origin + command.finished_len
    faithful = target >= request.swept and command.finished_len > request.known[0]
    _need(faithful or state.config.mode is Mode.FREE, Reason.UNFAITHFUL)
    state = state.without_request(request.name)
    session = state.session(request.session)
    if session is None:
        if state.tree is not None:
            length = min(_cursors(request).kv_committed_len, target)
            state = text_left(state, request, length, turn.effects)
        return state
    return _release(
        state,
        session._replace(
            history=text_cut(request.text, target), slot=cut(_cursors(request), target), turn=None
        ),
    )


def _retract(state: State, command: Retract, _: _Turn) -> State:
    request = _request(state, command.request)
    _need(request.phase is Phase.RUNNING, Reason.WRONG_PHASE)
    output = request.output - command.in_flight
    _need(command.in_flight in (0, 1) and output >= 1, Reason.BAD_LENGTH)
    target = request.origin + output
    _need(state.config.mode is Mode.FREE or target - 1 >= request.swept, Reason.UNFAITHFUL)
    session = state.session(request.session)
    if session is not None:
        state = state.with_session(session._replace(slot=cut(_cursors(request), target)))
    else:
        state = unlocked(state, request.name)
    return state.with_request(
        request._replace(phase=Phase.QUEUED, output=output, known=(output, output), cursors=None)
    )


def _abort(state: State, command: Abort, turn: _Turn) -> State:
    request = _request(state, command.request)
    if command.marked:
        _need(request.phase is Phase.QUEUED and not request.started, Reason.WRONG_PHASE)
        _need(free(state).rows >= 1, Reason.NO_ROW)
        state = _room(state, 1, turn)
    state = state.without_request(request.name)
    session = state.session(request.session)
    if session is None or session.slot is None or request.started:
        state = unlocked(state, request.holder)
    if session is None:
        return state
    slot = None if request.started else session.slot
    return _release(state, session._replace(slot=slot, turn=None))


def _close(state: State, command: Close, _: _Turn) -> State:
    session = state.session(command.session)
    if session is None:
        raise _No(Reason.UNKNOWN_SESSION)
    _need(not session.closing, Reason.SESSION_CLOSING)
    if session.turn is not None:
        return state.with_session(session._replace(closing=True))
    return unlocked(state.without_session(session.name), session.name)


# The memory checks look and change nothing (CHK-3).


def _check_busy(state: State, command: CheckBusy, turn: _Turn) -> State:
    _need(command.level in (0, 1, 2), Reason.BAD_LENGTH)
    turn.done = Done(report=report(state) if command.level else None)
    return state


def _check_idle(state: State, _: CheckIdle, turn: _Turn) -> State:
    _need(not any(r.phase in IN_BATCH for r in state.requests), Reason.NOT_IDLE)
    turn.done = Done(report=report(state))
    return state


# The radix tree by itself.


def _match(state: State, command: Match, _: _Turn) -> State:
    _need(command.prompt and well_formed(command.prompt), Reason.EMPTY)
    _need(not _taken(state, command.holder), Reason.REQUEST_EXISTS)
    _need(state.tree is not None, Reason.NO_TREE)
    _need(prompt_len(command.prompt) <= state.config.geometry.width, Reason.ROW_TOO_SHORT)
    return matched(state, command.holder, key_of(command.prompt))[0]


def _unlock(state: State, command: Unlock, _: _Turn) -> State:
    _need(command.holder in lock_holders(state), Reason.UNKNOWN_REQUEST)
    return unlocked(state, command.holder)


def _insert(state: State, command: Insert, turn: _Turn) -> State:
    _need(command.prompt and well_formed(command.prompt), Reason.EMPTY)
    locked = lock_holders(state).get(command.holder)
    _need(locked is not None or not _taken(state, command.holder), Reason.REQUEST_EXISTS)
    key, geometry = key_of(command.prompt), state.config.geometry
    length, prefix = len(key), len(locked or ())
    _need(key[:prefix] == (locked or ()), Reason.SHRINKING_PREFIX)
    _need(command.evicted == 0 or geometry.window is not None, Reason.NO_SWA)
    _need(state.tree is not None, Reason.NO_TREE)
    _need(0 <= command.evicted <= length, Reason.BAD_LENGTH)
    if state.config.mode is Mode.FAITHFUL and geometry.window is not None:
        reach = sweep_limit(length, geometry.window, geometry.page_size)
        _need(command.evicted <= max(prefix, reach), Reason.UNFAITHFUL)
    _need(length <= geometry.width, Reason.ROW_TOO_SHORT)
    pages = (floor_page(length, geometry.page_size) - prefix) // geometry.page_size
    state = _room(state, pages, turn)
    return inserted(state, command.holder, key, prefix, command.evicted, command.chunked, turn.effects)


def _evict(state: State, command: Evict, turn: _Turn) -> State:
    _need(command.full or command.swa, Reason.EMPTY)
    _need(command.swa == 0 or state.config.geometry.window is not None, Reason.NO_SWA)
    _need(state.tree is not None, Reason.NO_TREE)
    _need(command.full >= 0 and command.swa >= 0, Reason.BAD_LENGTH)
    state, freed = evicted(state, command.full, command.swa, turn.effects)
    turn.done = Done(freed=Freed(*freed))
    return state


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
    CheckBusy: _check_busy,
    CheckIdle: _check_idle,
    Match: _match,
    Unlock: _unlock,
    Insert: _insert,
    Evict: _evict,
}
