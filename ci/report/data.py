"""Reports as data: what the command line prints and what `--json` gives are both made from this.

The text is rendered from these dictionaries alone, so that no figure is in one and not in the other.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, replace

from ci import Data
from ci.compare import snapshot, step_table
from ci.explain import because
from ci.explain.reasons import refusal
from ci.report import FAITHFUL, FREE_ONLY, IMPATIENT, PATIENT
from ci.report.calls import telling_calls
from impl.adapter import AnySystem
from impl.bugs import BUGS
from impl.system_spec import SystemSpec
from reference.every_clause import EVERY_CLAUSE
from reference.commands import Mode
from reference.kinds import kind_of_config
from stateful_tests.check.changes import Changes
from stateful_tests.lockstep.endings import Ending
from stateful_tests.lockstep.known_faults import KnownFault
from stateful_tests.lockstep.lockstep import mostly_refused, rejected_turns, unstated_refusals
from stateful_tests.lockstep.check_results import Finding
from stateful_tests.lockstep.results import Run, Trace
from stateful_tests.shrink.minimise import violated
from stateful_tests.traces import files as traces
from stateful_tests.traces.notation import format_command, format_outcome

# What can be reported without being a clause.
_OTHER = {
    "BROKEN": "The system carries a command out or refuses it; it does not fail.",
    "TRACE": "The trace states an outcome that the rules contradict.",
}


def why(clause: str) -> str:
    """Why a clause matters."""
    return EVERY_CLAUSE[clause].why if clause in EVERY_CLAUSE else ""


def title(clause: str) -> str:
    """Return the title of a clause."""
    if clause == "BROKEN":
        return "the system broke"
    return EVERY_CLAUSE[clause].title if clause in EVERY_CLAUSE else ""


def sentence(clause: str) -> str:
    """Return the sentence of a clause."""
    return (
        EVERY_CLAUSE[clause].sentence
        if clause in EVERY_CLAUSE
        else _OTHER.get(clause, "(unknown clause)")
    )


def rate(commands: int, seconds: float) -> int:
    """Commands per second."""
    return round(commands / seconds) if seconds > 0 else 0


def fields_of(source: object, names: str) -> Data:
    """Fields of a result that a report has as they are; JSON has lists alone."""
    found = {name: getattr(source, name) for name in names.split()}
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in found.items()
    }


def groups(findings: Iterable[Finding]) -> list[list[Finding]]:
    """Findings of one cause together: those with the identical trace, and behind them those whose own
    smallest trace violates a clause of theirs at the same step. A cause stands where the first of its
    findings does."""
    findings = list(findings)
    together: dict[tuple[object, ...], list[Finding]] = {}
    for finding in findings:
        trace = finding.run.trace
        together.setdefault((trace.geometry, trace.mode, trace.commands), []).append(finding)
    alike = list(together.values())
    beside = [_beside(at, alike) for at in range(len(alike))]

    def cause(at: int) -> int:
        path = [at]
        while beside[path[-1]] not in path:
            path.append(beside[path[-1]])
        # each is beside the next: the smallest trace shows it
        around = path[path.index(beside[path[-1]]) :]
        return min(around, key=lambda each: (len(alike[each][0].run.trace.commands), each))

    causes = [cause(at) for at in range(len(alike))]
    grouped = {at: alike[at] for at in sorted(causes)}
    for at, of in enumerate(causes):
        if at != of:
            grouped[of] = grouped[of] + alike[at]
    place = {id(finding): at for at, finding in enumerate(findings)}
    return sorted(grouped.values(), key=lambda group: min(place[id(each)] for each in group))


def _standing(finding: Finding) -> tuple[bool, bool]:
    """The fields that findings of one group share."""
    return finding.old, finding.known_elsewhere


def _beside(at: int, groups: list[list[Finding]]) -> int:
    """The group of which a clause fails at the step of this one as well; itself where there is none. Another
    trace of a clause has another cause."""
    first, own = groups[at][0], {f.clause for f in groups[at]}
    assert first.run.violation is not None
    failing = [clause for clause in first.run.violation.clauses if clause not in own]
    if first.number == 1:
        for clause in failing:
            for other, group in enumerate(groups):
                names = {f.name for f in group if _standing(f) == _standing(first)}
                if clause in names:
                    return other
    return at


def finding_data(
    group: list[Finding], base: str | None = None, changed: Changes | None = None
) -> Data:
    """Findings of one cause, the first with its trace. also_in: the base, where it violates as well; of a
    clause, or of all. no_witness: why no trace shows them where the base violates nothing.
    saved: where the trace is, of the first or of a clause. flaky:
    not every replay shows them. looked_up: what other releases show of the trace; known_elsewhere: it is a
    known fault of a release that the tree has a part of. changed: functions changed since a revision that the
    trace calls, and the commands that call them."""
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
        "looked_up": _looked_up(group[0]),
        "known_elsewhere": all(f.known_elsewhere for f in group),
        "without": list(group[0].without),
        "saved": None,
        "replay": None,
        "page": None,
        "changed": _changed(group[0].run, changed) if changed else [],
    } | run_data(group[0].run)


def _looked_up(finding: Finding) -> Data | None:
    """A finding's trace on the releases, as they show it."""
    found, violation = finding.looked_up, finding.run.violation
    if found is None:
        return None
    observed = violation.failure.observed if violation is not None else ""
    return found._asdict() | {"text": found.text(finding.clause, observed)}


def _changed(run: Run, changed: Changes) -> list[Data]:
    """The last call first: what ran long before a fault is less likely its cause."""
    called = sorted(changed.among(run.called).items(), key=lambda each: -each[1][-1])
    return [{"function": f"{file}: {name}", "steps": steps} for (file, name), steps in called]


def first_word(run: Run, base: str) -> str:
    """Of a violation that was just found, in a line: the check goes on, and shrinks it."""
    violation, told = run.violation, because(run)
    assert violation is not None
    where = f"NEW against {base}" if base else "violation"
    sides = f"expected {violation.expected}; observed {violation.observed}"
    return f"{where}: {', '.join(violation.clauses)}: {told.text if told is not None else sides}"


def run_data(run: Run, known: KnownFault | None = None) -> Data:
    """A replayed trace: its header, every step with what it changed, the violation, and the known fault that
    explains it."""
    violation = run.violation
    last = violation.step if violation is not None else None
    first = violation.first_violation if violation is not None else None
    return {
        "implementation": run.system,
        "trace": json.loads(traces.dump(run.trace)),
        "rows": [row_data(run, index, index == last) for index in range(len(run.rows))],
        **_explained(run),
        "called": list(run.called[last]) if last is not None and last < len(run.called) else [],
        "calls": telling_calls(run),
        "violation": violation
        and {
            **fields_of(violation, "clause also details"),
            "sentence": sentence(violation.clause),
            "why": why(violation.clause),
            **fields_of(violation, "step expected observed since"),
            "first_violation": first and fields_of(first, "step clauses"),
        },
        "known": known and fields_of(known, "id summary upstream"),
    }


def _explained(run: Run) -> Data:
    """Why the violation cannot be, where the sides differ, and how it came to that."""
    told = because(run)
    drawn = told is not None and kind_of_config(run.trace.geometry).modelled
    states = snapshot.snapshots(run, step_table.MAX_ROWS) if drawn else []
    return {
        "because": told.text if told is not None else None,
        "differences": states[-1]["differences"] if states else [],
        "step_table": step_table.step_table(run, states) if states else None,
    }


def row_data(run: Run, index: int, marked: bool) -> Data:
    """A replayed command, and what it changed in the reference; why: of a refusal, in words."""
    row, reason = run.rows[index], refusal(run, index)
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
    file: str, run: Run, base: AnySystem | None = None, known: KnownFault | None = None
) -> Data:
    """A trace file replayed: `run_data` and a verdict that heeds what the trace says of itself.

    base: what was there before; what it violates as well does not fail the replay. known: the fault that
    explains the violation.
    """
    trace, violation = run.trace, run.violation
    note, also_in = "", None
    if trace.bug is not None and trace.bug not in BUGS:
        note = f"there is no bug called {trace.bug}"
    if trace.clause is not None and trace.clause not in EVERY_CLAUSE and trace.clause not in _OTHER:
        note = f"there is no clause called {trace.clause}"
    if violation is None:
        verdict, end = "conforms", Ending.CONFORMS
        if trace.bug is not None and run.system.endswith(f"+{trace.bug}"):
            note = f"the trace is there to show {trace.bug}, and does not"
    elif "BROKEN" in violation.clauses:
        verdict, end = "broke", Ending.BROKE
    else:
        verdict, end = f"violates {', '.join(violation.clauses)}", Ending.VIOLATED
        if trace.clause is not None and trace.clause not in violation.clauses:
            note = f"first; the trace names {trace.clause}"
    if violation is not None and base is not None:
        before = violated(base, trace, trace.clause or violation.clause)
        if before and set(violation.clauses) <= set(before):
            note, also_in = f"{base.name} violates it as well", base.name
            end = Ending.CONFORMS
        else:
            shows = f"violates {', '.join(before)}" if before else "conforms"
            note = f"new: {base.name} {shows if before is not None else 'cannot run the trace'}"
            known = known if before else None  # what the base does not show is no fault of its
    head = {"file": file, "verdict": verdict, "note": note, "exit_code": end}
    head |= {"unstated_refusals": unstated_refusals(run), "mostly_refused": mostly_refused(run)}
    return head | {"base": base and base.name, "also_in": also_in} | run_data(run, known)


def shown_by(group: list[Finding]) -> list[Finding]:
    """Of each finding of a group the one whose trace is kept for it: the first where its trace shows it."""
    first = group[0]
    assert first.run.violation is not None
    return [first if f.clause in first.run.violation.clauses else f for f in group]


def named_trace(finding: str, trace: Trace, system: str) -> tuple[str, Trace]:
    """The same for the trace of a finding on a system."""
    bug = trace.bug or SystemSpec.parse(system).bug
    name = re.sub(r"[^a-z0-9.]+", "-", f"{finding} {system}".lower()).strip("-.")
    return f"{name[:100]}.json", replace(trace, clause=finding.split()[0], bug=bug)
