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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Op = tuple[Any, ...]  # ("number", value), ("name", name), or an operator and the places of its operands

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

    def number(self, value: int) -> int:
        return self._put(("number", value), value, value)

    def place(self, value: Number | Truth | int) -> int:
        """The number of an expression."""
        if isinstance(value, Number):
            return value.place
        return self.number(int(bool(value)) if isinstance(value, Truth) else value)

    def made(self, how: str, one: Number | int, two: Number | int) -> Number | int:
        """The expression, or the number, that an operator gives."""
        a = one.place if type(one) is Number else self.place(one)
        b = two.place if type(two) is Number else self.place(two)
        found = self._made.get((how, a, b))
        if found is None:
            found = self._made[how, a, b] = self._new(how, a, b)
        return found

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


@dataclass
class Run:
    """One example row, and what was asked on the way: place of the condition -> its answer.

    Answers that are there from the start are those of this row and of all others on the path.
    """

    example: Callable[[str], int]  # the value of a name
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
            run.values[place] = run.example(rest[0])
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
    sides: list[Node[T] | None] = field(default_factory=lambda: [None, None])
    result: T | None = None


_Above = tuple[Any, "Node[Any]", int] | None  # what is above a node there, that node and the side taken


class Tree(Generic[T]):
    """The paths of a function so far."""

    def __init__(self, terms: Expressions, work: Callable[[], T]) -> None:
        self.terms, self.work = terms, work
        self.root: Node[T] | None = None

    def results(self, rows: Rows) -> Iterator[tuple[T, Any]]:
        """Each result, and the places of the rows that have it.

        A condition is computed for all rows, also those that do not meet it: that is cheaper than to move
        columns about.
        """
        arrays = rows.arrays
        todo: list[tuple[_Above, Node[T] | None, Any, int]] = [(None, self.root, None, rows.size)]
        while todo:
            above, node, mask, size = todo.pop()
            if node is None:
                first = 0 if mask is None else int(arrays.nonzero(mask)[0])
                node = self._traced(above, lambda name, row=first: int(rows.column(name)[row]))
            if node.test < 0:
                assert node.result is not None
                yield node.result, slice(None) if mask is None else arrays.nonzero(mask)
                continue
            holds = rows.holds(node.test)
            yes = holds if mask is None else mask & holds
            many = arrays.count(yes)
            if many < size:
                no = mask if not many else ~yes if mask is None else mask ^ yes
                todo.append(((above, node, 0), node.sides[0], no, size - many))
            if many:
                todo.append(((above, node, 1), node.sides[1], mask if many == size else yes, many))

    def _traced(self, above: _Above, example: Callable[[str], int]) -> Node[T]:
        """What follows on some nodes and their answers in an example: the first new node."""
        asked: dict[int, bool] = {}
        last = above
        while above is not None:
            above, node, side = above
            asked[node.test] = bool(side)
        result, run = traced(self.terms, self.work, Run(example, path=dict(asked)))
        answers = list(run.path.items())[len(asked) :]
        nodes = [*(Node[T](test) for test, _ in answers), Node(result=result)]
        for node, (_, answer), below in zip(nodes, answers, nodes[1:]):
            node.sides[answer] = below
        if last is not None:
            _, node, side = last
            node.sides[side] = nodes[0]
        else:
            self.root = nodes[0]
        return nodes[0]


class Rows:
    """Rows of a table: each column is fetched once, each expression computed once, for all rows.

    arrays: numpy, or the like. fetch: gives a column by name; what is no length is a column too: "row", the
    number in the whole table, and words.
    """

    def __init__(self, arrays: Any, terms: Expressions, fetch: Callable[[str], Any], size: int) -> None:
        self.arrays, self.terms, self.size = arrays, terms, size
        self._fetch = fetch
        self._columns: dict[str, Any] = {}
        self._known: dict[int, Any] = {}
        self._held: dict[int, Any] = {}
        self._shifted: dict[tuple[int, int], Any] = {}

    def column(self, name: str) -> Any:
        found = self._columns.get(name)
        if found is None:
            found = self._columns[name] = self._fetch(name)
        return found

    def get(self, place: int) -> Any:
        """The values of an expression: a column, or one number for all rows."""
        found = self._known.get(place)
        if found is None:
            op = self.terms.ops[place]
            if len(op) == 3:
                found = self.arrays.how[op[0]](self.get(op[1]), self.get(op[2]))
            else:
                found = self.arrays.number(op[1]) if op[0] == "number" else self.column(op[1])
            self._known[place] = found
        return found

    def holds(self, place: int) -> Any:
        """Where a condition holds."""
        found = self._held.get(place)
        if found is None:
            found = self._held[place] = self.arrays.truth(self.get(place))
        return found

    def shifted(self, place: int, bits: int) -> Any:
        """The values of an expression, at their place in words."""
        found = self._shifted.get((place, bits))
        if found is None:
            found = self.arrays.cast(self.get(place), self.arrays.large) << bits
            self._shifted[place, bits] = found
        return found

    def part(self, index: Any, size: int) -> Rows:
        """The rows with these numbers, some more than once."""
        return Rows(self.arrays, self.terms, lambda name: self.column(name)[index], size)

    def looped(self, loop: Loop) -> Rows:
        """Each row once for each number of a loop."""
        ends = (self.terms.place(end) for end in (loop.start, loop.stop))
        index, numbers = self.arrays.spread(*map(self.get, ends), self.size)
        rows = self.part(index, len(index))
        rows._columns[loop.name] = numbers
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
