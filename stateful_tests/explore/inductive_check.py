"""The reference put into any state, so that clauses are asked of one step without the way there.

A step from such a placement stands for all ways to the state: a page has the id that comes first, and
what no clause promises about contents (free pages, slots past the commit) holds no token at all. So if
every step from a placement keeps every clause, every step of every run does, by induction over its length.
"""

from __future__ import annotations

from reference import model
from reference.clauses import Failure, asked, broken
from reference.clauses.base import Clause
from reference.clauses.facts import Facts
from reference.clauses.step import Step
from reference.commands import Command, Done
from reference.ledger import State, holders, text_tokens
from stateful_tests.lockstep.abstraction import facts_of
from stateful_tests.lockstep.lockstep import new_tallies
from stateful_tests.lockstep.reference_system import ReferenceSystem
from stateful_tests.lockstep.results import Tally, Violation


class Placed(ReferenceSystem):
    """`ReferenceSystem` that can be put into a state."""

    def place(self, state: State) -> None:
        """Be in `state`: pages by the ledger, stamps by texts."""
        self.reset(state.config.geometry)
        self.state = state
        self._assign()
        size = self.geometry.page_size
        for holder in holders(state):
            tokens = text_tokens(holder.text, holder.cursors.kv_committed_len)
            for pool, pages in self.pages.items():
                stamps = self.stamps[pool]
                for position, token in enumerate(tokens):
                    page = pages.get((holder.name, position // size))
                    if page is not None:
                        stamps[page * size + position % size] = token

    def saved(self) -> tuple[object, ...]:
        """What `back_to` needs."""
        return (
            self.state,
            {pool: dict(pages) for pool, pages in self.pages.items()},
            {pool: list(pages) for pool, pages in self.free.items()},
            dict(self.rows),
            list(self.free_rows),
            {pool: list(stamps) for pool, stamps in self.stamps.items()},
        )

    def back_to(self, saved: tuple[object, ...]) -> None:
        """As it was when this was saved."""
        self.state, self.pages, self.free, self.rows, self.free_rows, self.stamps = saved  # type: ignore[assignment]


class Checker:
    """Asks every clause about steps of the reference from one state after the other.

    tallies: evaluations of each clause and how often its situation was there.
    """

    def __init__(self) -> None:
        self.tallies: dict[str, Tally] = new_tallies()
        self._system = Placed()
        self._before: Facts | None = None
        self._was: State | None = None

    def begin(self, state: State) -> None:
        """The steps that follow start from here."""
        self._was = state
        self._system.place(state)
        self._before = facts_of(self._system.view(), state.config.geometry)

    def failures(self, command: Command) -> list[tuple[Clause, Failure]]:
        """Clauses that this step from the state breaks."""
        was, before, system = self._was, self._before, self._system
        assert was is not None and before is not None
        now, expected = model.step(was, command)
        if not isinstance(expected, Done):  # the state is the very same: there is nothing to look at
            same = now is was
            return self._asked(Step(was.config, command, expected, expected, was, now, before, before, same))
        saved = system.saved()
        outcome = system.apply(command)
        after = facts_of(system.view(), was.config.geometry)
        system.back_to(saved)
        return self._asked(
            Step(was.config, command, expected, outcome, was, now, before, after, now == was)
        )

    def violation(self, command: Command) -> Violation | None:
        """The first clause that this step breaks, and what else it breaks."""
        failures = self.failures(command)
        if not failures:
            return None
        clause, (expected, observed) = failures[0]
        also, details = tuple(c.id for c, _ in failures[1:]), tuple(told for _, told in failures[1:])
        return Violation(clause.id, 0, expected, observed, also, details)

    def _asked(self, step: Step) -> list[tuple[Clause, Failure]]:
        for clause in asked(step):
            tally = self.tallies[clause.id]
            tally.evaluated += 1
            tally.reached += bool(clause.situation(step))
        return broken(step)
