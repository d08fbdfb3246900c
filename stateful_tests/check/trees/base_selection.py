"""The base that a check compares a system with, and its distance in lines of the driven files."""

from __future__ import annotations

from collections.abc import Set
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from impl.adapter import AnySystem
from impl.loading import nearest
from impl.system_spec import ENGINES, system_spec

Lines = Set[bytes]
# A tree between two releases has so much of what one of them has and the other has not.
BETWEEN_SHARE = 0.05
BETWEEN_LINES = 10


class BaseKind(StrEnum):
    """The way in which the base of a check was chosen."""

    STATED = "stated"
    """The user named it."""
    HISTORY = "history"
    """A commit of the checkout's own history: what is new came with the changes since."""
    RELEASE = "release"
    """The release that the checkout was taken for: what is new may come from before or after that release."""


class Base(NamedTuple):
    """The base of a check.

    why: its relation to the checkout, in words.
    lines: number of lines of the driven files by which the two differ; None where one of them has no
        such files.
    commit: the base's commit, if it is of the checkout's history.
    """

    system: AnySystem
    kind: BaseKind
    why: str = ""
    lines: int | None = None
    commit: str = ""

    @property
    def name(self) -> str:
        return self.system.name

    @property
    def text(self) -> str:
        """Return the base in words, such as "git:3f2a1b9ab (merge base with origin/main), 12 lines
        differ"."""
        text = f"{self.name} ({self.why})" if self.why else self.name
        if self.lines is None or (self.commit and not self.lines):  # changes that no line shows
            return text
        return f"{text}, {nearest.differing(self.lines)}"


def root_of(system: AnySystem) -> Path | None:
    """Return the folder that holds the files of a system; None for a system that is not files of an
    engine."""
    root = getattr(system, "root", None)
    return root if isinstance(root, Path) else None


def lines_of(system: AnySystem) -> Lines | None:
    """Return the lines of a system's driven files; None for a system that is not files of an engine."""
    spec = system_spec(system)
    root = root_of(system)
    if spec.engine not in ENGINES:
        return None
    if spec.version in nearest.read(spec.engine).releases:
        return nearest.release_lines(spec.engine, spec.version)
    return None if root is None else nearest.tree_lines(spec.engine, root)


def lines_between(system: AnySystem, other: AnySystem) -> int | None:
    """Return by how many lines the driven files differ; None where one of the systems has no such
    files."""
    lines = lines_of(system)
    others = lines_of(other)
    return None if lines is None or others is None else nearest.lines_apart(lines, others)


def share_of_lines(tree: Lines, release: Lines, without: Lines) -> float:
    """Return the share that a tree has of the lines that a release has and another (`without`) lacks."""
    own = release - without
    return len(own & tree) / len(own) if own else 0.0


def lies_between(tree: Lines, release: Lines, without: Lines) -> bool:
    """Return whether a tree that was taken for the release `without` has a substantial part of `release`
    too."""
    shared = len((release - without) & tree)
    return shared >= BETWEEN_LINES and share_of_lines(tree, release, without) >= BETWEEN_SHARE
