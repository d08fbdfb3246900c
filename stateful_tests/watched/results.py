"""What validation of a log found, as data."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LogParting:
    """One line of a log where the server left the specification.

    deviation: name of a known fault of its release that explains it, and which the reference has followed.
    """

    file: str
    line: int
    event: str
    command: str
    clause: str
    expected: str
    observed: str
    because: str
    deviation: str | None = None
    about: str = ""  # the reference's request and session at stake, as they were before


@dataclass(slots=True)
class Validated:
    """What came of a log. compared: values of the server that were compared with the rules'; given: sessions
    and requests that were there when the log began; policy: refusals that are the server's to choose; known:
    how often each known fault was met, of which `partings` has the first few.

    What follows from known faults elsewhere than in a log: holes, (session, position) that count as committed
    and that nobody computed; ended: the fault after which two turns write into one row, and anything may.
    prepared: a prefill was, and has not run; parked: a request waited between two chunks when the last round
    was prepared.
    """

    events: int = 0
    steps: int = 0
    commands: Counter[str] = field(default_factory=Counter)
    compared: int = 0
    given: int = 0
    policy: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    reached: Counter[str] = field(default_factory=Counter)
    partings: list[LogParting] = field(default_factory=list)
    more: int = 0
    known: Counter[str] = field(default_factory=Counter)
    holes: set[tuple[str, int]] = field(default_factory=set)
    ended: str = ""
    prepared: bool = False
    parked: bool = False

    @property
    def found(self) -> list[LogParting]:
        """Partings that no known fault explains."""
        return [p for p in self.partings if p.deviation is None]
