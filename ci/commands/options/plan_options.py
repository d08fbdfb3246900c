"""Options for what a check does: a tier, and what is changed in it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from ci.commands.shared import unusable

_OPTIONS = (
    click.option(
        "--preset", "presets", multiple=True, metavar="NAME",
        help="Sizes of pools, pages and window to run with (repeatable). [default: all of the tier]",
    ),
    click.option(
        "--tier", type=click.Choice(["smoke", "pr", "nightly"]), default="smoke", show_default=True,
        help="How much is done: smoke takes seconds (a minute for a release), pr minutes, nightly hours.",
    ),
    click.option(
        "--examples", type=click.IntRange(1), metavar="N",
        help="Runs for each machine, preset and mode. [default: of the tier]",
    ),
    click.option(
        "--steps", type=click.IntRange(1), metavar="N",
        help="Longest run, in commands. [default: of the tier]",
    ),
    click.option(
        "--seed", type=int, metavar="N",
        help="Start of the random decisions. [default: 0; nightly: a fresh one, which is printed]",
    ),
    click.option(
        "--time-limit", type=click.FloatRange(1), metavar="SECONDS",
        help="Stop after this time; the rest is skipped, and the verdict is incomplete. [default: none]",
    ),
    click.option(
        "--machine", "machines", multiple=True, metavar="NAME",
        help="What is driven: sessions, tree, both (repeatable). [default: all]",
    ),
    click.option(
        "--mode", type=click.Choice(["free", "faithful", "both"]),
        help="faithful: window evictions and ends of turns as a real scheduler has them. free: others too."
        " [default: both; of a release faithful]",
    ),
)  # fmt: skip


def plan_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --tier and the options that override parts of it. The command receives the resulting Plan as
    `plan`."""

    @wraps(command)
    def run(
        *arguments: Any,
        tier: str,
        mode: str | None,
        seed: int | None,
        time_limit: float | None,
        **options: Any,
    ) -> Any:
        """Call the command with `plan`, made from the options that describe one. Values that fit no plan are
        a usage error."""
        from reference.commands import Mode
        from stateful_tests.check import check_plans

        changed = {
            name: options.pop(name) or None for name in ("presets", "examples", "steps", "machines")
        }
        modes = None
        if mode is not None:
            modes = tuple(Mode) if mode == "both" else (Mode(mode),)
        with unusable("--", ValueError):
            plan = check_plans.plan(
                tier, modes=modes, seed=seed, time_limit_s=time_limit, **changed
            )
        return command(*arguments, plan=plan, **options)

    for option in reversed(_OPTIONS):
        run = option(run)
    return run
