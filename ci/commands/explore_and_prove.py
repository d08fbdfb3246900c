"""kvspec explore, tour and prove: every state, every transition, all integers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING, Any, cast

import click

from ci.commands.options.worker_options import parallel_options
from ci.commands.options.name_lists import list_rows, similar_names
from ci.commands.saved_traces import Saved, save_option, save_traces
from ci.commands.shared import ReportOut, SystemSelector, Unusable, json_option, system_options, unusable
from stateful_tests.lockstep.exit_codes import ending, gravest

if TYPE_CHECKING:
    from ci import Data
    from stateful_tests.generate.exploration_scope import Scope

_SAVE_HELP = "Where the shortest trace of each violation is saved."


@click.command()
@click.option(
    "--scope", "names", multiple=True, metavar="NAME", help="Scope to explore (repeatable)."
)
@click.option("--list", "listing", is_flag=True, help="List the scopes.")
@click.option(
    "--states", type=click.IntRange(1), metavar="N", help="Stop at N states. [default: none]"
)
@click.option(
    "--depth",
    type=click.IntRange(0),
    metavar="N",
    help="Leave states that are more than N commands away. [default: none]",
)
@click.option(
    "--memory",
    type=click.IntRange(50),
    default=4096,
    show_default=True,
    metavar="MB",
    help="Stop when the process has taken this much memory.",
)
@parallel_options
@json_option
@save_option(_SAVE_HELP)
def explore(
    out: ReportOut, where: Callable[..., Any], names: tuple[str, ...], listing: bool, states: int | None,
    depth: int | None, memory: int, save_dir: str,
) -> int:  # fmt: skip
    """Visit every state of a scope, breadth first.

    Every clause is checked at every step.

    Without --scope: all scopes that take seconds.
    """
    from stateful_tests.coverage.scopes import SCOPES

    if listing:
        from ci.report import exploration_report as report

        columns = {"id": "scope", "takes": "takes", "about": "about"}
        return list_rows(report.scope_rows(), out, columns)
    scopes = [_scope(name) for name in names]
    if not names:
        scopes = [scope for scope in SCOPES.values() if scope.takes == "seconds"]

    from ci.report import exploration_report as report
    from stateful_tests.explore import search

    with where() as executor:

        def explore_scope(scope: Scope, progress: Any) -> tuple[Data, str]:
            result = search.run(
                scope,
                states=states,
                depth=depth,
                memory_mb=memory,
                progress=progress,
                executor=executor,
            )
            data = report.exploration_data(result)
            findings = [result.finding] if result.finding is not None else []
            save_traces(findings, data["findings"], save_dir, "--impl reference")
            report.print_exploration(out.console, data)
            return data, result.stopped

        code, reports = _report_scopes(scopes, explore_scope)
    return out.end({"format": "kvspec-explore", "version": 1, "exit_code": code, "scopes": reports})


def _report_scopes(
    scopes: list[Scope], run_scope: Callable[[Scope, Any], tuple[Data, str]]
) -> tuple[int, list[Data]]:
    """Run scopes one after the other, up to an interrupt.

    run_scope: returns the report of a scope, and why its run stopped, "" if it came to its end.
    Returns the gravest exit code and the report of each scope that ran.
    """
    from ci.report.progress_line import Progress
    from stateful_tests.explore.search import INTERRUPTED

    reports = []
    stopped = ""
    for scope in scopes:
        with Progress() as progress:
            data, stopped = run_scope(scope, progress)
        reports.append(data)
        if stopped == INTERRUPTED:
            break
    code = gravest(data["exit_code"] for data in reports)
    return code or ending(interrupted=stopped == INTERRUPTED), reports


@click.command()
@click.option(
    "--scope",
    "names",
    multiple=True,
    required=True,
    metavar="NAME",
    help="Scope to run (repeatable): kvspec explore --list.",
)
@system_options
@save_option(_SAVE_HELP)
def tour(selector: SystemSelector, out: ReportOut, names: tuple[str, ...], save_dir: str) -> int:
    """Run every transition of a scope on an implementation."""
    scopes = [_scope(name) for name in names]

    from ci.report import exploration_report as report
    from impl.adapter import System
    from stateful_tests.explore import tour as touring

    with closing(selector.resolve()) as system:

        def tour_scope(scope: Scope, progress: Any) -> tuple[Data, str]:
            saved = Saved(system.name, save_dir, progress.say)
            with unusable(f"--impl {selector.spec}: "):
                toured = touring.live(cast("System", system), scope, progress=progress, found=saved)
            data = report.tour_data(toured)
            save_traces(toured.findings, data["findings"], save_dir, selector.options)
            saved.tidy(data["findings"])
            report.print_tour(out.console, data)
            return data, toured.stopped

        code, reports = _report_scopes(scopes, tour_scope)
    return out.end(
        {"format": "kvspec-tour-report", "version": 1, "exit_code": code, "tours": reports}
    )


def _scope(name: str) -> Scope:
    """Return a scope by its name. Raises Unusable, with the nearest names, if there is none."""
    from stateful_tests.coverage.scopes import SCOPES

    if name not in SCOPES:
        raise Unusable(
            f"--scope {name:.40}: unknown, kvspec explore --list names them{similar_names(name, SCOPES)}"
        )
    return SCOPES[name]


@click.command()
@click.argument("names", nargs=-1)
@click.option("--list", "listing", is_flag=True, help="List the obligations.")
@json_option
def prove(out: ReportOut, names: tuple[str, ...], listing: bool) -> int:
    """Prove the arithmetic of the cursors for all sizes.

    For all page sizes, windows and lengths, by CrossHair and z3.

    NAMES: those obligations, such as `contract/cut`; or all of a kind, `contract` or `window`.
    """
    from ci.report import proof_report
    from stateful_tests.prove.obligations import OBLIGATIONS

    if listing:
        rows: list[Data] = [{"id": o.name, "claim": o.claim} for o in OBLIGATIONS.values()]
        return list_rows(rows, out, {"id": "obligation", "claim": "what is proved"})
    try:
        data = proof_report.collect(names)
    except KeyError as error:
        name = str(error.args[0])
        listed = f"kvspec prove --list names them{similar_names(name, OBLIGATIONS)}"
        raise Unusable(f"unknown obligation {name!r:.60}; {listed}") from error
    proof_report.text(out.console, data)
    return out.end(data)
