"""`make bench ARGS=machines`: twelve bugs, found by the Hypothesis machine; its shrinking beside ours."""

from __future__ import annotations

import time
from typing import Any, NoReturn

import click
import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from ci.commands.shared import json_option, text_out, writable_json, write_json
from ci.report import render
from reference.commands import Mode
from reference.geometry import PRESETS
from stateful_tests.lockstep.systems import resolve
from stateful_tests.machines.operations import Operations, MachineTarget, Violated
from stateful_tests.shrink.minimise import minimise

BUGS = {
    "sessions": (
        "pr22897", "close-forgotten", "sweep-into-window", "resume-on-dead-window",
        "retract-keeps-the-lengths",
    ),
    "tree": ("split-forgets-locks", "recovery-of-half-a-node", "eviction-ignores-locks", "pr22470"),
    "both": ("slot-drops-the-lock", "no-room-in-the-swa-pool", "finish-frees-what-it-inserted"),
}  # fmt: skip


def _row(machine: str, bug: str, seed: int) -> dict[str, Any]:
    """Seconds and runs to find a bug, then what each shrinking takes and leaves."""
    runs, found = 0, (0, 0.0)

    @hypothesis.seed(seed)
    class Buggy(Operations):
        target = MachineTarget(lambda: resolve(f"torch+{bug}"), [machine], [PRESETS["page4"]], [Mode.FREE])

        def __init__(self) -> None:
            nonlocal runs
            runs += 1
            super().__init__()

        def fail(self, violated: Violated) -> NoReturn:
            nonlocal found
            if type(self).found is None:
                found = (runs, time.perf_counter() - began)
                first.append(violated)
            super().fail(violated)

    first: list[Violated] = []
    assert Buggy.target.cells  # the system is made before the clock runs
    began = time.perf_counter()
    shrinking = settings(
        max_examples=2000, database=None, deadline=None, phases=[Phase.generate, Phase.shrink],
        report_multiple_bugs=False, suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    try:
        run_state_machine_as_test(Buggy, settings=shrinking)
    except Violated as error:
        shrunk, theirs = error.trace, time.perf_counter() - began - found[1]
    began = time.perf_counter()
    smallest = minimise(Buggy.target.system, first[0].trace, first[0].violation.clause)
    ours = time.perf_counter() - began
    return {
        "machine": machine, "bug": bug, "clause": first[0].violation.clause, "runs": found[0],
        "found_s": round(found[1], 2), "commands": len(first[0].trace.commands),
        "hypothesis_runs": runs - found[0], "hypothesis_s": round(theirs, 1),
        "hypothesis_commands": len(shrunk.commands),
        "ours_s": round(ours, 2), "ours_commands": len(smallest.commands),
    }  # fmt: skip


@click.command()
@click.option("--seed", type=int, default=1, show_default=True)
@json_option
def machines(seed: int, json_file: str | None) -> None:
    """Bugs found by the Hypothesis machine: shrunk by Hypothesis, and by command."""
    writable_json(json_file)
    rows = [_row(machine, bug, seed) for machine, bugs in BUGS.items() for bug in bugs]
    columns = {
        "bug": "bug", "runs": "runs", "found_s": "s", "commands": "commands",
        "hypothesis_s": "Hypothesis s", "hypothesis_commands": "commands",
        "ours_s": "ours s", "ours_commands": "commands",
    }  # fmt: skip
    render.listing(render.console(text_out(json_file)), rows, columns)
    write_json(json_file, rows)
