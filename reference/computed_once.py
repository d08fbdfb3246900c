"""A property that is worked out when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class computed_once(Generic[T]):  # noqa: N801 (as functools has it)
    """`functools.cached_property` without the lock that it takes in Python 3.11."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self.compute, self.name, self.__doc__ = compute, compute.__name__, compute.__doc__

    def __get__(self, of: Any, _owner: type) -> T:
        value = of.__dict__[self.name] = self.compute(of)
        return value
