"""Trace files: reading and saving one, saving those of findings, and --save."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import click

from ci.commands.shared import Unusable, unusable, write_beside
from stateful_tests.lockstep.exit_codes import Ending

if TYPE_CHECKING:
    from ci import Data
    from reference.system_kinds import AnyCommand
    from stateful_tests.check.known_faults.masks import Standing
    from stateful_tests.lockstep.check_results import Finding
    from stateful_tests.lockstep.run_results import Trace

# The modules behind the commands import torch; they are loaded by the commands that need them.

_Command = Callable[..., Any]  # what click calls


def _save_folder(_: click.Context, __: click.Parameter, save_dir: str) -> str:
    if os.path.lexists(save_dir) and not os.path.isdir(save_dir):
        raise Unusable(f"--save {save_dir}: is not a directory")
    return save_dir


def save_option(about: str | None = None) -> Callable[[_Command], _Command]:
    """Return the option --save, for a command that takes `save_dir`."""
    return click.option(
        "--save",
        "save_dir",
        default="traces",
        show_default=True,
        metavar="DIR",
        callback=_save_folder,
        help=about,
    )


def save_trace(trace: Trace, path: Path, option: str = "") -> None:
    from stateful_tests.traces import trace_files as traces

    try:
        with unusable(f"{option}{path}: ", traces.TraceError):
            traces.save(trace, path)
    except OSError as error:
        raise Unusable(f"{option}{path}: {error.strerror}") from error


def load_trace(path: str) -> Trace:
    """Return the trace in a file. Raises Unusable."""
    from stateful_tests.traces.trace_files import TraceError, load

    with unusable("", TraceError):
        trace: Trace = load(path)
    return trace


def replay_command(path: str, options: str) -> str:
    return f"kvspec replay {shlex.quote(path)} {options}"


def save_traces(
    findings: Sequence[Finding], reports: list[Data], folder: str, options: str, html: bool = False
) -> None:
    """Save the trace of each finding, with its page if `html`, and note where, or why that failed."""
    from ci.report import report_data as report
    from ci.report.pages import trace_page
    from stateful_tests.traces import trace_files as traces

    for group, finding_data in zip(report.group_by_cause(findings), reports, strict=True):
        saved: dict[tuple[AnyCommand, ...], str] = {}
        for clause, finding in zip(
            finding_data["clauses"], report.findings_to_save(group), strict=True
        ):
            name, trace = report.trace_to_save(finding.name, finding.run.trace, finding.run.system)
            path = Path(folder, name)
            try:
                if trace.commands not in saved:
                    traces.save(trace, path)
            except (OSError, traces.TraceError) as error:
                finding_data["not_saved"] = f"{path}: {error}"
                break
            clause["saved"] = saved.setdefault(trace.commands, str(path))
        finding_data["saved"] = finding_data["clauses"][0]["saved"]
        if finding_data["saved"] is None:
            continue
        finding_data["replay"] = replay_command(finding_data["saved"], options)
        if html:
            page_file = Path(finding_data["saved"]).with_suffix(".html")
            page = trace_page.page(finding_data, group[0].run)
            if write_beside(page_file, page, "--html", {"exit_code": Ending.VIOLATED}):
                finding_data["page"] = str(page_file)


class Saved:
    """Saves traces as soon as they are found: `campaign.run` calls it with all traces so far.

    A clause is reported on stderr when its trace is saved; with a base, when the base has been driven
    through the trace. A smaller trace replaces it in silence, and so does one of its own that the
    report may leave out.

    base: the name of the base.
    """

    def __init__(
        self, system: str, folder: str, say: Callable[[str], None], base: str | None = None
    ) -> None:
        self._system = system
        self._folder = folder
        self._say = say
        self._base = base
        self._saved: dict[Path, Trace] = {}
        self._reported: set[str] = set()
        self._unreported: set[Path] = set()

    def __call__(
        self, traces: dict[str, Trace], standings: Mapping[str, Standing] = MappingProxyType({})
    ) -> None:
        """Save new traces and report their clauses.

        standings: the base's answers about clauses.
        """
        from ci.report import report_data as report
        from stateful_tests.traces import trace_files

        together: dict[tuple[object, ...], list[str]] = {}
        for clause, trace in traces.items():
            together.setdefault((trace.geometry, trace.mode, trace.commands), []).append(clause)
        for first, *also in together.values():
            name, trace = report.trace_to_save(first, traces[first], self._system)
            path = Path(self._folder, name)
            if self._saved.get(path) != trace:
                try:
                    trace_files.save(trace, path)
                except (OSError, trace_files.TraceError):
                    continue  # the report says so
                if path not in self._saved:
                    self._unreported.add(path)
                self._saved[path] = trace
            compared = [standings[clause] for clause in (first, *also) if clause in standings]
            if path in self._unreported and (self._base is None or len(compared) == 1 + len(also)):
                self._unreported.remove(path)
                self._report([first, *also], compared)

    def _report(self, clauses: list[str], standings: list[Standing]) -> None:
        """Report findings that were not reported before. No file is named: a smaller trace may replace
        the trace, under another name."""
        if not {*clauses} <= self._reported:
            labels = {"NEW": ", NEW against ", "KNOWN": ", also in "}
            names = {standing.name for standing in standings}
            label = labels.get(names.pop(), "") if len(names) == 1 else ""
            against_base = f"{label}{self._base}" if label else ""
            found = f"found {', '.join(clauses)}{against_base}"
            self._say(f"{found}: a trace is saved in {self._folder}, and is being minimised")
            self._reported |= {*clauses}

    def tidy(self, reports: list[Data]) -> None:
        """Remove intermediate files that are part of another file now."""
        if any(found.get("not_saved") for found in reports):
            return  # a full disk: what lies there is all that there is
        reported = {Path(clause["saved"]) for found in reports for clause in found["clauses"]}
        for path in self._saved.keys() - reported:
            path.unlink(missing_ok=True)
