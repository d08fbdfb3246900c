"""Prints the reports of `kvspec check`, from the dictionaries of `ci.report.report_data`."""

from rich.console import Console
from rich.text import Text

from ci import Data
from impl.system_spec import SystemSpec
from reference.failures import count_text
from ci.report.text_output import print_labels, say, sizes, table, verdict
from ci.report.run_text import finding


NAMED = 6  # known faults in one state that their common line names; it counts the others


def check(out: Console, data: Data, *, detailed: bool = False) -> None:
    """Print the report of `kvspec check`: verdict, violations, coverage.

    detailed: with all counts.
    """
    red = [way for way in data.get("ways", ()) if way["exit_code"]]
    below = "".join(f"; {_way_result(way)}, below" for way in red)
    verdict(out, f"{data['implementation']}: {data['said']}{below}", data)
    unasked = [f"{clause['id']} ({clause['waived']})" for clause in data["clauses"] if clause["waived"]]
    facts = {"driven": data["driven"], **data["beside"], "not checked": "\n".join(unasked)}
    print_labels(out, {label: text for label, text in facts.items() if text})
    base = data["base"]["implementation"] if data["base"] else None
    _new_findings(out, data["findings"], base, detailed=detailed)
    _old_findings(out, data["findings"], base)
    if data["known"]:
        out.print()
        spec = SystemSpec.parse(data["implementation"])
        driven_as_base = base is not None and spec.version is not None
        _print_known_faults(out, data, spec.engine if driven_as_base else str(spec), detailed=detailed)
    out.print()
    if detailed:
        _print_counts(out, data)
    elif data["incomplete"] and not any(map(_is_new, data["findings"])):
        # Below new findings the situations would bury them.
        _print_missing(out, data["situations"], 10)
    say(out, f"{data['tier']}, seed {data['seed']}: {_reached_text(data, '' if detailed else ' (-v)')}")
    for way in data.get("ways", ()):
        if way["exit_code"] or detailed:
            out.print()
            check(out, way, detailed=detailed)


def _way_result(data: Data) -> str:
    """Return the result of another way, such as "+offload violates PUB-1"."""
    way = SystemSpec.parse(data["implementation"]).way
    result, _, _ = data["said"].partition("; ")
    return f"{f'+{way}' if way else 'plain'} {result}"


def _is_new(reported: Data) -> bool:
    """Return whether a finding fails the check: neither the base nor another release has it."""
    return not (reported["also_in"] or reported["known_elsewhere"])


def _new_findings(out: Console, findings: list[Data], base: str | None, *, detailed: bool) -> None:
    """Print each finding that fails the check, with its trace. Findings beside the first are often the same
    bug: their steps are left out, unless a base shows that they are new."""
    new = [*filter(_is_new, findings)]
    for number, new_finding in enumerate(new, 1):
        out.print()
        ordinal = f" {number} of {len(new)}" if len(new) > 1 else ""
        if new_finding["flaky"]:
            kind = "flaky"
        else:
            kind = "NEW" if base else "violation"
        against = f" against {base}" if base else ""
        folded = number > 1 and base is None and not detailed
        finding(out, new_finding, f"{kind}{ordinal}{against}", detailed=detailed, folded=folded)
    if len(new) > 1 and base is None and not detailed:
        out.print()
        say(out, "often one bug violates several clauses: the first comes first. -v has the steps of all")


def _old_findings(out: Console, findings: list[Data], base: str | None) -> None:
    """Print a line for each finding that fails no check: the base has it, or another release."""
    old = [old_finding for old_finding in findings if old_finding["also_in"]]
    if old:
        out.print()
        say(out, f"also in {base} (other bugs that break the same clause may be hidden)", "bold")
    for old_finding in old:
        reason = f" (no witness: {old_finding['no_witness']})" if old_finding["no_witness"] else ""
        say(out, f"  {_saved_files(old_finding)}{reason}", whole=True)
    elsewhere = [old_finding for old_finding in findings if old_finding["known_elsewhere"]]
    if elsewhere:
        out.print()
        say(out, f"{base} conforms in these traces, and releases show them as known faults", "bold")
    for old_finding in elsewhere:
        say(out, f"  {_saved_files(old_finding)} ({old_finding['looked_up']['text']})", whole=True)


def _saved_files(reported: Data) -> str:
    """Return the clauses of a finding, and the file of its trace."""
    names = ", ".join(clause["id"] for clause in reported["clauses"])
    return f"{names}: {reported['saved'] or reported['not_saved']}"


def _reached_text(data: Data, hint: str) -> str:
    """Return how much of the plan was carried out, and what it reached.

    hint: the option that shows more.
    """
    required = data["situations"]["asked"]
    clauses = len(data["clauses"])
    reached = data["situations"]["reached"]
    parts = []
    if reached or required:
        parts.append(f"{reached} of {required} situations" if required else f"{reached} situations")
    if data["unreached"] or not required:
        parts.append(f"{clauses - len(data['unreached'])} of {clauses} clauses")
    done = f"{_plan_share(data)}; {', '.join(parts)} reached{hint}"
    return f"{done}; texts of up to {data['longest']} tokens" if data["longest"] else done


def _plan_share(data: Data) -> str:
    """Return how many of the planned commands or runs were carried out."""
    if data["commands_asked"]:
        planned = data["commands_asked"]
        done_count = data["commands_carried_out"]
        unit = "commands"
    else:
        planned = data["examples_planned"] or 0
        done_count = data["examples"]
        unit = "runs"
    if done_count >= planned:
        return f"{planned:,} {unit}"
    reason = " (ended early after a finding: nothing else came up)" if data["stopped_early"] else ""
    return f"{done_count:,} of {planned:,} {unit}{reason}"


def _print_known_faults(out: Console, data: Data, release: str, *, detailed: bool) -> None:
    """Print the known faults of a release: a line for each that the tree shows otherwise or no more,
    and one for all others."""
    faults_by_state: dict[str, list[str]] = {}  # state -> faults
    for fault in data["known"]:
        has_own_line = fault["instead"] or fault["fixed_in_part"] or detailed
        if (fault["masked"] or fault["elsewhere"]) and not has_own_line:
            faults_by_state.setdefault(fault["state"], []).append(fault["id"])
            continue
        among = f" (some of them may be {' or '.join(fault['among'])})" if fault["among"] else ""
        times = f", met {count_text(fault['times'], 'time')}{among}" if fault["times"] else ""
        if times and not fault["masked"]:
            runs = count_text(fault["times"], "run")
            times = f"; in {runs} the base shows it or another, and this tree violates a clause of theirs"
        if fault["instead"]:
            times += f"; where the base shows it, this tree violates {', '.join(fault['instead'])}"
        head = f"known: {fault['id']} ({', '.join(fault['clauses'])}), {fault['state']}{times}"
        if detailed:
            description = f"{fault['says']} ({fault['upstream']})"
        else:
            description, _, _ = fault["says"].partition(". ")
        say(out, f"{head}: {description}")
    for state, names in faults_by_state.items():
        faults_are = "faults of {} are" if len(names) > 1 else "fault of {} is"
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        fault_names = f"{', '.join(names[:NAMED])}{more}"
        say(out, f"{len(names)} known {faults_are.format(release)} {state}: {fault_names} (-v)")


def _print_counts(out: Console, data: Data) -> None:
    """Print what was planned and done, by machine, clause, refusal, kind of command and situation."""
    if data["commands_asked"]:
        plan = f"{data['commands_asked']:,} commands carried out, in runs of up to {data['steps_asked']}"
    else:
        plan = f"{data['examples_asked']} runs for each row below, of up to {data['steps_asked']} commands"
    if data["time_limit_s"]:
        plan += f", time limit {data['time_limit_s']:g} s"
    words = {"plan": plan, "presets": ", ".join(data["presets"])}
    if data["presets_fitted"]:
        words["fitted"] = "; ".join(
            f"{name} with {sizes(geometry)}" for name, geometry in data["presets_fitted"].items()
        )
    if left_out := data["machines_left_out"] + data["presets_left_out"]:
        words["left out"] = (
            f"{', '.join(left_out)} (not offered, or the same as another when fitted)"
        )
    print_labels(out, words)
    out.print()
    numbers = ("runs", "commands, refused too", "commands/s")
    machines = table("machine", "preset", "mode", *numbers, right=numbers)
    started_machines = [m for m in data["machines"] if m["commands"]]
    columns = ("machine", "preset", "mode", "examples", "commands", "commands_per_s")
    for row in started_machines:
        machines.add_row(*(str(row[column]) for column in columns))
    total = (data["examples"], data["commands"], data["commands_per_s"])
    machines.add_row("all", "", "", *map(str, total), style="bold")
    out.print(machines)
    if waiting := len(data["machines"]) - len(started_machines):
        say(out, f"not started when the check ended: {waiting} more")
    out.print()
    counts = ("evaluated", "runs that trigger it")
    clauses = table("clause", "about", *counts, right=counts)
    for c in data["clauses"]:
        reached = str(c["runs_reached"]) if c["reached"] else "never"
        about = f"{c['title']} (not checked: {c['waived']})" if c["waived"] else c["title"]
        evaluated = "-" if c["waived"] else str(c["evaluated"])
        clauses.add_row(c["id"], Text(about), evaluated, "-" if c["waived"] else reached)
    out.print(clauses)
    out.print()
    if data["not_declared"]:
        say(out, f"not declared, so not checked: {', '.join(data['not_declared'])}")
    say(out, f"refusals met: {_count_table(data['refusals'])}")
    say(out, f"commands, refused ones too: {_count_table(data['commands_by_kind'])}")
    situations = data["situations"]
    for group in situations["left_out"]:
        say(out, f"lines of the corpus left out: {len(group['situations'])}, {group['why']}")
    _print_missing(out, situations, len(situations["missing"]))
    out.print()


def _count_table(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"


def _print_missing(out: Console, situations: Data, most: int) -> None:
    """Print situations that no run has reached: the first `most`, and how many more there are."""
    texts = situations["missing"]
    for text in texts[:most]:
        say(out, f"situation never reached: {text}", "yellow")
    if texts[most:]:
        say(out, f"and {len(texts) - most} more (-v)")


def releases(out: Console, data: Data) -> None:
    """Print which release violates which clauses, by machine: a Markdown table with unbroken lines."""
    machines = data["machines"]
    lines = [["release", "commands", "seconds", *machines, "not checked"]]
    for row in data["releases"]:
        name = SystemSpec.parse(row["implementation"]).short
        check = row["check"]
        if check is None:
            lines.append([name, "", "", *[""] * len(machines), f"all: {row['unusable']}"])
            continue
        violated = {
            m["machine"]: ", ".join(m["violated"]) or "-" for m in check["clauses_by_machine"]
        }
        unasked = ", ".join(clause["id"] for clause in check["clauses"] if clause["waived"])
        cells = [violated.get(machine, "") for machine in machines]
        lines.append([name, str(check["commands"]), f"{check['seconds']:.0f}", *cells, unasked])
    lines.insert(1, ["---", "---:", "---:", *["---"] * (len(machines) + 1)])
    widths = [*(max(map(len, column)) for column in zip(*(cells[:-1] for cells in lines))), 0]
    for cells in lines:
        say(out, f"| {' | '.join(map(str.ljust, cells, widths))} |", whole=True)
    out.print()
    count = f"{len(data['systems'])} releases"
    effort = f"{data['commands']} commands in {data['seconds']:.0f} s"
    if data["interrupted"]:
        count = f"{len(data['releases'])} of {count}"
        effort += "; interrupted"
    effort = f"{count}, {effort}"
    verdict(out, f"{data['tier']}, seed {data['seed']}: {effort}", data)
