"""Other ways in which changed functions run: which of them a check drives, and how much.

A fault may show in only one way: in a branch for overlap scheduling, or in the host tier.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from impl.engines import driven_releases
from impl.process.system_functions import SystemFunction
from impl.system_spec import ways_in
from stateful_tests.check.check_plans import Plan
from stateful_tests.check.trees.way_map import WayMap

# One in so many commands of a plan is for other ways, or for the own one where no change runs.
SHARE_OF_OTHERS = 3
LEAST_COMMANDS = 3_000  # commands for a way: with fewer a run says little


class OtherWays(NamedTuple):
    """Other ways for a check to drive.

    driven: ways that the check drives besides its own, the most relevant first.
    named: ways for which the plan has no room.
    plan: the plan of the tree's own way.
    each: the plan of each other way.
    """

    driven: tuple[str, ...]
    named: tuple[str, ...]
    plan: Plan
    each: Plan


def other_ways(
    way_map: WayMap,
    engine: str,
    release: str,
    own: str,
    changed: Collection[SystemFunction],
    uncalled: Collection[SystemFunction],
    plan: Plan,
) -> OtherWays:
    """Return the other ways in which changed functions run. A plan that the user has narrowed leaves all
    runs to their own way.

    own: the way that the user has named.
    uncalled: changed functions that no run in that way calls.
    """
    ways = [
        way
        for way in _relevant_ways(way_map, own, changed, uncalled)
        if _is_driven(engine, release, way)
    ]
    room = plan.commands // SHARE_OF_OTHERS // LEAST_COMMANDS if plan.whole else 0
    driven = tuple(ways[:room])
    if not driven:
        return OtherWays((), tuple(ways), plan, plan)
    for_others = plan.commands // SHARE_OF_OTHERS
    if {*changed} <= {*uncalled}:  # nothing that changed runs in the tree's own way
        for_others = plan.commands - for_others
    own_plan = replace(plan, commands=plan.commands - for_others)
    plan_of_each = replace(plan, commands=for_others // len(driven))
    return OtherWays(driven, tuple(ways[room:]), own_plan, plan_of_each)


def _is_driven(engine: str, release: str, way: str) -> bool:
    return release in driven_releases(engine, ways_in(way))


def _relevant_ways(
    way_map: WayMap, own: str, changed: Collection[SystemFunction], uncalled: Collection[SystemFunction]
) -> Sequence[str]:
    """Return the ways in which changed functions run: ways that call functions no other way does first,
    then plain ways, among these those whose own file has changed, then several at once."""
    running = way_map.by_way(changed)
    own_files = way_map.own_files({function.file for function in changed}, own)
    uncalled_left = {*uncalled}
    waiting = [way for way in way_map.ways if way != own and running[way]]
    ordered: list[str] = []
    while waiting:
        best = min(
            waiting,
            key=lambda way: (
                -len(uncalled_left & running[way]),
                way.count("+"),
                -own_files[way],
                way_map.ways.index(way),
            ),
        )
        waiting.remove(best)
        ordered.append(best)
        uncalled_left -= running[best]
    return ordered
