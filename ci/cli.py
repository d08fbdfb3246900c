"""The command line `kvspec`.

Exit codes: 0 conforms, 1 a clause was violated, 2 unusable input (one line on stderr says what), 3 the system
under test, or kvspec itself, broke, 4 incomplete: nothing was found, but the plan was not done.
"""

import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType

import click

from ci.standard_streams import printable, unbreakable_output
from ci.commands import (
    catalogue, check_and_replay, explore_and_prove, init_adapter, server_checks, spec_document,
    trace_authoring, trace_export, tree_view,
)  # fmt: skip
from ci.commands.options.help_groups import COMMANDS, GroupedCommands
from ci.commands.shared import Unusable
from impl.process.worker import YOUNG
from stateful_tests.lockstep.exit_codes import Ending

_LONGEST = 2000  # of a line: twenty names that a checkout lacks, and what to do
# what brings a package that is not there
_EXTRAS = {"numpy": "torch", "torch": "torch", "z3": "prove"}
_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


def _version(context: click.Context, _: click.Parameter, requested: bool) -> None:
    if not requested:
        return
    from importlib import metadata  # it takes as long to load as click

    try:
        version = metadata.version("kvspec")
    except metadata.PackageNotFoundError:
        version = "(run from a checkout)"
    click.echo(f"kvspec {version}")
    context.exit()


@click.group(
    cls=GroupedCommands,
    groups=COMMANDS,
    context_settings=_CONTEXT,
    invoke_without_command=True,
    epilog="`kvspec check` alone drives the built-in implementation, in 10 to 20 seconds. README.md has a"
    " section for each kind of user.",
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_version,
    help="Show the version and exit.",
)
@click.pass_context
def cli(context: click.Context) -> None:
    """Check the KV-cache bookkeeping of an LLM server against its specification."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


for _command in (
    check_and_replay.check, check_and_replay.replay, tree_view.tree,
    trace_export.export, trace_export.run_test, init_adapter.init_adapter,
    trace_authoring.new_trace, trace_authoring.shrink, trace_authoring.new_fixture, trace_authoring.upgrade,
    explore_and_prove.explore, explore_and_prove.tour, explore_and_prove.prove,
    server_checks.validate, server_checks.serve_check, server_checks.setup_server,
    catalogue.bugs, catalogue.clauses, catalogue.driven, spec_document.spec,
):  # fmt: skip
    cli.add_command(_command)


def run(
    arguments: Sequence[str] | None = None, command: click.Command = cli, name: str = "kvspec"
) -> int:
    """Run a command line and return its exit code. An interrupt gives 130."""
    complain = partial(_complain, name)
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a terminal's encoding may be narrow
    with unbreakable_output() as lost:
        code = _run(arguments, command, name, complain)
        sys.stdout.flush()
        if lost.error is not None and not isinstance(lost.error, BrokenPipeError):
            complain(f"standard output: {lost.error.strerror or lost.error}", code)
    return code


def _run(
    arguments: Sequence[str] | None,
    command: click.Command,
    name: str,
    complain: Callable[[str, int], int],
) -> int:
    """Run a command and return its exit code. Each exception becomes one line for `complain`, with the code
    that belongs to it."""
    try:
        code = command.main(
            list(arguments) if arguments is not None else None, name, standalone_mode=False
        )
        return code if isinstance(code, int) else Ending.CONFORMS
    except Unusable as error:
        return complain(str(error), Ending.UNUSABLE)
    except click.MissingParameter as error:
        path = error.ctx.command_path if error.ctx is not None else name
        message = error.format_message().rstrip(".")
        return complain(f"{message}; `{path} --help` says what it is", Ending.UNUSABLE)
    except click.ClickException as error:
        return complain(error.format_message(), Ending.UNUSABLE)
    except (KeyboardInterrupt, click.Abort):
        return complain("interrupted", Ending.INTERRUPTED)
    except OSError as error:
        return complain(f"{error.filename or 'a file'}: {error.strerror or error}", Ending.UNUSABLE)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name in _EXTRAS:
            return complain(
                f"this needs {error.name}: pip install 'kvspec[{_EXTRAS[error.name]}]'",
                Ending.UNUSABLE,
            )
        if os.environ.get("KVSPEC_TRACEBACK"):
            raise
        where = "set KVSPEC_TRACEBACK=1 to see where"
        return complain(
            f"something broke that should not: {type(error).__name__}: {error} ({where})",
            Ending.BROKE,
        )


def _complain(name: str, message: str, code: int) -> int:
    print(f"{name}: {printable(message)[:_LONGEST]}", file=sys.stderr)
    return code


def interrupts(
    now: Callable[[], float] = time.monotonic,
) -> Callable[[int, FrameType | None], None]:
    """Return a handler of termination signals. The first interrupts; after the second the report still
    comes."""
    interrupted_at: list[float] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        # timeout(1), for one, sends it to the process and to its group
        if interrupted_at and now() - interrupted_at[-1] < 1:
            return
        interrupted_at.append(now())
        if len(interrupted_at) == 2:
            os.write(
                2, b"kvspec: ends, and reports what it has found; one more signal ends it at once\n"
            )
        else:
            signal.default_int_handler(number, frame)

    return interrupt


def main() -> None:
    """Entry point of the console script. A signal to end is an interrupt: what was found is reported."""
    if not __debug__:  # an assertion of the system under test is a finding
        os.environ.pop("PYTHONOPTIMIZE", None)
        os.execv(sys.executable, [sys.executable, "-P", "-m", "kvspec", *sys.argv[1:]])
    gc.set_threshold(YOUNG)
    interrupt = interrupts()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, interrupt)
    code = run()
    # The report is out. A signal during Python's own end would become the exit code.
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)
    sys.exit(code)


if __name__ == "__main__":
    main()
