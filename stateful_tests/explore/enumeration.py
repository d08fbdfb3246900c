"""Every command of a scope in a state, by what it is about: one unit, two of them, or none in particular.

A unit is a session with its turn, an ordinary request, or a lock holder of the tree. The harnesses
(stateful_tests/generate/commands) say which commands there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from reference.commands import COMMANDS, Command
from reference.radix_tree import Key
from reference.state import Request, Session
from stateful_tests.generate.commands import HARNESSES
from stateful_tests.generate.commands.harness import Harness, Names, Present
from stateful_tests.generate.exploration_scope import Scope


@lru_cache(maxsize=64)
def kinds(scope: Scope) -> tuple[type, ...]:
    """Return the kinds of commands that a scope has, in the order of the vocabulary."""
    return tuple(kind for kind in COMMANDS if HARNESSES[kind].is_in(scope))


def _harnesses(scope: Scope) -> Iterator[Harness[Any]]:
    return (HARNESSES[kind] for kind in kinds(scope))


def of_session(
    scope: Scope, session: Session, turn: Request | None, fresh: Names
) -> Iterator[Command]:
    """Return commands about a session and its turn."""
    for harness in _harnesses(scope):
        yield from harness.of_session(scope, session, turn, fresh)
    yield from _misnamed_commands(scope, session.name, session)
    if turn is not None:
        yield from of_request(scope, turn)


def of_request(scope: Scope, request: Request) -> Iterator[Command]:
    """Return commands about a request."""
    for harness in _harnesses(scope):
        yield from harness.of_request(scope, request)
    yield from _misnamed_commands(scope, request.name, request)


def of_two(scope: Scope, one: Request, two: Request) -> Iterator[Command]:
    """Return batches of two requests."""
    if not scope.batches:
        return
    for harness in _harnesses(scope):
        yield from harness.of_two(scope, one, two)


def of_lock_holder(scope: Scope, name: str, locked: Key) -> Iterator[Command]:
    """Yield commands about a lock holder that has `locked` locked."""
    for harness in _harnesses(scope):
        yield from harness.of_lock_holder(scope, name, locked)
    yield from _misnamed_commands(scope, name, None)


def of_nobody(scope: Scope, present: Present, fresh: Names) -> Iterator[Command]:
    """Yield commands about new requests and sessions, the tree, and all requests; and ill-formed ones."""
    for harness in _harnesses(scope):
        yield from harness.of_nobody(scope, present, fresh)
        if scope.invalid:
            yield from harness.ill_formed(scope, fresh)


def _misnamed_commands(scope: Scope, name: str, bearer: Session | Request | None) -> Iterator[Command]:
    """Return a name that is taken for that of somebody of another kind: by every command, in the scope or
    not."""
    if not scope.invalid:
        return
    for kind in COMMANDS:
        yield from HARNESSES[kind].misnamed_commands(scope, name, bearer)
