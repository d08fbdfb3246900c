"""Progress of a server that only decodes or prefills: its states, and the work that others have to do
for it."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator

from reference.standstill_detector import StandstillDetector, Standstill
from reference.tiers.commands import Arrive, Complete, Copy, Greet, Poll, Send, TierCommand
from reference.tiers.facts import TierFacts, TierRequestState

# What the server, its copy engine and the prefill servers do. With any other command somebody gets a token,
# or gives up.
_BY_ITSELF = Poll, Send, Copy, Complete, Greet, Arrive
# States of requests that have no answer.
WAITING = (
    TierRequestState.WAITS,
    TierRequestState.GREETED,
    TierRequestState.RECEIVES,
    TierRequestState.RECEIVED,
    TierRequestState.FAILS,
    TierRequestState.RETRACTED,
    TierRequestState.QUEUED,
    TierRequestState.COMPUTES,
    TierRequestState.LAUNCHED,
    TierRequestState.PARKED,
    TierRequestState.SENDS,
)
# States of those for whom a command has to begin a batch.
_FOR_A_BATCH = (
    TierRequestState.RUNS,
    TierRequestState.HELD,
    TierRequestState.QUEUED,
    TierRequestState.COMPUTES,
)
_UNHEARD = TierRequestState.WAITS, TierRequestState.PARKED


class DecodeProgress:
    """States of a server with one role, in one run, since a client last got a token, or did something."""

    def __init__(self) -> None:
        self._headway = StandstillDetector()

    def follow(
        self,
        command: TierCommand,
        facts: TierFacts,
        greeted: Collection[str],
        arrived: Collection[str],
    ) -> Standstill | None:
        """Record a command that was carried out, and return the standstill; None unless it is a Poll
        and a request waits.

        greeted, arrived: requests whose prefill server has answered, or has sent everything.
        """
        states = {request.state for request in facts.requests}
        waits = not states.isdisjoint(WAITING)
        if not waits or not isinstance(command, _BY_ITSELF):
            self._headway.restart()
        if not waits or not isinstance(command, Poll):
            return None
        # a session whose own next turn waits cannot go away
        waiting = {f"session {request.name}" for request in facts.requests if request.state in WAITING}
        sessions = (TierRequestState.IDLE, TierRequestState.BUSY)
        idle = {request.name for request in facts.requests if request.state in sessions}
        between_turns = bool(idle - waiting)
        return self._headway.enter_state(
            state_of(facts), _pending_work(facts, greeted, arrived), runs=False, counts=not between_turns
        )


def _pending_work(
    facts: TierFacts, greeted: Collection[str], arrived: Collection[str]
) -> Iterator[Hashable]:
    """Yield the work that the copy engine, prefill servers and clients have to do."""
    yield from (("transfer", job.job) for job in facts.transfers if job.sent and not job.completed)
    for request in facts.requests:
        unheard = request.state in _UNHEARD and request.name not in greeted
        unsent = request.state == TierRequestState.RECEIVES and request.name not in arrived
        has_work = request.state in _FOR_A_BATCH
        if request.writing or unheard or unsent or has_work:
            yield "request", request.name
    yield from (("part", send.job) for send in facts.sends)


def state_of(facts: TierFacts) -> Hashable:
    """Return the state of the server without slots, which change from round to round of a cycle."""
    requests = tuple(
        (request.name, request.state, request.row < 0, request.first < 0)
        + tuple(len(slots) for slots in (*request.slots.values(), *request.kept.values()))
        for request in facts.requests
    )
    transfers = sorted(
        (job.load, len(job.parts), job.sent, job.completed) for job in facts.transfers
    )
    free = *map(len, facts.free.values()), *map(len, facts.host_free.values()), len(facts.free_rows)
    return requests, tuple(transfers), free, len(facts.nodes), tuple(facts.evictable.values())
