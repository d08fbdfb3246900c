"""The harness of a command, and its registration."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from reference.commands import Command, Reason
from reference.radix_tree import Key
from reference.state import Request, Session, State
from stateful_tests.generate.enabled_commands import Enabled
from stateful_tests.generate.exploration_scope import Scope

C = TypeVar("C")
Commands = Iterable[Command]
Labels = tuple[str, ...]  # of a situation; "" in the place of one that does not apply


class Names(NamedTuple):
    """Names that are not in use."""

    session: str
    request: str
    lock_holder: str


class Present(NamedTuple):
    """Numbers of sessions and requests in a state."""

    sessions: int
    ordinary: int
    lock_holders: int


class RefusalCase(NamedTuple):
    """A case that distinguishes refusals with the same reason: in words, and whether a command met it."""

    label: str
    applies: Callable[[State, Any], bool]


Refusals = Mapping[Reason, RefusalCase]


class Harness(ABC, Generic[C]):
    """How a kind of command is drawn, enumerated and counted; `harness` registers one.

    A new command must say how it is drawn. Everything else has a default: nothing for `explore`, one
    case.
    """

    applies: Callable[[Enabled], object]
    weight: Callable[[Enabled], int]
    is_in: Callable[[Scope], object]
    refusals: Refusals
    tells_late: bool

    @abstractmethod
    def draw(self, c: Enabled) -> C:
        """Return a command for the state, for random runs. With `c.invalid` it may be refused."""

    # Every command of a scope, by what it is about. Where a command is refused whatever its arguments are,
    # one value stands for all of them.

    def of_session(
        self, scope: Scope, session: Session, turn: Request | None, fresh: Names
    ) -> Commands:
        """Return the commands about a session; those about its turn are `of_request`."""
        return ()

    def of_request(self, scope: Scope, request: Request) -> Commands:
        """Return the commands about a turn or an ordinary request."""
        return ()

    def of_two(self, scope: Scope, one: Request, two: Request) -> Commands:
        """Return batches of two. Their order counts only where both go into the radix tree."""
        return ()

    def of_lock_holder(self, scope: Scope, name: str, locked: Key) -> Commands:
        """Return the commands about a lock owner that has `locked` locked."""
        return ()

    def of_nobody(self, scope: Scope, present: Present, fresh: Names) -> Commands:
        """Return commands about a name that is not in use, about the tree, or about all."""
        return ()

    def misnamed_commands(self, scope: Scope, name: str, bearer: Session | Request | None) -> Commands:
        """Return invalid commands with the name of a holder of another kind.

        bearer: None for a lock owner.
        """
        return ()

    def ill_formed(self, scope: Scope, fresh: Names) -> Commands:
        """Return commands that are refused in every state, and commands with a name that is not in use."""
        return ()

    # -- situations -------------------------------------------------------------------------------

    def case(self, was: State, command: C, now: State) -> Labels:
        """Return the case of its rule that a command met."""
        return ()


HARNESSES: dict[type, Harness[Any]] = {}


def harness(
    kind: type[C],
    *,
    applies: Callable[[Enabled], object],
    weight: Callable[[Enabled], int],
    is_in: Callable[[Scope], object],
    refusals: Refusals | None = None,
    tells_late: bool = False,
) -> Callable[[type[Harness[C]]], type[Harness[C]]]:
    """Register the decorated class as the harness of a kind of command.

    applies: returns whether the command applies to anything in the state.
    weight: how often it comes then, such as 3 for a retract and 10 for a batch that prefills.
    is_in: returns whether a scope has it.
    refusals: reasons whose refusals have two cases.
    tells_late: situations distinguish whether results of the request were in flight.
    """

    def add(made: type[Harness[C]]) -> type[Harness[C]]:
        one = HARNESSES[kind] = made()
        one.applies = applies
        one.weight = weight
        one.is_in = is_in
        one.refusals = refusals or {}
        one.tells_late = tells_late
        return made

    return add
