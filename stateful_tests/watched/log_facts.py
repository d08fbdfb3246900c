"""Facts of a log about requests and sessions that the reference does not have."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from impl.sglang.server.events import Stepped, WatchHeader
from reference.commands import Choice
from reference.tiers.config import TierConfig
from reference.tiers.facts import TierFacts
from reference.tiers.locks import TierUsers

MAX_ROOMS = 1 << 16  # of a log of a server of a pair, in memory


class RoundSeen(NamedTuple):
    """A prepared round of a request.

    counted: outputs that the reference counts before its result.
    mixed: it is a decode entry of a mixed batch.
    """

    counted: int
    mixed: bool = False


@dataclass(slots=True)
class RequestSeen:
    """A request that has not ended."""

    #: the session that rejected it as a turn ("" if not known); it runs by itself, and returns an
    #: error to its client
    rejected_by: str | None = None
    #: number of its retracts
    retracts: int = 0
    #: a rejected turn of its session went through the server since
    interrupted: bool = False
    #: it was there when validation began, and its past is not known
    joined_late: bool = False
    #: the session whose turn it was, until by a known fault it no longer counts as that
    orphan_of: str | None = None
    #: its prefix when the scheduler last looked at it (tokens)
    matched: int | None = None
    #: rounds whose results are to come, the oldest first
    rounds: list[RoundSeen] = field(default_factory=list)
    #: it waits with a slot of recurrent state, from a prefix that it has matched
    has_state: bool = False
    #: a prefill without it was launched while it was between two chunks
    passed_over: bool = False


@dataclass(slots=True)
class SessionSeen:
    """An open session.

    times_out: it may close by itself.
    close_requested: a client closed it.
    stays_busy: the known fault by which the server takes it for busy.
    text_unknown: a known fault has left text of another turn in it, which its next turn shows.
    state_ahead: the known fault by which its last turn has left a recurrent state of another length
        than its KV.
    """

    times_out: bool = False
    close_requested: bool = False
    stays_busy: str | None = None
    text_unknown: bool = False
    state_ahead: str | None = None


@dataclass(slots=True)
class StepSeen:
    """The scheduler step that a log is at."""

    #: the last step, None where validation begins
    number: int | None = 0
    #: requests of the round that was prepared since
    entries: set[str] = field(default_factory=set)
    #: requests that were retracted since, and not queued again
    retracted: dict[str, None] = field(default_factory=dict)
    #: window evictions of requests whose prefill is to come
    evictions: dict[str, Choice] = field(default_factory=dict)
    #: sessions that a client closed since, while no turn was in flight
    closed_sessions: dict[str, None] = field(default_factory=dict)
    #: since the last step it has looked at waiting requests, because it decides on a batch
    admits: bool = False
    #: the last event queued a retracted request again
    requeues: bool = False
    #: since the last step it has evicted a window, because it decides on a batch
    evicts: bool = False
    #: the pages of the last step are to come
    unpaged: bool = False
    #: validation began with the last snapshot, and nothing was counted yet
    joined_late: bool = False
    #: the last step that was read
    last: Stepped | None = None
    #: the time of that (Unix time in seconds), 0 where no step has it
    at: float = 0.0
    #: number of mismatches up to it
    judged: int = 0


class TierSeen:
    """The host tier of one log.

    locks: locks of its users.
    facts: the last ones shown.
    """

    def __init__(self, header: WatchHeader) -> None:
        """Take the sizes of a server with a host tier from the header of its log."""
        size = header.page_size
        tier = header.tier
        assert tier is not None
        self.config = TierConfig(
            page_size=size,
            window=header.window,
            full_pages=header.full_tokens // size,
            swa_pages=header.swa_tokens // size,
            host_pages=tier.full_tokens // size,
            host_swa_pages=tier.swa_tokens // size,
            width=header.width,
            policy=tier.policy,
            storage=tier.storage,
            states=tier.states and header.states,
            host_states=tier.states,
        )
        self.locks = TierUsers(self.config)
        self.facts: TierFacts | None = None
        self.broken: set[str] = set()


@dataclass(slots=True)
class Crossing:
    """KV of a request that crosses from a prefill to a decode server, in one of their logs."""

    request: str
    #: tokens of its input
    tokens: int = 0
    #: tokens that were sent or named so far
    start: int = 0
    end: int = 0
    #: pages of these tokens, None where the log has none
    pages: list[int] | None = None
    #: ranges in which these tokens were sent
    parts: int = 0
    #: the tokens have neither arrived nor been given back
    is_open: bool = False
    #: the last part was sent, or named
    is_sent: bool = False
    arrived: bool = False
    #: status of the room when the KV was given back
    status: str = ""

    @property
    def span(self) -> str:
        """The tokens, as a range."""
        return f"[{self.start}, {self.end})"

    def add_part(self, end: int, pages: list[int] | None, *, last: bool) -> None:
        """Add the next tokens that are sent, up to `end`."""
        self.pages = pages if not self.parts or pages is None else [*(self.pages or ()), *pages]
        self.end = end
        self.is_sent = last
        self.parts += 1


@dataclass(slots=True)
class TransfersSeen:
    """The transfers of a server of a pair, by room, the oldest first.

    kept: leftovers at its last rest, in words.
    reported: the leftovers that were reported.
    """

    rooms: dict[int, Crossing] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)
    reported: set[str] = field(default_factory=set)

    def add_room(self, room: int, crossing: Crossing) -> None:
        """Add a queued request. Only the newest closed rooms are kept."""
        self.rooms.pop(room, None)
        self.rooms[room] = crossing
        if len(self.rooms) > MAX_ROOMS:
            closed = [room for room, each in self.rooms.items() if not each.is_open]
            for room in closed[: MAX_ROOMS // 2]:
                del self.rooms[room]

    def open(self, room: int, request: str, start: int) -> Crossing:
        """Return the transfer of a room, which begins at `start` if it has not begun."""
        crossing = self.rooms.setdefault(room, Crossing(request))
        if not crossing.is_open:
            crossing.start = crossing.end = start
            crossing.parts = 0
            crossing.pages = None
            crossing.is_open = True
        return crossing
