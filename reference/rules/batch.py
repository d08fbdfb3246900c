"""Shared parts of the rules of a batch (extend, decode, spec_decode): its entries, and their pages."""

from __future__ import annotations

from collections.abc import Container, Sequence

from reference.commands import Reason
from reference.cursors import lost_below, window_live
from reference.state import Phase, Request, State, free
from reference.rules.rule_definition import RuleContext, cursors_of, known_request, make_room, require
from reference.rules.evict_swa import own_eviction, tail_alone

LANES = {
    Reason.EMPTY: "no batch entries, or a batch entry with less than one token",
    Reason.DUPLICATE_LANE: "a request is named twice",
    Reason.UNKNOWN_REQUEST: "a batch entry's request is not there",
}
POOLS = {
    Reason.OUT_OF_FULL: "the pages that the batch opens are not free or evictable",
    Reason.OUT_OF_SWA: "no room for its SWA pages",
}

# requests of a batch, each with the kv_allocated_len that it grows to
Grown = list[tuple[Request, int]]


def batch_of(state: State, names: Sequence[str], *phases: Phase, late: int = 0) -> list[Request]:
    """Return the requests of a batch. Refuses them unless they are distinct, in one of these phases, and each
    with at most `late` results in flight."""
    require(len(set(names)) == len(names), Reason.DUPLICATE_LANE)
    requests = [known_request(state, name) for name in names]
    require(
        all(r.phase in phases and len(r.in_flight) <= late for r in requests), Reason.WRONG_PHASE
    )
    return requests


def require_window(state: State, request: Request) -> None:
    """Refuse to compute the next token of a request where window eviction has freed SWA KV that it reads."""
    if (window := state.config.geometry.window) is not None:
        lost = lost_below(cursors_of(request))
        require(window_live(lost, request.settled_len, window), Reason.WINDOW_LOST)


def allocate(
    state: State,
    grown: Grown,
    context: RuleContext,
    tails: Container[str] = (),
    checkpoints: int = 0,
) -> tuple[State, Grown]:
    """Make room for every request to grow, after window evictions that the server may do before; or
    refuse.

    tails: requests that take SWA slots only for the last window, as if everything before had been
        evicted.
    checkpoints: states that the batch hands to the tree.
    """
    geometry = state.config.geometry
    size = geometry.page_size
    evicted = [
        (
            tail_alone(state, r, end, context)
            if r.name in tails
            else own_eviction(state, r, context),
            end,
        )
        for r, end in grown
    ]
    pages = 0
    swa = 0
    rows = 0
    states = checkpoints
    for (request, allocated), (before, _) in zip(evicted, grown):
        if request is not before:
            state = state.with_request(request)
        require(allocated <= geometry.width, Reason.ROW_TOO_SHORT)
        _, had, evicted_to, _ = cursors_of(request)
        begin = -(-had // size)
        end = -(-allocated // size)
        pages += end - begin
        swa += end - max(begin, evicted_to // size)  # a tail may begin behind all that was there
        session = state.session(request.session)
        fresh = request.phase is Phase.ADMITTED and (session is None or session.slot is None)
        if fresh:
            rows += 1
            if not had:
                states += 1
    require(not rows or rows <= free(state).rows, Reason.NO_ROW)
    return make_room(state, pages, context, swa, states), evicted
