"""A trace that shows a fault: its smallest form, and the fixture that keeps it."""

from __future__ import annotations

import re
from dataclasses import replace

from reference.geometry import Geometry
from impl.adapter import AnySystem
from reference import model
from reference.commands import Broken, Done
from reference.system_kinds import kind_of_config
from stateful_tests.lockstep.lockstep import check_serial
from stateful_tests.lockstep.replays import replay
from stateful_tests.lockstep.run_results import Run, Trace
from stateful_tests.shrink.minimise import minimise

SHORT = 8  # commands of a fixture are fewer: what a reader takes in at a glance
_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+){2,}", re.ASCII)


class NotPossible(ValueError):
    """The trace does not allow the request: one line says why."""


def clause_of_run(run: Run, clause: str | None) -> str:
    """Return the clause that a run is about: `clause`, else the one that its trace names, else the
    first violated one.

    Raises NotPossible when the run does not violate it.
    """
    assert run.violation is not None
    clauses = run.violation.clauses
    if clauses == ("TRACE",):
        raise NotPossible(f"step {run.violation.step} states an outcome that the rules contradict")
    if clause is None:
        return run.trace.clause if run.trace.clause in clauses else clauses[0]
    if clause not in clauses:
        raise NotPossible(f"violates {', '.join(clauses)} on {run.system}, not {clause}")
    return clause


def shrunk(system: AnySystem, run: Run, clause: str) -> Run:
    """Return the smallest trace that violates `clause` on `system`, replayed, with the outcomes of the
    reference and the story of the run's trace."""
    trace = minimise(system, replace(run.trace, clause=clause), clause)
    return _with_stated_outcomes(system, trace, clause)


def _with_stated_outcomes(system: AnySystem, trace: Trace, clause: str) -> Run:
    """Return the trace with stated outcomes, replayed; without them where the system's own choices
    decide."""
    # nobody else says what is done: it schedules by itself
    if not kind_of_config(trace.geometry).modelled:
        rows = replay(system, replace(trace, expected=())).rows
        outcomes = ((at, row.outcome) for at, row in enumerate(rows))
        stated = tuple((at, outcome) for at, outcome in outcomes if not isinstance(outcome, Broken))
        return replay(system, replace(trace, expected=stated))
    run = replay(system, _with_reference_outcomes(trace))
    if run.violation is not None and clause in run.violation.clauses:
        return run
    return replay(system, replace(trace, expected=()))


def _with_reference_outcomes(trace: Trace) -> Trace:
    """Return the trace with the reference's outcome at every step."""
    state = model.initial(trace.sizes(Geometry), trace.mode)
    expected = []
    for index, command in enumerate(trace.row_commands):
        state, outcome = model.step(state, command)
        check_serial(state)
        expected.append((index, Done() if isinstance(outcome, Done) else outcome))
    return replace(trace, expected=tuple(expected))


def check_name(name: str) -> str:
    """Return a fixture's name, which is a clause of a sentence. Raises NotPossible."""
    if not _NAME.fullmatch(name) or len(name) > 100:
        raise NotPossible(
            f"{name!r:.60} is no clause of a sentence, such as retract_then_retry_frees_the_reserved_token:"
            " three or more words of a-z and 0-9 with _ between them"
        )
    return name


def check_story(story: str) -> str:
    """Return a fixture's story, which consists of sentences. Raises NotPossible."""
    text = " ".join(story.split())
    if len(text) < 20 or not text.endswith("."):
        raise NotPossible(
            "say in a sentence or more what happens and why it matters, up to a full stop"
        )
    return text


def fixture(
    trace: Trace, faulty: AnySystem | None, healthy: tuple[AnySystem, ...], clause: str | None
) -> Run:
    """Return a fixture's trace, cut where it violates `clause` on `faulty`, with every outcome stated;
    replayed there.

    faulty: the system with the fault; None for a trace that conforms everywhere.
    healthy: systems on which it must conform.
    clause: None for the first violated one. Raises NotPossible.
    """
    fixture_trace = replace(trace, expected=())
    if faulty is not None:
        run = replay(faulty, replace(fixture_trace, clause=clause or fixture_trace.clause))
        if run.violation is None:
            raise NotPossible(f"conforms on {faulty.name}: it shows no fault there")
        clause = clause or run.violation.clause
        if run.violation.clause != clause:
            raise NotPossible(
                f"violates {run.violation.clause} first on {faulty.name}, not {clause}"
            )
        fixture_trace = replace(
            fixture_trace, clause=clause, commands=fixture_trace.commands[: run.violation.step + 1]
        )
    if kind_of_config(fixture_trace.geometry).modelled:
        fixture_trace = _with_reference_outcomes(fixture_trace)
    for system in healthy:
        violation = replay(system, fixture_trace).violation
        if violation is not None:
            raise NotPossible(
                f"violates {violation.clause} at step {violation.step} on {system.name} too"
            )
    if faulty is None:
        return replay(healthy[0], fixture_trace)
    assert clause is not None
    return _with_stated_outcomes(faulty, fixture_trace, clause)
