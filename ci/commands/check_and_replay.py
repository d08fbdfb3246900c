"""kvspec check and replay: drive an implementation beside the reference."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from ci.commands import base_choice, system_check, all_releases
from ci.commands.options.help_groups import CHECK_OPTIONS, GroupedCommand
from ci.commands.options.worker_options import parallel_options
from ci.commands.options.plan_options import plan_options
from ci.commands.saved_traces import load_trace, replay_command, save_option
from ci.commands.shared import (
    ReportOut, SystemSelector, Unusable, system_options, unusable, writable, write_beside,
)  # fmt: skip
from stateful_tests.lockstep.exit_codes import gravest

if TYPE_CHECKING:
    from ci import Data
    from impl.system_spec import SystemSpec
    from stateful_tests.check.check_plans import Plan


base_option = click.option(
    "--base",
    metavar="IMPL|DIR|git:REV",
    help="What to compare with, run as --impl runs: what it violates as well is not new, and does not fail."
    " git:REV: that commit of the checkout. [default: of a checkout with a git history the merge base with"
    " --since or else the upstream branch, or HEAD where that has all that is committed; without changes of"
    " its own the nearest release]",
)


@click.command(cls=GroupedCommand, groups=CHECK_OPTIONS)
@system_options
@plan_options
@save_option("Where the smallest trace of each violation is saved.")
@base_option
@click.option(
    "--since",
    metavar="REV",
    help="With a checkout: first drive what calls functions that changed there since this git revision, and"
    " say which of them no directed run calls.",
)
@parallel_options
@click.option(
    "--html", is_flag=True, help="Write a page beside each saved trace that shows it step by step."
)
@click.option("--junit", metavar="FILE", help="Write JUnit XML: clauses by machines.")
@click.option(
    "-v",
    "--verbose",
    is_flag=True,
    help="Show the plan, clauses, refusals and situations, as --json does.",
)
def check(
    selector: SystemSelector, out: ReportOut, where: Callable[..., Any], plan: Plan,
    save_dir: str, base: str | None, since: str | None, html: bool, junit: str | None, verbose: bool,
) -> int:  # fmt: skip
    """Drive an implementation beside the reference.

    Each violated clause is reported with its smallest trace.

    --impl sglang==all (vllm==all, lmdeploy==all, transformers==all) drives every release, one after the
    other, and prints which shows which clause; sglang==all+rust: all that run so.
    """
    writable(junit, "--junit")
    if since is not None and selector.checkout is None:
        raise Unusable("--since goes with a checkout, such as --sglang-path or --vllm-path")

    how = system_check.CheckOptions(where, save_dir, base, since, html)

    def one(spec: SystemSpec) -> tuple[Data, Callable[[], None]]:
        return system_check.check_system(replace(selector, spec=spec), plan, how)

    from impl.engines import every_release

    if every := every_release(selector.spec):
        all_releases.require_single_system_options(selector, junit=junit)
        return all_releases.check(every, one, plan, out, detailed=verbose)

    from ci.report import check_text

    data, save = one(selector.spec)
    save()
    if junit is not None:
        from ci.report.junit import text_of

        write_beside(junit, text_of(data), "--junit", data)
    code = out.end(data) if out.file != "-" else 0
    check_text.check(out.console, data, detailed=verbose)
    return out.end(data) if out.file == "-" else code


@click.command()
@click.argument("traces", nargs=-1, required=True, metavar="TRACE...")
@system_options
@base_option
@click.option("--html", "html_file", metavar="FILE", help="Write a page that shows each step.")
def replay(
    selector: SystemSelector,
    out: ReportOut,
    traces: tuple[str, ...],
    base: str | None,
    html_file: str | None,
) -> int:
    """Run traces step by step on an implementation.

    TRACE is a file, or @NAME: a fixture.

    --impl sglang==all (vllm==all, lmdeploy==all, transformers==all) says for every release what the trace
    does there; vllm==all+images: every release that runs so.
    """
    if html_file is not None and len(traces) > 1:
        raise Unusable(f"--html {html_file}: shows one trace, not {len(traces)}")
    loaded = [(path, load_trace(path)) for path in traces]  # all of them, before anything runs
    writable(html_file, "--html")
    from impl.engines import every_release

    if every := every_release(selector.spec):
        all_releases.require_single_system_options(selector, base=base, html=html_file)
        return all_releases.replay(every, loaded, selector, out)

    from ci.report import report_data as report
    from ci.report import run_text
    from ci.report.pages import trace_page
    from stateful_tests.lockstep.replays import replay as run_trace
    from stateful_tests.lockstep.replays import with_calls

    replays: list[Data] = []
    with ExitStack() as opened:
        compared = None
        system = None
        if base is not None:
            compared, system = base_choice.with_system(base, selector, None, opened)
        system = system or opened.enter_context(closing(selector.resolve()))
        before = compared and compared.system
        known = base_choice.KnownFaults(selector, system, opened, compared)
        for path, trace in loaded:
            with unusable(f"{path}: "):
                run = with_calls(system, run_trace(system, trace))
                fault = known.of(run)
            replays.append(report.replay_data(path, run, before, fault, known.changes(run)))
            replays[-1]["replay"] = replay_command(path, selector.options)
            if html_file is not None:
                replays[-1]["states"] = trace_page.states(run)
                write_beside(html_file, trace_page.page(replays[-1], run), "--html", replays[-1])
            run_text.replay(out.console, replays[-1], brief=len(loaded) > 1)
    if len(replays) > 1:
        bad = [data["file"] for data in replays if data["exit_code"]]
        which = f": {', '.join(bad)}" if bad else ""
        summary = (
            f"{len(replays)} traces: {len(replays) - len(bad)} conform, {len(bad)} do not{which}"
        )
        out.console.print(summary)
    code = gravest(data["exit_code"] for data in replays)
    return out.end({"format": "kvspec-replay", "version": 1, "exit_code": code, "replays": replays})
