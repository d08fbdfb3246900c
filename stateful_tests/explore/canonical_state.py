"""States modulo symmetry: states that differ in what no rule asks have one key, and one representative.

A scope has finitely many states only because these differences are left out:

Names. A rule compares names for equality, nothing else; locks and holders are sorted by name, which no
    rule looks at. So the parts of a state (a session with its turn and lock, an ordinary request, a lock
    holder) are a multiset.
Texts, without a radix tree. Rules ask how long a text is and cut it (`text_len`, `text_cut`). The clauses
    READ and SES alone compare its tokens, with what was written for the same text. So a text stands for
    every other of its length, as long as those of different parts differ: each part has one serial.
Serials and letters of prompts, with a tree. Tokens are compared for equality. Their order would only
    decide between two nodes last used at one moment, but those lie on one path, where the upper one goes
    first. Serials in use are numbered from 1 in their order. Letters are exchanged where that leaves the
    prompts of the scope as they are.
Moments. Rules ask which of two is earlier. So moments become ages: 0 for the clock, -1 for the moment
    before that anything was used at, and so on; full and SWA apart. Without a window no rule asks swa_used.
`swept` and `known`. Only the reason UNFAITHFUL asks them, so free mode keeps neither. In faithful mode they
    are compared with targets past origin, so a `swept` up to origin is none.

test_explorer.py compares all of this with a search that leaves nothing out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from itertools import permutations
from typing import Any, NamedTuple, TypeVar

import msgspec

from reference import model
from reference.commands import POSITION_BITS, SHARED, Chunk, Command, Draft, Mode, Piece, shared_serial
from reference.ledger import Cursors, Phase, Request, Round, Session, State, Text, text_len
from reference.prefix_cache import lock_holders
from reference.tree import Key as Tokens
from reference.tree import Lock, Node, Tree
from stateful_tests.coverage.scopes import Scope
from stateful_tests.explore import enumeration
from stateful_tests.explore.enumeration import Names

# Sessions, ordinary requests and lock holders, each encoded and in the order of their bytes; the nodes of the
# tree. The same in every process.
Key = tuple[tuple[bytes, ...], tuple[bytes, ...], tuple[bytes, ...], bytes]


class RequestPart(NamedTuple):
    """What rules ask of a request."""

    serial: int
    history: Text
    origin: int
    output: int
    phase: Phase
    started: bool
    swept: int
    known: tuple[int, int]
    cursors: Cursors | None
    in_flight: tuple[Round, ...]


class Part(NamedTuple):
    """A session (with its turn), an ordinary request, or a lock holder; lock: (key, swa_from)."""

    history: Text = ()
    slot: Cursors | None = None
    closing: bool = False
    turn: RequestPart | None = None
    lock: tuple[Tokens, int] | None = None


class Renaming(NamedTuple):
    """How a state differs from its representative: name there -> name here, letter there -> letter here."""

    names: dict[str, str]
    letters: dict[str, str]


_Built = tuple[Session | None, Request | None, Lock | None]
_encode = msgspec.msgpack.encode
_part = msgspec.msgpack.Decoder(Part).decode
_nodes_of = msgspec.msgpack.Decoder(tuple[Node, ...]).decode
_NO_TREE = _encode(())
KEPT = 50_000  # entries of a cache

_K = TypeVar("_K")
_V = TypeVar("_V")


class Cache(dict[_K, _V]):
    """A dictionary that fills itself, and starts again when it is full."""

    def __init__(self, make: Callable[[_K], _V]) -> None:
        self._make = make

    def __missing__(self, key: _K) -> _V:
        if len(self) >= KEPT:
            self.clear()
        made = self[key] = self._make(key)
        return made


class CanonicalStates:
    """Keys of the states of a scope, and the representative of each.

    In a representative sessions are called s1, s2, ..., the turn of s2 is r2, ordinary requests have the
    numbers after those, lock holders are h1, h2, ...
    """

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.fresh = Names(
            f"s{scope.sessions + 1}", f"r{scope.sessions + scope.ordinary + 1}", f"h{scope.lock_holders + 1}"
        )
        self.initial = model.initial(scope.geometry, scope.mode)
        self._orders = [order for order in permutations(range(len(scope.texts))) if self._symmetric(order)]
        # Each state shares most of its parts with others.
        self._encoded: Cache[tuple[Any, ...], bytes] = Cache(lambda unit: _encode(self._part(*unit)))
        self._aged: Cache[Tree, bytes] = Cache(lambda tree: _encode(with_ages(tree)))
        self._exchanged: Cache[tuple[bytes, bool, int], bytes] = Cache(self._exchange)
        self._built: Cache[tuple[bytes, int], _Built] = Cache(lambda part: self._build(*part))
        self._about: Cache[tuple[Any, ...], tuple[Command, ...]] = Cache(
            lambda group: tuple(self._commands(*group))
        )

    def _symmetric(self, order: tuple[int, ...]) -> bool:
        """Exchanging letters in this way changes something, but not which prompts there are."""
        letters = str.maketrans(self.scope.texts, "".join(self.scope.texts[i] for i in order))
        prompts = {prompt.translate(letters) for prompt in self.scope.prompts}
        return order != tuple(range(len(order))) and prompts == {*self.scope.prompts}

    # From a state to its key.

    def key(self, state: State) -> Key:
        """The key of a state."""
        return self._least(state)[0]

    def renaming(self, state: State) -> Renaming:
        """How a state differs from its representative."""
        _, groups, order = self._least(state)
        turns = {s.name: s.turn for s in state.sessions if s.turn is not None}
        names: dict[str, str] = {}
        first = {"s": 1, "r": 1 + self.scope.sessions, "h": 1}
        for letter, group in zip("srh", groups):
            for place, (_, name) in enumerate(sorted(group), first[letter]):
                names[f"{letter}{place}"] = name
                if letter == "s" and name in turns:
                    names[f"r{place}"] = turns[name]
        texts = self.scope.texts
        return Renaming(names, {texts[j]: texts[i] for i, j in enumerate(order)})

    def _least(self, state: State) -> tuple[Key, list[list[tuple[bytes, str]]], tuple[int, ...]]:
        """The key, which is the least over all orders of letters; parts with their names; the order."""
        if state.tree is not None:
            state = _numbered_from_one(state)
        groups = self._groups(state)
        tree = self._aged[state.tree._replace(locks=())] if state.tree is not None else _NO_TREE
        best, found = _packed(groups, tree), groups
        chosen: tuple[int, ...] = ()
        for at, order in enumerate(self._orders):
            other = [[(self._exchanged[part, False, at], name) for part, name in group] for group in groups]
            packed = _packed(other, self._exchanged[tree, True, at])
            if packed < best:
                best, found, chosen = packed, other, order
        return best, found, chosen

    def _groups(self, state: State) -> list[list[tuple[bytes, str]]]:
        """Sessions, ordinary requests and lock holders: what each is, encoded, and its name."""
        locks = {} if state.tree is None else {k.holder: (k.key, k.swa_from) for k in state.tree.locks}
        encoded, requests = self._encoded, {r.name: r for r in state.requests}
        return [
            [(encoded[s, requests.get(s.turn or ""), locks.get(s.name)], s.name) for s in state.sessions],
            [(encoded[None, r, locks.get(r.name)], r.name) for r in state.requests if r.session is None],
            [(encoded[None, None, locks[name]], name) for name in lock_holders(state)],
        ]

    def _part(
        self, session: Session | None, request: Request | None, lock: tuple[Tokens, int] | None
    ) -> Part:
        turn, tree = None, self.scope.geometry.tree
        if request is not None:
            r, faithful = request, self.scope.mode is Mode.FAITHFUL
            swept, known = (r.swept if r.swept > r.origin else 0, r.known) if faithful else (0, (0, 0))
            serial, history = (r.serial, r.history) if tree else (0, ())
            turn = RequestPart(
                serial, history, r.origin, r.output, r.phase, r.started, swept, known, r.cursors,
                r.in_flight,
            )  # fmt: skip
        if session is None:
            return Part(turn=turn, lock=lock)
        text = session.history if tree or not session.history else ((0, text_len(session.history)),)
        return Part(text, session.slot, session.closing, turn, lock)

    def _exchange(self, of: tuple[bytes, bool, int]) -> bytes:
        """A part, or the nodes of a tree, with the letters in another order."""
        encoded, tree, at = of
        texts, order = self.scope.texts, self._orders[at]
        serials = {shared_serial(texts[i]): shared_serial(texts[j]) for i, j in enumerate(order)}
        if tree:
            return _encode(_nodes(_nodes_of(encoded), serials))
        part = _part(encoded)
        turn, lock = part.turn, part.lock
        if turn is not None:
            turn = turn._replace(history=_text(turn.history, serials))
        if lock is not None:
            lock = _key(lock[0], serials), lock[1]
        return _encode(part._replace(history=_text(part.history, serials), turn=turn, lock=lock))

    # From a key to its representative.

    def state(self, key: Key) -> State:
        """The representative."""
        sessions, requests, locks = [], [], []
        for place, part in self._places(key):
            session, request, lock = self._built[part, place]
            if session is not None:
                sessions.append(session)
            if request is not None:
                requests.append(request)
            if lock is not None:
                locks.append(lock)
        requests.sort()
        state = self.initial._replace(sessions=tuple(sessions), requests=tuple(requests))
        if state.tree is None:
            return state._replace(serial=self.scope.sessions + self.scope.ordinary)
        tree = state.tree._replace(children=_nodes_of(key[3]), locks=tuple(sorted(locks)))
        state = state._replace(tree=tree)
        return state._replace(serial=max(_serials(state), default=0))

    def _places(self, key: Key) -> Iterator[tuple[int, bytes]]:
        """(place, part): places of sessions, then of ordinary requests, then of lock holders."""
        yield from enumerate(key[0])
        yield from enumerate(key[1], self.scope.sessions)
        yield from enumerate(key[2], self.scope.sessions + self.scope.ordinary)

    def _build(self, encoded: bytes, place: int) -> _Built:
        """Session, request and lock of the part in a place, under the names of the place."""
        part = _part(encoded)
        sessions, ordinary = self.scope.sessions, self.scope.ordinary
        holder = name = f"r{place + 1}"
        session = request = lock = None
        if place >= sessions + ordinary:
            holder = f"h{place - sessions - ordinary + 1}"
        elif place < sessions:
            holder, history = f"s{place + 1}", part.history
            if history and not self.scope.geometry.tree:
                history = ((place + 1, history[-1][1]),)
            turn = name if part.turn is not None else None
            session = Session(holder, history, part.slot, turn, part.closing)
        if part.turn is not None:
            owner = holder if session is not None else None
            request = Request(name, owner, part.turn.serial or place + 1, *part.turn[1:])
        if part.lock is not None:
            lock = Lock(holder, *part.lock)
        return session, request, lock

    # Commands.

    def commands(self, key: Key) -> list[Command]:
        """Every command of the scope in a representative, in a fixed order. Equal parts are asked once."""
        served = self.scope.sessions + self.scope.ordinary
        alone, running, last = [], [], None
        for place, part in self._places(key):
            if last != (part, at := (place >= self.scope.sessions) + (place >= served)):
                alone.append((part, place))
            last = part, at
            request = self._built[part, place][1]
            if self.scope.batches and request is not None and request.cursors is not None:
                running.append((part, place))
        pairs: dict[tuple[bytes, bytes, int], tuple[tuple[bytes, int], ...]] = {}
        for i, one in enumerate(running):
            for two in running[i + 1 :]:
                sessions = (one[1] < self.scope.sessions) + (two[1] < self.scope.sessions)
                pairs.setdefault((one[0], two[0], sessions), (one, two))
        found: list[Command] = []
        for group in (*((one,) for one in alone), *pairs.values(), tuple(map(len, key[:3]))):
            found += self._about[group]
        return found

    def _commands(self, *group: Any) -> Iterator[Command]:
        """Commands about one part in its place, about two; or, given how many there are, about none."""
        if isinstance(group[0], int):
            sessions, ordinary, holders = group
            return enumeration.of_nobody(self.scope, sessions, ordinary, holders, self.fresh)
        built = [self._built[part] for part in group]
        session, request, lock = built[0]
        if len(group) == 2:
            assert request is not None and built[1][1] is not None
            return enumeration.of_two(self.scope, request, built[1][1])
        if session is not None:
            return enumeration.of_session(self.scope, session, request, self.fresh)
        if request is not None:
            return enumeration.of_request(self.scope, request)
        assert lock is not None
        return enumeration.of_lock_holder(self.scope, lock.holder, lock.key)


def _packed(groups: list[list[tuple[bytes, str]]], tree: bytes) -> Key:
    sessions, ordinary, holders = (tuple(sorted([part for part, _ in group])) for group in groups)
    return sessions, ordinary, holders, tree


def with_ages(tree: Tree) -> tuple[Node, ...]:
    """The nodes with ages for moments: 0 is the clock."""
    full: set[int] = set()
    swa: set[int] = set()
    waiting = list(tree.children)
    while waiting:
        node = waiting.pop()
        full.add(node.full_used)
        swa.add(node.swa_used)
        waiting += node.children
    ages = {moment: -age for age, moment in enumerate(sorted(full, reverse=True))}
    start = 0 if tree.clock in swa else 1
    swa_ages = {moment: -age for age, moment in enumerate(sorted(swa, reverse=True), start)}
    if tree.window is None:
        swa_ages = dict.fromkeys(swa, 0)

    def aged(children: tuple[Node, ...]) -> tuple[Node, ...]:
        return tuple(
            sorted(
                Node(n.key, n.live, ages[n.full_used], swa_ages[n.swa_used], aged(n.children))
                for n in children
            )
        )

    return aged(tree.children)


def _serials(state: State) -> set[int]:
    """Serials of Submits that some text in the state has tokens of."""
    found = {serial for s in state.sessions for serial, _ in s.history}
    for request in state.requests:
        found.add(request.serial)
        found.update(serial for serial, _ in request.history)
    if state.tree is not None:
        for lock in state.tree.locks:
            found.update(token >> POSITION_BITS for token in lock.key)
        waiting = list(state.tree.children)
        while waiting:
            node = waiting.pop()
            found.update(token >> POSITION_BITS for token in node.key)
            waiting += node.children
    return {serial for serial in found if serial < SHARED}


def _numbered_from_one(state: State) -> State:
    """The state with the serials that are in use numbered from 1, in their order."""
    if not state.serial:
        return state
    used = sorted(_serials(state))
    if not used or used[-1] == len(used):
        return state
    serials = {serial: number for number, serial in enumerate(used, 1)}
    assert state.tree is not None
    return state._replace(
        sessions=tuple(s._replace(history=_text(s.history, serials)) for s in state.sessions),
        requests=tuple(
            r._replace(serial=serials[r.serial], history=_text(r.history, serials)) for r in state.requests
        ),
        tree=state.tree._replace(
            children=_nodes(state.tree.children, serials),
            locks=tuple(lock._replace(key=_key(lock.key, serials)) for lock in state.tree.locks),
        ),
    )


def _text(text: Text, serials: Mapping[int, int]) -> Text:
    return tuple((serials.get(serial, serial), end) for serial, end in text)


def _key(key: Tokens, serials: Mapping[int, int]) -> Tokens:
    low = (1 << POSITION_BITS) - 1
    return tuple(
        serials.get(t >> POSITION_BITS, t >> POSITION_BITS) << POSITION_BITS | t & low for t in key
    )


def _nodes(children: tuple[Node, ...], serials: Mapping[int, int]) -> tuple[Node, ...]:
    return tuple(
        sorted(n._replace(key=_key(n.key, serials), children=_nodes(n.children, serials)) for n in children)
    )


# Commands under other names.

_NAMING = ("session", "request", "requests", "lanes", "holder")


def relabel(command: Command, renaming: Renaming, state: State) -> Command:
    """A command of the state that stands for `state`, in the names of `state` itself.

    Whoever is not there yet gets the first name that nobody has.
    """
    names = dict(renaming.names)
    taken = {s.name for s in state.sessions} | {r.name for r in state.requests} | set(lock_holders(state))

    def name(value: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, (Chunk, Draft)):
            return replace(value, request=name(value.request))
        if value not in names:
            number = 1
            while f"{value[0]}{number}" in taken:
                number += 1
            names[value] = f"{value[0]}{number}"
            taken.add(names[value])
        return names[value]

    changed: dict[str, Any] = {}
    for field in fields(command):
        value = getattr(command, field.name)
        if field.name in _NAMING:
            changed[field.name] = tuple(map(name, value)) if isinstance(value, tuple) else name(value)
        elif field.name == "prompt" and renaming.letters:
            letters = renaming.letters
            changed["prompt"] = tuple(Piece(letters.get(p.text, p.text), p.tokens) for p in value)
    return replace(command, **changed) if changed else command
