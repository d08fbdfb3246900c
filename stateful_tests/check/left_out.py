"""What runs on the base of a check and not on the tree: presets, commands, lines of the corpus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

from impl.adapter import UnusableImplementation
from reference.geometry import GeometryError
from stateful_tests.check.corpus import CorpusLine
from stateful_tests.check.counted import offers_all
from stateful_tests.check.driving import lines_of
from stateful_tests.check.tiers import Plan, fit_sizes, for_system, sizes_for
from stateful_tests.lockstep.lockstep import replay
from stateful_tests.lockstep.results import Trace


def left_out(
    system: Any, base: Any, asked: Plan, unfit: Collection[str], *, guessed: bool = False
) -> dict[str, str]:
    """What of a plan runs on the base and not on the system -> why not. asked: the plan before it was made
    to fit the system; unfit: situations with a line that the system cannot be driven through. guessed: the
    base is the nearest release. A tree between two releases offers what its facts have, so what it does not
    offer is no loss; what it offers and its own code refuses is one.
    """
    found: dict[str, str] = {}
    plan, of_base = for_system(asked, system), for_system(asked, base)
    for name in of_base.presets:
        if guessed and name not in plan.presets:
            continue
        why = _refusal(system, plan, name)
        if why is not None and _refusal(base, of_base, name) is None:
            found[f"preset {name}"] = why
    missing = sorted(base.capabilities.commands - system.capabilities.commands)
    if missing and not guessed:
        found[f"commands {', '.join(missing)}"] = "the adapter does not offer them here"
    reasons: Counter[str] = Counter()
    for line in _lines(system, plan, unfit):
        if guessed and not offers_all(system, line):
            continue
        if _reason(base, line) is None and (why := _reason(system, line)) is not None:
            reasons[why] += 1
    for why, count in reasons.items():
        found[f"{count} line{'s' if count > 1 else ''} of the corpus"] = why
    return found


def _refusal(system: Any, plan: Plan, preset: str) -> str | None:
    """Why no machine of the plan drives the system on a preset; None where one does."""
    why = f"{system.name} has no such models"
    if preset not in plan.presets:
        return why
    for machine in plan.machines:
        try:
            fit_sizes(system, machine, sizes_for(machine, preset))
        except (UnusableImplementation, GeometryError) as error:
            why = str(error)
        else:
            return None
    return why


def _lines(system: Any, plan: Plan, unfit: Collection[str]) -> list[CorpusLine]:
    modes = plan.modes or system.capabilities.modes
    lines = [line for mode in modes for line in lines_of(system, plan, mode)] if unfit else []
    return [line for line in lines if line.situation in unfit]


def _reason(system: Any, line: CorpusLine) -> str | None:
    """Why a system cannot be driven through a line; None where it can."""
    try:
        replay(system, Trace(line.geometry, line.mode, line.commands))
    except UnusableImplementation as error:
        return str(error).removeprefix(system.name).lstrip(": ")
    return None
