"""`python -m ci.mutants`: put small faults in, one at a time, and see what notices each. For a checkout."""

from __future__ import annotations

import difflib
import shlex
import statistics
import sys
from collections import defaultdict
from contextlib import closing
from functools import partial

import click
from rich.console import Console

from ci import Data, cli
from ci.commands.options.worker_options import executor
from ci.commands.shared import ReportOut, json_option, unusable
from ci.mutants import mutant_judges
from ci.mutants.mutant_judges import ROOT, Noticed
from ci.mutants.mutation_operators import Mutant
from ci.report import text_output
from ci.report.progress_line import Progress
from stateful_tests.check import check_plans
from stateful_tests.lockstep.exit_codes import ending


@click.command()
@click.option(
    "--only",
    multiple=True,
    metavar="PATH|FILE:FUNCTION|NAME",
    help="Mutants of this file, folder or function, or the one that is called so (repeatable).",
)
@click.option(
    "--sample", "size", type=click.IntRange(1), metavar="N", help="Draw so many. [default: all]"
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Where random decisions start from."
)
@click.option(
    "--tier",
    type=click.Choice(["smoke", "pr"]),
    default="smoke",
    show_default=True,
    help="How much random runs do before a mutant has survived them.",
)
@click.option(
    "--time-limit",
    type=click.FloatRange(1),
    default=300,
    show_default=True,
    metavar="SECONDS",
    help="For one mutant: one that gives no answer counts as noticed.",
)
@click.option("--again", is_flag=True, help="Judge those as well that accepted.json has.")
@click.option(
    "-j", "--jobs", type=click.IntRange(1), help="Processes to use; as many as there are cores."
)
@json_option
def mutants(
    out: ReportOut, only: tuple[str, ...], size: int | None, seed: int, tier: str, time_limit: float,
    again: bool, jobs: int | None,
) -> int:  # fmt: skip
    """Change the built-in implementation, the rules and the clauses, one small change at a time, and see what
    notices each: random runs, the fixtures of the named bugs, tests.

    Ends with 1 if one survives that ci/mutants/accepted.json does not have, with 2 if unchanged code is
    noticed as well.
    """
    with unusable("", mutant_judges.NoMutants):
        drawn, total = mutant_judges.sample(only, size, seed)
        accepted = mutant_judges.accepted_mutants()
    plan = check_plans.plan(tier, seed=seed)
    to_judge = [mutant for mutant in drawn if again or mutant.name not in accepted]
    rows = [_row(mutant, accepted[mutant.name], None) for mutant in drawn if mutant not in to_judge]
    interrupted = False
    mutant_judges.prepare()
    with executor(jobs, None) as where, Progress() as progress:
        judged = where.map(partial(mutant_judges.judge, plan, time_limit), to_judge)
        areas: dict[mutant_judges.Area, None] = {}  # in which something was noticed
        try:
            with closing(judged):
                for number, (mutant, noticed) in enumerate(zip(to_judge, judged), 1):
                    row = _row(mutant, accepted.get(mutant.name, ""), noticed)
                    rows.append(row)
                    if noticed.by and (area := mutant_judges.area_of(mutant)):
                        areas[area] = None
                    if row["verdict"] == "survived":
                        progress.say(
                            f"survived: {row['path']}:{row['line']} {mutant.name.partition(' ')[2]}"
                        )
                    progress.line(f"{number} of {len(to_judge)} mutants judged")
            alarms = where.map(partial(mutant_judges.notice_unchanged, plan, time_limit), areas)
            with closing(alarms), unusable("", mutant_judges.NoMutants):
                for area, alarm in zip(areas, alarms):
                    if alarm.by:
                        raise mutant_judges.NoMutants(
                            f"{area.folder}: {alarm.by} notices unchanged code as well ({alarm.where}):"
                            " no verdict counts"
                        )
        except KeyboardInterrupt:
            interrupted = True
    rows.sort(key=lambda row: (row["path"], row["line"], row["name"]))
    counts = {
        v: sum(row["verdict"] == v for row in rows) for v in ("noticed", "accepted", "survived")
    }
    end = ending(interrupted=interrupted, violated=not interrupted and counts["survived"] > 0)
    data: Data = {
        "format": "kvspec-mutants", "version": 1, "exit_code": end, "seed": seed, "tier": tier, "of": total,
        "drawn": len(drawn), "interrupted": interrupted, **counts, "mutants": rows,
    }  # fmt: skip
    _text(out.console, data)
    return out.end(data)


def _row(mutant: Mutant, reason: str, noticed: Noticed | None) -> Data:
    source = (ROOT / mutant.path).read_bytes()
    old, new = (text.decode().splitlines() for text in (source, mutant.apply_to(source)))
    diff = list(difflib.unified_diff(old, new, n=0, lineterm=""))[3:]
    if noticed and noticed.by:
        verdict = "noticed"
    else:
        verdict = "accepted" if reason else "survived"
    judgement = {} if noticed is None else {name: getattr(noticed, name) for name in noticed.__slots__}
    return {
        "name": mutant.name,
        "path": mutant.path,
        "line": mutant.line,
        "verdict": verdict,
        "reason": reason,
        "diff": diff,
        **judgement,
    }


def _text(out: Console, data: Data) -> None:
    """Print the verdict of a session: the counts, each survivor with its change, and by what the others were
    noticed."""
    done = len(data["mutants"])
    counts = f"{data['noticed']} noticed, {data['accepted']} accepted, {data['survived']} survived"
    drawn = f"{done} of {data['of']} mutants (seed {data['seed']}, tier {data['tier']})"
    left = f"; interrupted, {data['drawn'] - done} were not judged" if data["interrupted"] else ""
    text_output.verdict(out, f"{drawn}: {counts}{left}", data)
    for row in (row for row in data["mutants"] if row["verdict"] == "survived"):
        out.print()
        text_output.say(out, f"SURVIVED {row['path']}:{row['line']}", style="bold")
        for line in row["diff"]:
            text_output.say(out, f"  {line}", "red" if line.startswith("-") else "green", whole=True)
        text_output.say(
            out, f"  again: python -m ci.mutants --only {shlex.quote(row['name'])}", whole=True
        )
    by: dict[str, list[Data]] = defaultdict(list)
    for row in (row for row in data["mutants"] if row["verdict"] == "noticed"):
        by[row["by"]].append(row)
    if by:
        noticed_table = text_output.table(
            "noticed by", "mutants", "median commands", right=("mutants", "median commands")
        )
        for name, rows in sorted(by.items(), key=lambda found: -len(found[1])):
            after = [row["after"] for row in rows if row["after"]]
            noticed_table.add_row(name, str(len(rows)), f"{statistics.median(after):g}" if after else "")
        out.print()
        out.print(noticed_table)
    if data["survived"]:
        out.print()
        text_output.say(
            out,
            "A survivor is a hole: a test, a clause, or a draw is missing. One that changes nothing that"
            " could be noticed goes by its name into ci/mutants/accepted.json, with the reason.",
        )


if __name__ == "__main__":
    sys.exit(cli.run(command=mutants, name="mutants"))
