"""The single place where a system and the reference run side by side.

Apply a command to both, compare outcomes, take the system's view, bring it down to facts, check
every clause. Machines, replay, shrinking and adapters of strangers all go through `Lockstep.do`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from impl.adapter import Capabilities, System, UnusableImplementation
from impl.engines import engine
from impl.process.failures import SystemFailed
from impl.process.wire import copied_view
from reference import model
from reference.clauses import CLAUSES, Clause, about, failed_clauses, broken_off
from reference.clauses.facts import Facts
from reference.clauses.lock_facts import Locks
from reference.clauses.step import Step
from reference.commands import (
    Broken, Command, Done, Extend, Mode, Outcome, Reason, Refused, Submit,
)  # fmt: skip
from reference.cursors import ceil_page
from reference.failures import Failure
from reference.geometry import PRESETS, Geometry
from reference.state import Phase, RunConfig, State, full_pages, holders, swa_pages
from reference.token_ids import SHARED
from stateful_tests.lockstep import abstraction
from stateful_tests.lockstep.any_lockstep import AnyLockstep
from stateful_tests.lockstep.system_choices import Answers, ServerPolicy
from stateful_tests.lockstep.run_moments import Moment
from stateful_tests.lockstep.check_results import Tally
from stateful_tests.lockstep.run_results import Row, violation_of
from stateful_tests.lockstep.tree_diff import state_changes, tree_changes


def check_offered(system: System, was: State, command: Command) -> None:
    """Raise UnusableImplementation where the system has nothing that the command applies to."""
    can = system.capabilities
    if isinstance(command, Submit) and command.answers and not can.answers:
        raise UnusableImplementation(f"{system.name} answers each turn with a text of its own")
    if isinstance(command, Extend):
        if not can.mixed_batches and _is_mixed_batch(was, command):
            raise UnusableImplementation(f"{system.name} has no mixed batches")
        if not can.swa_tail and any(lane.tail for lane in command.lanes):
            raise UnusableImplementation(f"{system.name} takes SWA slots for all that it prefills")


def check_serial(state: State) -> None:
    """Raise UnusableImplementation where the last submit has the serial of a text that prompts share."""
    if state.serial >= SHARED:
        raise UnusableImplementation(
            f"one run has more than {SHARED - 1} submits: token ids would clash"
        )


class Lockstep(AnyLockstep):
    """One run of a system beside the reference.

    state: the reference's.
    clause: a clause that can be checked alone is checked even after another has failed, which
        `first_violation` then has.
    """

    system: System
    facts: Facts
    step: Step | None
    judge = "the rules say"
    clauses = CLAUSES

    def __init__(
        self,
        system: System,
        geometry: Geometry,
        mode: Mode,
        *,
        tallies: dict[str, Tally] | None = None,
        refusals: Counter[str] | None = None,
        clause: str | None = None,
    ) -> None:
        super().__init__(system, tallies, refusals, clause)
        self.state: State = model.initial(geometry, mode)
        self._can = self._can.on(geometry)
        self._policy = ServerPolicy(self._can)
        self._alone = CLAUSES[clause] if clause in CLAUSES and CLAUSES[clause].alone else None
        self._locks: Locks = {}
        self._view = abstraction.NOTHING
        self.facts = abstraction.facts_of(self._view, geometry)
        self._start(geometry)

    @staticmethod
    def unsupported(can: Capabilities, config: Geometry, commands: Sequence[Command]) -> str:
        """Say what the system lacks among pools, trees, states and kinds of commands."""
        kinds = {type(c).__name__ for c in commands}
        tracked = " that is tracked inside a text" if config.tracks else ""
        tracked += ", with a second slot on demand" if config.lazy else ""
        lacks = {
            "has no variant without SWA (window null)": config.window is None and not can.full_only,
            f"has no SWA pool, and a window of {config.window} needs one": (
                config.window is not None and not can.swa
            ),
            "has no radix tree": config.tree and not can.tree,
            "has no variant without a radix tree": not config.tree and not can.no_tree,
            "has no tree of bigrams": config.bigram and not can.bigram,
            f"has no recurrent state{tracked}": not can.keeps_states(config),
            f"does not offer {', '.join(sorted(kinds - can.commands))}": kinds - can.commands,
            "cannot mix decode and spec_decode in one run": (
                not can.mixed_decode and "Decode" in kinds and kinds & {"SpecDecode", "Launch"}
            ),
        }
        return next((words for words, unsupported in lacks.items() if unsupported), "")

    @staticmethod
    def presets_for(can: Capabilities) -> tuple[str, ...]:
        """Return all presets, those with states only for systems that keep states; sizes are fitted
        later."""
        return tuple(name for name, sizes in PRESETS.items() if can.keeps_states(sizes))

    @staticmethod
    def suitable_option(config: Geometry) -> str:
        del config
        return f"--impl torch or --impl {engine('sglang').newest('')}"

    @property
    def config(self) -> RunConfig:
        """The sizes and the mode."""
        return self.state.config

    def do(self, command: Command) -> Outcome:
        """Run one command on both. Returns the reference's outcome; sets `violation` if they differ."""
        self._begin()
        was = self.state
        before = self.facts
        now, expected = model.step(was, command)
        check_serial(now)
        check_offered(self.system, was, command)
        if isinstance(expected, Refused) and expected.reason is Reason.UNFAITHFUL:
            return self._count(expected)  # no scheduler would do it: the system does not run it
        outcome = self._carry_out(command)

        def step_to(now: State, expected: Outcome, outcome: Outcome, overreach: str = "") -> Step:
            return Step(
                config=was.config,
                command=command,
                expected=expected,
                outcome=outcome,
                was=was,
                now=now,
                before=before,
                after=self.facts,
                unchanged=self.facts is before,
                overreach=overreach,
                tree_policy_is_free=self._can.tree_policy_is_free,
                locks_before=self._locks,
            )

        if isinstance(outcome, Broken):
            failure = Failure(self.in_words(expected), outcome.error)
            broke = self._break(failure, lambda: step_to(was, expected, outcome), broken_off)
            self.violation = self.first_violation or broke
            return expected
        follow = self.facts if self.first_violation is None else None
        agreed = self._policy.answers_to_compare(was, command, Answers(now, expected, outcome), follow)
        step = self.step = step_to(*agreed)
        self.state = agreed.now
        if self.first_violation is None:
            if step.after.tree is not None:
                self._locks = step.locks
            comparable = type(step.expected) is type(step.outcome)
            self._judge(step, failed_clauses(step, self.waived), about(step), comparable=comparable)
        if self._alone is not None:
            self._check_alone(self._alone, step)
        return self._count(agreed.expected)

    def go_on(self, clause: str) -> None:
        """Continue a run that has ended with a violation: from here on only `clause` is checked."""
        self.first_violation = self.violation
        self.violation = None
        self._alone = CLAUSES[clause]

    def _check_alone(self, clause: Clause, step: Step) -> None:
        if self.violation is not None and clause.id in self.violation.clauses:
            return
        if self.first_violation is None:
            self.first_violation = self.violation
        self.violation = None
        failure = clause.check(step) if self.first_violation is not None else None
        if failure is not None:
            violation = violation_of([(clause, failure)], self.steps - 1)
            self.violation = replace(violation, first_violation=self.first_violation)

    def _read_facts(self) -> None:
        """Read the system's view. An unchanged view has the same facts."""
        view = self.system.view()
        if not self._can.new_views:
            view = copied_view(self._can.system_kind, view)
        if not abstraction.same(self._view, view):
            if wrong := abstraction.misfit(view, self.state.config.geometry):
                raise SystemFailed(f"TypeError: {wrong}")
            self.facts = abstraction.facts_of(view, self.state.config.geometry)
        self._view = view

    def moment(self) -> Moment:
        """Return both sides as they are now."""
        return Moment(self.state, self._view, self.facts, self.step, self._locks)

    def row(self, command: Command, outcome: Outcome, before: Moment) -> Row:
        """Return the changes of a command, on the reference's side."""
        return row_of(command, outcome, before.state, self.state)

    def in_words(self, outcome: Outcome) -> str:
        """Return the outcome in words, with the reason of a refusal."""
        return f"refused: {outcome.reason.value}" if isinstance(outcome, Refused) else "done"


def _is_mixed_batch(state: State, batch: Extend) -> bool:
    """Return whether some of a batch's requests run, and others do not."""
    requests = (state.request(lane.request) for lane in batch.lanes)
    return len({r.phase is Phase.RUNNING for r in requests if r is not None}) > 1


def row_of(command: Command, outcome: Outcome, was: State, now: State) -> Row:
    """Return the changes of a command, on the reference's side."""
    page_size = now.config.geometry.page_size
    before = {h.name: h.cursors for h in holders(was)}
    after = {h.name: h.cursors for h in holders(now)}
    cursors = []
    freed = []
    for name in sorted({*before, *after}):
        a = before.get(name)
        b = after.get(name)
        for field in ("kv_committed_len", "kv_allocated_len", "swa_evicted_seqlen"):
            old = getattr(a, field) if a is not None else 0
            new = getattr(b, field) if b is not None else 0
            if old != new:
                cursors.append((name, field, old, new))
        if a is None:
            continue
        pages = full_pages(b, page_size) if b is not None else range(0)
        freed += _freed_range(name, "full", full_pages(a, page_size), pages, page_size)
        if was.config.geometry.window is not None:
            pages = swa_pages(b, page_size) if b is not None else range(0)
            freed += _freed_range(name, "swa", swa_pages(a, page_size), pages, page_size)
    report = outcome.report if isinstance(outcome, Done) else None
    accounts = report.accounts if report else ()
    changes = (*tree_changes(was, now), *state_changes(was, now))
    return Row(command, outcome, tuple(cursors), tuple(freed), accounts, changes)


def _freed_range(
    name: str, pool: str, pages_before: range, pages: range, page_size: int
) -> list[tuple[str, str, int, int]]:
    """Return the range of positions by which `pages_before` and `pages` differ, if pages were freed."""
    freed_pages = [p for p in pages_before if p not in pages]
    if not freed_pages:
        return []
    return [(name, pool, freed_pages[0] * page_size, ceil_page((freed_pages[-1] + 1) * page_size, page_size))]
