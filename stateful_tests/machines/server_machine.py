"""A server as a Hypothesis machine: one rule a command, and what must hold as invariants.

A rule runs its command on the system and on the reference (Lockstep). An invariant fails when the
two have violated a clause of its family. The argument of a rule is drawn from the reference's state,
by the harness of its command (stateful_tests/generate/commands), as in `kvspec check`. Each decision in
it is a draw of Hypothesis.

A rule may run while its command applies to the state. Hypothesis picks among those rules all alike. A
command that is called for less (stateful_tests/generate/command_weights.py) is offered less often.

A failing run is shrunk twice. Hypothesis's shrinker runs first, for some seconds: fewer rules, lower
decisions. Ours finishes (stateful_tests/shrink): fewer commands, then smaller sizes and lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from hypothesis import event, reject
from hypothesis.control import current_build_context
from hypothesis.internal.conjecture.data import Status
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from reference.commands import COMMANDS, Command, kind_name
from impl.choices import Choices, RandomChoices
from stateful_tests.generate.enabled_commands import Enabled
from stateful_tests.generate.next_command import finale
from stateful_tests.generate.command_weights import kind_weights
from stateful_tests.lockstep.lockstep import Lockstep
from stateful_tests.lockstep.final_closes import violations
from stateful_tests.lockstep.run_results import Trace, Violation
from stateful_tests.machines.drawing import OUT_OF_TURN, Start, commands, starts
from stateful_tests.machines.targets import MachineTarget


_NOBODY = RandomChoices(0)  # weights draw nothing


class Violated(AssertionError):
    """A system left the specification."""


def operation(kind: type | None) -> Callable[[Any], Any]:
    """Return a rule whose argument is a command of this kind. It may run while the state calls for one.

    Swarm testing leaves rules out of a run by the names of their functions, but without `admit`
    nothing ever runs. So all rules have one name, and the run's profile leaves commands out.

    kind: OUT_OF_TURN stands for any.
    """

    def as_rule(method: Any) -> Any:
        method.__name__ = "operation"
        offered = precondition(lambda machine: kind in machine.offered)
        return offered(rule(command=commands(kind))(method))

    return as_rule


def _rule_of(kind: type) -> Any:
    """Return the rule of a command, with the docstring of the vocabulary."""

    def run(machine: ServerMachine, command: Command) -> None:
        machine.run(command)

    run.__doc__ = kind.__doc__
    return operation(kind)(run)


class ServerMachine(RuleBasedStateMachine):
    """A server beside the reference. A subclass names its target.

    found: clause -> its last violation in a run, with the run as a trace. Runs are shrunk for the
    first clause. A second one is the close that does not happen past the violation (SES-4).
    driven: commands until the first violation.
    """

    target: ClassVar[MachineTarget]
    found: ClassVar[dict[str, tuple[Violation, Trace]]]
    driven: ClassVar[int]
    lockstep: Lockstep
    commands: list[Command]
    threshold: int
    offered: set[Any]

    @classmethod
    def forget(cls) -> None:
        """Forget the violations that were found, and count commands from 0."""
        cls.found = {}
        cls.driven = 0

    def __init_subclass__(cls) -> None:
        cls.forget()

    @initialize(start=starts())
    def begin(self, start: Start) -> None:
        """Start with an empty server. The profile says which commands are frequent in this run."""
        self.profile = start.profile
        self.lockstep = Lockstep(self.target.system, start.geometry, start.mode)
        self.commands = []
        self.threshold = 0
        self._offer()

    # -- what happens: a rule for each command, below the class, and this one ---------------------

    @operation(OUT_OF_TURN)
    def out_of_turn(self, command: Command) -> None:
        """Run a command of any kind that need not apply. Often it is refused: nothing may change."""
        self.run(command)

    # What holds after every rule. The clauses are those of SPEC.md.

    @invariant()
    def the_system_answers(self) -> None:
        """No exception, no crash, no answer of another type."""
        self._conforms("BROKEN")

    @invariant()
    def commands_are_done_or_refused_as_specified(self) -> None:
        self._conforms("OUT")

    @invariant()
    def memory_checks_balance(self) -> None:
        self._conforms("CHK")

    @invariant()
    def cursors_are_in_order(self) -> None:
        """cache_protected_len <= kv_committed_len <= kv_allocated_len, and each as commands move it."""
        self._conforms("LEN")

    @invariant()
    def sessions_live_as_long_as_specified(self) -> None:
        self._conforms("SES")

    @invariant()
    def every_page_has_one_owner(self) -> None:
        """A row, a slot, a node of the tree, or the free list; and each full page its SWA page."""
        self._conforms("OWN", "MAP")

    @invariant()
    def what_is_given_up_is_freed(self) -> None:
        self._conforms("FREE", "END")

    @invariant()
    def windows_keep_their_swa_kv(self) -> None:
        self._conforms("SWA")

    @invariant()
    def the_radix_tree_is_well_formed_and_locked(self) -> None:
        self._conforms("TREE")

    @invariant()
    def states_are_those_of_their_texts(self) -> None:
        """A recurrent state is in one slot, after exactly the tokens that its owner continues behind."""
        self._conforms("STA")

    @invariant()
    def attention_reads_what_was_written(self) -> None:
        """Each position of a row leads to the KV of its own token."""
        self._conforms("READ", "REF")

    def teardown(self) -> None:
        """Everything ends: whatever was lost on the way shows now (END-1).

        A run that Hypothesis gave up in the middle is no run: it may neither fail nor pass any more.
        """
        if current_build_context().data.frozen or not hasattr(self, "lockstep"):
            return
        if self.lockstep.violation is None:
            for command in finale(self.lockstep.state, self.target.system.capabilities):
                self._do(command)
                if self.lockstep.violation is not None:
                    self._fail()

    # -- how a rule runs --------------------------------------------------------------------------

    def enabled_commands(self, choices: Choices, *, invalid: bool = False) -> Enabled:
        """Return the enabled commands of the state.

        invalid: the command need not apply.
        """
        last = type(self.commands[-1]) if self.commands else None
        return Enabled(self.lockstep.state, choices, self.profile, invalid, last)

    def run(self, command: Command) -> None:
        """Run a command on both sides, and offer what may come next."""
        self._do(command)
        self._offer()

    def _do(self, command: Command) -> None:
        self.commands.append(command)
        if not self.found:
            type(self).driven += 1
        self.lockstep.do(command)

    def _offer(self) -> None:
        """Offer the rules whose weight exceeds `threshold` percent of the largest."""
        weights: dict[Any, int] = {**kind_weights(self.enabled_commands(_NOBODY))}
        weights[OUT_OF_TURN] = sum(weights.values()) // self.profile.invalid_rate
        enough = self.threshold * max(weights.values())
        self.offered = {kind for kind, weight in weights.items() if 100 * weight > enough}

    def _conforms(self, *families: str) -> None:
        """Fail if the violation that names this run is of a clause of these families."""
        violation = self.lockstep.violation
        if violation is not None and violation.clause.partition("-")[0] in families:
            self._fail()

    def _fail(self) -> None:
        """End the run, and fail unless the base shows the same: the system left the specification.

        Once a clause is found, only runs that violate it fail: Hypothesis shrinks for that one.
        """
        ending = violations(self.lockstep, self.commands, "generated")
        new = [
            (violation, trace)
            for violation, trace in ending
            if self.target.is_new(trace, violation)
        ]
        if not new:
            event(f"ends with what the base violates as well: {ending[0][0].clause}")
            current_build_context().data.conclude_test(Status.VALID)
        headline = next(iter(self.found), new[0][0].clause)
        findings = {
            headline if headline in violation.clauses else violation.clause: (violation, trace)
            for violation, trace in reversed(new)
        }
        if headline not in findings:
            reject()
        self.found[headline] = violation, _ = findings.pop(headline)
        self.found.update(findings)
        raise Violated(f"{violation.clause} at step {violation.step}")


for _kind in COMMANDS:
    setattr(ServerMachine, kind_name(_kind), _rule_of(_kind))
