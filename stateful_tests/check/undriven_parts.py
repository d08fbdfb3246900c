"""Presets, commands and lines of the corpus that run on the base of a check and not on the tree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

from impl.adapter import AnySystem, UnusableImplementation
from impl.system_spec import ENGINES, system_spec
from reference.geometry import GeometryError
from stateful_tests.check.corpus import CorpusLine
from stateful_tests.check.run_counts import offers_all
from stateful_tests.check.run_driver import lines_of
from stateful_tests.check.known_faults.lookup import nearest_first
from stateful_tests.check.known_faults.masks import release_of
from stateful_tests.check.check_plans import Plan, fit_sizes, for_system, sizes_for
from stateful_tests.lockstep import system_names
from stateful_tests.lockstep.replays import replay
from stateful_tests.lockstep.run_results import Trace

_AROUND = 2  # releases next to that of a tree


Refuses = Callable[[Any], str | None]  # why a system refuses something; None where it does not


def parts_left_out(
    system: AnySystem, base: AnySystem, asked: Plan, unfit: Collection[str], *, guessed: bool = False
) -> dict[str, str]:
    """Return the parts of a plan that run on the base and not on the system, each with the reason.

    asked: the plan before it was made to fit the system.
    unfit: situations with a line that the system cannot be driven through.
    guessed: the base is only the nearest release. A part then counts only if the tree offers it, its code
        refuses it, and no neighbouring release refuses it for the same reason.
    """
    reason_by_part: dict[str, str] = {}
    refusals: dict[str, Refuses] = {}
    plan = for_system(asked, system)
    of_base = for_system(asked, base)
    for name in of_base.presets:
        if guessed and name not in plan.presets:
            continue
        reason = _refusal_reason(asked, name, system)
        if reason is not None and _refusal_reason(asked, name, base) is None:
            reason_by_part[f"preset {name}"] = reason
            refusals[f"preset {name}"] = partial(_refusal_reason, asked, name)
    missing = sorted(base.capabilities.commands - system.capabilities.commands)
    if missing and not guessed:
        reason_by_part[f"commands {', '.join(missing)}"] = "the adapter does not offer them here"
    reasons: Counter[str] = Counter()
    first_line: dict[str, CorpusLine] = {}
    for line in _undriven_lines(system, plan, unfit):
        if guessed and not offers_all(system, line):
            continue
        if _line_refusal(line, base) is None and (reason := _line_refusal(line, system)) is not None:
            reasons[reason] += 1
            first_line.setdefault(reason, line)
    for reason, count in reasons.items():
        part = f"{count} line{'s' if count > 1 else ''} of the corpus"
        if part in reason_by_part:  # as many for another reason
            part = f"{part}, such as {first_line[reason].situation}"
        reason_by_part[part] = reason
        refusals[part] = partial(_line_refusal, first_line[reason])
    if guessed and reason_by_part:
        for part in list(_also_refused(system, reason_by_part, refusals)):
            del reason_by_part[part]
    return reason_by_part


def _also_refused(
    system: AnySystem, refusal_by_part: Mapping[str, str], refusals: Mapping[str, Refuses]
) -> Iterator[str]:
    """Yield the parts that a neighbour of the tree's release refuses for the same reason."""
    spec = system_spec(system)
    release = release_of(system)
    if spec.engine not in ENGINES or not release:
        return
    remaining = dict(refusals)
    for name in nearest_first(spec.engine, release, spec.ways)[1 : 1 + _AROUND]:
        try:
            other = system_names.resolve(name)
        except UnusableImplementation:  # such as a wheel that cannot be fetched
            continue
        try:
            own_prefix = f"{system.name}: "
            other_prefix = f"{other.name}: "
            for part, refuses in [*remaining.items()]:
                reason = refuses(other)
                own = refusal_by_part[part].replace(own_prefix, "")
                if reason is not None and reason.replace(other_prefix, "") == own:
                    del remaining[part]
                    yield part
        finally:
            other.close()


def _refusal_reason(asked: Plan, preset: str, system: AnySystem) -> str | None:
    """Return why no machine of the plan drives the system on a preset; None where one does."""
    plan = for_system(asked, system)
    reason = f"{system.name} has no such models"
    if preset not in plan.presets:
        return reason
    for machine in plan.machines:
        try:
            fit_sizes(system, machine, sizes_for(machine, preset))
        except (UnusableImplementation, GeometryError) as error:
            reason = str(error)
        else:
            return None
    return reason


def _undriven_lines(system: AnySystem, plan: Plan, unfit: Collection[str]) -> list[CorpusLine]:
    modes = plan.modes or system.capabilities.modes
    lines = [line for mode in modes for line in lines_of(system, plan, mode)] if unfit else []
    return [line for line in lines if line.situation in unfit]


def _line_refusal(line: CorpusLine, system: AnySystem) -> str | None:
    """Return why a system cannot be driven through a line; None where it can."""
    try:
        replay(system, Trace(line.geometry, line.mode, line.commands))
    except UnusableImplementation as error:
        return str(error).removeprefix(system.name).lstrip(": ")
    return None
