"""The rules of the reference as transitions of one row whose lengths are unknown.

`model.step` carries a command out in a state with one session: what it then did is a `Move`. The state
before is any that the invariant below allows, so what holds after every rule holds in all runs of any
length; that it holds at the start needs no proof, as nothing is owned there.

The rest of a system does nothing to the row: other rows have pages of their own, and the free pages are a
number. A radix tree is taken for what TREE says: it has whole pages of a prompt, or takes them over, and a
prefix that it has been found to have is live there. Requests without a session are prefilled and decoded by
the same rules, and are never cut; what ends gives back all that it owns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

from reference.commands import (
    Admit, Choice, Chunk, Command, Decode, Done, Draft, EvictSwa, Extend, Finish, Mode, Retract, SpecDecode,
    Submit,
)  # fmt: skip
from stateful_tests.prove.integers import Int, larger, smaller
from stateful_tests.prove.path_exploration import Abandoned, ExploredPath, assume, both, explore
from stateful_tests.prove.symbolic_reference import SymbolicReference

P, W = Int.of("P"), Int.of("W")
PAGE, POSITION = Int.of("page"), Int.of("position")  # any page of a sequence, any position in it


def cursors(ref: SymbolicReference) -> Any:
    """Four cursors of which nothing is known."""
    return ref.cursors.Cursors(*map(Int.of, "CAER"))


@dataclass
class Move:
    """A command that the reference has carried out.

    before, after: cursors of the row. target: where it was cut. swept: the length that drove a sweep.
    room: pages asked for. calls: of functions with a contract: name and arguments.
    """

    ref: SymbolicReference
    was: Any
    now: Any
    command: Any
    before: Any
    after: Any
    target: Any = None
    swept: Any = None
    room: Any = None
    calls: tuple[tuple[str, tuple[Any, ...]], ...] = ()

    @property
    def request(self) -> Any:
        """The turn afterwards."""
        return self.now.request("r")

    def pages(self, pool: str, state: Any) -> Any:
        """Page indices of its sequence that the row owns in a state."""
        ledger = self.ref.ledger
        size = state.config.geometry.page_size
        held = [h.cursors for h in ledger.holders(state)] or [ledger.ZERO]
        return (ledger.full_pages if pool == "full" else ledger.swa_pages)(held[0], size)


# The invariant.


def row(state: Any) -> Any:
    """Cursors of the turn, or else of the slot; None: nothing is held."""
    turn = state.request("r")
    return (turn.cursors if turn is not None else None) or state.session("s").slot


def _order(ref: SymbolicReference, state: Any) -> Any:
    c, geometry = row(state), state.config.geometry
    if c is None:
        return True
    whole = c.cache_protected_len % geometry.page_size == 0
    return both(ref.cursors.in_order(c), whole, c.kv_allocated_len <= geometry.width)


def _text(ref: SymbolicReference, state: Any) -> Any:
    """Where the text of the turn, or of the session, puts the cursors."""
    turn, c = state.request("r"), row(state)
    history = ref.ledger.text_len(state.session("s").history)
    if turn is None:
        return True if c is None else c.kv_committed_len <= history
    sane = [turn.origin >= 1, turn.output >= 0, turn.swept >= 0]
    if turn.cursors is None and not turn.started:
        kept = [] if c is None else [c.kv_committed_len <= history]
        return both(*sane, *kept, turn.origin > history, turn.output == 0, turn.swept == 0)
    length = turn.origin + turn.output
    sane += [c.kv_committed_len <= length, c.cache_protected_len <= turn.origin]
    if turn.cursors is None:  # it was retracted
        return both(*sane, (turn.output >= 1) | (c.cache_protected_len == 0))
    if turn.phase is not ref.ledger.Phase.RUNNING:
        return both(*sane, c.kv_committed_len == c.kv_allocated_len)
    return both(*sane, turn.output >= 1, c.kv_committed_len == length - 1)


def _frontier(ref: SymbolicReference, state: Any) -> Any:  # noqa: ARG001
    turn, c = state.request("r"), row(state)
    if c is None:
        return True
    whole = c.swa_evicted_seqlen % state.config.geometry.page_size == 0
    if turn is not None and turn.cursors is not None:
        return whole
    return whole | (c.swa_evicted_seqlen >= c.kv_committed_len)


def _window(ref: SymbolicReference, state: Any) -> Any:
    """A turn that prefills can."""
    turn = state.request("r")
    if turn is None or turn.cursors is None or turn.phase is ref.ledger.Phase.RUNNING:
        return True
    return live(ref, turn.cursors, turn.cursors.kv_committed_len)


def live(ref: SymbolicReference, c: Any, position: Any) -> Any:
    """The window of a token at `position` is."""
    return ref.cursors.window_live(ref.cursors.lost_below(c), position, W)


def _faithful(ref: SymbolicReference, state: Any) -> Any:
    """No sweep saw more than is kept: of a turn, its input less one token, or what it was swept with."""
    turn, c = state.request("r"), row(state)
    if c is None or state.config.mode is Mode.FREE:
        return True
    kept = c.kv_committed_len
    if turn is None or (turn.cursors is None and not turn.started):
        return live(ref, c, kept)
    bounds = [turn.swept <= kept]
    if turn.cursors is None:
        bounds.append(turn.swept < turn.origin + turn.output)
    return both(live(ref, c, smaller(kept, larger(turn.swept, turn.origin - 1))), *bounds)


# What is so of the row in every state that the rules reach, by name.
INVARIANT: dict[str, Callable[[SymbolicReference, Any], Any]] = {
    "order": _order, "text": _text, "frontier": _frontier, "window": _window, "faithful": _faithful,
}  # fmt: skip


# States before a rule.


def config(ref: SymbolicReference, mode: Mode) -> Any:
    """Sizes of which nothing is known but that they are positive; bigram: 0 or 1."""
    width, bigram = Int.of("width"), Int.of("bigram")
    assume(P >= 1, W >= 1, width >= 1, bigram >= 0, bigram <= 1)
    geometry = SimpleNamespace(page_size=P, window=W, width=width, tree=False, bigram=bigram)
    return ref.ledger.RunConfig(geometry, mode)


def _request(ref: SymbolicReference, phase: str, c: Any, **more: Any) -> Any:
    known = (Int.of("known"), Int.of("output"))
    return ref.ledger.Request(
        "r", "s", 1, (), Int.of("origin"), Int.of("output"), phase=ref.ledger.Phase[phase],
        swept=Int.of("swept"), known=known, cursors=c, **more,
    )  # fmt: skip


def _state(ref: SymbolicReference, mode: Mode, slot: Any, request: Any) -> Any:
    history = ((1, Int.of("history")),)
    assume(Int.of("history") >= 0, Int.of("output") >= 0)
    session = ref.ledger.Session("s", history, slot, request.name if request is not None else None)
    requests = (request,) if request is not None else ()
    state = ref.ledger.State(config(ref, mode), (session,), requests)
    for part in INVARIANT.values():
        assume(part(ref, state))
    return state


def in_batch(ref: SymbolicReference, mode: Mode, *, phase: str, slot: bool = False) -> Any:
    """The session's turn is admitted, prefills or decodes."""
    c = cursors(ref)
    return _state(ref, mode, c if slot else None, _request(ref, phase, c, started=True))


def first_admitted(ref: SymbolicReference, mode: Mode) -> Any:
    """The first turn is admitted: what the radix tree has of it is locked, and nothing is its own."""
    c = cursors(ref)
    assume(c.kv_allocated_len == c.cache_protected_len)
    return _state(ref, mode, None, _request(ref, "ADMITTED", c))


def idle(ref: SymbolicReference, mode: Mode, *, slot: bool) -> Any:
    """Between two turns, or before the first."""
    return _state(ref, mode, cursors(ref) if slot else None, None)


def first_waiting(ref: SymbolicReference, mode: Mode) -> Any:
    """The first turn waits, or one after a midway abort: the session keeps nothing."""
    return _state(ref, mode, None, _request(ref, "QUEUED", None))


def waiting(ref: SymbolicReference, mode: Mode, *, retracted: bool) -> Any:
    """A turn waits: the next one, or one that was retracted."""
    return _state(ref, mode, cursors(ref), _request(ref, "QUEUED", None, started=retracted))


# Rules.


def carried_out(
    ref: SymbolicReference, state: Any, command: Command, choices: tuple[Choice, ...] = ()
) -> Move:
    """Let the reference do it. What it refuses is no move."""
    ref.calls.clear()
    ref.room = None
    try:
        now, outcome = ref.model.step(state, command, choices)
    except ref.model.ChoiceNotAllowed:
        raise Abandoned from None
    if not isinstance(outcome, Done):
        raise Abandoned
    was = state.request("r")
    before, after = row(state) or ref.ledger.ZERO, row(now) or ref.ledger.ZERO
    move = Move(ref, state, now, command, before, after, room=ref.room, calls=tuple(ref.calls))
    if isinstance(command, (Finish, Retract)):
        end = command.finished_len if isinstance(command, Finish) else was.output - command.in_flight
        assume((end >= 1) | (before.cache_protected_len == 0))  # else a tree has the prompt, by its result
        move.target = was.origin + end
        for choice in choices:  # it may stop before its target
            assume(choice.kv_allocated_len <= move.target)
            move.target = choice.kv_allocated_len
    elif isinstance(command, Admit):
        move.target = after.kv_committed_len
    elif isinstance(command, EvictSwa):
        move.swept = command.length
    return move


TREE = SimpleNamespace(page_size=P, window=W)  # as much of one as a row sees


def _insert_prompt(ref: SymbolicReference, state: Any) -> Move:
    """The radix tree takes over what the first turn has computed of its prompt: a token past R at least."""
    was = state.request("r")
    c = was.cursors
    assume(c.kv_committed_len <= was.origin, c.cache_protected_len < c.kv_committed_len)
    now = ref.handover.insert_prompt(state._replace(tree=TREE), was, None)
    return Move(ref, state, now, None, was.cursors, now.request("r").cursors)


def _admit_first(ref: SymbolicReference, state: Any) -> Move:
    """The radix tree has whole pages of the key, maybe none."""
    turn, length = state.request("r"), Int.of("R")
    assume(length >= 0, length < turn.origin + turn.output, length % P == 0, length <= Int.of("width"))
    return carried_out(ref, state._replace(tree=TREE), Admit("r"))


def _own_sweep(ref: SymbolicReference, state: Any) -> Move:
    """A server sweeps inside extend or decode, before it allocates."""
    was = state.request("r")
    try:
        request = ref.evict_swa.own_sweep(state, was, SimpleNamespace(choices={"r": SWEPT[0]}))
    except ref.model.ChoiceNotAllowed:
        raise Abandoned from None
    now, c = state.with_request(request), was.cursors
    return Move(ref, state, now, None, c, request.cursors, swept=c.kv_committed_len)


def _number(name: str) -> Any:
    """An unknown where a command has a number."""
    return Int.of(name)


ALLOCATED = (Choice("r", kv_allocated_len=_number("chosen_A")),)
SWEPT = (Choice("r", swa_evicted_seqlen=_number("chosen_E")),)
N, K, LENGTH = (_number(name) for name in "nkL")
MakeState = Callable[[SymbolicReference, Mode], Any]


def _commanded(command: Any, choices: tuple[Choice, ...] = ()) -> Callable[[SymbolicReference, Any], Move]:
    return lambda ref, state: carried_out(ref, state, command, choices)


PREFILLS, DECODES = partial(in_batch, phase="EXTENDING"), partial(in_batch, phase="RUNNING")
RESUMED = partial(in_batch, phase="ADMITTED", slot=True)
IDLE, NEW = partial(idle, slot=True), partial(idle, slot=False)
NEXT, RETRACTED = partial(waiting, retracted=False), partial(waiting, retracted=True)


@dataclass(frozen=True)
class SymbolicRule:
    """A rule, and the states before it."""

    name: str
    move: Callable[[SymbolicReference, Any], Move]
    states: tuple[MakeState, ...]


RULES: dict[str, SymbolicRule] = {
    rule.name: rule
    for rule in (
        SymbolicRule("submit", _commanded(Submit("r", "s", N)), (IDLE, NEW)),
        SymbolicRule("admit", _commanded(Admit("r")), (NEXT, RETRACTED)),
        SymbolicRule("admit-first", _admit_first, (first_waiting,)),
        SymbolicRule(
            "extend", _commanded(Extend((Chunk("r", N),))),
            (first_admitted, RESUMED, PREFILLS),
        ),
        SymbolicRule("tree-takes-prompt", _insert_prompt, (PREFILLS, DECODES)),
        SymbolicRule("decode", _commanded(Decode(("r",))), (DECODES,)),
        SymbolicRule("spec_decode", _commanded(SpecDecode((Draft("r", N, K),)), ALLOCATED), (DECODES,)),
        SymbolicRule("own-sweep", _own_sweep, (first_admitted, RESUMED, PREFILLS, DECODES)),
        SymbolicRule("evict_swa", _commanded(EvictSwa("r", LENGTH), SWEPT), (PREFILLS, DECODES)),
        SymbolicRule("finish", _commanded(Finish("r", K), ALLOCATED), (DECODES,)),
        SymbolicRule("retract", _commanded(Retract("r", K), ALLOCATED), (DECODES,)),
    )
}  # fmt: skip


Moves = Callable[[SymbolicRule, Mode], list[ExploredPath[Move]]]


def moves_of(ref: SymbolicReference) -> Moves:
    """Every path of a rule in a mode, explored when it is asked for: each state and each rule once."""

    @cache
    def before(make: MakeState, mode: Mode) -> list[ExploredPath[Any]]:
        return list(explore(partial(make, ref, mode)))

    @cache
    def moves(rule: SymbolicRule, mode: Mode) -> list[ExploredPath[Move]]:
        return [
            path
            for make in rule.states
            for state in before(make, mode)
            for path in explore(partial(rule.move, ref, state.result), state)
        ]

    return moves
