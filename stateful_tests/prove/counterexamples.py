"""From a refuted property to commands that show it: short runs from the empty state, numbers unknown.

A counterexample of a proof is a state, and nobody can replay a state. So the same rule is tried at the end
of short scripts with unknown numbers of tokens; where the property fails there too, the numbers make a trace.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

from reference.commands import (
    Admit, Chunk, Command, Decode, Done, Draft, EvictSwa, Extend, Finish, Mode, Open, Retract, SpecDecode,
    Submit,
)  # fmt: skip
from reference.geometry import Geometry
from stateful_tests.lockstep.results import Trace
from stateful_tests.prove.integers import Int
from stateful_tests.prove.path_exploration import Model, Undecided, refute
from stateful_tests.prove.symbolic_reference import SymbolicReference
from stateful_tests.prove.transitions import Move, carried_out, config

ROOM = 64  # pages of each pool: a trace is about lengths, not about memory


class NoSuchRun(Exception):
    """The rules refuse a command of a script."""


def play(ref: SymbolicReference, mode: Mode, commands: Sequence[Command]) -> Move:
    """Carry out commands from the empty state; the last one as a move."""
    state = ref.ledger.State(config(ref, mode))
    for command in commands[:-1]:
        state, outcome = ref.model.step(state, command)
        if not isinstance(outcome, Done):
            raise NoSuchRun
    return carried_out(ref, state, commands[-1])


def scripts(rule: str) -> Iterator[tuple[Command, ...]]:
    """Runs that end with the rule, short ones first."""
    numbers = iter(range(100))

    def n() -> Any:
        return Int.of(f"x{next(numbers)}")

    first = n()
    queued = (Open("s"), Submit("r", "s", first), Admit("r"))
    running = (*queued, Extend((Chunk("r", first),)))
    ahead = (*running, SpecDecode((Draft("r", n(), n()),)))
    swept = (*ahead, EvictSwa("r", n()))
    lost: list[tuple[tuple[Command, ...], Any]] = [(running, 0), (ahead, n()), (swept, n())]
    ends = ((*was, end) for was, some in lost for end in (Retract("r", some), Finish("r", n())))
    turns = []
    for run in ends:
        again = (Submit("r", "s", n()),) if isinstance(run[-1], Finish) else ()
        turns.append((*run, *again, Admit("r")))
    chunk = n()
    begun = (*queued, Extend((Chunk("r", chunk),)))
    begun_swept = (*begun, EvictSwa("r", n()))
    found: dict[str, Sequence[tuple[Command, ...]]] = {
        "admit": turns,
        "extend": [(*was, Extend((Chunk("r", n()),))) for was in (queued, begun, begun_swept, *turns)],
        "decode": [(*was, Decode(("r",))) for was in (running, ahead, swept)],
        "spec_decode": [(*was, SpecDecode((Draft("r", n(), n()),))) for was in (running, ahead, swept)],
        "evict_swa": [(*was, EvictSwa("r", n())) for was in (running, ahead, swept, begun)],
        "finish": [(*was, Finish("r", n())) for was in (running, ahead, swept)],
        "retract": [(*was, Retract("r", n())) for was in (running, ahead, swept)],
    }
    yield from found.get(rule, ())


def with_numbers(value: Any, model: Model) -> Any:
    """Commands with numbers for their unknowns; a defaultdict has their names then."""
    if isinstance(value, Int):
        return value.value(model)
    if isinstance(value, (list, tuple)):
        return tuple(with_numbers(one, model) for one in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: with_numbers(getattr(value, f.name), model) for f in fields(value)})
    return value


def trace_of(
    ref: SymbolicReference, rule: str, mode: Mode, holds: Callable[[Move], Any], story: str
) -> Trace | None:
    """A trace at whose end the property fails, or None: none of the scripts shows it."""
    for commands in scripts(rule):
        unknown: defaultdict[str, int] = defaultdict(int)
        with_numbers(commands, unknown)
        shown = {name: Int.of(name) for name in ("P", "W", "width", *sorted(unknown))}
        try:
            model = refute(partial(_holds, ref, mode, commands, holds), shown).model
        except Undecided:
            continue
        if model is not None:
            width = max(ROOM, model["width"])
            geometry = Geometry(model["P"], model["W"], ROOM, ROOM, 4, width)
            return Trace(geometry, mode, with_numbers(commands, model), "minimised", story=story)
    return None


def _holds(
    ref: SymbolicReference, mode: Mode, commands: Sequence[Command], holds: Callable[[Move], Any]
) -> Any:
    try:
        return holds(play(ref, mode, commands))
    except NoSuchRun:
        return True
