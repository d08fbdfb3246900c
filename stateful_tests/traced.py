"""Plain Python on whole columns of integers: what it computes is traced once and then done by arrays.

`Number` stands for an integer that is different in each row of a table. Arithmetic on it makes an expression.
Where Python asks a comparison for its truth, the answer is that of one example row, and is noted: so one run
of a function gives the expressions of its result and the path to it. `Tree` keeps the paths, and sends all
rows down: where a side has rows and was never traced, one of these rows is the next example. So a function is
traced on as many rows as there are paths that rows take, and no path is missing.

`range` and `len` want numbers: `BUILTINS` has stand-ins for them, and for `min` and `max`, which would split
for nothing. `LOOPS` has a `range` whose loop runs once, with a parameter that stands for all its numbers.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Op = tuple[Any, ...]  # ("number", value), ("name", name), or an operator and the places of its operands

# Where a result goes, the operator, the places of its operands, and their values where they are numbers.
Step = tuple[int, str, int, int, int | None, int | None]

_HOW: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv, "%": operator.mod,
    "min": builtins.min, "max": builtins.max, "<": operator.lt, "==": operator.eq,
}  # fmt: skip


class Expressions:
    """Every expression has a number, equal ones the same. bounds: least and greatest value of each name."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.bounds: list[tuple[int, int]] = []
        self._places: dict[Op, int] = {}
        self._made: dict[tuple[str, int, int], Number | int] = {}

    def _put(self, op: Op, low: int, high: int) -> int:
        if op not in self._places:
            self._places[op] = len(self.ops)
            self.ops.append(op)
            self.bounds.append((low, high))
        return self._places[op]

    def name(self, name: str, low: int, high: int) -> Number:
        """A column whose values lie in [low, high]."""
        return Number(self, self._put(("name", name), low, high))

    def named(self, name: str) -> int:
        """The place of a name."""
        return self._places["name", name]

    def number(self, value: int) -> int:
        return self._put(("number", value), value, value)

    def place(self, value: Number | Truth | int) -> int:
        """The number of an expression."""
        if isinstance(value, Number):
            return value.place
        return self.number(int(bool(value)) if isinstance(value, Truth) else value)

    def made(self, how: str, one: Number | int, two: Number | int) -> Number | int:
        """The expression, or the number, that an operator gives."""
        key = how, self.place(one), self.place(two)
        if key not in self._made:
            self._made[key] = self._new(*key)
        return self._made[key]

    def _new(self, how: str, a: int, b: int) -> Number | int:
        if a == b and how in ("<", "==", "-"):
            return int(how == "==")
        (low, high), (least, most) = self.bounds[a], self.bounds[b]
        if how == "+":
            low, high = low + least, high + most
        elif how == "-":
            low, high = low - most, high - least
        elif how in ("min", "max"):
            low, high = _HOW[how](low, least), _HOW[how](high, most)
        elif how in ("<", "=="):
            always = high < least if how == "<" else low == high == least == most
            never = low >= most if how == "<" else high < least or low > most
            low, high = int(always), int(not never)
        else:
            corners = [_HOW[how](x, y) for x in (low, high) for y in (least, most)]
            low, high = (0, most - 1) if how == "%" else (min(corners), max(corners))
        return low if low == high else Number(self, self._put((how, a, b), low, high))

    def steps(self, place: int, known: set[int]) -> list[Step]:
        """What is to be computed, in order, for an expression; it is all known then."""
        how, *of = self.ops[place]
        if place in known or how in ("number", "name"):
            return []
        one, two = of
        before = [*self.steps(one, known), *self.steps(two, known)]
        known.add(place)
        fixed = [self.ops[at][1] if self.ops[at][0] == "number" else None for at in of]
        return [*before, (place, how, one, two, *fixed)]


@dataclass
class Run:
    """One example row, and what was asked on the way: place of the condition -> its answer.

    Answers that are there from the start are those of this row and of all others on the path.
    """

    example: Mapping[str, int]
    values: dict[int, int] = field(default_factory=dict)
    path: dict[int, bool] = field(default_factory=dict)
    loops: list[Loop] = field(default_factory=list)


_runs: list[Run] = []
_terms: list[Expressions] = []


def current() -> Run:
    """What is being traced."""
    return _runs[-1]


def value(terms: Expressions, place: int, run: Run) -> int:
    """What an expression is in the example of a run."""
    if place not in run.values:
        how, *rest = terms.ops[place]
        if how == "number":
            run.values[place] = rest[0]
        elif how == "name":
            run.values[place] = run.example[rest[0]]
        else:
            one, two = rest
            run.values[place] = int(_HOW[how](value(terms, one, run), value(terms, two, run)))
    return run.values[place]


class Truth:
    """A comparison in each row."""

    __slots__ = ("holds", "number")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, number: Number, holds: bool) -> None:
        self.number, self.holds = number, holds

    def __bool__(self) -> bool:
        run, place = current(), self.number.place
        if place not in run.path:
            run.path[place] = bool(value(self.number.terms, place, run))
        return run.path[place] is self.holds

    def __or__(self, other: Truth | bool) -> Truth | bool:
        if not isinstance(other, Truth):
            return True if other else self
        one, two = (t.number if t.holds else 1 - t.number for t in (self, other))
        return Truth(one.terms.made("max", one, two), True)

    __ror__ = __or__


class Number:
    """An integer of which each row has its own."""

    __slots__ = ("place", "terms")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, terms: Expressions, place: int) -> None:
        self.terms, self.place = terms, place

    def _compared(self, how: str, one: Any, two: Any, holds: bool = True) -> Any:
        found = self.terms.made(how, one, two)
        return Truth(found, holds) if isinstance(found, Number) else bool(found) is holds

    def __eq__(self, other: object) -> Any:
        return self._compared("==", self, other) if isinstance(other, (Number, int)) else NotImplemented

    def __ne__(self, other: object) -> Any:
        if not isinstance(other, (Number, int)):
            return NotImplemented
        return self._compared("==", self, other, False)

    def __lt__(self, other: Any) -> Any:
        return self._compared("<", self, other)

    def __gt__(self, other: Any) -> Any:
        return self._compared("<", other, self)

    def __le__(self, other: Any) -> Any:
        return self._compared("<", other, self, False)

    def __ge__(self, other: Any) -> Any:
        return self._compared("<", self, other, False)

    def __bool__(self) -> bool:
        return bool(self != 0)

    def __neg__(self) -> Any:
        return self.terms.made("-", 0, self)

    def __add__(self, other: Any) -> Any:
        return self if isinstance(other, int) and not other else self.terms.made("+", self, other)

    def __sub__(self, other: Any) -> Any:
        return self if isinstance(other, int) and not other else self.terms.made("-", self, other)

    def __rsub__(self, other: Any) -> Any:
        return self.terms.made("-", other, self)

    def __mul__(self, other: Any) -> Any:
        return self if isinstance(other, int) and other == 1 else self.terms.made("*", self, other)

    def __floordiv__(self, other: Any) -> Any:
        return self if other == 1 else self.terms.made("//", self, other)

    def __mod__(self, other: Any) -> Any:
        return self.terms.made("%", self, other)

    __radd__, __rmul__ = __add__, __mul__


@dataclass(frozen=True)
class Span:
    """`range(start, stop)` whose ends differ from row to row."""

    start: Any
    stop: Any


@dataclass(frozen=True, eq=False)
class Loop:
    """All numbers of a range, as one parameter."""

    start: Any
    stop: Any
    number: Number

    @property
    def name(self) -> str:
        return str(self.number.terms.ops[self.number.place][1])


class _Range:
    """A range that is gone through once: with its only number, or with a parameter."""

    def __init__(self, start: Any, stop: Any) -> None:
        self.start, self.stop = start, stop

    def __iter__(self) -> Iterator[Any]:
        ends = [end for end in (self.start, self.stop) if isinstance(end, Number)]
        if not ends and self.stop - self.start <= 1:
            yield from builtins.range(self.start, self.stop)
            return
        run, terms = current(), (ends[0].terms if ends else _terms[-1])
        low, high = (terms.bounds[terms.place(end)][at] for at, end in enumerate((self.start, self.stop)))
        number = terms.name(f"p{len(run.loops)}_{low}_{high}", low, max(low, high - 1))
        loop = Loop(self.start, self.stop, number)
        run.loops.append(loop)
        yield loop.number


def _ends(*ends: Any) -> tuple[Any, Any]:
    start, stop = ends if len(ends) == 2 else (0, *ends)
    return start, stop


def _range(*ends: Any) -> Any:
    return Span(*_ends(*ends)) if any(isinstance(end, Number) for end in ends) else builtins.range(*ends)


def _loop(*ends: Any) -> Any:
    return _Range(*_ends(*ends)) if len(ends) < 3 else builtins.range(*ends)


def _len(values: Any) -> Any:
    return _max(values.stop - values.start, 0) if isinstance(values, Span) else builtins.len(values)


def _extreme(how: Callable[..., Any], name: str) -> Callable[..., Any]:
    def extreme(*values: Any, **named: Any) -> Any:
        if len(values) == 1:
            values = tuple(values[0])
        numbers = [v for v in values if isinstance(v, Number)]
        if not numbers:
            return how(values, **named)
        found = values[0]
        for other in values[1:]:
            found = numbers[0].terms.made(name, found, other)
        return found

    return extreme


_min, _max = _extreme(builtins.min, "min"), _extreme(builtins.max, "max")
BUILTINS: dict[str, Any] = {"range": _range, "len": _len, "min": _min, "max": _max}
LOOPS: dict[str, Any] = {"range": _loop}


def traced(terms: Expressions, work: Callable[[], T], run: Run) -> tuple[T, Run]:
    """What `work` gives in an example, and the run."""
    _runs.append(run)
    _terms.append(terms)
    try:
        return work(), run
    finally:
        _runs.pop()
        _terms.pop()


# Paths.


@dataclass(slots=True)
class Node(Generic[T]):
    """A condition with a side for each answer (None: nobody went there), or a result."""

    test: int = -1
    steps: list[Step] = field(default_factory=list)
    sides: list[Node[T] | None] = field(default_factory=lambda: [None, None])
    result: T | None = None


class Tree(Generic[T]):
    """The paths of a function so far."""

    def __init__(self, terms: Expressions, work: Callable[[], T]) -> None:
        self.terms, self.work = terms, work
        self.root: Node[T] | None = None

    def results(self, rows: Rows) -> Iterator[tuple[T, Rows]]:
        """Each result with the rows that have it."""
        todo: list[tuple[tuple[tuple[Node[T], int], ...], Node[T] | None, Rows]] = [((), self.root, rows)]
        while todo:
            above, node, rows = todo.pop()
            if node is None:
                node = self._traced(above, rows.example())
            if node.test < 0:
                assert node.result is not None
                yield node.result, rows
                continue
            rows.take(node.steps)
            for side, part in rows.split(node.test):
                todo.append(((*above, (node, side)), node.sides[side], part))

    def _traced(self, above: tuple[tuple[Node[T], int], ...], example: Mapping[str, int]) -> Node[T]:
        """What follows on some nodes and their answers in an example: the first new node."""
        asked = {node.test: bool(side) for node, side in above}
        result, run = traced(self.terms, self.work, Run(example, path=asked))
        known = {step[0] for node, _ in above for step in node.steps}
        nodes = [Node[T](test, self.terms.steps(test, known)) for test in list(run.path)[len(above) :]]
        nodes.append(Node(result=result))
        for node, answer, below in zip(nodes, list(run.path.values())[len(above) :], nodes[1:]):
            node.sides[answer] = below
        if above:
            node, side = above[-1]
            node.sides[side] = nodes[0]
        else:
            self.root = nodes[0]
        return nodes[0]


class Rows:
    """Rows of a table: each column is fetched once, each expression computed once.

    arrays: numpy, or the like. names: those that expressions use. fetch: gives a column by name. above: the
    rows that these are some of, by index. Columns are known by the places of their names, expressions by
    theirs, and what is no length by its name: "row", the number in the whole table, and words.
    """

    def __init__(
        self, arrays: Any, terms: Expressions, names: tuple[str, ...], fetch: Callable[[str], Any], size: int,
        above: Rows | None = None, index: Any = None,
    ) -> None:  # fmt: skip
        self.arrays, self.terms, self.names, self.size = arrays, terms, names, size
        self._fetch, self._above, self._index = fetch, above, index
        self._known: dict[int | str, Any] = {}

    def column(self, key: int | str) -> Any:
        """A column, or what is known of an expression."""
        found = self._known.get(key)
        if found is None:
            if self._above is None:
                found = self._fetch(key if isinstance(key, str) else self.terms.ops[key][1])
            elif isinstance(key, str) and key != "row":  # asked for at the end of a path alone
                found = self._fetch(key)[self.column("row")]
            else:
                found = self._above.column(key)[self._index]
            self._known[key] = found
        return found

    def take(self, steps: Sequence[Step]) -> None:
        """Compute what was not computed above."""
        known, column, functions = self._known, self.column, self.arrays.how
        for place, how, one, two, a, b in steps:
            x = known[one] if one in known else column(one) if a is None else a
            y = known[two] if two in known else column(two) if b is None else b
            known[place] = functions[how](x, y)

    def get(self, place: int) -> Any:
        """The values of an expression: a column, or one number for all rows."""
        how, *of = self.terms.ops[place]
        if how == "number":
            return of[0]
        if how != "name" and place not in self._known and not (self._above and place in self._above._known):
            self._known[place] = self.arrays.how[how](*map(self.get, of))
        return self.column(place)

    def example(self) -> dict[str, int]:
        """The first row."""
        return {name: int(self.column(self.terms.named(name))[0]) for name in self.names}

    def split(self, test: int) -> list[tuple[int, Rows]]:
        """(answer, the rows that have it), without sides that have none."""
        holds = self.column(test)
        yes = self.arrays.nonzero(holds)
        if len(yes) == self.size:
            return [(1, self)]
        if not len(yes):
            return [(0, self)]
        return [(0, self.part(self.arrays.nonzero(holds == 0))), (1, self.part(yes))]

    def part(self, index: Any) -> Rows:
        """The rows with these numbers, some more than once."""
        return Rows(self.arrays, self.terms, self.names, self._fetch, len(index), self, index)

    def looped(self, loop: Loop) -> Rows:
        """Each row once for each number of a loop."""
        start, stop = (self.get(self.terms.place(end)) for end in (loop.start, loop.stop))
        index, numbers = self.arrays.spread(start, stop, self.size)
        rows = self.part(index)
        rows.names += (loop.name,)
        rows._known[loop.number.place] = numbers
        return rows


def numbers_in(found: Any) -> Iterator[Number]:
    """Every Number in nested tuples and dataclasses."""
    if isinstance(found, Number):
        yield found
    elif isinstance(found, (tuple, list)):
        for part in found:
            yield from numbers_in(part)
    elif hasattr(found, "__dataclass_fields__"):
        for name in found.__dataclass_fields__:
            yield from numbers_in(getattr(found, name))


def names_in(terms: Expressions, places: Sequence[int]) -> set[str]:
    """The names that expressions depend on."""
    found, todo, seen = set(), list(places), set()
    while todo:
        place = todo.pop()
        if place in seen:
            continue
        seen.add(place)
        how, *rest = terms.ops[place]
        if how == "name":
            found.add(rest[0])
        elif how != "number":
            todo += rest
    return found
