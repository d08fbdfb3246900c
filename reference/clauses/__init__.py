"""The clauses of the specification: declarative predicates over one step of any system.

A clause says what must be so from the command, the reference's roles (who runs, which text) and the
system's facts. It shares no rule with the model: nothing here calls one, and a clause that leans on
the reference for more than roles says so in its scope. `CLAUSES` is in the order of evaluation, which is
the order of the imports. Of several that fail, `by_cause` picks the one that names the violation.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

# isort: off
from reference.clauses import outcomes, checks, lengths, lifecycle, tree, tree_locks
from reference.clauses import tree_evictions, freed, pages, window, contents

# isort: on
from reference.clauses.base import CLAUSES, PARTS, Clause, Failure, by_cause
from reference.clauses.step import Step

__all__ = ["CLAUSES", "Clause", "Failure", "about", "asked", "broken", "by_cause"]
_MODULES = (
    outcomes, checks, lengths, lifecycle, tree, tree_locks, tree_evictions, freed, pages, window, contents,
)  # fmt: skip


_OUTCOMES = tuple(c for c in CLAUSES.values() if c.id.startswith("OUT-"))


def asked(step: Step) -> tuple[Clause, ...]:
    """The clauses that this step can break: after a refusal that changed nothing, those of outcomes. Those
    that read nothing new, or break by nothing that is new, held before."""
    known: dict[str, tuple[Clause, ...]] = vars(step)
    if "asked" not in known:
        still = step.unchanged and not step.done and step.now is step.was
        known["asked"] = _asked(still, *_what(step), step.news)
    return known["asked"]


def about(step: Step) -> tuple[Clause, ...]:
    """The clauses that are about this command, on what there is."""
    return _about(*_what(step))


def _what(step: Step) -> tuple[type, bool, bool]:
    return type(step.command), step.after.tree is not None, step.config.geometry.window is not None


@lru_cache
def _about(kind: type, tree: bool, window: bool) -> tuple[Clause, ...]:
    lacks = {name for name, there in (("tree", tree), ("window", window)) if not there}
    return tuple(c for c in CLAUSES.values() if kind in c.of and lacks.isdisjoint(c.needs))


@lru_cache(maxsize=1 << 12)
def _asked(
    still: bool, kind: type, tree: bool, window: bool, news: tuple[bool, ...]
) -> tuple[Clause, ...]:
    new = {part for part, is_new in zip(PARTS, news) if is_new}
    return tuple(
        c for c in (_OUTCOMES if still else _about(kind, tree, window))
        if all(not parts or not new.isdisjoint(parts) for parts in (c.reads, c.breaks_by))
    )  # fmt: skip


def broken(step: Step, waived: frozenset[str] = frozenset()) -> list[tuple[Clause, Any]]:
    """All clauses but the waived that fail at this step, the headline first (by_cause).

    When outcomes differ states are not comparable and only that is said; when names differ (SES-2)
    the clauses after it are not asked; the backstop REF-1 speaks only when no other does.
    """
    found: list[tuple[Clause, Any]] = []
    for each in asked(step):
        if found and each.id == "REF-1":
            break
        failure = each.check(step) if each.id not in waived else None
        if failure is not None:
            found.append((each, failure))
            if each.id in ("OUT-1", "SES-2"):
                break
    return by_cause(found)
