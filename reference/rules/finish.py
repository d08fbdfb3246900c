"""Finish: a request ends at its target."""

from __future__ import annotations

from reference.commands import Finish, Mode, Reason
from reference.cursors import Cursors, cut, has_all_kv, may_stop_at
from reference.tree_insertion import insert_on_finish
from reference.state import Phase, Request, State, state_of, text_cut
from reference.rules.rule_definition import (
    NO_REQUEST, NOT_RUNNING, ChoiceNotAllowed, RuleContext, cursors_of, known_request, require, row_goes,
    row_is_cut, rule,
)  # fmt: skip
from reference.prefix_cache import unlock_holder
from reference.rules.sessions import end_turn

KEEPS_LESS = (
    "The slot may give back what lies behind C. Without the window of min(C, target) nothing past R can be"
    " resumed: it may keep less, up to any page boundary from R to target. With a result in flight it may"
    " count its round's first token."
)


@rule(
    Finish,
    "The session's history becomes the text up to target. The session slot keeps the row, cut at "
    "target; the full page that target falls into stays. If that page lies below E, its SWA half "
    "was freed already: SWA pages are freed from ceil(E) on.",
    {
        Reason.UNKNOWN_REQUEST: NO_REQUEST,
        Reason.WRONG_PHASE: NOT_RUNNING,
        Reason.BAD_LENGTH: "not 1 <= finished_len <= output",
        Reason.UNFAITHFUL: "target is below a length that window eviction of the turn used, or that"
        " released the SWA part of its lock, or takes back two rounds or more",
    },
    where=(("target", "origin + finished_len"),),
    cases=(
        row_is_cut("a turn, and its session stays open", "session and not closing"),
        row_goes("the turn that a deferred close has waited for: the session goes", "closing"),
        row_goes("an ordinary request", "not session"),
    ),
    choice=KEEPS_LESS,
    tree=(
        "An ordinary request inserts the whole pages of its text up to min(C, target) and "
        "unlocks; the table of insert says what is freed. A session's lock stays with its slot."
    ),
    states=(
        "A state is never cut. The state of an ordinary request goes into the tree with its text, if it is"
        " the one after all that is inserted; else nothing is inserted, for nobody could resume there. A"
        " session's slot keeps the state as it is: the one after all that the turn has computed."
    ),
)
def finish(state: State, command: Finish, context: RuleContext) -> State:
    """End a turn: the session's slot is cut to the finished length, or an ordinary request's text goes into
    the tree."""
    request = known_request(state, command.request)
    require(request.phase is Phase.RUNNING, Reason.WRONG_PHASE)
    require(1 <= command.finished_len <= request.output, Reason.BAD_LENGTH)
    target = request.origin + command.finished_len
    faithful = target >= request.evicted and command.finished_len > request.processed_outputs[0]
    require(faithful or state.config.mode is Mode.FREE, Reason.UNFAITHFUL)
    state = state.without_request(request.name)
    cursors = cursors_of(request)
    session = state.session(request.session)
    if session is not None:
        slot = cut_of_turn(state, request, target, context)
        ended = session._replace(
            history=text_cut(request.text, target), slot=slot, state=state_of(state, request)
        )
        return end_turn(state, ended)
    if state.tree is not None:
        length = min(cursors.kv_committed_len, target)
        geometry = state.config.geometry
        if geometry.states and not geometry.tracks and length != state_of(state, request):
            return unlock_holder(state, request.holder)
        state = insert_on_finish(state, request, length, context.effects)
    return state


def cut_of_turn(state: State, request: Request, target: int, context: RuleContext) -> Cursors:
    """Return the cursors that the slot keeps for a turn that ends, or is retracted, at `target`."""
    before = cursors_of(request)
    choice = context.choices.get(request.name)
    by_default = min(before.kv_committed_len, target)
    committed = None if choice is None else choice.kv_committed_len
    if committed not in (None, by_default):
        if not request.in_flight or committed != target:
            raise ChoiceNotAllowed(
                f"{request.name}: kv_committed_len {committed} after a cut at {target}"
            )
        before = before._replace(kv_committed_len=target)  # with the first token of the round
    slot = cut(before, target)
    chosen = None if choice is None else choice.kv_allocated_len
    if chosen is None or chosen == slot.kv_allocated_len:
        return slot
    geometry = state.config.geometry
    window, page_size = geometry.window or 0, geometry.page_size
    if not (has_all_kv(before, target, chosen) or may_stop_at(before, target, chosen, window, page_size)):
        raise ChoiceNotAllowed(
            f"{request.name}: kv_allocated_len {chosen} after a cut at {target} that keeps"
            f" {slot.kv_allocated_len}"
        )
    return cut(before, chosen)
