"""The single place where a system and the reference run side by side.

Apply a command to both, compare outcomes, take the system's view, bring it down to facts, check
every clause. Machines, replay, shrinking and adapters of strangers all go through `Lockstep.do`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from impl.adapter import Capabilities, AnySystem, System, UnusableImplementation
from impl.engines import engine
from impl.process.failures import SystemFailed, failed_in_command
from impl.process.remote_system import WorkerSystem
from impl.process.wire import copied
from reference import model
from reference.blocks.config import EngineConfig
from reference.kinds import (
    BLOCKS, PAIRS, ROWS, TIERS, AnyCommand, JudgedConfig, Kind, kind_of_config,
)  # fmt: skip
from reference.clauses import CLAUSES, Clause, about, broken, broken_off
from reference.clauses.facts import Facts
from reference.clauses.locks import Locks
from reference.clauses.step import Step
from reference.commands import (
    COMMANDS, Broken, Command, Done, Extend, Mode, Outcome, Reason, Refused, Submit,
)  # fmt: skip
from reference.cursors import ceil_page
from reference.failures import Failure
from reference.geometry import PRESETS, Geometry
from reference.state import Phase, RunConfig, State, full_pages, holders, swa_pages
from reference.token_ids import SHARED
from stateful_tests.lockstep import abstraction
from stateful_tests.lockstep.base import AnyLockstep
from stateful_tests.lockstep.engine import EngineLockstep
from stateful_tests.lockstep.pairs import PairLockstep
from stateful_tests.lockstep.tiers import TierLockstep
from stateful_tests.lockstep.policy import Answers, ServerPolicy
from stateful_tests.lockstep.moments import Moment
from stateful_tests.lockstep.check_results import Tally
from stateful_tests.lockstep.results import HISTORY_LIMIT, Row, Run, Trace, Violation, violation_of
from stateful_tests.lockstep.tree_diff import state_changes, tree_changes


def check_offered(system: System, was: State, command: Command) -> None:
    """Raise UnusableImplementation where the system has nothing that this command can be given to."""
    can = system.capabilities
    if isinstance(command, Submit) and command.answers and not can.answers:
        raise UnusableImplementation(f"{system.name} answers each turn with a text of its own")
    if isinstance(command, Extend):
        if not can.mixed_batches and _mixed(was, command):
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

    state: the reference's. clause: one that can be checked alone is checked even after another has failed,
    which is kept in `first_violation`.
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
    def lacking(can: Capabilities, config: Geometry, commands: Sequence[Command]) -> str:
        """Say what it lacks among pools, trees, states and kinds of commands."""
        kinds = {type(c).__name__ for c in commands}
        tracked = " that is tracked inside a text" if config.tracks else ""
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
        return next((words for words, lacking in lacks.items() if lacking), "")

    @staticmethod
    def presets_for(can: Capabilities) -> tuple[str, ...]:
        """Those with states only for what keeps states; the rest is fitted to the system."""
        return tuple(name for name, sizes in PRESETS.items() if can.keeps_states(sizes))

    @property
    def config(self) -> RunConfig:
        """The sizes, and the mode."""
        return self.state.config

    def do(self, command: Command) -> Outcome:
        """Run one command on both. Returns the reference's outcome; sets `violation` if they part."""
        self._begin()
        was = self.state
        before = self.facts
        now, expected = model.step(was, command)
        check_serial(now)
        check_offered(self.system, was, command)
        if isinstance(expected, Refused) and expected.reason is Reason.UNFAITHFUL:
            return self._count(expected)  # no scheduler would do it: the system does not run it
        outcome = self._carried_out(command)

        def step_to(now: State, expected: Outcome, outcome: Outcome, overreach: str = "") -> Step:
            return Step(
                was.config, command, expected, outcome, was, now, before, self.facts, self.facts is before,
                overreach, self._can.tree_policy_is_free, self._locks,
            )  # fmt: skip

        if isinstance(outcome, Broken):
            failure = Failure(self.in_words(expected), outcome.error)
            broke = self._break(failure, lambda: step_to(was, expected, outcome), broken_off)
            self.violation = self.first_violation or broke
            return expected
        follow = self.facts if self.first_violation is None else None
        agreed = self._policy.agreed(was, command, Answers(now, expected, outcome), follow)
        step = self.step = step_to(*agreed)
        self.state = agreed.now
        if self.first_violation is None:
            if step.after.tree is not None:
                self._locks = step.locks
            comparable = type(step.expected) is type(step.outcome)
            self._judge(step, broken(step, self.waived), about(step), comparable=comparable)
        if self._alone is not None:
            self._ask_alone(self._alone, step)
        return self._count(agreed.expected)

    def go_on(self, clause: str) -> None:
        """The run has ended with a violation: from here on `clause` alone is checked."""
        self.first_violation = self.violation
        self.violation = None
        self._alone = CLAUSES[clause]

    def _ask_alone(self, clause: Clause, step: Step) -> None:
        if self.violation is not None and clause.id in self.violation.clauses:
            return
        if self.first_violation is None:
            self.first_violation = self.violation
        self.violation = None
        failure = clause.check(step) if self.first_violation is not None else None
        if failure is not None:
            found = violation_of([(clause, failure)], self.steps - 1)
            self.violation = replace(found, first_violation=self.first_violation)

    def _look(self) -> None:
        """Take the system's view. A view that is the same has the same facts."""
        view = self.system.view()
        if not self._can.new_views:
            view = copied(view)
        if not abstraction.same(self._view, view):
            if wrong := abstraction.misfit(view, self.state.config.geometry):
                raise SystemFailed(f"TypeError: {wrong}")
            self.facts = abstraction.facts_of(view, self.state.config.geometry)
        self._view = view

    def moment(self) -> Moment:
        """Both sides as they are now."""
        return Moment(self.state, self._view, self.facts, self.step, self._locks)

    def row(self, command: Command, outcome: Outcome, before: Moment) -> Row:
        """Return the changes of a command, on the reference's side."""
        return row_of(command, outcome, before.state, self.state)

    def in_words(self, outcome: Outcome) -> str:
        """The outcome, with the reason of a refusal."""
        return f"refused: {outcome.reason.value}" if isinstance(outcome, Refused) else "done"


def new_tallies(can: Capabilities | None = None) -> dict[str, Tally]:
    """One empty tally per clause; can: of those that such a system can violate."""
    if can is None:
        return {name: Tally() for name in CLAUSES}
    there = {
        "tree": can.tree,
        "window": can.swa,
        "states": can.recurrent or can.tracks,
        "tracks": can.tracks,
        "tier": can.system_kind in (TIERS, PAIRS) or can.connects,
        "keys": "LoadAdapter" in can.commands,
        "images": can.encodes,
        "drafter": can.drafter,
    }
    return {
        name: Tally()
        for name, clause in lockstep_of(can.system_kind).clauses.items()
        if all(there[need] for need in clause.needs)
        and (clause.of >= {*COMMANDS} or any(kind.__name__ in can.commands for kind in clause.of))
    }


_LOCKSTEPS: dict[str, Any] = {
    kind.name: lockstep
    for kind, lockstep in (
        (ROWS, Lockstep), (BLOCKS, EngineLockstep), (TIERS, TierLockstep), (PAIRS, PairLockstep),
    )
}  # fmt: skip


def lockstep_of(kind: Kind) -> type[AnyLockstep]:
    """How the systems of a kind run."""
    run: type[AnyLockstep] = _LOCKSTEPS[kind.name]
    return run


def lockstep_on(
    system: AnySystem,
    geometry: Geometry | JudgedConfig,
    mode: Mode,
    clause: str | None = None,
    **counts: Any,
) -> AnyLockstep:
    """A run of any system. clause, counts (tallies, refusals): as of AnyLockstep."""
    run: AnyLockstep = _LOCKSTEPS[kind_of_config(geometry).name](
        system, geometry, mode, clause=clause, **counts
    )
    return run


def check_fits(
    system: AnySystem, geometry: Geometry | JudgedConfig, commands: tuple[AnyCommand, ...] = ()
) -> None:
    """Raise UnusableImplementation when the system cannot be driven through this."""
    can = system.capabilities
    kind = kind_of_config(geometry)
    if can.system_kind is not kind:
        needs = f": the trace needs {kind.noun}, such as {_example(geometry)}"
        raise UnusableImplementation(f"{system.name} {can.system_kind.words}{needs}")
    if lacks := lockstep_of(kind).lacking(can, geometry, commands):
        raise UnusableImplementation(f"{system.name} {lacks}")


# An engine that has a kind, and in which way.
_ENGINES = {
    ROWS.name: ("sglang", ""),
    BLOCKS.name: ("vllm", ""),
    TIERS.name: ("sglang", "hicache"),
    PAIRS.name: ("vllm", "pair"),
}


def _example(geometry: Geometry | JudgedConfig) -> str:
    """The option that names what can be driven with these sizes."""
    kind = kind_of_config(geometry)
    if kind.name not in _ENGINES:
        return "--impl module:factory"
    name, way = _ENGINES[kind.name]
    if isinstance(geometry, EngineConfig) and geometry.connects:
        way = "offload"
    if kind is ROWS:
        return f"--impl torch or --impl {engine(name).newest(way)}"
    return f"--impl {engine(name).newest(way)}"


def _mixed(state: State, batch: Extend) -> bool:
    """Some of its requests run, and some do not."""
    found = (state.request(lane.request) for lane in batch.lanes)
    return len({r.phase is Phase.RUNNING for r in found if r is not None}) > 1


def rejected_turns(run: Run) -> set[int]:
    """The steps at which a client sends a turn while one runs, or takes tokens back."""
    return {at for at, row in enumerate(run.rows) if _is_rejected_turn(row.command, row.outcome)}


def _is_rejected_turn(command: object, outcome: Outcome) -> bool:
    return (
        isinstance(command, Submit)
        and isinstance(outcome, Refused)
        and outcome.reason in _IMPATIENT
    )


def unstated_refusals(run: Run) -> list[int]:
    """The steps that the rules refuse without the trace saying so: in a trace by hand often a mistake. The
    violation that the run ends with is none of them."""
    stated = {index for index, _ in run.trace.expected}
    if run.violation is not None:
        stated.add(run.violation.step)
    return [
        at
        for at, row in enumerate(run.rows)
        if at not in stated and isinstance(row.outcome, Refused)
    ]


def mostly_refused(run: Run) -> bool:
    """So much of the trace is refused that it hardly does what it was written for: a third, and two at
    least."""
    refused = len(unstated_refusals(run))
    return refused >= 2 and 3 * refused >= len(run.rows)


_IMPATIENT = (Reason.TURN_IN_FLIGHT, Reason.SHRINKING_PREFIX)


def driven_through(
    system: AnySystem, trace: Trace, *, patient: bool = False
) -> tuple[AnyLockstep, tuple[AnyCommand, ...]]:
    """Drive a trace up to its first violation, and record nothing. Returns the run and the trace's commands,
    of which it was given the first `steps`. patient: without the turns that the rules reject on the way, but
    for the last command.

    Raises UnusableImplementation when the system cannot be driven through it.
    """
    check_fits(system, trace.geometry, trace.commands)
    lockstep = lockstep_on(system, trace.geometry, trace.mode, trace.clause)
    kept = list(trace.commands)
    for command in trace.commands:
        if patient and len(kept) > lockstep.steps + 1 and _would_reject(lockstep, command):
            del kept[lockstep.steps]
            continue
        lockstep.do(command)
        if lockstep.violation is not None:
            break
    return lockstep, tuple(kept)


def _would_reject(lockstep: AnyLockstep, command: AnyCommand) -> bool:
    """Whether a client is impatient, by the rules."""
    if not (isinstance(lockstep, Lockstep) and isinstance(command, Submit)):
        return False
    return _is_rejected_turn(command, model.step(lockstep.state, command)[1])


def replay(system: AnySystem, trace: Trace) -> Run:
    """Run a trace and record what each command changed, up to the first violation; of a clause that can be
    checked alone, up to the first of that, if there is one.

    Raises UnusableImplementation when the system cannot be driven through it.
    """
    check_fits(system, trace.geometry, trace.commands)
    lockstep = lockstep_on(system, trace.geometry, trace.mode, trace.clause)
    stated = dict(trace.expected)
    rows = []
    history = deque([lockstep.moment()], maxlen=HISTORY_LIMIT)
    for index, command in enumerate(trace.commands):
        outcome = lockstep.do(command)
        rows.append(lockstep.row(command, outcome, history[-1]))
        history.append(lockstep.moment())
        if lockstep.violation is None and index in stated:
            want, got = lockstep.in_words(stated[index]), lockstep.in_words(outcome)
            if want != got:
                mismatch = Failure(f"the trace states {want}", f"{lockstep.judge} {got}")
                lockstep.violation = Violation("TRACE", index, mismatch)
        if lockstep.violation is not None:
            break
    violation = lockstep.violation
    if lockstep.first_violation is not None and violation in (None, lockstep.first_violation):
        return replace(replay(system, replace(trace, clause=None)), trace=trace)
    if violation is not None and violation.clause == "CHK-1":
        violation = replace(violation, since=_since(system, trace, violation))
    return Run(trace, system.name, tuple(rows), violation, tuple(history), lockstep.waived)


def with_calls(system: AnySystem, run: Run) -> Run:
    """The run with what its commands call, where the system is in a worker that has not ended."""
    violation = run.violation
    if violation is None or not isinstance(system, WorkerSystem) or not system.alive:
        return run
    if "BROKEN" in violation.clauses and not failed_in_command(violation.failure_of("BROKEN").observed):
        return run  # what the command calls has no part in it
    commands = run.trace.commands[: violation.step + 1]
    return replace(run, called=system.called(run.trace.geometry, commands))


def _since(system: AnySystem, trace: Trace, violation: Violation) -> int | None:
    """The first step after which the check that failed in the end, had it run there, fails as well."""
    check = trace.commands[violation.step]
    for last in range(violation.step - 1):
        lockstep = lockstep_on(system, trace.geometry, trace.mode, trace.clause)
        for command in (*trace.commands[: last + 1], check):
            if lockstep.violation is None:
                lockstep.do(command)
        if lockstep.violation is not None and violation.clause in lockstep.violation.clauses:
            return last
    return violation.step - 1 if violation.step else None  # a system may count what it did before


def row_of(command: Command, outcome: Outcome, was: State, now: State) -> Row:
    """Return the changes of a command, on the reference's side."""
    page_size = now.config.geometry.page_size
    before = {h.name: h.cursors for h in holders(was)}
    after = {h.name: h.cursors for h in holders(now)}
    cursors, freed = [], []
    for name in sorted({*before, *after}):
        a, b = before.get(name), after.get(name)
        for field in ("kv_committed_len", "kv_allocated_len", "swa_evicted_seqlen"):
            then, now_ = (getattr(c, field) if c is not None else 0 for c in (a, b))
            if then != now_:
                cursors.append((name, field, then, now_))
        if a is None:
            continue
        kept = full_pages(b, page_size) if b is not None else range(0)
        freed += _gone(name, "full", full_pages(a, page_size), kept, page_size)
        if was.config.geometry.window is not None:
            kept = swa_pages(b, page_size) if b is not None else range(0)
            freed += _gone(name, "swa", swa_pages(a, page_size), kept, page_size)
    report = outcome.report if isinstance(outcome, Done) else None
    accounts = report.accounts if report else ()
    changes = (*tree_changes(was, now), *state_changes(was, now))
    return Row(command, outcome, tuple(cursors), tuple(freed), accounts, changes)


def _gone(
    name: str, pool: str, had: range, kept: range, page_size: int
) -> list[tuple[str, str, int, int]]:
    """The range of positions that `had` and `kept` differ by, if something was given back."""
    gone = [p for p in had if p not in kept]
    if not gone:
        return []
    return [(name, pool, gone[0] * page_size, ceil_page((gone[-1] + 1) * page_size, page_size))]
