"""`kvspec check --impl sglang==all`, or vllm==all: every release in turn, and which shows which clause."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ci.commands.shared import ReportOut, Unusable

if TYPE_CHECKING:
    from ci import Data
    from stateful_tests.check.tiers import Plan

    # The check of one system: its report, and what saves the traces.
    One = Callable[[str], tuple[Data, Callable[[], None]]]

def names(impl: str) -> list[str]:
    """The releases that `sglang==all` or `vllm==all` stands for, with the tree that is named behind it those
    that have it; none where `impl` is one system."""
    package, *ways = impl.split("+")
    releases: Iterable[str] = ()
    if package == "sglang==all":
        from impl.sglang.releases.catalogue import TABLE
        from impl.sglang.releases.variants import VARIANTS

        releases = VARIANTS.get(ways[0] if ways else "", TABLE)
    elif package == "vllm==all":
        from impl.vllm.needs import RELEASES, SINCE

        first = max(RELEASES.index(SINCE.get(way, RELEASES[0])) for way in ("", *ways))
        releases = RELEASES[first:]
    return ["+".join([package.replace("all", version), *ways]) for version in releases]


def check(systems: list[str], one: One, plan: Plan, out: ReportOut, *, detailed: bool) -> int:
    """Check each, one at a time; an interrupt ends the row with what there is."""
    from ci.report import render

    interrupted = False
    rows: list[Data] = []
    try:
        for impl in systems:
            rows.append(row := _row(impl, one))
            if row["check"] is not None and detailed:
                render.check(out.console, row["check"], detailed=True)
                out.console.print()
            verdict = f"kvspec: {row['unusable']}" if row["unusable"] else row["check"]["verdict"]
            render.verdict(render.console(sys.stderr), verdict, row)
            if row["check"] is not None and row["check"]["interrupted"]:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        interrupted = True
    code = 130 if interrupted else max(row["exit_code"] for row in rows)
    driven = [row["check"] for row in rows if row["check"] is not None]
    driven_machines = dict.fromkeys(m["machine"] for check in driven for m in check["clauses_by_machine"])
    machines = list(driven_machines or plan.machines)
    data = {
        "format": "kvspec-check-releases", "version": 1, "tier": plan.tier, "seed": plan.seed,
        "machines": machines, "exit_code": code, "interrupted": interrupted,
        "systems": systems, "commands": sum(check["commands"] for check in driven),
        "seconds": round(sum(check["seconds"] for check in driven), 3), "releases": rows,
    }  # fmt: skip
    render.releases(out.console, data)
    return out.end(data)


def _row(impl: str, one: One) -> Data:
    """One release. An unavailable release, or a failed save, is one line and does not end the check."""
    row: Data = {"implementation": impl, "exit_code": 0, "unusable": None, "check": None}
    try:
        row["check"], save = one(impl)
        row["exit_code"] = row["check"]["exit_code"]
        save()
    except Unusable as error:
        row |= {"unusable": str(error), "exit_code": max(row["exit_code"], 2)}
    return row
