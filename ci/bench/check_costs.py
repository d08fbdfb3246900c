"""`make bench ARGS='check --impl torch'`: where the CPU seconds of a check go, in one process.

Each part counts the seconds that it has itself, not those of parts inside it. A check drives, and beside that
replays traces of known faults, explains violations by them, and shrinks what is new: what these drive counts
as theirs. A worker is the system's own process, such as a release's.
"""

import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click

from ci.commands.shared import ReportOut, SystemSelector, json_option, unusable
from ci.report import text_output
from impl.adapter import AnySystem
from impl.process.remote_system import WorkerSystem
from impl.system_spec import SystemSpec
from reference import blocks, model, pairs, tiers
from reference import clauses as rows
from reference.system_kinds import KINDS
from stateful_tests.check import campaign, run_driver, finder
from stateful_tests.check.known_faults import explanation
from stateful_tests.check.run_batches import Named
from stateful_tests.check.known_faults.masks import masks
from stateful_tests.check.check_plans import plan
from stateful_tests.coverage import situations
from stateful_tests.generate import next_command
from stateful_tests.lockstep.any_lockstep import AnyLockstep
from stateful_tests.lockstep.driven_kinds import lockstep_of

_DRIVING = "driving"
_FAULTS = "known faults"
_EXPLAINING = "explaining"
_SHRINKING = "shrinking"
_PHASES = (_DRIVING, _FAULTS, _EXPLAINING, _SHRINKING)
_WIRE = "driving: the wire"
_WORKER = "the worker"
_REST = "the rest"


def _timed_functions() -> dict[Callable[..., Any], str]:
    """Return each timed function with its part."""
    parts: dict[str, tuple[Callable[..., Any], ...]] = {
        _DRIVING: (run_driver.drive,),
        _EXPLAINING: (explanation.explaining_masks,),
        "the reference": (model.step,),
        "clauses": (
            rows.failed_clauses, blocks.clauses.failed_clauses, tiers.clauses.failed_clauses,
            pairs.clauses.failed_clauses,
        ),
        "situations": (situations.situations,),
        "drawing commands": (next_command.propose,),
    }
    return {
        function: name if name in _PHASES else f"driving: {name}"
        for name, functions in parts.items()
        for function in functions
    }


def _timed_methods() -> Iterator[tuple[type, str, str]]:
    """Return timed methods: their class, their name, and the part."""
    for name in ("_catch", "_finds_another_cause", "findings"):
        yield finder.Finder, name, _SHRINKING
    for kind in KINDS.values():
        yield lockstep_of(kind), "_read_facts", "driving: facts of a view"
    yield AnyLockstep, "_judge", "driving: tallies"
    yield WorkerSystem, "_ask", _WIRE


@dataclass
class _Clock:
    """CPU seconds by part.

    worker_s: those of the system's process so far, which are read where a phase begins or ends.
    """

    worker_s: Callable[[], float] = lambda: 0.0
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    _inside: list[str] = field(default_factory=list)
    _since: float = 0.0
    _worker_since: float = 0.0

    def time_calls(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            with self.part(part):
                return function(*args, **options)

        return call

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the seconds inside as this part; inside a phase other than driving, as that phase."""
        phase = next((phase_inside for phase_inside in self._inside if phase_inside in _PHASES[1:]), name)
        self._count(at_phase=name in _PHASES)
        self._inside.append(phase)
        try:
            yield
        finally:
            self._count(at_phase=name in _PHASES)
            self._inside.pop()

    def _count(self, *, at_phase: bool) -> None:
        now = time.process_time()
        part = self._inside[-1] if self._inside else _REST
        self.seconds[part] += now - self._since
        self._since = now
        if at_phase:
            phase, _, _ = part.partition(":")
            now = self.worker_s()
            # a worker that was started again begins at 0
            self.seconds[f"{phase}: {_WORKER}"] += max(now - self._worker_since, 0)
            self._worker_since = now


@contextmanager
def _with_clock(clock: _Clock) -> Iterator[None]:
    """Patch all timed functions and methods so that the clock counts them."""
    functions = {id(each): (each, part) for each, part in _timed_functions().items()}
    patches: list[Any] = [
        patch.object(kind, name, clock.time_calls(vars(kind)[name], part))
        for kind, name, part in _timed_methods()
        if name in vars(kind)
    ]
    ours = "stateful_tests", "reference"
    for module in [each for name, each in sys.modules.items() if name.startswith(ours)]:
        for name, value in list(vars(module).items()):
            if id(value) in functions:
                function, part = functions[id(value)]
                patches.append(patch.object(module, name, clock.time_calls(function, part)))
    draws = {
        machine: each._replace(propose=clock.time_calls(each.propose, "driving: drawing commands"))
        for machine, each in run_driver._DRAWS.items()
    }
    patches.append(patch.dict(run_driver._DRAWS, draws))
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in reversed(patches):
            each.stop()


def _cpu_s(system: AnySystem) -> float:
    """Return the CPU seconds of a system's worker so far; 0 where it has none."""
    process = getattr(system, "_process", None)
    if process is None:
        return 0.0
    with suppress(OSError):
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
    return 0.0


@click.command()
@click.option("--impl", default="torch", show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--commands", type=click.IntRange(1), default=30_000, show_default=True)
@json_option
def check(out: ReportOut, impl: str, seed: int, commands: int) -> None:
    """Measure where the CPU seconds of a smoke check go."""
    plan_asked = replace(plan("smoke", seed=seed), commands=commands)
    spec = SystemSpec.parse(impl)
    with unusable():
        system: AnySystem = SystemSelector(spec).resolve()
        clock = _Clock(partial(_cpu_s, system))
        with _with_clock(clock), clock.part(_REST):
            with clock.part(_FAULTS):
                known = list(masks(system))
            result = campaign.run(system, plan_asked, masks=known, named=Named(spec))
            with clock.part(_FAULTS):  # looks at the worker a last time
                pass
        system.close()
    command_count = sum(result.carried_out.values())
    total = sum(clock.seconds.values())
    drives = sum(s for name, s in clock.seconds.items() if name.startswith(_DRIVING))
    counted = [
        *sorted(clock.seconds.items(), key=lambda part: -part[1]),
        ("all driving", drives),
        (f"all, {command_count / total:,.0f} commands a CPU second", total),
    ]
    table = [
        {"part": name, "cpu_s": round(s, 2), "percent": round(100 * s / total, 1)}
        for name, s in counted
    ]
    text_output.listing(out.console, table, {"part": "part", "cpu_s": "CPU s", "percent": "%"})
    out.end(table)
