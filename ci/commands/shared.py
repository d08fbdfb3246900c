"""Shared parts of the commands of `kvspec`: options, unusable input, systems, files, JSON."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from impl.system_spec import ENGINES, EngineName, SystemSpec, option
from stateful_tests.lockstep.exit_codes import Ending

if TYPE_CHECKING:
    from rich.console import Console

    from impl.adapter import AnySystem
    from impl.process.remote_system import Limits
    from stateful_tests.lockstep.run_results import Trace

# The modules behind the commands import torch; they are loaded by the commands that need them.

_Command = Callable[..., Any]  # what click calls


class Unusable(Exception):
    """Input that cannot be used: one line names it and the reason."""


class ReportOut:
    """The output of a report: its text to a console, and every figure to FILE where --json asks for
    that."""

    def __init__(self, file: str | None) -> None:
        writable(None if file == "-" else file, "--json")  # refused before the work, not after it
        if file is not None and file != "-" and (what := _content_name(file)):
            raise Unusable(
                f"--json {file}: is {what}, which it would overwrite; name --json last, or --json=FILE"
            )
        self.file = file

    @property
    def console(self) -> Console:
        """The console. With the JSON on stdout, the text goes to stderr."""
        from ci.report import text_output

        return text_output.console(sys.stderr if self.file == "-" else sys.stdout)

    def end(self, data: Any) -> Ending:
        """Write the figures, and return the ending that they state. The figures name it as well
        (`ended`)."""
        if isinstance(data, dict) and "exit_code" in data:
            data["ended"] = Ending(data["exit_code"]).word
        if self.file is not None:
            text = json.dumps(data, indent=2) + "\n"
            if self.file == "-":
                sys.stdout.write(text)
            else:
                write_beside(self.file, text, "--json", data)
        return Ending(data.get("exit_code", 0)) if isinstance(data, dict) else Ending.CONFORMS


def _content_name(file: str) -> str:
    """Return the name of the content of a file that cannot be made again; "" if it holds none."""
    kinds = {b'"kvspec-watch"': "a watcher's log", b'"kvspec-trace"': "a trace"}
    with suppress(OSError), open(file, "rb") as stream:
        head = stream.read(200)
        return next((kind for mark, kind in kinds.items() if mark in head), "")
    return ""


def json_option(command: _Command) -> _Command:
    """Add --json, for a command that takes `out`."""

    @wraps(command)
    def run(*arguments: Any, json_file: str | None, **options: Any) -> Any:
        return command(*arguments, out=ReportOut(json_file), **options)

    return click.option(
        "--json",
        "json_file",
        metavar="[FILE]",
        is_flag=False,
        flag_value="-",
        help="Write every figure as JSON. [default FILE: stdout]",
    )(run)


@dataclass(frozen=True)
class SystemSelector:
    """The system that a command line names with --impl, its checkout and its device."""

    spec: SystemSpec
    checkout: str | None = None
    device: str = "cpu"

    def resolve(self, *, quiet: bool = False) -> AnySystem:
        """Return the system.

        quiet: without a note that names the release that a checkout was taken for.
        """
        from impl.engines import DriveOptions
        from stateful_tests.lockstep import system_names as registry

        if self.spec.stranger and os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())  # a factory may live beside where the command is given
        limits, in_process = worker_limits()
        options = DriveOptions(self.checkout, self.device, limits=limits)
        try:
            with unusable():
                system: AnySystem = registry.driven_system(self.spec, options, in_process)
        except Unusable:
            raise
        except (Exception, SystemExit) as error:  # a stranger's factory may raise anything
            raise Unusable(f"--impl {self.spec}: {type(error).__name__}: {error}") from error
        if (remark := getattr(system, "remark", "")) and not quiet:
            note(remark)
        if self.spec.stranger and not system.capabilities.kind and not quiet:
            kind = system.capabilities.system_kind.name
            declared = f'Capabilities(kind="{kind}")'
            note(f'--impl {self.spec}: declares no kind. Its commands are of "{kind}": {declared}')
        if self.spec.stranger:
            with suppress(AttributeError):  # an adapter may have slots
                system.close = partial(_closing, self.spec, system.close)  # type: ignore[method-assign]
        return system

    def of(self, trace: Trace) -> SystemSelector:
        """Return the selector for a trace: without --impl it selects torch with the bug that the trace
        names."""
        if not trace.bug or self.checkout is not None or _was_typed("impl"):
            return self
        return replace(self, spec=SystemSpec("torch", ways=(trace.bug,)))

    @property
    def options(self) -> str:
        """Return the options as they are typed."""
        options = ["--impl", str(self.spec)]
        if self.checkout is not None:
            options += [option(self.spec.engine), self.checkout]
        if self.device != "cpu":
            options += ["--device", self.device]
        for name in ("timeout", "memory"):
            if (value := _kept_option(name)) is not None:
                options += [f"--{name}", f"{value:g}"]
        return shlex.join(options)


def _closing(spec: SystemSpec, close: Callable[[], None]) -> None:
    """Close a stranger's system. An exception there does not end the report."""
    try:
        close()
    except Exception as error:
        from impl.process.failures import SystemFailed

        kind = "" if isinstance(error, SystemFailed) else f"{type(error).__name__}: "
        note(f"--impl {spec}: close(): {kind}{error}")


class _CheckoutOption(click.Option):
    """The option that names a checkout of one engine. In a help page one record stands for those of all."""

    def get_help_record(self, context: click.Context) -> tuple[str, str] | None:
        record = super().get_help_record(context)
        names = ", ".join(map(option, ENGINES))
        return None if record is None else (f"{names} {self.metavar}", record[1])


def impl_options(command: _Command) -> _Command:
    """Add --impl and the checkouts, and --device where `command` has that, for a command that takes
    `selector`."""

    @wraps(command)
    def run(*arguments: Any, impl: str, device: str = "cpu", **options: Any) -> Any:
        paths = {name: options.pop(f"{name}_path") for name in ENGINES}
        given_paths = {name: path for name, path in paths.items() if path is not None}
        return command(*arguments, selector=_selector(impl, given_paths, device), **options)

    for name in reversed(ENGINES):
        run = click.option(
            option(name),
            cls=_CheckoutOption,
            metavar="DIR",
            hidden=name != ENGINES[0],
            help="The root of a clone. --impl then need not be named, unless with a way, as in"
            " --impl sglang+overlap.",
        )(run)
    return click.option(
        "--impl",
        default="torch",
        show_default=True,
        metavar="IMPL",
        help="reference | torch | torch+BUG | sglang==VERSION | sglang | vllm==VERSION | vllm |"
        " transformers==VERSION | lmdeploy==VERSION | module:factory. Behind sglang a way to run: +overlap,"
        " +rust, +rust+overlap, +hicache, +rust+hicache, +unified; behind vllm +async, +v2, +async+v2,"
        " +offload, +async+offload, +pair, +images, +async+images, +v2+images, +async+v2+images,"
        " +offload+images, +async+offload+images; behind transformers +async; behind lmdeploy +store, +pair.",
    )(run)


def _selector(impl: str, paths: dict[EngineName, str], device: str) -> SystemSelector:
    """Return the selector for --impl and the checkouts of engines. Without --impl a checkout's engine
    is driven."""
    spec = SystemSpec.parse(impl)
    if not paths:
        return SystemSelector(spec, None, device)
    if len(paths) > 1:
        raise Unusable(f"{' and '.join(map(option, paths))}: one checkout is driven at a time")
    [(name, path)] = paths.items()
    if not _was_typed("impl"):
        spec = SystemSpec(name)
    if spec.engine != name or spec.version is not None:
        raise Unusable(
            f"{option(name)} goes with --impl {name} or {name}+WAY, not with --impl {spec}"
        )
    return SystemSelector(spec, path, device)


def _was_typed(name: str) -> bool:
    """Return whether an option has its value from the command line."""
    source = click.get_current_context().get_parameter_source(name)
    return source is not ParameterSource.DEFAULT


def system_options(command: _Command) -> _Command:
    """Add the options that choose and drive a system, for a command that takes `selector` and `out`."""
    device = click.option(
        "--device",
        type=click.Choice(["cpu", "cuda", "counting"]),
        default="cpu",
        show_default=True,
        help="Where torch, or a release of SGLang, keeps its pools. cuda: a release launches its own Triton"
        " kernels. counting: torch on a simulated device; code that mixes it with the CPU, or waits for it,"
        " breaks.",
    )
    for add in reversed((impl_options, device, json_option, *_worker_options)):
        command = add(command)
    return command


force_option = click.option("--force", is_flag=True, help="Overwrite an existing file.")


def _keep_option(context: click.Context, option: click.Parameter, value: Any) -> None:
    if isinstance(value, float) and math.isnan(value):  # it compares as inside of any range
        raise click.BadParameter("is not a number", context, option)
    context.meta[f"kvspec.{option.name}"] = value


# How a system in a worker process is driven: kept in the context, for `SystemSelector`.
_worker_options = (
    click.option(
        "--in-process", is_flag=True, expose_value=False, callback=_keep_option,
        help="Drive module:factory in this process, for debuggers and prints. A crash or an exit leaves no"
        " report.",
    ),
    click.option(
        "--timeout", type=click.FloatRange(0, 86_400, min_open=True), expose_value=False,
        callback=_keep_option, metavar="SECONDS",
        help="Time for one command; a worker process that takes longer counts as hung. [default: 30]",
    ),
    click.option(
        "--memory", type=click.IntRange(1), expose_value=False, callback=_keep_option, metavar="MB",
        help="Memory that a worker process may take. [default: 8192]",
    ),
)  # fmt: skip


def worker_limits() -> tuple[Limits, bool]:
    """Return the limits of workers, and whether a factory's system is driven in this process, from
    their options."""
    from impl.process.remote_system import LIMITS

    options = {name: _kept_option(name) for name in ("timeout", "memory")}
    given = {f"{name}_{unit}": options[name] for name, unit in (("timeout", "s"), ("memory", "mb"))}
    limits = replace(LIMITS, **{name: value for name, value in given.items() if value is not None})
    return limits, bool(_kept_option("in_process"))


def _kept_option(option: str) -> Any:
    context = click.get_current_context(silent=True)
    return None if context is None else context.meta.get(f"kvspec.{option}")


def note(text: str) -> None:
    """Print a line on stderr."""
    from ci.standard_streams import printable

    click.echo(f"kvspec: {printable(text)[:600]}", err=True)


@contextmanager
def unusable(before: str = "", *kinds: type[Exception]) -> Iterator[None]:
    """Raise Unusable for UnusableImplementation and errors of these kinds, with `before` in front of
    their line."""
    try:
        yield
    except Exception as error:
        from impl.adapter import UnusableImplementation

        if isinstance(error, (UnusableImplementation, *kinds)):
            raise Unusable(f"{before}{error}") from error
        raise


def target_file(path: Path, force: bool, option: str = "--out") -> Path:
    """Return a file that may be written. Checked before the work, not after."""
    if path.is_dir():
        raise Unusable(f"{option} {path}: is a directory")
    if path.exists() and not force:
        raise Unusable(f"{option} {path}: exists already; --force overwrites it")
    return path


def writable(file: str | None, option: str) -> None:
    if file is None:
        return
    target = Path(file)
    if target.is_dir():
        raise Unusable(f"{option} {file}: is a directory")
    if not target.absolute().parent.is_dir():
        raise Unusable(f"{option} {file}: there is no folder {target.absolute().parent}")
    if not os.access(target if target.exists() else target.absolute().parent, os.W_OK):
        raise Unusable(f"{option} {file}: may not be written")


def write_file(file: str | Path, content: str | bytes, option: str) -> None:
    from stateful_tests.traces.trace_files import write_atomically

    try:
        write_atomically(file, content)
    except OSError as error:
        raise Unusable(f"{option} {file}: {error.strerror}") from error


def write_beside(file: str | Path, content: str | bytes, option: str, data: Any) -> bool:
    """Write a report to a file, and return whether that succeeds. After a failure a verdict in `data`
    stays, and the failure is reported next to it. Raises Unusable for data without a verdict."""
    try:
        write_file(file, content, option)
    except Unusable as error:
        if not isinstance(data, dict) or "exit_code" not in data:
            raise
        note(str(error))
        return False
    return True


