"""Upstream's reports from reported.toml, and whether kvspec shows each."""

from __future__ import annotations

import tomllib
from typing import Literal

import msgspec

from impl.system_spec import EngineName
from stateful_tests.lockstep.known_faults import FOLDER, known_faults

PATH = FOLDER / "reported.toml"
_HEAD = """\
### Reports of {name}

What upstream has reported and was looked for, from [reported.toml](reported.toml). "Gone":
no release that is driven so has it; the planted fault that stands for it is found.

| reported | what happens | here |
| --- | --- | --- |
"""


class TierReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An entry."""

    engine: EngineName = "sglang"
    numbers: tuple[int, ...]
    says: str
    verdict: Literal["shown", "gone", "not met", "not reachable"]
    #: faults of known.toml that show it
    faults: tuple[str, ...] = ()
    why: str = ""
    #: those of the second tier's faults.toml
    planted: str = ""
    #: for a report that was not reproduced, the functions that it is about, and their calls in one
    #: check
    called: dict[str, int] = {}

    def __post_init__(self) -> None:
        """Raise ValueError where fields contradict each other."""
        if (self.verdict == "shown") != bool(self.faults):
            raise ValueError(
                f"{self.numbers}: `faults` go with the verdict shown, and only with it"
            )
        if (self.verdict == "not met") != any(self.called.values()):
            raise ValueError(
                f"{self.numbers}: `called` goes with the verdict not met: what its runs have called"
            )
        for fault in self.faults:
            if fault not in known_faults():
                raise ValueError(f"{self.numbers}: known.toml has no {fault!r}")


class _ReportFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    report: list[TierReport]


def upstream_reports() -> list[TierReport]:
    """Return all entries. Raises msgspec.ValidationError for a file that is wrong."""
    return msgspec.convert(tomllib.loads(PATH.read_text(encoding="utf-8")), _ReportFile).report


def section(engine: EngineName, name: str) -> str:
    """Return the table of FINDINGS.md of the engine called `name`, "" without an entry."""
    rows = [_row(report) for report in upstream_reports() if report.engine == engine]
    return _HEAD.format(name=name) + "".join(rows) if rows else ""


def _row(report: TierReport) -> str:
    numbers = ", ".join(f"#{number}" for number in report.numbers)
    verdict = f"shown: {', '.join(report.faults)}" if report.faults else report.verdict
    more = [report.why, f"planted: {report.planted}" if report.planted else ""]
    more += [f"`{name}`: {count:,} calls" for name, count in report.called.items()]
    return f"| {numbers} | {report.says} | {'; '.join(filter(None, [verdict, *more]))} |\n"
