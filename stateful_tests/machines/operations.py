"""Every operation of a server as a rule of one Hypothesis machine.

A rule may run while the reference's state calls for its command. One drawn integer decides the arguments,
through the generator that `kvspec check` uses; the lockstep runs the command on the system and the reference
and checks every clause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import ClassVar, NamedTuple, TypeVar, cast

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from impl.adapter import System, UnusableImplementation
from reference.commands import (
    Abort, Admit, CheckBusy, CheckIdle, Close, Command, Decode, Evict, EvictSwa, Extend, Finish, Insert,
    Match, Mode, Open, Retract, SpecDecode, Submit, Unlock,
)  # fmt: skip
from reference.geometry import Geometry
from stateful_tests.check.campaign import check_machine
from stateful_tests.generate.choice_source import ChoiceSource, RandomChoices, once_in
from stateful_tests.generate.next_command import GENERATORS, finale, kind_weights, next_enabled
from stateful_tests.generate.run_profile import draw_geometry, draw_profile
from stateful_tests.lockstep.lockstep import Lockstep
from stateful_tests.lockstep.results import Trace, Violation

_Rule = TypeVar("_Rule", bound=Callable[..., None])

# One integer a step. Drawn one by one, the decisions of a command change their meaning whenever Hypothesis
# drops a step before it, and shrinking gets nowhere.
DECISIONS = st.integers(0, 2**32 - 1)


class Violated(AssertionError):
    """A system left the specification."""

    def __init__(self, violation: Violation, trace: Trace) -> None:
        super().__init__(f"{violation.clause} at step {violation.step}")
        self.violation = violation
        self.trace = trace


class Cell(NamedTuple):
    """What a run may drive: sessions, tree or both, on these sizes, in this mode."""

    machine: str
    geometry: Geometry
    mode: Mode


class Target:
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
    def cells(self) -> list[Cell]:
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
                cells += [Cell(machine, geometry, mode) for mode in modes]
        if not cells:
            raise reason
        return cells


def _operation(kind: type) -> Callable[[_Rule], _Rule]:
    """A rule that is offered while the state calls for a command of this kind, and draws one."""

    def decorate(body: _Rule) -> _Rule:
        drawn = st.builds(lambda machine, decisions: machine.draw(kind, decisions), st.runner(), DECISIONS)
        offered = precondition(lambda machine: kind in machine.offered)
        return cast(_Rule, offered(rule(command=drawn)(body)))

    return decorate


class Operations(RuleBasedStateMachine):
    """A server beside the reference. A subclass names its target.

    found: the last violation. driven: commands so far, in all runs.
    """

    target: ClassVar[Target]
    found: ClassVar[Violated | None] = None
    driven: ClassVar[int] = 0

    @initialize(
        cell=st.runner().flatmap(lambda machine: st.sampled_from(machine.target.cells)), decisions=DECISIONS
    )
    def begin(self, cell: Cell, decisions: int) -> None:
        """An empty server of some size; the run profile says which operations are frequent in this run."""
        source = RandomChoices(decisions)
        self.system = self.target.system
        self.profile = draw_profile(source, self.system.capabilities, cell.machine)
        self.geometry, self.mode = cell.geometry, cell.mode
        if self.target.vary and once_in(source, 4):
            self.geometry = draw_geometry(source, cell.geometry)
        self.lockstep = Lockstep(self.system, self.geometry, cell.mode)
        self.commands: list[Command] = []
        self._offer(source)

    @_operation(Open)
    def open(self, command: Open) -> None:
        """A client opens a streaming session."""
        self._run(command)

    @_operation(Submit)
    def submit(self, command: Submit) -> None:
        """A client sends a turn of a session, or an ordinary request."""
        self._run(command)

    @_operation(Admit)
    def admit(self, command: Admit) -> None:
        """A waiting request gets its session's slot back, or what the radix tree has of its input."""
        self._run(command)

    @_operation(Extend)
    def extend(self, command: Extend) -> None:
        """A batch prefills chunks of its inputs."""
        self._run(command)

    @_operation(Decode)
    def decode(self, command: Decode) -> None:
        """Each running request of a batch decodes one token."""
        self._run(command)

    @_operation(SpecDecode)
    def spec_decode(self, command: SpecDecode) -> None:
        """A batch verifies drafts: it allocates for all of them (overshoot), and commits those accepted."""
        self._run(command)

    @_operation(EvictSwa)
    def evict_swa(self, command: EvictSwa) -> None:
        """The window sweep frees what a request's window has passed."""
        self._run(command)

    @_operation(Finish)
    def finish(self, command: Finish) -> None:
        """A request ends, perhaps with fewer outputs than it has decoded."""
        self._run(command)

    @_operation(Retract)
    def retract(self, command: Retract) -> None:
        """Under memory pressure a running request gives up its place and waits."""
        self._run(command)

    @_operation(Abort)
    def abort(self, command: Abort) -> None:
        """A request is given up, wherever it is."""
        self._run(command)

    @_operation(Close)
    def close(self, command: Close) -> None:
        """A client closes a session; while a turn is in flight, the close waits."""
        self._run(command)

    @_operation(CheckBusy)
    def check_busy(self, command: CheckBusy) -> None:
        """The server's memory check between two steps finds nothing."""
        self._run(command)

    @_operation(CheckIdle)
    def check_idle(self, command: CheckIdle) -> None:
        """The server's memory check without a batch finds nothing."""
        self._run(command)

    @_operation(Match)
    def match(self, command: Match) -> None:
        """A lock holder locks the longest usable prefix of a prompt."""
        self._run(command)

    @_operation(Unlock)
    def unlock(self, command: Unlock) -> None:
        """A lock holder lets its prefix go."""
        self._run(command)

    @_operation(Insert)
    def insert(self, command: Insert) -> None:
        """Computed pages go into the radix tree; those that it has are freed as duplicates."""
        self._run(command)

    @_operation(Evict)
    def evict(self, command: Evict) -> None:
        """The tree frees least recently used leaves, and SWA KV alone."""
        self._run(command)

    def draw(self, kind: type, decisions: int) -> Command:
        """A command of one kind for the state now."""
        self.enabled.source = RandomChoices(decisions)
        return GENERATORS[kind](self.enabled)

    def _run(self, command: Command) -> None:
        self._do(command)
        self._offer(self.enabled.source)

    def _do(self, command: Command) -> None:
        self.commands.append(command)
        type(self).driven += 1
        self.lockstep.do(command)
        if self.lockstep.violation is not None:
            trace = Trace(self.geometry, self.mode, tuple(self.commands), "generated")
            type(self).found = found = Violated(self.lockstep.violation, trace)
            raise found

    def _offer(self, source: ChoiceSource) -> None:
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
