"""The radix tree by itself: match, unlock, insert, evict."""

from __future__ import annotations

from reference import radix_tree as radix
from reference.commands import Done, Evict, Insert, Match, Mode, Reason, Unlock, UnlockSwa, prompt_len
from reference.cursors import eviction_limit, floor_page
from reference.tree_insertion import insert_by_lock_holder
from reference.state import IN_BATCH, State
from reference.prefix_cache import (
    evict_from_cache,
    key_of,
    lock_holders,
    match_and_lock,
    unlock_holder,
    well_formed,
)
from reference.rules.rule_definition import (
    NAME_TAKEN, RuleContext, cursors_of, is_taken, make_room, require, rule,
)  # fmt: skip

_PROMPT = "no prompt, or an ill-formed one"
_NO_TREE = "the server has none"
_TOO_LONG = "the prompt is longer than a row"


@rule(
    Match,
    "The prefix [0, L) ends with a node, or where the prompt leaves the tree: the node there is "
    "split. L is the longest such length with a live window behind it, or the longest of all for "
    "a reader of full KV alone. Nothing is freed.",
    {
        Reason.EMPTY: _PROMPT,
        Reason.REQUEST_EXISTS: NAME_TAKEN,
        Reason.NO_TREE: _NO_TREE,
        Reason.ROW_TOO_SHORT: _TOO_LONG,
    },
    page="each page of the prompt that the tree has.",
    pages=(
        ("past the prefix", "as it was", "as it was"),
        ("its node reaches into the last window of the prefix", "locked", "locked"),
        ("further up, or SWA KV is not read", "locked", "as it was"),
    ),
    states=(
        "L is the longest such length at whose end the tree has a state, which is locked as well; for a"
        " reader of full KV alone the state does not count."
    ),
)
def match(state: State, command: Match, _: RuleContext) -> State:
    require(command.prompt and well_formed(command.prompt), Reason.EMPTY)
    require(not is_taken(state, command.holder), Reason.REQUEST_EXISTS)
    require(state.tree is not None, Reason.NO_TREE)
    require(prompt_len(command.prompt) <= state.config.geometry.width, Reason.ROW_TOO_SHORT)
    key = key_of(command.prompt, state.config.geometry.bigram)
    return match_and_lock(state, command.holder, key, command.full_only)[0]


@rule(
    Unlock,
    "It releases exactly what its lock pinned, whatever was split since. Nothing is freed; what "
    "no other lock holds becomes evictable.",
    {Reason.UNKNOWN_REQUEST: "no lock owner is called that"},
    page="each page that the lock pinned.",
    pages=(
        ("the window of another lock reaches it", "as it was", "as it was"),
        ("another lock passes through it", "as it was", "no longer locked"),
        ("no other lock does", "no longer locked", "no longer locked"),
    ),
)
def unlock(state: State, command: Unlock, _: RuleContext) -> State:
    require(command.holder in lock_holders(state), Reason.UNKNOWN_REQUEST)
    return unlock_holder(state, command.holder)


@rule(
    UnlockSwa,
    "The SWA part is released, once; SWA KV that no other window needs becomes evictable. The "
    "full part stays until unlock. Nothing is freed.",
    {
        Reason.UNKNOWN_REQUEST: "no lock owner and no request is called that",
        Reason.WRONG_PHASE: "the request has no KV of its own: it waits",
        Reason.NO_SWA: "the model has no window",
        Reason.NO_TREE: _NO_TREE,
        Reason.BAD_LENGTH: "C - W < R, C less what rounds in flight claim: the request's next token still"
        " reads what is locked",
        Reason.UNFAITHFUL: "a turn in unrestricted mode, where window eviction past its commit sends the next"
        " turn back to R; a turn on a recurrent model, where a state past the cut does",
    },
    page="each page whose SWA KV the lock pinned.",
    pages=(
        ("the window of another lock reaches it", "as it was", "as it was"),
        ("no other window does", "as it was", "no longer locked"),
    ),
)
def unlock_swa(state: State, command: UnlockSwa, _: RuleContext) -> State:
    """Release a holder's lock on the SWA KV of its prefix. Full KV stays locked."""
    request = state.request(command.holder)
    geometry = state.config.geometry
    require(request is not None or command.holder in lock_holders(state), Reason.UNKNOWN_REQUEST)
    require(request is None or request.phase in IN_BATCH, Reason.WRONG_PHASE)
    require(geometry.window is not None, Reason.NO_SWA)
    require(state.tree is not None, Reason.NO_TREE)
    assert state.tree is not None and geometry.window is not None
    tree = state.tree
    holder = command.holder
    if request is not None:
        length = request.settled_len
        holder = request.holder
        require(
            length - geometry.window >= cursors_of(request).cache_protected_len, Reason.BAD_LENGTH
        )
        if request.session is not None:  # as a window eviction: no later cut goes below
            require(state.config.mode is Mode.FAITHFUL and not geometry.states, Reason.UNFAITHFUL)
            state = state.with_request(request._replace(evicted=length))
    return state._replace(tree=radix.unlock_swa(tree, holder))


@rule(
    Insert,
    "The whole pages of the prompt are in the tree. The request brings those past its locked "
    "prefix; missing pages are evicted first. A running request brings them only if it can match "
    "all of them again, else its lock stays as it is.",
    {
        Reason.EMPTY: _PROMPT,
        Reason.REQUEST_EXISTS: "a session or request is called that",
        Reason.SHRINKING_PREFIX: "the prompt does not start with what the lock owner has locked",
        Reason.NO_SWA: "evicted, and the model has no window",
        Reason.NO_TREE: _NO_TREE,
        Reason.BAD_LENGTH: "evicted is negative, or past the prompt",
        Reason.UNFAITHFUL: "evicted is past the lock owner's prefix and past what window eviction of the"
        " prompt may reach",
        Reason.ROW_TOO_SHORT: _TOO_LONG,
        Reason.OUT_OF_FULL: "the lock owner's own pages are not free or evictable",
        Reason.OUT_OF_SWA: "no room for its SWA pages",
        Reason.OUT_OF_STATES: "no slot of recurrent state is free or evictable for the one at its end",
    },
    page="each page that the inserter brings. Its SWA KV is evicted where it ends at or below ceil(evicted).",
    pages=(
        (
            "the inserter goes on and could not match all of its pages again (a lock"
            " owner has no row, and gives them back)",
            "the inserter's stays out of the tree", "the inserter's stays out of the tree",
        ),
        (
            "the tree has nothing there",
            "the tree takes the inserter's", "the tree takes the inserter's",
        ),
        (
            "nothing there, and the inserter's was evicted: a tombstone",
            "the tree takes the inserter's", "as it was",
        ),
        ("a live page: a duplicate", "the inserter's is freed", "the inserter's is freed"),
        (
            "a tombstone that a lock passes through: a duplicate",
            "the inserter's is freed", "the inserter's is freed",
        ),
        (
            "a tombstone, no lock passes through it",
            "the tree takes the inserter's and frees its own", "the tree takes the inserter's",
        ),
        (
            "a tombstone, and the inserter's was evicted: a duplicate",
            "the inserter's is freed", "as it was",
        ),
    ),
    states=(
        "The request brings the state at the end of its prompt; the node there takes it, unless it has one."
    ),
)  # fmt: skip
def insert(state: State, command: Insert, context: RuleContext) -> State:
    """Insert a text for a holder that then locks it; a holder that exists goes on from what it has locked."""
    require(command.prompt and well_formed(command.prompt), Reason.EMPTY)
    locked = lock_holders(state).get(command.holder)
    require(locked is not None or not is_taken(state, command.holder), Reason.REQUEST_EXISTS)
    geometry = state.config.geometry
    key = key_of(command.prompt, geometry.bigram)
    length = prompt_len(command.prompt)
    prefix = len(locked or ())
    require(key[:prefix] == (locked or ()), Reason.SHRINKING_PREFIX)
    require(command.evicted == 0 or geometry.window is not None, Reason.NO_SWA)
    require(state.tree is not None, Reason.NO_TREE)
    require(0 <= command.evicted <= length, Reason.BAD_LENGTH)
    if state.config.mode is Mode.FAITHFUL and geometry.window is not None:
        reach = eviction_limit(length, geometry.window, geometry.page_size)
        require(command.evicted <= max(prefix, reach), Reason.UNFAITHFUL)
    require(length <= geometry.width, Reason.ROW_TOO_SHORT)
    whole_pages = key[: floor_page(len(key), geometry.page_size)]
    pages = (len(whole_pages) - prefix) // geometry.page_size
    state = make_room(state, pages, context, states=int(pages > 0))
    return insert_by_lock_holder(
        state, command.holder, whole_pages, command.evicted, context.effects, goes_on=command.chunked
    )


@rule(
    Evict,
    "The first case that some node meets is carried out for the least recently used such node "
    "(of equally old ones, the one nearer to the root), again and again until none is met. full "
    "and swa are the tokens still needed.",
    {
        Reason.EMPTY: "nothing is requested",
        Reason.NO_SWA: "SWA tokens, and the model has no window",
        Reason.NO_STATES: "states, and the model has none",
        Reason.NO_TREE: _NO_TREE,
        Reason.BAD_LENGTH: "a negative number",
    },
    page="each node.",
    pages=(
        (
            "a tombstone without a lock that this eviction has left without children, or"
            " made of a leaf",
            "freed",
            "as it was",
        ),
        ("full is short: a leaf without a lock", "freed", "freed"),
        (
            "swa is short: it has SWA KV that no lock needs, and becomes a tombstone",
            "as it was",
            "freed",
        ),
    ),
    states=(
        "states is how many are still needed, after the tokens. The state that was used longest ago and that"
        " no lock needs goes: with its node, if that is a leaf without a lock, else alone. A match uses the"
        " state at its end, and no other. A node without a state that is left without children goes as a"
        " tombstone does."
    ),
)
def evict(state: State, command: Evict, context: RuleContext) -> State:
    require(command.full or command.swa or command.states, Reason.EMPTY)
    require(command.swa == 0 or state.config.geometry.window is not None, Reason.NO_SWA)
    require(command.states == 0 or state.config.geometry.states, Reason.NO_STATES)
    require(state.tree is not None, Reason.NO_TREE)
    require(command.full >= 0 and command.swa >= 0 and command.states >= 0, Reason.BAD_LENGTH)
    state, freed = evict_from_cache(state, command.full, command.swa, context.effects, command.states)
    context.done = Done(freed=freed)
    return state
