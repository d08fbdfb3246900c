"""The parts of an engine's API that a tree has, looked up in its files, whatever version it states.

A part is a table of lines (see `impl.loading.probe`). Its lines with the same `since` and `before` came
together and are a step. A tree has a part if it has every step of it. A step that ends at a release and the
step of that part that begins there are alternatives: the tree needs one of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from impl.adapter import UnusableImplementation
from impl.loading import probe, used_names
from impl.loading.isolation import Bookkeeping
from impl.loading.nearest import FAR, Nearest, differing, lies_between, nearest


class PartStep(NamedTuple):
    """Lines that came together.

    there: which of its uses a tree has.
    lacks: the others, in words.
    """

    since: str
    before: str
    there: int
    lacks: tuple[probe.Missing, ...]

    @property
    def whole(self) -> bool:
        return not self.lacks


class Tables(NamedTuple):
    """The API of an engine.

    core: the lines that every tree needs.
    parts: name -> its lines.
    says: name -> what a tree without that part is driven without.
    below: the folder that the files of the lines are in.
    guide: the section of CONTRIBUTING.md.
    """

    engine: str
    below: str
    releases: Sequence[str]
    core: str
    parts: Mapping[str, str]
    says: Mapping[str, str]
    guide: str

    @property
    def all_lines(self) -> str:
        """The lines of all tables."""
        return "\n".join(table.strip() for table in (self.core, *self.parts.values()))

    def since(self, part: str) -> str:
        """Return the first release that has a part, by the table."""
        return next(release for release in self.releases if self.is_documented(part, release))

    def is_documented(self, part: str, release: str) -> bool:
        """Return whether a release has a part, by the table."""
        at = self.releases.index(release)

        documents = []
        for since, before in steps(self.parts[part]):
            begun = self.releases.index(since) <= at
            ended = before != "..." and self.releases.index(before) <= at
            lacks = () if begun and not ended else (probe.Missing("", ""),)
            documents.append(PartStep(since, before, 0, lacks))
        return _has_all(documents)


class TreeParts(NamedTuple):
    """The parts of an API that a tree has.

    near: the release that it is taken for.
    parts: names of those that it has.
    missing: what nothing can be driven without.
    remark: what it is driven without, "" for nothing.
    """

    near: Nearest
    parts: frozenset[str]
    missing: tuple[probe.Missing, ...]
    remark: str


def facts(
    root: Path,
    tables: Tables,
    modules: Bookkeeping,
    wanted: Iterable[str] = (),
    unwanted: Iterable[str] = (),
    release: str | None = None,
    names: Callable[[str], str] = str,
    ways: Collection[str] = (used_names.PLAIN,),
    renamed: Collection[str] = (),
) -> TreeParts:
    """Look up what the files under `root` have.

    wanted: parts that were asked for by name.
    unwanted: parts that this way does not use.
    release: what the files are, if that is known.
    names: a table with the names that the tree has.
    renamed: those that it has otherwise.
    ways: as options name them.
    """
    is_release = release is not None and release in tables.releases
    near = Nearest(release, 0) if release and is_release else nearest(tables.engine, root)
    if is_release and all(tables.is_documented(name, near.release) for name in wanted):
        return _by_the_tables(tables, near)
    checkout = probe.Checkout(root, tables.below, modules, ())
    missing = _missing_names(_is_present(checkout, names(tables.core)))
    parts = []
    without = []
    for name, table in tables.parts.items():
        looked_up = _is_present(checkout, names(table))
        expected = near.release in tables.releases and tables.is_documented(name, near.release)
        if name in wanted:
            missing += _missing_names(looked_up)
        if _has_all(looked_up):
            parts.append(name)
            missing += _other_way(looked_up, root, tables, near.release)
        elif name not in unwanted and expected:
            torn = [step for step in looked_up if step.there and not _holds(step, looked_up)]
            missing += [line for step in torn for line in step.lacks]
            if not torn and lies_between(tables.engine, root, near.release):
                without.append(name)
            elif not torn:
                missing += _missing_names(looked_up)
    if not is_release:
        missing += used_names.not_given(tables.engine, root, near, ways, renamed)
    said = [tables.says[name] for name in without if tables.says.get(name)]
    return TreeParts(
        near,
        frozenset(parts),
        tuple(dict.fromkeys(missing)),
        f"driven without {', '.join(said)}, of which it has nothing" if said else "",
    )


def _by_the_tables(tables: Tables, near: Nearest) -> TreeParts:
    """Return the facts of a release without a look into its files: to parse them takes a second. They are
    sealed when they are fetched, and a test looks the tables up in them."""
    having = (name for name in tables.parts if tables.is_documented(name, near.release))
    return TreeParts(near, frozenset(having), (), "")


def require(looked_up: TreeParts, tables: Tables, name: str, root: Path) -> None:
    """Raise UnusableImplementation that names everything that is missing, and for which release the tree was
    taken."""
    if not looked_up.missing:
        return
    near = looked_up.near
    oldest = tables.releases[0]
    newest = tables.releases[-1]
    missing_names = probe.missing_text(looked_up.missing)
    guide = f"Nothing was driven: CONTRIBUTING.md, '{tables.guide}', says how to follow it"
    taken_for = f"taken for {near.release}, the nearest release ({differing(near.lines)})"
    if near.release == oldest and near.lines > FAR:
        older = f"{taken_for}; it is older than {oldest}, the oldest release that is driven"
        raise UnusableImplementation(f"{name} {root}: {older}. Nothing was driven")
    if near.release == newest and near.lines:
        taken_for += f"; it may be newer than {newest}, the newest release that is driven"
    others = used_names.also_lost(tables.engine, root, near.release, missing_names)
    raise UnusableImplementation(f"{name} {root}: {missing_names}; {taken_for}{others}. {guide}")


def driving_text(looked_up: TreeParts, root: Path) -> str:
    """Say in one line how a tree is driven."""
    near = f"{root}: taken for {looked_up.near.release}, the nearest release"
    return f"{near} ({differing(looked_up.near.lines)})" + (
        f"; {looked_up.remark}" if looked_up.remark else ""
    )


def steps(table: str) -> dict[tuple[str, str], list[probe.ApiLine]]:
    """Return the lines of a table by (since, before)."""
    found: dict[tuple[str, str], list[probe.ApiLine]] = {}
    for line in probe.entries(table):
        found.setdefault((line.since, line.before), []).append(line)
    return found


def _is_present(checkout: probe.Checkout, table: str) -> list[PartStep]:
    found = []
    for (since, before), lines in steps(table).items():
        lacks = checkout.missing_names(lines)
        uses = sum(len(line.uses) for line in lines)
        found.append(PartStep(since, before, uses - len(lacks), tuple(lacks)))
    return found


def _alternatives(step: PartStep, steps: Iterable[PartStep]) -> list[PartStep]:
    """Return the alternatives to a step."""
    return [other for other in steps if step.before == other.since or other.before == step.since]


def _holds(step: PartStep, steps: Iterable[PartStep]) -> bool:
    return step.whole or any(other.whole for other in _alternatives(step, steps))


def _has_all(steps: Sequence[PartStep]) -> bool:
    return all(_holds(step, steps) for step in steps)


def _missing_names(steps: Sequence[PartStep]) -> list[probe.Missing]:
    """Name what a part lacks; of two alternatives the later one."""
    lost = [step for step in steps if not _holds(step, steps)]
    later = [step for step in lost if not any(step.before == other.since for other in lost)]
    return [line for step in later for line in step.lacks]


def _other_way(
    steps: Sequence[PartStep], root: Path, tables: Tables, release: str
) -> list[probe.Missing]:
    """Find the names that a part has in the nearest release and not in the tree, which has an alternative.

    The names of an earlier alternative may be in later releases as well. So they tell nothing of a tree that
    has no line of a neighbouring release: that one has renamed the later alternative.
    """
    if release not in tables.releases:
        return []
    at = tables.releases.index(release)
    lacks: list[probe.Missing] = []
    for step in steps:
        begun = tables.releases.index(step.since) <= at
        ended = step.before != "..." and tables.releases.index(step.before) <= at
        if begun and not ended:
            lacks += step.lacks
    return [] if not lacks or lies_between(tables.engine, root, release) else lacks
