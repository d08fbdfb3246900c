"""Replays of traces, up to the first violation, and what their runs show of refusals."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from impl.adapter import AnySystem
from impl.process.failures import failed_in_command
from impl.process.remote_system import WorkerSystem
from reference import model
from reference.commands import Outcome, Reason, Refused, Submit
from reference.failures import Failure
from reference.system_kinds import AnyCommand
from stateful_tests.lockstep.any_lockstep import AnyLockstep
from stateful_tests.lockstep.driven_kinds import check_fits, lockstep_on
from stateful_tests.lockstep.lockstep import Lockstep
from stateful_tests.lockstep.run_results import HISTORY_LIMIT, Run, Trace, Violation

_IMPATIENT = (Reason.TURN_IN_FLIGHT, Reason.SHRINKING_PREFIX)


def drive_through(
    system: AnySystem, trace: Trace, *, patient: bool = False
) -> tuple[AnyLockstep, tuple[AnyCommand, ...]]:
    """Drive a trace up to its first violation, and record nothing. Returns the run and the trace's
    commands, of which it ran the first `steps`.

    patient: leave out turns that the rules reject, unless the last command is one.

    Raises UnusableImplementation when the system cannot be driven through it.
    """
    check_fits(system, trace.geometry, trace.commands)
    lockstep = lockstep_on(system, trace.geometry, trace.mode, trace.clause)
    commands = list(trace.commands)
    for command in trace.commands:
        if patient and len(commands) > lockstep.steps + 1 and _would_reject(lockstep, command):
            del commands[lockstep.steps]
            continue
        lockstep.do(command)
        if lockstep.violation is not None:
            break
    return lockstep, tuple(commands)


def _would_reject(lockstep: AnyLockstep, command: AnyCommand) -> bool:
    """Return whether the rules reject a client's command as impatient."""
    if not (isinstance(lockstep, Lockstep) and isinstance(command, Submit)):
        return False
    return _is_rejected_turn(command, model.step(lockstep.state, command)[1])


def replay(system: AnySystem, trace: Trace) -> Run:
    """Run a trace and record what each command changed, up to the first violation. A clause that can be
    checked alone is checked up to its own first violation, if it has one.

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
            expected = lockstep.in_words(stated[index])
            observed = lockstep.in_words(outcome)
            if expected != observed:
                mismatch = Failure(f"the trace states {expected}", f"{lockstep.judge} {observed}")
                lockstep.violation = Violation("TRACE", index, mismatch)
        if lockstep.violation is not None:
            break
    violation = lockstep.violation
    if lockstep.first_violation is not None and violation in (None, lockstep.first_violation):
        return replace(replay(system, replace(trace, clause=None)), trace=trace)
    if violation is not None and violation.clause == "CHK-1":
        violation = replace(violation, since=_first_failing_step(system, trace, violation))
    return Run(trace, system.name, tuple(rows), violation, tuple(history), lockstep.waived)


def with_calls(system: AnySystem, run: Run) -> Run:
    """Return the run with the calls of its commands, where the system is in a worker that has not
    ended."""
    violation = run.violation
    if violation is None or not isinstance(system, WorkerSystem) or not system.alive:
        return run
    if "BROKEN" in violation.clauses and not failed_in_command(violation.failure_of("BROKEN").observed):
        return run  # what the command calls has no part in it
    commands = run.trace.commands[: violation.step + 1]
    return replace(run, called=system.functions_called(run.trace.geometry, commands))


def _first_failing_step(system: AnySystem, trace: Trace, violation: Violation) -> int | None:
    """Return the first step after which the check that failed at the end fails too, if it runs there."""
    check = trace.commands[violation.step]
    for last in range(violation.step - 1):
        lockstep = lockstep_on(system, trace.geometry, trace.mode, trace.clause)
        for command in (*trace.commands[: last + 1], check):
            if lockstep.violation is None:
                lockstep.do(command)
        if lockstep.violation is not None and violation.clause in lockstep.violation.clauses:
            return last
    return violation.step - 1 if violation.step else None  # a system may count what it did before


def rejected_turns(run: Run) -> set[int]:
    """Return the steps at which a client sends a turn while one runs, or takes tokens back."""
    return {index for index, row in enumerate(run.rows) if _is_rejected_turn(row.command, row.outcome)}


def _is_rejected_turn(command: object, outcome: Outcome) -> bool:
    return (
        isinstance(command, Submit)
        and isinstance(outcome, Refused)
        and outcome.reason in _IMPATIENT
    )


def unstated_refusals(run: Run) -> list[int]:
    """Return the steps that the rules refuse although the trace states no refusal: often a mistake in a
    trace written by hand. The run's final violation is none of them."""
    stated = {index for index, _ in run.trace.expected}
    if run.violation is not None:
        stated.add(run.violation.step)
    return [
        at
        for at, row in enumerate(run.rows)
        if at not in stated and isinstance(row.outcome, Refused)
    ]


def mostly_refused(run: Run) -> bool:
    """Return whether too much of the trace is refused for it to test its subject: a third, and two
    steps at least."""
    refused = len(unstated_refusals(run))
    return refused >= 2 and 3 * refused >= len(run.rows)
