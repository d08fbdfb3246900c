"""Violations of one clause that a check has caught, and the finding that is made of them.

A finding is replayed for its report: a violation that not every replay shows is flaky.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from impl.adapter import AnySystem, UnusableImplementation
from reference.commands import Broken, Mode
from stateful_tests.check.known_faults.causes import Needs
from stateful_tests.check.known_faults.masks import Compared, Mask, Standing, compare_with_base
from stateful_tests.lockstep.check_results import Finding
from stateful_tests.lockstep.replays import replay, with_calls
from stateful_tests.lockstep.run_results import Row, Run, Trace, Violation

NOT_REPLAYED = "no replay came to this command"
FLAKY = "(not in every replay: the system is not deterministic, or keeps something over reset)"
_REPLAYS = 3  # replays that must all show a violation
_NO_BASE = Compared(Standing.NEW)


@dataclass(slots=True)
class Caught:
    """The violations of one clause, or of one cause of it, so far."""

    #: the smallest trace
    trace: Trace
    #: the trace as it was found
    first: Trace
    violation: Violation
    modes: set[Mode]
    #: number of violations
    times: int
    #: time (s) and commands until the first violation
    after_s: float
    after_commands: int
    #: what the base shows on the trace
    compared: Compared = _NO_BASE
    #: attempts to get a smaller trace from another violation
    retries: int = 0
    #: number of the trace among those of its clause, from 1
    number: int = 1
    #: what the traces of other causes need and this one does not
    without: Needs = ()
    #: what this trace needs; None before it is determined
    needs: Needs | None = None
    #: the base was driven through the trace
    is_compared: bool = False

    @property
    def stands(self) -> Standing:
        return self.compared.stands

    @property
    def is_new(self) -> bool:
        """Whether the finding has a witness, or no base can be driven to find one."""
        if self.stands is Standing.UNTOLD:
            return self.compared.undriven
        return self.stands is Standing.NEW


def finding_of(
    name: str, caught: Caught, system: AnySystem, base: AnySystem | None, masks: Sequence[Mask]
) -> Finding:
    """Return the finding of a name in a report, with a replay of its trace."""
    clause = name.split()[0]
    run, flaky = _replay_finding(system, caught, clause)
    violation = run.violation or caught.violation
    if clause in violation.clauses:
        violation = violation.with_headline(clause)
    noted = violation.with_note(FLAKY) if flaky else violation
    run = with_calls(system, replace(run, violation=noted))
    no_witness = ""
    if caught.stands is Standing.UNTOLD:
        no_witness = compare_with_base(base, masks, run.trace, violation, clause).why
    modes = tuple(mode for mode in Mode if mode in caught.modes)
    return Finding(
        clause, run, modes, caught.times, caught.after_s, caught.after_commands,
        number=caught.number, without=caught.without, old=not caught.is_new, no_witness=no_witness,
        flaky=flaky,
    )  # fmt: skip


def _replay_finding(system: AnySystem, caught: Caught, clause: str) -> tuple[Run, bool]:
    """Return a replay that shows the violation, and whether it is flaky: not every replay shows it.

    A flaky violation is reported too. If no replay shows it, the run is reported as it was found.
    """
    times = 1 if clause == "BROKEN" else _REPLAYS  # a crash takes a new worker, a hang its time
    runs_shown: list[Run] = []
    try:
        for trace in (caught.trace, caught.first):
            runs = [replay(system, replace(trace, clause=clause)) for _ in range(times)]
            shows = [
                run
                for run in runs
                if run.violation is not None and clause in run.violation.clauses
            ]
            if len(shows) == times:
                return shows[0], False
            runs_shown += shows
    except UnusableImplementation:  # it cannot be driven any more
        not_run = Run(replace(caught.trace, clause=clause), system.name, (), None)
        return _run_as_found(not_run, caught), False
    return (runs_shown[0] if runs_shown else _run_as_found(runs[0], caught)), True


def _run_as_found(run: Run, caught: Caught) -> Run:
    """Return the run with the violation as it was found, for a run that does not show it.

    Commands that the run did not reach get rows that say so, so that every step has a row.
    """
    last = min(caught.violation.step, len(run.trace.commands) - 1)
    left = run.trace.commands[len(run.rows) : last + 1]
    rows = run.rows[: last + 1] + tuple(Row(command, Broken(NOT_REPLAYED)) for command in left)
    return replace(run, rows=rows, violation=replace(caught.violation, step=last), history=())
