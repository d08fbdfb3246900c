"""The clauses of the specification: declarative predicates over one step of any system.

A clause says what must be so from the command, the reference's roles (who runs, which text) and the
system's facts. It shares no rule with the model: nothing here calls one, and a clause that leans on
the reference for more than roles says so in its scope. `CLAUSES` is in the order of evaluation, that of
`_MODULES`. Of several that fail, `by_cause` picks the one that names the violation.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from reference.clauses import (
    attention_reads, cursor_bounds, freed_pages, memory_checks, outcomes, page_owners, recurrent_states,
    sessions, sliding_window, tree_evictions, tree_inserts, tree_locks, tree_shape,
)  # fmt: skip
from reference.clauses.registry import REGISTERED, Clause, by_cause, in_order
from reference.clauses.step import Step

__all__ = ["CLAUSES", "Clause", "about", "broken_off", "by_cause", "failed_clauses"]
_MODULES = (
    outcomes, memory_checks, cursor_bounds, sessions, tree_shape, tree_inserts, tree_locks, tree_evictions,
    freed_pages, page_owners, sliding_window, recurrent_states, attention_reads,
)  # fmt: skip
CLAUSES = in_order(REGISTERED, _MODULES)


def about(step: Step, waived: frozenset[str] = frozenset()) -> tuple[Clause, ...]:
    """Return the clauses about this command on this system, without the waived ones."""
    geometry = step.config.geometry
    kind: type = type(step.command)
    return clauses_of(
        kind, step.after.tree is not None, geometry.window is not None, geometry.states > 0,
        geometry.tracks, geometry.lazy, waived,
    )  # fmt: skip


@cache
def clauses_of(
    kind: type,
    tree: bool,
    window: bool,
    states: bool,
    tracks: bool,
    lazy: bool,
    waived: frozenset[str] = frozenset(),
) -> tuple[Clause, ...]:
    """Return the clauses about a kind of command, without the waived ones. A system may lack a tree, a
    window, recurrent states, tracked or lazily tracked states: the clauses that need them are left out."""
    capabilities = {"tree": tree, "window": window, "states": states, "tracks": tracks, "lazy": lazy}
    lacks = {need for need, has in capabilities.items() if not has}
    return tuple(
        c
        for c in CLAUSES.values()
        if kind in c.of and lacks.isdisjoint(c.needs) and c.id not in waived
    )


def failed_clauses(step: Step, waived: frozenset[str] = frozenset()) -> list[tuple[Clause, Any]]:
    """Return all clauses that fail at this step, without the waived ones, the headline first
    (by_cause).

    When outcomes differ, states are not comparable and only the outcome is reported. When names differ
    (SES-2), the clauses after it are not checked. The backstop REF-1 is reported only when no other
    fails.
    """
    failures: list[tuple[Clause, Any]] = []
    for clause in about(step, waived):
        failure = clause.check(step)
        if failure is None or (failures and clause.id == "REF-1"):
            continue
        failures.append((clause, failure))
        if clause.id in ("OUT-1", "SES-2"):
            break
    return by_cause(failures)


# They read facts alone, and nothing that a command that was not carried out to its end may still owe.
_WHEREVER_IT_ENDS = "TREE-1", "TREE-3", "OWN-5", "MAP-1", "OWN-2", "OWN-1", "STA-3"


def broken_off(step: Step, waived: frozenset[str] = frozenset()) -> list[tuple[Clause, Any]]:
    """Return the clauses that fail in the state left by a system that has failed, the headline first."""
    clauses = [clause for clause in about(step, waived) if clause.id in _WHEREVER_IT_ENDS]
    return [(clause, failure) for clause in clauses if (failure := clause.check(step)) is not None]
