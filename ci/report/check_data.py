"""The report of a check as a dictionary, which is printed and written as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from ci import Data
from ci.report.report_data import fields_of, finding_data, group_by_cause, rate, sentence, title
from ci.report.verdict import (
    base_and_ways, check_verdict, driven_text, findings_text, not_declared, waiver_of,
)  # fmt: skip
from impl.adapter import Capabilities
from stateful_tests.check.known_faults.masks import Mask
from stateful_tests.check.check_plans import CORPUS, Plan, sizes_for
from stateful_tests.check.trees.base_selection import Base
from stateful_tests.check.trees.changed_functions import Changes
from stateful_tests.lockstep.check_results import CheckResult, Tally, add_tallies


def check_data(
    result: CheckResult,
    plan: Plan,
    *,
    capabilities: Capabilities,
    base: Base | None = None,
    masks: Sequence[Mask] = (),
    changed: Changes | None = None,
) -> Data:
    """Return everything about a check.

    base: the system that it was compared with.
    masks: the known faults of the release.
    changed: functions that are driven first.
    """
    ran = list(dict.fromkeys(m.preset for m in result.machines if m.name != CORPUS))
    data: Data = {
        "format": "kvspec-check",
        "version": 1,
        "implementation": result.system,
        **fields_of(result, "tier seed"),
        "presets": ran,
        "presets_fitted": _fitted_sizes(result),
        "presets_left_out": [name for name in plan.presets if name not in ran],
        "machines_left_out": [m for m in plan.machines if m not in {r.name for r in result.machines}],
        "modes": list(dict.fromkeys(m.mode.value for m in result.machines)),
        "commands_asked": result.asked or None,
        "examples_asked": plan.examples,
        "steps_asked": plan.steps,
        "time_limit_s": plan.time_limit_s,
        "machines": _machines(result),
        "longest": max((_longest(m.sizes) for m in result.machines), default=0),
        "clauses_by_machine": [
            _by_machine(name, result) for name in dict.fromkeys(m.name for m in result.machines)
        ],
        "clauses": _clauses(result, capabilities),
        "unreached": list(result.unreached),
        "not_declared": not_declared(capabilities),
        "refusals": dict(sorted(result.refusals.items(), key=lambda item: (-item[1], item[0]))),
        "commands_by_kind": dict(result.commands_by_kind),
        "situations": _situations(result),
        **fields_of(result, "examples commands timed_out interrupted"),
        "commands_carried_out": result.executed_count,
        "carried_out_by_kind": dict(result.carried_out),
        "examples_planned": result.planned or None,
        "incomplete": result.incomplete,
        "left_out": dict(result.left_out),
        "seconds": round(result.seconds, 3),
        "commands_per_s": rate(result.commands, sum(m.seconds for m in result.machines)),
        "stopped_early": result.stopped,
        "findings": [
            finding_data(group, base and base.name, changed)
            for group in group_by_cause(result.findings)
        ],
        "base": base and _base(base, result),
        "known": [_known_fault_data(mask, result) for mask in masks],
        "since": _since(changed) if changed is not None and changed.revision else None,
    }  # fmt: skip
    return data | {
        "said": findings_text(result, masks, base),
        "driven": driven_text(result),
        "beside": base_and_ways(result, base, changed),
        "verdict": check_verdict(result, masks, capabilities, base, changed),
        "ways_not_driven": dict(result.not_driven),
        "exit_code": result.exit_code,
    }


def _machines(result: CheckResult) -> list[Data]:
    """Give the runs and commands of each machine on each preset."""
    return [
        {
            "machine": m.name,
            "mode": m.mode.value,
            **fields_of(m, "preset examples commands"),
            "seconds": round(m.seconds, 3),
            "commands_per_s": rate(m.commands, m.seconds),
        }
        for m in result.machines
    ]


def _clauses(result: CheckResult, capabilities: Capabilities) -> list[Data]:
    """Return how often each clause was evaluated, and in how many runs it could break."""
    return [
        {
            "id": clause,
            "title": title(clause),
            "sentence": sentence(clause),
            "waived": waiver_of(clause, capabilities),
            "evaluated": tally.evaluated,
            "runs_reached": tally.reached,
            "reached": clause not in result.unreached,
        }
        for clause, tally in result.tallies.items()
    ]


def _base(base: Base, result: CheckResult) -> Data:
    """Describe the base, and the clauses that it violates as well."""
    return {
        "implementation": base.name,
        "chosen": base.kind.value,
        "why": base.why,
        "lines_that_differ": base.lines,
        "violates": sorted({f.clause for f in result.findings if f.old and not f.no_witness}),
    }


def _since(changed: Changes) -> Data:
    """Return the changed functions, by whether a run calls them."""
    functions = {
        "called": changed.called,
        "missed": changed.missed,
        "not_loaded": changed.ignored,
    }
    function_names = {how: [str(function) for function in each] for how, each in functions.items()}
    return {"revision": changed.revision, "lines_first": len(changed.first)} | function_names


def _fitted_sizes(result: CheckResult) -> Data:
    """Return, for each preset, the sizes that were changed to fit the system."""
    sizes_of: Data = {}
    for machine in result.machines:
        requested_sizes = sizes_for(machine.name, machine.preset) if machine.sizes is not None else None
        if requested_sizes is None:
            continue
        for size in fields(machine.sizes):
            if (value := getattr(machine.sizes, size.name)) != getattr(requested_sizes, size.name):
                sizes_of.setdefault(machine.preset, {})[size.name] = value
    return sizes_of


def _known_fault_data(mask: Mask, result: CheckResult) -> Data:
    """Return a known fault of the tree: whether it is still there, and how many violations it explains.

    among: other known faults, which may explain some of them as well.
    instead: other clauses that the tree violates where the base has the fault.
    """
    fault = mask.fault
    counted = {
        (ids, clause): times for (ids, clause), times in result.masked.items() if fault.id in ids
    }
    return {
        "id": fault.id,
        "clauses": list(fault.clauses),
        "state": mask.state,
        "masked": mask.holds,
        "fixed_in_part": mask.in_part,
        "elsewhere": mask.elsewhere,
        "times": sum(counted.values()),
        "traces": list(fault.traces),
        "among": sorted({fault_id for ids, _ in counted for fault_id in ids} - {fault.id}),
        "instead": sorted({clause for _, clause in counted}.difference(fault.clauses)),
        "says": fault.says,
        "upstream": fault.upstream,
    }


def _situations(result: CheckResult) -> Data:
    """Return the situations of the corpus that the runs reached, and why lines of others could not be
    driven."""
    missing = [text for text in result.required if text not in result.situations]
    left_out: dict[str, list[str]] = {}
    for text, reason in result.unfit.items():
        if text not in result.situations:
            left_out.setdefault(reason, []).append(text)
    return {
        "reached": len(result.required) - len(missing)
        if result.required
        else len(result.situations),
        "asked": len(result.required),
        "missing": missing,
        "left_out": [{"why": reason, "situations": texts} for reason, texts in left_out.items()],
        "met": dict(result.situations),
    }


def _by_machine(name: str, result: CheckResult) -> Data:
    """Return how often each clause was evaluated, and in how many runs its trigger came up, by one
    machine."""
    runs = [m for m in result.machines if m.name == name]
    tallies: dict[str, Tally] = {}
    for run in runs:
        add_tallies(tallies, run.tallies)
    return {
        "machine": name,
        "seconds": round(sum(m.seconds for m in runs), 3),
        "evaluated": {clause: tally.evaluated for clause, tally in tallies.items()},
        "runs_reached": {clause: tally.reached for clause, tally in tallies.items()},
        "violated": sorted(set().union(*(m.violated for m in runs))),
    }


def _longest(sizes: object) -> int:
    """Return the most tokens that a text may have."""
    return int(getattr(sizes, "width", 0) or getattr(sizes, "max_model_len", 0))
