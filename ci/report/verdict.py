"""The verdict of a check: what was found, what it was compared with, what was driven."""

from __future__ import annotations

from collections.abc import Sequence

from ci.report.report_data import group_by_cause
from ci.shown_kinds import shown_kind
from impl.adapter import Capabilities
from reference.commands import kind_name
from stateful_tests.check.trees.base_selection import Base
from stateful_tests.check.trees.changed_functions import Changes
from stateful_tests.check.known_faults.masks import Mask
from stateful_tests.check.check_plans import CORPUS
from stateful_tests.lockstep.exit_codes import Ending
from stateful_tests.lockstep.check_results import CheckResult

_MANY = 3  # from so many known faults on they are counted, not named
_Part = tuple[bool, str]  # (whether the verdict has this part, its text)


def check_verdict(
    result: CheckResult,
    masks: Sequence[Mask],
    capabilities: Capabilities,
    base: Base | None,
    changed: Changes | None = None,
) -> str:
    """Return the verdict in one line, for logs of CI, such as "torch: conforms (30,112 commands of 20
    kinds in 1,410 runs of 8 presets, 20.5 s)"."""
    facts = base_and_ways(result, base, changed)
    if clauses := {**capabilities.waived, **capabilities.known}:
        facts["not checked"] = ", ".join(clauses)
    parts = [findings_text(result, masks, base), *(f"{label}: {text}" for label, text in facts.items())]
    return f"{result.system}: {'; '.join(parts)} ({driven_text(result)})"


def base_and_ways(result: CheckResult, base: Base | None, changed: Changes | None) -> dict[str, str]:
    """Return the base, and the ways that the change of the system reaches: a label and a text for each."""
    facts = {} if base is None else {"base": base.text}
    if changed is not None and changed.undriven:
        facts["changed"] = changed.undriven
    facts |= {_way_text(way): words.replace("; ", ", ") for way, words in result.ways.items()}
    if left := [f"{ways} ({reason})" for reason, ways in _not_driven(result).items()]:
        facts["not driven"] = f"what changed runs in {', '.join(left)}"
    return facts


def findings_text(result: CheckResult, masks: Sequence[Mask], base: Base | None) -> str:
    """Return the findings of a check in words, or "conforms"."""
    seen_before = _parts_seen_before(result, masks, base)
    nothing_new = not result.new and any(holds for holds, _ in seen_before)
    parts = [*_new_findings(result), (nothing_new, "nothing new"), *seen_before, *_incomplete_parts(result)]
    return "; ".join(text for holds, text in parts if holds) or "conforms"


def _new_findings(result: CheckResult) -> list[_Part]:
    """Return the parts on findings that fail the check."""
    told = [finding for group in group_by_cause(result.new) for finding in group]
    broken = [f.clause for f in told if not f.flaky and f.clause != "BROKEN"]
    flaky = [f.clause for f in result.new if f.flaky]
    return [
        (result.exit_code is Ending.BROKE, "the system broke"),
        (bool(broken), f"violates {_name_list(broken)}"),
        (bool(flaky), f"flaky: {_name_list(flaky)}, not in every replay"),
    ]


def _parts_seen_before(result: CheckResult, masks: Sequence[Mask], base: Base | None) -> list[_Part]:
    """Return the parts on findings that the base or a release shows as well."""
    of_base = [finding for finding in result.findings if finding.old]
    old = sorted({finding.clause for finding in of_base if not finding.no_witness})
    untold = sorted({finding.clause for finding in of_base if finding.no_witness})
    elsewhere = [f.looked_up.fault for f in result.known_elsewhere if f.looked_up is not None]
    seen = [f.looked_up for f in result.new if f.looked_up is not None]
    alike = [each.fault or each.alike for each in seen if each.fault or each.alike]
    in_part = [mask.fault.id for mask in masks if mask.in_part]
    fault_ids = [mask.fault.id for mask in masks if mask.holds and not mask.in_part]
    return [
        (bool(old), f"{_name_list(old)} also in {base.name if base else None}"),
        (bool(untold), f"{_name_list(untold)} without a witness"),
        (bool(elsewhere), f"known in other releases: {_name_list(elsewhere)}"),
        (bool(alike), f"like known: {_name_list(alike)}"),
        (bool(in_part), f"fixed in part: {_name_list(in_part)}"),
        (bool(fault_ids), _known_text(fault_ids)),
    ]


def _incomplete_parts(result: CheckResult) -> list[_Part]:
    """Return the parts on a check that ended before its plan."""
    interrupted = result.interrupted
    missing = "; ".join(result.incomplete)
    incomplete = not interrupted and not result.new and bool(missing)
    timed_out = not interrupted and bool(result.new) and result.timed_out
    return [
        (bool(result.broke_off), f"could not be driven on: {result.broke_off}"),
        (interrupted, f"interrupted after {result.so_far}"),
        (incomplete, f"incomplete: nothing was found, but {missing}"),
        (timed_out, f"{result.so_far} until the time limit"),
    ]


def _not_driven(result: CheckResult) -> dict[str, str]:
    """Return the ways that were not driven, by the reason or by the command that drives them (WAY for a
    name)."""
    ways: dict[str, list[str]] = {}
    for way, reason in result.not_driven.items():
        ways.setdefault(reason.replace(f"+{way} ", "+WAY ") if way else reason, []).append(way)
    return {
        reason if len(alike) > 1 else result.not_driven[alike[0]]: ", ".join(map(_way_text, alike))
        for reason, alike in ways.items()
    }


def _way_text(way: str) -> str:
    return f"+{way}" if way else "plain"


def driven_text(result: CheckResult) -> str:
    """Return how much was carried out, and in how many seconds."""
    text = _count_text(result.executed_count, "command")
    if result.examples:
        text += f" of {_count_text(len(result.carried_out), 'kind')} in {_count_text(result.examples, 'run')}"
    random = [machine for machine in result.machines if machine.examples and machine.name != CORPUS]
    if presets := len({run.preset for run in random}):
        text += f" of {_count_text(presets, 'preset')}"
    return f"{text}, {result.seconds:.1f} s"


def not_declared(can: Capabilities) -> list[str]:
    """Return the commands and kinds of models that a system of this kind may offer and this one does
    not."""
    kind = can.system_kind
    commands = [
        kind_name(command).replace("_", " ")
        for command in kind.commands
        if command.__name__ not in can.commands
    ]
    models = {
        "a window": can.swa,
        "a radix tree": can.tree,
        "recurrent state": can.recurrent or can.tracks,
    }
    if not shown_kind(kind.name).models:
        return commands
    return commands + [model for model, is_offered in models.items() if not is_offered]


def waiver_of(clause: str, capabilities: Capabilities) -> str | None:
    """Return why a clause was not checked; None if it was."""
    known = capabilities.known.get(clause)
    return f"known fault: {known}" if known is not None else capabilities.waived.get(clause)


def _known_text(faults: Sequence[str]) -> str:
    """Return the known faults, by name if they are few. A report lists all with -v."""
    if len(faults) < _MANY:
        return f"known faults: {_name_list(faults)}"
    return f"{len(faults)} known faults"


def _name_list(names: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(names))


def _count_text(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
