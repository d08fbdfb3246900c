"""What each run-time check sees of a faulty system, and when: measured, bug by check.

A bug is driven through command sequences that were drawn from the reference alone, on past the first
violation, as a server would go on. Each check runs by itself: the sums, which are commands of the
system, in passes of their own. The first sign of a bug is the first command at which any check or the
lockstep with the reference shows something; a check is measured against that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

from impl.adapter import Capabilities, System
from reference import model
from reference.commands import CheckBusy, CheckIdle, Command, Done, Mode, Reason, Refused
from reference.geometry import PRESETS, Geometry
from reference.ledger import State
from stateful_tests.blindspots.monitors import MONITORS
from stateful_tests.check.tiers import sizes_for
from stateful_tests.generate.choice_source import RandomChoices
from stateful_tests.generate.next_command import finale, propose
from stateful_tests.generate.run_profile import draw_geometry, draw_profile
from stateful_tests.lockstep.abstraction import facts_of
from stateful_tests.lockstep.lockstep import Lockstep
from stateful_tests.traces.files import load

SUMS: dict[str, tuple[type, str]] = {
    "busy": (CheckBusy, "an account that does not balance, between any two commands"),
    "idle": (CheckIdle, "the same, only when no batch holds a request"),
}
CHECKS = (*SUMS, *MONITORS)
LOCKSTEP = "ref"
STEPS = 60
_INVALID = 8  # one command in so many ignores its precondition: some faults show in a refusal alone
FIXTURES = Path(__file__).parents[2] / "fixtures" / "regressions"


class Drive(NamedTuple):
    """A sequence of commands that are the same whoever is driven through them."""

    geometry: Geometry
    mode: Mode
    commands: tuple[Command, ...]


@dataclass(slots=True)
class Signs:
    """Index of the command at which each check fired first, the lockstep among them, and its clauses.

    raised: checks that raised instead of giving a report. at_check: the lockstep parted at a memory check,
    so that all before it was right.
    """

    first: dict[str, int] = field(default_factory=dict)
    raised: set[str] = field(default_factory=set)
    clauses: tuple[str, ...] = ()
    at_check: bool = False


class Detection(NamedTuple):
    """What one check sees of one bug. verdict: at once, later, never; false alarm or broken: a fault of the
    check. seen: runs in which it fired, at_once: at the first sign; else after which kinds of command, and
    by the median how many commands later."""

    verdict: str
    seen: int
    at_once: int
    late_after: dict[str, int]
    median_commands_late: float | None

    @property
    def sees(self) -> bool:
        return self.verdict in ("at once", "later")


class BugResult(NamedTuple):
    """One bug. shown: of `runs`, those in which anything saw it. pages_right: no monitor fired, and the
    lockstep parted at memory checks alone. clauses: those that the lockstep found broken first."""

    bug: str
    runs: int
    shown: int
    commands: int
    pages_right: bool
    clauses: tuple[str, ...]
    cells: dict[str, Detection]

    @property
    def sees(self) -> tuple[str, ...]:
        """Checks that see the bug, at once or later."""
        return tuple(check for check in CHECKS if self.cells[check].sees)


def draw(mode: Mode, seed: int, run: int, steps: int = STEPS, machine: str = "sessions") -> Drive:
    """A seeded run of a machine: presets in turn, every fourth with drawn sizes, closed by a finale. What no
    faithful scheduler would do is left out in faithful mode."""
    source = RandomChoices(f"blindspots/{seed}/{mode}/{run}/{machine}")
    at_once = Capabilities(commands=Capabilities().commands - {"Launch", "Settle"})  # monitors see no rounds
    profile = replace(draw_profile(source, at_once, machine), invalid_rate=_INVALID)
    geometry = sizes_for(machine, tuple(PRESETS)[run % len(PRESETS)])
    if run % 4 == 3:
        geometry = draw_geometry(source, geometry)
    return _closed(geometry, mode, lambda state: propose(state, source, profile), steps)


def fixtures(folder: Path = FIXTURES) -> dict[str, list[Drive]]:
    """bug -> its fixtures, each closed by a finale."""
    found: dict[str, list[Drive]] = {}
    for trace in map(load, sorted(folder.glob("*.json"))):
        if trace.bug is not None:
            commands = iter(trace.commands)
            made = _closed(trace.geometry, trace.mode, lambda _: next(commands), len(trace.commands))  # noqa: B023
            found.setdefault(trace.bug, []).append(made)
    return found


def _closed(geometry: Geometry, mode: Mode, next_one: Callable[[State], Command], steps: int) -> Drive:
    commands: list[Command] = []

    def follow(state: State, command: Command) -> State:
        now, outcome = model.step(state, command)
        if not (isinstance(outcome, Refused) and outcome.reason is Reason.UNFAITHFUL):
            commands.append(command)
        return now

    state = model.initial(geometry, mode)
    for _ in range(steps):
        state = follow(state, next_one(state))
    for command in finale(state):
        state = follow(state, command)
    return Drive(geometry, mode, tuple(commands))


def watch(system: System, run: Drive) -> Signs:
    """Drive a system through the commands and note when each check fires first."""
    signs = Signs()
    _look(system, run, signs)
    for check in SUMS:
        _sum(system, run, check, signs)
    lockstep = Lockstep(system, run.geometry, run.mode)
    for at, command in enumerate(run.commands):
        lockstep.do(command)
        if lockstep.violation is not None:
            signs.first[LOCKSTEP] = at
            signs.clauses = lockstep.violation.clauses
            signs.at_check = isinstance(command, (CheckBusy, CheckIdle))
            break
    return signs


def _look(system: System, run: Drive, signs: Signs) -> None:
    """The monitors over the facts."""
    system.reset(run.geometry)
    state = model.initial(run.geometry, run.mode)
    for at, command in enumerate(run.commands):
        try:
            system.apply(command)
            facts = facts_of(system.view(), run.geometry)
        except Exception:  # the lockstep says so
            return
        for name in MONITORS.keys() - signs.first.keys():
            if MONITORS[name].fires(state, facts):
                signs.first[name] = at


def _sum(system: System, run: Drive, check: str, signs: Signs) -> None:
    """The system's own check after every command, until it fires."""
    question = CheckBusy(2) if check == "busy" else CheckIdle()
    system.reset(run.geometry)
    for at, command in enumerate(run.commands):
        try:
            system.apply(command)
        except Exception:
            if not isinstance(command, (CheckBusy, CheckIdle)):
                return
        try:
            outcome = system.apply(question)
        except Exception:
            signs.first[check] = at
            signs.raised.add(check)
            return
        report = outcome.report if isinstance(outcome, Done) else None
        if report is not None and (report.alarm or not all(a.balances for a in report.accounts)):
            signs.first[check] = at
            return


def measure(bug: str, system: System, runs: Iterable[Drive], tick: Callable[[int], None]) -> BugResult:
    """One row of the table. tick: called with the number of commands of each run."""
    watched: list[tuple[Drive, Signs]] = []
    for run in runs:
        watched.append((run, watch(system, run)))
        tick(len(run.commands))
    shown = [(run, signs) for run, signs in watched if signs.first]
    right = bool(shown) and not any(
        c in MONITORS or (c == LOCKSTEP and not s.at_check) for _, s in shown for c in s.first
    )
    clauses = tuple(dict.fromkeys(c for _, s in shown for c in s.clauses[:1]))
    cells = {check: _cell(check, shown, right) for check in (*CHECKS, LOCKSTEP)}
    commands = sum(len(run.commands) for run, _ in watched)
    return BugResult(bug, len(watched), len(shown), commands, right, clauses, cells)


def _cell(check: str, shown: Sequence[tuple[Drive, Signs]], pages_right: bool) -> Detection:
    late = [(signs.first[check] - min(signs.first.values()), run.commands[signs.first[check]])
            for run, signs in shown if check in signs.first]  # fmt: skip
    delays = [delay for delay, _ in late if delay]
    verdict = "never" if not late else "later" if len(late) - len(delays) < len(shown) else "at once"
    if check in SUMS and late:
        if any(check in signs.raised for _, signs in shown):
            verdict = "broken"
        elif pages_right:
            verdict = "false alarm"
    after = Counter(type(command).__name__ for delay, command in late if delay)
    middle = median(delays) if delays else None
    return Detection(verdict, len(late), len(late) - len(delays), dict(after.most_common()), middle)
