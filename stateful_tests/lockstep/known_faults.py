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
    """A fault that releases of an engine have.

    id: the label under which reports name it; says: one or two sentences.
    first: the first release that has it; fixed: the first that does not, None where the newest has it still.
    way: only `+way` has it; only: settings that it takes. unified: `first` and `fixed` of `+unified`, where
        they differ.
    clauses: those that it violates; ends_server: the scheduler process ends.
    verdict: whether upstream knows it ("threads end before it": what was searched is older than the first
        release; "not searched": nobody has looked); note: further remarks.
    reports, cause: numbers of upstream's issues and pull requests, of the fault and of its cause.
    traces: files of fixtures/releases; with_another: those that need another known fault too, and conform
        with either's mend.
    test: one of its reports folder that upstream could merge.
    elsewhere: from which release on its traces show another clause.
    passed_over: a check does not look for its clause, or it would find nothing else.
    """

    id: str
    engine: EngineName
    says: str
    first: str
    verdict: Verdict
    clauses: tuple[str, ...]
    fixed: str | None = None
    way: str = ""
    only: str = ""
    unified: dict[Literal["first", "fixed"], str] = {}
    ends_server: bool = False
    reports: tuple[int, ...] = ()
    cause: tuple[int, ...] = ()
    note: str = ""
    traces: tuple[str, ...] = ()
    with_another: tuple[str, ...] = ()
    test: str | None = None
    elsewhere: dict[str, str] = {}
    passed_over: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError where fields contradict each other."""
        fixed = () if self.fixed is None else (self.fixed,)
        for version in (self.first, *fixed, *self.unified.values(), *self.elsewhere):
            _order(version)
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
        """The fault as releases with that tree have it; "unified" is the other tree of a release."""
        if tree != "unified" or not self.unified:
            return self
        return msgspec.structs.replace(self, unified={}, elsewhere={}, **self.unified)

    def is_in(self, release: str) -> bool:
        """Whether a release has it. Raises ValueError where `release` is no version."""
        if self.fixed is None:
            return _order(self.first) <= _order(release) and looked_for(self.engine, release)
        return _order(self.first) <= _order(release) < _order(self.fixed)

    def shown(self, clause: str, release: str) -> str | None:
        """Return what a trace of `clause` violates in that release; None: it conforms."""
        dates: dict[str, str | None] = {self.first: clause}
        if self.fixed is not None:
            dates[self.fixed] = None
        dates |= self.elsewhere
        past = [since for since in dates if _order(since) <= _order(release)]
        return dates[max(past, key=_order)] if past else None

    @property
    def upstream(self) -> str:
        """Say what upstream knows of it, such as "known: #26919; fixed in 0.5.16"."""
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
        """The fault and what upstream knows of it, in a line."""
        return f"{self.says} ({self.upstream})"


class _File(msgspec.Struct, forbid_unknown_fields=True):
    fault: list[KnownFault]


def read(path: Path) -> dict[str, KnownFault]:
    """The faults of a file by id. Raises UnusableImplementation that names the file and the field."""
    try:
        found = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), _File).fault
    except (OSError, ValueError) as error:  # of tomllib and msgspec as well
        raise UnusableImplementation(f"{path}: {error}") from error
    by_id = {fault.id: fault for fault in found}
    if len(by_id) < len(found):
        raise UnusableImplementation(f"{path}: two faults have one id")
    for fault in found:
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
    """The faults of known.toml by id, in its order. Raises UnusableImplementation."""
    return read(PATH)


def traces(engine: str) -> Iterator[tuple[Path, KnownFault]]:
    """The traces of an engine's known faults, with their faults."""
    for fault in known_faults().values():
        if fault.engine == engine:
            yield from ((FOLDER / path, fault) for path in fault.traces)


def label(release: str, fault: str) -> str | None:
    """The id of a fault if that release has it, else None; None also where `release` is no version.

    Raises KeyError where known.toml lacks the id.
    """
    known = known_faults()[fault]
    return fault if _VERSION.match(release) and known.is_in(release) else None


def looked_for(engine: str, release: str) -> bool:
    """Somebody has looked for the faults of this release: it is neither before the oldest that is driven nor
    after the newest."""
    oldest, newest = releases(engine)[0], releases(engine)[-1]
    if not _VERSION.match(release):
        return False
    return _order(oldest)[:3] <= _order(release)[:3] <= _order(newest)[:3]


def nearest(engine: str, release: str) -> str:
    """The newest driven release that is not after this one; else the oldest."""
    driven = releases(engine)
    if not _VERSION.match(release):
        return driven[-1]
    return next((r for r in reversed(driven) if _order(r) <= _order(release)), driven[0])


def ways_of(trace: str) -> list[str]:
    """How a release is driven in a trace of a known fault: its folder says it."""
    return list(SystemSpec.parse(trace.partition("/")[0]).ways)


def of_system(engine: str, release: str, ways: Iterable[str] = ()) -> Iterator[KnownFault]:
    """The faults that a release, driven in these ways ("unified", "overlap", "async", ...), is known to have
    and that a trace shows; of their traces those that need no other way."""
    ways = {*ways}
    if not _VERSION.match(release):
        return
    for fault in known_faults().values():
        fault = fault.on(_tree(ways))
        if fault.engine != engine or not {fault.way} <= {"", *ways} or not fault.is_in(release):
            continue
        apart = APART & ways
        shown = [path for path in fault.traces if apart <= {*ways_of(path)} <= ways]
        if shown:
            yield msgspec.structs.replace(fault, traces=tuple(shown))


def has_in_ways(fault: KnownFault, release: str, ways: Iterable[str]) -> bool:
    """Whether a release that is driven in these ways has the fault; one without a trace counts where it needs
    no other way."""
    fault = fault.on(_tree(ways))
    if not {fault.way} <= {"", *ways} or not fault.is_in(release):
        return False
    apart = APART & {*ways}
    return not fault.traces or any(apart <= {*ways_of(path)} <= {*ways} for path in fault.traces)


def passed_over(engine: str, release: str, ways: Iterable[str] = ()) -> dict[str, str]:
    """Clause id -> the known fault for which a check of that release, driven in these ways, does not look for
    it, and its trace."""
    tree = _tree(ways)
    return {
        clause: f"#{fault.reports[0]}, {fault.traces[0]}"
        for fault in known_faults().values()
        if fault.passed_over and fault.engine == engine and fault.on(tree).is_in(release)
        for clause in fault.clauses
    }


def releases(engine: str) -> Sequence[str]:
    """The releases of an engine that are driven, the oldest first."""
    return engines.engine(engine).releases


def _tree(ways: Iterable[str]) -> str | None:
    """The radix tree that these ways choose, by its name in `KnownFault.unified`."""
    return "unified" if "unified" in ways else None


@cache
def _order(version: str) -> tuple[int, ...]:
    found = _VERSION.match(version)
    if found is None:
        raise ValueError(f"{version!r} is not a version such as 0.5.12 or 0.5.12.post1")
    return tuple(int(part or 0) for part in found.groups())
