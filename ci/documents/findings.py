"""The document of faults found in real releases: fixtures/releases/FINDINGS.md, from known.toml."""

from __future__ import annotations

import re
from functools import cache
from pathlib import PurePath
from typing import TYPE_CHECKING

from ci.documents import upstream_reports
from ci.documents.related_faults import avoidance_text, related_faults
from impl.bugs import BUGS
from impl.engines import engine
from impl.system_spec import ENGINES, SystemSpec, ways_in
from stateful_tests.lockstep.known_faults import (
    FOLDER,
    KnownFault,
    has_in_ways,
    known_faults,
    is_looked_for,
    releases,
    ways_of,
)
from stateful_tests.traces.trace_files import load

if TYPE_CHECKING:
    from ci import Data

PATH = FOLDER / "FINDINGS.md"
_HEAD = """\
# Findings

Made from [known.toml](known.toml) by `kvspec spec --findings`. The faults of the newest releases come first.
A name leads to its trace, which `kvspec replay TRACE --impl sglang==VERSION` shows. "No report found" was
looked up in upstream's issues and pull requests, with one to four queries a row; the newest thread is of
2026-09-22. What is only "fixed" was not looked up.
"""
_COLUMNS = """\
| fault | releases | seen as | what happens | upstream |
| --- | --- | --- | --- | --- |
"""


def text() -> str:
    """Return the document."""
    parts = [_HEAD]
    for name in ENGINES:
        record = engine(name)
        faults = [fault for fault in known_faults().values() if fault.engine == name]
        rows = [_fault_row(fault, record.repository) for fault in faults]
        parts.append(f"## {record.title}\n\n{record.about}\n\n{_COLUMNS}{''.join(rows)}")
        if section := upstream_reports.section(name, record.title):
            parts.append(_with_links(section, record.repository))
    return "\n".join(parts)


def _fault_row(fault: KnownFault, repository: str) -> str:
    fault_names = [fault.id, *map(str, range(2, len(fault.traces) + 1))]
    names = [f"[{name}]({path})" for name, path in zip(fault_names, fault.traces)] or [fault.id]
    more = {"report": _report_text(fault), "test": fault.test}
    names += [f"[{what}](reports/{file})" for what, file in more.items() if file]
    where = _release_span(fault, f"`+{fault.way}`")
    where += f" ({fault.only})" if fault.only else ""
    upstream = _with_links(fault.upstream, repository)
    cells = " ".join(names), where, _seen_text(fault), fault.says, upstream
    return f"| {' | '.join(cells)} |\n"


def _with_links(text: str, repository: str) -> str:
    """Return the text with links in place of the numbers of issues."""
    return re.sub(r"#(\d+)", rf"[#\1](https://github.com/{repository}/issues/\1)", text)


def table() -> list[Data]:
    """Return the rows of the HTML page: one for each known fault, with every release that has it."""
    return [
        {
            "fault": fault,
            "releases": _release_text(fault),
            "span": _release_span(fault, f"+{fault.way}"),
            "seen": _seen_text(fault),
            "replays": _replay_commands(fault),
            "upstream": re.split(r"#(\d+)", fault.upstream),  # text, number, text, ...
            "repository": engine(fault.engine).repository,
        }
        for fault in known_faults().values()
    ]


IN_RELEASES = "in releases"
COPIED = "built in, as reported"
INVENTED = "built in, invented"


def named_bugs() -> list[Data]:
    """Return the bugs that can be put into the built-in implementation.

    kind: COPIED from a pull request or an issue of an engine, or INVENTED, so that a clause has a bug to
        detect: no user has met it.
    """
    return [
        {
            "id": bug.id,
            "kind": INVENTED if bug.source == "kvspec" else COPIED,
            "title": bug.title,
            "clause": bug.clause,
            "modes": ", ".join(mode.value for mode in bug.modes),
            "source": bug.source,
            "story": bug.story,
            "only": "",
        }
        for bug in BUGS.values()
    ]


def known_bugs() -> list[Data]:
    """Return the known faults for `kvspec bugs`.

    source: the releases that have the fault.
    replay: the commands that show it on the newest of them.
    """
    return [dict(row) for row in _known_bugs()]


@cache
def _known_bugs() -> list[Data]:
    return [
        {
            "id": fault.id,
            "kind": IN_RELEASES,
            "title": fault.says,
            "clause": _seen_text(fault),
            "source": f"{fault.engine} {_release_span(fault, f'+{fault.way}')}",
            "only": fault.only,
            "upstream": fault.upstream,
            "avoid": avoidance_text(fault),
            "see": ", ".join(related_faults(fault.id)),
            "story": [load(FOLDER / trace).story for trace in fault.traces],
            "replay": _replay_commands(fault),
            "report": _trace_link(_report_text(fault)),
            "test": _trace_link(fault.test),
        }
        for fault in known_faults().values()
    ]


def is_of(fault: str, release: str) -> bool:
    """Return whether a release, such as sglang==0.5.20, has a fault in any way to run; one with ways,
    such as vllm==0.33.0+offload, in these. Raises ValueError for a text that is no release."""
    spec = SystemSpec.parse(release)
    version = spec.version or ""
    if spec.engine not in ENGINES or not is_looked_for(spec.engine, version):
        raise ValueError(f"{release:.40}: not one of the releases that are driven")
    if unknown := {*spec.ways} - {*ways_in("+".join(engine(spec.engine).ways))}:
        raise ValueError(f"{release:.40}: {spec.engine} has no way +{min(unknown)}")
    known = known_faults()[fault]
    if known.engine != spec.engine:
        return False
    if not spec.ways:
        return any(known.on(tree).is_in(version) for tree in (None, "unified"))
    return has_in_ways(known, version, spec.ways)


def _trace_link(file: str | None) -> str:
    return "" if file is None else f"fixtures/releases/reports/{file}"


def _replay_commands(fault: KnownFault) -> list[str]:
    """Return the commands that replay its traces on the newest release that has it, in their ways."""
    newest = f"{fault.engine}=={_release_text(fault)[-1]}"
    return [
        f"kvspec replay @{PurePath(trace).stem} --impl {'+'.join([newest, *ways_of(trace)])}"
        for trace in fault.traces
    ]


def _release_text(fault: KnownFault) -> list[str]:
    return [version for version in releases(fault.engine) if fault.is_in(version)]


def _seen_text(fault: KnownFault) -> str:
    return ", ".join([*fault.clauses, *(["the server ends"] if fault.ends_server else [])])


def _report_text(fault: KnownFault) -> str | None:
    """Return the text of a bug report, which has the name of a trace."""
    names = (f"{path.rpartition('/')[2].removesuffix('.json')}.md" for path in fault.traces)
    return next((name for name in names if (FOLDER / "reports" / name).is_file()), None)


def _release_span(fault: KnownFault, way: str) -> str:
    """Return the first and the last release that has it, then the way that it takes, if any."""
    every = _release_text(fault)
    first, last = (re.sub(r"^(0\.\d\d)\.0$", r"\1", version) for version in (every[0], every[-1]))
    both = first if first == last else f"{first} to {last}"
    return f"{both} {way}" if fault.way else both
