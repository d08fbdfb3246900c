"""Admit: a waiting request gets the KV that is there already."""

from __future__ import annotations

from reference.commands import Admit, Reason
from reference.cursors import cut, resume
from reference.state import ZERO, Cursors, Phase, State, text_tokens
from reference.prefix_cache import match_and_lock
from reference.rules.rule_definition import (
    NO_REQUEST,
    Case,
    RuleContext,
    known_request,
    make_room,
    require,
    rule,
)
from reference.token_ids import tree_key


@rule(
    Admit,
    "Request and slot both get the cursors below. The slot still names the row while it is lent, "
    "so that a rejected admission can be repeated. No row is taken or written.",
    {
        Reason.UNKNOWN_REQUEST: NO_REQUEST,
        Reason.WRONG_PHASE: "it extends or runs already",
        Reason.OUT_OF_STATES: "a prefix was matched, and no slot of recurrent state is free or evictable",
    },
    where=(
        ("key", "origin + output - 1"),
        ("q", "min(C, key)"),
        ("p", "q if live(q) else R"),
    ),
    cases=(
        Case("its session has no slot, or it has no session", "not slot",
             {"C": "0", "A": "0", "E": "0", "R": "0"}),
        Case("its session has a slot", "slot", {"C": "p", "A": "p", "E": "min(E, p)"},
             ("ceil(p)", "ceil(A)"), ("ceil(max(p, E))", "ceil(A)")),
    ),
    tree=(
        "A request without a slot locks the longest usable prefix of its key, under the "
        "session's name or its own: C = A = R = its length, E = 0. A repeated admission replaces "
        "the lock."
    ),
    states=(
        "L ends with a node that has a state, and the request continues from a copy in a slot of its own; one"
        " that matches nothing takes none yet. A turn whose session has a slot continues from the state in"
        " it, if that is the one after p; else from R, with a copy of the state that the tree has there."
    ),
)  # fmt: skip
def admit(state: State, command: Admit, context: RuleContext) -> State:
    """Restore the cursors of a queued request from its session's slot, or from the prefix that the tree
    has."""
    request = known_request(state, command.request)
    require(request.phase in (Phase.QUEUED, Phase.ADMITTED), Reason.WRONG_PHASE)
    session = state.session(request.session)
    key = request.origin + request.output - 1
    if session is None or session.slot is None:
        restored = ZERO
        if state.tree is not None:
            known = tree_key(text_tokens(request.text, key), state.config.geometry.bigram)
            state, length = match_and_lock(state, request.holder, known)
            restored = Cursors(length, length, 0, length)
            if length:  # the slot of an admission before this one is given back first
                state = make_room(
                    state.with_request(request._replace(cursors=None)), 0, context, states=1
                )
    else:
        prefix = resume(session.slot, key, state.config.geometry.window or 0)
        states = bool(state.config.geometry.states)
        if states and prefix != session.state:
            prefix = session.slot.cache_protected_len
        restored = cut(session.slot, prefix)
        state = state.with_session(session._replace(slot=restored, state=prefix if states else 0))
    return state.with_request(request._replace(phase=Phase.ADMITTED, cursors=restored))
