"""Every clause checked after one step from an arbitrary state of the reference.

The system is put into the state: a page has the id that comes first, and contents that no clause promises
(free pages, slots past the commit) hold no token. So a step from there stands for all ways to the state: if
every such step keeps every clause, every step of every run does, by induction over its length.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

from reference.clauses import CLAUSES, Clause, about, broken
from reference.clauses.facts import Facts, RequestFacts, SessionFacts
from reference.clauses.step import Step
from reference.commands import Command, Done, Evict, Outcome
from reference.state import State, text_tokens
from reference.prefix_cache import Effects, no_effects
from stateful_tests.lockstep.abstraction import facts_of
from stateful_tests.lockstep.reference_system import ReferenceSystem, layout, rows_of
from stateful_tests.lockstep.results import Violation, violation_of

# Clauses whose situations a refusal that changes nothing can reach.
_REFUSALS = CLAUSES["OUT-1"], CLAUSES["OUT-2"]

_KEPT = 50_000  # states, and ways from one to another, that are remembered


class ReferenceInState(ReferenceSystem):
    """`ReferenceSystem` that can start in any state."""

    def start_in(self, state: State) -> None:
        """Be in `state`: pages of the state, stamps of the texts."""
        self.reset(state.config.geometry)
        self.state = state
        self._assign()
        self._write_tree()
        for row in rows_of(state):
            self._write(row, 0)


class _StateMemo:
    """What is remembered of a state: the facts that it alone decides, the number of its layout, and the
    numbers of all other facts with which clauses about states were checked."""

    __slots__ = "checked", "layout", "requests", "sessions"

    def __init__(self, state: State, layout: int) -> None:
        self.layout = layout
        self.checked: set[int] = set()
        self.sessions = {
            s.name: SessionFacts(text_tokens(s.history), s.closing, s.slot) for s in state.sessions
        }
        self.requests = {
            r.name: RequestFacts(r.session, r.origin, text_tokens(r.text), r.cursors) for r in state.requests
        }


class InductiveStepCheck:
    """Checks every clause after steps of the reference, from one state after the other.

    What the system does depends on the layouts before and after, the kind of the command and its effects:
    it runs once for all steps that have these in common, and so shows the same rows, pools and tree.
    Clauses about states say the same of two steps that lead to one state, with facts that differ in the ids
    of pages and rows alone: they are checked at the first of them.
    """

    def __init__(self, system: ReferenceInState | None = None) -> None:
        self._system = system or ReferenceInState()
        self._forget()
        self.look_for(())

    def _forget(self) -> None:
        self._states: dict[State, _StateMemo] = {}
        self._layouts: dict[Hashable, int] = {}
        self._ways: dict[Hashable, tuple[tuple[Any, ...], int]] = {}  # facts but for texts, and their number
        self._numbers: dict[Hashable, int] = {}

    def _known(self, state: State) -> _StateMemo:
        known = self._states.get(state)
        if known is None:
            number = self._layouts.setdefault(layout(state), len(self._layouts))
            known = self._states[state] = _StateMemo(state, number)
        return known

    def look_for(self, reached: Iterable[str]) -> None:
        """From now on note which situations of clauses are reached, but for those that were."""
        self.reached: set[str] = set()
        self._met = {*reached}

    @property
    def seeks_refusals(self) -> bool:
        """A refusal that changes nothing may still trigger a clause."""
        return any(clause.id not in self._met for clause in _REFUSALS)

    def start_in(self, state: State) -> None:
        """The steps that follow start from here."""
        if max(len(self._states), len(self._ways)) >= _KEPT:
            self._forget()
        self._was, self._start = state, self._known(state)
        self._before, _ = self._facts(type(None), state, self._start, no_effects())
        self._evicted: set[tuple[State, int]] = set()  # what some Evict has led to

    def violation(self, command: Command, now: State, outcome: Outcome, effects: Effects) -> Violation | None:
        """The first clause that a step breaks, and what else it breaks. The rules lead to `now`."""
        was, known, after, number = self._was, self._start, self._before, 0
        if done := isinstance(outcome, Done):
            known = self._known(now)
            after, number = self._facts(type(command), now, known, effects)
            if now == was and after == self._before:
                after = self._before
        same = after is self._before
        step = Step(was.config, command, outcome, outcome, was, now, self._before, after, same)
        if not done and now is was:
            self._look(step, _REFUSALS)
            return None
        if isinstance(command, Evict) and done:
            if (now, number) in self._evicted:  # TREE-10 alone reads how much was requested
                return None if CLAUSES["TREE-10"].check(step) is None else _violation(step)
            self._evicted.add((now, number))
        clauses = about(step)
        self._look(step, clauses)
        for clause in clauses:
            if not clause.of_state and clause.check(step) is not None:
                return _violation(step)
        if done and number not in known.checked:
            for clause in clauses:
                if clause.of_state and clause.check(step) is not None:
                    return _violation(step)
            known.checked.add(number)
        return None

    def _facts(self, kind: type, now: State, known: _StateMemo, effects: Effects) -> tuple[Facts, int]:
        """The system's facts after a command of a kind, and a number for all that are equal up to ids, but
        for what the state itself decides."""
        changed = map(frozenset, (*effects.gone.values(), *effects.adopted.values()))
        way = kind, self._start.layout, known.layout, *changed
        found = self._ways.get(way)
        if found is None:
            self._system.start_in(self._was)
            self._system.carry_out(kind, now, effects)
            geometry = now.config.geometry
            facts = facts_of(self._system.view(), geometry)
            usual = (facts.sessions, facts.requests) == (known.sessions, known.requests)
            rest = facts._replace(sessions={}, requests={}) if usual else facts
            number = self._numbers.setdefault(up_to_ids(rest, geometry.page_size), len(self._numbers))
            if not usual:
                return facts, number
            found = self._ways[way] = facts[2:], number
        return Facts(known.sessions, known.requests, *found[0]), found[1]

    def _look(self, step: Step, clauses: Iterable[Clause]) -> None:
        """Note which situations of some clauses this step reaches."""
        for clause in clauses:
            if clause.id not in self._met and clause.trigger(step):
                self.reached.add(clause.id)
                self._met.add(clause.id)


def _violation(step: Step) -> Violation:
    return violation_of(broken(step), 0)


class _Numbers(dict[int, int]):
    """Numbers ids as they come."""

    def __missing__(self, id_: int) -> int:
        number = self[id_] = len(self)
        return number


def up_to_ids(facts: Facts, page_size: int) -> Hashable:
    """Facts with the ids of pages and rows numbered as they come: equal where systems differ in ids alone."""
    rows, pages = _Numbers(), {name: _Numbers({0: 0}) for name in ("full", "swa")}

    def slots(pool: str, of: Iterable[int]) -> tuple[tuple[int, int], ...]:
        return tuple([(pages[pool][slot // page_size], slot % page_size) for slot in of])

    found: list[Hashable] = []
    for name, pool in facts.pools.items():
        number = pages[name]
        found.append(tuple([(holder, at, number[page]) for holder, at, page in pool.owned]))
        found.append(tuple([number[page] if 1 <= page <= pool.size else -1 for page in pool.free]))
    for name, h in facts.holders.items():
        read = tuple(h.full_read), tuple(h.swa_read), slots("full", h.prefix)
        found.append((name, rows[h.row], h.cursors, *read))
    found.append(tuple([rows[row] for row in facts.free_rows]))
    found += [(name, tuple(s.history), s.closing, s.slot) for name, s in facts.sessions.items()]
    found += [(name, r.session, r.origin, tuple(r.text), r.cursors) for name, r in facts.requests.items()]
    found += map(tuple, (facts.torn, facts.torn_swa, facts.unmapped, facts.swept_mapped, facts.unused_mapped))
    found.append(tuple(facts.shared))
    if facts.tree is not None:
        for n in facts.tree.nodes:
            own = slots("full", n.slots), slots("swa", n.swa_slots), slots("swa", n.mapped)
            found.append((n.path, *own, tuple(n.full_read), tuple(n.swa_read), n.full_locks, n.swa_locks))
        found += [(name, slots("full", locked)) for name, locked in facts.tree.lock_holders.items()]
        found.append(facts.tree.sizes)
    return tuple(found)
