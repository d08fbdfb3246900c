"""Explanations of violations by known faults: without the needs of the fault, the run conforms.

Most violations of a release with known faults have few shapes: one clause, one last command, the same words
apart from numbers. The first violations of each shape are explained in full, and every sixteenth after them,
so that another fault that looks the same is not missed. Where several known faults may explain a violation,
only the first few short traces of each such set are attributed to one of them: that changes no verdict.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from impl.adapter import AnySystem
from stateful_tests.check.known_faults.causes import (
    REJECTED, Needs, needs, needs_to_avoid, possible_needs, without_needs,
)  # fmt: skip
from stateful_tests.check.known_faults.masks import (
    Mask, Standing, compare_with_base, do_the_same, fails_alike, masks_of_violation, how_it_breaks, masks,
)  # fmt: skip
from stateful_tests.lockstep.known_faults import KnownFault
from stateful_tests.lockstep.replays import mostly_refused
from stateful_tests.lockstep.run_results import Run, Trace, Violation
from stateful_tests.shrink.minimise import failing_prefix

_EXPLAINED_FIRST = 2  # violations of a shape that are all explained
_EXPLAINED_EVERY = 16  # after them, one in so many
_ATTRIBUTED = 3  # violations of a clause and a set of candidates that are attributed to one fault
_ATTRIBUTED_LENGTH = 60  # commands of the longest trace that is attributed


class Shape(NamedTuple):
    """The common traits of violations that look the same."""

    clauses: tuple[str, ...]
    faults: tuple[str, ...]
    command: str
    expected: str
    observed: str


def shape_of(candidates: Sequence[Mask], trace: Trace, violation: Violation) -> Shape:
    """Return the shape of a violation that known faults may explain. Numbers do not matter, nor how many
    members of a list look alike, nor the names of adapters and salts."""
    failure = violation.failure_of(violation.clause)
    command = type(trace.commands[violation.step]).__name__
    words = (_words_of(text) for text in (failure.expected, failure.observed))
    return Shape(violation.clauses, tuple(mask.fault.id for mask in candidates), command, *words)


def _words_of(text: str) -> str:
    """Return a text without numbers, names of adapters and salts, and repeated members of lists."""
    text = re.sub(r"\b(adapter|salt) \w+", r"\1", how_it_breaks(text))
    return re.sub(r"\b(\w.*?)(, \1)+\b", r"\1", text)


@dataclass(slots=True)
class Explained:
    """Explanations by known faults so far: by shape, and by clause and faults for violations that
    shapes do not distinguish."""

    shapes: Counter[Shape] = field(default_factory=Counter)
    attributed: Counter[tuple[str, tuple[str, ...]]] = field(default_factory=Counter)

    def candidates(
        self, system: AnySystem, candidates: Sequence[Mask], trace: Trace, violation: Violation,
        others: Collection[str],
    ) -> Sequence[Mask]:  # fmt: skip
        """Return the known faults that explain a violation, as `explains` decides; all candidates where
        that does not decide."""
        shape = shape_of(candidates, trace, violation)
        times = self.shapes[shape]
        in_full = times < _EXPLAINED_FIRST or times % _EXPLAINED_EVERY == 0
        if in_full and not explains(system, candidates, trace, violation, others):
            return []
        self.shapes[shape] += 1
        ambiguous = violation.clause, shape.faults
        is_long = violation.step >= _ATTRIBUTED_LENGTH
        if len(candidates) == 1 or is_long or self.attributed[ambiguous] >= _ATTRIBUTED:
            return candidates
        self.attributed[ambiguous] += 1
        return [explaining(system, candidates, trace, violation.clause)]


def explaining_masks(
    system: AnySystem,
    base: AnySystem | None,
    masks: Sequence[Mask],
    trace: Trace,
    violation: Violation,
    explained: Explained | None = None,
) -> Sequence[Mask]:
    """Return the known faults one of which a violation shows: several where nothing distinguishes them.
    None where a part of it is new, or its headline is no known fault's.

    explained: earlier explanations.

    An engine that schedules by itself may come to a known fault in a trace in which its base conforms,
    unless the two do the same, or a clause is violated that no known fault of the tree violates.
    """
    headline, *others = (
        compare_with_base(base, masks, trace, violation, clause, system) for clause in violation.clauses
    )
    if all(finding.stands is Standing.KNOWN for finding in (headline, *others)):
        return headline.candidates
    if base is not None and not system.capabilities.system_kind.schedules:
        return []
    if base is not None and headline.stands is Standing.NEW:
        if do_the_same(system, base, trace, violation) or violates_more(masks, violation):
            return []
    candidates = masks_of_violation(masks, violation, violation.clause)
    explained = explained or Explained()
    return explained.candidates(system, candidates, trace, violation, clauses_of(masks, violation))


def violates_more(masks: Sequence[Mask], violation: Violation) -> bool:
    """Return whether a clause of a violation is one that no known fault of the tree violates."""
    known = {c for mask in masks if mask.holds for c in (*mask.fault.clauses, *mask.violated)}
    return not known.issuperset(violation.clauses)


def clauses_of(masks: Sequence[Mask], violation: Violation) -> set[str]:
    """Return the clauses of known faults without those that are violated here: a smaller trace with one
    of these as its headline shows another fault."""
    known = {clause for mask in masks if mask.holds for clause in mask.fault.clauses}
    return known.difference(violation.clauses)


def needs_of(masks: Sequence[Mask], clause: str) -> list[Needs]:
    """Return the needs of the traces of known faults."""
    return [need for mask in masks for need in mask.needs_of_traces(clause)]


def explains(
    system: AnySystem,
    masks: Sequence[Mask],
    trace: Trace,
    violation: Violation,
    others: Collection[str] = (),
) -> bool:
    """Return whether known faults explain a violation, without asking a base: without one of the things
    that a fault's own trace needs, the run does not violate the clause, or breaks in another way, or
    shows another fault.

    others: clauses that are headlines of other faults.
    """
    clause = violation.clause

    def as_it_does(seen: Violation) -> bool:
        return seen.clause not in others and fails_alike(violation, seen, clause)

    return bool(masks) and not unexplained_needs(
        system, trace, clause, needs_of(masks, clause), as_it_does
    )


def known_fault(system: AnySystem, run: Run) -> KnownFault | None:
    """Return the known fault of a release that explains the violation of a replayed trace; None where
    there is none, or most of the trace was refused."""
    if run.violation is None or mostly_refused(run):
        return None
    clause = run.violation.clause
    of_clause = masks_of_violation([*masks(system, clause=clause)], run.violation, clause)
    if not explains(system, of_clause, run.trace, run.violation):
        return None
    return explaining(system, of_clause, run.trace, clause).fault


def known_fault_beside(
    base: AnySystem, beside_base: Sequence[Mask], system: AnySystem, run: Run
) -> KnownFault | None:
    """Return the known fault of a tree that has a base: the base decides, as in a check.

    beside_base: the masks of both.
    """
    if run.violation is None or mostly_refused(run):
        return None
    clause = run.violation.clause
    candidates = explaining_masks(system, base, beside_base, run.trace, run.violation)
    if len(candidates) < 2:
        return candidates[0].fault if candidates else None
    # Beside a base masks do not say what their traces need, which tells several faults apart.
    faults = [mask.fault for mask in candidates]
    of_tree = [mask for mask in masks(system, clause=clause) if mask.holds and mask.fault in faults]
    return explaining(system, of_tree or candidates, run.trace, clause).fault


def explaining(system: AnySystem, masks: Sequence[Mask], trace: Trace, clause: str) -> Mask:
    """Return the known fault whose own trace has the most needs that this one has as well. Among
    equals, the fault whose trace has the fewest needs that this one lacks: next to a fault of every
    prompt, one of received prompts needs none."""
    if len(masks) == 1:
        return masks[0]
    known = [(*shown, mask) for mask in masks for shown in mask.traces_of(clause)]
    needed_by_known = {need for _, needed, _ in known for need in needed}
    needed = {*needs(system, trace, clause, needed_by_known)}

    def shared(each: tuple[Trace, Needs, Mask]) -> tuple[bool, int]:
        _, needs_of_own, _ = each
        return {*needs_of_own} <= needed, len(needs_of_own)

    most = max(map(shared, known))
    best = [candidate for candidate in known if shared(candidate) == most]
    if len({id(mask) for *_, mask in best}) == 1:
        return best[0][2]
    here = possible_needs(system, trace)
    return min(best, key=lambda each: len(possible_needs(system, each[0]) - here))[2]


def unexplained_needs(
    system: AnySystem,
    trace: Trace,
    clause: str,
    known: list[Needs],
    alike: Callable[[Violation], bool] = lambda _: True,
) -> tuple[Needs, Trace] | None:
    """Return the needs to leave out of a trace so that no known fault explains it, and the trace
    without them, if that still violates the clause and is `alike`."""
    for without in needs_to_avoid(known):
        candidate = without_needs(system, trace, tuple(need for need in without if need != REJECTED))
        prefix = failing_prefix(
            system, clause, candidate,
            allowed=lambda _, seen: alike(seen), patient=REJECTED in without,
        )  # fmt: skip
        if prefix is not None:
            return without, replace(candidate, commands=prefix)
    return None
