"""The definition of a rule: refusals, tables of cases, and the function that carries the command out.

Formulas are expressions over C, A, E, R (the four cursors before the command: those of the request, or of
the slot that it resumes), P (page_size), W (window) and the names under `where`. Tests evaluate them, and the
refusals, against `model.step` on every transition of small scopes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from reference.commands import DONE, Choice, Done, Reason
from reference.state import Cursors, Request, State
from reference.prefix_cache import Effects, lock_holders, with_room

Span = tuple[str, str]  # [start, end) in tokens; empty where end <= start
NOTHING: Span = ("0", "0")
PageRow = tuple[str, str, str]


class Refusal(Exception):
    """The command is refused for a reason, its argument; nothing has changed."""


def require(condition: object, reason: Reason) -> None:
    """Refuse the command unless the condition holds."""
    if not condition:
        raise Refusal(reason)


class ChoiceNotAllowed(Exception):
    """A system chose something that the specification does not leave to it (OUT-3)."""


@dataclass(slots=True)
class RuleContext:
    """A rule's input beside state and command: choices to follow, and effects and outcome to fill in."""

    choices: dict[str, Choice]
    effects: Effects
    done: Done = DONE


@dataclass(frozen=True, slots=True)
class Case:
    """The effect of a command on a row in one case, on a server without a radix tree.

    when: the case in words.
    holds: as an expression over `slot`, `session`, `closing`, `started`, `turn` (what there is before the
        command).
    after: cursor -> formula, of those that move; None where the row is given back.
    full, swa: positions whose pages of that pool are given back.
    """

    when: str
    holds: str = "True"
    after: dict[str, str] | None = field(default_factory=dict)
    full: Span = NOTHING
    swa: Span = NOTHING


def row_is_cut(when: str, holds: str) -> Case:
    """Return the case in which the row is kept up to target."""
    caps = {"C": "min(C, target)", "A": "min(A, target)", "E": "min(E, target)"}
    return Case(when, holds, caps, ("ceil(target)", "ceil(A)"), ("ceil(max(target, E))", "ceil(A)"))


def row_goes(when: str, holds: str) -> Case:
    """Return the case in which the row is freed, with every page that it owns."""
    return Case(when, holds, None, ("R", "ceil(A)"), ("ceil(max(R, E))", "ceil(A)"))


@dataclass(frozen=True, slots=True)
class Rule:
    """The rule of one command."""

    command: type
    #: the effect in words
    does: str
    #: each reason for a refusal, in the order of Reason, with its condition
    refused: dict[Reason, str]
    carry_out: Callable[[State, Any, RuleContext], State]
    #: names used in the formulas
    where: tuple[tuple[str, str], ...]
    #: cases of the command; empty where no cursor moves and nothing is freed
    cases: tuple[Case, ...]
    #: commands on the radix tree: the subject of the table, and its rows (the case, the fate of the
    #: full page, that of the SWA page); the first case that holds applies
    page: str
    pages: tuple[PageRow, ...]
    #: what is left to the system
    choice: str
    #: the difference on a server with a radix tree
    tree: str
    #: the difference on a model with recurrent state
    states: str


RULES: dict[type, Rule] = {}
C = TypeVar("C")
CarryOut = Callable[[State, C, RuleContext], State]


def rule(
    command: type[C],
    does: str,
    refused: dict[Reason, str],
    *,
    where: tuple[tuple[str, str], ...] = (),
    cases: tuple[Case, ...] = (),
    page: str = "",
    pages: tuple[PageRow, ...] = (),
    choice: str = "",
    tree: str = "",
    states: str = "",
) -> Callable[[CarryOut[C]], CarryOut[C]]:
    """Register the decorated function as the rule of `command`."""

    def add(carry_out: CarryOut[C]) -> CarryOut[C]:
        RULES[command] = Rule(
            command,
            does=does,
            refused=refused,
            carry_out=carry_out,
            where=where,
            cases=cases,
            page=page,
            pages=pages,
            choice=choice,
            tree=tree,
            states=states,
        )
        return carry_out

    return add


# -- what several rules ask for -------------------------------------------------------------------

NAME_TAKEN = "a session, request or lock owner is called that"
NO_REQUEST = "no request is called that"
NOT_RUNNING = "the request does not run: its input is not complete, or it waits"


def known_request(state: State, name: str) -> Request:
    """Return the request of that name, or refuse."""
    request = state.request(name)
    if request is None:
        raise Refusal(Reason.UNKNOWN_REQUEST)
    return request


def is_taken(state: State, name: str) -> bool:
    """Return whether a session, a request or a lock owner has this name."""
    known = state.session(name) or state.request(name)
    return known is not None or name in lock_holders(state)


def cursors_of(request: Request) -> Cursors:
    """Return the cursors of a request that has some."""
    assert request.cursors is not None
    return request.cursors


def make_room(
    state: State, pages: int, context: RuleContext, swa_pages: int | None = None, states: int = 0
) -> State:
    """Return the state with that many free pages in each pool, or refuse.

    swa_pages: `pages` if None.
    states: slots of recurrent state, for models that have it.
    """
    if not state.config.geometry.states:
        states = 0
    state_with_room = with_room(
        state, pages, pages if swa_pages is None else swa_pages, context.effects, states
    )
    if isinstance(state_with_room, Reason):
        raise Refusal(state_with_room)
    return state_with_room
