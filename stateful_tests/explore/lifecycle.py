"""The lifecycle of requests and sessions: every change that a scope reaches, as edges of a diagram."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from reference.commands import Command, Done, DescribedEnum
from reference.state import IN_BATCH, Session, State
from stateful_tests.generate.scope import Scope
from stateful_tests.coverage.situations import kind_name
from stateful_tests.explore.search import Explorer

NOWHERE = "[*]"  # before and after, as Mermaid writes it


class Life(DescribedEnum):
    """The life of a session: what it keeps, and who uses it."""

    EMPTY = "empty", "keeps nothing"
    FIRST_TURN = "first_turn", "no slot yet, a turn is in flight"
    IDLE = "idle", "slot, no turn"
    WAITING = "waiting", "slot, its turn waits"
    LENT = "lent", "slot lent, its turn is in a batch"
    CLOSING = "closing", "closed while a turn is in flight"


Transition = tuple[State, Command, State]  # before, what is carried out, after


class Edge(NamedTuple):
    """One change: from where, by which command, to where."""

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
    """The edges of the life cycles of requests and of sessions in some transitions.

    A command that leaves a request in its phase is an edge if it names the request. A command that leaves a
    session where it is is none.
    """
    requests: set[Edge] = set()
    sessions: set[Edge] = set()
    for was, command, now in steps:
        kind = kind_name(type(command))
        named = set(_named(command))
        phases = ({r.name: r.phase.value for r in state.requests} for state in (was, now))
        lives = ({s.name: life(state, s).value for s in state.sessions} for state in (was, now))
        for into, (before, after) in ((requests, phases), (sessions, lives)):
            for name in {*before, *after}:
                edge = Edge(before.get(name, NOWHERE), kind, after.get(name, NOWHERE))
                if edge.before != edge.after or (into is requests and name in named):
                    into.add(edge)
    return requests, sessions


def transitions(scope: Scope) -> Iterator[Transition]:
    """All of a scope."""
    explorer = Explorer(scope, clauses=False)
    explorer.run()
    for was in explorer.queue:
        for command, outcome, now in explorer.moves(was):
            if isinstance(outcome, Done):
                yield was, command, now


def _named(command: Command) -> Iterator[str]:
    """The requests that a command is about."""
    yield getattr(command, "request", "")
    yield from getattr(command, "requests", ())
    for lane in getattr(command, "lanes", ()):
        yield lane.request
