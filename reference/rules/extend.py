"""Extend: a batch of chunks is prefilled."""

from __future__ import annotations

from reference.commands import Extend, Reason
from reference.handover import insert_prompt
from reference.ledger import Phase, State
from reference.rules.base import Case, RuleContext, cursors_of, known_request, require, rule
from reference.rules.batch import LANES, POOLS, Grown, allocate, batch_of
from reference.rules.evict_swa import own_sweep


@rule(
    Extend,
    "The tokens are computed and written. A request that has no row takes one. The output that a complete"
    " input samples has no KV yet, and the request runs.",
    {
        **LANES,
        Reason.WRONG_PHASE: "a lane's request was not admitted, or runs already",
        Reason.BAD_LENGTH: "C + tokens > origin + output: more than the input has",
        Reason.ROW_TOO_SHORT: "C + tokens > width",
        Reason.NO_ROW: "fewer rows are free than the batch takes",
        **POOLS,
    },
    cases=(Case("each lane", after={"C": "C + tokens", "A": "C + tokens"}),),
    choice="A server may sweep here, before the allocation with the length committed then, or after the"
    " forward pass with the length committed by it.",
    tree="Missing pages are evicted first, if all of them can be had. A request without a slot then inserts"
    " the whole pages of its input that are computed, if it can match all of them again, and moves its lock"
    " to their end: R = floor(C'). What is freed for that: the table of insert.",
)
def extend(state: State, command: Extend, context: RuleContext) -> State:
    require(command.lanes and all(lane.tokens >= 1 for lane in command.lanes), Reason.EMPTY)
    requests = batch_of(state, [lane.request for lane in command.lanes], Phase.ADMITTED, Phase.EXTENDING)
    grown: Grown = []
    for request, lane in zip(requests, command.lanes):
        length = cursors_of(request).kv_committed_len + lane.tokens
        require(length <= request.origin + request.output, Reason.BAD_LENGTH)
        grown.append((request, length))
    state, grown = allocate(state, grown, context)
    for request, length in grown:
        last = length == request.origin + request.output
        request = request._replace(
            cursors=cursors_of(request)._replace(kv_committed_len=length, kv_allocated_len=length),
            started=True,
            output=request.output + last,
            phase=Phase.RUNNING if last else Phase.EXTENDING,
        )
        state = state.with_request(own_sweep(state, request, context, after=True))
    for lane in command.lanes if state.tree is not None else ():
        request = known_request(state, lane.request)
        session = state.session(request.session)
        if session is None or session.slot is None:  # later turns stay outside of the tree
            state = insert_prompt(state, request, context.effects)
    return state
