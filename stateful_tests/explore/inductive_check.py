"""Every clause checked after one step from an arbitrary state of the reference.

The system is put into the state: a page has the id that comes first, and contents that no clause promises
(free pages, slots past the commit) hold no token. So a step from there stands for all paths to the state: if
every such step keeps every clause, every step of every run does, by induction over its length.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

from reference.clauses import CLAUSES, Clause, about, failed_clauses
from reference.clauses.facts import Facts, RequestFacts, SessionFacts
from reference.clauses.step import Step
from reference.commands import Command, Done, Outcome
from reference.state import State, text_tokens
from reference.prefix_cache import Effects, no_effects
from stateful_tests.lockstep.abstraction import facts_of
from stateful_tests.lockstep.reference_system import ReferenceSystem, layout, rows_of
from stateful_tests.lockstep.run_results import Violation, violation_of

# Clauses whose situations a refusal that changes nothing can reach.
_REFUSALS = CLAUSES["OUT-1"], CLAUSES["OUT-2"]

_KEPT = 50_000  # states, and changes from one to another, that are remembered


class ReferenceInState(ReferenceSystem):
    """`ReferenceSystem` that can start in any state."""

    def start_in(self, state: State) -> None:
        """Be in `state`: pages of the state, stamps of the texts."""
        self.reset(state.config.geometry)
        self.state = state
        self._assign_pages()
        self._write_tree()
        if self.geometry.states:
            self._assign_states(state)
        for row in rows_of(state):
            self._write_row(row, 0)


class _Known(NamedTuple):
    """Values that depend only on a state: the number of its layout, and facts."""

    layout: int
    sessions: dict[str, SessionFacts]
    requests: dict[str, RequestFacts]


class InductiveStepCheck:
    """Checks every clause after steps of the reference, from one state after the other.

    What the system does depends on the layouts before and after, the kind of the command and its effects:
    it runs once for all steps that have these in common, and so shows the same rows, pools and tree.
    """

    _states: dict[State, _Known]
    _layouts: dict[Hashable, int]
    _led_to: dict[Hashable, tuple[Any, ...]]
    reached: set[str]
    _missing: set[Clause]

    def __init__(self, system: ReferenceInState | None = None) -> None:
        self._system = system or ReferenceInState()
        self._forget()
        self.look_for(())

    def _forget(self) -> None:
        self._states = {}
        self._layouts = {}
        # facts but for those that a state decides
        self._led_to = {}

    def _known_state(self, state: State) -> _Known:
        known_facts = self._states.get(state)
        if known_facts is None:
            sessions = {
                s.name: SessionFacts(text_tokens(s.history), s.closing, s.slot)
                for s in state.sessions
            }
            requests = {
                r.name: RequestFacts(r.session, r.origin, text_tokens(r.text), r.cursors)
                for r in state.requests
            }
            number = self._layouts.setdefault(layout(state), len(self._layouts))
            known_facts = self._states[state] = _Known(number, sessions, requests)
        return known_facts

    def look_for(self, reached: Iterable[str]) -> None:
        """Note from now on which situations of clauses are reached, but for those that were."""
        self.reached = set()
        self._missing = {*CLAUSES.values()} - {CLAUSES[clause] for clause in reached}

    @property
    def seeks_refusals(self) -> bool:
        """A refusal that changes nothing may still trigger a clause."""
        return not self._missing.isdisjoint(_REFUSALS)

    def start_in(self, state: State) -> None:
        """Begin the steps that follow at a state."""
        if max(len(self._states), len(self._led_to)) >= _KEPT:
            self._forget()
        self._was = state
        self._start = self._known_state(state)
        self._before = self._facts(type(None), state, self._start, no_effects())

    def violation(
        self, command: Command, now: State, outcome: Outcome, effects: Effects
    ) -> Violation | None:
        """Return the first clause that a step breaks, and what else it breaks. The rules lead to `now`."""
        was = self._was
        after = self._before
        if is_done := isinstance(outcome, Done):
            after = self._facts(type(command), now, self._known_state(now), effects)
            if now == was and after == self._before:
                after = self._before
        same = after is self._before
        step = Step(
            config=was.config,
            command=command,
            expected=outcome,
            outcome=outcome,
            was=was,
            now=now,
            before=self._before,
            after=after,
            unchanged=same,
        )
        if not is_done and now is was:
            self._note_reached(step, _REFUSALS)
            return None
        self._note_reached(step, about(step))
        failures = failed_clauses(step)
        return violation_of(failures, 0) if failures else None

    def _facts(self, kind: type, now: State, known_facts: _Known, effects: Effects) -> Facts:
        """Return the system's facts after a command of a kind."""
        changed = map(frozenset, (*effects.gone.values(), *effects.adopted.values()))
        change = kind, self._start.layout, known_facts.layout, *changed
        if change not in self._led_to:
            self._system.start_in(self._was)
            self._system.carry_out(kind, now, effects)
            facts = facts_of(self._system.view(), now.config.geometry)
            if (facts.sessions, facts.requests) != (known_facts.sessions, known_facts.requests):
                return facts
            self._led_to[change] = facts[2:]
        return Facts(known_facts.sessions, known_facts.requests, *self._led_to[change])

    def _note_reached(self, step: Step, clauses: Iterable[Clause]) -> None:
        """Note which situations of some clauses this step reaches."""
        for clause in self._missing.intersection(clauses):
            if clause.trigger(step):
                self.reached.add(clause.id)
                self._missing.remove(clause)
