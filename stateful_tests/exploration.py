"""What an exploration tells, whichever way it was made."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from stateful_tests import moves
from stateful_tests.results import Finding, Tally
from stateful_tests.scopes import Scope
from stateful_tests.situations import catalogue

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
