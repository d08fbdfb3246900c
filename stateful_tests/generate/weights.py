"""How much each kind of command is called for in a state: what it needs, and how often it comes then.

The numbers are tuned by what finds faults soon; they draw nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from reference.commands import (
    Abort, Admit, CheckBusy, CheckIdle, Close, Decode, Evict, EvictSwa, Extend, Finish, Insert, Launch,
    Match, Mode, Open, Retract, Settle, SpecDecode, Submit, Unlock, UnlockSwa,
)  # fmt: skip
from reference.state import Phase, free
from reference.prefix_cache import lock_holders
from reference.rules.base import cursors_of
from stateful_tests.generate.enabled import Enabled, ahead_of, may_overshoot, pages_left

Weights = dict[type, int]


def _alone(c: Enabled) -> bool:
    """The radix tree is driven by itself."""
    return c.profile.machine == "tree"


def _cached(c: Enabled) -> bool:
    return c.state.tree is not None and bool(c.state.tree.children)


# What a command needs. The order is that of the draws: another one makes other runs of every seed.
NEEDS: dict[type, Callable[[Enabled], object]] = {
    Open: lambda c: len(c.state.sessions) < len(c.profile.sessions),
    Submit: lambda c: len(c.state.requests) < len(c.profile.requests),
    Admit: lambda c: c.waiting,
    Extend: lambda c: c.extending,
    Decode: lambda c: c.running,
    SpecDecode: lambda c: c.running,
    EvictSwa: lambda c: c.held and c.state.config.geometry.window is not None,
    Finish: lambda c: c.running,
    Retract: lambda c: c.running,
    Abort: lambda c: c.state.requests,
    Close: lambda c: c.state.sessions,
    CheckBusy: lambda c: _alone(c) or c.held or c.resumable,
    CheckIdle: lambda c: _alone(c) or (c.resumable and not c.held),
    Match: lambda c: len(lock_holders(c.state)) < len(c.profile.lock_holders),
    Unlock: lambda c: lock_holders(c.state),
    Insert: lambda c: _alone(c) or c.profile.lock_holders,
    Evict: _cached,
    UnlockSwa: lambda c: c.swa_unlockable,
    Launch: lambda c: c.launchable,
    Settle: lambda c: c.late,
}


def kind_weights(c: Enabled) -> Weights:
    """How much each kind that may come next is called for, at least 1; the others are left out."""
    used = [kind for kind in NEEDS if kind.__name__ not in c.profile.disabled]
    weights = _weights(c)
    weights = {kind: weights[kind] if NEEDS[kind](c) else 0 for kind in used}
    kinds = used if c.invalid else [kind for kind in used if weights[kind]]
    boosted = c.profile.boosted
    # A small engine may have come to a stop: then any kind may come.
    return {k: max(1, weights[k]) * (4 if k.__name__ in boosted else 1) for k in kinds or used}


def _weights(c: Enabled) -> Weights:
    """How much each kind is called for where its needs are met."""
    weights = _usual(c)
    _allocate_ahead(c, weights)
    _results_and_clients(c, weights)
    if c.profile.machine != "sessions":
        weights |= _of_the_tree(c)
        if not _alone(c):
            _full_pool(c, weights)
    if c.profile.synchronise:
        _synchronise(c, weights)
    return weights


def _usual(c: Enabled) -> Weights:
    state = c.state
    admitted = any(r.phase is Phase.ADMITTED for r in state.requests)
    some = bool(c.idle) or len(state.requests) < 2
    return {
        Open: 4,
        Submit: 9 if c.resumable else 6 * some,
        Admit: 8 * _queued(c) + (8 if c.wiped else 2) * admitted,
        Extend: 10,
        Decode: 5 * bool(c.settled),
        SpecDecode: 6 * bool(c.settled),
        Launch: 10,
        Settle: 10,
        EvictSwa: 5,
        Finish: 6,
        Retract: 3,
        Abort: 1 + 5 * bool(c.abortable),
        Close: 1 + 2 * bool(c.closable) + 3 * bool(c.crowded),
        CheckBusy: 3,
        CheckIdle: 2,
    }


def _queued(c: Enabled) -> bool:
    return any(r.phase is Phase.QUEUED for r in c.state.requests)


def _allocate_ahead(c: Enabled, weights: Weights) -> None:
    """In a run that allocates ahead: evict over it, then take it back."""
    state, page_size = c.state, c.state.config.geometry.page_size
    if c.profile.allocate_ahead:
        weights[CheckBusy] = 6
    if c.profile.allocate_ahead and state.config.mode is Mode.FREE:
        if any(may_overshoot(state, r) for r in c.running):  # let it, before it ends
            weights[SpecDecode] = 24 * bool(c.settled)
            weights[Finish] = 1
        if any(ahead_of(r) > 0 for r in c.running):
            weights[EvictSwa] = 20
        if any(cursors_of(r).swa_evicted_seqlen > r.origin for r in c.running):
            weights |= {Finish: 20, Retract: 30}
    # A frontier inside a page (free mode only) is there for as long as the slot is idle: count it.
    if any(s.slot is not None and s.slot.swa_evicted_seqlen % page_size for s in c.resumable):
        weights[CheckBusy] = 30


def _results_and_clients(c: Enabled, weights: Weights) -> None:
    if c.windowless:  # who has lost its window decodes a token, before a window eviction takes more
        weights[Decode] += 8
        weights[SpecDecode] += 4
        weights[EvictSwa] = min(5, weights[EvictSwa])
    if c.late and "Settle" not in c.profile.disabled:  # a turn that ends before they are there
        weights[Finish] += 6
        weights[Retract] += 9
    if c.busy:
        weights[Submit] += 3
        if c.profile.impatient:
            weights[Abort] += 2
            weights[Close] += 2


def _of_the_tree(c: Enabled) -> Weights:
    alone, staying = _alone(c), len(lock_holders(c.state))
    weights: Weights = {
        Match: (6 if alone else 2) * (1 + _cached(c)),
        Unlock: (4 if alone else 2) * min(staying, 2),
        UnlockSwa: 2,
        Insert: 12 if alone else 4,
        Evict: 5 if alone else 1,
    }
    return weights | (dict.fromkeys((CheckBusy, CheckIdle), 1) if alone else {})


def _full_pool(c: Enabled, weights: Weights) -> None:
    if c.windowless and _cached(c) and c.profile.lock_holders:  # who has lost its window, in a full pool
        full = not free(c.state).full
        weights |= {Insert: 30 * (not full), Decode: 30 * full, SpecDecode: 30 * full}
        weights |= {Finish: 1, Retract: 1}
    elif pages_left(c.state) < 2 or not free(c.state).rows:  # nothing gets on: somebody has to go
        weights |= {Finish: 12, Retract: 8, Extend: 3, Close: 3}
        weights[Unlock] *= 3


def _synchronise(c: Enabled, weights: Weights) -> None:
    """Requests wait for each other, so that batches are large."""
    queued = _queued(c)
    weights[Submit] *= 2
    if queued:
        weights[Extend] = min(1, weights[Extend])
    if queued or c.extending:
        for kind in (Decode, SpecDecode, Launch, Finish, Retract):
            weights[kind] = min(1, weights[kind])
