"""Extend: a batch of chunks is prefilled, and perhaps others decode in it."""

from __future__ import annotations

from reference.commands import Extend, Reason
from reference.tree_insertion import insert_prompt
from reference.state import Phase, State
from reference.rules.rule_definition import Case, RuleContext, cursors_of, known_request, require, rule
from reference.rules.batch import LANES, POOLS, Grown, allocate, batch_of, require_window
from reference.rules.evict_swa import own_eviction


@rule(
    Extend,
    "The tokens are computed and written. A request without a row takes one. A complete input "
    "samples an output, which has no KV yet, and the request runs. A batch entry of a running "
    "request is a decode; one with `tail` is received, and takes SWA pages from E' on alone.",
    {
        **LANES,
        Reason.WRONG_PHASE: "a batch entry's request was not admitted, all requests of the batch run,"
        " a result of one is in flight, or one with `tail` runs or has KV of its own: A > R",
        Reason.NO_SWA: "a batch entry with `tail`, and the model has no window",
        Reason.BAD_LENGTH: "C + tokens > origin + output: more than there is to compute",
        Reason.WINDOW_LOST: "not live(C): only a request that runs can have lost its window",
        Reason.ROW_TOO_SHORT: "C + tokens > width",
        Reason.NO_ROW: "fewer rows are free than the batch takes",
        **POOLS,
        Reason.OUT_OF_STATES: "the slots of recurrent state that the batch takes are not free or evictable",
    },
    cases=(
        Case("a batch entry of a running request", "runs", {"C": "C + 1", "A": "max(A, C + 1)"}),
        Case("each other batch entry", "not runs and not tail", after={"C": "C + tokens", "A": "C + tokens"}),
        Case("each other batch entry with `tail`", "not runs and tail",
             {"C": "C + tokens", "A": "C + tokens", "E": "max(E, R, floor(C + tokens - W - P))"}),
    ),
    choice=(
        "A server may evict a window here, before the allocation or after the forward pass, with "
        "the length committed then. With `tail`, E' is what an eviction after it may choose."
    ),
    tree=(
        "Missing pages are evicted first, if enough are evictable. A request without a slot "
        "inserts the computed whole pages of its input, if it can match all of them again, and "
        "moves its lock to their end: R = floor(C'), with bigram keys floor(C' - 1). The table "
        "of insert says what is freed."
    ),
    states=(
        "The state goes on by these tokens, from the state after C. A request that has no slot takes one, and"
        " begins with an empty state. Each prompt that is inserted leaves a copy of its state at its end, in"
        " a slot of its own; that slot is given back where the tree has the state already. All these slots"
        " are there before the batch runs."
    ),
)  # fmt: skip
def extend(state: State, command: Extend, context: RuleContext) -> State:
    """Compute the next chunk of each prompt of a batch. Requests that decode may run beside them; the last
    chunk of a prompt inserts it into the tree."""
    require(command.lanes and all(lane.tokens >= 1 for lane in command.lanes), Reason.EMPTY)
    names = [lane.request for lane in command.lanes]
    requests = batch_of(state, names, Phase.ADMITTED, Phase.EXTENDING, Phase.RUNNING)
    require(not all(r.phase is Phase.RUNNING for r in requests), Reason.WRONG_PHASE)
    tails = {lane.request for lane in command.lanes if lane.tail}
    for request in requests:
        c = cursors_of(request)
        started = request.phase is Phase.RUNNING or c.kv_allocated_len > c.cache_protected_len
        require(request.name not in tails or not started, Reason.WRONG_PHASE)
    require(not tails or state.config.geometry.window is not None, Reason.NO_SWA)
    grown: Grown = []
    for request, lane in zip(requests, command.lanes):
        length = cursors_of(request).kv_committed_len + lane.tokens
        runs = request.phase is Phase.RUNNING
        require(length <= request.origin + request.output, Reason.BAD_LENGTH)
        if runs:
            length = max(length, cursors_of(request).kv_allocated_len)
        grown.append((request, length))
    for request in requests:
        require_window(state, request)
    prompts = [r.name for r in requests if r.phase is not Phase.RUNNING and state.tree is not None]
    inserting = [name for name in prompts if _prompt_enters_tree(state, name)]
    copies = 0 if state.config.geometry.tracks else len(inserting)
    state, grown = allocate(state, grown, context, tails, copies)
    for (request, allocated), lane in zip(grown, command.lanes):
        length = cursors_of(request).kv_committed_len + lane.tokens
        last = length == request.origin + request.output
        request = request._replace(
            cursors=cursors_of(request)._replace(
                kv_committed_len=length, kv_allocated_len=allocated
            ),
            started=True,
            output=request.output + 1 if last else request.output,
            phase=Phase.RUNNING if last else Phase.EXTENDING,
            processed_outputs=(request.processed_outputs[1], request.output),
        )
        state = state.with_request(own_eviction(state, request, context, after=True))
    for name in inserting:
        state = insert_prompt(state, known_request(state, name), context.effects)
    return state


def _prompt_enters_tree(state: State, name: str) -> bool:
    """Return whether the prompt is inserted: later turns of a session stay outside of the tree."""
    session = state.session(known_request(state, name).session)
    return session is None or session.slot is None
