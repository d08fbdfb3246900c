"""Path-enumerating symbolic execution of plain Python with z3.

Where Python asks a symbolic value for its truth (`if`, `and`, a chain of comparisons), the run splits: it
follows one side, and the other side is run from the start with that answer given. What the values are,
and what is known of divisions, see `integers`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Generic, NamedTuple, TypeVar

import z3

T = TypeVar("T")
TIMEOUT_MS = 20_000  # of one question; the slowest takes a hundredth
STEPS = range(-2, 3)  # by how many pages divisions may differ


class Abandoned(Exception):
    """What was assumed cannot be so on this path."""


class Undecided(Exception):
    """The solver gave up on a question that a proof needs, or refutes with numbers that there are not."""


class NotPositive(Exception):
    """A divisor may be 0 or less: what follows from the division is not Python's then."""


class Bool:
    """A truth value that depends on the unknowns. `&`, `|` and `~` do not split the run, `==` does."""

    __slots__ = ("term",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, term: z3.BoolRef) -> None:
        self.term = term

    @classmethod
    def unknown(cls, name: str) -> Bool:
        """One of which nothing is known."""
        return cls(z3.Bool(name))

    def __bool__(self) -> bool:
        return current().decide(self.term)

    def __eq__(self, other: object) -> bool:
        return bool(self) == other

    def __ne__(self, other: object) -> bool:
        return bool(self) != other

    def __and__(self, other: Bool | bool) -> Bool:
        return Bool(z3.And(self.term, truth(other)))

    def __or__(self, other: Bool | bool) -> Bool:
        return Bool(z3.Or(self.term, truth(other)))

    def __invert__(self) -> Bool:
        return Bool(z3.Not(self.term))

    __rand__, __ror__ = __and__, __or__


def truth(value: Any) -> z3.BoolRef:
    """The solver's term of a truth value, symbolic or not."""
    return value.term if isinstance(value, Bool) else z3.BoolVal(bool(value))


def both(*values: Any) -> Bool:
    """All of them, without splitting the run."""
    return Bool(z3.And(*map(truth, values)))


def either(*values: Any) -> Bool:
    """One of them, without splitting the run."""
    return Bool(z3.Or(*map(truth, values)))


def implies(condition: Any, value: Any) -> Bool:
    """If the one then the other, without splitting the run."""
    return Bool(z3.Implies(truth(condition), truth(value)))


def same(one: Any, other: Any) -> Bool:
    """Both hold or neither, without splitting the run."""
    return implies(one, other) & implies(other, one)


# Divisions.


@lru_cache(maxsize=1 << 12)
def unknown(name: str) -> z3.ArithRef:
    """The solver's unknown of that name."""
    return z3.Int(name)


class Division(NamedTuple):
    """A factor of the unknown `divisor`, by name, and the name of the unknown that is their product."""

    name: str
    product_name: str
    divisor: str

    @property
    def factor(self) -> Any:
        return unknown(self.name) if self.name else 0

    @property
    def product(self) -> Any:
        return unknown(self.product_name) if self.product_name else 0


@lru_cache(maxsize=1 << 12)
def _apart(one: Division, other: Division) -> z3.BoolRef:
    """Two divisions differ by at least, or at most, k where their products do by k * P."""
    size = unknown(one.divisor)
    values, products = one.factor - other.factor, one.product - other.product
    return z3.And([
        z3.Implies(how(values, k), how(products, k * size))
        for k in STEPS
        for how in (operator.ge, operator.le)
    ])


# Paths.

Extreme = tuple[Callable[..., Any], Any, Any]  # larger or smaller, and of which two


@dataclass(frozen=True)
class ExploredPath(Generic[T]):
    """What came out on one path, the conditions under which it is taken, and the divisions in them."""

    result: T
    conditions: tuple[z3.BoolRef, ...] = ()
    divisions: tuple[Division, ...] = ()
    divisors: frozenset[str] = frozenset()
    wholes: Mapping[tuple[str, str], str] = field(default_factory=dict)
    defined: Mapping[str, Extreme] = field(default_factory=dict)


START: ExploredPath[None] = ExploredPath(None)


Model = dict[str, int]
SMALL = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
SIZES = SMALL[:5]  # what a counterexample is tried with, page sizes apart


@dataclass
class PathRun:
    """One path: the answers it was given, then those it chose; `open` collects the sides not taken.

    wholes: product and divisor -> the factor, as names of unknowns.
    """

    base: ExploredPath[Any]
    solver: z3.Solver
    given: tuple[bool, ...]
    open: list[tuple[bool, ...]]
    taken: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.conditions = list(self.base.conditions)
        self.divisions = list(self.base.divisions)
        self.divisors = set(self.base.divisors)
        self.wholes = dict(self.base.wholes)
        self.defined = dict(self.base.defined)
        self.model: z3.ModelRef | None = None
        self.products = {(q, d): m for (m, d), q in self.wholes.items()}

    def path(self, result: T) -> ExploredPath[T]:
        known = tuple(self.conditions), tuple(self.divisions), frozenset(self.divisors)
        return ExploredPath(result, *known, self.wholes, self.defined)

    def define(self, name: str, extreme: Extreme, meaning: Bool) -> None:
        """Say, once, which of two the unknown `name` stands for."""
        if name not in self.defined:
            self.defined[name] = extreme
            self.add(meaning.term)

    def add(self, term: z3.BoolRef) -> None:
        self.conditions.append(term)
        self.solver.add(term)
        if self.model is not None and not z3.is_true(self.model.eval(term, model_completion=True)):
            self.model = None

    def possible(self, *terms: z3.BoolRef) -> bool:
        """False only when it cannot be: a path that is followed for nothing costs time alone."""
        found = self.solver.check(*terms)
        if found == z3.sat:
            self.model = self.solver.model()
        return bool(found != z3.unsat)

    def decide(self, condition: z3.BoolRef) -> bool:
        at = len(self.taken)
        if at < len(self.given):
            answer = self.given[at]
        else:
            if self.model is None:
                self.possible()
            model = self.model
            if model is not None:
                answer = z3.is_true(model.eval(condition, model_completion=True))
            else:
                answer = self.possible(condition)
            if self.possible(z3.Not(condition) if answer else condition):
                self.open.append((*self.taken, not answer))
            self.model = model
        self.taken.append(answer)
        self.add(condition if answer else z3.Not(condition))
        return answer

    def positive(self, divisor: str) -> None:
        """Prove that it is, once."""
        if divisor not in self.divisors:
            found = self.solver.check(unknown(divisor) <= 0)
            if found != z3.unsat:
                raise NotPositive(f"{divisor} may be 0 or less where it divides ({found})")
            self.divisors.add(divisor)

    def product(self, factor: str, divisor: str) -> str:
        """The unknown that stands for factor * divisor."""
        known = self.products.get((factor, divisor))
        if known is not None:
            return known
        name = f"{factor}*{divisor}"
        self.wholes[name, divisor], self.products[factor, divisor] = factor, name
        new = Division(factor, name, divisor)
        for other in [Division("", "", divisor), *self.divisions]:
            if other.divisor == divisor:
                self.add(_apart(new, other))
        self.divisions.append(new)
        return name

    def rounded(self, value: Any, divisor: str, *, up: bool) -> str:
        """The unknown that stands for the quotient, with what defines it."""
        name = f"{'ceil' if up else 'floor'}({value})"
        fresh = (name, divisor) not in self.products
        product, size = unknown(self.product(name, divisor)), unknown(divisor)
        if fresh:
            low, high = (value.term, product) if up else (product, value.term)
            self.add(z3.And(low <= high, high < low + size))
        return name

    def small(self, shown: Mapping[str, Any]) -> Model:
        """Small values of what is shown, exact: a product of pages is one where P is a number."""
        terms = {n: z3.IntVal(v) if isinstance(v, int) else v.term for n, v in shown.items()}
        bounded = [term for name, term in terms.items() if name not in self.divisors]
        for bound in SMALL:
            for size in SIZES if self.divisors else SIZES[:1]:
                self.solver.push()
                self.solver.add(*(unknown(divisor) == size for divisor in self.divisors))
                self.solver.add(*(q.product == size * q.factor for q in self.divisions))
                self.solver.add(*(z3.And(-bound <= term, term <= bound) for term in bounded))
                found = self.solver.check()
                model = self.solver.model() if found == z3.sat else None
                self.solver.pop()
                if model is not None:
                    return {n: model.eval(t, model_completion=True).as_long() for n, t in terms.items()}
        raise Undecided("neither proved, nor refuted by small numbers")


_runs: list[PathRun] = []


def current() -> PathRun:
    """The path that is being run."""
    return _runs[-1]


@contextmanager
def _running(run: PathRun) -> Iterator[None]:
    _runs.append(run)
    try:
        yield
    finally:
        _runs.pop()


def assume(*values: Any) -> None:
    """Go on only where all of these hold."""
    for value in values:
        if value is True:
            continue
        if value is False:
            raise Abandoned
        current().add(truth(value))
    if current().model is None and not current().possible():
        raise Abandoned


def explore(work: Callable[[], T], base: ExploredPath[Any] = START) -> Iterator[ExploredPath[T]]:
    """Run `work` on every path that the conditions of `base` leave possible."""
    for run, result in _runs_of(work, base, solver_of(base)):
        yield run.path(result)


def _runs_of(
    work: Callable[[], T], base: ExploredPath[Any], solver: z3.Solver
) -> Generator[tuple[PathRun, T], None, None]:
    """Each run with what came out; the solver, which knows `base`, then knows its conditions too."""
    todo: list[tuple[bool, ...]] = [()]
    while todo:
        run = PathRun(base, solver, todo.pop(), todo)
        solver.push()
        try:
            with _running(run):
                result = work()
            yield run, result
        except Abandoned:
            pass
        finally:
            solver.pop()


def solver_of(path: ExploredPath[Any]) -> z3.Solver:
    """A solver that knows the conditions of a path: the plain incremental one, and the simplex of old.

    The questions are many and small. Measured over all rules: 25 s, others took 33 to 57.
    """
    solver = z3.SimpleSolver()
    solver.set("timeout", TIMEOUT_MS)
    solver.set("arith.solver", 2)
    solver.add(*path.conditions)
    return solver


class Refutation(NamedTuple):
    """Of how many paths a goal was asked, and a counterexample, if one was found."""

    paths: int
    model: Model | None


def refute(
    goal: Callable[[], Any],
    shown: Mapping[str, Any],
    base: ExploredPath[Any] = START,
    solver: z3.Solver | None = None,
) -> Refutation:
    """Look for values for which the conditions of `base` hold and the goal does not; none: it is proved.

    shown: what is to be seen of a counterexample, by name. solver: one that knows `base`, if there is one
    already. Raises Undecided.
    """
    paths = 0
    with closing(_runs_of(goal, base, solver if solver is not None else solver_of(base))) as runs:
        for run, value in runs:
            paths += 1
            run.add(z3.Not(truth(value)))
            if run.possible():
                return Refutation(paths, run.small(shown))
    return Refutation(paths, None)
