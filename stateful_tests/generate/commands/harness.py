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
    """Names that nobody has."""

    session: str
    request: str
    lock_holder: str


class Present(NamedTuple):
    """How many there are in a state."""

    sessions: int
    ordinary: int
    lock_holders: int


class RefusalCase(NamedTuple):
    """A case that sets a refusal apart from others with its reason: in words, and whether a command met
    it."""

    label: str
    applies: Callable[[State, Any], bool]


Refusals = Mapping[Reason, RefusalCase]


class Harness(ABC, Generic[C]):
    """How a kind of command is drawn, enumerated and counted; `harness` says the rest.

    A new command must say how it is drawn. Everything else has a default: nothing for `explore`, one case.
    """

    applies: Callable[[Enabled], object]
    weight: Callable[[Enabled], int]
    is_in: Callable[[Scope], object]
    refusals: Refusals
    tells_late: bool

    @abstractmethod
    def draw(self, c: Enabled) -> C:
        """A command for the state, for random runs. Where `c.invalid`, it need not apply."""

    # Every command of a scope, by what it is about. Where a command is refused whatever its arguments are,
    # one value stands for all of them.

    def of_session(
        self, scope: Scope, session: Session, turn: Request | None, fresh: Names
    ) -> Commands:
        """Commands about a session; those about its turn are `of_request`."""
        return ()

    def of_request(self, scope: Scope, request: Request) -> Commands:
        """Commands about a turn or an ordinary request."""
        return ()

    def of_two(self, scope: Scope, one: Request, two: Request) -> Commands:
        """Batches of two. Their order counts only where both go into the radix tree."""
        return ()

    def of_lock_holder(self, scope: Scope, name: str, locked: Key) -> Commands:
        """Commands about a lock holder that has `locked` locked."""
        return ()

    def of_nobody(self, scope: Scope, present: Present, fresh: Names) -> Commands:
        """Commands about whoever is not there yet, about the tree, about everybody."""
        return ()

    def misnamed(self, scope: Scope, name: str, bearer: Session | Request | None) -> Commands:
        """Invalid commands with the name of somebody of another kind. bearer: None for a lock holder."""
        return ()

    def ill_formed(self, scope: Scope, fresh: Names) -> Commands:
        """Return commands that are refused in every state, and commands that name nobody."""
        return ()

    # Situations.

    def case(self, was: State, command: C, now: State) -> Labels:
        """The case of its rule that a command met."""
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

    applies: whether the state has somebody to whom the command applies. weight: how often it comes then: 3 a
    retract, 10 a batch that prefills. is_in: whether a scope has it. refusals: reasons with which a refusal
    has two cases. tells_late: situations tell whether results of whom it is about were in flight.
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
