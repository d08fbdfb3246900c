"""Decode and spec_decode: a round of one token, or of several drafted ones.

Launch and settle: the latter with a result that arrives later."""

from __future__ import annotations

from collections.abc import Sequence

from reference.commands import Decode, Draft, Launch, Reason, Settle, SpecDecode
from reference.state import Cursors, Phase, Request, Round, State
from reference.rules.rule_definition import (
    NO_REQUEST, NOT_RUNNING, Case, ChoiceNotAllowed, RuleContext, cursors_of, known_request, require, rule,
)  # fmt: skip
from reference.rules.batch import LANES, POOLS, Grown, allocate, batch_of, require_window

_EVICTS_FIRST = "Missing pages are evicted first."
_NO_RESULTS = f"{NOT_RUNNING}, or a result is in flight"
MOST_LATE = 2  # a round is launched before the result of the one before is processed


@rule(
    Decode,
    "KV of the newest token is written at C, and one output is sampled.",
    {
        **LANES,
        Reason.EMPTY: "no requests",
        Reason.WRONG_PHASE: _NO_RESULTS,
        Reason.WINDOW_LOST: "not live(C): window eviction has freed SWA KV that the next token reads",
        Reason.ROW_TOO_SHORT: "the new A > width",
        **POOLS,
    },
    cases=(Case("each request", after={"C": "C + 1", "A": "max(A, C + 1)"}),),
    choice="A server may evict a window here, with the length committed before.",
    tree=_EVICTS_FIRST,
)
def decode(state: State, command: Decode, context: RuleContext) -> State:
    require(command.requests, Reason.EMPTY)
    requests = batch_of(state, command.requests, Phase.RUNNING)
    return _allocate_round(state, [Draft(r.name, 1, 1) for r in requests], requests, context, ahead=False)


_OF_A_VERIFY_ROUND = {
    **LANES,
    Reason.WRONG_PHASE: _NO_RESULTS,
    Reason.BAD_LENGTH: "accept > allocate",
    Reason.WINDOW_LOST: "not live(C)",
    Reason.ROW_TOO_SHORT: "the new A > width",
    **POOLS,
}


@rule(
    SpecDecode,
    "What commits counts as output. Between C and A there are slots without tokens: the next round writes"
    " them again.",
    _OF_A_VERIFY_ROUND,
    cases=(Case("each batch entry", after={"C": "C + accept", "A": "max(A, C + allocate)"}),),
    choice="A server may allocate further ahead, up to the row's width, and evict a window as in decode.",
    tree=_EVICTS_FIRST,
)
def spec_decode(state: State, command: SpecDecode, context: RuleContext) -> State:
    return _allocate_round(state, command.lanes, _requests_to_verify(state, command), context)


@rule(
    Launch,
    "The device computes the tokens and continues behind the accepted ones. All drafted tokens "
    "count as committed, none as output; the result takes back the rejected ones.",
    _OF_A_VERIFY_ROUND
    | {
        Reason.WRONG_PHASE: f"{NOT_RUNNING}, or two results are in flight",
        Reason.WINDOW_LOST: "not live(S), with S = C without what rounds in flight claim of it",
    },
    cases=(Case("each batch entry", after={"C": "C + allocate", "A": "max(A, C + allocate)"}),),
    choice=(
        "A server may count less as committed: C' from C to C + allocate. It allocates for "
        "everything that rounds in flight may accept, or further, up to the row's width. It may "
        "evict as in decode, with S."
    ),
    tree=_EVICTS_FIRST,
)
def launch(state: State, command: Launch, context: RuleContext) -> State:
    return _allocate_round(
        state, command.lanes, _requests_to_verify(state, command, MOST_LATE - 1), context, late=True
    )


@rule(
    Settle,
    "The tokens of the oldest round that were accepted count as output. With `accepted` for their number and"
    " `claimed` for what C has counted of the round:",
    {
        Reason.UNKNOWN_REQUEST: NO_REQUEST,
        Reason.WRONG_PHASE: "no result of it is in flight",
    },
    cases=(Case("always", after={"C": "C - claimed + accepted"}),),
)
def settle(state: State, command: Settle, _: RuleContext) -> State:
    request = known_request(state, command.request)
    require(request.in_flight, Reason.WRONG_PHASE)
    oldest, *others = request.in_flight
    cursors = cursors_of(request)
    committed = cursors.kv_committed_len - oldest.claimed + oldest.accept
    return state.with_request(
        request._replace(
            cursors=cursors._replace(kv_committed_len=committed),
            output=request.output + oldest.accept,
            in_flight=(*others,),
        )
    )


def _requests_to_verify(state: State, command: SpecDecode | Launch, late: int = 0) -> list[Request]:
    """Return the requests of a verify round, each with at most `late` results in flight."""
    lanes = command.lanes
    require(lanes and all(n.allocate >= 1 and n.accept >= 1 for n in lanes), Reason.EMPTY)
    requests = batch_of(state, [lane.request for lane in lanes], Phase.RUNNING, late=late)
    require(all(lane.accept <= lane.allocate for lane in lanes), Reason.BAD_LENGTH)
    return requests


def _allocate_round(
    state: State,
    lanes: Sequence[Draft],
    requests: Sequence[Request],
    context: RuleContext,
    *,
    ahead: bool = True,
    late: bool = False,
) -> State:
    """Allocate slots for what each batch entry may accept, past what earlier rounds may.

    ahead: a server may allocate more.
    late: the result is in flight.
    """
    geometry = state.config.geometry
    grown: Grown = []
    for request, lane in zip(requests, lanes):
        require_window(state, request)
        earlier = sum(r.allocate for r in request.in_flight) if request.in_flight else 0
        most = request.settled_len + earlier + lane.allocate
        allocated = max(cursors_of(request).kv_allocated_len, most)
        choice = context.choices.get(request.name)
        chosen = None if choice is None else choice.kv_allocated_len
        if chosen is not None and chosen != allocated:
            if not ahead or not allocated < chosen <= geometry.width:
                raise ChoiceNotAllowed(
                    f"{request.name}: kv_allocated_len {chosen} where {allocated} was needed"
                )
            allocated = chosen
        grown.append((request, allocated))
    state, grown = allocate(state, grown, context)
    moved = {}
    for (request, allocated), lane in zip(grown, lanes):
        committed, _, evicted, protected = cursors_of(request)
        output = request.output
        in_flight = request.in_flight
        gain = lane.accept
        if late:
            gain = _claimed_tokens(request, lane.allocate, context)
            in_flight = (*in_flight, Round(lane.allocate, lane.accept, gain))
        else:
            output += gain
        moved[request.name] = request._replace(
            cursors=Cursors(committed + gain, allocated, evicted, protected),
            output=output,
            processed_outputs=(request.processed_outputs[1], request.output),
            in_flight=in_flight,
        )
    return state.with_those(moved)


def _claimed_tokens(request: Request, allocate: int, context: RuleContext) -> int:
    """Return the part of a round in flight that counts as committed: all it allocates, or the system's
    choice."""
    choice = context.choices.get(request.name)
    before = cursors_of(request).kv_committed_len
    if choice is None or choice.kv_committed_len is None:
        return allocate
    if not before <= choice.kv_committed_len <= before + allocate:
        raise ChoiceNotAllowed(
            f"{request.name}: kv_committed_len {choice.kv_committed_len} after a launch at {before} that"
            f" allocates {allocate}"
        )
    return choice.kv_committed_len - before
