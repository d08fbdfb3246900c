"""kvspec export turns a trace into a unit test of a release, or into a bug report. kvspec run-test runs such
a test."""

from __future__ import annotations

import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ci.commands.base_choice import OF_HISTORY, KnownFaults
from ci.commands.exported_runs import (
    NoTest, Wanted, ending_text, fixed_system, folder_and_name, last_error, run_as_wanted, target_of,
)  # fmt: skip
from ci.commands.saved_traces import load_trace
from ci.commands.shared import (
    SystemSelector, Unusable, force_option, impl_options, note, target_file, unusable, write_file,
)  # fmt: skip
from impl.process.run_test import FAILS
from impl.system_spec import ENGINES
from reference.failures import count_text
from stateful_tests.lockstep.exit_codes import Ending, ending
from stateful_tests.lockstep.known_faults import FOLDER, KnownFault, known_faults
from stateful_tests.traces.trace_files import shipped_path

if TYPE_CHECKING:
    from ci.export.bug_report import Titles
    from stateful_tests.lockstep.run_results import Trace


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
    from ci.export.bug_report import Titles

    loaded = load_trace(trace)
    folder = Path(out) if out is not None and (out.endswith("/") or Path(out).is_dir()) else None
    if folder is not None and form == "story":
        raise Unusable(f"--out {out}: is a folder; a bug report is one file")
    target = None if out is None or folder is not None else target_file(Path(out), force)
    selector = selector.of(loaded)
    if name is not None and not re.fullmatch("[a-z][a-z0-9_]{0,99}", name):
        raise Unusable(f"--name: {name!r:.60} is no name of a test: a to z, digits and _")
    titles = Titles(name, title, selector.checkout)
    if form == "story":
        if fixed is not None:
            raise Unusable("--fixed goes with --as pytest")
        text = _bug_report(trace, loaded, selector, titles)
    elif folder is not None:
        tests, module = _tests_of_bug(trace, loaded, selector, fixed, titles)
        _write_among(folder, tests, module, force)
        return Ending.CONFORMS
    else:
        text = _test_of_bug(trace, loaded, selector, fixed, titles)
    if target is None:
        sys.stdout.write(text)
        return Ending.CONFORMS
    write_file(target, text, "--out")
    if form == "pytest":
        note(f"again: {shlex.join(['kvspec', 'run-test', str(target)])} {selector.options}")
        if upstream_folder := _UPSTREAM.get(selector.spec.engine):
            note(f"such tests are upstream in {upstream_folder}")
    return Ending.CONFORMS


def _write_among(folder: Path, tests: list[str], module: str, force: bool) -> None:
    """Write tests into a folder, each to a file with the name of its test, and the module that they import.

    module: its text, "" for none. Raises Unusable for a file that exists, unless `force`.
    """
    from ci.export.template_parts import SHARED

    files: dict[Path, str] = {}
    for text in tests:
        name = re.findall(r"^ *def (test_\w+)\(self\)", text, re.MULTILINE)[-1]
        path = folder / f"{name}.py"
        number = 2
        while path in files:
            path = folder / f"{name}_{number}.py"
            number += 1
        files[target_file(path, force)] = text
    if module:
        module_path = folder / f"{SHARED}.py"
        if not force and module_path.exists() and module_path.read_bytes() != module.encode():
            raise Unusable(f"--out {module_path}: is for other releases: another folder, or --force")
        write_file(module_path, module, "--out")
    for path, text in files.items():
        write_file(path, text, "--out")


def _bug_report(file: str, trace: Trace, selector: SystemSelector, titles: Titles) -> str:
    """Return the text of a bug report. Raises Unusable for a trace that conforms."""
    from ci.documents.findings import known_bugs
    from ci.export import bug_report
    from ci.report import report_data as report
    from stateful_tests.lockstep import replays
    from stateful_tests.traces import trace_files as traces

    with ExitStack() as opened, unusable(f"{file}: "):
        system = opened.enter_context(closing(selector.resolve()))
        run = replays.replay(system, trace)
        known_fault = KnownFaults(selector, system, opened).of(run)
    if run.violation is None:
        raise Unusable(
            f"{file}: conforms on {system.name}: there is nothing to report; try another --impl"
        )
    data = report.replay_data(file, run, known=known_fault) | {"text": traces.dump(trace)}
    if known_fault is not None:
        data["known"] |= next(row for row in known_bugs() if row["id"] == known_fault.id)
    if selector.checkout is not None:
        selector = replace(selector, checkout="CHECKOUT")  # readers of the report lack this folder
    return bug_report.story(data, file, selector.options, titles)


REPORTS = FOLDER / "reports"
_UPSTREAM = {  # engine -> the folder for a test like these, in its repository
    "sglang": "test/registered/unit; its CI takes a file with a `register_cpu_ci(...)`, as others there have",
    "vllm": "tests/v1/core",
}


def _test_of_bug(
    file: str, trace: Trace, selector: SystemSelector, fixed: str | None, titles: Titles
) -> str:
    """Return the test of a trace. If none can be made, return that of the first other trace of its bug for
    which one can, or else the test of the bug that was written by hand. Notes name the other traces."""
    try:
        text, _ = _make_and_run_test(file, trace, selector, fixed, titles, in_folder=False)
    except NoTest as error:
        reason = str(error)
    else:
        others = [other for other, _ in _other_traces(file, trace, selector, partial(_faults_of, file))]
        if others:
            count = f"{len(others)} other traces" if len(others) > 1 else "another trace"
            note(f"{file}: its bug has {count}: {', '.join(others)}; --out DIR/ writes a test of each")
        return text
    faults_shown = cache(lambda: _faults_shown(file, trace, selector))
    tried_count = 0
    for other, its_trace in _other_traces(file, trace, selector, faults_shown):
        try:
            text, _ = _make_and_run_test(other, its_trace, selector, fixed, titles, in_folder=False)
        except (NoTest, Unusable):
            tried_count += 1
            continue
        note(f"{file}: {reason}. The test is of another trace of the same bug: {other}")
        return text
    return _handwritten_test(file, reason, tried_count, faults_shown(), selector, fixed)


def _tests_of_bug(
    file: str, trace: Trace, selector: SystemSelector, fixed: str | None, titles: Titles
) -> tuple[list[str], str]:
    """Return the tests of a trace and of the other traces of its bug, and the module that they import, "" for
    none. Notes say why a trace makes no test. If none does, return the test of the bug that was written by
    hand.

    titles: those of the first test.
    """
    reason = ""
    module = ""
    tests: list[str] = []
    tried_count = 0
    try:
        text, module = _make_and_run_test(file, trace, selector, fixed, titles, in_folder=True)
        tests.append(text)
    except NoTest as error:
        reason = str(error)
    faults_shown = cache(lambda: _faults_shown(file, trace, selector))
    for other, its_trace in _other_traces(file, trace, selector, faults_shown):
        its_titles = titles._replace(name=None, title=None) if tests else titles
        try:
            text, module = _make_and_run_test(other, its_trace, selector, fixed, its_titles, in_folder=True)
            tests.append(text)
        except (NoTest, Unusable) as error:
            tried_count += 1
            note(f"{other}, of the same bug: no test is made: {error}")
    if not tests:
        return [_handwritten_test(file, reason, tried_count, faults_shown(), selector, fixed)], ""
    if reason:
        note(f"{file}: no test is made: {reason}")
    return tests, module


def _handwritten_test(
    file: str, reason: str, tried: int, faults: list[KnownFault], selector: SystemSelector, fixed: str | None
) -> str:  # fmt: skip
    """Return the test of a bug that was written by hand, where no trace of the bug makes one. It must fail on
    the release as well. Raises Unusable where no such test shows the bug.

    reason: why the trace makes none.
    tried: how many other traces made none.
    faults: known faults that the trace shows.
    """
    from impl.engines import engine
    from impl.process.remote_system import WorkerSystem

    others = ""
    if tried:
        others = f" Nor of {count_text(tried, 'other trace')} of this bug."
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
    """Return the known faults that list `file` among their traces."""
    path = Path(shipped_path(file)).resolve()
    return [f for f in known_faults().values() if any(FOLDER / trace == path for trace in f.traces)]


def _faults_shown(file: str, trace: Trace, selector: SystemSelector) -> list[KnownFault]:
    """Return the known faults that list `file` among their traces; for any other trace, the known fault that
    a replay shows."""
    from stateful_tests.lockstep.replays import replay

    listed = _faults_of(file)
    if listed:
        return listed
    with ExitStack() as opened:
        system = opened.enter_context(closing(selector.resolve(quiet=True)))
        known = KnownFaults(selector, system, opened).of(replay(system, trace))
    return [known] if known is not None else []


def _other_traces(
    file: str, trace: Trace, selector: SystemSelector, faults: Callable[[], list[KnownFault]]
) -> Iterator[tuple[str, Trace]]:
    """Yield other traces of the same bug, each with its name: first those that `kvspec check` saved beside
    `file` for one finding, then those of the known faults. `faults` may replay: it is called last."""
    from ci.report.report_data import trace_to_save
    from stateful_tests.lockstep.check_results import finding_name

    path = Path(shipped_path(file))
    findings = [finding_name(trace.clause or "", number) for number in range(1, 10)]
    names = [
        trace_to_save(finding, trace, str(selector.spec))[0] for finding in findings if trace.clause
    ]
    if path.name in names:
        for neighbour in map(path.with_name, names):
            if neighbour != path and neighbour.is_file():
                yield str(neighbour), load_trace(str(neighbour))
    for fault in faults():
        for name in fault.traces:
            if FOLDER / name != path.resolve():
                yield f"@{Path(name).stem}", load_trace(str(FOLDER / name))


def _make_and_run_test(
    file: str,
    trace: Trace,
    selector: SystemSelector,
    fixed: str | None,
    titles: Titles,
    *,
    in_folder: bool,
) -> tuple[str, str]:
    """Make the test of a trace and run it: it must fail on the release of --impl and pass on that of
    --fixed.

    Return its text, and that of the module that tests of one folder import, "" unless `in_folder`.
    Raises NoTest where no test can be made, or where it does not fail and pass as it must.
    """
    from ci.export.recorded_run import NotExportable
    from ci.export.template_parts import SHARED
    from ci.shown_kinds import shown_kind_of
    from impl.engines import DriveOptions
    from impl.process.remote_system import WorkerSystem
    from stateful_tests.lockstep import system_names as registry

    exporting = shown_kind_of(trace.geometry).exports()
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
    fixed_target = None
    with tempfile.TemporaryDirectory() as scratch_folder, ExitStack() as opened:
        try:
            with unusable(f"{file}: "):
                if fixed is not None and not fixed.startswith(OF_HISTORY):
                    fixed_target = target_of(exporting, fixed, "", selector.spec)
                options = DriveOptions(selector.checkout, calls=True)
                system = opened.enter_context(closing(registry.driven_system(selector.spec, options)))
                assert isinstance(system, WorkerSystem) and system.root is not None
                if fixed is not None and fixed_target is None:
                    folder, name = folder_and_name(fixed, selector, system, opened)
                    fixed_target = target_of(exporting, folder, name, selector.spec)
                module = exporting.shared_module(system, fixed_target) if in_folder else ""
                text = exporting.unit_test(trace, file, system, fixed_target, titles, in_folder)
        except NotExportable as error:
            raise NoTest(str(error)) from error
        test_file = Path(scratch_folder, "exported.py")
        test_file.write_text(text, encoding="utf-8")
        Path(scratch_folder, f"{SHARED}.py").write_text(module, encoding="utf-8")
        wanted = [Wanted(system.name, system.root, system.release, FAILS)]
        if fixed_target is not None:
            wanted.append(Wanted(fixed_target.name, fixed_target.root, fixed_target.version, 0))
        prefix = f"{file}: " if in_folder else ""
        run_as_wanted(wanted, test_file, exporting.hook(trace), prefix)
    return text, module


@click.command("run-test")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("-v", "--verbose", is_flag=True, help="All that the tests print.")
@impl_options
def run_test(selector: SystemSelector, files: tuple[str, ...], verbose: bool) -> int:
    """Run exported tests on a release that is not installed.

    Or on a checkout. FILE: a test that `kvspec export` has written, or one of fixtures/releases/reports. Exit
    code 0: all pass, 1: one fails at an assertion of its own, 3: one stops before, or cannot be run.
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
        reason = f": {last_error(output)}" if code else ""
        click.echo(f"{file}: the test {ending_text(code)} on {name}{reason}")
        if verbose:
            click.echo(output.rstrip())
    return ending(broke=any(code not in (0, FAILS) for code in codes), violated=FAILS in codes)
