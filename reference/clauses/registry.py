"""The Clause type, and the registry that the modules beside this one fill."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, Literal, TypeVar, get_args

from reference.commands import COMMANDS
from reference.failures import Failure

Check = Callable[[Any], Failure | None]  # takes a Step, or a BlockStep of an engine with a block pool
# What a failure concerns. The headline of a step with several failures is the one that concerns the earliest
# of these: a wrong page says more than a counter or an answer that is wrong with it. Lengths that bound what
# a request owns count as ownership.
Concern = Literal["contents and ownership", "cursors and locks", "outcomes, choices and order"]
CONCERNS: tuple[Concern, ...] = get_args(Concern)
# What a system must have for a clause to be checked: a tree that it shows, a window, recurrent state, a
# second tier, images. On a system without it, and after a command that the clause is not about, the clause
# holds and its trigger does not come up.
Needs = Literal["tree", "window", "states", "tracks", "lazy", "tier", "keys", "images", "drafter"]


@dataclass(frozen=True, slots=True, eq=False)
class Clause:
    """One clause."""

    id: str
    title: str
    sentence: str
    #: where it does not hold or says nothing
    scope: str
    why: str
    #: how an open question was answered, with the smallest counterexample of a simpler rule
    decision: str
    #: what would have to hold for that simpler rule to be enough
    assumption: str
    #: the functions of `reference` that do what the clause says, such as "cursors.cut, tree.lock"
    rule: str
    source: str
    #: the commands that it is about
    of: frozenset[type]
    #: what a system must have for it to be checked
    needs: tuple[Needs, ...]
    #: orders the failures of one step (by_cause)
    concerns: Concern
    #: it reads only the system's names, so it can be checked after another clause was violated,
    #: when the reference has gone another way
    alone: bool
    #: returns None when the clause holds for the step, else a Failure
    check: Check
    #: whether the clause could break in the step
    trigger: Callable[[Any], bool]


Failed = TypeVar("Failed")


def by_cause(failures: list[tuple[Clause, Failed]]) -> list[tuple[Clause, Failed]]:
    """Sort the failures of one step, the headline first: by concern, then in the order of evaluation."""
    return sorted(failures, key=lambda failure: CONCERNS.index(failure[0].concerns))


REGISTERED: dict[str, Clause] = {}


def in_order(registered: dict[str, Clause], modules: Iterable[ModuleType]) -> dict[str, Clause]:
    """Return the clauses of some modules by id, in the order of the modules and then of their text."""
    return {
        clause.id: clause
        for module in modules
        for clause in registered.values()
        if clause.check.__module__ == module.__name__
    }


def register(
    into: dict[str, Clause],
    id: str,  # noqa: A002 (the field's name)
    title: str,
    sentence: str,
    *,
    why: str,
    rule: str,
    source: str,
    trigger: Callable[[Any], bool],
    of: tuple[type, ...] = COMMANDS,
    needs: tuple[Needs, ...] = (),
    concerns: Concern = "contents and ownership",
    alone: bool = False,
    scope: str = "Every step.",
    decision: str = "",
    assumption: str = "",
) -> Callable[[Check], Check]:
    """Return a decorator that enters a predicate in `into` as a clause."""

    def add(check: Check) -> Check:
        into[id] = Clause(
            id=id,
            title=title,
            sentence=sentence,
            scope=scope,
            why=why,
            decision=decision,
            assumption=assumption,
            rule=rule,
            source=source,
            of=frozenset(of),
            needs=needs,
            concerns=concerns,
            alone=alone,
            check=check,
            trigger=trigger,
        )
        return check

    return add


clause = partial(register, REGISTERED)
