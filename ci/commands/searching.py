"""kvspec explore, tour and prove: every state, every transition, all integers."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ci.commands.parallel import executor, parallel_options
from ci.commands.shared import (
    Saved, Unusable, impl_options, is_folder, json_option, list_rows, near, resolve, save_option, save_traces,
    system_options, text_out, unusable, writable_json, write_file, write_json,
)  # fmt: skip

if TYPE_CHECKING:
    from ci import Data
    from stateful_tests.coverage.scopes import Scope


@click.command()
@click.option("--scope", "names", multiple=True, metavar="NAME", help="Scope to explore (repeatable).")
@click.option("--list", "listing", is_flag=True, help="List the scopes.")
@click.option("--states", type=click.IntRange(1), help="Stop when so many states are known.")
@click.option("--depth", type=click.IntRange(0), help="Do not go on from states so many commands away.")
@click.option(
    "--memory", type=click.IntRange(50), default=4096, show_default=True, metavar="MB",
    help="Stop when the process has so much.",
)  # fmt: skip
@parallel_options
@click.option(
    "--situations", "listed", metavar="FILE",
    help="Enter what scopes that were explored to the end reach, as what a check must reach.",
)  # fmt: skip
@json_option
@save_option
def explore(
    names: tuple[str, ...],
    listing: bool,
    states: int | None,
    depth: int | None,
    memory: int,
    jobs: int | None,
    ray_address: str | None,
    listed: str | None,
    json_file: str | None,
    save_dir: str,
) -> int:
    """Look at every state of a scope, breadth first, with every clause at every step.

    Without --scope: all scopes that take seconds.
    """
    from stateful_tests.coverage import required as coverage
    from stateful_tests.coverage.scopes import SCOPES

    if listing:
        from ci.report import explore as report

        columns = {"id": "scope", "takes": "takes", "about": "about"}
        return list_rows(report.scope_rows(), json_file, columns)
    chosen = [_scope(name) for name in names] or [s for s in SCOPES.values() if s.takes == "seconds"]
    writable_json(json_file)
    is_folder(save_dir)
    if listed is not None and not Path(listed).absolute().parent.is_dir():
        raise Unusable(f"--situations {listed}: there is no folder {Path(listed).absolute().parent}")
    known = coverage.Known({}, {})
    if listed is not None and Path(listed).exists():
        with unusable("--situations ", coverage.SituationsError):
            known = coverage.load(Path(listed))

    from ci.report import explore as report
    from ci.report import render
    from ci.report.progress import Progress
    from stateful_tests.explore import search

    out = render.console(text_out(json_file))
    reports: list[Data] = []
    with executor(jobs, ray_address) as where:
        for scope in chosen:
            with Progress(render.console(sys.stderr)) as progress:
                result = search.run(
                    scope, states=states, depth=depth, memory_mb=memory, progress=progress, executor=where
                )
            reports.append(data := report.explored(result))
            found = [result.finding] if result.finding is not None else []
            save_traces(found, data["findings"], save_dir, "--impl reference")
            report.text(out, data)
            if result.stopped == search.INTERRUPTED:
                break
            if result.complete:
                known = known.taken(scope.name, result.situations)
    if listed is not None:
        write_file(listed, coverage.dump(known), "--situations")
    code = max(data["exit_code"] for data in reports)
    if reports[-1]["stopped"] == search.INTERRUPTED:
        code = code or 130
    write_json(json_file, {"format": "kvspec-explore", "version": 1, "exit_code": code, "scopes": reports})
    return int(code)


@click.command()
@click.option(
    "--scope", "names", multiple=True, required=True, metavar="NAME",
    help="Scope to run (repeatable): kvspec explore --list.",
)  # fmt: skip
@system_options
@save_option
def tour(
    names: tuple[str, ...],
    impl: str,
    checkout: str | None,
    device: str,
    json_file: str | None,
    save_dir: str,
) -> int:
    """Run every transition of a scope on an implementation, beside the reference."""
    scopes = [_scope(name) for name in names]
    writable_json(json_file)
    is_folder(save_dir)

    from ci.report import explore as report
    from ci.report import render
    from ci.report.progress import Progress
    from stateful_tests.explore import tour as touring
    from stateful_tests.explore.search import INTERRUPTED

    out = render.console(text_out(json_file))
    reports: list[Data] = []
    options = impl_options(impl, device, checkout)
    system = resolve(impl, device, checkout)
    with closing(system):
        for scope in scopes:
            with Progress(render.console(sys.stderr)) as progress:
                saved = Saved(system.name, save_dir, progress.say)
                with unusable(f"--impl {impl}: "):
                    made = touring.live(system, scope, progress=progress, found=saved)
            reports.append(data := report.toured(made))
            save_traces(made.findings, data["findings"], save_dir, options)
            saved.tidy(data["findings"])
            report.tour_text(out, data)
            if made.stopped == INTERRUPTED:
                break
    code = max(data["exit_code"] for data in reports)
    if made.stopped == INTERRUPTED:
        code = code or 130
    whole = {"format": "kvspec-tour-report", "version": 1, "exit_code": code, "tours": reports}
    write_json(json_file, whole)
    return int(code)


def _scope(name: str) -> Scope:
    from stateful_tests.coverage.scopes import SCOPES

    if name not in SCOPES:
        raise Unusable(f"--scope {name:.40}: unknown, kvspec explore --list names them{near(name, SCOPES)}")
    return SCOPES[name]


@click.command()
@click.argument("names", nargs=-1)
@click.option("--list", "listing", is_flag=True, help="List the obligations.")
@json_option
def prove(names: tuple[str, ...], listing: bool, json_file: str | None) -> int:
    """Prove the rules of the cursors for all page sizes, windows and lengths.

    NAMES: those obligations, as `order/finish`; or all of one part of a name, as `order` or `finish`.
    """
    writable_json(json_file)

    from ci.report import proofs, render
    from stateful_tests.prove.obligations import GROUPS, OBLIGATIONS

    if listing:
        rows: list[Data] = [{"id": o.name, "claim": o.claim} for o in OBLIGATIONS.values()]
        return list_rows(rows, json_file, {"id": "obligation", "claim": "what is proved"})
    try:
        data = proofs.collect(names)
    except KeyError as error:
        name = str(error.args[0])
        listed = f"kvspec prove --list names them{near(name, (*GROUPS, *OBLIGATIONS))}"
        raise Unusable(f"unknown obligation {name!r:.60}; {listed}") from error
    proofs.text(render.console(text_out(json_file)), data)
    write_json(json_file, data)
    return int(data["exit_code"])
