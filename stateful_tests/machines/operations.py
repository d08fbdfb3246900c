"""Every operation of a server as a rule of one Hypothesis machine.

A rule may run while the reference's state calls for its command. One drawn integer decides the arguments,
through the generator that `kvspec check` uses; the lockstep runs the command on the system and the reference
and checks every clause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, NoReturn

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from impl.adapter import System, UnusableImplementation
from reference.commands import COMMANDS, Command, Mode, kind_name
from reference.geometry import Geometry
from stateful_tests.check.tiers import check_machine
from stateful_tests.generate.choice_source import RandomChoices, once_in
from stateful_tests.generate.next_command import GENERATORS, finale, kind_weights, next_enabled
from stateful_tests.generate.run_profile import draw_geometry, draw_profile, with_settings
from stateful_tests.lockstep.lockstep import Lockstep
from stateful_tests.lockstep.past import violations
from stateful_tests.lockstep.results import Trace, Violation

# One integer a step: it seeds the generators that `kvspec check` uses, so there is one vocabulary.
DECISIONS = st.integers(0, 2**32 - 1)


class Violated(AssertionError):
    """A system left the specification. met: with a close that does not happen past the violation."""

    def __init__(self, met: list[tuple[Violation, Trace]]) -> None:
        self.met = met
        self.violation, self.trace = met[0]
        super().__init__(f"{self.violation.clause} at step {self.violation.step}")


class DrivenCell(NamedTuple):
    """What a run may drive: sessions, tree or both, on these sizes, in this mode."""

    machine: str
    geometry: Geometry
    mode: Mode


class MachineTarget:
    """What a machine drives. The system is made when the first run begins.

    machines, sizes, modes: what its runs may be; no modes stands for the system's own. vary: one run in four
    has drawn sizes.
    """

    def __init__(
        self,
        make: Callable[[], System],
        machines: Iterable[str],
        sizes: Iterable[Geometry],
        modes: Sequence[Mode] = (),
        vary: bool = False,
    ) -> None:
        self._make, self._machines, self._sizes, self._modes = make, tuple(machines), tuple(sizes), modes
        self.vary = vary

    @cached_property
    def system(self) -> System:
        return self._make()

    def close(self) -> None:
        """Give back what the system holds; the next run makes another."""
        if (made := self.__dict__.pop("system", None)) is not None:
            made.close()

    @cached_property
    def cells(self) -> list[DrivenCell]:
        """What fits the system; raises UnusableImplementation when nothing does."""
        cells = []
        for machine in self._machines:
            for sizes in self._sizes:
                geometry = replace(sizes, tree=machine != "sessions")
                try:
                    check_machine(self.system, machine, geometry)
                except UnusableImplementation as error:
                    reason = error
                    continue
                modes = self._modes or self.system.capabilities.modes
                cells += [DrivenCell(machine, geometry, mode) for mode in modes]
        if not cells:
            raise reason
        return cells


def _operation(kind: type) -> Any:
    """A rule that is offered while the state calls for a command of this kind, and draws one."""

    # Hypothesis leaves out some rules in each run, by the name of their function. Here all have the same, and
    # are always in: leaving out is up to the run profile, which knows what can run without what.
    def operation(self: Operations, command: Command) -> None:
        self.run(command)

    operation.__doc__ = kind.__doc__
    drawn = st.builds(lambda machine, decisions: machine.draw(kind, decisions), st.runner(), DECISIONS)
    return precondition(lambda machine: kind in machine.offered)(rule(command=drawn)(operation))


class Operations(RuleBasedStateMachine):
    """A server beside the reference. A subclass names its target.

    found: the last violation. driven: commands so far, in all runs.
    """

    target: ClassVar[MachineTarget]
    found: ClassVar[Violated | None] = None
    driven: ClassVar[int] = 0

    @initialize(
        cell=st.runner().flatmap(lambda machine: st.sampled_from(machine.target.cells)), decisions=DECISIONS
    )
    def begin(self, cell: DrivenCell, decisions: int) -> None:
        """An empty server of some size; the run profile says which operations are frequent in this run."""
        source = RandomChoices(decisions)
        self.system = self.target.system
        self.profile = draw_profile(source, self.system.capabilities, cell.machine)
        self.geometry, self.mode = cell.geometry, cell.mode
        if self.target.vary and once_in(source, 4):
            self.geometry = draw_geometry(source, cell.geometry)
        self.geometry = with_settings(source, self.geometry, self.system.capabilities)
        self.lockstep = Lockstep(self.system, self.geometry, cell.mode)
        self.commands: list[Command] = []
        self._offer(source)

    for _kind in COMMANDS:
        locals()[kind_name(_kind)] = _operation(_kind)

    def draw(self, kind: type, decisions: int) -> Command:
        """A command of one kind for the state now."""
        self.enabled.source = RandomChoices(decisions)
        return GENERATORS[kind](self.enabled)

    def run(self, command: Command) -> None:
        """Run it, and offer what may come next."""
        self._do(command)
        self._offer(self.enabled.source)

    def _do(self, command: Command) -> None:
        self.commands.append(command)
        type(self).driven += 1
        self.lockstep.do(command)
        if self.lockstep.violation is not None:
            self.fail(Violated(violations(self.lockstep, self.commands, "generated")))

    def fail(self, violated: Violated) -> NoReturn:
        """A system left the specification: the run ends."""
        type(self).found = violated
        raise violated

    def _offer(self, source: RandomChoices) -> None:
        """Which rules may run next. Hypothesis picks among them all alike: a kind that is called for half as
        much as another is offered half as often."""
        self.enabled = next_enabled(self.lockstep.state, source, self.profile)
        weights = kind_weights(self.enabled)
        most = max(weights.values())
        self.offered = {kind for kind, weight in weights.items() if source.upto(most - 1) < weight}

    def teardown(self) -> None:
        """Everything ends: whatever was lost on the way shows now (END-1)."""
        if hasattr(self, "lockstep") and self.lockstep.violation is None:
            for command in finale(self.lockstep.state, self.system.capabilities):
                self._do(command)
