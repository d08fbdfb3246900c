"""The command line `kvspec`.

Exit codes: 0 conforms, 1 a clause was violated (or the time ran out), 2 unusable input (one line on
stderr says what), 3 the system under test, or kvspec itself, broke.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from ci.report import Data
    from impl.adapter import System
    from stateful_tests.results import Finding
    from stateful_tests.scopes import Scope

# The modules behind the commands import torch; they are loaded by the commands that need them.

_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
_Command = TypeVar("_Command", bound=Callable[..., Any])


class Unusable(Exception):
    """Input that cannot be used: the one line that says which and why."""


def _version() -> str:
    try:
        return metadata.version("kvspec")
    except metadata.PackageNotFoundError:
        return "(run from a checkout)"


@click.group(context_settings=_CONTEXT, invoke_without_command=True)
@click.version_option(_version(), message="kvspec %(version)s")
@click.pass_context
def cli(context: click.Context) -> None:
    """Check the KV-cache bookkeeping of an LLM server against its specification."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def _system_options(command: _Command) -> _Command:
    options = (
        click.option(
            "--impl", default="torch", show_default=True, metavar="IMPL",
            help="reference | torch | torch+BUG | sglang==VERSION | sglang | module:factory",
        ),
        click.option("--sglang-path", metavar="DIR", help="A checkout of SGLang, with --impl sglang."),
        click.option(
            "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True,
            help="Where the torch implementation keeps its pools.",
        ),
        click.option("--json", "json_file", metavar="FILE", help="Write every figure there; - for stdout."),
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


@cli.command()
@_system_options
@click.option("--preset", "presets", multiple=True, metavar="NAME", help="Sizes to run with (repeatable).")
@click.option(
    "--tier", type=click.Choice(["smoke", "pr", "nightly"]), default="smoke", show_default=True,
    help="How much is done.",
)  # fmt: skip
@click.option("--examples", type=click.IntRange(1), help="Runs for each machine, preset and mode.")
@click.option("--steps", type=click.IntRange(1), help="Commands in a run, at most.")
@click.option("--seed", type=int, help="Where random decisions start from.")
@click.option(
    "--machine", "machines", multiple=True, metavar="NAME",
    help="What is driven: sessions, tree, both (repeatable).",
)  # fmt: skip
@click.option("--mode", type=click.Choice(["free", "faithful", "both"]), help="How far a sweep may go.")
@click.option(
    "--save", "save_dir", default="traces", show_default=True, metavar="DIR",
    help="Where the smallest trace of each violation is saved.",
)  # fmt: skip
def check(
    impl: str,
    sglang_path: str | None,
    device: str,
    json_file: str | None,
    presets: tuple[str, ...],
    tier: str,
    examples: int | None,
    steps: int | None,
    seed: int | None,
    machines: tuple[str, ...],
    mode: str | None,
    save_dir: str,
) -> int:
    """Drive an implementation beside the reference and report every violated clause."""
    from reference.commands import Mode
    from stateful_tests import campaign

    modes = None if mode is None else tuple(Mode) if mode == "both" else (Mode(mode),)
    try:
        plan = campaign.plan(
            tier, presets=presets or None, modes=modes, examples=examples, steps=steps, seed=seed,
            machines=machines or None,
        )  # fmt: skip
    except ValueError as error:
        raise Unusable(f"--{error}") from error
    _writable_json(json_file)
    _is_folder(save_dir)
    narrowed = any((presets, machines, mode in ("free", "faithful"), examples, steps))

    from ci import render, report
    from ci.progress import Progress

    system = _resolve(impl, device, sglang_path)
    try:
        with Progress(render.console(sys.stderr)) as progress:
            result = _usable(partial(campaign.run, system, plan, progress), f"--impl {impl}")
        data = report.check_data(result, plan, narrowed=narrowed, capabilities=system.capabilities)
    finally:
        system.close()
    _save_traces(result.findings, data["findings"], save_dir, _impl_options(impl, device, sglang_path))
    render.check(render.console(_text_out(json_file)), data)
    _write_json(json_file, data)
    return int(data["exit_code"])


@cli.command()
@click.argument("traces", nargs=-1, required=True, metavar="TRACE...")
@_system_options
def replay(
    traces: tuple[str, ...], impl: str, sglang_path: str | None, device: str, json_file: str | None
) -> int:
    """Run trace files on the reference and an implementation, step by step."""
    from stateful_tests.traces import TraceError, load

    try:
        loaded = [(path, load(path)) for path in traces]  # all of them, before anything runs
    except TraceError as error:
        raise Unusable(str(error)) from error
    _writable_json(json_file)

    from ci import render, report
    from stateful_tests import lockstep

    out = render.console(_text_out(json_file))
    replays: list[Data] = []
    system = _resolve(impl, device, sglang_path)
    try:
        for path, trace in loaded:
            run = _usable(partial(lockstep.replay, system, trace), path)
            replays.append(report.replay_data(path, run))
            render.replay(out, replays[-1], brief=len(loaded) > 1)
    finally:
        system.close()
    codes = [data["exit_code"] for data in replays]
    if len(replays) > 1:
        bad = [data["file"] for data in replays if data["exit_code"]]
        names = f": {', '.join(bad)}" if bad else ""
        out.print(f"{len(replays)} traces: {len(replays) - len(bad)} conform, {len(bad)} do not{names}")
    code = int(max(codes))
    _write_json(json_file, {"format": "kvspec-replay", "version": 1, "exit_code": code, "replays": replays})
    return code


@cli.command()
@click.argument("trace", metavar="TRACE")
@click.option("--step", type=int, metavar="N", help="After which step, as `kvspec replay` counts; the last.")
@click.option("--json", "json_file", metavar="FILE", help="Write every figure there; - for stdout.")
def tree(trace: str, step: int | None, json_file: str | None) -> int:
    """Draw the radix tree at one step of a trace: what is in it, who pins it, what goes first."""
    from stateful_tests.traces import TraceError, load

    try:
        loaded = load(trace)
    except TraceError as error:
        raise Unusable(str(error)) from error
    _writable_json(json_file)

    from ci import render, tree_view

    try:
        data = tree_view.collect(trace, loaded, step)
    except tree_view.NoTree as error:
        raise Unusable(f"{trace}: {error}") from error
    tree_view.text(render.console(_text_out(json_file)), data)
    _write_json(json_file, data)
    return 0


def _save_option(command: _Command) -> _Command:
    return click.option(
        "--save", "save_dir", default="traces", show_default=True, metavar="DIR",
        help="Where the shortest trace of each violation is saved.",
    )(command)  # fmt: skip


@cli.command()
@click.option("--scope", "names", multiple=True, metavar="NAME", help="Scope to explore (repeatable).")
@click.option("--list", "listing", is_flag=True, help="List the scopes.")
@click.option("--states", type=click.IntRange(1), help="Stop when so many states are known.")
@click.option("--depth", type=click.IntRange(0), help="Do not go on from states so many commands away.")
@click.option(
    "--memory", type=click.IntRange(50), default=4096, show_default=True, metavar="MB",
    help="Stop when the process has so much.",
)  # fmt: skip
@click.option(
    "--clauses/--no-clauses", "clauses_on", default=None,
    help="Whether every clause is asked at every step (a thousand a second); else as the scope says.",
)  # fmt: skip
@click.option("--resume", metavar="FILE", help="Go on from there if it exists; keep the search there.")
@click.option("--json", "json_file", metavar="FILE", help="Write every figure there; - for stdout.")
@_save_option
def explore(
    names: tuple[str, ...],
    listing: bool,
    states: int | None,
    depth: int | None,
    memory: int,
    clauses_on: bool | None,
    resume: str | None,
    json_file: str | None,
    save_dir: str,
) -> int:
    """Look at every state of a scope, breadth first. Without --scope: all scopes that take seconds."""
    from stateful_tests.scopes import SCOPES

    if listing:
        from ci import explore as told

        return _list(told.scope_rows(), False, {"id": "scope", "takes": "takes", "about": "about"}, ())
    chosen = [_scope(name) for name in names] or [s for s in SCOPES.values() if s.takes == "seconds"]
    if resume is not None and len(chosen) != 1:
        raise Unusable("--resume goes with one --scope")
    if resume is not None and not Path(resume).absolute().parent.is_dir():
        raise Unusable(f"--resume {resume}: there is no folder {Path(resume).absolute().parent}")
    _writable_json(json_file)
    _is_folder(save_dir)

    from ci import explore as told
    from ci import render
    from ci.progress import Progress
    from stateful_tests import search
    from stateful_tests.unfinished import UnfinishedError

    out = render.console(_text_out(json_file))
    reports: list[Data] = []
    for scope in chosen:
        try:
            with Progress(render.console(sys.stderr)) as progress:
                result = search.run(
                    scope, clauses=clauses_on, states=states, depth=depth, memory_mb=memory, resume=resume,
                    progress=progress,
                )  # fmt: skip
        except UnfinishedError as error:
            raise Unusable(f"--resume {error}") from error
        reports.append(data := told.explored(result))
        found = [result.finding] if result.finding is not None else []
        _save_traces(found, data["findings"], save_dir, "--impl reference")
        told.text(out, data)
        if result.stopped == "an interrupt":
            break
    code = max(data["exit_code"] for data in reports)
    if reports[-1]["stopped"] == "an interrupt":
        code = 130
    _write_json(json_file, {"format": "kvspec-explore", "version": 1, "exit_code": code, "scopes": reports})
    return int(code)


@cli.command()
@click.option("--scope", "names", multiple=True, metavar="NAME", help="Scope to run (repeatable).")
@click.option("--file", "files", multiple=True, metavar="FILE", help="Recorded tour to run (repeatable).")
@click.option("--record", metavar="FILE", help="Write the tour of the one scope there.")
@_system_options
@_save_option
def tour(
    names: tuple[str, ...],
    files: tuple[str, ...],
    record: str | None,
    impl: str,
    sglang_path: str | None,
    device: str,
    json_file: str | None,
    save_dir: str,
) -> int:
    """Run every transition of a scope on an implementation, beside the reference."""
    from stateful_tests import tour_file

    scopes = [_scope(name) for name in names]
    try:
        loaded = [(file, tour_file.load(file)) for file in files]
    except tour_file.TourError as error:
        raise Unusable(str(error)) from error
    if not scopes and not loaded:
        raise Unusable("tour: --scope NAME (kvspec explore --list) or --file FILE (fixtures/tours)")
    if record is not None and (len(scopes) != 1 or loaded):
        raise Unusable("--record goes with one --scope")
    _writable_json(json_file)
    _is_folder(save_dir)

    from ci import explore as told
    from ci import render
    from ci.progress import Progress
    from stateful_tests import tour as touring

    out = render.console(_text_out(json_file))
    reports: list[Data] = []
    options = _impl_options(impl, device, sglang_path)
    system = _resolve(impl, device, sglang_path)
    try:
        with Progress(render.console(sys.stderr)) as progress:
            runs: list[tuple[str | None, Callable[[], touring.Tour]]] = [
                (file, partial(touring.follow, system, walks, progress)) for file, walks in loaded
            ]
            for scope in scopes:
                live = partial(touring.live, system, scope, record=record is not None, progress=progress)
                runs.append((None, live))
            tours = [(file, _usable(work, f"--impl {impl}")) for file, work in runs]
    finally:
        system.close()
    for file, made in tours:
        reports.append(data := told.toured(made, file))
        _save_traces(made.findings, data["findings"], save_dir, options)
        told.tour_text(out, data)
        if record is not None and made.recorded is not None:
            Path(record).write_bytes(tour_file.dumps(made.recorded))
    code = max(data["exit_code"] for data in reports)
    told_all = {"format": "kvspec-tour-report", "version": 1, "exit_code": code, "tours": reports}
    _write_json(json_file, told_all)
    return int(code)


def _scope(name: str) -> Scope:
    from stateful_tests.scopes import SCOPES

    if name not in SCOPES:
        raise Unusable(f"--scope {name:.40}: unknown; one of {', '.join(SCOPES)}")
    return SCOPES[name]


@cli.command()
@click.argument("names", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def bugs(names: tuple[str, ...], as_json: bool) -> int:
    """List the named bugs: each puts one fault back into the torch implementation. NAMES: those in full."""
    from ci import report
    from impl.bugs import BUGS

    rows = report.table_data(BUGS, ("id", "title", "clause", "modes", "source", "story"))
    for row in rows:
        row["modes"] = [mode.value for mode in row["modes"]]
    headings = {"id": "bug", "title": "what is wrong", "clause": "clause", "source": "source"}
    return _list(rows, as_json, headings, names)


@cli.command()
@click.argument("names", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def clauses(names: tuple[str, ...], as_json: bool) -> int:
    """List the clauses of the specification. NAMES: those in full."""
    from ci import report
    from reference.clauses import CLAUSES

    rows = report.table_data(CLAUSES, ("id", "title", "sentence", "scope", "why", "settled", "source"))
    headings = {"id": "clause", "sentence": "what it says", "settled": "how it was settled"}
    return _list(rows, as_json, headings, names)


@cli.command("blindspots")
@click.option("--bug", "names", multiple=True, metavar="NAME", help="Bug to measure (repeatable).")
@click.option("--runs", type=click.IntRange(1, 10_000), default=20, show_default=True, help="Runs per bug.")
@click.option("--seed", type=int, default=0, show_default=True, help="Where random decisions start from.")
@click.option(
    "--json", "json_file", metavar="[FILE]", is_flag=False, flag_value="-",
    help="Write every figure there; stdout when no FILE is given.",
)  # fmt: skip
def blind_spots(names: tuple[str, ...], runs: int, seed: int, json_file: str | None) -> int:
    """Measure which run-time check sees which named bug, and when."""
    from impl.bugs import BUGS

    for name in names:
        if name not in BUGS:
            raise Unusable(f"--bug {name}: unknown bug; `kvspec bugs` lists them")
    _writable_json(json_file)

    from ci import blindspots, render
    from ci.progress import Progress

    with Progress(render.console(sys.stderr)) as progress:
        data = blindspots.collect(tuple(dict.fromkeys(names)), runs, seed, progress)
    blindspots.text(render.console(_text_out(json_file)), data, detailed=bool(names))
    _write_json(json_file, data)
    return 0


@cli.command()
@click.argument("names", nargs=-1)
@click.option("--json", "json_file", metavar="FILE", help="Write every figure there; - for stdout.")
def prove(names: tuple[str, ...], json_file: str | None) -> int:
    """Prove the rules of the cursors for all page sizes, windows and lengths. NAMES: those obligations."""
    try:
        import_module("z3")
    except ImportError as error:
        raise Unusable("prove needs the solver z3: pip install z3-solver") from error
    _writable_json(json_file)

    from ci import proofs, render
    from stateful_tests.proofs import GROUPS

    try:
        data = proofs.collect(names)
    except KeyError as error:
        raise Unusable(f"unknown obligation {error.args[0]!r:.60}; one of {', '.join(GROUPS)}") from error
    proofs.text(render.console(_text_out(json_file)), data)
    _write_json(json_file, data)
    return int(data["exit_code"])


def _list(rows: list[Data], as_json: bool, columns: dict[str, str], names: tuple[str, ...]) -> int:
    """Rows as a table, or those called `names` in full."""
    from ci import render

    known = {row["id"]: row for row in rows}
    for name in names:
        if name not in known:
            raise Unusable(f"unknown {columns['id']} {name!r:.40}; without a name all are listed")
    if as_json:
        _write_json("-", [known[name] for name in names] or rows)
        return 0
    out = render.console()
    for name in names:
        render.record(out, known[name])
        out.print()
    if not names:
        render.listing(out, rows, columns)
    return 0


def _resolve(impl: str, device: str, sglang_path: str | None) -> System:
    from impl.adapter import UnusableImplementation
    from stateful_tests import registry

    if ":" in impl and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a factory may live beside where the command is given
    try:
        return registry.resolve(impl, device=device, sglang_path=sglang_path)
    except UnusableImplementation as error:
        raise Unusable(str(error)) from error
    except Exception as error:  # a stranger's factory may raise anything
        raise Unusable(f"--impl {impl}: {type(error).__name__}: {error}") from error


_Result = TypeVar("_Result")


def _usable(work: Callable[[], _Result], what: str) -> _Result:
    from impl.adapter import UnusableImplementation

    try:
        return work()
    except UnusableImplementation as error:
        raise Unusable(f"{what}: {error}") from error


def _impl_options(impl: str, device: str, sglang_path: str | None) -> str:
    options = ["--impl", impl]
    if sglang_path is not None:
        options += ["--sglang-path", sglang_path]
    if device != "cpu":
        options += ["--device", device]
    return shlex.join(options)


def _save_traces(findings: Sequence[Finding], told: list[Data], folder: str, options: str) -> None:
    """Save the trace of each finding, and note where. A finding that cannot be saved is still told."""
    from ci import report
    from stateful_tests import traces

    for group, found in zip(report.groups(findings), told, strict=True):
        name, trace = report.trace_file(group)
        path = Path(folder, name)
        try:
            traces.save(trace, path)
        except (OSError, traces.TraceError) as error:
            found["not_saved"] = f"{path}: {error}"
        else:
            found["saved"] = str(path)
            found["replay"] = f"kvspec replay {shlex.quote(str(path))} {options}"


def _is_folder(save_dir: str) -> None:
    if os.path.lexists(save_dir) and not os.path.isdir(save_dir):
        raise Unusable(f"--save {save_dir}: is not a directory")


def _writable_json(json_file: str | None) -> None:
    """Say now, and not after the work, that a report cannot be written."""
    if json_file is None or json_file == "-":
        return
    target = Path(json_file)
    if target.is_dir():
        raise Unusable(f"--json {json_file}: is a directory")
    if not target.absolute().parent.is_dir():
        raise Unusable(f"--json {json_file}: there is no folder {target.absolute().parent}")
    if not os.access(target if target.exists() else target.absolute().parent, os.W_OK):
        raise Unusable(f"--json {json_file}: may not be written")


def _text_out(json_file: str | None) -> Any:
    """With the JSON on stdout, the text goes to stderr."""
    return sys.stderr if json_file == "-" else sys.stdout


def _write_json(json_file: str | None, data: object) -> None:
    if json_file is None:
        return
    text = json.dumps(data, indent=2) + "\n"
    if json_file == "-":
        sys.stdout.write(text)
        return
    try:
        Path(json_file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise Unusable(f"--json {json_file}: {error.strerror}") from error


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. An interrupt gives 130."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a terminal's encoding may be narrow
    try:
        code = cli.main(list(arguments) if arguments is not None else None, "kvspec", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except Unusable as error:
        return _complain(str(error), 2)
    except click.ClickException as error:
        return _complain(error.format_message(), 2)
    except (KeyboardInterrupt, click.Abort):
        return _complain("interrupted", 130)
    except BrokenPipeError:
        # The reader has seen enough. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return _complain(f"{error.filename or 'output'}: {error.strerror or error}", 2)
    except Exception as error:
        if os.environ.get("KVSPEC_TRACEBACK"):
            raise
        told = f"{type(error).__name__}: {error} (set KVSPEC_TRACEBACK=1 to see where)"
        return _complain(f"something broke that should not: {told}", 3)


def _complain(message: str, code: int) -> int:
    line = "".join(c if c.isprintable() else " " for c in message)
    print(f"kvspec: {line[:600]}", file=sys.stderr)
    return code


def main() -> None:
    """Entry point of the console script."""
    sys.exit(run())


if __name__ == "__main__":
    main()
