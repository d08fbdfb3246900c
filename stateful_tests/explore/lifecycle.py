"""The lifecycle of requests and sessions: every change that a scope reaches, as edges of a diagram."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from typing import NamedTuple

from reference.commands import Command, Done, DescribedEnum
from reference.state import IN_BATCH, Session, State
from stateful_tests.generate.exploration_scope import Scope
from stateful_tests.coverage.situations import kind_name
from stateful_tests.explore.search import Explorer

NOWHERE = "[*]"  # Mermaid's name for the start and the end


class Life(DescribedEnum):
    """The life of a session: its slot, and the turn that uses it."""

    EMPTY = "empty", "keeps nothing"
    FIRST_TURN = "first_turn", "no slot yet, a turn is in flight"
    IDLE = "idle", "slot, no turn"
    WAITING = "waiting", "slot, its turn waits"
    LENT = "lent", "slot lent, its turn is in a batch"
    CLOSING = "closing", "closed while a turn is in flight"


Transition = tuple[State, Command, State]  # state before, command, state after


class Edge(NamedTuple):
    """A command that takes a request or a session from one phase to another.

    before, after: the phases, or NOWHERE.
    """

    before: str
    command: str
    after: str


def life(state: State, session: Session) -> Life:
    """Return the life of a session in a state."""
    if session.closing:
        return Life.CLOSING
    turn = state.request(session.turn)
    if turn is None:
        return Life.EMPTY if session.slot is None else Life.IDLE
    if session.slot is None:
        return Life.FIRST_TURN
    return Life.LENT if turn.phase in IN_BATCH else Life.WAITING


def edges(steps: Iterable[Transition]) -> tuple[set[Edge], set[Edge]]:
    """Return the edges of requests, and those of sessions, in some transitions.

    A command that changes no phase is an edge of the requests that it names, and of no session.
    """
    of_requests: set[Edge] = set()
    of_sessions: set[Edge] = set()
    for was, command, now in steps:
        name = kind_name(type(command))
        of_requests.update(_changes(_phases(was), name, _phases(now), {*_named_requests(command)}))
        of_sessions.update(_changes(_lives(was), name, _lives(now)))
    return of_requests, of_sessions


def _changes(
    before: dict[str, str], command: str, after: dict[str, str], named: Set[str] = frozenset()
) -> Iterator[Edge]:
    """Yield the edges of one command.

    before, after: name -> phase.
    named: the request or session that the command names.
    """
    for name in before.keys() | after.keys():
        edge = Edge(before.get(name, NOWHERE), command, after.get(name, NOWHERE))
        if edge.before != edge.after or name in named:
            yield edge


def _phases(state: State) -> dict[str, str]:
    return {request.name: request.phase.value for request in state.requests}


def _lives(state: State) -> dict[str, str]:
    return {session.name: life(state, session).value for session in state.sessions}


def transitions(scope: Scope) -> Iterator[Transition]:
    """Yield the transitions of every command that is carried out in a scope."""
    explorer = Explorer(scope, clauses=False)
    explorer.run()
    for was in explorer.queue:
        for command, outcome, now in explorer.moves(was):
            if isinstance(outcome, Done):
                yield was, command, now


def _named_requests(command: Command) -> Iterator[str]:
    """Yield the requests that a command names."""
    yield getattr(command, "request", "")
    yield from getattr(command, "requests", ())
    for lane in getattr(command, "lanes", ()):
        yield lane.request
