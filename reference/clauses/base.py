"""The Clause type, and the registry that the modules beside this one fill."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, Literal, TypeVar, get_args

from reference.commands import COMMANDS
from reference.failures import Failure

Check = Callable[[Any], Failure | None]  # of a Step, or of a block-pool engine's BlockStep
# What a failure concerns. Of several at one step the first of these is the headline: a page that is wrong
# says more than a counter or an answer that is wrong with it. Lengths that bound who owns what are ownership.
Concern = Literal["contents and ownership", "cursors and locks", "outcomes, choices and order"]
CONCERNS: tuple[Concern, ...] = get_args(Concern)
# What there must be: a tree that the system shows, a window, recurrent state, a second tier, images. Where
# that lacks, and of other commands than a clause is about, it holds, its trigger does not come up, and it is
# not checked.
Needs = Literal["tree", "window", "states", "tracks", "tier", "keys", "images", "drafter"]


@dataclass(frozen=True, slots=True, eq=False)
class Clause:
    """One clause.

    check: None when it holds for the step, else a Failure. trigger: whether the step is
    one in which it could break. scope: where it does not hold or says nothing. decision: how an open
    question was answered, with the smallest counterexample of a simpler rule. assumption: under which that
    rule would do. rule: what of `reference` states it operationally, such as "cursors.cut, tree.lock".
    of: the commands that it is about; needs: what there must be. concerns: see by_cause. alone: it inspects
    the system's names alone, so it may be checked where another clause was violated before, and the reference
    is somewhere else.
    """

    id: str
    title: str
    sentence: str
    scope: str
    why: str
    decision: str
    assumption: str
    rule: str
    source: str
    of: frozenset[type]
    needs: tuple[Needs, ...]
    concerns: Concern
    alone: bool
    check: Check
    trigger: Callable[[Any], bool]


Failed = TypeVar("Failed")


def by_cause(failures: list[tuple[Clause, Failed]]) -> list[tuple[Clause, Failed]]:
    """The failures of one step, the headline first: by what they concern, then as they were evaluated."""
    return sorted(failures, key=lambda failure: CONCERNS.index(failure[0].concerns))


REGISTERED: dict[str, Clause] = {}


def in_order(registered: dict[str, Clause], modules: Iterable[ModuleType]) -> dict[str, Clause]:
    """The clauses of some modules, in the order of the modules and then of their text."""
    return {
        each.id: each
        for module in modules
        for each in registered.values()
        if each.check.__module__ == module.__name__
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
    """Register the decorated predicate as a clause."""

    def add(check: Check) -> Check:
        into[id] = Clause(
            id, title, sentence, scope, why, decision, assumption, rule, source, frozenset(of), needs,
            concerns, alone, check, trigger,
        )  # fmt: skip
        return check

    return add


clause = partial(register, REGISTERED)
