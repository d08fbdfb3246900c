"""Detection of standstills: how often a server has been in the same state without an answer in between.

A server that comes into a state for the second time will do so for ever, if no new request comes and all work
of others has been done in between. So a repeated state is the witness of a deadlock, a starvation or a
livelock: no time limit is needed.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import NamedTuple

# A scheduler may count something that its facts do not show, such as its attempts. Seen again once more, with
# all of its cycle in between, it does the same for ever.
FOR_EVER = 3


class Standstill(NamedTuple):
    """A state of a system after a call of its scheduler.

    times: how often it was in that state, this time included.
    turns: calls of the scheduler since the first time.
    ran: forward passes since then.
    runs: this call began a forward pass.
    passes: forward passes since a request last got further.
    """

    times: int
    turns: int
    ran: int
    runs: bool
    passes: int


class _Visit(NamedTuple):
    """The last visit of a state that counts.

    due: the work that others had to do then.
    first: the turn of the first visit.
    """

    times: int
    due: frozenset[Hashable]
    first: int
    ran: int


class StandstillDetector:
    """States of a system since a request last got further."""

    def __init__(self) -> None:
        self._visits: dict[Hashable, _Visit] = {}
        self._turn = self._ran = 0

    def restart(self) -> None:
        """Forget all states: a request got a token or ended, or a client did something."""
        self._visits.clear()
        self._turn = self._ran = 0

    def enter_state(
        self, state: Hashable, due: Iterable[Hashable], *, runs: bool, counts: bool = True
    ) -> Standstill:
        """Record that the scheduler was called and left this state.

        due: work that others (a device, a network) have to do now; a state counts again only once all
            work of the last visit has been done.
        runs: the call began a forward pass.
        counts: a client that could go away holds nothing that others wait for.
        """
        self._turn += 1
        self._ran += runs
        now = frozenset(due)
        if not counts:
            self._visits.clear()
        visit = self._visits.get(state)
        if visit is None:
            visit = self._visits[state] = _Visit(1, now, self._turn, self._ran)
        elif not visit.due & now:
            visit = self._visits[state] = visit._replace(times=visit.times + 1, due=now)
        turns = self._turn - visit.first
        ran = self._ran - visit.ran
        return Standstill(visit.times, turns, ran, runs, self._ran)
