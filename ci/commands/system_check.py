"""The check of one system: its base, what changed, its plan, and other ways in which the changes run."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ci.commands import base_choice
from ci.commands.saved_traces import Saved, save_traces
from ci.commands.shared import SystemSelector, Unusable, note, unusable, worker_limits
from impl.adapter import AnySystem
from impl.process.system_functions import SystemFunction
from impl.system_spec import SystemSpec, system_spec
from stateful_tests.lockstep.exit_codes import Ending, gravest

if TYPE_CHECKING:
    from ci import Data
    from stateful_tests.check.trees.base_selection import Base
    from stateful_tests.check.trees.changed_functions import Changes
    from stateful_tests.check.corpus import CorpusLine
    from stateful_tests.check.trees.other_ways import OtherWays
    from stateful_tests.check.check_plans import Plan
    from stateful_tests.lockstep.check_results import CheckResult, Finding
    from stateful_tests.lockstep.run_results import Run

# Commands that are driven to find a call of a changed function that no directed run calls.
SEARCH_COMMANDS = 1_500
_NEAR = 200  # lines; a tree farther from its base has changes of many people
FOUND = (Ending.VIOLATED, Ending.BROKE)  # of a check that has found something new
Saves = Callable[[], None]  # saves the traces of a report, and notes there where they are


class CheckOptions(NamedTuple):
    """Options of a check.

    make_executor: called with the needs of the system.
    since: the git revision of --since.
    html: save a page beside each trace.
    other_ways: drive other ways in which changed functions run, too.
    """

    make_executor: Callable[..., Any]
    save_dir: str
    base: str | None
    since: str | None
    html: bool
    other_ways: bool = True


@dataclass
class InterruptGuard:
    """Notes a KeyboardInterrupt before the plan begins, and suppresses it if a clause is reported already, so
    that the report is still made."""

    reported: Collection[str]
    interrupted: bool = False

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        self.interrupted |= kind is KeyboardInterrupt
        return kind is KeyboardInterrupt and bool(self.reported)


def check_system(
    selector: SystemSelector, requested_plan: Plan, options: CheckOptions
) -> tuple[Data, Saves]:
    """Check one system. Return its report and a function that saves its traces."""
    from ci.report.check_data import check_data
    from ci.report.progress_line import Progress
    from stateful_tests.check import campaign, check_plans
    from stateful_tests.check.known_faults import lookup
    from stateful_tests.check import run_batches
    from stateful_tests.check.known_faults import masks as known
    from stateful_tests.check.trees.way_map import way_map

    began = time.monotonic()
    with ExitStack() as opened:
        base, system = base_choice.with_system(options.base, selector, options.since, opened)
        before = None if base is None else base.system
        early: dict[str, Run] = {}  # clause -> the run that showed it
        interrupt_guard = InterruptGuard(early)
        changed = _find_changes(system, selector, base, requested_plan, options, early, interrupt_guard)
        others = None
        engine_ways = way_map(system_spec(system).engine)
        if changed is not None:
            favoured = engine_ways.calls_rarely([*changed.called, *changed.missed])
            requested_plan = replace(requested_plan, first=changed.first, favoured=favoured)
            others = _plan_other_ways(system, changed, requested_plan) if options.other_ways else None
        if others is not None:
            requested_plan = others.plan
        plan = check_plans.for_system(requested_plan, system)
        from_factory = selector.spec.stranger  # it may own something that exists once
        cuda = selector.device == "cuda"
        worker_system = run_batches.Named(selector.spec, selector.device, selector.checkout, *worker_limits())
        with (
            options.make_executor(pays=not from_factory and not cuda, fork=not cuda) as executor,
            Progress() as progress,
        ):
            saved = Saved(system.name, options.save_dir, progress.say, base and base.name)
            with unusable(f"--impl {selector.spec}: "):
                masks = []
                with interrupt_guard:
                    for mask in known.masks(system, before):
                        masks.append(mask)
                        progress.line(mask.line)
                worker_system = worker_system._replace(also_checked=known.also_checked(system, masks))
                releases = None
                if base is not None:
                    releases = lookup.Lookup(base, system, executor, worker_system.limits, note, changed)
                result = campaign.run(
                    system, requested_plan, progress, before,
                    executor=executor, named=worker_system, found=saved, masks=masks,
                    early=list(early.values()), interrupted=interrupt_guard.interrupted, began=began,
                    lookup=releases,
                )  # fmt: skip
        for clause in early.keys() - {finding.clause for finding in result.findings}:
            note(f"{clause}, named above as NEW: a known fault explains it")
        reports: list[Data] = []
        saves: list[Saves] = []
        if others is not None:
            _drive_ways(result, others, selector, system, options, reports, saves)
        if changed is not None:
            loaded = engine_ways.rest_loaded_in(changed.missed, result.ways)
            changed = changed.also_called(_functions_called(reports) | loaded)
            if options.other_ways:  # the report of another way lists none: it need not call all changes
                spec = system_spec(system)
                undriven = engine_ways.undriven(spec.engine, known.release_of(system))
                had = {spec.way: {f"{m.name} {m.preset}" for m in result.machines if m.examples}}
                for way, way_report in zip(result.ways, reports):
                    machines = (machine for machine in way_report["machines"] if machine["examples"])
                    had[way] = {f"{machine['machine']} {machine['preset']}" for machine in machines}
                result.uncalled = tuple(
                    engine_ways.function_text(missed, spec.way, undriven, had) for missed in changed.missed
                )
        if changed is None and base is not None:
            changed = _name_differences(base, system, result.findings)
            result.findings = lookup.name_causes(result.findings, changed)
        data = check_data(
            result,
            plan,
            capabilities=system.capabilities,
            masks=masks,
            base=base,
            changed=changed,
        )
        endings = [data["exit_code"], *(report["exit_code"] for report in reports)]
        data |= {"ways": reports, "exit_code": gravest(endings)}

    def save() -> None:
        save_traces(result.findings, data["findings"], options.save_dir, selector.options, options.html)
        saved.tidy(data["findings"])
        for save_way in saves:
            save_way()

    return data, save


def _note_other_ways(base: Base, system: AnySystem) -> None:
    """Name the functions of a tree near its base that differ from it and run in other ways alone."""
    from stateful_tests.check.known_faults.masks import release_of
    from stateful_tests.check.trees import changed_functions
    from stateful_tests.check.trees.way_map import OUTSIDE, way_map

    if base.lines is None or base.lines > _NEAR:
        return
    spec = system_spec(system)
    ways = way_map(spec.engine)
    different = changed_functions.differences_from_base(base, system, ways.functions).called
    elsewhere = {f for f in different if f.name != OUTSIDE and not ways.runs(f, spec.way)}
    undriven = ways.undriven(spec.engine, release_of(system))
    by_way = {way: calls for way, calls in ways.by_way(elsewhere).items() if way not in undriven}
    if any(by_way.values()):
        way = max(by_way, key=lambda name: len(by_way[name]))
        names = changed_functions.function_names_text(sorted(by_way[way]))
        other = f"{spec.engine}+{way}" if way else spec.engine
        note(f"differs from {base.name} and is not called here: {names}; check --impl {other} calls it")


def _find_changes(
    system: AnySystem,
    selector: SystemSelector,
    base: Base | None,
    requested_plan: Plan,
    options: CheckOptions,
    early: dict[str, Run],
    interrupt_guard: InterruptGuard,
) -> Changes | None:
    """Return the functions that changed since --since, or since the base if it is a commit of the
    checkout's history. None: there is no such revision, or an interrupt.

    early: gets a violation of a directed run that calls a change, where the base conforms.
    """
    from ci.report import report_data as report
    from stateful_tests.check import run_driver, check_plans
    from stateful_tests.check.trees import changed_functions, tree_history
    from stateful_tests.check.trees.way_map import way_map
    from stateful_tests.check.trees.way_measurement import functions_of_plan

    commit = base.commit if base is not None else ""
    if options.since is None and not commit:
        if selector.checkout and (edited := tree_history.edited_files(Path(selector.checkout))):
            files = f"{edited[0]} and {len(edited) - 1} more" if edited[1:] else edited[0]
            note(f"{files} changed since HEAD: --since HEAD first drives what calls the changes")
        elif selector.checkout and base is not None:
            _note_other_ways(base, system)
        return None
    plan = check_plans.for_system(requested_plan, system)
    noted_clauses = set[str]()
    before = None if base is None else base.system

    def note_new_fault(line: CorpusLine) -> None:
        run = changed_functions.new_fault(system, before, line)
        violation = None if run is None else run.violation
        if run is None or violation is None or violation.clause in noted_clauses:
            return
        noted_clauses.update(violation.clauses)
        early[violation.clause] = run
        note(report.violation_line(run, "" if before is None else before.name))

    revision = options.since or (base.name if base is not None else "")
    note(f"since {revision}: looks for runs that call what changed")
    changed: Changes | None = None
    spec = system_spec(system)
    engine_ways = way_map(spec.engine)
    own_way = spec.way
    with unusable(f"--since {revision:.80}: ", ValueError), interrupt_guard:
        lines = [
            line
            for mode in plan.modes or system.capabilities.modes
            for line in run_driver.lines_of(system, plan, mode)
        ]
        changed = changed_functions.changes(
            system, commit or revision, lines, note_new_fault, engine_ways, own_way
        )
        changed = changed._replace(revision=revision)
        note(changed.text)
    if changed is None:  # interrupted
        return None
    # A function that is known to run only in other ways is not looked for in this one.
    wanted = [
        function
        for function in changed.missed
        if function not in engine_ways.functions or engine_ways.runs(function, own_way)
    ]
    if not wanted:
        return changed
    plan = replace(plan, favoured=engine_ways.calls_rarely(wanted))
    with unusable(f"--impl {selector.spec}: "), interrupt_guard:
        return changed.also_called(functions_of_plan(system, plan, SEARCH_COMMANDS, wanted).keys())
    return changed  # interrupted


def _name_differences(base: Base, system: AnySystem, findings: Sequence[Finding]) -> Changes:
    """Name the functions that differ from a base without a history, in the files that the findings
    call."""
    from stateful_tests.check.trees import changed_functions

    calls = (functions for finding in findings for functions in finding.run.called)
    return changed_functions.differences_from_base(base, system, chain.from_iterable(calls))


def _plan_other_ways(system: AnySystem, changed: Changes, plan: Plan) -> OtherWays | None:
    from stateful_tests.check.known_faults import masks
    from stateful_tests.check.trees.other_ways import other_ways
    from stateful_tests.check.trees.way_map import way_map

    spec = system_spec(system)
    functions = [*changed.called, *changed.missed]
    return other_ways(
        way_map(spec.engine), spec.engine, masks.release_of(system), spec.way, functions,
        changed.missed, plan,
    )  # fmt: skip


def _drive_ways(
    result: CheckResult,
    others: OtherWays,
    selector: SystemSelector,
    system: AnySystem,
    options: CheckOptions,
    reports: list[Data],
    saves: list[Saves],
) -> None:
    """Drive other ways in which changed functions run, until something is found. The result of the
    check gets the findings of each, and the ways that were not driven."""
    plain = SystemSpec(system_spec(system).engine)
    base_name = options.base
    if base_name is not None and base_name.startswith(f"{plain}=="):
        base_name = str(SystemSpec.parse(base_name).in_way(""))
    stops = bool(result.new) or result.interrupted
    for way in others.driven + others.named:
        other = replace(selector, spec=plain.in_way(way))
        command = f"kvspec check {other.options}"
        if stops or way in others.named:
            result.not_driven[way] = command
            continue
        note(f"drives {other.spec} as well: what changed runs there")
        try:
            way_options = options._replace(other_ways=False, base=base_name)
            data, save = check_system(other, others.each, way_options)
        except Unusable as error:
            result.not_driven[way] = str(error)
            continue
        except KeyboardInterrupt:
            result.interrupted = stops = True
            result.not_driven[way] = command
            continue
        result.ways[way] = data["said"]
        reports.append(data)
        saves.append(save)
        stops = data["interrupted"] or data["exit_code"] in FOUND


def _functions_called(reports: list[Data]) -> set[SystemFunction]:
    """Return the changed functions that runs in other ways called."""
    changes = [data["since"] for data in reports if data["since"]]
    return {SystemFunction.parse(text) for since in changes for text in since["called"]}
