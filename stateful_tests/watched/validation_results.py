"""The results of validating a log, as data."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A line of a log at which the server left the specification."""

    file: str
    line: int
    event: str
    command: str
    clause: str
    expected: str
    observed: str
    #: id of the known fault of its release that explains it
    known: str | None = None
    #: the request and session concerned, as the reference had them before this line
    about: str = ""
    #: Unix time of the preceding step (s); 0 if none has been logged
    at: float = 0.0

    @property
    def sentence(self) -> str:
        """Both sides in one line."""
        return f"the server: {self.observed}; expected: {self.expected}"


@dataclass(slots=True)
class Validated:
    """The result of validating a log.

    What deviations.py needs to recognise known faults:
    """

    events: int = 0
    steps: int = 0
    commands: Counter[str] = field(default_factory=Counter)
    #: values of the server that were compared with the expected ones
    compared: int = 0
    #: sessions and requests that were taken from a snapshot
    given: int = 0
    #: refusals that are the server's to choose
    policy: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    #: decisions of the scheduler, and how often it took them
    reached: Counter[str] = field(default_factory=Counter)
    mismatches: list[Mismatch] = field(default_factory=list)
    #: mismatches that no known fault explains, beyond those that are kept
    more: int = 0
    #: how often each known fault was found; `mismatches` has the first few of each
    known: Counter[str] = field(default_factory=Counter)
    #: each (session, position) that counts as committed although its KV was never written
    holes: set[tuple[str, int]] = field(default_factory=set)
    #: (request, position) computed from a wrong recurrent state -> the known fault
    wrong_states: dict[tuple[str, int], str] = field(default_factory=dict)
    #: no slot for a state is free, and stores and requests pin all that the tree has
    states_in_stores: bool = False
    #: the known fault after which two turns write into one row, or slot; no later line is judged
    ended: str | None = None
    #: a prefill was prepared, and has not run
    prepared: bool = False
    #: a request waited between two chunks when the last round was prepared
    parked: bool = False
    #: the next chunk of a request was admitted, and its prefill not prepared
    next_chunk: bool = False
    #: who held what at the last line, in a sentence
    situation: str = ""

    @property
    def unexplained(self) -> list[Mismatch]:
        """Mismatches that no known fault explains."""
        return [mismatch for mismatch in self.mismatches if mismatch.known is None]

    def reach(self, decision: str, is_reached: bool = True) -> None:
        """Count a decision of the scheduler, if it was taken."""
        if is_reached:
            self.reached[decision] += 1
