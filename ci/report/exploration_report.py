"""Reports of `kvspec explore` and `kvspec tour`: results become JSON data, and the data becomes text."""

from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from ci import Data
from ci.report import text_output, run_text
from ci.report.report_data import finding_data, group_by_cause, rate, fields_of
from reference.clauses import CLAUSES
from stateful_tests.coverage.scopes import SCOPES
from stateful_tests.generate.exploration_scope import Scope
from stateful_tests.explore.search import INTERRUPTED, Exploration
from stateful_tests.explore.tour import Tour
from stateful_tests.lockstep.exit_codes import ending
from stateful_tests.lockstep.check_results import Finding


def _sizes(scope: Scope | Tour) -> Data:
    return {"geometry": asdict(scope.geometry), "mode": scope.mode.value}


def findings_data(exploration_findings: Sequence[Finding]) -> list[Data]:
    """Group findings by cause, in the form of the report of `kvspec check`."""
    return [finding_data(group) for group in group_by_cause(exploration_findings)]


def exploration_data(result: Exploration) -> Data:
    """Return the report of an exploration as data, with its verdict and exit code."""
    if result.complete:
        missing_means = "proved unreachable in this scope"
        end = "a fixed point"
    else:
        missing_means = "not reached so far"
        end = f"stopped at {result.stopped}"
    incomplete = not result.complete and result.finding is None
    if result.finding is not None:
        outcome = f"violates {result.finding.clause}"
    elif incomplete:
        outcome = "incomplete: no clause violated so far"
    else:
        outcome = "no clause violated"
    counts = f"{result.states} states, {result.transitions} transitions, depth {result.depth}"
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
        "missing_means": missing_means,
        "clauses": {clause: {"reached": clause in result.reached} for clause in CLAUSES},
        "findings": findings_data([result.finding] if result.finding is not None else []),
        "verdict": f"{result.scope.name}: {outcome}; {counts}; {end}",
        "exit_code": ending(
            violated=result.finding is not None,
            incomplete=incomplete and result.stopped != INTERRUPTED,
        ),
    }


def tour_data(tour: Tour) -> Data:
    """Return the report of a tour as data, with its verdict and exit code."""
    planned = tour.transitions + tour.refusals
    ran = tour.followed + tour.refused
    percent = 100 * ran / planned if planned else 100.0
    violated = list(dict.fromkeys(finding.clause for finding in tour.findings))
    broke = "BROKEN" in violated
    incomplete = bool(tour.stopped) and not violated
    if broke:
        outcome = "the system broke"
    elif violated:
        outcome = f"violates {', '.join(violated)}"
    elif incomplete:
        outcome = f"incomplete: {tour.stopped}"
    else:
        outcome = "conforms"
    if tour.complete:
        coverage = "every transition was run"
    else:
        coverage = f"{percent:.1f} % of the transitions and refusals were run"
    return {
        "scope": tour.scope,
        "implementation": tour.system,
        **_sizes(tour),
        **fields_of(tour, "states transitions followed refusals refused complete commands walks"),
        "seconds": round(tour.seconds, 3),
        "commands_per_s": rate(tour.commands, tour.seconds),
        **fields_of(tour, "violations stopped"),
        "lost": [
            {"kind": kind, "why": reason, "times": n} for (kind, reason), n in tour.lost.most_common()
        ],
        "findings": findings_data(tour.findings),
        "verdict": f"{tour.scope} on {tour.system}: {outcome}; {coverage}",
        "exit_code": ending(
            broke=broke,
            violated=bool(violated),
            incomplete=incomplete and tour.stopped != INTERRUPTED,
        ),
    }


def scope_rows() -> list[Data]:
    """List the scopes: what each is about, and how long it takes."""
    return [
        {"id": scope.name, "takes": scope.takes, "about": scope.about} for scope in SCOPES.values()
    ]


def print_exploration(out: Console, data: Data) -> None:
    """Print the report of one exploration."""
    words = {
        "scope": f"{data['scope']}: {data['about']}",
        "sizes": f"{text_output.sizes(data['geometry'])}; mode {data['mode']}",
        "states": f"{data['states']}, {data['expanded']} of them expanded; depth {data['depth']}",
        "steps": f"{data['transitions']} carried out, {data['refused']} refused",
        "took": f"{data['seconds']:.1f} s, {data['transitions_per_s']} transitions/s,"
        f" {data['steps_per_s']} steps/s, {data['memory_mb']:.0f} MB",
        "clauses": f"all {len(data['clauses'])} checked at every step",
    }
    unreached = [clause for clause, counts in data["clauses"].items() if not counts["reached"]]
    if unreached:
        words["clauses"] += f"; never put to the test ({data['missing_means']}): {', '.join(unreached)}"
    text_output.print_labels(out, words)
    out.print()
    counts = text_output.table("situation", "times", right=("times",))
    for name, times in data["situations"].items():
        counts.add_row(Text(name), str(times))
    out.print(counts)
    if data["missing"]:
        heading = f"{data['missing_means']}: {len(data['missing'])} situations of the corpus"
        out.print(Text("\n  ".join(["\n" + heading, *data["missing"]])))
    _print_verdict(out, data)


def print_tour(out: Console, data: Data) -> None:
    """Print the report of one tour."""
    text_output.print_labels(out, {
        "tour": f"{data['scope']}, mode {data['mode']}",
        "run on": data["implementation"],
        "transitions": f"{data['followed']} of {data['transitions']}, in {data['states']} states",
        "refusals": f"{data['refused']} of {data['refusals']}",
        "took": f"{data['commands']} commands in {data['walks']} walks, {data['seconds']:.1f} s,"
        f" {data['commands_per_s']} commands/s",
    })  # fmt: skip
    if data["lost"]:
        out.print()
        lost = text_output.table("not followed", "why", "times", right=("times",))
        for row in data["lost"]:
            lost.add_row(Text(row["kind"]), Text(text_output.printable(row["why"])), str(row["times"]))
        out.print(lost)
    _print_verdict(out, data)


def _print_verdict(out: Console, data: Data) -> None:
    """Print the findings and the verdict."""
    for number, finding in enumerate(data["findings"], 1):
        out.print()
        run_text.finding(out, finding, f"violation {number} of {len(data['findings'])}")
    out.print()
    text_output.verdict(out, data["verdict"], data)
    out.print()
