"""Every clause asked of one step from an arbitrary state of the reference.

The system is put into the state: a page has the id that comes first, and contents that no clause promises
(free pages, slots past the commit) hold no token. So a step from there stands for all ways to the state: if
every such step keeps every clause, every step of every run does, by induction over its length.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

from reference.clauses import CLAUSES, Clause, about, broken
from reference.clauses.base import Check
from reference.clauses.facts import Facts
from reference.clauses.step import Step
from reference.commands import Command, Done, Evict, Outcome
from reference.ledger import State, holders, text_tokens
from reference.prefix_cache import Effects
from stateful_tests.lockstep.abstraction import facts_of
from stateful_tests.lockstep.reference_system import ReferenceSystem
from stateful_tests.lockstep.results import Violation

# Clauses whose situations a refusal that changes nothing can reach.
_REFUSALS = CLAUSES["OUT-1"], CLAUSES["OUT-2"]


_KEPT = 100_000  # states that are remembered


class ReferenceInState(ReferenceSystem):
    """`ReferenceSystem` that can start in any state."""

    def copied(self) -> dict[str, Any]:
        """What it is made of, to go back to."""
        return vars(self) | {
            "rows": self.rows.copy(), "free_rows": self.free_rows.copy(),
            "pages": {pool: pages.copy() for pool, pages in self.pages.items()},
            "free": {pool: free.copy() for pool, free in self.free.items()},
            "stamps": {pool: stamps.copy() for pool, stamps in self.stamps.items()},
        }  # fmt: skip

    def start_in(self, state: State) -> None:
        """Be in `state`: pages by the ledger, stamps by texts."""
        self.reset(state.config.geometry)
        self.state = state
        self._assign()
        self._write_tree()
        size = self.geometry.page_size
        for holder in holders(state):
            turn = holder.request
            text, length = holder.text, holder.cursors.kv_committed_len
            if turn is not None:
                text, length = turn.computed_text, turn.computed_len
            tokens = text_tokens(text, length)
            for pool, pages in self.pages.items():
                stamps = self.stamps[pool]
                for position, token in enumerate(tokens):
                    page = pages.get((holder.name, position // size))
                    if page is not None:
                        stamps[page * size + position % size] = token


class InductiveStepCheck:
    """Asks every clause about steps of the reference, from one state after the other.

    Clauses about states say the same of two steps that lead to one state, with facts that differ
    in the ids of pages and rows alone: they are asked at the first of them.
    """

    def __init__(self, system: ReferenceInState | None = None) -> None:
        self._system = system or ReferenceInState()
        self._checks: dict[tuple[Clause, ...], tuple[list[Check], list[Check]]] = {}  # of steps, of states
        self._asked: set[Hashable] = set()
        self.look_for(())

    def look_for(self, reached: Iterable[str]) -> None:
        """From now on note which situations of clauses are reached, but for those that were."""
        self.reached: set[str] = set()
        self._known = {*reached}
        self._seek()

    def _seek(self) -> None:
        self._sought: dict[tuple[Clause, ...], list[Clause]] = {}
        self._refusals = any(clause.id not in self._known for clause in _REFUSALS)

    def start_in(self, state: State) -> None:
        """The steps that follow start from here."""
        self._was = state
        self._system.start_in(state)
        self._start = vars(self._system)
        self._before = facts_of(self._system.view(), state.config.geometry)
        self._seen: dict[Hashable, list[tuple[dict[str, Any], Facts]]] = {
            state[1:]: [(self._start, self._before)]
        }
        self._ways: dict[Hashable, Facts] = {}
        self._evicted: set[int] = set()  # facts that some Evict has led to
        self._system.__dict__ = self._system.copied()

    def asks_about(self, now: State) -> bool:
        """Whether there is something to ask about a refusal that leads to `now`. The system would refuse in
        the same words; where nothing has changed, what is left are situations that none has reached."""
        return self._refusals or now is not self._was

    def violation(self, command: Command, now: State, outcome: Outcome, effects: Effects) -> Violation | None:
        """The first clause that a step breaks, and what else it breaks. The rules lead to `now`."""
        was, before, after, new, still = self._was, self._before, self._before, False, False
        if isinstance(outcome, Done):
            after, new = self._after(type(command), now, effects)
        else:
            still = now is was
        step = Step(
            was.config, command, outcome, outcome, was, now, before, after, after is before
        )
        if isinstance(command, Evict) and isinstance(outcome, Done):
            if id(after) in self._evicted:  # TREE-10 alone reads how much was asked for
                return None if CLAUSES["TREE-10"].check(step) is None else _violation(step)
            self._evicted.add(id(after))
        clauses = _REFUSALS if still else about(step)
        self._look(step, clauses)
        if still:
            return None
        of_steps, of_states = self._checks.get(clauses) or self._checks_of(clauses)
        for check in of_steps:
            if check(step) is not None:
                return _violation(step)
        if new and (known := (now[1:], up_to_ids(after, now.config.geometry.page_size))) not in self._asked:
            for check in of_states:
                if check(step) is not None:
                    return _violation(step)
            if len(self._asked) >= _KEPT:
                self._asked.clear()
            self._asked.add(known)
        return None

    def _checks_of(self, clauses: tuple[Clause, ...]) -> tuple[list[Check], list[Check]]:
        of_steps, of_states = (
            [c.check for c in clauses if (not c.reads or "locks" in c.reads) == of_a_step]
            for of_a_step in (True, False)
        )
        self._checks[clauses] = of_steps, of_states
        return of_steps, of_states

    def _after(self, kind: type, now: State, effects: Effects) -> tuple[Facts, bool]:
        """The system's facts after a command of a kind, and whether they are new among those that lead to
        `now`. What the system does depends on the arguments alone: it is asked once."""
        if now.tree is None:  # few commands lead to one state
            return self._carried_out(kind, now, effects)
        way = kind, now[1:], *(frozenset(pages) for pools in effects for pages in pools.values())
        if way in self._ways:
            return self._ways[way], False
        self._ways[way], new = self._carried_out(kind, now, effects)
        return self._ways[way], new

    def _carried_out(self, kind: type, now: State, effects: Effects) -> tuple[Facts, bool]:
        system = self._system
        system.carry_out(kind, now, effects)
        was, is_ = self._start, vars(system)
        seen = self._seen.setdefault(now[1:], [])
        facts = next((facts for then, facts in seen if then == is_), None)
        if facts is self._before:
            system.state = self._was
            return facts, False
        if new := facts is None:
            facts = facts_of(system.view(), now.config.geometry)
            seen.append((is_, facts))
        system.__dict__ = was
        system.__dict__ = system.copied()
        return facts, new

    def _look(self, step: Step, clauses: tuple[Clause, ...]) -> None:
        """Note which situations of some clauses this step reaches."""
        sought = self._sought.get(clauses)
        if sought is None:
            sought = self._sought[clauses] = [c for c in clauses if c.id not in self._known]
        found = [clause.id for clause in sought if clause.situation(step)]
        if found:
            self.reached.update(found)
            self._known.update(found)
            self._seek()


def _violation(step: Step) -> Violation:
    failures = broken(step)
    clause, (expected, observed) = failures[0]
    also, details = tuple(c.id for c, _ in failures[1:]), tuple(failure for _, failure in failures[1:])
    return Violation(clause.id, 0, expected, observed, also, details)


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
