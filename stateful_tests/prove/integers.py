"""Integers of which nothing is known but what is assumed: plain Python runs on them as it stands.

A symbolic integer answers arithmetic with a sum of unknowns and a comparison with a symbolic truth value;
`path_exploration` runs the code on every path that such values leave. `range` and `len` want numbers, and
`min` and `max` would split the run for nothing: `BUILTINS` has stand-ins for them.

Page sizes are unknowns too, and products of unknowns are what solvers fail at. So there are none: what
divides is one unknown P, a quotient is a new unknown q, q * P another one, m, and what is said of them is
linear: m <= x < m + P, and for any two quotients that they differ by at least, or at most, k where their
products do by k * P, for small k. That is true of whole numbers and says less than q * P = m, so what
is proved is so. A refutation could be of unknowns that are no product, so it is made once more with a
number for P.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import z3

from stateful_tests.prove.path_exploration import Bool, NotPositive, both, current, either, unknown


class NotLinear(Exception):
    """A product or quotient of two unknowns that is not of pages."""


SumKey = tuple[tuple[str, int], ...]

# Making terms takes as long as deciding them; most come up again on the next path.


@lru_cache(maxsize=1 << 14)
def _sum(key: SumKey) -> z3.ArithRef:
    *factors, (_, constant) = key
    return z3.IntVal(constant) + z3.Sum([factor * unknown(name) for name, factor in factors])


@lru_cache(maxsize=1 << 14)
def _comparison(how: Callable[[Any, Any], Any], key: SumKey) -> z3.BoolRef:
    return how(_sum(key), 0)


class Int:
    """A sum of unknowns, each with a factor, and a number. Never a dictionary key, never an index."""

    __slots__ = ("constant", "factors")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, factors: dict[str, int], constant: int = 0) -> None:
        self.factors = {name: factor for name, factor in factors.items() if factor}
        self.constant = constant

    @classmethod
    def of(cls, name: str) -> Int:
        """The unknown called `name`."""
        return cls({name: 1})

    @property
    def key(self) -> SumKey:
        """The same for equal sums."""
        return (*sorted(self.factors.items()), ("", self.constant))

    @property
    def term(self) -> Any:
        return _sum(self.key)

    def __str__(self) -> str:
        parts = [f"{'' if f == 1 else f}{n}" for n, f in sorted(self.factors.items())]
        return " + ".join([*parts, *([str(self.constant)] if self.constant or not parts else [])])

    __repr__ = __str__

    def value(self, model: Mapping[str, int]) -> int:
        """What it is where the unknowns are these numbers."""
        return self.constant + sum(factor * model[name] for name, factor in self.factors.items())

    def __bool__(self) -> bool:
        return bool(self != 0)

    def __eq__(self, other: object) -> Any:
        return self._compared(other, operator.eq) if _numeric(other) else NotImplemented

    def __ne__(self, other: object) -> Any:
        return self._compared(other, operator.ne) if _numeric(other) else NotImplemented

    def __lt__(self, other: Any) -> Any:
        return self._compared(other, operator.lt)

    def __le__(self, other: Any) -> Any:
        return self._compared(other, operator.le)

    def __gt__(self, other: Any) -> Any:
        return self._compared(other, operator.gt)

    def __ge__(self, other: Any) -> Any:
        return self._compared(other, operator.ge)

    def _compared(self, other: Any, how: Callable[[Any, Any], Any]) -> Any:
        difference = self - other
        if not difference.factors:
            return how(difference.constant, 0)
        return Bool(_comparison(how, difference.key))

    def __neg__(self) -> Int:
        return self * -1

    def __add__(self, other: Any) -> Int:
        other = as_int(other)
        names = {**self.factors, **other.factors}
        factors = {n: self.factors.get(n, 0) + other.factors.get(n, 0) for n in names}
        return Int(factors, self.constant + other.constant)

    def __sub__(self, other: Any) -> Int:
        return self + as_int(other) * -1

    def __rsub__(self, other: Any) -> Int:
        return as_int(other) - self

    def __mul__(self, other: Any) -> Int:
        other = as_int(other)
        for one, factor in ((self, other), (other, self)):
            if not factor.factors:
                by = factor.constant
                return Int({n: f * by for n, f in one.factors.items()}, one.constant * by)
        return _times(self, other)

    __radd__, __rmul__ = __add__, __mul__

    def __floordiv__(self, other: Any) -> Int:
        return _divided(self, as_int(other))

    def __rfloordiv__(self, other: Any) -> Int:
        return _divided(as_int(other), self)

    def __mod__(self, other: Any) -> Int:
        whole: Int = _divided(self, as_int(other)) * other
        return self - whole

    def __rmod__(self, other: Any) -> Int:
        return as_int(other).__mod__(self)


def _numeric(value: object) -> bool:
    return isinstance(value, (Int, Bool, int))


def as_int(value: Any) -> Int:
    """A number as a sum of unknowns; Python counts a truth value as 0 or 1."""
    if isinstance(value, Int):
        return value
    return Int({}, int(bool(value) if isinstance(value, Bool) else value))


# Pages.


def _single(value: Int) -> str | None:
    """The unknown that a sum consists of, if it is that."""
    name = next(iter(value.factors), None)
    return name if value.factors == {name: 1} and not value.constant else None


def _times(a: Int, b: Int) -> Int:
    """The product of two sums, one of which is the unknown that divides: term by term."""
    for whole, by in ((a, b), (b, a)):
        divisor = _single(by)
        if divisor is None or divisor not in current().divisors:
            continue
        product = Int({divisor: whole.constant})
        for name, factor in whole.factors.items():
            if (extreme := current().defined.get(name)) is not None:  # the divisor is positive
                how, one, other = extreme
                product += factor * how(one * by, other * by)
            else:
                product += Int({current().product(name, divisor): factor})
        return product
    raise NotLinear(f"({a}) * ({b})")


def _divided(value: Int, by: Int) -> Int:
    divisor = _single(by)
    if divisor is None:
        if by.factors or by.constant <= 0:
            raise NotPositive(f"({value}) // ({by})")
        raise NotLinear(f"({value}) // {by}")
    run = current()
    run.positive(divisor)
    quotient, rest = Int({}), Int({}, value.constant)
    for name, factor in value.factors.items():
        if name == divisor:
            quotient += factor
        elif (whole := run.wholes.get((name, divisor))) is not None:
            quotient += Int({whole: factor})
        else:
            rest += Int({name: factor})
    if not rest.factors and not rest.constant:
        return quotient
    if sum(rest.factors.values()) < 0:  # floor(-x) is -ceil(x); so that lengths compare with lengths
        return quotient - Int.of(run.rounded(-rest, divisor, up=True))
    return quotient + Int.of(run.rounded(rest, divisor, up=False))


class SymbolicRange:
    """`range(start, stop)` of symbolic ends."""

    __slots__ = ("start", "stop")

    def __init__(self, start: Any, stop: Any) -> None:
        self.start, self.stop = start, stop

    def __contains__(self, at: Any) -> bool:
        return bool(self.has(at))

    def has(self, at: Any) -> Bool:
        """`at in self`, without splitting the run."""
        return both(as_int(at) >= self.start, as_int(at) < self.stop)


def has(span: Any, at: Any) -> Any:
    """`at in span` for any range, without splitting the run."""
    return span.has(at) if isinstance(span, SymbolicRange) else SymbolicRange(span.start, span.stop).has(at)


def _range(*ends: Any) -> Any:
    if any(isinstance(end, Int) for end in ends):
        return SymbolicRange(*(ends if len(ends) == 2 else (0, *ends)))
    return builtins.range(*ends)


def _len(value: Any) -> Any:
    if isinstance(value, SymbolicRange):
        return larger(value.stop - value.start, 0)
    return builtins.len(value)


def larger(*values: Any, **named: Any) -> Any:
    """`max`, without splitting the run."""
    return _extreme(builtins.max, larger, values, named)


def smaller(*values: Any, **named: Any) -> Any:
    """`min`, without splitting the run."""
    return _extreme(builtins.min, smaller, values, named)


def _extreme(
    how: Callable[..., Any], again: Callable[..., Any], values: tuple[Any, ...], named: dict[str, Any]
) -> Any:
    """One of the values that no other exceeds, as an unknown: comparing them would split the run."""
    if not any(isinstance(value, Int) for value in values):
        return how(*values, **named)
    result = as_int(values[0])
    for value in map(as_int, values[1:]):
        apart = result - value
        if not apart.factors:
            result = result if how(apart.constant, 0) == apart.constant else value
            continue
        name = f"{how.__name__}({result}, {value})"
        found = Int.of(name)
        passes = operator.ge if how is builtins.max else operator.le
        bounds = [passes(found, result), passes(found, value)]
        current().define(name, (again, result, value), both(*bounds, either(found == result, found == value)))
        result = found
    return result


# Those of Python but for those that want numbers, or would split the run for nothing.
BUILTINS: dict[str, Any] = {**vars(builtins), "range": _range, "len": _len, "max": larger, "min": smaller}
