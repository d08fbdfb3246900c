"""What to do next: commands drawn from the vocabulary and the reference's state, never from a system.

Mostly commands that apply, sometimes ones that must be refused. A `ChoiceSource` makes the decisions, so
that one generator serves a plain random source (volume) and Hypothesis (shrinking, database).
"""

from __future__ import annotations

from impl.adapter import Capabilities
from reference.commands import (
    Abort,
    Admit,
    CheckBusy,
    CheckIdle,
    Close,
    Command,
    Decode,
    Evict,
    EvictSwa,
    Extend,
    Finish,
    Insert,
    Match,
    Mode,
    Open,
    Retract,
    SpecDecode,
    Submit,
    Unlock,
)  # fmt: skip
from reference.ledger import Phase, State, free
from reference.prefix_cache import lock_holders
from stateful_tests.generate.arguments import GENERATORS
from stateful_tests.generate.choice_source import ChoiceSource, RandomChoices, once_in
from stateful_tests.generate.enabled import Enabled, ahead_of, cursors_of, may_overshoot, pages_left
from stateful_tests.generate.run_profile import RunProfile


def propose(state: State, source: ChoiceSource, profile: RunProfile) -> Command:
    """The next command for `state`."""
    invalid = once_in(source, profile.invalid)
    context = Enabled(state, source, profile, invalid)
    weights = _weights(context)
    used = [k for k in GENERATORS if k.__name__ not in profile.off]
    kinds = [k for k in used if invalid or weights[k]] or used  # a small engine may have come to a stop
    total = [max(1, weights[k]) * (4 if k.__name__ in profile.loved else 1) for k in kinds]
    at = source.upto(sum(total) - 1)
    while at >= total[0]:
        at -= total.pop(0)
        kinds.pop(0)
    return GENERATORS[kinds[0]](context)


def applies(kind: type, state: State, machine: str = "sessions") -> bool:
    """Whether a command of this kind has something to work on."""
    return bool(_weights(Enabled(state, RandomChoices(0), RunProfile(machine=machine), invalid=False))[kind])


def draw_command(kind: type, state: State, source: ChoiceSource, machine: str = "sessions") -> Command:
    """A command of one kind; once in a while one that does not apply."""
    return GENERATORS[kind](Enabled(state, source, RunProfile(machine=machine), once_in(source, 8)))


def _weights(c: Enabled) -> dict[type, int]:
    """How much each kind of command is called for; 0 where it has nothing to work on."""
    state, profile = c.state, c.profile
    resumable = [s for s in c.idle if s.slot is not None]
    admitted = any(r.phase is Phase.ADMITTED for r in state.requests)
    queued = any(r.phase is Phase.QUEUED for r in state.requests)
    crowded = len(state.requests) >= len(profile.requests)
    free_mode = state.config.mode is Mode.FREE
    # In a run that allocates ahead: sweep over it, then take it back.
    ahead = profile.ahead and free_mode and any(ahead_of(r) > 0 for r in c.running)
    swept = (
        profile.ahead and free_mode and any(cursors_of(r).swa_evicted_seqlen > r.origin for r in c.running)
    )
    # A frontier inside a page (free mode alone) is there for as long as the slot is idle: count it.
    page_size = state.config.geometry.page_size
    odd = any(s.slot is not None and s.slot.swa_evicted_seqlen % page_size for s in resumable)
    # A turn that may overshoot: let it, before it ends.
    short = profile.ahead and free_mode and any(may_overshoot(state, r) for r in c.running)
    submit = 9 if resumable else 6 if c.idle or len(state.requests) < 2 else 0
    weights = {
        Open: 4 * (len(state.sessions) < len(profile.sessions)),
        Submit: 0 if crowded else submit,
        Admit: 8 * queued + (8 if c.wiped else 2) * admitted,
        Extend: 10 * bool(c.extending),
        Decode: 5 * bool(c.running),
        SpecDecode: (24 if short else 6) * bool(c.running),
        EvictSwa: (20 if ahead else 5) * bool(c.held) * (state.config.geometry.window is not None),
        Finish: (20 if swept else 1 if short else 6) * bool(c.running),
        Retract: (30 if swept else 3) * bool(c.running),
        Abort: 1 * bool(state.requests) + 5 * bool(c.abortable),
        Close: 1 * bool(state.sessions) + 2 * bool(c.closable),
        CheckBusy: (30 if odd else 6 if profile.ahead else 3) * bool(resumable or c.held),
        CheckIdle: 2 * (bool(resumable) and not c.held),
    }
    if profile.machine != "sessions":
        weights |= _tree_weights(c)
    if profile.gather:
        weights[Submit] *= 2
        if queued:
            weights[Extend] = min(1, weights[Extend])
        if queued or c.extending:
            for kind in (Decode, SpecDecode, Finish, Retract):
                weights[kind] = min(1, weights[kind])
    return weights


def _tree_weights(c: Enabled) -> dict[type, int]:
    """The same for the commands of the radix tree, and for the checks where it is alone."""
    assert c.state.tree is not None
    alone = c.profile.machine == "tree"
    staying, names = len(lock_holders(c.state)), len(c.profile.lock_holders)
    cached = bool(c.state.tree.children)
    weights: dict[type, int] = {
        Match: (6 if alone else 2) * (staying < names) * (1 + cached),
        Unlock: (4 if alone else 2) * min(staying, 2),
        Insert: 12 if alone else 4 * bool(names),
        Evict: (5 if alone else 1) * cached,
    }
    if alone:
        weights |= dict.fromkeys((CheckBusy, CheckIdle), 1)
    elif pages_left(c.state) < 2 or not free(c.state).rows:  # nothing gets on: somebody has to go
        weights |= {kind: weight * bool(c.running) for kind, weight in ((Finish, 12), (Retract, 8))}
        weights |= {Extend: 3 * bool(c.extending), Close: 3 * bool(c.state.sessions)}
        weights[Unlock] *= 3
    return weights


def finale(state: State, capabilities: Capabilities | None = None) -> list[Command]:
    """Commands that end everything: abort what runs, close what is open, and empty the radix tree."""
    ends: list[Command] = [Abort(r.name) for r in state.requests]
    closing = {s.name for s in state.sessions if s.closing}
    ends += [Close(s.name) for s in state.sessions if s.name not in closing]
    if state.tree is not None:
        geometry = state.config.geometry
        everything = [geometry.pages(pool) * geometry.page_size for pool in geometry.pools]
        ends += [*(Unlock(name) for name in lock_holders(state)), Evict(*everything), CheckIdle()]
    offered = (capabilities or Capabilities()).commands
    return [command for command in ends if type(command).__name__ in offered]
