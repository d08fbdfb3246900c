"""The machines as Hypothesis knows them: one rule per command, for reading and extending.

Same vocabulary, same generator of arguments and same lockstep as the volume runs of `campaign`; what
Hypothesis adds is its search, its shrinking of values and its failure database.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from impl.adapter import System
from reference.clauses import CLAUSES
from reference.commands import Command, Mode
from reference.geometry import Geometry
from stateful_tests.generate.next_command import applies, draw_command, finale, propose
from stateful_tests.generate.run_profile import MACHINES, draw_profile
from stateful_tests.lockstep.lockstep import Lockstep
from stateful_tests.lockstep.results import Trace, Violation


class ClauseViolated(AssertionError):
    """A system left the specification; the message names clause, expectation and observation."""

    def __init__(self, violation: Violation, trace: Trace) -> None:
        clause = CLAUSES.get(violation.clause)
        sentence = clause.sentence if clause is not None else "The system itself failed."
        super().__init__(
            f"{violation.clause} at step {violation.step}: {sentence}\n"
            f"  expected: {violation.expected}\n  observed: {violation.observed}"
        )
        self.violation = violation
        self.trace = trace


class _DataChoices:
    """Decisions drawn from Hypothesis."""

    def __init__(self, data: st.DataObject) -> None:
        self._draw = data.draw

    def upto(self, high: int) -> int:
        return self._draw(st.integers(0, high))


def machine(
    name: str, system: Callable[[], System], geometry: Geometry, mode: Mode
) -> type[RuleBasedStateMachine]:
    """A fresh machine class that drives `system` on `geometry`; `name` is one of MACHINES.

    A fresh class per call: Hypothesis freezes settings when a machine's TestCase is first touched.
    """

    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.lockstep = Lockstep(system(), geometry, mode)
            self.commands: list[Command] = []

        @initialize(data=st.data())
        def draw(self, data: st.DataObject) -> None:
            self.profile = draw_profile(_DataChoices(data), self.lockstep.system.capabilities, name)

        @rule(data=st.data())
        def likely(self, data: st.DataObject) -> None:
            """What the state calls for; the rules below draw any kind that applies."""
            self._do(propose(self.lockstep.state, _DataChoices(data), self.profile))

        def _do(self, command: Command) -> None:
            note(repr(command))
            self.commands.append(command)
            self.lockstep.do(command)
            if self.lockstep.violation is not None:
                trace = Trace(geometry, mode, tuple(self.commands), "generated")
                raise ClauseViolated(self.lockstep.violation, trace)

        def teardown(self) -> None:
            """End everything: whatever was lost on the way shows now (END-1)."""
            if self.lockstep.violation is None:
                for command in finale(self.lockstep.state, self.lockstep.system.capabilities):
                    self._do(command)

    def add(kind: type) -> None:
        def body(self: Any, data: st.DataObject) -> None:
            self._do(draw_command(kind, self.lockstep.state, _DataChoices(data), name))

        body.__name__ = kind.__name__.lower()
        ready = precondition(lambda self: applies(kind, self.lockstep.state, name))
        setattr(Machine, body.__name__, rule(data=st.data())(ready(body)))

    for kind in MACHINES[name]:
        if kind.__name__ in system().capabilities.commands:
            add(kind)
    return Machine
