"""Reports as dictionaries, from which both the printed text and the output of `--json` are made.

The text is rendered from these dictionaries alone, so that both have the same figures.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, replace

from ci import Data
from ci.compare import snapshot, step_table
from ci.explain import because
from ci.explain.refusal_reasons import refusal
from ci.report import FAITHFUL, FREE_ONLY, IMPATIENT, PATIENT
from ci.report.called_functions import telling_calls
from impl.adapter import AnySystem
from impl.bugs import BUGS
from impl.process.system_functions import grouped_texts
from impl.system_spec import SystemSpec
from reference.all_clauses import ALL_CLAUSES
from reference.commands import Mode
from reference.system_kinds import kind_of_config
from stateful_tests.check.trees.changed_functions import Changes
from stateful_tests.check.finding_order import cause_order
from stateful_tests.lockstep.exit_codes import Ending
from stateful_tests.lockstep.known_faults import KnownFault
from stateful_tests.lockstep.replays import mostly_refused, rejected_turns, unstated_refusals
from stateful_tests.lockstep.check_results import Finding
from stateful_tests.lockstep.run_results import Run, Trace
from stateful_tests.shrink.minimise import violation_of_clause
from stateful_tests.traces import trace_files as traces
from stateful_tests.traces.notation import format_command, format_outcome

# Ids in findings that are no clauses -> their sentence.
_NOT_CLAUSES = {
    "BROKEN": "The system carries a command out or refuses it; it does not fail.",
    "TRACE": "The trace states an outcome that the rules contradict.",
}


def why(clause: str) -> str:
    """Return the sentence that says why a clause matters; "" for an unknown clause."""
    return ALL_CLAUSES[clause].why if clause in ALL_CLAUSES else ""


def title(clause: str) -> str:
    """Return the title of a clause; "" for an unknown clause."""
    if clause == "BROKEN":
        return "the system broke"
    return ALL_CLAUSES[clause].title if clause in ALL_CLAUSES else ""


def sentence(clause: str) -> str:
    """Return the sentence of a clause, or of what a finding has in its place."""
    if clause in ALL_CLAUSES:
        return ALL_CLAUSES[clause].sentence
    return _NOT_CLAUSES.get(clause, "(unknown clause)")


def rate(commands: int, seconds: float) -> int:
    """Return the commands per second, rounded."""
    return round(commands / seconds) if seconds > 0 else 0


def fields_of(source: object, names: str) -> Data:
    """Return fields of a result by name, tuples as lists, as in JSON.

    names: separated by spaces.
    """
    values = {name: getattr(source, name) for name in names.split()}
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in values.items()
    }


def group_by_cause(findings: Iterable[Finding]) -> list[list[Finding]]:
    """Group findings of one cause, in the order of the first finding of each group.

    Findings with the identical trace have one cause. A finding also joins the group of another clause that
    its own smallest trace violates at the same step, and stands behind its findings.
    """
    findings = list(findings)
    by_trace: dict[tuple[object, ...], list[Finding]] = {}
    for finding in findings:
        trace = finding.run.trace
        by_trace.setdefault((trace.geometry, trace.mode, trace.commands), []).append(finding)
    groups = list(by_trace.values())
    joined = [_group_to_join(index, groups) for index in range(len(groups))]

    def cause(index: int) -> int:
        """Return the group at which joining ends. In a cycle that is the group with the smallest trace."""
        path = [index]
        while joined[path[-1]] not in path:
            path.append(joined[path[-1]])
        cycle = path[path.index(joined[path[-1]]) :]
        return min(cycle, key=lambda i: (len(groups[i][0].run.trace.commands), i))

    causes = [cause(index) for index in range(len(groups))]
    grouped = {index: groups[index] for index in sorted(causes)}
    for index, cause_index in enumerate(causes):
        if index != cause_index:
            grouped[cause_index] = grouped[cause_index] + groups[index]
    place = {id(finding): at for at, finding in enumerate(findings)}
    ordered = sorted(grouped.values(), key=lambda group: min(place[id(each)] for each in group))
    return [_cause_first(group) for group in ordered]


def _cause_first(group: list[Finding]) -> list[Finding]:
    """Sort a group: first the findings whose clauses the trace of its first finding violates, by cause."""
    commands = group[0].run.trace.commands
    shown = [finding for finding in group if finding.run.trace.commands == commands]
    shown.sort(key=lambda finding: cause_order(finding.clause))
    return shown + [finding for finding in group if finding.run.trace.commands != commands]


def _standing(finding: Finding) -> tuple[bool, bool]:
    """Return the fields that all findings of a group have in common."""
    return finding.old, finding.known_elsewhere


def _group_to_join(index: int, groups: list[list[Finding]]) -> int:
    """Return the index of another group with a clause that fails at the last step of this one; else `index`.

    A second trace of a clause has another cause, so its group joins none.
    """
    headline = groups[index][0]
    own = {f.clause for f in groups[index]}
    assert headline.run.violation is not None
    failing = [clause for clause in headline.run.violation.clauses if clause not in own]
    if headline.number == 1:
        for clause in failing:
            for other, group in enumerate(groups):
                names = {f.name for f in group if _standing(f) == _standing(headline)}
                if clause in names:
                    return other
    return index


def finding_data(
    group: list[Finding], base: str | None = None, changed: Changes | None = None
) -> Data:
    """Return the report of a group of findings, with the trace of the first.

    also_in: the base if it violates the clause as well; for the group, if it violates all clauses.
    no_witness: why there is no trace on which the base conforms.
    saved: file of the trace; for the group, that of its first finding.
    flaky: not every replay shows the violation.
    looked_up: what other releases show on the trace.
    known_elsewhere: it is a known fault of a release of which the tree has a part.
    changed: functions changed since a revision that the trace calls, and the commands that call them.
    """
    also = {f.clause: base if f.old else None for f in group}
    return {
        "clauses": [
            {
                "id": f.clause,
                "name": f.name,
                "title": title(f.clause),
                "sentence": sentence(f.clause),
                "also_in": also[f.clause],
                "saved": None,
                "modes": [mode.value for mode in f.modes],
                "reach": FAITHFUL if Mode.FAITHFUL in f.modes else FREE_ONLY,
                "clients": IMPATIENT if rejected_turns(f.run) else PATIENT,
                "found_after_s": round(f.found_after_s, 3),
                **fields_of(f, "times found_after_commands"),
            }
            for f in group
        ],
        "base": base,
        "also_in": base if all(also.values()) else None,
        "no_witness": group[0].no_witness or None,
        "flaky": group[0].flaky,
        "looked_up": _lookup_data(group[0]),
        "known_elsewhere": all(f.known_elsewhere for f in group),
        "without": list(group[0].without),
        "saved": None,
        "replay": None,
        "page": None,
        "changed": _changed_functions(group[0].run, changed),
    } | run_data(group[0].run)


def _lookup_data(finding: Finding) -> Data | None:
    """Return the releases' behaviour on the trace of a finding; None if it was not looked up."""
    looked_up = finding.looked_up
    if looked_up is None:
        return None
    violation = finding.run.violation
    observed = violation.failure.observed if violation is not None else ""
    return looked_up._asdict() | {"text": looked_up.text(finding.clause, observed)}


def _changed_functions(run: Run, changed: Changes | None) -> list[Data]:
    """Return the changed functions that a run calls, the one called last first: the likeliest cause."""
    if changed is None:
        return []
    called = sorted(changed.callers(run.called).items(), key=lambda each: -each[1][-1])
    return [{"function": str(function), "steps": steps} for function, steps in called]


def violation_line(run: Run, base: str) -> str:
    """Return the line that is printed for a violation before its trace is shrunk."""
    violation = run.violation
    assert violation is not None
    kind = f"NEW against {base}" if base else "violation"
    reason = because(run)
    if reason is not None:
        text = reason.text
    else:
        text = f"expected {violation.expected}; observed {violation.observed}"
    return f"{kind}: {', '.join(violation.clauses)}: {text}"


def run_data(run: Run, known_fault: KnownFault | None = None) -> Data:
    """Return the report of a replayed trace: its header, every step with what it changed, and the violation.

    known_fault: the known fault that explains the violation.
    """
    violation = run.violation
    last = violation.step if violation is not None else None
    first_violation = violation.first_violation if violation is not None else None
    called = run.called[last] if last is not None and last < len(run.called) else ()
    return {
        "implementation": run.system,
        "trace": json.loads(traces.dump(run.trace)),
        "rows": [row_data(run, index, index == last) for index in range(len(run.rows))],
        **_explanation_data(run),
        "called": grouped_texts(called),
        "calls": grouped_texts(telling_calls(run)),
        "violation": violation
        and {
            **fields_of(violation, "clause also details"),
            "sentence": sentence(violation.clause),
            "why": why(violation.clause),
            **fields_of(violation, "step expected observed since"),
            "first_violation": first_violation and fields_of(first_violation, "step clauses"),
        },
        "known": known_fault and fields_of(known_fault, "id summary upstream"),
    }


def _explanation_data(run: Run) -> Data:
    """Return the reason of the violation, the differences at its step, and the steps that led to
    it as a table."""
    reason = because(run)
    has_states = reason is not None and kind_of_config(run.trace.geometry).modelled
    states = snapshot.snapshots(run, step_table.MAX_ROWS) if has_states else []
    return {
        "because": reason.text if reason is not None else None,
        "differences": states[-1]["differences"] if states else [],
        "step_table": step_table.step_table(run, states) if states else None,
    }


def row_data(run: Run, index: int, marked: bool) -> Data:
    """Return the report of a replayed command: its outcome, and what it changed in the reference.

    why: the reason of a refusal in words.
    violates: the command violates a clause (`marked`).
    """
    row = run.rows[index]
    reason = refusal(run, index)
    return ({"why": reason} if reason else {}) | {
        "step": index,
        "command": format_command(row.command),
        "outcome": format_outcome(row.outcome),
        "cursors": [
            dict(zip(("holder", "cursor", "before", "after"), change)) for change in row.cursors
        ],
        "freed": [dict(zip(("holder", "pool", "start", "end"), pages)) for pages in row.freed],
        "accounts": [asdict(account) for account in row.accounts],
        "tree": list(row.tree),
        "violates": marked,
    }


def replay_data(
    file: str, run: Run, base: AnySystem | None = None, known: KnownFault | None = None,
    changed: Changes | None = None,
) -> Data:  # fmt: skip
    """Return the report of a replayed trace file: `run_data`, and a verdict that heeds the bug and the clause
    that the trace names.

    base: the system before the change. A violation that it shows as well does not fail the replay.
    known: the known fault that explains the violation.
    changed: functions that differ from the base.
    """
    trace = run.trace
    violation = run.violation
    note = ""
    also_in: str | None = None
    if trace.bug is not None and trace.bug not in BUGS:
        note = f"there is no bug called {trace.bug}"
    if trace.clause is not None and trace.clause not in {*ALL_CLAUSES, *_NOT_CLAUSES}:
        note = f"there is no clause called {trace.clause}"
    if violation is None:
        verdict = "conforms"
        end = Ending.CONFORMS
        if trace.bug is not None and run.system.endswith(f"+{trace.bug}"):
            note = f"the trace is there to show {trace.bug}, and does not"
    elif "BROKEN" in violation.clauses:
        verdict = "broke"
        end = Ending.BROKE
    else:
        verdict = f"violates {', '.join(violation.clauses)}"
        end = Ending.VIOLATED
        if trace.clause is not None and trace.clause not in violation.clauses:
            note = f"first; the trace names {trace.clause}"
    if violation is not None and base is not None:
        before = violation_of_clause(base, trace, trace.clause or violation.clause)
        if before and set(violation.clauses) <= set(before):
            note = f"{base.name} violates it as well"
            also_in = base.name
            end = Ending.CONFORMS
        elif before:
            note = f"new: {base.name} violates {', '.join(before)}"
        else:
            shows = "conforms" if before is not None else "cannot run the trace"
            note = f"new: {base.name} {shows}"
            known = None  # a known fault of the base would show on the base
    head = {
        "file": file,
        "verdict": verdict,
        "note": note,
        "exit_code": end,
        "unstated_refusals": unstated_refusals(run),
        "mostly_refused": mostly_refused(run),
        "base": base and base.name,
        "also_in": also_in,
        "changed": _changed_functions(run, changed),
    }
    return head | run_data(run, known)


def findings_to_save(group: list[Finding]) -> list[Finding]:
    """Return for each finding of a group the one whose trace is saved: the first, if its trace violates the
    clause."""
    first_finding = group[0]
    assert first_finding.run.violation is not None
    return [first_finding if f.clause in first_finding.run.violation.clauses else f for f in group]


def trace_to_save(finding: str, trace: Trace, system: str) -> tuple[str, Trace]:
    """Return the file name for the trace of a finding on a system, and the trace with its clause and bug."""
    bug = trace.bug or SystemSpec.parse(system).bug
    name = re.sub(r"[^a-z0-9.]+", "-", f"{finding} {system}".lower()).strip("-.")
    return f"{name[:100]}.json", replace(trace, clause=finding.split()[0], bug=bug)
