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
from itertools import combinations
from pathlib import Path
from statistics import median

from impl.adapter import Capabilities, System
from reference import model
from reference.commands import CheckBusy, CheckIdle, Command, Done, Mode, Reason, Refused
from reference.geometry import PRESETS, Geometry
from reference.ledger import State
from stateful_tests.blindspots.monitors import MONITORS, Observation
from stateful_tests.blindspots.partitions import KINDS, kinds, partitions
from stateful_tests.check.tiers import sizes_for
from stateful_tests.coverage.situations import situation
from stateful_tests.generate.choice_source import RandomChoices
from stateful_tests.generate.next_command import finale, propose
from stateful_tests.generate.run_profile import draw_geometry, draw_profile
from stateful_tests.lockstep.abstraction import facts_of
from stateful_tests.lockstep.lockstep import Lockstep
from stateful_tests.traces.files import load

SUMS: dict[str, tuple[type, str]] = {
    "sums-busy": (CheckBusy, "an account that does not balance, between any two commands"),
    "sums-idle": (CheckIdle, "the same, only when no batch holds a request"),
}
CHECKS = (*SUMS, *MONITORS)
LOCKSTEP = "lockstep"
STEPS = 60
_CANDIDATES = 8
_INVALID = 8  # one command in so many ignores its precondition: some faults show in a refusal alone
_PAGE_MONITORS = {"free-list", "free-owned", "owned-twice", "lost"}
FIXTURES = Path(__file__).parents[2] / "fixtures" / "regressions"


@dataclass(frozen=True, slots=True)
class Drive:
    """A sequence of commands that are the same whoever is driven through them, and where they come from."""

    origin: str
    geometry: Geometry
    mode: Mode
    commands: tuple[Command, ...]


@dataclass(slots=True)
class Signs:
    """Index of the command at which each check fired first, "lockstep" among them.

    raised: checks that raised instead of giving a report. at_check: the lockstep parted at a memory
    check, so that all before it was right. wrong: kind -> the first command after which any page was
    wrong, if it was in this way and the sums of the pool balanced; wrong_later: the same of commands after
    that one. ended: an exception of the system ended the run.
    """

    first: dict[str, int] = field(default_factory=dict)
    raised: set[str] = field(default_factory=set)
    clauses: tuple[str, ...] = ()
    at_check: bool = False
    wrong: dict[str, int] = field(default_factory=dict)
    wrong_later: dict[str, int] = field(default_factory=dict)
    ended: str = ""

    @property
    def sign(self) -> int | None:
        """The first of all."""
        return min(self.first.values(), default=None)


@dataclass(slots=True)
class Detection:
    """What one check sees of one bug. shown: runs in which the bug showed; seen: those in which the
    check fired; at_once: those in which it did at the first sign. delays: commands after that, of the
    other runs; after: kinds of command after which it fired late."""

    shown: int = 0
    seen: int = 0
    at_once: int = 0
    delays: list[int] = field(default_factory=list)
    after: Counter[str] = field(default_factory=Counter)
    verdict: str = "never"  # or at once, later, false alarm, broken

    @property
    def sees(self) -> bool:
        return self.verdict in ("at once", "later")

    @property
    def median_delay(self) -> float | None:
        return median(self.delays) if self.delays else None


@dataclass(slots=True)
class BugResult:
    """One bug. pages_right: no monitor fired, and the lockstep parted at memory checks alone.

    clauses: those that the lockstep found broken first. wrong: kind of partition that balances -> the
    shortest run that shows it, and up to which command; wrong_later: kinds that only follow from others.
    fired: for each run, the checks that fired, and those of them that fired first.
    """

    bug: str
    runs: int
    shown: int
    cells: dict[str, Detection]
    pages_right: bool
    clauses: tuple[str, ...]
    wrong: dict[str, tuple[Drive, int]]
    wrong_later: tuple[str, ...]
    fired: tuple[tuple[frozenset[str], frozenset[str]], ...]
    commands: int

    @property
    def sees(self) -> tuple[str, ...]:
        """Checks that see the bug, at once or later."""
        return tuple(c for c in CHECKS if self.cells[c].sees)


def draw(mode: Mode, seed: int, run: int, steps: int = STEPS, machine: str = "sessions") -> Drive:
    """A seeded run of a machine: presets in turn, every fourth with drawn sizes, closed by a finale.

    Of several candidates it is the one that meets most situations. What no faithful scheduler would do is
    left out in faithful mode.
    """
    seeds = [f"{seed}/{mode}/{run}/{n}" + f"/{machine}" * (machine != "sessions") for n in range(_CANDIDATES)]
    candidates = [_draw(mode, each, run, steps, machine) for each in seeds]
    return max(candidates, key=lambda candidate: candidate[0])[1]


def _draw(mode: Mode, seed: str, run: int, steps: int, machine: str) -> tuple[int, Drive]:
    source = RandomChoices(f"blindspots/{seed}")
    profile = replace(draw_profile(source, Capabilities(), machine), invalid_rate=_INVALID)
    name = tuple(PRESETS)[run % len(PRESETS)]
    geometry = sizes_for(machine, name)
    if run % 4 == 3:
        geometry = draw_geometry(source, geometry)
    state = model.initial(geometry, mode)
    commands: list[Command] = []
    met: set[str] = set()
    for _ in range(steps):
        state = _follow(state, propose(state, source, profile), commands, met)
    for command in finale(state):
        state = _follow(state, command, commands)
    origin = f"run {run}, {'drawn sizes' if run % 4 == 3 else name}"
    return len(met), Drive(origin, geometry, mode, tuple(commands))


def _follow(
    state: State, command: Command, commands: list[Command], met: set[str] | None = None
) -> State:
    now, outcome = model.step(state, command)
    if not (isinstance(outcome, Refused) and outcome.reason is Reason.UNFAITHFUL):
        commands.append(command)
        if met is not None:
            met.add(situation(state, command, outcome, now))
    return now


def fixtures(folder: Path = FIXTURES) -> dict[str, list[Drive]]:
    """bug -> its fixtures, each closed by a finale."""
    found: dict[str, list[Drive]] = {}
    for path in sorted(folder.glob("*.json")):
        trace = load(path)
        if trace.bug is None:
            continue
        state = model.initial(trace.geometry, trace.mode)
        commands: list[Command] = []
        for command in trace.commands:
            state = _follow(state, command, commands)
        for command in finale(state):
            state = _follow(state, command, commands)
        made = Drive(path.stem, trace.geometry, trace.mode, tuple(commands))
        found.setdefault(trace.bug, []).append(made)
    return found


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
    """The monitors over the facts, and which wrong partitions balance."""
    system.reset(run.geometry)
    before = after = facts_of(system.view(), run.geometry)
    quiet = dict(MONITORS)
    for at, command in enumerate(run.commands):
        try:
            system.apply(command)
            after = facts_of(system.view(), run.geometry)
        except Exception as error:
            signs.ended = f"{type(error).__name__} at {type(command).__name__}: {error}"
            return
        seen = Observation(run.geometry, run.mode, before, after)
        for name, monitor in list(quiet.items()):
            if monitor.sign(seen):
                signs.first[name] = at
                del quiet[name]
        fired = [signs.first[name] for name in _PAGE_MONITORS if name in signs.first]
        if fired:
            noted = signs.wrong if min(fired) == at else signs.wrong_later
            for _, partition in partitions(after, run.geometry.page_size):
                if partition.balanced and not partition.right:
                    for kind in kinds(partition):
                        noted.setdefault(kind, at)
        before = after


def _sum(system: System, run: Drive, check: str, signs: Signs) -> None:
    """The system's own check after every command, until it fires."""
    question = CheckBusy(2) if check == "sums-busy" else CheckIdle()
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
    commands = 0
    for run in runs:
        watched.append((run, watch(system, run)))
        commands += len(run.commands)
        tick(len(run.commands))
    shown = [(run, signs) for run, signs in watched if signs.sign is not None]
    all_signs = [signs for _, signs in shown]
    right = bool(shown) and not any(
        c in MONITORS or (c == LOCKSTEP and not s.at_check) for s in all_signs for c in s.first
    )
    wrong: dict[str, tuple[Drive, int]] = {}
    for run, signs in watched:
        for kind, at in signs.wrong.items():
            if kind not in wrong or at < wrong[kind][1]:
                wrong[kind] = run, at
    later = {kind for signs in all_signs for kind in signs.wrong_later} - set(wrong)
    cells = {check: _cell(check, shown, right) for check in (*CHECKS, LOCKSTEP)}
    clauses = tuple(dict.fromkeys(c for s in all_signs for c in s.clauses[:1]))
    return BugResult(
        bug, len(watched), len(shown), cells, right, clauses,
        {kind: wrong[kind] for kind in KINDS if kind in wrong},
        tuple(kind for kind in KINDS if kind in later),
        tuple(_fired(s) for s in all_signs if any(c in s.first for c in CHECKS)), commands,
    )  # fmt: skip


def _fired(signs: Signs) -> tuple[frozenset[str], frozenset[str]]:
    at = {check: signs.first[check] for check in CHECKS if check in signs.first}
    return frozenset(at), frozenset(c for c in at if at[c] == min(at.values()))


def _cell(check: str, shown: Sequence[tuple[Drive, Signs]], pages_right: bool) -> Detection:
    cell = Detection(shown=len(shown))
    for run, signs in shown:
        at = signs.first.get(check)
        if at is None:
            continue
        assert signs.sign is not None
        cell.seen += 1
        if at == signs.sign:
            cell.at_once += 1
        else:
            cell.delays.append(at - signs.sign)
            cell.after[type(run.commands[at]).__name__] += 1
    if not cell.seen:
        return cell
    cell.verdict = "at once" if cell.at_once == cell.shown else "later"
    if check in SUMS and any(check in signs.raised for _, signs in shown):
        cell.verdict = "broken"
    elif check in SUMS and pages_right:
        cell.verdict = "false alarm"
    return cell


def smallest_sets(rows: Sequence[BugResult], *, first: bool = False) -> list[tuple[str, ...]]:
    """All smallest sets of checks of which one fires (first: as early as any) in every run in which any
    check does, whatever the bug. Faults of checks themselves are left out."""
    wanted = {fired[first] for row in rows if not row.pages_right for fired in row.fired}
    for size in range(len(CHECKS) + 1):
        found = [some for some in combinations(CHECKS, size) if all(w.intersection(some) for w in wanted)]
        if found:
            return found
    return []
