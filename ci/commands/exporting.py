"""kvspec export and run-test: a trace as a unit test of a release or as a bug report; such a test, run."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ci.commands.bases import OF_HISTORY, KnownFaults
from ci.commands.exported_runs import (
    NoTest, Wanted, ended, fixed_system, folder_and_name, last_error, run_as_wanted, target_of,
)  # fmt: skip
from ci.commands.saved_traces import load_trace
from ci.commands.shared import (
    SystemSelector, Unusable, force_option, impl_options, note, target_file, unusable, write_file,
)  # fmt: skip
from impl.process.run_test import FAILS
from impl.system_spec import ENGINES
from stateful_tests.lockstep.endings import Ending, ending
from stateful_tests.lockstep.known_faults import FOLDER, KnownFault, known_faults
from stateful_tests.traces.files import shipped

if TYPE_CHECKING:
    from stateful_tests.lockstep.results import Trace


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
    "--fixed",
    metavar="VERSION|DIR|git:REV",
    help="A release, a checkout, or a commit of the checkout of --impl, on which the test must pass. It runs"
    " in the ways of --impl.",
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
    --impl, and passed on that of --fixed. Where none can be made of TRACE, another trace of the same bug is
    taken, or the test of that bug that was written by hand, or the reason said. Into a folder goes a test of
    each trace of the bug; why one makes no test is said.
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
    elif folder is not None:
        tests, module = _of_each_trace(trace, loaded, selector, fixed, names)
        _write_among(folder, tests, module, force)
        return Ending.CONFORMS
    else:
        text = _pytest(trace, loaded, selector, fixed, names)
    if target is None:
        sys.stdout.write(text)
    else:
        write_file(target, text, "--out")
    return Ending.CONFORMS


def _write_among(folder: Path, tests: list[str], module: str, force: bool) -> None:
    """Write tests into a folder, each named as its test is, and the module that they share, "" for none."""
    from ci.export.template_parts import SHARED

    files: dict[Path, str] = {}
    for text in tests:
        name = re.findall(r"^ *def (test_\w+)\(self\)", text, re.MULTILINE)[-1]
        alike = (f"{name}{again}.py" for again in ("", *(f"_{n}" for n in range(2, 99))))
        path = next(folder / each for each in alike if folder / each not in files)
        files[target_file(path, force)] = text
    beside = folder / f"{SHARED}.py"
    if module and not force and beside.exists() and beside.read_bytes() != module.encode():
        raise Unusable(f"--out {beside}: is for other releases: another folder, or --force")
    shared = {beside: module} if module else {}
    for path, text in {**shared, **files}.items():
        write_file(path, text, "--out")


_Names = tuple[str | None, str | None, str | None]


def _story(file: str, trace: Trace, selector: SystemSelector, names: _Names) -> str:
    from ci.documents.findings import known_bugs
    from ci.export import bug_report as exporting
    from ci.report import data as report
    from stateful_tests.lockstep import lockstep
    from stateful_tests.traces import files as traces

    with ExitStack() as opened, unusable(f"{file}: "):
        system = opened.enter_context(closing(selector.resolve()))
        run = lockstep.replay(system, trace)
        known = KnownFaults(selector, system, opened).of(run)
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


REPORTS = FOLDER / "reports"


def _pytest(
    file: str, trace: Trace, selector: SystemSelector, fixed: str | None, names: _Names
) -> str:
    """The test of a trace, or of the next trace of its bug of which one can be made, or the one of the bug
    that was written by hand. The traces of the bug that have no test by then are named."""
    try:
        text, _ = _tested(file, trace, selector, fixed, names, in_folder=False)
    except NoTest as error:
        reason = str(error)
    else:
        faults = partial(_faults_of, file)
        if others := [other for other, _ in _others(file, trace, selector, faults)]:
            them = f"{len(others)} other traces" if others[1:] else "another trace"
            note(f"{file}: its bug has {them}: {', '.join(others)}; --out DIR/ writes a test of each")
        return text
    shown = cache(lambda: _faults_shown(file, trace, selector))
    tried = 0
    for other, its_trace in _others(file, trace, selector, shown):
        try:
            text, _ = _tested(other, its_trace, selector, fixed, names, in_folder=False)
        except (NoTest, Unusable):
            tried += 1
            continue
        note(f"{file}: {reason}. The test is of another trace of the same bug: {other}")
        return text
    return _by_hand(file, reason, tried, shown(), selector, fixed)


def _of_each_trace(
    file: str, trace: Trace, selector: SystemSelector, fixed: str | None, names: _Names
) -> tuple[list[str], str]:
    """The tests of a trace and of the other traces of its bug, and the module that they import, "" for none.
    Says why one makes no test; where none does, there is the test of the bug that was written by hand. names:
    of the first test."""
    reason, module, tests, tried = "", "", list[str](), 0
    try:
        text, module = _tested(file, trace, selector, fixed, names, in_folder=True)
        tests.append(text)
    except NoTest as error:
        reason = str(error)
    shown = cache(lambda: _faults_shown(file, trace, selector))
    for other, its_trace in _others(file, trace, selector, shown):
        named = (None, None, names[2]) if tests else names
        try:
            text, module = _tested(other, its_trace, selector, fixed, named, in_folder=True)
            tests.append(text)
        except (NoTest, Unusable) as error:
            tried += 1
            note(f"{other}, of the same bug: no test is made: {error}")
    if not tests:
        return [_by_hand(file, reason, tried, shown(), selector, fixed)], ""
    if reason:
        note(f"{file}: no test is made: {reason}")
    return tests, module


def _by_hand(
    file: str, reason: str, tried: int, faults: list[KnownFault], selector: SystemSelector, fixed: str | None
) -> str:  # fmt: skip
    """The test of a bug that was written by hand, for a bug of which no trace makes one. It must fail on the
    release as well. reason: why the trace makes none; tried: how many other traces there were. Raises
    Unusable where no such test shows the bug."""
    from impl.engines import engine
    from impl.process.remote_system import WorkerSystem

    others = ""
    if tried:
        others = f" Nor of {tried} other {'trace' if tried == 1 else 'traces'} of this bug."
    why_not = ""
    for path in (REPORTS / fault.test for fault in faults if fault.test):
        text = path.read_text(encoding="utf-8")
        with ExitStack() as opened:
            system = opened.enter_context(closing(selector.resolve(quiet=True)))
            assert isinstance(system, WorkerSystem) and system.root is not None
            runs = [Wanted(system.name, system.root, system.release, FAILS)]
            if fixed is not None:
                mended = fixed_system(fixed, selector, system, opened)
                assert mended.root is not None
                runs.append(Wanted(mended.name, mended.root, mended.release, 0))
            try:
                run_as_wanted(runs, path, engine(selector.spec.engine).test_hook(text))
            except NoTest as error:
                why_not += f" {path}, which was written by hand: {error}."
                continue
        note(
            f"{file}: {reason}.{others} The test is the one of this bug that was written by hand: {path}"
        )
        return text
    instead = f"kvspec export {file} --as story {selector.options}"
    raise Unusable(
        f"{file}: no test is made: {reason}.{others}{why_not} The text of a bug report: {instead}"
    )


def _faults_of(file: str) -> list[KnownFault]:
    """The known faults whose trace a file is."""
    path = Path(shipped(file)).resolve()
    return [f for f in known_faults().values() if any(FOLDER / each == path for each in f.traces)]


def _faults_shown(file: str, trace: Trace, selector: SystemSelector) -> list[KnownFault]:
    """The known faults whose trace a file is; of another trace, the one that a replay shows."""
    from stateful_tests.lockstep.lockstep import replay

    if of := _faults_of(file):
        return of
    with ExitStack() as opened:
        system = opened.enter_context(closing(selector.resolve(quiet=True)))
        known = KnownFaults(selector, system, opened).of(replay(system, trace))
    return [known] if known is not None else []


def _others(
    file: str, trace: Trace, selector: SystemSelector, faults: Callable[[], list[KnownFault]]
) -> Iterator[tuple[str, Trace]]:
    """Other traces of the same bug: of the finding whose trace this is, and of known faults, for which is
    asked when the finding has no more."""
    from ci.report.data import trace_to_save
    from stateful_tests.lockstep.check_results import finding_name

    path = Path(shipped(file))
    findings = [finding_name(trace.clause or "", number) for number in range(1, 10)]
    names = [
        trace_to_save(finding, trace, str(selector.spec))[0] for finding in findings if trace.clause
    ]
    for beside in (path.with_name(name) for name in names if path.name in names):
        if beside != path and beside.is_file():
            yield str(beside), load_trace(str(beside))
    for each in (each for fault in faults() for each in fault.traces):
        if FOLDER / each != path.resolve():
            yield f"@{Path(each).stem}", load_trace(str(FOLDER / each))


def _tested(
    file: str,
    trace: Trace,
    selector: SystemSelector,
    fixed: str | None,
    names: _Names,
    *,
    in_folder: bool,
) -> tuple[str, str]:
    """The test of a trace, run on the release that has the fault, and on the one that must not; and the
    module that tests of one folder import."""
    from ci.export.bug_report import Titles
    from ci.export.recorded_run import NotExportable
    from ci.export.template_parts import SHARED
    from ci.shown_kinds import shown_of
    from impl.engines import DriveOptions
    from impl.process.remote_system import WorkerSystem
    from stateful_tests.lockstep import systems as registry

    exporting = shown_of(trace.geometry).exports()
    if exporting is None:
        raise NoTest("a test has one server, and this trace has two")
    if selector.spec.engine not in ENGINES:
        use = f"--impl {exporting.ENGINE}==VERSION"
        raise Unusable(
            f"--as pytest makes a test of a release's classes: {use}, not {selector.spec}"
        )
    if selector.spec.engine != exporting.ENGINE:
        raise NoTest(
            f"tests are made of classes of SGLang and vLLM, not of {selector.spec.engine}"
        )
    target = None
    with tempfile.TemporaryDirectory() as made, ExitStack() as opened:
        try:
            with unusable(f"{file}: "):
                if fixed is not None and not fixed.startswith(OF_HISTORY):
                    target = target_of(exporting, fixed, "", selector.spec)
                options = DriveOptions(selector.checkout, calls=True)
                system = opened.enter_context(closing(registry.driven(selector.spec, options)))
                assert isinstance(system, WorkerSystem) and system.root is not None
                if fixed is not None and target is None:
                    folder = folder_and_name(fixed, selector, system, opened)
                    target = target_of(exporting, *folder, selector.spec)
                module = exporting.shared_module(system, target) if in_folder else ""
                text = exporting.unit_test(trace, file, system, target, Titles(*names), in_folder)
        except NotExportable as error:
            raise NoTest(str(error)) from error
        scratch = Path(made, "exported.py")
        Path(made, f"{SHARED}.py").write_text(module, encoding="utf-8")
        scratch.write_text(text, encoding="utf-8")
        wanted = [Wanted(system.name, system.root, system.release, FAILS)]
        if target is not None:
            wanted.append(Wanted(target.name, target.root, target.version, 0))
        about = f"{file}: " if in_folder else ""
        run_as_wanted(wanted, scratch, exporting.hook(trace), about)
    return text, module


@click.command("run-test")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("-v", "--verbose", is_flag=True, help="All that the tests print.")
@impl_options
def run_test(selector: SystemSelector, files: tuple[str, ...], verbose: bool) -> int:
    """Run exported tests on a release or a checkout that is not installed.

    FILE: a test that `kvspec export` has written, or one of fixtures/releases/reports. Exit code 0: all pass,
    1: one fails at an assertion of its own, 3: one stops before, or cannot be run.
    """
    from impl.engines import engine
    from impl.process.remote_system import WorkerSystem
    from impl.process.run_test import outcomes

    if selector.spec.engine not in ENGINES:
        raise Unusable(f"--impl {selector.spec}: a test of classes runs on a release or a checkout")
    texts = []
    for file in files:
        try:
            texts.append(Path(file).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise Unusable(f"{file}: {getattr(error, 'strerror', None) or error}") from error
    hook = engine(selector.spec.engine).test_hook
    with closing(selector.resolve()) as system:
        assert isinstance(system, WorkerSystem) and system.root is not None
        name = system.name
        root = system.root
        release = system.release
    codes = []
    for file, text in zip(files, texts):
        [(code, output)] = outcomes((root, release, [Path(file).absolute()]), hook=hook(text))
        codes.append(code)
        why = f": {last_error(output)}" if code else ""
        click.echo(f"{file}: the test {ended(code)} on {name}{why}")
        if verbose:
            click.echo(output.rstrip())
    return ending(broke=any(code not in (0, FAILS) for code in codes), violated=FAILS in codes)
