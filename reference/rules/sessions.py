"""Sessions: opened, given turns, closed.

A session's `turn` is its mark that a turn is in flight. `submit` sets it and `end_turn`, here, is the one
place that clears it; TURNS says who gets there.
"""

from __future__ import annotations

from reference.commands import Abort, Close, Finish, Open, Reason, Retract, Submit, prompt_len
from reference.state import Request, Session, State, text_len
from reference.prefix_cache import extend_text, is_text, unlock_holder, well_formed
from reference.rules.rule_definition import (
    NAME_TAKEN,
    Case,
    Refusal,
    RuleContext,
    is_taken,
    require,
    row_goes,
    rule,
)
from reference.token_ids import text_serial

# Who may end a turn, and who clears its mark: command -> does it end the turn, what becomes of the mark, and
# what the session keeps. Tests compare it with every transition of small scopes.
TURNS: dict[type, tuple[bool, str, str]] = {
    Submit: (False, "set: a second turn is refused until it is cleared", "what it kept"),
    Finish: (True, "cleared", "the text and the KV up to target"),
    Abort: (True, "cleared, in whatever phase the turn is",
            "the text of the turns before; its slot only if the turn has written nothing"),
    Retract: (False, "stays: the turn waits for another admission",
              "the KV of the turn, trimmed as by finish"),
    Close: (False, "stays: the session goes when its turn ends", "everything, until then"),
}  # fmt: skip


def end_turn(state: State, session: Session) -> State:
    """End the session's turn; `session` says what it keeps. A session that a close waits for is
    removed, with everything it has."""
    if session.closing:
        return unlock_holder(state.without_session(session.name), session.name)
    return state.with_session(session._replace(turn=None))


@rule(Open, "It keeps nothing yet: no row, no slot.", {Reason.SESSION_EXISTS: NAME_TAKEN})
def open_session(state: State, command: Open, _: RuleContext) -> State:
    require(not is_taken(state, command.session), Reason.SESSION_EXISTS)
    return state.with_session(Session(command.session))


@rule(
    Submit,
    "The request is its session's turn; origin is the length of its input. It holds no KV.",
    {
        Reason.EMPTY: "less than one new token, or an ill-formed prompt",
        Reason.UNKNOWN_SESSION: "the session is not open",
        Reason.REQUEST_EXISTS: NAME_TAKEN,
        Reason.SESSION_CLOSING: "the session was closed while a turn was in flight",
        Reason.TURN_IN_FLIGHT: "the turn before has not ended",
        Reason.SHRINKING_PREFIX: "rewind > 0: the client takes back history",
        Reason.BAD_LENGTH: "rewind < 0",
        Reason.ROW_TOO_SHORT: "origin > width",
    },
)
def submit(state: State, command: Submit, _: RuleContext) -> State:
    """Queue a request whose text is its session's history and its prompt."""
    new = prompt_len(command.prompt) + command.tokens
    require(well_formed(command.prompt) and command.tokens >= 0 and new >= 1, Reason.EMPTY)
    require(not command.answers or is_text(command.answers), Reason.EMPTY)
    session = state.session(command.session)
    require(command.session is None or session is not None, Reason.UNKNOWN_SESSION)
    require(not is_taken(state, command.request), Reason.REQUEST_EXISTS)
    if session is not None:
        require(not session.closing, Reason.SESSION_CLOSING)
        require(session.turn is None, Reason.TURN_IN_FLIGHT)
    require(command.rewind <= 0, Reason.SHRINKING_PREFIX)
    require(command.rewind == 0, Reason.BAD_LENGTH)
    history = session.history if session is not None else ()
    origin = text_len(history) + new
    require(origin <= state.config.geometry.width, Reason.ROW_TOO_SHORT)
    counted = state.serial + 1
    serial = text_serial(command.answers, counted)
    text = extend_text(history, command.prompt)
    state = state._replace(serial=counted).with_request(
        Request(command.request, command.session, serial, text, origin)
    )
    return state if session is None else state.with_session(session._replace(turn=command.request))


@rule(
    Close,
    "All that the session keeps is given back, once.",
    {
        Reason.UNKNOWN_SESSION: "the session is not open",
        Reason.SESSION_CLOSING: "it has been closed already",
    },
    cases=(
        Case("a turn is in flight: deferred until it ends", "turn"),
        row_goes("no turn is in flight", "not turn"),
    ),
    tree="The session's lock is released, once.",
    states="So is its slot of recurrent state.",
)
def close(state: State, command: Close, _: RuleContext) -> State:
    session = state.session(command.session)
    if session is None:
        raise Refusal(Reason.UNKNOWN_SESSION)
    require(not session.closing, Reason.SESSION_CLOSING)
    session = session._replace(closing=True)
    return end_turn(state, session) if session.turn is None else state.with_session(session)
