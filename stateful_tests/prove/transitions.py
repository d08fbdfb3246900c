"""The rules of the reference as transitions of one row whose lengths are unknown.

`model.step` carries a command out in a state with one session: what it then did is a `Move`. The state
before is any that the invariant below allows, so what holds after every rule holds in all runs of any
length; that it holds at the start needs no proof, as nothing is owned there.

What the rest of a system does to the row is nothing: other rows have pages of their own, and the free
pages are a number. A radix tree is taken for what TREE says: it has whole pages of a prompt, or takes them
over, and a prefix that it has been found to have is live there. Requests without a session are prefilled and
decoded by the same rules, and are never cut; what ends gives back all that it owns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any

from reference.commands import (
    Admit,
    Choice,
    Chunk,
    Command,
    Decode,
    Done,
    Draft,
    EvictSwa,
    Extend,
    Finish,
    Mode,
    Retract,
    SpecDecode,
    Submit,
)  # fmt: skip
from stateful_tests.prove.integers import Abandoned, Bool, Int, Path, assume, both, explore, larger, smaller
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
    calls: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)

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


def invariant(ref: SymbolicReference, state: Any) -> dict[str, Callable[[], Any]]:
    """What is so of the row in every state that the rules reach, by name: asked for one by one."""
    return {
        "order": partial(_order, ref, state),
        "text": partial(_text, ref, state),
        "frontier": partial(_frontier, ref, state),
        "window": partial(_window, ref, state),
        "faithful": partial(_faithful, ref, state),
    }


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
        return both(*sane, turn.output >= 1)
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


# States before a rule.


def scope(ref: SymbolicReference, mode: Mode) -> Any:
    """Sizes of which nothing is known but that they are positive."""
    width = Int.of("width")
    assume(P >= 1, W >= 1, width >= 1)
    geometry = SimpleNamespace(page_size=P, window=W, width=width, tree=False)
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
    state = ref.ledger.State(scope(ref, mode), (session,), requests)
    for part in invariant(ref, state).values():
        assume(part())
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
    """Let the reference do it, and note what it does on the way. What it refuses is no move."""
    with noting(ref) as noted:
        try:
            now, outcome = ref.model.step(state, command, choices)
        except ref.model.ChoiceNotAllowed:
            raise Abandoned from None
    if not isinstance(outcome, Done):
        raise Abandoned
    was = state.request("r")
    before, after = row(state) or ref.ledger.ZERO, row(now) or ref.ledger.ZERO
    move = Move(ref, state, now, command, before, after, calls=noted.calls, room=noted.room)
    if isinstance(command, Finish):
        move.target = was.origin + command.finished_len
    elif isinstance(command, Retract):
        move.target = was.origin + was.output - command.in_flight
    elif isinstance(command, Admit):
        move.target = after.kv_committed_len
    elif isinstance(command, EvictSwa):
        move.swept = command.length
    return move


class Noted:
    """What the rules do on the way: calls of the arithmetic, and pages asked for.

    Whether those are there is not asked: a number decides that, and more moves are looked at, not fewer.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.room: Any = None

    def watched(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.calls.append((name, arguments))
            return function(*arguments)

        return call

    def asked(self, state: Any, pages: Any, _: Any) -> Any:
        self.room = pages
        return state


@contextmanager
def noting(ref: SymbolicReference) -> Iterator[Noted]:
    """While the rules of `ref` run."""
    noted, model = Noted(), ref.model
    watched = {
        name: noted.watched(name, value)
        for name, value in vars(model).items()
        if isinstance(value, FunctionType) and value.__module__ == ref.cursors.__name__
    }
    with _replaced(model, _room=noted.asked, free=lambda _: SimpleNamespace(rows=2), **watched):
        yield noted


def _number(name: str) -> Any:
    """An unknown where a command has a number."""
    return Int.of(name)


ALLOCATED = (Choice("r", kv_allocated_len=_number("chosen_A")),)
SWEPT = (Choice("r", swa_evicted_seqlen=_number("chosen_E")),)
N, K, LENGTH = (_number(name) for name in "nkL")


class _AnyTree:
    """As much of reference.tree as a row sees: what it brings is kept, or is not."""

    page_size, window = P, W

    @staticmethod
    def kept(tree: Any, *_: Any) -> Any:
        return (tree, None) if Bool.unknown("kept") else None


@contextmanager
def _replaced(module: Any, **others: Any) -> Iterator[None]:
    """For a while, a module's names mean something else."""
    right = {name: getattr(module, name) for name in others}
    for name, other in others.items():
        setattr(module, name, other)
    try:
        yield
    finally:
        for name, value in right.items():
            setattr(module, name, value)


def _prompt_kept(ref: SymbolicReference, state: Any) -> Move:
    """The radix tree takes over what the first turn has computed of its prompt."""
    was, caching = state.request("r"), ref.prefix_cache
    assume(was.cursors.kv_committed_len <= was.origin)
    with _replaced(caching, radix=_AnyTree, text_tokens=lambda *_: (), _note=lambda *_: None):
        now = caching.prompt_kept(state._replace(tree=_AnyTree), was, caching.Effects())._replace(tree=None)
    return Move(ref, state, now, None, was.cursors, now.request("r").cursors)


def _admit_first(ref: SymbolicReference, state: Any) -> Move:
    """The radix tree has whole pages of the key, maybe none."""
    turn, length = state.request("r"), Int.of("R")
    assume(length >= 0, length < turn.origin + turn.output, length % P == 0, length <= Int.of("width"))
    matched = {"matched": lambda state, *_: (state, length), "text_tokens": lambda *_: ()}
    with _replaced(ref.model, **matched):
        now = ref.model._admit(state._replace(tree=_AnyTree), Admit("r"), None)._replace(tree=None)
    return Move(ref, state, now, Admit("r"), ref.ledger.ZERO, now.request("r").cursors)


def _own_sweep(ref: SymbolicReference, state: Any) -> Move:
    """A server sweeps inside extend or decode, before it allocates."""
    was = state.request("r")
    try:
        now = state.with_request(ref.model._own_sweep(state, was, {"r": SWEPT[0]}))
    except ref.model.ChoiceNotAllowed:
        raise Abandoned from None
    c = was.cursors
    return Move(ref, state, now, None, c, now.request("r").cursors, swept=c.kv_committed_len)


State = Callable[[SymbolicReference, Mode], Any]


def _commanded(command: Any, choices: tuple[Choice, ...] = ()) -> Callable[[SymbolicReference, Any], Move]:
    return lambda ref, state: carried_out(ref, state, command, choices)


PREFILLS, DECODES = partial(in_batch, phase="EXTENDING"), partial(in_batch, phase="RUNNING")
RESUMED = partial(in_batch, phase="ADMITTED", slot=True)
IDLE, NEW = partial(idle, slot=True), partial(idle, slot=False)
NEXT, RETRACTED = partial(waiting, retracted=False), partial(waiting, retracted=True)


@dataclass(frozen=True)
class Rule:
    """A rule, and the states before it."""

    name: str
    move: Callable[[SymbolicReference, Any], Move]
    states: tuple[State, ...]


RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule("submit", _commanded(Submit("r", "s", N)), (IDLE, NEW)),
        Rule("admit", _commanded(Admit("r")), (NEXT, RETRACTED)),
        Rule("admit-first", _admit_first, (first_waiting,)),
        Rule(
            "extend", _commanded(Extend((Chunk("r", N),))),
            (first_admitted, RESUMED, PREFILLS),
        ),
        Rule("tree-takes-prompt", _prompt_kept, (PREFILLS, DECODES)),
        Rule("decode", _commanded(Decode(("r",))), (DECODES,)),
        Rule("spec_decode", _commanded(SpecDecode((Draft("r", N, K),)), ALLOCATED), (DECODES,)),
        Rule("own-sweep", _own_sweep, (first_admitted, RESUMED, PREFILLS, DECODES)),
        Rule("evict_swa", _commanded(EvictSwa("r", LENGTH), SWEPT), (PREFILLS, DECODES)),
        Rule("finish", _commanded(Finish("r", K)), (DECODES,)),
        Rule("retract", _commanded(Retract("r", K)), (DECODES,)),
    )
}  # fmt: skip


class Moves:
    """All moves of a reference, explored when they are asked for: each state and each rule once."""

    def __init__(self, ref: SymbolicReference) -> None:
        self.ref = ref
        self._states: dict[Any, list[Path[Any]]] = {}
        self._moves: dict[Any, list[Path[Move]]] = {}

    def of(self, rule: Rule, mode: Mode) -> list[Path[Move]]:
        """Every path of the rule."""
        if (rule.name, mode) not in self._moves:
            self._moves[rule.name, mode] = [
                path
                for make in rule.states
                for state in self._before(make, mode)
                for path in explore(partial(rule.move, self.ref, state.result), state)
            ]
        return self._moves[rule.name, mode]

    def _before(self, make: State, mode: Mode) -> list[Path[Any]]:
        if (make, mode) not in self._states:
            self._states[make, mode] = list(explore(partial(make, self.ref, mode)))
        return self._states[make, mode]
