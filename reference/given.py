"""What is told of a server from outside, where no command says it: state changes that a watched log dictates.

Commands are symbolic and begin with the empty state. A log of a real server may begin in the middle, and
shows steps that are half done: slots taken ahead of a round whose result is still to come, an admission whose
prefix a tree of unknown content gave. No tree is kept here. Nothing judges; that is up to whoever calls.
"""

from __future__ import annotations

from reference.cursors import cut
from reference.ledger import Cursors, Phase, Request, State, Text, text_cut
from reference.rules.sessions import end_turn


def with_cursors(state: State, name: str, cursors: Cursors) -> State:
    """A request's cursors as the server has them."""
    request = state.request(name)
    assert request is not None
    return state.with_request(request._replace(cursors=cursors))


def with_slot(state: State, session: str, cursors: Cursors | None) -> State:
    """A session's slot as the server has it."""
    found = state.session(session)
    assert found is not None
    return state.with_session(found._replace(slot=cursors))


def finished_without_output(state: State, name: str) -> State:
    """A turn that may have no output ends after its prefill; the token that it sampled is nobody's."""
    request = state.request(name)
    assert request is not None and request.cursors is not None
    state, session = state.without_request(name), state.session(request.session)
    if session is None:
        return state
    history, slot = text_cut(request.text, request.origin), cut(request.cursors, request.origin)
    return end_turn(state, session._replace(history=history, slot=slot))


def with_history(state: State, session: str, history: Text) -> State:
    """A session's text as the server has it."""
    found = state.session(session)
    return state if found is None else state.with_session(found._replace(history=history))


def request_of(
    name: str,
    session: str | None,
    serial: int,
    tokens: int,
    outputs: int,
    cursors: Cursors | None,
    retracted: bool,
) -> Request:
    """A request as a snapshot of a running server tells it. It runs once its whole input has KV; its newest
    output has none yet."""
    if cursors is None:
        return Request(name, session, serial, (), tokens, outputs, Phase.QUEUED, retracted)
    computed = cursors.kv_committed_len
    whole = tokens if not retracted else max(tokens, tokens + outputs)
    if computed < whole - (outputs > 0 and not retracted):
        return Request(name, session, serial, (), tokens, outputs, Phase.EXTENDING, True, 0, (0, 0), cursors)
    outputs = max(outputs, computed - tokens + 1)
    return Request(name, session, serial, (), tokens, outputs, Phase.RUNNING, True, 0, (0, 0), cursors)
