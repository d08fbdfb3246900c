"""Known faults of releases: fixtures/releases/known.toml, the one place where a verdict stands."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from impl.adapter import UnusableImplementation
from impl import engines
from impl.system_spec import EngineName, SystemSpec

FOLDER = Path(__file__).parents[2] / "fixtures" / "releases"
PATH = FOLDER / "known.toml"
# Ways to run with commands of their own: traces of others say nothing of them.
APART = frozenset({"hicache", "pair"})
_ID = re.compile(r"\b[a-z]+(?:-[a-z0-9]+){2,}\b")  # of another fault, in what is said of one
_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)(?:\.post(\d+))?")

Verdict = Literal[
    "known", "cause known", "none found", "threads end before it", "not searched", "fixed"
]


class KnownFault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A fault that releases of an engine have."""

    #: the label under which reports name it
    id: str
    engine: EngineName
    #: one or two sentences
    says: str
    #: the first release that has it
    first: str
    #: whether upstream knows it ("threads end before it": what was searched is older than the first
    #: release; "not searched": nobody has looked)
    verdict: Verdict
    #: clauses that it violates
    clauses: tuple[str, ...]
    #: the first release without it, None where the newest still has it
    fixed: str | None = None
    #: only `+way` has it; and a pair whose trace shows it, for a server of a pair may have what the way adds
    way: str = ""
    #: settings that it takes
    only: str = ""
    #: `first` and `fixed` of `+unified`, where they differ
    unified: dict[Literal["first", "fixed"], str] = {}
    #: the scheduler process ends
    ends_server: bool = False
    #: numbers of upstream's issues and pull requests, of the fault and of its cause
    reports: tuple[int, ...] = ()
    cause: tuple[int, ...] = ()
    #: further remarks
    note: str = ""
    #: files of fixtures/releases
    traces: tuple[str, ...] = ()
    #: traces that need another known fault too, and conform with a mend of either
    with_another: tuple[str, ...] = ()
    #: test in the folder of reports that upstream could merge
    test: str | None = None
    #: from which release on its traces show another clause
    elsewhere: dict[str, str] = {}
    #: a check does not look for its clause, or it would find nothing else
    passed_over: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError where fields contradict each other."""
        fixed = () if self.fixed is None else (self.fixed,)
        for version in (self.first, *fixed, *self.unified.values(), *self.elsewhere):
            _version_key(version)
        if (self.verdict == "known") != bool(self.reports):
            raise ValueError(f"{self.id}: `reports` goes with the verdict known, and only with it")
        if (self.verdict == "cause known") != bool(self.cause):
            raise ValueError(
                f"{self.id}: `cause` goes with the verdict cause known, and only with it"
            )
        if not {*self.with_another} <= {*self.traces}:
            raise ValueError(f"{self.id}: `with_another` names a file that is not in `traces`")
        if self.verdict == "fixed" and self.fixed is None:
            raise ValueError(f"{self.id}: the verdict is fixed, and `fixed` names no release")

    def on(self, tree: str | None) -> KnownFault:
        """Return the fault in releases with that tree; "unified" is the other tree of a release."""
        if tree != "unified" or not self.unified:
            return self
        return msgspec.structs.replace(self, unified={}, elsewhere={}, **self.unified)

    def is_in(self, release: str) -> bool:
        """Return whether a release has it. Raises ValueError where `release` is no version."""
        if self.fixed is None:
            return _version_key(self.first) <= _version_key(release) and is_looked_for(self.engine, release)
        return _version_key(self.first) <= _version_key(release) < _version_key(self.fixed)

    def clause_shown(self, clause: str, release: str) -> str | None:
        """Return the clause that a trace of `clause` violates in that release, None where it conforms."""
        dates: dict[str, str | None] = {self.first: clause}
        if self.fixed is not None:
            dates[self.fixed] = None
        dates |= self.elsewhere
        past = [since for since in dates if _version_key(since) <= _version_key(release)]
        return dates[max(past, key=_version_key)] if past else None

    @property
    def upstream(self) -> str:
        """Return upstream's knowledge of it, such as "known: #26919; fixed in 0.5.16"."""
        numbers = ", ".join(f"#{number}" for number in self.reports or self.cause)
        verdict = {
            "known": f"known: {numbers}",
            "cause known": f"cause known: {numbers}; of this symptom no report found",
            "none found": "no report found",
            "threads end before it": "the threads that were searched end before it",
            "not searched": "reports not searched",
            "fixed": "",
        }[self.verdict]
        parts = [verdict, f"fixed in {self.fixed}" if self.fixed else "", self.note]
        return "; ".join(filter(None, parts))

    @property
    def summary(self) -> str:
        """Return the fault and upstream's knowledge of it, in a line."""
        return f"{self.says} ({self.upstream})"


class _File(msgspec.Struct, forbid_unknown_fields=True):
    fault: list[KnownFault]


def read(path: Path) -> dict[str, KnownFault]:
    """Return the faults of a file by id. Raises UnusableImplementation that names the file and the
    field."""
    try:
        faults = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), _File).fault
    except (OSError, ValueError) as error:  # of tomllib and msgspec as well
        raise UnusableImplementation(f"{path}: {error}") from error
    by_id = {fault.id: fault for fault in faults}
    if len(by_id) < len(faults):
        raise UnusableImplementation(f"{path}: two faults have one id")
    for fault in faults:
        for name in _ID.findall(f"{fault.says} {fault.note}"):
            if name not in by_id:
                near = " or ".join(get_close_matches(name, by_id, 2))
                hint = f"is it {near}?" if near else "words with two hyphens are ids"
                raise UnusableImplementation(
                    f"{path}: {fault.id} names {name!r}, and there is none: {hint}"
                )
    return by_id


@cache
def known_faults() -> dict[str, KnownFault]:
    """Return the faults of known.toml by id, in its order. Raises UnusableImplementation."""
    return read(PATH)


def traces(engine: str) -> Iterator[tuple[Path, KnownFault]]:
    """Return the traces of an engine's known faults, with their faults."""
    for fault in known_faults().values():
        if fault.engine == engine:
            yield from ((FOLDER / path, fault) for path in fault.traces)


def label(release: str, fault: str) -> str | None:
    """Return the id of a fault if that release has it, else None; None also where `release` is no
    version.

    Raises KeyError where known.toml lacks the id.
    """
    known = known_faults()[fault]
    return fault if _VERSION.match(release) and known.is_in(release) else None


def is_looked_for(engine: str, release: str) -> bool:
    """Return whether the faults of this release were searched for: it lies between the oldest driven
    release and the newest."""
    oldest = releases(engine)[0]
    newest = releases(engine)[-1]
    if not _VERSION.match(release):
        return False
    return _version_key(oldest)[:3] <= _version_key(release)[:3] <= _version_key(newest)[:3]


def nearest(engine: str, release: str) -> str:
    """Return the newest driven release that is not after this one; else the oldest."""
    driven = releases(engine)
    if not _VERSION.match(release):
        return driven[-1]
    return next((r for r in reversed(driven) if _version_key(r) <= _version_key(release)), driven[0])


def ways_of(trace: str) -> list[str]:
    """Return the ways in which a known fault's trace is driven, by the name of its folder."""
    return list(SystemSpec.parse(trace.partition("/")[0]).ways)


def of_system(engine: str, release: str, ways: Iterable[str] = ()) -> Iterator[KnownFault]:
    """Return the faults that a release, driven in these ways ("unified", "overlap", "async", ...), is
    known to have and that a trace shows; of their traces those that need no other way."""
    ways = {*ways}
    if not _VERSION.match(release):
        return
    for fault in known_faults().values():
        fault = fault.on(_tree_of_ways(ways))
        if fault.engine != engine or not _is_of(fault, ways) or not fault.is_in(release):
            continue
        apart = APART & ways
        traces = [path for path in fault.traces if apart <= {*ways_of(path)} <= ways]
        if traces:
            yield msgspec.structs.replace(fault, traces=tuple(traces))


def has_in_ways(fault: KnownFault, release: str, ways: Iterable[str]) -> bool:
    """Return whether a release driven in these ways has the fault. A fault without a trace counts where
    it needs no other way."""
    fault = fault.on(_tree_of_ways(ways))
    if not _is_of(fault, {*ways}) or not fault.is_in(release):
        return False
    apart = APART & {*ways}
    return not fault.traces or any(apart <= {*ways_of(path)} <= {*ways} for path in fault.traces)


def _is_of(fault: KnownFault, ways: set[str]) -> bool:
    """Return whether these ways add what a fault takes."""
    in_a_pair = "pair" in ways and any("pair" in ways_of(path) for path in fault.traces)
    return fault.way in ("", *ways) or in_a_pair


def skipped_clauses(engine: str, release: str, ways: Iterable[str] = ()) -> dict[str, str]:
    """Return clause id -> (known fault, its trace) for each clause that a check of that release, driven
    in these ways, skips because of a known fault."""
    tree = _tree_of_ways(ways)
    return {
        clause: f"#{fault.reports[0]}, {fault.traces[0]}"
        for fault in known_faults().values()
        if fault.passed_over and fault.engine == engine and fault.on(tree).is_in(release)
        for clause in fault.clauses
    }


def releases(engine: str) -> Sequence[str]:
    """Return the driven releases of an engine, the oldest first."""
    return engines.engine(engine).releases


def _tree_of_ways(ways: Iterable[str]) -> str | None:
    """Return the radix tree that these ways choose, by its name in `KnownFault.unified`."""
    return "unified" if "unified" in ways else None


@cache
def _version_key(version: str) -> tuple[int, ...]:
    match = _VERSION.match(version)
    if match is None:
        raise ValueError(f"{version!r} is not a version such as 0.5.12 or 0.5.12.post1")
    return tuple(int(part or 0) for part in match.groups())
