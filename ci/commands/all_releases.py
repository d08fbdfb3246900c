"""`--impl sglang==all`, of check and replay: every release of an engine in turn, and what each shows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from ci.commands.shared import ReportOut, SystemSelector, Unusable, note, unusable
from stateful_tests.lockstep.exit_codes import Ending, ending, gravest

if TYPE_CHECKING:
    from ci import Data
    from impl.adapter import AnySystem
    from impl.system_spec import SystemSpec
    from stateful_tests.check.check_plans import Plan
    from stateful_tests.lockstep.run_results import Trace

    # The check of one system: its report, and what saves the traces.
    CheckOne = Callable[[SystemSpec], tuple[Data, Callable[[], None]]]


def require_single_system_options(selector: SystemSelector, **options: str | None) -> None:
    """Raise Unusable for options that need a single system: a checkout, a device, and these."""
    device = f"device {selector.device}"
    given = {"sglang-path": selector.checkout, device: selector.device != "cpu", **options}
    if names := [name for name, value in given.items() if value]:
        raise Unusable(f"--{names[0]}: goes with one system, not with --impl {selector.spec}")


def check(
    systems: Sequence[SystemSpec], check_one: CheckOne, plan: Plan, out: ReportOut, *, detailed: bool
) -> int:
    """Check each, one at a time. After an interrupt the report has the systems checked up to then."""
    from ci.report import text_output, check_text

    interrupted = False
    rows: list[Data] = []
    try:
        for spec in systems:
            row = _check_release(spec, check_one)
            rows.append(row)
            if row["check"] is not None and detailed:
                check_text.check(out.console, row["check"], detailed=True)
                out.console.print()
            verdict = f"kvspec: {row['unusable']}" if row["unusable"] else row["check"]["verdict"]
            text_output.verdict(text_output.console(sys.stderr), verdict, row)
            if row["check"] is not None and row["check"]["interrupted"]:
                interrupted = True
                break
    except KeyboardInterrupt:
        interrupted = True
    end = gravest([ending(interrupted=interrupted), *(row["exit_code"] for row in rows)])
    checks = [row["check"] for row in rows if row["check"] is not None]
    driven_machines = dict.fromkeys(
        m["machine"] for check in checks for m in check["clauses_by_machine"]
    )
    machines = list(driven_machines or plan.machines)
    data = {
        "format": "kvspec-check-releases", "version": 1, "tier": plan.tier, "seed": plan.seed,
        "machines": machines, "exit_code": end, "interrupted": interrupted,
        "systems": [str(spec) for spec in systems], "commands": sum(check["commands"] for check in checks),
        "seconds": round(sum(check["seconds"] for check in checks), 3), "releases": rows,
    }  # fmt: skip
    check_text.releases(out.console, data)
    return out.end(data)


def _check_release(spec: SystemSpec, check_one: CheckOne) -> Data:
    """Check one release. An unavailable release, or a failed save, is one line and does not end the
    check."""
    row: Data = {
        "implementation": str(spec),
        "exit_code": Ending.CONFORMS,
        "unusable": None,
        "check": None,
    }
    try:
        row["check"], save = check_one(spec)
        row["exit_code"] = row["check"]["exit_code"]
        save()
    except Unusable as error:
        row |= {"unusable": str(error), "exit_code": gravest([row["exit_code"], Ending.UNUSABLE])}
    return row


def replay(
    systems: Sequence[SystemSpec],
    traces: Sequence[tuple[str, Trace]],
    selector: SystemSelector,
    out: ReportOut,
) -> int:
    """Replay traces on each release. After an interrupt the report has those replayed up to then.

    The exit code is the worst of the replays; 2 where no release could be driven.
    """
    from ci.report import run_text

    rows: list[list[Data]] = [[] for _ in traces]
    interrupted = False
    try:
        for spec in systems:
            for rows_of_trace, row in zip(rows, _replay_on_release(spec, traces, selector), strict=True):
                rows_of_trace.append(row)
            note(f"{len(rows[0])} of {len(systems)} releases: {spec}")
    except KeyboardInterrupt:
        interrupted = True
    exit_codes = [
        row["exit_code"] for rows_of_trace in rows for row in rows_of_trace if row["replay"] is not None
    ]
    data: Data = {
        "format": "kvspec-replay-releases",
        "version": 1,
        "systems": [str(spec) for spec in systems],
        "interrupted": interrupted,
        "exit_code": gravest([ending(interrupted=interrupted), *(exit_codes or [Ending.UNUSABLE])]),
        "traces": [
            {"file": path, "releases": rows_of_trace} for (path, _), rows_of_trace in zip(traces, rows)
        ],
    }
    for replayed in data["traces"]:
        run_text.replays(out.console, replayed)
    return out.end(data)


def _replay_on_release(
    spec: SystemSpec, traces: Sequence[tuple[str, Trace]], selector: SystemSelector
) -> list[Data]:
    """Replay each trace on one release, or say why the release cannot be driven through it."""
    try:
        with closing(replace(selector, spec=spec).resolve()) as system:
            return [_replay(str(spec), system, *trace) for trace in traces]
    except Unusable as error:  # such as a wheel that cannot be fetched
        return [_undriven_row(str(spec), error) for _ in traces]


def _undriven_row(impl: str, error: Exception) -> Data:
    return {
        "implementation": impl,
        "exit_code": Ending.UNUSABLE,
        "unusable": str(error),
        "replay": None,
    }


def _replay(impl: str, system: AnySystem, path: str, trace: Trace) -> Data:
    from ci.report import report_data as report
    from stateful_tests.check.known_faults.explanation import known_fault
    from stateful_tests.lockstep import replays

    try:
        with unusable():
            run = replays.replay(system, trace)
            replay_report = report.replay_data(path, run, known=known_fault(system, run))
    except Unusable as error:
        return _undriven_row(impl, error)
    return {
        "implementation": impl,
        "exit_code": replay_report["exit_code"],
        "unusable": None,
        "replay": replay_report,
    }
