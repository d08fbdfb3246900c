"""The check of one system: its base, what changed, its plan, and other ways in which the changes run."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ci.commands import bases
from ci.commands.shared import (
    Saved, SystemSelector, Unusable, note, save_traces, unusable, worker_limits,
)  # fmt: skip
from impl.adapter import AnySystem
from impl.system_spec import SystemSpec, system_spec
from stateful_tests.lockstep.endings import Ending, gravest

if TYPE_CHECKING:
    from ci import Data
    from stateful_tests.check.bases import Base
    from stateful_tests.check.changes import Changes
    from stateful_tests.check.corpus import CorpusLine
    from stateful_tests.check.other_ways import OtherWays
    from stateful_tests.check.tiers import Plan
    from stateful_tests.lockstep.check_results import CheckResult, Finding
    from stateful_tests.lockstep.results import Run

UNCALLED_RUNS = (
    1_500  # commands in which a changed function is looked for that no directed run calls
)
FOUND = (Ending.VIOLATED, Ending.BROKE)  # of a check that has found something new
Saves = Callable[[], None]  # saves the traces of a report, and notes there where they are


class How(NamedTuple):
    """How a check is run. where: makes the executor. since: the git revision of --since. html: pages too.
    ways: with other ways in which changed functions run."""

    where: Callable[..., Any]
    save_dir: str
    base: str | None
    since: str | None
    html: bool
    ways: bool = True


@dataclass
class CutShort:
    """An interrupt before the plan begins. Where `told` has a finding, the report still comes."""

    told: Collection[str]
    interrupted: bool = False

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        self.interrupted |= kind is KeyboardInterrupt
        return kind is KeyboardInterrupt and bool(self.told)


def driven(selector: SystemSelector, asked: Plan, how: How) -> tuple[Data, Saves]:
    """The report of a check of one system, and what saves its traces."""
    from ci.report.check_data import check_data
    from ci.report.progress import Progress
    from stateful_tests.check import campaign, lookup, tiers
    from stateful_tests.check import driving
    from stateful_tests.check import masks as known
    from stateful_tests.check.way_map import way_map

    began = time.monotonic()
    with ExitStack() as opened:
        base, system = bases.with_system(how.base, selector, how.since, opened)
        before = None if base is None else base.system
        early: dict[str, Run] = {}  # clause -> the run that showed it
        cut_short = CutShort(early)
        changed = _changed(system, selector, base, asked, how, early, cut_short)
        others = None
        of = way_map(system_spec(system).engine)
        if changed is not None:
            favoured = of.calls_rarely([*changed.called, *changed.missed])
            asked = replace(asked, first=changed.first, favoured=favoured)
            others = _other_ways(system, changed, asked) if how.ways else None
        asked = asked if others is None else others.plan
        plan = tiers.for_system(asked, system)
        strange = selector.spec.stranger  # it may hold what there is once
        cuda = selector.device == "cuda"
        named = driving.Named(selector.spec, selector.device, selector.checkout, *worker_limits())
        with (
            how.where(pays=not strange and not cuda, fork=not cuda) as executor,
            Progress() as progress,
        ):
            saved = Saved(system.name, how.save_dir, progress.say)
            with unusable(f"--impl {selector.spec}: "):
                masks = []
                with cut_short:
                    for mask in known.masks(system, before):
                        masks.append(mask)
                        progress.line(mask.line)
                named = named._replace(also_checked=known.also_checked(system, masks))
                result = campaign.run(
                    system, asked, progress, before,
                    executor=executor, named=named, found=saved, masks=masks,
                    early=[*early.values()], interrupted=cut_short.interrupted, began=began,
                    lookup=base
                    and lookup.Lookup(base, system, executor, named.limits, note, changed),
                )  # fmt: skip
        for clause in early.keys() - {finding.clause for finding in result.findings}:
            note(f"{clause}, named above as NEW: a known fault explains it")
        reports: list[Data] = []
        saves: list[Saves] = []
        if others is not None:
            _drive_ways(result, others, selector, system, how, reports, saves)
        if changed is not None:
            changed = changed.also_called(_called_in(reports))
            if how.ways:  # another way need not call what the tree's own way calls
                result.uncalled = tuple(map(of.told, changed.missed))
        if changed is None and base is not None:
            changed = _differing(base, system, result.findings)
        data = check_data(
            result,
            plan,
            capabilities=system.capabilities,
            masks=masks,
            base=base,
            changed=changed,
        )
        endings = [data["exit_code"], *(each["exit_code"] for each in reports)]
        data |= {"ways": reports, "exit_code": gravest(endings)}

    def save() -> None:
        save_traces(result.findings, data["findings"], how.save_dir, selector.options, how.html)
        saved.tidy(data["findings"])
        for save_way in saves:
            save_way()

    return data, save


def _changed(
    system: AnySystem,
    selector: SystemSelector,
    base: Base | None,
    asked: Plan,
    how: How,
    early: dict[str, Run],
    cut_short: CutShort,
) -> Changes | None:
    """Look up what changed in a checkout since the revision of --since, or else since its base, if that is of
    its history. early: gets a violation of a directed run that calls a change, where the base conforms."""
    from ci.report import data as report
    from stateful_tests.check import changes, driving, tiers, tree_history
    from stateful_tests.check.way_map import called_by_plan, way_map

    commit = base.commit if base is not None else ""
    if how.since is None and not commit:
        if selector.checkout and (edited := tree_history.edited_files(Path(selector.checkout))):
            files = f"{edited[0]} and {len(edited) - 1} more" if edited[1:] else edited[0]
            note(f"{files} changed since HEAD: --since HEAD first drives what calls the changes")
        return None
    plan, told = tiers.for_system(asked, system), set[str]()
    before = None if base is None else base.system

    def tell(line: CorpusLine) -> None:
        run = changes.new_fault(system, before, line)
        if run is not None and run.violation is not None and run.violation.clause not in told:
            told.update(run.violation.clauses)
            early[run.violation.clause] = run
            note(report.first_word(run, "" if before is None else before.name))

    revision = how.since or (base.name if base is not None else "")
    note(f"since {revision}: looks for runs that call what changed")
    changed: Changes | None = None
    spec = system_spec(system)
    of, own = way_map(spec.engine), spec.way
    with unusable(f"--since {revision:.80}: ", ValueError), cut_short:
        lines = [
            line
            for mode in plan.modes or system.capabilities.modes
            for line in driving.lines_of(system, plan, mode)
        ]
        changed = changes.changes(system, commit or revision, lines, tell, of, own)
        changed = changed._replace(revision=revision)
        note(changed.text)
    if changed is None:  # interrupted
        return None
    # A function that is known to run in other ways alone is not looked for in this one.
    wanted = [each for each in changed.missed if each not in of.functions or of.runs(each, own)]
    if not wanted:
        return changed
    plan = replace(plan, favoured=of.calls_rarely(wanted))
    with unusable(f"--impl {selector.spec}: "), cut_short:
        return changed.also_called(called_by_plan(system, plan, UNCALLED_RUNS, wanted).keys())
    return changed  # interrupted


def _differing(base: Base, system: AnySystem, findings: Sequence[Finding]) -> Changes:
    """Name the functions that differ from a base without a history, in the files that the findings call."""
    from stateful_tests.check import changes
    from stateful_tests.check.way_map import functions_of

    called = (texts for finding in findings for texts in finding.run.called)
    return changes.beside(base, system, functions_of(chain.from_iterable(called)))


def _other_ways(system: AnySystem, changed: Changes, asked: Plan) -> OtherWays | None:
    from stateful_tests.check import masks
    from stateful_tests.check.other_ways import other_ways
    from stateful_tests.check.way_map import way_map

    spec = system_spec(system)
    functions = [*changed.called, *changed.missed]
    return other_ways(
        way_map(spec.engine), spec.engine, masks.release_of(system), spec.way, functions,
        changed.missed, asked,
    )  # fmt: skip


def _drive_ways(
    result: CheckResult,
    others: OtherWays,
    selector: SystemSelector,
    system: AnySystem,
    how: How,
    reports: list[Data],
    saves: list[Saves],
) -> None:
    """Drive other ways in which changed functions run, until something is found. The result of the check says
    what each showed, and which were not driven."""
    plain, base = SystemSpec(system_spec(system).engine), how.base
    if base is not None and base.startswith(f"{plain}=="):
        base = str(SystemSpec.parse(base).in_way(""))
    found = bool(result.new) or result.interrupted
    for way in others.driven + others.named:
        other = replace(selector, spec=plain.in_way(way))
        command = f"kvspec check {other.options}"
        if found or way in others.named:
            result.not_driven[way] = command
            continue
        note(f"drives {other.spec} as well: what changed runs there")
        try:
            data, save = driven(other, others.each, how._replace(ways=False, base=base))
        except Unusable as error:
            result.not_driven[way] = str(error)
            continue
        except KeyboardInterrupt:
            result.interrupted = found = True
            result.not_driven[way] = command
            continue
        result.ways[way] = data["said"]
        reports.append(data)
        saves.append(save)
        found = data["interrupted"] or data["exit_code"] in FOUND


def _called_in(reports: list[Data]) -> set[tuple[str, str]]:
    """The changed functions that runs in other ways called."""
    found = set()
    for data in reports:
        if not data["since"]:
            continue
        for text in data["since"]["called"]:
            file, _, name = text.partition(": ")
            found.add((file, name))
    return found
