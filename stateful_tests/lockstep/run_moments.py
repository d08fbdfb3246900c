"""Moments of a run: the facts at rest, and the step that led there, for each kind of system."""

from __future__ import annotations

from typing import NamedTuple

from impl.adapter import View
from reference.blocks.clauses import BlockStep
from reference.blocks.facts import BlockFacts
from reference.clauses.facts import Facts
from reference.clauses.lock_facts import Locks
from reference.clauses.step import Step
from reference.pairs.clauses import PairStep
from reference.pairs.facts import PairFacts
from reference.state import State
from reference.tiers.clauses import TierStep
from reference.tiers.facts import TierFacts

# Of a system of any kind.
AnyFacts = Facts | BlockFacts | TierFacts | PairFacts
AnyStep = Step | BlockStep | TierStep | PairStep


class Moment(NamedTuple):
    """Both sides at rest: the reference's state, the system's view and its facts.

    step: the command that led here with its clause inputs; None at the start, where the system did not
        run it (a faithful scheduler would not do it), and where the system broke.
    locks: locks in the tree, from facts.
    """

    state: State
    view: View
    facts: Facts
    step: Step | None
    locks: Locks


class EngineMoment(NamedTuple):
    """An engine that schedules by itself, at rest: its facts, and the step that led there. The step is None
    at the start, and where the engine broke."""

    facts: BlockFacts
    step: BlockStep | None


class TierMoment(NamedTuple):
    """A tree with a host tier at rest: its facts, and the step that led there. The step is None at the start,
    and where the release broke."""

    facts: TierFacts
    step: TierStep | None


class PairMoment(NamedTuple):
    """A pair at rest: its facts, and the step that led there. The step is None at the start, and where the
    pair broke."""

    facts: PairFacts
    step: PairStep | None


AnyMoment = Moment | EngineMoment | TierMoment | PairMoment
