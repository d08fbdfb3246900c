"""kvspec validate, setup-server and serve-check: whole servers, watched."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ci.commands.shared import Unusable, json_option, text_out, writable_json, write_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from stateful_tests.watched.reader import WatchLog
    from stateful_tests.watched.validator import Validator


@click.command("setup-server")
@click.argument("release", metavar="VERSION")
@click.option("--again", is_flag=True, help="Make it anew, even if it is there.")
def setup_server(release: str, again: bool) -> int:
    """Make the environment in which a release of SGLang runs whole on a CPU, and keep it."""
    from impl.adapter import UnusableImplementation
    from impl.sglang.server import environment

    try:
        python = environment.make(release, lambda line: click.echo(line, err=True), again=again)
    except UnusableImplementation as error:
        raise Unusable(str(error)) from error
    click.echo(str(python))
    return 0


@click.command()
@click.argument("logs", metavar="LOG...", nargs=-1)
@click.option(
    "--follow", is_flag=True, help="Go on reading while the server writes, and tell partings at once."
)
@click.option("--events", is_flag=True, help="List how each kind of event is read, and end.")
@click.option(
    "--save", "save_dir", metavar="DIR", help="Write the commands up to the first parting as a trace."
)
@json_option
def validate(
    logs: tuple[str, ...], follow: bool, events: bool, save_dir: str | None, json_file: str | None
) -> int:
    """Validate logs of watched servers (KVSPEC_WATCH=DIR) against the specification.

    LOG is a file or a folder. Known faults of a release are told by name and fail nothing.
    """
    from ci.report import render, servers
    from stateful_tests.watched import validator
    from stateful_tests.watched.reader import LogError, logs_of
    from stateful_tests.watched.table import TABLE, mapping_row

    writable_json(json_file)
    out = render.console(text_out(json_file))
    if events:
        rows = [mapping_row(each) for each in TABLE.values()]
        servers.events_table(out, rows)
        write_json(json_file, rows)
        return 0
    if not logs:
        raise Unusable("validate: give a LOG, a file or a folder that the watcher wrote")
    if follow and len(logs) > 1:
        raise Unusable("validate: --follow reads one LOG")
    reports = []
    try:
        for log in logs_of(logs):
            read = validator.Validator(log.header)
            begun = time.perf_counter()
            try:
                for line in log.lines(_alive(log) if follow else None):
                    told = len(read.result.partings)
                    read.read(line)
                    for parting in read.result.partings[told:] if follow and json_file is None else ():
                        if parting.deviation is None:
                            servers.shown_parting(out, servers.parting(parting))
            except KeyboardInterrupt:
                if not follow:
                    raise
            data = servers.validation(log.name, log.header, read.result, time.perf_counter() - begun, log.cut)
            if save_dir is not None:
                data["saved"] = _saved(read, Path(save_dir), log)
            reports.append(data)
            servers.validated(out, data)
    except LogError as error:
        raise Unusable(str(error)) from error
    code = 1 if any(data["partings"] for data in reports) else 0
    write_json(json_file, {"format": "kvspec-validation", "version": 1, "exit_code": code, "logs": reports})
    return code


def _saved(read: Validator, folder: Path, log: WatchLog) -> str | None:
    """Where the trace of a log went; None if there is no parting, or no trace can say it."""
    from stateful_tests.traces import files

    trace = read.trace()
    if trace is None:
        return None
    path = folder / f"{log.files[0].stem}.json"
    try:
        files.save(trace, path)
    except (OSError, files.TraceError) as error:
        raise Unusable(f"--save {path}: {error}") from error
    return str(path)


def _alive(log: WatchLog) -> Callable[[], bool]:
    """Whether the server that writes a log still runs."""

    def alive() -> bool:
        try:
            os.kill(log.header.process, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return True

    return alive
