"""Decode and spec_decode: a round of one token, or of several drafted ones."""

from __future__ import annotations

from collections.abc import Sequence

from reference.commands import Decode, Reason, SpecDecode
from reference.ledger import Cursors, Phase, Request, State
from reference.rules.base import NOT_RUNNING, Case, ChoiceNotAllowed, RuleContext, cursors_of, require, rule
from reference.rules.batch import LANES, POOLS, Grown, allocate, batch_of, require_window

_EVICTS_FIRST = "Missing pages are evicted first."


@rule(
    Decode,
    "KV of the newest token is written at C, and one output is sampled.",
    {
        **LANES,
        Reason.EMPTY: "no requests",
        Reason.WRONG_PHASE: NOT_RUNNING,
        Reason.WINDOW_LOST: "not live(C): a sweep has freed SWA KV that the next token reads",
        Reason.ROW_TOO_SHORT: "A' > width",
        **POOLS,
    },
    cases=(Case("each request", after={"C": "C + 1", "A": "max(A, C + 1)"}),),
    choice="A server may sweep here, with the length committed before.",
    tree=_EVICTS_FIRST,
)
def decode(state: State, command: Decode, context: RuleContext) -> State:
    require(command.requests, Reason.EMPTY)
    requests = batch_of(state, command.requests, Phase.RUNNING)
    return _round(state, [(r, 1, 1) for r in requests], context, may_allocate_ahead=False)


@rule(
    SpecDecode,
    "What commits counts as output. Between C and A there are slots without tokens: the next round writes"
    " them again.",
    {
        **LANES,
        Reason.WRONG_PHASE: NOT_RUNNING,
        Reason.BAD_LENGTH: "accept > allocate",
        Reason.WINDOW_LOST: "not live(C)",
        Reason.ROW_TOO_SHORT: "A' > width",
        **POOLS,
    },
    cases=(Case("each lane", after={"C": "C + accept", "A": "max(A, C + allocate)"}),),
    choice="A server may allocate further ahead, up to the row's width, and sweep as in decode.",
    tree=_EVICTS_FIRST,
)
def spec_decode(state: State, command: SpecDecode, context: RuleContext) -> State:
    lanes = command.lanes
    require(lanes and all(n.allocate >= 1 and n.accept >= 1 for n in lanes), Reason.EMPTY)
    requests = batch_of(state, [lane.request for lane in lanes], Phase.RUNNING)
    require(all(lane.accept <= lane.allocate for lane in lanes), Reason.BAD_LENGTH)
    lengths = [(r, lane.allocate, lane.accept) for r, lane in zip(requests, lanes)]
    return _round(state, lengths, context, may_allocate_ahead=True)


def _round(
    state: State, lanes: Sequence[tuple[Request, int, int]], context: RuleContext, *, may_allocate_ahead: bool
) -> State:
    """Slots for so many tokens past the commit of each request, of which so many commit."""
    geometry = state.config.geometry
    grown: Grown = []
    for request, ahead, _ in lanes:
        cursors = cursors_of(request)
        require_window(state, request)
        allocated = max(cursors.kv_allocated_len, cursors.kv_committed_len + ahead)
        choice = context.choices.get(request.name)
        chosen = None if choice is None else choice.kv_allocated_len
        if chosen is not None and chosen != allocated:
            if not may_allocate_ahead or not allocated < chosen <= geometry.width:
                raise ChoiceNotAllowed(
                    f"{request.name}: kv_allocated_len {chosen} where {allocated} was needed"
                )
            allocated = chosen
        grown.append((request, allocated))
    state, grown = allocate(state, grown, context)
    moved = {}
    for (request, allocated), (_, _, accept) in zip(grown, lanes):
        committed, _, swept, protected = cursors_of(request)
        moved[request.name] = request._replace(
            cursors=Cursors(committed + accept, allocated, swept, protected),
            output=request.output + accept,
            known=(request.known[1], request.output),
        )
    return state.with_those(moved)
