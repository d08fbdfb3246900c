"""What a check compares a system with, and how near that is by the lines of the files that are driven."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from impl import nearest

Lines = Counter[str]
# A tree between two releases has so much of what one of them has and the other has not.
BETWEEN_SHARE, BETWEEN_LINES = 0.05, 10


class BaseKind(StrEnum):
    """How the base of a check was chosen."""

    STATED = "stated"
    """The user named it."""
    HISTORY = "history"
    """A commit of the checkout's own history: what is new came with the changes since."""
    RELEASE = "release"
    """The release that the checkout was taken for: what is new may come from before or after that release."""


class Base(NamedTuple):
    """The base of a check.

    why: what the base is to the checkout, in words. lines: how many lines of the driven files differ between
    the two; None where one of them has no such files. commit: the base's, if it is of the checkout's history.
    """

    system: Any
    kind: BaseKind
    why: str = ""
    lines: int | None = None
    commit: str = ""

    @property
    def name(self) -> str:
        name: str = self.system.name
        return name

    @property
    def text(self) -> str:
        """Such as "git:3f2a1b9ab (merge base with origin/main), 12 lines changed"."""
        text = f"{self.name} ({self.why})" if self.why else self.name
        if self.lines is None:
            return text
        changed = " changed" if self.kind is BaseKind.HISTORY else " away"
        return f"{text}, {self.lines} {'line' if self.lines == 1 else 'lines'}{changed}"


def root_of(system: Any) -> Path | None:
    """The folder that holds the files of a system; None of one that is not files of an engine."""
    root = getattr(system, "root", None)
    return root if isinstance(root, Path) else None


def lines_between(engine: str, root: Path, other: Path) -> int:
    """How many lines of the driven files differ: those that one has and the other has not; the larger of
    the two counts, so a line that was edited counts once."""
    here, there = driven_lines(engine, root), driven_lines(engine, other)
    return max((here - there).total(), (there - here).total())


def shared_lines(engine: str, root: Path, release: Path, without: Path) -> tuple[int, int]:
    """Of the lines that a release has and another (`without`) has not: how many the tree under `root` has as
    well, and how many there are."""
    of_release, others = driven_lines(engine, release), driven_lines(engine, without)
    own = of_release - others
    return (own & (driven_lines(engine, root) - others)).total(), own.total()


def share_of_lines(engine: str, root: Path, release: Path, without: Path) -> float:
    """The same as a share, from 0 to 1."""
    shared, of = shared_lines(engine, root, release, without)
    return shared / of if of else 0.0


def lies_between(engine: str, root: Path, release: Path, without: Path) -> bool:
    """Whether a tree that was taken for the release `without` has a substantial part of `release` too."""
    shared, _ = shared_lines(engine, root, release, without)
    share = share_of_lines(engine, root, release, without)
    return share >= BETWEEN_SHARE and shared >= BETWEEN_LINES


def driven_lines(engine: str, root: Path) -> Lines:
    """The lines of the driven files under `root`, without indentation and comments."""
    return _lines(root / file for file in nearest.read(engine).files)


def _lines(files: Iterable[Path]) -> Lines:
    found = Lines()
    for file in files:
        if file.is_file():
            texts = map(str.strip, file.read_text(encoding="utf-8", errors="replace").splitlines())
            found.update(text for text in texts if text and not text.startswith("#"))
    return found
