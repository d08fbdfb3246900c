"""What a log alone says of requests and sessions, also while nothing is compared."""

from __future__ import annotations

from dataclasses import dataclass, field

from impl.sglang.server import events as log
from reference.commands import Choice


@dataclass(slots=True)
class RequestSeen:
    """A request that has not ended.

    session: the session that it was submitted for.
    rejected: as a turn of that session; it runs by itself, and says so to its client.
    retracts: how often it was retracted.
    interrupted: a rejected turn of its session went through the server since.
    matched: its prefix when the scheduler last looked at it (tokens).
    rounds: prepared rounds whose results are to come; True: as a decode entry of a mixed batch.
    eviction: the window eviction that belongs to its next prefill.
    """

    session: str | None
    rejected: bool = False
    retracts: int = 0
    interrupted: bool = False
    matched: int | None = None
    rounds: list[bool] = field(default_factory=list)
    eviction: Choice | None = None


@dataclass(slots=True)
class SessionSeen:
    """An open session.

    turn: the request that is its turn, by submissions and ends alone.
    times_out: it may close by itself.
    close_asked: a client closed it.
    stays_busy: the known fault by which the server takes it for busy.
    text_unknown: a known fault has left text of another turn in it, which its next turn shows.
    """

    turn: str | None = None
    times_out: bool = False
    close_asked: bool = False
    stays_busy: str | None = None
    text_unknown: bool = False


class Seen:
    """Requests and sessions by name.

    outside: retracted requests that were not queued again yet.
    due: sessions that a client has closed while no turn was in flight.
    """

    def __init__(self) -> None:
        self.requests: dict[str, RequestSeen] = {}
        self.sessions: dict[str, SessionSeen] = {}
        self.outside: dict[str, None] = {}
        self.due: dict[str, None] = {}

    def session_of(self, request: str) -> SessionSeen | None:
        """The session that a request was submitted for."""
        seen = self.requests.get(request)
        return self.sessions.get(seen.session or "") if seen is not None else None

    def before(self, e: log.Event) -> None:
        """Note what a line begins."""
        match e:
            case log.SessionOpened(done=True):
                self.sessions[e.session] = SessionSeen(times_out=e.times_out)
            case log.Submitted():
                self.requests[e.request] = RequestSeen(e.session, e.rejected)
            case log.Admitted():
                self._interrupts(e.request)
            case log.Released():
                self._interrupts(e.request)
                if e.reason is None and e.request in self.requests:
                    self.requests[e.request].retracts += 1
            case log.QueueAborted():
                for name in e.queued:
                    self._interrupts(name)

    def after(self, e: log.Event) -> None:
        """Note what a line ends; whoever judges the line still needs it."""
        match e:
            case log.SessionClosed():
                self.sessions.pop(e.session, None)
                self.due.pop(e.session, None)
            case log.Submitted(rejected=False) if session := self.sessions.get(e.session or ""):
                session.turn = e.request
            case log.Admitted(session=None):
                self._ends_turn(e.request)
            case log.Released(reason=None):
                self.outside[e.request] = None
            case log.Released():
                self._ends(e.request)
            case log.Requeued():
                self.outside.pop(e.request, None)
            case log.QueueAborted():
                for name in e.queued:
                    self._ends(name)
            case log.Stepped():
                for name in self.outside:
                    self._ends(name)
                self.outside.clear()

    def _interrupts(self, name: str) -> None:
        request, session = self.requests.get(name), self.session_of(name)
        if request is not None and request.rejected and session is not None:
            if turn := self.requests.get(session.turn or ""):
                turn.interrupted = True

    def _ends(self, name: str) -> None:
        self._ends_turn(name)
        self.requests.pop(name, None)

    def _ends_turn(self, name: str) -> None:
        session = self.session_of(name)
        if session is not None and session.turn == name:
            session.turn = None
