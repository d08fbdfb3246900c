"""kvspec tree and export: look at one trace, and hand it to others."""

from __future__ import annotations

import re
import sys
import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ci.commands.shared import (
    ReportOut, SystemSelector, Unusable, force_option, impl_options, json_option, load_trace, target_file,
    unusable, write_file,
)  # fmt: skip
from stateful_tests.lockstep.endings import Ending

if TYPE_CHECKING:
    from stateful_tests.lockstep.results import Trace


@click.command()
@click.argument("trace", metavar="TRACE")
@click.option(
    "--step",
    type=int,
    metavar="N",
    help="Step, as `kvspec replay` counts them. [default: the last]",
)
@json_option
def tree(out: ReportOut, trace: str, step: int | None) -> int:
    """Draw the radix tree at a step of a trace.

    It is the tree of the reference: who pins what, what is evicted first.
    """
    loaded = load_trace(trace)

    from ci.report import tree_view

    with unusable(f"{trace}: ", tree_view.NoTree):
        data = tree_view.collect(trace, loaded, step)
    tree_view.text(out.console, data)
    return out.end(data)


@click.command()
@click.argument("trace", metavar="TRACE")
@click.option(
    "--as",
    "form",
    type=click.Choice(["pytest", "story"]),
    required=True,
    help="A unit test in plain Python, or the text of a bug report.",
)
@click.option(
    "--out",
    metavar="FILE|DIR/",
    help="Where the text goes; tests in a folder share one module. [default: stdout]",
)
@click.option(
    "--fixed", metavar="VERSION|DIR", help="A release, or a checkout, on which the test must pass."
)
@click.option(
    "--name",
    help="Name of the test, such as finish_keeps_the_partial_page. [default: from FILE, or the clause]",
)
@click.option(
    "--title", help="First line of the test, or heading of the report. [default: the name]"
)
@force_option
@impl_options
def export(
    selector: SystemSelector, trace: str, form: str, out: str | None, fixed: str | None, name: str | None,
    title: str | None, force: bool,
) -> int:  # fmt: skip
    """Turn a trace into a unit test or a bug report.

    A unit test runs on the release's own classes. It is written only after it has failed on the release of
    --impl, and passed on that of --fixed.
    """
    loaded = load_trace(trace)
    folder = Path(out) if out is not None and (out.endswith("/") or Path(out).is_dir()) else None
    if folder is not None and form == "story":
        raise Unusable(f"--out {out}: is a folder; a bug report is one file")
    target = None if out is None or folder is not None else target_file(Path(out), force)
    selector = selector.of(loaded)
    if name is not None and not re.fullmatch("[a-z][a-z0-9_]{0,99}", name):
        raise Unusable(f"--name: {name!r:.60} is no name of a test: a to z, digits and _")
    names = name, title, selector.checkout
    if form == "story":
        if fixed is not None:
            raise Unusable("--fixed goes with --as pytest")
        text = _story(trace, loaded, selector, names)
    else:
        text, module = _pytest(trace, loaded, selector, fixed, names, folder)
        if folder is not None:
            target = _among(folder, text, module, force)
    if target is None:
        sys.stdout.write(text)
    else:
        write_file(target, text, "--out")
    return Ending.CONFORMS


def _among(folder: Path, text: str, module: str, force: bool) -> Path:
    """Where a test stands in a folder, which has the module that its tests share."""
    from ci.export.template_parts import SHARED

    name = re.findall(r"^ *def (test_\w+)\(self\)", text, re.MULTILINE)[-1]
    target = target_file(folder / f"{name}.py", force)
    beside = folder / f"{SHARED}.py"
    if not force and beside.exists() and beside.read_bytes() != module.encode():
        raise Unusable(f"--out {beside}: is for other releases: another folder, or --force")
    write_file(beside, module, "--out")
    return target


_Names = tuple[str | None, str | None, str | None]


def _story(file: str, trace: Trace, selector: SystemSelector, names: _Names) -> str:
    from ci.documents.findings import known_bugs
    from ci.export import bug_report as exporting
    from ci.report import data as report
    from stateful_tests.check.explanation import known_fault
    from stateful_tests.lockstep import lockstep
    from stateful_tests.traces import files as traces

    with closing(selector.resolve()) as system, unusable(f"{file}: "):
        run = lockstep.replay(system, trace)
        known = known_fault(system, run)
    if run.violation is None:
        raise Unusable(
            f"{file}: conforms on {system.name}: there is nothing to report; try another --impl"
        )
    data = report.replay_data(file, run, known=known) | {"text": traces.dump(trace)}
    if known is not None:
        data["known"] |= next(row for row in known_bugs() if row["id"] == known.id)
    checkout = "CHECKOUT" if selector.checkout is not None else None  # nobody else has this folder
    return exporting.story(
        data, file, replace(selector, checkout=checkout).options, exporting.Titles(*names)
    )


def _pytest(
    file: str,
    trace: Trace,
    selector: SystemSelector,
    fixed: str | None,
    names: _Names,
    folder: Path | None,
) -> tuple[str, str]:
    """The test, run on the release that has the fault, and on the one that must not; and for a folder the
    module that it imports."""
    from ci.export.bug_report import Titles
    from ci.export.recorded_run import NotExportable
    from ci.export.template_parts import SHARED
    from ci.shown_kinds import shown_of
    from impl.process.run_test import FAILS, STOPS, outcomes
    from impl.engines import DriveOptions
    from stateful_tests.lockstep import systems as registry

    exporting = shown_of(trace.geometry).exports()
    if exporting is None:
        raise Unusable(
            f"{file}: no test is made of a trace of two servers: `kvspec replay` repeats it"
        )
    if selector.spec.engine != exporting.ENGINE:
        use = f"--impl {exporting.ENGINE}==VERSION"
        raise Unusable(
            f"--as pytest makes a test of a release's classes: {use}, not {selector.spec}"
        )
    with unusable(f"{file}: ", NotExportable):
        target = None if fixed is None else exporting.target(fixed)
        options = DriveOptions(selector.checkout, calls=True)
        with closing(registry.driven(selector.spec, options)) as system:
            module = "" if folder is None else exporting.shared_module(system, target)
            titles, beside = Titles(*names), folder is not None
            text = exporting.unit_test(trace, file, system, target, titles, beside)
        with tempfile.TemporaryDirectory() as made:
            scratch = Path(made, "exported.py")
            Path(made, f"{SHARED}.py").write_text(module, encoding="utf-8")
            scratch.write_text(text, encoding="utf-8")
            wanted, runs = [(system.name, FAILS)], [(system.root, system.release, [scratch])]
            if target is not None:
                wanted.append((target.name, 0))
                runs.append((target.root, target.version, [scratch]))
            ends = outcomes(*runs, hook=exporting.hook(trace))
    endings = {0: "passes", FAILS: "fails", STOPS: "stops before its own assertion"}
    for (name, want), (code, output) in zip(wanted, ends, strict=True):
        if code != want:
            last = next(
                (line for line in reversed(output.split("\n")) if "Error" in line), output[-200:]
            )
            too = " as well" if code == FAILS else ""
            raise Unusable(
                f"{file}: the test {endings.get(code, 'cannot be run')} on {name}{too}: {last}"
            )
        click.echo(f"{name}: the test {endings[code]}, as it should", err=True)
    return text, module
