"""What the rules do to units whose lengths are unknown: `model.step` traced, nothing written anew.

A unit is a session with its turn, or an ordinary request. Without a radix tree a command about one unit, or
two, reads of the others only what they leave free. So a second copy of the reference steps a state that has
these units alone, in pools as large as the others leave them; the commands are those of a second copy of
`moves`, what counts of a unit is said by one of `quotient`, situations by one of `situations`. Lengths are
`traced.Number`s: one trace serves all units of a shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

from reference.commands import Command, Done, Mode
from stateful_tests.scopes import Scope
from stateful_tests.second_copy import SecondCopy
from stateful_tests.traced import (
    BUILTINS, LOOPS, Expressions, Loop, Run, Tree, current, names_in, numbers_in, traced,
)  # fmt: skip

FREE = ("full", "swa", "rows")  # columns: pages and rows that the other units leave


class Shape(NamedTuple):
    """What is not a length of a unit. phase: of its request, "" without one."""

    session: bool
    history: bool
    slot: bool
    closing: bool
    phase: str
    started: bool
    cursors: bool


# Lengths of a unit, in the order in which a word has them; 0 where the shape has none.
_TEXT, _SLOT = ("history",), ("slot_C", "slot_A", "slot_E")
_TURN, _ENVIRONMENT, _CURSORS = ("origin", "output"), ("swept", "known", "known_next"), ("C", "A", "E")

New = tuple[Shape, tuple[int, ...]]  # a unit afterwards: its shape, and the expressions of its lengths


class Result(NamedTuple):
    """The situation, and what has become of each unit (None: gone); no units: the command was refused."""

    situation: str
    units: tuple[New | None, ...] | None


@dataclass
class Template:
    """A command with its parameters: all numbers of `loops`, in this order."""

    command: Command
    loops: tuple[Loop, ...]
    results: Tree[Result]

    @property
    def refused(self) -> str | None:
        """The situation, where the command is refused whatever the lengths are, once that was traced."""
        root = self.results.root
        if root is None or root.result is None or root.result.units is not None or self.loops:
            return None
        return root.result.situation


class Case:
    """The commands about one unit of a shape, or two."""

    def __init__(self, rules: UnitRules, shapes: tuple[Shape, ...]) -> None:
        self.rules, self.shapes = rules, shapes
        places, groups = rules.placed(shapes)
        quotient = rules.quotient
        key = quotient.pack(groups, 0)
        self.state = quotient.state(key)
        self.commands: Tree[list[Template]] = Tree(rules.terms, lambda: self._templates(key, places))
        self.holders = [(f"s{p + 1}", f"r{p + 1}") for p in places]

    def _templates(self, key: int, places: tuple[int, ...]) -> list[Template]:
        terms = self.rules.terms
        commands = list(self.rules.quotient.about(key, places))
        made = []
        for command in commands:
            names = names_in(terms, [number.place for number in numbers_in(command)])
            loops = []
            for loop in reversed(current().loops):
                if loop.name in names:
                    names |= names_in(terms, [terms.place(loop.start), terms.place(loop.stop)])
                    loops.append(loop)
            tree = Tree(terms, lambda command=command: self._stepped(command))  # type: ignore[misc]
            made.append(Template(command, tuple(reversed(loops)), tree))
        return made

    def _stepped(self, command: Command) -> Result:
        rules, was = self.rules, self.state
        now, outcome = rules.copy.model.step(was, command)
        said = rules.copy.situations.situation(was, command, outcome, now)
        if not isinstance(outcome, Done):
            return Result(said, None)
        left = {s.name for s in now.sessions} | {r.name for r in now.requests if r.session is None}
        assert left <= {name for names in self.holders for name in names}, "a command has made a unit"
        return Result(said, tuple(rules.unit_in(now, *names) for names in self.holders))


class UnitRules:
    """The rules of a scope without a radix tree, on units by shape."""

    def __init__(self, scope: Scope) -> None:
        assert not scope.geometry.tree
        self.scope = scope
        self.terms = Expressions()
        self.lengths = _TEXT + _SLOT + _TURN + (() if scope.mode is Mode.FREE else _ENVIRONMENT) + _CURSORS
        self.most = scope.geometry.width + 1  # tokens; an output is sampled that is never computed
        self.copy = copy = SecondCopy(BUILTINS)
        for name in ("cursors", "ledger", "caching", "model"):
            copy.load(f"reference.{name}")
        copy.load("stateful_tests.moves", **LOOPS)
        copy.load("stateful_tests.quotient")
        copy.load("stateful_tests.cases")
        copy.load("stateful_tests.situations")
        self.quotient = copy.quotient.Quotient(scope)
        sizes = scope.geometry
        totals = dict(zip(FREE, (sizes.full_pages, sizes.swa_pages, sizes.rows)))
        left = {name: self.terms.name(name, 0, total) for name, total in totals.items()}
        self.others_leave = SimpleNamespace(
            **asdict(sizes) | {"full_pages": left["full"], "swa_pages": left["swa"], "rows": left["rows"]}
        )
        initial = self.quotient.initial
        self.quotient.initial = initial._replace(scope=initial.scope._replace(geometry=self.others_leave))
        self._cases: dict[tuple[Shape, ...], Case] = {}
        self._owned: dict[Shape, tuple[int, int, int]] = {}

    def case(self, shapes: tuple[Shape, ...]) -> Case:
        """What can be done about units of these shapes."""
        if shapes not in self._cases:
            self._cases[shapes] = Case(self, shapes)
        return self._cases[shapes]

    def cases(self) -> list[Case]:
        """Those that were asked for."""
        return list(self._cases.values())

    def placed(self, shapes: tuple[Shape, ...]) -> tuple[tuple[int, ...], list[list[int]]]:
        """Units of these shapes in their places, with unknown lengths: places, and groups to pack."""
        places, groups = [], ([], [], [])  # type: ignore[var-annotated]
        for tag, shape in zip("ab", shapes):
            group = groups[not shape.session]
            places.append(len(group) + (0 if shape.session else self.scope.sessions))
            lengths = [self.terms.name(f"{tag}.{name}", 0, self.most) for name in self.lengths]
            self.quotient.values.append(self.unit(shape, lengths, self.copy))
            group.append(len(self.quotient.values) - 1)
        return tuple(places), list(groups)

    def unit(self, shape: Shape, lengths: Sequence[Any], modules: Any) -> Any:
        """A quotient.Unit of a shape and its lengths. modules: `quotient` and `ledger`, of either copy."""
        of = dict.fromkeys((*_ENVIRONMENT,), 0) | dict(zip(self.lengths, lengths))
        quotient, ledger = modules.quotient, modules.ledger

        def row(names: tuple[str, ...]) -> Any:
            return ledger.Cursors(*(of[name] for name in names), 0)

        turn = None
        if shape.phase:
            turn = quotient.Turn(
                0, (), of["origin"], of["output"], ledger.Phase(shape.phase), shape.started, of["swept"],
                (of["known"], of["known_next"]), row(_CURSORS) if shape.cursors else None,
            )  # fmt: skip
        history = ((0, of["history"]),) if shape.history else ()
        return quotient.Unit(history, row(_SLOT) if shape.slot else None, shape.closing, turn)

    def lengths_of(self, unit: Any, session: bool) -> tuple[Shape, tuple[Any, ...]]:
        """Shape and lengths of a quotient.Unit of either copy."""
        turn, slot = unit.turn, unit.slot
        of: dict[str, Any] = dict.fromkeys(self.lengths, 0)
        if unit.history:
            ((_, of["history"]),) = unit.history
        row = None
        if turn is not None:
            row = turn.cursors
            of |= {"origin": turn.origin, "output": turn.output}
            if self.scope.mode is Mode.FAITHFUL:
                of |= dict(zip(_ENVIRONMENT, (turn.swept, *turn.known)))
        for names, cursors in ((_SLOT, slot), (_CURSORS, row)):
            if cursors is not None:
                assert isinstance(cursors[3], int) and cursors[3] == 0, "a prefix without a radix tree"
                of |= dict(zip(names, cursors))
        shape = Shape(
            session, bool(unit.history), slot is not None, unit.closing,
            "" if turn is None else turn.phase.value, turn is not None and turn.started, row is not None,
        )  # fmt: skip
        return shape, tuple(of[name] for name in self.lengths)

    def unit_in(self, now: Any, session: str, request: str) -> New | None:
        """What a unit has become."""
        found = now.session(session)
        if found is not None:
            turn = None if found.turn is None else now.request(found.turn)
            shape, lengths = self.lengths_of(self.quotient.session_unit(found, turn), True)
        else:
            alone = now.request(request)
            if alone is None:
                return None
            shape, lengths = self.lengths_of(self.quotient.request_unit(alone), False)
        return shape, tuple(map(self.terms.place, lengths))

    def owned(self, shape: Shape) -> tuple[int, int, int]:
        """Expressions of what a unit of this shape owns, for `FREE`."""
        if shape not in self._owned:
            self._owned[shape] = self._owns(shape)
        return self._owned[shape]

    def _owns(self, shape: Shape) -> tuple[int, int, int]:
        state = self.case((shape,)).state
        empty = SimpleNamespace(**vars(self.others_leave) | {"full_pages": 0, "swa_pages": 0, "rows": 0})
        placed = state._replace(scope=state.scope._replace(geometry=empty))
        left, run = traced(self.terms, lambda: self.copy.ledger.free(placed), Run({}.__getitem__))
        assert not run.path
        return tuple(self.terms.place(-part) for part in left)  # type: ignore[return-value]

