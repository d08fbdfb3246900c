"""Kinds of systems: what each is configured with, and the commands that it is given.

A kind is a value. What a check, a trace or a report does differently for a kind is looked up by it: how its
systems run in `stateful_tests/lockstep/driven_kinds.py`, the rest in modules that draw, shrink and show it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from reference.blocks.commands import ENGINE_COMMANDS, EngineCommand, Schedule
from reference.blocks.config import EngineConfig
from reference.blocks.presets import ENGINE_PRESETS
from reference.blocks.facts import BlockFacts
from reference.commands import COMMANDS, Command
from reference.geometry import PRESETS, Geometry
from reference.pairs.commands import PAIR_COMMANDS, Forward, PairCommand
from reference.pairs.config import PAIR_PRESETS, PairConfig
from reference.pairs.facts import PairFacts
from reference.tiers.commands import TIER_COMMANDS, Poll, TierCommand
from reference.tiers.config import TIER_PRESETS, TierConfig
from reference.tiers.facts import TierFacts

JudgedConfig = EngineConfig | TierConfig | PairConfig
# Of a system of any kind.
AnyConfig = Geometry | JudgedConfig
AnyCommand = Command | EngineCommand | TierCommand | PairCommand


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """A kind of system."""

    #: as in Capabilities.kind and in a trace
    name: str
    #: the property that distinguishes it, such as "schedules by itself"
    words: str
    #: such a system
    noun: str
    #: the class of its sizes
    config: type
    #: the classes of its commands
    commands: tuple[type, ...]
    #: sizes by name
    presets: Mapping[str, AnyConfig]
    #: the class of its facts; None where an adapter shows a View
    facts: type | None = None
    #: the only machine that draws its commands; "" where there are several
    machine: str = ""
    #: the reference model runs beside it; otherwise only facts and clauses judge it
    modelled: bool = False
    #: it picks its batches itself, so a changed tree may run another schedule than its base
    schedules: bool = False
    #: the command that tells the kind of an adapter that declares none; None of the kind that is left
    mark: type | None = None
    #: the needs of clauses that every system of the kind meets
    meets: frozenset[str] = frozenset()


ROWS = Kind(
    "rows", "is driven batch by batch", "a system that is given each batch", Geometry, COMMANDS,
    PRESETS, modelled=True,
)  # fmt: skip
BLOCKS = Kind(
    "blocks", words="schedules by itself", noun="an engine that schedules by itself", config=EngineConfig,
    commands=ENGINE_COMMANDS, presets=ENGINE_PRESETS, facts=BlockFacts, machine="clients", schedules=True,
    mark=Schedule,
)  # fmt: skip
TIERS = Kind(
    "tiers",
    words="has a host tier",
    noun="a tree with a host tier",
    config=TierConfig,
    commands=TIER_COMMANDS,
    presets=TIER_PRESETS,
    facts=TierFacts,
    machine="tiers",
    mark=Poll,
    meets=frozenset({"tier"}),
)
PAIRS = Kind(
    "pairs",
    words="is two servers and a network",
    noun="two servers and a network",
    config=PairConfig,
    commands=PAIR_COMMANDS,
    presets=PAIR_PRESETS,
    facts=PairFacts,
    machine="pairs",
    schedules=True,
    mark=Forward,
    meets=frozenset({"tier"}),
)
KINDS = {kind.name: kind for kind in (ROWS, BLOCKS, TIERS, PAIRS)}
JUDGED_KINDS = tuple(kind for kind in KINDS.values() if not kind.modelled)


def kind_of_config(config: object) -> Kind:
    """Return the kind of systems with this class of configuration."""
    return next(kind for kind in KINDS.values() if isinstance(config, kind.config))


def kind_by_commands(commands: frozenset[str]) -> Kind:
    """Return the kind whose systems take these commands, by the names of their classes: for an adapter
    that does not declare its kind."""
    marked = (kind for kind in JUDGED_KINDS if kind.mark and kind.mark.__name__ in commands)
    return next(marked, ROWS)
