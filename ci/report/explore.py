"""`kvspec explore` and `kvspec tour`: their results as data, and as text made from that."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from ci import Data
from ci.report import render, render_run
from ci.report.data import finding_data, group_by_cause, rate, fields_of
from reference.clauses import CLAUSES
from stateful_tests.coverage.scopes import SCOPES
from stateful_tests.generate.scope import Scope
from stateful_tests.explore.search import INTERRUPTED, Exploration
from stateful_tests.explore.tour import Tour
from stateful_tests.lockstep.endings import ending
from stateful_tests.lockstep.check_results import Finding


def _sizes(scope: Any) -> Data:
    return {"geometry": asdict(scope.geometry), "mode": scope.mode.value}


def findings_data(found: Sequence[Finding]) -> list[Data]:
    """Findings as `kvspec check` reports them."""
    return [finding_data(group) for group in group_by_cause(found)]


def explored(result: Exploration) -> Data:
    """Everything about an exploration."""
    proved = "proved unreachable in this scope" if result.complete else "not reached so far"
    what = f"{result.states} states, {result.transitions} transitions, depth {result.depth}"
    stopped = "a fixed point" if result.complete else f"stopped at {result.stopped}"
    outcome = (
        f"violates {result.finding.clause}" if result.finding is not None else "no clause violated"
    )
    half = not result.complete and result.finding is None
    outcome = f"incomplete: {outcome} so far" if half else outcome
    return {
        "scope": result.scope.name,
        "about": result.scope.about,
        **_sizes(result.scope),
        **fields_of(result, "states expanded transitions refused depth complete stopped"),
        "seconds": round(result.seconds, 3),
        "transitions_per_s": rate(result.transitions, result.seconds),
        "steps_per_s": rate(result.transitions + result.refused, result.seconds),
        "memory_mb": round(result.memory_mb, 1),
        "situations": result.situations,
        "missing": result.missing,
        "missing_means": proved,
        "clauses": {clause: {"reached": clause in result.reached} for clause in CLAUSES},
        "findings": findings_data([result.finding] if result.finding is not None else []),
        "verdict": f"{result.scope.name}: {outcome}; {what}; {stopped}",
        "exit_code": ending(
            violated=result.finding is not None,
            incomplete=half and result.stopped != INTERRUPTED,
        ),
    }


def toured(tour: Tour) -> Data:
    """Everything about a tour."""
    planned, ran = tour.transitions + tour.refusals, tour.followed + tour.refused
    clauses = list(dict.fromkeys(f.clause for f in tour.findings))
    broke = "BROKEN" in clauses
    share = 100 * ran / planned if planned else 100.0
    if broke:
        outcome = "the system broke"
    else:
        outcome = f"violates {', '.join(clauses)}" if clauses else "conforms"
    if half := bool(tour.stopped) and not clauses:
        outcome = f"incomplete: {tour.stopped}"
    coverage = (
        "every transition was run"
        if tour.complete
        else f"{share:.1f} % of the transitions were run"
    )
    return {
        "scope": tour.scope,
        "implementation": tour.system,
        **_sizes(tour),
        **fields_of(tour, "states transitions followed refusals refused complete commands walks"),
        "seconds": round(tour.seconds, 3),
        "commands_per_s": rate(tour.commands, tour.seconds),
        **fields_of(tour, "violations stopped"),
        "lost": [
            {"kind": kind, "why": why, "times": n} for (kind, why), n in tour.lost.most_common()
        ],
        "findings": findings_data(tour.findings),
        "verdict": f"{tour.scope} on {tour.system}: {outcome}; {coverage}",
        "exit_code": ending(
            broke=broke,
            violated=bool(clauses),
            incomplete=half and tour.stopped != INTERRUPTED,
        ),
    }


def scope_rows() -> list[Data]:
    """The scopes that there are, for a listing."""
    return [_row(scope) for scope in SCOPES.values()]


def _row(scope: Scope) -> Data:
    return {"id": scope.name, "takes": scope.takes, "about": scope.about}


def text(out: Console, data: Data) -> None:
    """The report of one exploration."""
    words = {
        "scope": f"{data['scope']}: {data['about']}",
        "sizes": f"{render.sizes(data['geometry'])}; mode {data['mode']}",
        "states": f"{data['states']}, {data['expanded']} of them expanded; depth {data['depth']}",
        "steps": f"{data['transitions']} carried out, {data['refused']} refused",
        "took": f"{data['seconds']:.1f} s, {data['transitions_per_s']} transitions/s,"
        f" {data['steps_per_s']} steps/s, {data['memory_mb']:.0f} MB",
        "clauses": f"all {len(data['clauses'])} checked at every step",
    }
    if never := [clause for clause, seen in data["clauses"].items() if not seen["reached"]]:
        words["clauses"] += f"; never put to the test ({data['missing_means']}): {', '.join(never)}"
    render.labelled(out, words)
    out.print()
    counts = render.table("situation", "times", right=("times",))
    for name, times in data["situations"].items():
        counts.add_row(Text(name), str(times))
    out.print(counts)
    if data["missing"]:
        heading = f"{data['missing_means']}: {len(data['missing'])} situations of the corpus"
        out.print(Text("\n  ".join(["\n" + heading, *data["missing"]])))
    _end(out, data)


def tour_text(out: Console, data: Data) -> None:
    """The report of one tour."""
    render.labelled(out, {
        "tour": f"{data['scope']}, mode {data['mode']}",
        "run on": data["implementation"],
        "transitions": f"{data['followed']} of {data['transitions']}, in {data['states']} states",
        "refusals": f"{data['refused']} of {data['refusals']}",
        "took": f"{data['commands']} commands in {data['walks']} walks, {data['seconds']:.1f} s,"
        f" {data['commands_per_s']} commands/s",
    })  # fmt: skip
    if data["lost"]:
        out.print()
        lost = render.table("not followed", "why", "times", right=("times",))
        for row in data["lost"]:
            lost.add_row(Text(row["kind"]), Text(render.plain(row["why"])), str(row["times"]))
        out.print(lost)
    _end(out, data)


def _end(out: Console, data: Data) -> None:
    for number, found in enumerate(data["findings"], 1):
        out.print()
        render_run.finding(out, found, f"violation {number} of {len(data['findings'])}")
    out.print()
    render.verdict(out, data["verdict"], data)
    out.print()
