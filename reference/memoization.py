"""Values derived from an object that never changes, computed once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, TypeVarTuple

Of = TypeVar("Of")
Args = TypeVarTuple("Args")
R = TypeVar("R")


class memoized(Generic[Of, *Args, R]):  # noqa: N801 (used as functools.cached_property is)
    """A property of an immutable object, or a function of one, whose values the object keeps.

    In a class it is `functools.cached_property` without the lock that this takes in Python 3.11.
    """

    def __init__(self, compute: Callable[[Of, *Args], R]) -> None:
        self.compute: Callable[..., R] = compute
        self.name = compute.__name__
        self.__doc__ = compute.__doc__

    def __get__(self, of: Any, _owner: type) -> R:
        value = of.__dict__[self.name] = self.compute(of)
        return value

    def __call__(self, of: Of, *args: *Args) -> R:
        known: dict[Any, R] = of.__dict__
        key = (self, *args) if args else self
        if key in known:
            return known[key]
        value = known[key] = self.compute(of, *args)
        return value
