"""Retract: a running request gives up its place and waits for another admission."""

from __future__ import annotations

from reference.commands import Mode, Reason, Retract
from reference.state import Phase, State, state_of
from reference.prefix_cache import unlock_holder
from reference.rules.rule_definition import (
    NO_REQUEST, NOT_RUNNING, RuleContext, known_request, require, row_goes, row_is_cut, rule,
)  # fmt: skip
from reference.rules.finish import cut_of_turn


@rule(
    Retract,
    "The request is queued again with its remaining outputs, and has no cursors until it is "
    "admitted. A session slot keeps the KV, cut as by finish: kv_allocated_len is min(A, "
    "target). An ordinary request keeps none. Results in flight are dropped.",
    {
        Reason.UNKNOWN_REQUEST: NO_REQUEST,
        Reason.WRONG_PHASE: NOT_RUNNING,
        Reason.BAD_LENGTH: "in_flight is not 0 or 1; it is 1 and results are in flight: those are lost, and"
        " no other; no output is left, and a tree has taken the prompt over with it",
        Reason.UNFAITHFUL: "target - 1 is below a length that window eviction of the turn used, or that"
        " released the SWA part of its lock",
    },
    where=(("target", "origin + output - in_flight"),),
    cases=(row_is_cut("a turn", "session"), row_goes("an ordinary request", "not session")),
    choice="As for finish.",
    tree="An ordinary request inserts nothing and releases its lock; a session keeps its lock.",
    states="An ordinary request gives its slot back; a session's slot keeps the state as it is.",
)
def retract(state: State, command: Retract, context: RuleContext) -> State:
    """Take a running request out of its batch and queue it again; its session's slot is cut as at the end of
    a turn."""
    request = known_request(state, command.request)
    require(request.phase is Phase.RUNNING, Reason.WRONG_PHASE)
    output = request.output - command.in_flight
    may_lose = 0 if request.in_flight else 1
    require(0 <= command.in_flight <= may_lose, Reason.BAD_LENGTH)
    require(output or state.tree is None, Reason.BAD_LENGTH)
    target = request.origin + output
    require(state.config.mode is Mode.FREE or target - 1 >= request.evicted, Reason.UNFAITHFUL)
    session = state.session(request.session)
    if session is not None:
        slot = cut_of_turn(state, request, target, context)
        state = state.with_session(session._replace(slot=slot, state=state_of(state, request)))
    else:
        state = unlock_holder(state, request.name)
    return state.with_request(
        request._replace(
            phase=Phase.QUEUED,
            output=output,
            processed_outputs=(output, output),
            cursors=None,
            in_flight=(),
        )
    )
