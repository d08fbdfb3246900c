"""Abort: a request is given up."""

from __future__ import annotations

from reference.commands import Abort, Reason
from reference.state import Phase, State, free
from reference.prefix_cache import unlock_holder
from reference.rules.rule_definition import (
    NO_REQUEST, Case, RuleContext, known_request, make_room, require, row_goes, rule,
)  # fmt: skip
from reference.rules.sessions import end_turn


@rule(
    Abort,
    "The request is removed and leaves no trace in the history. If the turn has written KV (also "
    "one that waits after a retract), its session's KV is freed, once, and the next turn "
    "prefills from scratch. Otherwise the slot stays as it is.",
    {
        Reason.UNKNOWN_REQUEST: NO_REQUEST,
        Reason.WRONG_PHASE: "marked, and it has been admitted before",
        Reason.NO_ROW: "marked, and no row is free for its one-token prefill",
        Reason.OUT_OF_FULL: "marked, and no page is free or evictable",
        Reason.OUT_OF_SWA: "marked, and no SWA page is free or evictable",
        Reason.OUT_OF_STATES: "marked, and no slot of recurrent state is free or evictable",
    },
    cases=(
        Case("nothing was written, and no close waits for it", "not started and not closing"),
        row_goes("midway", "started"),
        row_goes(
            "nothing was written, and a close has waited for it: the session goes",
            "not started and closing",
        ),
    ),
    tree="The lock of a wiped session, or that an admission without a slot has taken, is released.",
    states="The request's slot of recurrent state is given back, and a wiped session's.",
)
def abort(state: State, command: Abort, context: RuleContext) -> State:
    request = known_request(state, command.request)
    if command.marked:
        require(request.phase is Phase.QUEUED and not request.started, Reason.WRONG_PHASE)
        require(free(state).rows >= 1, Reason.NO_ROW)
        state = make_room(state, 1, context, states=1)
    state = state.without_request(request.name)
    session = state.session(request.session)
    if session is None or session.slot is None or request.started:
        state = unlock_holder(state, request.holder)
    if session is None:
        return state
    return end_turn(state, session._replace(slot=None) if request.started else session)
