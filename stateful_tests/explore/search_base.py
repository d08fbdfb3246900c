"""An exploration, whichever way it is made: how it goes on and ends, and what it tells."""

from __future__ import annotations

import resource
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from stateful_tests.coverage.scopes import Scope
from stateful_tests.coverage.situations import catalogue
from stateful_tests.explore import enumeration as moves
from stateful_tests.lockstep.results import Finding, Tally

Progress = Callable[[str, int, int], None]
MEMORY_MB = 4096  # of the process, where nothing else is asked for


@dataclass(slots=True)
class Exploration:
    """What an exploration has seen.

    engine: how it was made, in words. transitions: commands that were carried out, from every state that
    was expanded; refused: those that were not. depth: of the deepest state, in commands. complete: a fixed
    point, nothing is left; stopped: why it is over, in words. memory_mb: the most that the process has had;
    grown_mb: since the search began. situations: how often each was met; missing: the others.
    """

    scope: Scope
    engine: str
    states: int
    expanded: int
    transitions: int
    refused: int
    depth: int
    complete: bool
    stopped: str
    seconds: float
    memory_mb: float
    grown_mb: float
    situations: dict[str, int]
    missing: list[str]
    tallies: dict[str, Tally] | None
    finding: Finding | None = None


class Search(ABC):
    """Breadth first over the states of a scope. expanded: so many states, in the order of their depth."""

    scope: Scope
    look = 1  # states between two looks at memory
    expanded = 0
    seconds = 0.0

    @property
    @abstractmethod
    def states(self) -> int: ...

    @property
    @abstractmethod
    def transitions(self) -> int: ...

    @property
    @abstractmethod
    def depth(self) -> int:
        """Of the state that is expanded next."""

    @abstractmethod
    def advance(self, most: int | None) -> str | None:
        """Expand the next state, or some; `most` at most. Returns why the search is over, or None."""

    def run(
        self,
        *,
        states: int | None = None,
        depth: int | None = None,
        memory_mb: float = MEMORY_MB,
        progress: Progress | None = None,
        pause: Callable[[], bool] = lambda: False,
    ) -> str:
        """Go on until nothing is left, or to a bound; says which. pause: asked whenever some are expanded."""
        began = time.monotonic()
        try:
            while self.expanded < self.states:
                if depth is not None and self.depth >= depth:
                    return f"depth {depth}"
                if states is not None and self.states >= states:
                    return f"{states} states"
                if pause():
                    return "paused"
                if self.expanded % self.look == 0:
                    if memory() > memory_mb:
                        return f"{memory_mb:g} MB of memory"
                    if progress is not None:
                        waiting = f"{self.states} states, {self.states - self.expanded} waiting"
                        progress(f"{self.scope.name}, depth {self.depth}, {waiting}", self.transitions, 0)
                stopped = self.advance(None if states is None else states - self.states)
                if stopped is not None:
                    return stopped
            return "fixed point"
        finally:
            self.seconds += time.monotonic() - began


def explored(
    scope: Scope, engine: str, *, states: int, expanded: int, transitions: int, depth: int, stopped: str,
    seconds: float, had_mb: float, situations: Counter[str], tallies: dict[str, Tally] | None = None,
    finding: Finding | None = None,
) -> Exploration:  # fmt: skip
    """What there is to tell. had_mb: what the process had before."""
    thinkable = catalogue(scope.geometry, moves.kinds(scope), moves.absent(scope))
    refused = sum(times for text, times in situations.items() if ", refused: " in text)
    return Exploration(
        scope, engine, states, expanded, transitions, refused, depth, stopped == "fixed point", stopped,
        seconds, memory(), memory() - had_mb, dict(sorted(situations.items())),
        [text for text in thinkable if text not in situations], tallies, finding,
    )  # fmt: skip


def memory() -> float:
    """The most memory that the process has had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
