"""What a lockstep leaves out would say nothing: with all facts gathered anew, and every clause asked of all
of them, it sees the same at every step, on systems that are right and on wrong ones."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from impl.torch_kv.system import TorchKV
from reference import clauses
from reference.clauses import CLAUSES, Clause, about
from reference.clauses.facts import LEFTOVERS, Facts
from reference.clauses.step import Step
from reference.commands import Command, Done, Mode, Submit
from reference.geometry import Geometry
from reference.ledger import text_len
from reference.rules.base import RULES
from stateful_tests.check.tiers import sizes_for
from stateful_tests.generate.choice_source import RandomChoices
from stateful_tests.generate.next_command import propose
from stateful_tests.generate.run_profile import MACHINES, draw_profile
from stateful_tests.lockstep import abstraction, lockstep
from stateful_tests.lockstep.lockstep import Lockstep
from stateful_tests.lockstep.reference_system import ReferenceSystem
from stateful_tests.lockstep.results import Violation
from stateful_tests.lockstep.systems import resolve
from ci.mutants.judging import regressions


class Thorough(Lockstep):
    """Takes no short way."""

    _judged = property(lambda self: False, lambda self, judged: None)

    def _look(self):
        seen = super()._look()
        if seen.facts is self._seen.facts:
            return seen
        return abstraction.look(seen.view, self.state.config.geometry)


def both_ways(
    make: Callable[[], Any], geometry: Geometry, mode: Mode, choose: Callable[[Lockstep], Command | None]
) -> Violation | None:
    """What a run violates, the same both ways."""
    short, thorough = (kind(make(), geometry, mode) for kind in (Lockstep, Thorough))
    while short.violation is None and (command := choose(short)) is not None:
        for run in (short, thorough):
            run.do(command)
        assert short.violation == thorough.violation
        assert short.moment().facts == thorough.moment().facts
    return short.violation


def random_run(make: Callable[[], Any], machine: str, seed: int, preset: str = "page2") -> Violation | None:
    source = RandomChoices(f"short/{machine}/{seed}")
    profile = draw_profile(source, make().capabilities, machine)

    def choose(run: Lockstep) -> Command | None:
        return propose(run.state, source, profile) if run.steps < 60 else None

    return both_ways(make, sizes_for(machine, preset), Mode.FREE, choose)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("make", [ReferenceSystem, TorchKV])
def test_right_systems(machine, make):
    assert [random_run(make, machine, seed, "page4") for seed in range(3)] == [None] * 3


def test_named_bugs():
    for name, trace in regressions():
        make = partial(resolve, f"torch+{trace.bug}" if trace.bug else "torch")
        rest = iter(trace.commands)
        met = both_ways(make, trace.geometry, trace.mode, lambda _, rest=rest: next(rest, None))
        assert (met is None) == (trace.bug is None), name


class Spoils(TorchKV):
    """Does something to what a command is not about."""

    def apply(self, command):
        outcome = super().apply(command)
        if isinstance(outcome, Done):
            self.spoil(command)
        return outcome

    def spoil(self, command):
        raise NotImplementedError


class SpoilsAnIdleRow(Spoils):
    """At a submit."""

    def spoil(self, command):
        idle = [s.slot for s in self.sessions.values() if s.slot is not None and s.turn is None]
        length = idle[0].cursors.kv_committed_len if idle else 0
        if length and isinstance(command, Submit):
            self.spoil_slot(self.store.req_to_token[idle[0].row, length - 1].long())

    def spoil_slot(self, slot):
        self.store.full.stamps[slot] = 7


class SpoilsAnIdleWindow(SpoilsAnIdleRow):
    def spoil_slot(self, slot):
        if self.store.swa is not None:
            self.store.swa.stamps[self.store.full_to_swa[slot]] = 7


class UnmapsAnIdleRow(SpoilsAnIdleRow):
    def spoil_slot(self, slot):
        self.store.full_to_swa[slot] = 0


class FreesAPageTwice(Spoils):
    def spoil(self, command):
        if isinstance(command, Submit) and self.serial == 3 and self.store.full.available:
            self.store.full.give(self.store.full.free_pages()[:1].clone())


class LosesALock(Spoils):
    def spoil(self, command):
        for node in [*self.tree.root.children.values()] if self.tree is not None and self.serial > 2 else ():
            node.locks[0] = max(0, node.locks[0] - isinstance(command, Submit))


class MovesANode(Spoils):
    def spoil(self, command):
        nodes = [*self.tree.root.children.values()] if self.tree is not None else []
        if len(nodes) > 1 and isinstance(command, Submit):
            nodes[0].slots = nodes[1].slots[:1].expand(len(nodes[0].key))


@pytest.mark.parametrize(
    ("make", "machine", "clause"),
    [
        (SpoilsAnIdleRow, "sessions", "READ-1"), (SpoilsAnIdleWindow, "sessions", "READ-2"),
        (UnmapsAnIdleRow, "sessions", "MAP-2"), (FreesAPageTwice, "sessions", "OWN-2"),
        (LosesALock, "both", "TREE-6"), (MovesANode, "both", "TREE-3"),
    ],
)  # fmt: skip
def test_what_a_command_is_not_about(make, machine, clause):
    met = (random_run(make, machine, seed) for seed in range(24))
    assert any(violation is not None and violation.clause == clause for violation in met)


def test_what_the_reference_has_of_others(monkeypatch):
    """A submit changes the history of another session; the system shows what it has shown before."""
    right = RULES[Submit].carry_out

    def wrong(state, command, context):
        now = right(state, command, context)
        for session in now.sessions:
            if session.history and session.name != command.session:
                other = ((99, text_len(session.history)),)
                return now.with_session(session._replace(history=other))
        return now

    monkeypatch.setitem(RULES, Submit, replace(RULES[Submit], carry_out=wrong))
    met = [random_run(TorchKV, "sessions", seed) for seed in range(8)]
    assert ("SES-1", "READ-1") in {violation.clauses[:2] for violation in met if violation is not None}


class Unread:
    """Stands for what a clause does not say that it reads."""

    def _used(self, *_):
        raise AssertionError("read, and not declared")

    __getattr__ = __iter__ = __len__ = __bool__ = __contains__ = __eq__ = __getitem__ = _used
    __hash__ = None


def with_its_parts_alone(step: Step, clause: Clause) -> Step:
    """The end of the step, with what the clause reads of it."""
    unread, facts, now = Unread(), step.after, step.now
    gone: dict[str, Any] = {p: unread for p in ("sessions", "requests", "holders") if p not in clause.reads}
    ours = {part: unread for part in ("sessions", "requests") if part in gone}
    if "pools" not in clause.reads:
        gone["pools"] = dict.fromkeys(facts.pools, unread)  # which there are is no news
    if "rows" not in clause.reads:
        gone["free_rows"] = unread
    if "leftovers" not in clause.reads:
        gone |= dict.fromkeys(Facts._fields[LEFTOVERS], unread)
    if facts.tree is not None:
        of = {"nodes": ("nodes", "pages"), "tree": ("lock_holders", "sizes")}
        fields = [field for part, fields in of.items() if part not in clause.reads for field in fields]
        gone["tree"] = facts.tree._replace(**dict.fromkeys(fields, unread))
        if not {"nodes", "tree"} & {*clause.reads}:
            ours["tree"] = unread
    way: Any = dict.fromkeys(("command", "expected", "outcome", "was", "before"))
    end = replace(step, **way, now=now._replace(**ours), after=facts._replace(**gone), judged=False)
    vars(end)["locks"] = step.locks if "locks" in clause.reads else unread
    return end


@pytest.mark.parametrize("machine", MACHINES)
def test_clauses_read_what_they_say(machine, monkeypatch):
    """So they need not be asked where that is as it was judged."""
    asked = set()

    def broken(step, waived):
        for clause in about(step) if step.done else ():
            if clause.reads:
                assert clause.check(with_its_parts_alone(step, clause)) is None, clause.id
                asked.add(clause.id)
        return clauses.broken(step, waived)

    monkeypatch.setattr(lockstep, "broken", broken)
    assert [random_run(ReferenceSystem, machine, seed) for seed in range(6)] == [None] * 6
    trees = machine in ("tree", "both")
    assert asked >= {c.id for c in CLAUSES.values() if c.reads and (trees or "tree" not in c.needs)}
