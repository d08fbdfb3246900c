"""kvspec check and replay: drive an implementation beside the reference."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ci.commands import release_row
from ci.commands.parallel import executor, parallel_options
from ci.commands.shared import (
    Saved, Unusable, impl_options, is_folder, load_trace, replay_command, resolve, save_traces,
    system_options, text_out, unusable, worker_limits, writable, writable_json, write_file, write_json,
)  # fmt: skip

if TYPE_CHECKING:
    from ci import Data
    from impl.adapter import System
    from stateful_tests.check.tiers import Plan


base_option = click.option(
    "--base", metavar="IMPL|DIR",
    help="What was there before: a violation whose trace shows it there too is no failure.",
)  # fmt: skip


@click.command()
@system_options
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
@base_option
@parallel_options
@click.option("--html", is_flag=True, help="Write a page beside each saved trace that shows it step by step.")
@click.option("--junit", metavar="FILE", help="Write JUnit XML there: clauses by machines.")
@click.option(
    "-v", "--verbose", is_flag=True, help="Show the plan, clauses, refusals and situations, as --json does."
)
def check(
    impl: str,
    checkout: str | None,
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
    base: str | None,
    jobs: int | None,
    ray_address: str | None,
    html: bool,
    junit: str | None,
    verbose: bool,
) -> int:
    """Drive an implementation beside the reference and report every violated clause.

    --impl sglang==all, or vllm==all, drives every release, one after the other, and prints which shows which
    clause; after it may stand +unified, +rust, +overlap (+async): every release that has it.
    """
    from reference.commands import Mode
    from stateful_tests.check import tiers

    modes = None if mode is None else tuple(Mode) if mode == "both" else (Mode(mode),)
    with unusable("--", ValueError):
        plan = tiers.plan(
            tier, presets=presets or None, modes=modes, examples=examples, steps=steps, seed=seed,
            machines=machines or None,
        )  # fmt: skip
    writable_json(json_file)
    writable(junit, "--junit")
    is_folder(save_dir)
    narrowed = any((presets, machines, mode in ("free", "faithful"), examples, steps))

    one = partial(
        _driven, plan=plan, narrowed=narrowed, device=device, checkout=checkout, base=base, jobs=jobs,
        ray_address=ray_address, save_dir=save_dir, html=html,
    )  # fmt: skip
    if names := release_row.names(impl):
        elsewhere = {"sglang-path": checkout, "junit": junit, f"device {device}": device != "cpu"}
        for option in (name for name, given in elsewhere.items() if given):
            raise Unusable(f"--{option}: goes with one system, not with --impl {impl}")
        return release_row.check(names, one, plan, json_file, detailed=verbose)

    from ci.report import render

    data, save = one(impl)
    try:
        save()
        if junit is not None:
            from ci.report.junit import write

            write(junit, data)
        if json_file != "-":
            write_json(json_file, data)
    finally:  # whatever could not be written: what was found is told
        render.check(render.console(text_out(json_file)), data, detailed=verbose)
    if json_file == "-":
        write_json(json_file, data)
    return int(data["exit_code"])


def _driven(
    impl: str, *, plan: Plan, narrowed: bool, device: str, checkout: str | None, base: str | None,
    jobs: int | None, ray_address: str | None, save_dir: str, html: bool,
) -> tuple[Data, Callable[[], None]]:  # fmt: skip
    """The report of a check of one system, and what saves its traces and notes there where they are."""
    from ci.report import data as report
    from ci.report import render
    from ci.report.progress import Progress
    from stateful_tests.check import campaign, driving, tiers

    with ExitStack() as opened:
        before = None if base is None else opened.enter_context(closing(_base(base, device, impl)))
        system = opened.enter_context(closing(resolve(impl, device, checkout)))
        plan = tiers.for_system(plan, system)
        strange = ":" in impl  # a stranger's system may hold what there is once
        running = executor(jobs, ray_address, pays=not strange and device != "cuda", fork=device != "cuda")
        named = driving.Named(impl, device, checkout, **worker_limits())
        with running as where, Progress(render.console(sys.stderr)) as progress:
            saved = Saved(system.name, save_dir, progress.say)
            with unusable(f"--impl {impl}: "):
                result = campaign.run(
                    system, plan, progress, before, executor=where, named=named, found=saved
                )
        data = report.check_data(
            result, plan, narrowed=narrowed, capabilities=system.capabilities,
            base=None if before is None else report.on_base(before, result.findings),
        )  # fmt: skip

    def save() -> None:
        options = impl_options(impl, device, checkout)
        save_traces(result.findings, data["findings"], save_dir, options, html)
        saved.tidy(data["findings"])

    return data, save


def _base(named: str, device: str, impl: str) -> System:
    """The implementation before a change to `impl`: by its name, or a checkout, which is loaded here."""
    from stateful_tests.check.tiers import CLIENTS, sizes_for

    folder, vllm = named if Path(named).is_dir() else None, impl.startswith("vllm")
    with unusable(f"--base {named:.80}: ", Unusable):
        package, _, ways = impl.partition("+") if vllm else ("sglang", "", "")
        of_folder = "+".join(filter(None, (package.partition("==")[0], ways)))
        system = resolve(of_folder if folder else named, device, folder)
        if folder is not None:
            sizes = sizes_for(CLIENTS, "full") if vllm else sizes_for("sessions", "page1")
            with unusable("it does not load: "):
                system.reset(sizes)
    return system


@click.command()
@click.argument("traces", nargs=-1, required=True, metavar="TRACE...")
@system_options
@base_option
@click.option("--html", "html_file", metavar="FILE", help="Write a page there that shows each step.")
def replay(
    traces: tuple[str, ...],
    impl: str,
    checkout: str | None,
    device: str,
    json_file: str | None,
    base: str | None,
    html_file: str | None,
) -> int:
    """Run trace files on the reference and an implementation, step by step."""
    if html_file is not None and len(traces) > 1:
        raise Unusable(f"--html {html_file}: shows one trace, not {len(traces)}")
    loaded = [(path, load_trace(path)) for path in traces]  # all of them, before anything runs
    writable_json(json_file)
    writable(html_file, "--html")

    from ci.report import data as report
    from ci.report import page, render
    from stateful_tests.lockstep import lockstep

    out = render.console(text_out(json_file))
    replays: list[Data] = []
    with ExitStack() as opened:
        before = None if base is None else opened.enter_context(closing(_base(base, device, impl)))
        system = opened.enter_context(closing(resolve(impl, device, checkout)))
        for path, trace in loaded:
            with unusable(f"{path}: "):
                run = lockstep.replay(system, trace)
            replays.append(report.replay_data(path, run, before))
            replays[-1]["replay"] = replay_command(path, impl_options(impl, device, checkout))
            if html_file is not None:
                replays[-1]["states"] = page.states(run)
                write_file(html_file, page.page(replays[-1], run), "--html")
            render.replay(out, replays[-1], brief=len(loaded) > 1)
    codes = [data["exit_code"] for data in replays]
    if len(replays) > 1:
        bad = [data["file"] for data in replays if data["exit_code"]]
        names = f": {', '.join(bad)}" if bad else ""
        out.print(f"{len(replays)} traces: {len(replays) - len(bad)} conform, {len(bad)} do not{names}")
    code = int(max(codes))
    write_json(json_file, {"format": "kvspec-replay", "version": 1, "exit_code": code, "replays": replays})
    return code
