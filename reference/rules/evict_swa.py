"""Window eviction: SWA KV that no later token reads is given back."""

from __future__ import annotations

from reference.commands import EvictSwa, Mode, Reason
from reference.cursors import evict_window, eviction_limit
from reference.state import IN_BATCH, Request, State
from reference.rules.rule_definition import (
    NO_REQUEST, Case, ChoiceNotAllowed, RuleContext, cursors_of, known_request, require, rule,
)  # fmt: skip


@rule(
    EvictSwa,
    "L is that length: SWA KV that no token at L or later reads is freed. Full KV stays.",
    {
        Reason.UNKNOWN_REQUEST: NO_REQUEST,
        Reason.WRONG_PHASE: "it has no KV of its own: it waits",
        Reason.NO_SWA: "the model has no window",
        Reason.BAD_LENGTH: "not 0 <= L <= A",
        Reason.UNFAITHFUL: "L > C, without what rounds in flight claim of it",
    },
    where=(("F", "max(E, R, floor(L - W - P))"),),
    cases=(Case("always", after={"E": "F"}, swa=("max(E, R)", "F")),),
    choice="How far: F may be E (nothing evicted), or any page boundary from max(E, R) to"
    " floor(max(0, L - W)).",
)
def evict_swa(state: State, command: EvictSwa, context: RuleContext) -> State:
    request = known_request(state, command.request)
    require(request.phase in IN_BATCH, Reason.WRONG_PHASE)
    require(state.config.geometry.window is not None, Reason.NO_SWA)
    cursors = cursors_of(request)
    require(0 <= command.length <= cursors.kv_allocated_len, Reason.BAD_LENGTH)
    faithful = state.config.mode is Mode.FAITHFUL
    require(not faithful or command.length <= request.settled_len, Reason.UNFAITHFUL)
    choice = context.choices.get(request.name)
    chosen = None if choice is None else choice.swa_evicted_seqlen
    return state.with_request(evict_request_window(state, request, command.length, chosen))


def evict_request_window(state: State, request: Request, length: int, chosen: int | None) -> Request:
    """Return the request after a window eviction with `length`.

    chosen: swa_evicted_seqlen that the system chose; None if it is not known.
    """
    geometry = state.config.geometry
    window = geometry.window
    page_size = geometry.page_size
    if window is None:
        raise ChoiceNotAllowed(f"{request.name}: evicted without an SWA pool")
    before = cursors_of(request)
    after = evict_window(before, length, window, page_size)
    if chosen == before.swa_evicted_seqlen:
        after = before  # there was nothing to do
    elif chosen is not None:
        low = max(before.swa_evicted_seqlen, before.cache_protected_len)
        high = max(low, eviction_limit(length, window, page_size))
        if not low <= chosen <= high or chosen % page_size:
            raise ChoiceNotAllowed(
                f"{request.name}: swa_evicted_seqlen {chosen} after a window eviction with length {length};"
                f" allowed are page boundaries in [{low}, {high}]"
            )
        after = before._replace(swa_evicted_seqlen=chosen)
    return request._replace(cursors=after, evicted=max(request.evicted, length))


def tail_alone(state: State, request: Request, length: int, context: RuleContext) -> Request:
    """Return the request before it grows to `length` with SWA slots only for the last window."""
    choice = context.choices.get(request.name)
    return evict_request_window(state, request, length, None if choice is None else choice.swa_evicted_seqlen)


def own_eviction(
    state: State, request: Request, context: RuleContext, *, after: bool = False
) -> Request:
    """Return the request after a window eviction that a server may do inside an allocation, with the
    length committed before it; inside a prefill `after` the forward pass, with the length committed
    then."""
    choice = context.choices.get(request.name)
    cursors = cursors_of(request)
    if choice is None or choice.swa_evicted_seqlen in (None, cursors.swa_evicted_seqlen):
        return request
    if choice.after is not after:
        return request
    return evict_request_window(state, request, request.settled_len, choice.swa_evicted_seqlen)
