"""kvspec new-trace, shrink, new-fixture and upgrade: traces by hand, and those that are worth keeping."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ci.commands.base_choice import KnownFaults
from ci.commands.saved_traces import load_trace, replay_command, save_trace
from ci.commands.shared import (
    ReportOut, SystemSelector, Unusable, force_option, impl_options, json_option, note, system_options,
    target_file, unusable, write_file,
)  # fmt: skip
from impl.system_spec import SystemSpec
from stateful_tests.lockstep.exit_codes import Ending

if TYPE_CHECKING:
    from stateful_tests.lockstep.run_results import Run, Trace


@click.command("new-trace")
@click.option(
    "--out",
    "into",
    metavar="FILE",
    default="by_hand.json",
    show_default=True,
    help="Where the trace goes. FILE.md says what its steps do.",
)
@force_option
@impl_options
def new_trace(selector: SystemSelector, into: str, force: bool) -> int:
    """Write a trace to start from, of the kind of --impl.

    It conforms. FILE.md beside it has the recipe, and every command and size: JSON has no comments.
    """
    from ci.documents.new_trace import page_beside, skeleton_for, skeleton_trace

    trace_file = target_file(Path(into), force)
    guide = target_file(Path(into).with_suffix(".md"), force)
    with closing(selector.resolve()) as system:
        can = system.capabilities
    kind = can.system_kind
    name = skeleton_for(selector.spec, kind)
    trace = skeleton_trace(name, kind)
    save_trace(trace, trace_file)
    page = page_beside(name, trace, can, str(trace_file), selector.options)
    write_file(guide, page, "--out")
    click.echo(f"wrote   {trace_file}")
    click.echo(f"about   {guide}: what each step does, a recipe, all commands and sizes")
    click.echo(f"replay  {replay_command(str(trace_file), selector.options)}")
    return Ending.CONFORMS


@click.command()
@click.argument("file", metavar="FILE")
@click.option(
    "--clause", metavar="ID", help="Clause that must still be violated. [default: as FILE says]"
)
@click.option(
    "--out",
    "into",
    metavar="FILE",
    help="Where the smallest trace goes. [default: traces/NAME.shrunk.json]",
)
@force_option
@system_options
def shrink(
    selector: SystemSelector,
    out: ReportOut,
    file: str,
    clause: str | None,
    into: str | None,
    force: bool,
) -> int:
    """Find the smallest trace that still violates a clause. FILE is not changed."""
    trace = load_trace(file)
    usual = Path("traces", f"{Path(file).name.removeprefix('@').partition('.')[0]}.shrunk.json")
    target = target_file(Path(into) if into else usual, force)

    from ci.report import report_data as report
    from ci.report import run_text
    from stateful_tests.check import fixtures as authoring
    from stateful_tests.lockstep import replays

    selector = selector.of(trace)
    with ExitStack() as opened, unusable(f"{file}: ", authoring.NotPossible):
        system = opened.enter_context(closing(selector.resolve()))
        before = replays.replay(system, trace)
        if before.violation is None:
            reason = "there is nothing to shrink; try another --impl"
            raise Unusable(f"{file}: conforms on {system.name}: {reason}")
        wanted = authoring.clause_of_run(before, clause)
        if clause is None and trace.clause not in (None, wanted):
            note(
                f"{file} names {trace.clause}; {system.name} violates {wanted} first: shrunk to that"
            )
        after = authoring.shrunk(system, before, wanted)
        known_fault = KnownFaults(selector, system, opened).of(after)
    was, now = (len(run.trace.commands) for run in (before, after))
    if after.trace.story and now < was:
        story = f"(Shortened from {was} commands to {now}; of the original:) {after.trace.story}"
        after = replace(after, trace=replace(after.trace, story=story))
    save_trace(after.trace, target)
    data = {
        "format": "kvspec-shrink",
        "version": 1,
        "clause": wanted,
        "saved": str(target),
        "replay": f"kvspec replay {target} {selector.options}",
        "before": report.replay_data(file, before),
        "after": report.replay_data(str(target), after, known=known_fault),
    }
    run_text.shrunk(out.console, data)
    return out.end(data)


@click.command("new-fixture")
@click.argument("file", metavar="FILE")
@click.option(
    "--name",
    required=True,
    help="What happens in it, as a clause: retract_then_retry_frees_the_reserved_token.",
)
@click.option("--story", required=True, help="A few sentences on what happens and why it matters.")
@click.option("--bug", metavar="ID", help="The named bug that it shows. [default: as FILE says]")
@click.option(
    "--clause", metavar="ID", help="The clause that it violates. [default: the bug's, or FILE's]"
)
@click.option(
    "--out",
    "into",
    metavar="DIR",
    help="Folder of the fixture. [default: fixtures/regressions, or fixtures/releases/sglang-V]",
)
@force_option
@system_options
def new_fixture(
    selector: SystemSelector, out: ReportOut, file: str, name: str, story: str, bug: str | None,
    clause: str | None, into: str | None, force: bool,
) -> int:  # fmt: skip
    """Make a fixture from a trace.

    The trace is replayed, and gets every outcome, a name and a story. FILE is not changed.
    """
    from ci.report import report_data as report
    from ci.report import run_text
    from stateful_tests.check import fixtures as authoring

    trace = load_trace(file)
    trace = replace(trace, bug=bug or trace.bug)
    selector = selector.of(trace)
    trace = replace(trace, bug=trace.bug or selector.spec.bug)
    clause = _shown_clause(file, trace, selector.spec, clause)
    folder = _folder_of_fixtures(into, selector.spec)
    with unusable("--name: ", authoring.NotPossible):
        authoring.check_name(name)
    with unusable("--story: ", authoring.NotPossible):
        authoring.check_story(story)
    path = target_file(folder / f"{name}.json", force, "--name")
    run = _replay_fixture(file, replace(trace, story=story), selector, clause)
    run_text.replay(out.console, report.replay_data(file, run))
    save_trace(run.trace, path)
    head = {"format": "kvspec-fixture", "version": 1, "saved": str(path)}
    data = head | report.replay_data(str(path), run)
    if len(run.trace.commands) >= authoring.SHORT and run.trace.bug is not None:
        data["note"] = f"a fixture has fewer than {authoring.SHORT} commands: kvspec shrink {path}"
    out.console.print(
        f"saved   {path}" + (f" ({data['note']})" if data["note"] else ""), soft_wrap=True
    )
    out.end(data)
    return Ending.CONFORMS


def _shown_clause(file: str, trace: Trace, spec: SystemSpec, clause: str | None) -> str | None:
    """Return the clause that a fixture is to show; None for one that conforms."""
    from impl.bugs import BUGS
    from reference.all_clauses import ALL_CLAUSES

    if trace.bug is not None and trace.bug not in BUGS:
        raise Unusable(f"{file}: there is no bug called {trace.bug}; `kvspec bugs` lists them")
    if trace.bug is not None and spec.bug != trace.bug:
        raise Unusable(
            f"{file}: a trace of the bug {trace.bug} is replayed on torch+{trace.bug}, not {spec}"
        )
    clause = clause or (BUGS[trace.bug].clause if trace.bug else trace.clause)
    if clause is not None and clause not in ALL_CLAUSES and clause != "BROKEN":
        raise Unusable(f"there is no clause called {clause}; `kvspec clauses` lists them")
    return clause


def _folder_of_fixtures(into: str | None, spec: SystemSpec) -> Path:
    """Return the folder that the user names, or that of a release or of the named bugs."""
    usual = "fixtures/regressions"
    if spec.version:
        usual = f"fixtures/releases/{spec.engine}-{spec.short}"
    folder = Path(into or usual)
    if not folder.is_dir() and (into is None or folder.exists()):
        where = f"--out {into}" if into else f"new-fixture: {folder}"
        hint = "" if into else "; --out names another (fixtures belong in a clone of kvspec)"
        raise Unusable(f"{where}: there is no such folder{hint}")
    return folder


def _replay_fixture(file: str, trace: Trace, selector: SystemSelector, clause: str | None) -> Run:
    """Replay a fixture on the system that violates the clause and on healthy ones."""
    from reference.geometry import Geometry
    from reference.system_kinds import kind_of_config
    from stateful_tests.check import fixtures as authoring

    # Of engines that pick their batches none is healthy; the reference tracks no state, and none of both
    # takes a slot for one on demand.
    batches = kind_of_config(trace.geometry).modelled
    ours: tuple[str, ...] = ("torch", "reference") if batches else ()
    if batches and trace.sizes(Geometry).tracks:
        ours = () if trace.sizes(Geometry).lazy else ("torch",)
    healthy = tuple(SystemSelector(SystemSpec(name)).resolve() for name in ours)
    system = None if str(selector.spec) in ("torch", "reference") else selector.resolve()
    if system is None and (clause is not None or not batches):
        raise Unusable(
            f"{file}: names {clause}, and no system that violates it: --bug ID or --impl X"
        )
    try:
        with unusable(f"{file}: ", authoring.NotPossible):
            return authoring.fixture(trace, system, healthy, clause)
    finally:
        for replayed_system in (system, *healthy):
            if replayed_system is not None:
                replayed_system.close()


@click.command()
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@json_option
def upgrade(out: ReportOut, files: tuple[str, ...]) -> int:
    """Write traces of an older format in the present one.

    Every FILE is read before the first is written. One of the present format is left as it is.
    """
    from stateful_tests.traces.trace_files import is_old, read

    traces = [(file, load_trace(file)) for file in files]
    old = [(file, trace) for file, trace in traces if is_old(read(file))]
    for file, trace in old:
        save_trace(trace, Path(file))
        out.console.print(f"upgraded {file}", soft_wrap=True)
    left = len(files) - len(old)
    out.console.print(f"{len(old)} upgraded, {left} of the present format already")
    return out.end({
        "format": "kvspec-upgrade", "version": 1, "upgraded": [file for file, _ in old], "left": left,
    })  # fmt: skip
