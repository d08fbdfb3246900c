"""States up to what no rule asks: each class of equal states has one key, and one state that stands for it.

A scope has finitely many states only if differences that lead nowhere are left out. These are, and why:

Names. A rule compares names for equality, nothing else; locks and holders are sorted by name, which no
    rule looks at. So the units of a state (a session with its turn and lock, an ordinary request, a lock
    holder) are a multiset.
Texts, without a radix tree. Rules ask how long a text is and cut it (`text_len`, `text_cut`); what its
    tokens are is compared by the clauses READ and SES alone, which compare it with what was written for
    the same text. So a text is as good as any other of its length, as long as those of different units
    differ: each unit has one serial for all of its tokens.
Serials and letters of prompts, with a tree. Tokens are compared for equality; their order would settle who
    goes first of two nodes last used at one moment, but those lie on one path, where the upper one goes
    first. Serials that are in use are numbered from 1, their order kept; letters are exchanged freely.
Moments. Rules ask which of two is earlier. So moments become ages: 0 for the clock, -1 for the moment
    before that anything was used at, and so on; each component by itself, but for what 0 is. Without a
    window nobody asks swa_used.
`swept` and `known`. Only UNFAITHFUL asks them, so free mode keeps neither. In faithful mode they are
    compared with targets past origin, so a `swept` up to origin is none.

test_explorer.py compares all of this with a search that leaves nothing out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from itertools import permutations
from typing import Any, NamedTuple

from reference import model
from reference.commands import POSITION_BITS, SHARED, Chunk, Command, Draft, Mode, Piece, shared_serial
from reference.ledger import Cursors, Free, Phase, Request, Session, State, Text, free, text_len
from reference.prefix_cache import lock_holders
from reference.tree import Key, Lock, Node, Tree
from stateful_tests.coverage.scopes import Scope
from stateful_tests.explore import enumeration as moves
from stateful_tests.explore.enumeration import Names

_BITS = 24  # of a unit's number in a key: there are never so many
_MASK = (1 << _BITS) - 1


class Turn(NamedTuple):
    """What counts of a request."""

    serial: int
    history: Text
    origin: int
    output: int
    phase: Phase
    started: bool
    swept: int
    known: tuple[int, int]
    cursors: Cursors | None


class Unit(NamedTuple):
    """A session (with its turn), an ordinary request, or a lock holder; lock: (key, swa_from)."""

    history: Text = ()
    slot: Cursors | None = None
    closing: bool = False
    turn: Turn | None = None
    lock: tuple[Key, int] | None = None


class Renaming(NamedTuple):
    """What is called differently in a state and in the one that stands for it: name there -> name here."""

    names: dict[str, str]
    letters: dict[str, str]


class Quotient:
    """Keys of the states of a scope. A key is a whole number; `state` gives the state that stands for it.

    In that state sessions are called s1, s2, ..., the turn of s2 is r2, ordinary requests have the
    numbers after those, lock holders are h1, h2, ...
    """

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.slots = (scope.sessions, scope.ordinary, scope.lock_holders)
        self.fresh = Names(
            f"s{scope.sessions + 1}", f"r{scope.sessions + scope.ordinary + 1}", f"h{scope.lock_holders + 1}"
        )
        self.initial = model.initial(scope.geometry, scope.mode)
        self.values: list[Any] = [None]  # by number: units, and trees as the children of their roots
        self._numbers: dict[Any, int] = {}
        self._built: dict[tuple[int, int], tuple[Session | None, Request | None, Lock | None]] = {}
        self._aged: dict[Any, tuple[Node, ...]] = {}
        self._relettered: dict[tuple[int, int], int] = {}
        orders = permutations(range(len(scope.texts)))
        self._orders = [order for order in orders if order != tuple(range(len(order)))]

    def number(self, value: Any) -> int:
        """The number of a unit or tree; equal ones have equal numbers."""
        found = self._numbers.get(value)
        if found is None:
            found = self._numbers[value] = len(self.values)
            self.values.append(value)
            assert found <= _MASK, "more units than a key can name"
        return found

    @property
    def orders(self) -> int:
        """In how many other ways the letters of prompts can be ordered."""
        return len(self._orders)

    # From a state to its key.

    def key(self, state: State) -> int:
        """The key of a state."""
        return self._least(state)[0]

    def renaming(self, state: State) -> Renaming:
        """How a state differs from the one that stands for it."""
        _, groups, at = self._least(state)
        turns = {s.name: s.turn for s in state.sessions if s.turn is not None}
        return self._renaming(groups, at, turns)

    def _least(self, state: State) -> tuple[int, list[list[tuple[int, str]]], int | None]:
        """The key, which is the least over all orders of letters; units by number and name; the order."""
        if state.tree is not None:
            state = _numbered_from_one(state)
        groups, tree = self._numbered(state)
        best, order = self.pack([sorted((n for n, _ in g), reverse=True) for g in groups], tree), None
        for at in range(len(self._orders)):
            other = [sorted((self.exchanged(n, at) for n, _ in g), reverse=True) for g in groups]
            packed = self.pack(other, self.exchanged(tree, at) if tree else 0)
            if packed < best:
                best, order = packed, at
        return best, groups, order

    def pack(self, groups: list[list[int]], tree: int) -> int:
        """The key of sorted numbers of sessions, ordinary requests and lock holders, and of the tree."""
        key, at = tree, _BITS
        for numbers, room in zip(groups, self.slots):
            for number in numbers:
                key |= number << at
                at += _BITS
            at += _BITS * (room - len(numbers))
        return key

    def unpack(self, key: int) -> tuple[list[list[int]], int]:
        """Numbers of sessions, ordinary requests and lock holders, without the places that are empty; the
        tree."""
        tree, groups = key & _MASK, []
        key >>= _BITS
        for room in self.slots:
            numbers = []
            for _ in range(room):
                if key & _MASK:
                    numbers.append(key & _MASK)
                key >>= _BITS
            groups.append(numbers)
        return groups, tree

    def _numbered(self, state: State) -> tuple[list[list[tuple[int, str]]], int]:
        """(number, name) of sessions, of ordinary requests and of lock holders; the number of the tree."""
        locks = {} if state.tree is None else {k.holder: (k.key, k.swa_from) for k in state.tree.locks}
        requests = {r.name: r for r in state.requests}
        sessions = [
            (self.number(self.session_unit(s, requests.get(s.turn or ""), locks.get(s.name))), s.name)
            for s in state.sessions
        ]
        ordinary = [
            (self.number(self.request_unit(r, locks.get(r.name))), r.name)
            for r in state.requests
            if r.session is None
        ]
        visitors = [(self.number(Unit(lock=locks[name])), name) for name in lock_holders(state)]
        return [sessions, ordinary, visitors], self._tree(state)

    def session_unit(
        self, session: Session, turn: Request | None, lock: tuple[Key, int] | None = None
    ) -> Unit:
        """What counts of a session."""
        made = None if turn is None else self._turn(turn)
        return Unit(self._text(session.history), session.slot, session.closing, made, lock)

    def request_unit(self, request: Request, lock: tuple[Key, int] | None = None) -> Unit:
        """What counts of an ordinary request."""
        return Unit(turn=self._turn(request), lock=lock)

    def _text(self, text: Text) -> Text:
        if self.scope.geometry.tree or not text:
            return text
        return ((0, text_len(text)),)

    def _turn(self, r: Request) -> Turn:
        swept, known = r.swept if r.swept > r.origin else 0, r.known
        if self.scope.mode is Mode.FREE:
            swept, known = 0, (0, 0)
        serial, history = (r.serial, r.history) if self.scope.geometry.tree else (0, ())
        return Turn(serial, history, r.origin, r.output, r.phase, r.started, swept, known, r.cursors)

    def _tree(self, state: State) -> int:
        tree = state.tree
        if tree is None or not tree.children:
            return 0
        seen = (tree.children, tree.clock)
        aged = self._aged.get(seen)
        if aged is None:
            if len(self._aged) > 100_000:
                self._aged.clear()
            aged = self._aged[seen] = with_ages(tree)
        return self.number(aged)

    def exchanged(self, number: int, at: int) -> int:
        """The number of the same with the letters in another order."""
        known = self._relettered.get((number, at))
        if known is None:
            order = self._orders[at]
            serials = {
                shared_serial(self.scope.texts[i]): shared_serial(self.scope.texts[j])
                for i, j in enumerate(order)
            }
            known = self._relettered[number, at] = self.number(_relettered(self.values[number], serials))
        return known

    def _renaming(
        self, groups: list[list[tuple[int, str]]], at: int | None, turns: dict[str, str]
    ) -> Renaming:
        names: dict[str, str] = {}
        first = {"s": 1, "r": 1 + self.scope.sessions, "h": 1}
        for letter, group in zip("srh", groups):
            found = [(n if at is None else self.exchanged(n, at), name) for n, name in group]
            for place, (_, name) in enumerate(sorted(found, reverse=True), first[letter]):
                names[f"{letter}{place}"] = name
                if letter == "s" and name in turns:
                    names[f"r{place}"] = turns[name]
        letters = {}
        if at is not None:
            letters = {self.scope.texts[j]: self.scope.texts[i] for i, j in enumerate(self._orders[at])}
        return Renaming(names, letters)

    # From a key to its state.

    def state(self, key: int) -> State:
        """The state that stands for a key."""
        groups, tree = self.unpack(key)
        sessions, requests, locks = [], [], []
        place = 0
        for numbers, room in zip(groups, self.slots):
            for at, number in enumerate(numbers, place):
                session, request, lock = self._built.get((number, at)) or self._build(number, at)
                if session is not None:
                    sessions.append(session)
                if request is not None:
                    requests.append(request)
                if lock is not None:
                    locks.append(lock)
            place += room
        requests.sort()
        state = self.initial._replace(sessions=tuple(sessions), requests=tuple(requests))
        if state.tree is None:
            return state._replace(serial=place)
        made = state.tree._replace(children=self.values[tree] or (), locks=tuple(sorted(locks)))
        state = state._replace(tree=made)
        return state._replace(serial=max(_serials(state), default=0))

    def _build(self, number: int, at: int) -> tuple[Session | None, Request | None, Lock | None]:
        """Session, request and lock of the unit in a place, under the names of the place."""
        unit: Unit = self.values[number]
        sessions, ordinary, _ = self.slots
        name = f"s{at + 1}" if at < sessions else f"r{at + 1}"
        session = request = lock = None
        if at >= sessions + ordinary:
            name = f"h{at - sessions - ordinary + 1}"
        elif at < sessions:
            turn = f"r{at + 1}" if unit.turn is not None else None
            session = Session(name, self._own(unit.history, at), unit.slot, turn, unit.closing)
        if unit.turn is not None:
            serial = unit.turn.serial or at + 1
            request = Request(
                f"r{at + 1}", name if session else None, serial, *unit.turn[1:]
            )
        if unit.lock is not None:
            lock = Lock(name, *unit.lock)
        made = self._built[number, at] = session, request, lock
        return made

    def _own(self, text: Text, at: int) -> Text:
        """A text of which only the length counts, as that of the unit in this place."""
        return text if self.scope.geometry.tree or not text else ((at + 1, text[-1][1]),)

    # Commands.

    def commands(self, key: int) -> list[Command]:
        """Every command of the scope in the state that stands for a key, in a fixed order."""
        found: list[Command] = []
        for group in self.groups(key):
            found += self.about(key, group)
        return found

    def groups(self, key: int) -> list[tuple[int, ...]]:
        """Whom commands are about: places of one unit, of two, () for none. Equal units are asked once."""
        numbers, _ = self.unpack(key)
        alone, runs, place = [], [], 0
        for kind, (units, room) in enumerate(zip(numbers, self.slots)):
            for at, number in enumerate(units):
                if at == 0 or units[at - 1] != number:
                    alone.append((place + at,))
                if kind < 2 and self.values[number].turn is not None:
                    runs.append((place + at, number))
            place += room
        pairs: dict[tuple[int, ...], tuple[int, ...]] = {}
        for i, (a, one) in enumerate(runs) if self.scope.batches else ():
            for b, two in runs[i + 1 :]:
                if self.values[one].turn.cursors is not None and self.values[two].turn.cursors is not None:
                    pairs.setdefault((one, two, (a < self.slots[0]) + (b < self.slots[0])), (a, b))
        return [*alone, *pairs.values(), ()]

    def about(self, key: int, group: tuple[int, ...]) -> Iterator[Command]:
        """The commands about a group, in the names of the state that stands for the key."""
        numbers, _ = self.unpack(key)
        if not group:
            sessions, ordinary, visitors = map(len, numbers)
            yield from moves.of_nobody(self.scope, sessions, ordinary, visitors, self.fresh)
            return
        flat: dict[int, int] = {}
        place = 0
        for units, room in zip(numbers, self.slots):
            flat.update(enumerate(units, place))
            place += room
        built = [self._built.get((flat[at], at)) or self._build(flat[at], at) for at in group]
        session, request, lock = built[0]
        if len(group) == 2:
            assert request is not None and built[1][1] is not None
            yield from moves.of_two(self.scope, request, built[1][1])
        elif session is not None:
            yield from moves.of_session(self.scope, session, request, self.fresh)
        elif request is not None:
            yield from moves.of_request(self.scope, request)
        else:
            assert lock is not None
            yield from moves.of_lock_holder(self.scope, lock.holder, lock.key)

    def free(self, key: int) -> Free:
        """What is left in the state that stands for a key."""
        return free(self.state(key))


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


def _key(key: Key, serials: Mapping[int, int]) -> Key:
    low = (1 << POSITION_BITS) - 1
    return tuple(
        serials.get(t >> POSITION_BITS, t >> POSITION_BITS) << POSITION_BITS | t & low for t in key
    )


def _nodes(children: tuple[Node, ...], serials: Mapping[int, int]) -> tuple[Node, ...]:
    return tuple(
        sorted(n._replace(key=_key(n.key, serials), children=_nodes(n.children, serials)) for n in children)
    )


def _relettered(value: Any, serials: Mapping[int, int]) -> Any:
    """A unit or a tree with other shared texts."""
    if not isinstance(value, Unit):
        return _nodes(value, serials)
    turn = value.turn
    if turn is not None:
        turn = turn._replace(history=_text(turn.history, serials))
    lock = None if value.lock is None else (_key(value.lock[0], serials), value.lock[1])
    return value._replace(history=_text(value.history, serials), turn=turn, lock=lock)


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
