"""States modulo symmetry: `representative(state)` is one state for all that differ in what no rule reads.

A scope has finitely many states only because these differences are left out:

Names. A rule compares names for equality, nothing else; locks and holders are sorted by name, which no
    rule looks at. So the parts of a state (a session with its turn and lock, an ordinary request, a lock
    holder) are a multiset.
Texts, without a radix tree. Rules read how long a text is, and cut it (`text_len`, `text_cut`). The clauses
    READ and SES alone compare its tokens, with what was written for the same text. So a text stands for
    every other of its length, as long as those of different parts differ: each part has one serial.
Serials and letters of prompts, with a tree. Tokens are compared for equality. Their order would only
    decide between two nodes last used at one moment, but those lie on one path, where the upper one goes
    first. Serials in use are numbered from 1 in their order. Letters are exchanged where that leaves the
    prompts of the scope as they are.
Moments. Rules compare which of two is earlier. So moments become ages, for full, SWA and states apart: 0 is
the clock, -1 the moment before that anything was used at, and so on. Without a window no rule reads
    swa_used. 0 as the moment of a state says that there is none, so ages of states begin at -1.
`evicted` and `processed_outputs`. The reason UNFAITHFUL alone needs them, so free mode keeps neither. In
    faithful mode they are compared with targets from origin on, so a `evicted` below origin is none.

test_explorer.py compares all of this with a search that leaves nothing out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from functools import lru_cache
from itertools import combinations, count, permutations
from typing import Any, NamedTuple

from reference import model
from reference.commands import Chunk, Command, Draft, Mode, Piece
from reference.state import Request, Session, State, Text, text_len
from reference.prefix_cache import lock_holders
from reference.radix_tree import Key, Lock, Node, Tree
from reference.token_ids import SHARED, position_of, serial_of, shared_serial, token_id
from stateful_tests.generate.exploration_scope import Scope
from stateful_tests.explore import enumeration
from stateful_tests.generate.commands.harness import Names, Present

Nameless = tuple[Any, ...]  # sessions, ordinary requests, lock holders, and the tree's nodes
KEPT = 50_000  # parts that are remembered, and representatives


class Part(NamedTuple):
    """A session with its turn and lock, an ordinary request, or a lock holder, without names.

    lock: key, swa_from and state.
    history, slot, closing, state: of a session. What there is not is (), so that parts of a kind can be
        sorted.
    """

    lock: tuple[Any, ...]
    turn: Any = ()
    history: Text = ()
    slot: Any = ()
    closing: bool = False
    state: int = 0


class Parts(NamedTuple):
    """A state as parts with their names (sessions, ordinary requests, lock holders) and the tree's nodes."""

    groups: tuple[list[tuple[Part, str]], ...]
    nodes: tuple[Node, ...]

    @property
    def nameless(self) -> Nameless:
        return *(tuple(sorted(part for part, _ in group)) for group in self.groups), self.nodes


class Renaming(NamedTuple):
    """How a state differs from its representative: name there -> name here, letter there -> letter here."""

    names: dict[str, str]
    letters: dict[str, str]


class Representatives:
    """The representatives of a scope's states.

    In a representative sessions are called s1, s2, ..., the turn of s2 is r2, ordinary requests have the
    numbers after those, lock holders are h1, h2, ...
    """

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.initial = model.initial(scope.geometry, scope.mode)
        self._fresh = Names(
            f"s{scope.sessions + 1}",
            f"r{scope.sessions + scope.ordinary + 1}",
            f"h{scope.lock_holders + 1}",
        )
        orders = permutations(range(len(scope.texts))) if scope.geometry.tree else ()
        self._orders = [order for order in orders if self._symmetric(order)]
        self._build_cached = lru_cache(maxsize=KEPT)(self._build_state)
        self._first = {"s": 1, "r": 1 + scope.sessions, "h": 1}

    def _symmetric(self, order: tuple[int, ...]) -> bool:
        """Return whether exchanging letters by this order changes something, but not which prompts there
        are."""
        letters = str.maketrans(self.scope.texts, "".join(self.scope.texts[i] for i in order))
        prompts = {prompt.translate(letters) for prompt in self.scope.prompts}
        return order != tuple(range(len(order))) and prompts == {*self.scope.prompts}

    def of(self, state: State) -> State:
        """Return the representative of a state."""
        return self._build_cached(self._least_parts(state)[1])

    def renaming(self, state: State) -> Renaming:
        """Return how a state differs from its representative."""
        parts, _, order = self._least_parts(state)
        turns = {s.name: s.turn for s in state.sessions if s.turn is not None}
        names: dict[str, str] = {}
        for letter, group in zip("srh", parts.groups):
            for place, (_, name) in enumerate(sorted(group), self._first[letter]):
                names[f"{letter}{place}"] = name
                if letter == "s" and name in turns:
                    names[f"r{place}"] = turns[name]
        texts = self.scope.texts
        return Renaming(names, {texts[j]: texts[i] for i, j in enumerate(order)})

    # -- from a state to its parts ----------------------------------------------------------------

    def _least_parts(self, state: State) -> tuple[Parts, Nameless, tuple[int, ...]]:
        """Return the parts of a state, in the order of letters that makes them least, without names as well;
        and that order."""
        if state.tree is not None:
            state = _renumber(state)
        best = self._parts(state)
        best_order = tuple[int, ...]()
        texts = self.scope.texts
        usual = best
        least = best.nameless
        for order in self._orders:
            serials = {
                shared_serial(texts[i]): shared_serial(texts[j]) for i, j in enumerate(order)
            }
            groups = tuple(
                [(_with_letters(p, serials), name) for p, name in group] for group in usual.groups
            )
            other = Parts(groups, _nodes(usual.nodes, serials))
            if (nameless := other.nameless) < least:
                best = other
                best_order = order
                least = nameless
        return best, least, best_order

    def _parts(self, state: State) -> Parts:
        locks = {} if state.tree is None else {k.holder: tuple(k[1:]) for k in state.tree.locks}
        requests = {r.name: r for r in state.requests}
        sessions = [(s, requests.get(s.turn or ""), s.name) for s in state.sessions]
        groups = (
            [
                (self._part(session, turn, locks.get(name, ())), name)
                for session, turn, name in sessions
            ],
            [
                (self._part(None, request, locks.get(request.name, ())), request.name)
                for request in state.requests
                if request.session is None
            ],
            [(Part(locks[name]), name) for name in lock_holders(state)],
        )
        return Parts(groups, () if state.tree is None else with_ages(state.tree))

    def _part(
        self, session: Session | None, request: Request | None, lock: tuple[Any, ...]
    ) -> Part:
        turn: tuple[Any, ...] = ()
        if request is not None:
            turn = request._replace(name="", session=None)
            if self.scope.mode is not Mode.FAITHFUL:
                turn = turn._replace(evicted=0, processed_outputs=(0, 0))
            elif request.evicted < request.origin:
                turn = turn._replace(evicted=0)
            if not self.scope.geometry.tree:
                turn = turn._replace(serial=0, history=())
        if session is None:
            return Part(lock, turn)
        history = session.history
        if history and not self.scope.geometry.tree:
            history = ((0, text_len(history)),)
        return Part(lock, turn, history, session.slot or (), session.closing, session.state)

    # -- from parts to the representative ---------------------------------------------------------

    def _build_state(self, nameless: Nameless) -> State:
        sessions = []
        requests = []
        locks = []
        for place, part in self._places(nameless):
            session, request, lock = _holders_named(self.scope, place, part)
            sessions += [session] if session is not None else []
            requests += [request] if request is not None else []
            locks += [lock] if lock is not None else []
        requests.sort()
        state = self.initial._replace(sessions=tuple(sessions), requests=tuple(requests))
        if state.tree is None:
            return state._replace(serial=self.scope.sessions + self.scope.ordinary)
        tree = state.tree._replace(children=nameless[-1], locks=tuple(sorted(locks)))
        state = state._replace(tree=tree)
        return state._replace(serial=max(_serials(state), default=0))

    def _kind_of_place(self, place: int) -> int:
        """Return 0 for a session, 1 for an ordinary request, 2 for a lock holder (see _places)."""
        if place < self.scope.sessions:
            return 0
        return 1 if place < self.scope.sessions + self.scope.ordinary else 2

    def _places(self, nameless: Nameless) -> Iterator[tuple[int, Part]]:
        """Return places of sessions, then of ordinary requests, then of lock holders."""
        served = self.scope.sessions + self.scope.ordinary
        for first_place, group in zip((0, self.scope.sessions, served), nameless):
            yield from enumerate(group, first_place)

    # -- commands ---------------------------------------------------------------------------------

    def commands(self, representative: State) -> list[Command]:
        """Return every command of the scope in a representative, in a fixed order. Equal parts
        give theirs once."""
        scope = self.scope
        parts = self._parts(representative)
        served = scope.sessions + scope.ordinary
        alone: dict[tuple[int, Part], int] = {}
        running: list[tuple[int, Part]] = []
        for place, part in self._places(parts.nameless):
            alone.setdefault((self._kind_of_place(place), part), place)
            if scope.batches and place < served and part.turn and part.turn.cursors is not None:
                running.append((place, part))
        pairs: dict[tuple[Part, Part, int], tuple[tuple[int, Part], ...]] = {}
        for one, two in combinations(running, 2):
            sessions = sum(place < scope.sessions for place, _ in (one, two))
            pairs.setdefault((one[1], two[1], sessions), (one, two))
        commands: list[Command] = []
        for (_, part), place in alone.items():
            commands += _about(scope, self._fresh, ((place, part),))
        for pair in pairs.values():
            commands += _about(scope, self._fresh, pair)
        return commands + _of_nobody(scope, self._fresh, Present(*map(len, parts.groups)))


@lru_cache(maxsize=KEPT)
def _holders_named(
    scope: Scope, place: int, part: Part
) -> tuple[Session | None, Request | None, Lock | None]:
    """Return session, request and lock of the part in a place, under the names of the place."""
    served = scope.sessions + scope.ordinary
    holder = f"r{place + 1}"
    session = request = None
    if place >= served:
        return None, None, Lock(f"h{place - served + 1}", *part.lock)
    turn = part.turn
    if place < scope.sessions:
        holder = f"s{place + 1}"
        history = part.history
        if history and not scope.geometry.tree:
            history = ((place + 1, history[-1][1]),)
        name = f"r{place + 1}" if turn else None
        session = Session(holder, history, part.slot or None, name, part.closing, part.state)
    if turn:
        owner = holder if session is not None else None
        request = turn._replace(
            name=f"r{place + 1}", session=owner, serial=turn.serial or place + 1
        )
    return session, request, Lock(holder, *part.lock) if part.lock else None


@lru_cache(maxsize=KEPT)
def _about(scope: Scope, fresh: Names, parts: tuple[tuple[int, Part], ...]) -> list[Command]:
    """Return commands about one part in its place, or about two."""
    built = [_holders_named(scope, place, part) for place, part in parts]
    session, request, lock = built[0]
    if len(built) == 2:
        assert request is not None and built[1][1] is not None
        return list(enumeration.of_two(scope, request, built[1][1]))
    if session is not None:
        return list(enumeration.of_session(scope, session, request, fresh))
    if request is not None:
        return list(enumeration.of_request(scope, request))
    assert lock is not None
    return list(enumeration.of_lock_holder(scope, lock.holder, lock.key))


@lru_cache(maxsize=64)
def _of_nobody(scope: Scope, fresh: Names, present: Present) -> list[Command]:
    return list(enumeration.of_nobody(scope, present, fresh))


def _with_letters(part: Part, serials: Mapping[int, int]) -> Part:
    """Return the part with other letters in its texts."""
    lock = part.lock
    turn = part.turn
    return part._replace(
        lock=(_key(lock[0], serials), *lock[1:]) if lock else (),
        turn=turn._replace(history=_text(turn.history, serials)) if turn else (),
        history=_text(part.history, serials),
    )


def with_ages(tree: Tree) -> tuple[Node, ...]:
    """Return the nodes with ages for moments: 0 is the clock."""
    every = list(_every(tree.children))
    full = {node.full_used for node in every}
    swa = {node.swa_used for node in every}
    ages = {moment: -age for age, moment in enumerate(sorted(full, reverse=True))}
    start = 0 if tree.clock in swa else 1
    swa_ages = {moment: -age for age, moment in enumerate(sorted(swa, reverse=True), start)}
    if tree.window is None:
        swa_ages = dict.fromkeys(swa, 0)
    states = sorted({node.state_used for node in every} - {0}, reverse=True)
    state_ages = {0: 0} | {moment: age for age, moment in zip(count(-1, -1), states)}

    def nodes_with_ages(children: tuple[Node, ...]) -> tuple[Node, ...]:
        return tuple(sorted(
            Node(
                n.key, n.live, ages[n.full_used], swa_ages[n.swa_used], nodes_with_ages(n.children),
                state_ages[n.state_used],
            )
            for n in children
        ))  # fmt: skip

    return nodes_with_ages(tree.children)


def _every(children: tuple[Node, ...]) -> Iterator[Node]:
    for node in children:
        yield node
        yield from _every(node.children)


def _serials(state: State) -> set[int]:
    """Return the serials of Submits that some text in the state has tokens of."""
    serials = {serial for s in state.sessions for serial, _ in s.history}
    for request in state.requests:
        serials.add(request.serial)
        serials.update(serial for serial, _ in request.history)
    if state.tree is not None:
        keys = [
            *(lock.key for lock in state.tree.locks),
            *(node.key for node in _every(state.tree.children)),
        ]
        serials.update(serial_of(token) for key in keys for token in key)
    return {serial for serial in serials if serial < SHARED}


def _renumber(state: State) -> State:
    """Return the state with the serials that are in use numbered from 1, in their order."""
    used = sorted(_serials(state)) if state.serial else []
    if not used or used[-1] == len(used):
        return state
    serials = {serial: number for number, serial in enumerate(used, 1)}
    assert state.tree is not None
    return state._replace(
        sessions=tuple(s._replace(history=_text(s.history, serials)) for s in state.sessions),
        requests=tuple(
            r._replace(serial=serials.get(r.serial, r.serial), history=_text(r.history, serials))
            for r in state.requests
        ),
        tree=state.tree._replace(
            children=_nodes(state.tree.children, serials),
            locks=tuple(lock._replace(key=_key(lock.key, serials)) for lock in state.tree.locks),
        ),
    )


def _text(text: Text, serials: Mapping[int, int]) -> Text:
    return tuple((serials.get(serial, serial), end) for serial, end in text)


def _key(key: Key, serials: Mapping[int, int]) -> Key:
    numbered = ((serial_of(token), position_of(token)) for token in key)
    return tuple(token_id(serials.get(serial, serial), position) for serial, position in numbered)


def _nodes(children: tuple[Node, ...], serials: Mapping[int, int]) -> tuple[Node, ...]:
    return tuple(
        sorted(
            n._replace(key=_key(n.key, serials), children=_nodes(n.children, serials))
            for n in children
        )
    )


# -- commands under other names -------------------------------------------------------------------

_NAMING = ("session", "request", "requests", "lanes", "holder")


def relabel(command: Command, renaming: Renaming, state: State) -> Command:
    """Return a command of the state that stands for `state`, in the names of `state` itself.

    A request or session that is not there yet gets the first free name.
    """
    names = dict(renaming.names)
    names_in_use = (
        {s.name for s in state.sessions}
        | {r.name for r in state.requests}
        | set(lock_holders(state))
    )

    def name(value: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, (Chunk, Draft)):
            return replace(value, request=name(value.request))
        if value not in names:
            number = 1
            while f"{value[0]}{number}" in names_in_use:
                number += 1
            names[value] = f"{value[0]}{number}"
            names_in_use.add(names[value])
        return names[value]

    changed: dict[str, Any] = {}
    for field in fields(command):
        value = getattr(command, field.name)
        if field.name in _NAMING:
            changed[field.name] = (
                tuple(map(name, value)) if isinstance(value, tuple) else name(value)
            )
        elif field.name == "prompt" and renaming.letters:
            letters = renaming.letters
            changed["prompt"] = tuple(Piece(letters.get(p.text, p.text), p.tokens) for p in value)
    return replace(command, **changed) if changed else command
