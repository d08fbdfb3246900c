"""kvspec validate, setup-server and serve-check: whole servers, watched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ci.commands.saved_traces import save_option, save_trace
from ci.commands.options.server_settings import (
    ServeCheckCommand,
    field_of,
    require_canary,
    require_fitting,
    require_live,
    require_small_pages,
)
from ci.commands.shared import ReportOut, Unusable, json_option, note, unusable
from impl.system_spec import SystemSpec
from stateful_tests.lockstep.exit_codes import Ending

if TYPE_CHECKING:
    from ci import Data
    from ci.report.progress_line import Progress
    from impl.sglang.server.runs import WholeScheduler
    from stateful_tests.watched.servers.scheduler_runs import Before, JudgedRun
    from stateful_tests.watched.servers.served_run import ServedRun


@click.command("setup-server")
@click.argument("release", metavar="VERSION")
@click.option("--again", is_flag=True, help="Make it anew, also where it exists.")
def setup_server(release: str, again: bool) -> int:
    """Make the environment in which a whole server runs.

    Of the release VERSION of SGLang, on a CPU. It is kept in a cache folder.
    """
    from impl.sglang.server import environment

    with unusable():
        python = environment.make(release, lambda line: click.echo(line, err=True), again=again)
    click.echo(str(python))
    return Ending.CONFORMS


@click.command()
@click.argument("logs", metavar="LOG...", nargs=-1)
@click.option(
    "--follow",
    is_flag=True,
    help="Go on reading while processes of this machine write, all logs at once, and those that begin"
    " meanwhile. Each mismatch is reported at once.",
)
@click.option(
    "--events", is_flag=True, help="List the kinds of events and what each does; nothing else."
)
@click.option(
    "--save",
    "save_dir",
    metavar="DIR",
    help="Write the commands that lead up to the first mismatch as a trace, of a log from its server's start"
    " on and without a tree. The trace itself conforms.",
)
@click.option(
    "--release",
    metavar="VERSION",
    help="Take the server for this release: of a fork, or where nobody has"
    " looked for the faults of a new one.",
)
@click.option(
    "-v",
    "--verbose",
    is_flag=True,
    help="Of known faults the places in each log, and what upstream knows.",
)
@click.option(
    "--strict", is_flag=True, help="A gap or a cut last line in a log ends with exit code 4."
)
@json_option
def validate(
    out: ReportOut,
    logs: tuple[str, ...],
    follow: bool,
    events: bool,
    save_dir: str | None,
    release: str | None,
    verbose: bool,
    strict: bool,
) -> int:
    """Validate logs of watched servers.

    KVSPEC_WATCH=DIR makes a server write one. The log is replayed beside the reference.

    LOG is a file or a folder. Known bugs of a release are reported by name and do not affect the exit code. A
    log without an event ends with exit code 4.
    """
    from ci.commands.log_validation import LogReadings
    from ci.report import log_reports
    from stateful_tests.lockstep.known_faults import is_looked_for
    from stateful_tests.watched.log_follower import TABLE, mapping_row
    from stateful_tests.watched.log_reader import NO_LOG

    if events:
        rows = [mapping_row(mapping) for mapping in TABLE.values()]
        log_reports.events_table(out.console, rows)
        return out.end(rows)
    if not logs:
        raise Unusable("validate: give a LOG, a file or a folder that the watcher wrote")
    if release is not None and not is_looked_for("sglang", release):
        raise Unusable(f"--release {release:.40}: nobody has looked for its faults")
    readings = LogReadings(logs, release)
    reports = []
    shows_at_once = follow and out.file is None
    if follow:
        readings.follow(
            partial(log_reports.show_at_once, out.console) if shows_at_once else None,
            lambda each: log_reports.print_beginning(out.console, each.log.name, each.log.header),
        )
    else:
        readings.read()
    readings.join()
    reasons = [*readings.no_logs.values()]
    if not readings.logs:
        raise Unusable(reasons[0] if reasons else f"{logs[0]}: {NO_LOG}")
    for reason in reasons:
        note(reason)
    for reading in readings.logs.values():
        read = reading.validator
        log = reading.log
        data = log_reports.validation(log.name, log.header, read.result, reading.seconds, log)
        if save_dir is not None and read.result.unexplained:
            if (trace := read.trace()) is None:
                note(
                    f"{log.name}: not saved: a trace needs a log from the server's start on, without a tree"
                )
            else:
                path = Path(save_dir, f"{log.files[0].stem}.json")
                save_trace(trace, path, "--save ")
                data["saved"] = str(path)
                note(f"{log.name}: the commands up to the first mismatch are saved as {path}")
        data["unreadable"] = reading.unreadable
        reports.append(data)
        log_reports.print_log_report(
            out.console, data, shown=shows_at_once, verbose=verbose,
            alone=len(readings.logs) == 1 and not reasons,
        )  # fmt: skip
    data = log_reports.validations(reports, strict, reasons)
    log_reports.print_log_reports(out.console, data, verbose)
    return out.end(data)


@click.command("serve-check", cls=ServeCheckCommand)
@click.option(
    "--impl",
    default="sglang==0.5.23",
    show_default=True,
    metavar="sglang==VERSION",
    help="Release whose scheduler runs.",
)
@click.option(
    "--sglang-path", metavar="DIR", help="A checkout, in the environment of that version."
)
@click.option(
    "--base",
    metavar="sglang==VERSION|DIR",
    help="What to compare with: a finding that the same run shows there is not new, and does not fail."
    " [default: of a checkout the version that --impl names]",
)
@click.option(
    "--runs",
    type=click.IntRange(1),
    default=20,
    show_default=True,
    metavar="N",
    help="Runs, each of new clients.",
)
@click.option(
    "--clients",
    type=click.IntRange(1),
    default=12,
    show_default=True,
    metavar="N",
    help="Clients of a run.",
)
@click.option(
    "--seed", default=0, show_default=True, metavar="N", help="Start of the random decisions."
)
@click.option(
    "--impatient", is_flag=True, help="Some clients send and close without waiting for answers."
)
@click.option("--live", is_flag=True, help="Run its HTTP server; its log is validated meanwhile.")
@click.option(
    "--set",
    "fixed",
    multiple=True,
    metavar="FIELD=N",
    help="Fix a field of the configuration below (repeatable), such as page_size=4; others are drawn.",
)
@click.option(
    "--time-limit",
    type=click.FloatRange(1),
    metavar="SECONDS",
    help="Leave the rest of the runs after this time; the verdict is then incomplete. [default: none; with"
    " --live 600]",
)
@save_option("Where the smallest run of each finding is saved.")
@click.option("--again", metavar="FILE", help="Repeat a saved run, and do nothing else.")
@click.option(
    "--canary",
    is_flag=True,
    help="With --again: SGLang's own KV canary looks at the same run, and the report says what it sees.",
)
@json_option
def serve_check(
    out: ReportOut, impl: str, sglang_path: str | None, base: str | None, runs: int, clients: int, seed: int,
    impatient: bool, live: bool, fixed: tuple[str, ...], time_limit: float | None, save_dir: str,
    again: str | None, canary: bool,
) -> int:  # fmt: skip
    """Run a release's own scheduler under random clients.

    It runs on a CPU. Four things are checked: what attention would read, the server's own strict checks, its
    log, and that no client waits for ever though there is room. The forward pass, the sockets and the clock
    are stand-ins; with --live only the weights. `kvspec setup-server VERSION` comes first. With
    `--set pair=1` a prefill and a decode server run, and the network between them: transfers and what both
    keep for them are checked instead of a log.
    """
    from ci.report import server_reports
    from impl.sglang.parts.fetch import checkout_root
    from impl.sglang.server import environment
    from impl.sglang.server.runs import WholeScheduler
    from stateful_tests.watched.servers import scheduler_runs

    run = None if again is None else _load_served_run(again)
    spec = SystemSpec.parse(impl)
    release = spec.short if run is None else run.release
    if run is None and (spec.engine != "sglang" or spec.version is None):
        raise Unusable(f"--impl {impl}: whole schedulers are driven of sglang==VERSION")
    fixed_fields = dict(map(field_of, fixed))
    if fixed_fields.get("pair") and (live or impatient):
        raise Unusable("--set pair: goes neither with --live nor with --impatient")
    if live and (again is not None or impatient or base is not None):
        raise Unusable("--live goes neither with --again nor with --impatient nor with --base")
    if canary:
        require_canary(release, again)
    if live:
        require_live(fixed_fields)
    if run is None:
        require_fitting(release, fixed_fields)
    if live:
        require_small_pages(release, fixed_fields)
    with unusable():
        root = None if sglang_path is None else checkout_root(sglang_path)
        if live:
            return _check_live_server(
                out, release, root, fixed_fields, seed, clients, time_limit or 600.0, save_dir
            )
        runner = WholeScheduler(environment.python_of(release), root)
        before = _base_to_compare(release, sglang_path, base)
    folder = Path(save_dir)
    try:
        with unusable(f"--impl {impl}: "):
            if run is not None:
                data = _judge_again(runner, run, before, canary=canary)
            else:
                with _saving_findings(folder) as (progress, keep):
                    result = scheduler_runs.check(
                        runner, release, seed, runs, fixed=fixed_fields, count=clients, impatient=impatient,
                        limit_s=time_limit, before=before, say=progress, keep=keep,
                    )  # fmt: skip
                data = server_reports.served_report(result, folder, runs, {})
    finally:
        runner.close()
        if before is not None:
            before.runner.close()
    server_reports.served_text(out.console, data)
    return out.end(data)


@contextmanager
def _saving_findings(folder: Path) -> Iterator[tuple[Progress, Callable[[JudgedRun], None]]]:
    """Yield a progress line, and a function that saves a run with a finding and reports its file once."""
    from ci.report import server_reports
    from ci.report.progress_line import Progress

    reported: set[str] = set()
    with Progress() as progress:

        def keep(judged: JudgedRun) -> None:
            path = server_reports.save(folder, judged)
            if path not in reported:
                progress.say(f"found {judged.run.key}: {path}")
            reported.add(path)

        yield progress, keep


def _judge_again(
    runner: WholeScheduler, run: ServedRun, before: Before | None, *, canary: bool
) -> Data:
    """Repeat a saved run and return its report.

    canary: ask SGLang's own KV canary, too.
    """
    from ci.report import server_reports
    from stateful_tests.watched.servers import scheduler_runs

    judged = scheduler_runs.judge(runner, run, before)
    if canary and run.config.pair:
        raise Unusable("--canary: looks at one server; the run is of a pair")
    opinions = scheduler_runs.second_opinion(runner, judged) if canary else {}
    found = {finding.key: judged for finding in judged.findings}
    result = scheduler_runs.Served(run.release, run.seed, 1, judged.outcome.forwards, found=found)
    return server_reports.served_report(result, None, 1, opinions)


def _base_to_compare(release: str, checkout: str | None, base: str | None) -> Before | None:
    """Return the base of a tree: the one that the user names, or the release of the checkout. A release has
    none."""
    from impl.engines import DriveOptions
    from impl.sglang.parts.fetch import checkout_root
    from impl.sglang.server import environment
    from impl.sglang.server.runs import WholeScheduler
    from stateful_tests.check.known_faults.masks import masks
    from stateful_tests.lockstep.system_names import driven_system
    from stateful_tests.traces.trace_files import FIXTURES
    from stateful_tests.watched.servers.scheduler_runs import Before

    if base is None and checkout is None:
        return None
    folder = checkout_root(base) if base is not None and Path(base).is_dir() else None
    base_release = release
    if base is not None and folder is None:
        base_release = SystemSpec.parse(base).version or base
    runner = WholeScheduler(environment.python_of(base_release), folder)
    known_findings = {}
    if checkout is not None:
        with (
            closing(driven_system(SystemSpec("sglang"), DriveOptions(checkout))) as tree,
            closing(driven_system(SystemSpec("sglang", base_release))) as was,
        ):
            # the remark also says what serve-check needs and the tree lacks
            note(getattr(tree, "remark", "") or f"{checkout}: taken for {release}")
            for mask in masks(tree, was):
                click.echo(mask.line, err=True)
                if mask.there or mask.fixed:
                    known_findings[mask.fault.id] = mask.holds
    served = {path.stem: _load_served_run(str(path)) for path in (FIXTURES / "served").glob("*.json")}
    return Before(
        runner, known_findings, {fault: run for fault, run in served.items() if run.release == release}
    )


def _check_live_server(
    out: ReportOut, release: str, root: Path | None, settings: dict[str, int | bool], seed: int, clients: int,
    limit_s: float, save_dir: str,
) -> int:  # fmt: skip
    """Start a live server, run clients, judge it, stop it."""
    import msgspec

    from ci.report import server_reports
    from impl.choices import RandomChoices
    from impl.sglang.server import environment
    from impl.sglang.server.over_http import LiveServer
    from stateful_tests.watched.servers import live_server, population, random_clients

    python = environment.python_of(release)
    choices = RandomChoices(seed)
    config = population.configuration(
        choices, **{"draft": 0, "window": 0, "tokens": 1024, "running": 8, **settings}
    )
    smaller = msgspec.structs.replace(
        config, tokens=config.tokens // 4, running=max(3, config.running - 2)
    )
    asking = random_clients.clients(choices, smaller, count=clients)  # nobody has to wait for ever
    keep = Path(save_dir) / f"serve-live-{release}-{seed}"
    click.echo(f"sglang {release}: its HTTP server starts, in a minute or so", err=True)
    run = live_server.watch_live(
        lambda folder: LiveServer(python, config, folder, root),
        config,
        asking,
        seed,
        limit_s,
        lambda line: click.echo(line, err=True),
        keep,
    )
    data = server_reports.live_report(run, seed, keep)
    server_reports.lived_text(out.console, data)
    return out.end(data)


def _load_served_run(file: str) -> ServedRun:
    import msgspec

    from stateful_tests.watched.servers.served_run import FORMAT, VERSION, ServedRun

    try:
        text = Path(file).read_bytes()
        if text.startswith(b'{"format":"kvspec-watch"'):
            raise Unusable(
                f"--again {file}: a watcher's log, not a saved run: kvspec validate reads it"
            )
        run = msgspec.json.decode(text, type=ServedRun)
    except OSError as error:
        raise Unusable(f"--again {file}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Unusable(f"--again {file}: {error}") from error
    if (run.format, run.version) != (FORMAT, VERSION):
        raise Unusable(f"--again {file}: no {FORMAT} of version {VERSION}")
    return run
