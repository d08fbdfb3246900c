"""The weight of each kind of command in a state, and the order in which kinds are drawn.

Harnesses have the usual weights; the functions here change several of them together. The numbers were tuned
to find faults soon. Nothing here draws.
"""

from __future__ import annotations

from collections.abc import Set

from impl.choices import weight_if
from reference.commands import (
    COMMANDS, Abort, Admit, CheckBusy, Close, Decode, Evict, EvictSwa, Extend, Finish, Insert, Launch, Mode,
    Retract, Settle, SpecDecode, Submit, Unlock, UnlockSwa,
)  # fmt: skip
from reference.state import free
from reference.rules.rule_definition import cursors_of
from stateful_tests.generate.commands import HARNESSES
from stateful_tests.generate.enabled_commands import Enabled, ahead_of, may_overshoot, pages_left

Weights = dict[type, int]

# The order of the draws: another one makes other runs of every seed. These three were added last.
_LAST = (UnlockSwa, Launch, Settle)
# Of these two often meet on one path, where they give back what both have shared.
_GIVES_BACK = {Abort, Close, Evict, EvictSwa, Finish, Retract, Unlock, UnlockSwa}
ORDER = (*(kind for kind in COMMANDS if kind not in _LAST), *_LAST)


def kind_weights(c: Enabled) -> Weights:
    """Return the weight of each kind of command that may come next, at least 1."""
    used = [kind for kind in ORDER if kind.__name__ not in c.profile.disabled]
    applying = {kind for kind in used if HARNESSES[kind].applies(c)}
    weights = _weights(c, applying)
    kinds = used if c.invalid else [kind for kind in used if kind in applying and weights[kind]]
    boosted = c.profile.boosted
    # A small engine may have come to a stop: then any kind may come.
    return {
        k: max(1, weights[k] if k in applying else 0) * (4 if k.__name__ in boosted else 1)
        for k in kinds or used
    }


def _weights(c: Enabled, applying: Set[type]) -> Weights:
    """Return the weight of each kind that applies: its harness's weight, changed by the profile and the
    state. A new command needs no line here."""
    weights = {
        kind: harness.weight(c) if kind in applying else 0 for kind, harness in HARNESSES.items()
    }
    if c.profile.again and c.last in _GIVES_BACK:
        weights[c.last] += 20
    if c.tree_alone:
        return weights
    _allocate_ahead(c, weights)
    if len(c.settled_requests) > 1:
        _mixed_slot_sources(c, weights)
    _late_results_and_clients(c, weights)
    if c.profile.machine == "both":
        _full_pool(c, weights)
        if c.state.config.geometry.states and c.cached and not free(c.state).states:
            _no_free_state(c, weights)
    most = min(len(c.profile.requests), c.state.config.geometry.rows)
    if c.profile.crowd and len(c.running) < most and pages_left(c.state) >= 2:
        _gather_crowd(c, weights)
    if c.profile.synchronise:
        _synchronise(c, weights)
    elif c.profile.mixed and c.running and not c.windowless:
        _mix_batches(c, weights)
    return weights


def _allocate_ahead(c: Enabled, weights: Weights) -> None:
    """Favour allocating ahead, then a window eviction over it, then an end that takes the slots back."""
    state = c.state
    page_size = c.state.config.geometry.page_size
    if c.profile.allocate_ahead:
        weights[CheckBusy] = 6
    if c.profile.allocate_ahead and state.config.mode is Mode.FREE:
        if any(may_overshoot(state, r) for r in c.running):  # let it, before it ends
            weights[SpecDecode] = weight_if(c.settled_requests, 24)
            weights[Finish] = 1
        if any(ahead_of(r) > 0 for r in c.running):
            weights[EvictSwa] = 20
        if any(cursors_of(r).swa_evicted_seqlen > r.origin for r in c.running):
            weights |= {Finish: 20, Retract: 30}
    # A frontier inside a page (free mode only) is there for as long as the slot is idle: count it.
    if any(s.slot is not None and s.slot.swa_evicted_seqlen % page_size for s in c.resumable):
        weights[CheckBusy] = 30


def _mixed_slot_sources(c: Enabled, weights: Weights) -> None:
    """Favour rounds whose entries take their slots from different places, or all need a page."""
    sources = c.sources
    if len(sources) > 1 and "ahead" in sources:
        weights[Decode] += 12
    elif len(sources.get("a fresh page", ())) > 1:
        weights[Decode] += 6


def _late_results_and_clients(c: Enabled, weights: Weights) -> None:
    """Favour ends with results in flight, decodes of requests without their window, and impatient
    clients."""
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


def _full_pool(c: Enabled, weights: Weights) -> None:
    """Favour what a full pool allows: a request without its window decodes, or others end to make room."""
    if c.windowless and c.cached and c.profile.lock_holders:
        if free(c.state).full:
            weights |= {Insert: 30, Decode: 0, SpecDecode: 0}
        else:
            weights |= {Insert: 0, Decode: 30, SpecDecode: 30}
        weights |= {Finish: 1, Retract: 1}
    elif pages_left(c.state) < 2 or not free(c.state).rows:  # nothing gets on: somebody has to go
        weights |= {Finish: 12, Retract: 8, Extend: 3, Close: 3}
        weights[Unlock] *= 3


def _gather_crowd(c: Enabled, weights: Weights) -> None:
    """Let several requests run before one ends, as far as there is room."""
    weights[Submit] += weight_if(not c.waiting, 6)
    weights[Admit] += weight_if(c.queued_requests, 8)
    weights[Extend] += weight_if(c.extending, 10)
    for kind in (Finish, Retract, Abort, Close):
        weights[kind] = min(1, weights[kind])


def _no_free_state(c: Enabled, weights: Weights) -> None:
    """Favour admissions behind a prefix while every state is in use: each needs one, and another is
    evicted."""
    weights[Submit] += weight_if(not c.queued_requests, 6)
    weights[Admit] += weight_if(c.queued_requests, 16)


def _mix_batches(c: Enabled, weights: Weights) -> None:
    """While a request decodes, extend another in the same batch."""
    weights[Submit] += weight_if(not c.queued_requests, 6)
    weights[Admit] += 6
    weights[Extend] += weight_if(c.extending, 40)


def _synchronise(c: Enabled, weights: Weights) -> None:
    """Let requests wait for each other, so that batches are large."""
    weights[Submit] *= 2
    if c.queued_requests:
        weights[Extend] = min(1, weights[Extend])
    if c.queued_requests or c.extending:
        for kind in (Decode, SpecDecode, Launch, Finish, Retract):
            weights[kind] = min(1, weights[kind])
