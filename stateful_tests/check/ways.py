"""Ways to violate a clause: what a trace needs of how turns end, and the same run without that.

A fault that is known must not hide another of its clause. The smallest trace of the first says what it needs:
a retract, a turn that is turned away, pools without room. A run that violates the clause without one of these
has another cause.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

from impl.adapter import AnySystem
from reference.blocks.config import EngineConfig
from reference.commands import Abort, Close, Command, Finish, Retract
from reference.geometry import Geometry
from stateful_tests.lockstep.lockstep import replay, turned_away
from stateful_tests.lockstep.results import Trace
from stateful_tests.shrink.minimise import violated

Needs = tuple[str, ...]  # names, in the order of _NEEDS


def _none_of(kind: type[Command], system: AnySystem, trace: Trace) -> Trace:
    del system
    return replace(trace, commands=tuple(c for c in trace.commands if not isinstance(c, kind)))


def _nobody_turned_away(system: AnySystem, trace: Trace) -> Trace:
    """But for the last command, with which the trace violates its clause."""
    away = turned_away(replay(system, trace)) - {len(trace.commands) - 1}
    return replace(trace, commands=tuple(c for at, c in enumerate(trace.commands) if at not in away))


def _room(system: AnySystem, trace: Trace) -> Trace:
    """Each row may be full, and a page is left."""
    del system
    sizes: Geometry = trace.geometry
    pages = 1 + sizes.rows * -(-sizes.width // sizes.page_size)
    swa = 0 if sizes.window is None else max(sizes.swa_pages, pages)
    return replace(trace, geometry=replace(sizes, full_pages=max(sizes.full_pages, pages), swa_pages=swa))


# What a trace may need, and the trace without it. Who is turned away depends on the ends before.
_NEEDS: dict[str, Callable[[AnySystem, Trace], Trace]] = {
    "a retract": partial(_none_of, Retract),
    "an abort": partial(_none_of, Abort),
    "a finish": partial(_none_of, Finish),
    "a close": partial(_none_of, Close),
    "pools that run full": _room,
    "a turn that is turned away": _nobody_turned_away,
}


def avoided(system: AnySystem, trace: Trace, without: Needs) -> Trace:
    """The trace without these, as far as they show when it runs on the system."""
    for name in without:
        trace = _NEEDS[name](system, trace)
    return trace


def lacks(system: AnySystem, without: Needs, trace: Trace) -> bool:
    """Nothing of these is in the trace."""
    return avoided(system, trace, without) == trace


def needs(system: AnySystem, smallest: Trace, clause: str) -> Needs:
    """What a trace of a clause needs, of which no command can go."""

    def needed(name: str) -> bool:
        less = avoided(system, smallest, (name,))
        return less != smallest and clause not in (violated(system, less, clause) or ())

    return () if isinstance(smallest.geometry, EngineConfig) else tuple(filter(needed, _NEEDS))


def other_ways(known: Sequence[Needs]) -> list[Needs]:
    """What to avoid, the least first, so that one need of each known trace is not met."""
    ways = sorted(dict.fromkeys(tuple(n for n in _NEEDS if n in way) for way in product(*known)), key=len)
    return [way for at, way in enumerate(ways) if not any({*less} < {*way} for less in ways[:at])]
