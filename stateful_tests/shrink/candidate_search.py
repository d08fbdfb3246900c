"""Follow smaller candidates that still fail: of commands, and of the runs of whole servers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Search(Generic[T]):
    """Runs candidates once each, within the budget.

    still_fails: returns the candidate, or the part of it that fails; None if none does.
    """

    def __init__(self, still_fails: Callable[[T], T | None], budget: int) -> None:
        self._still_fails = still_fails
        self._attempts_left = budget
        self._results: dict[T, T | None] = {}

    @property
    def is_spent(self) -> bool:
        return self._attempts_left <= 0

    def run(self, candidate: T) -> T | None:
        if candidate not in self._results:
            if self.is_spent:
                return None
            self._attempts_left -= 1
            self._results[candidate] = self._still_fails(candidate)
        return self._results[candidate]


def first_improvement(best: T, search: Search[T], candidates: Callable[[T], Iterator[T]]) -> T:
    """Follow improvements until no candidate fails any more."""
    improved = True
    while improved and not search.is_spent:
        improved = False
        for candidate in candidates(best):
            smaller = search.run(candidate)
            if smaller is not None:
                best = smaller
                improved = True
                break
    return best
