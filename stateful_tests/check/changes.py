"""What changed in a checkout since a git revision, and the lines of the corpus that call it.

A function counts as changed where `git diff` shows a line of it. Lines outside of functions are the file's.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from impl.adapter import UnusableImplementation
from stateful_tests.check.corpus import FIXTURE, CorpusLine
from stateful_tests.lockstep.lockstep import check_fits, replay, with_calls
from stateful_tests.lockstep.results import Run, Trace

ENOUGH = 60  # lines that call a function, before others are looked for

Function = tuple[str, str]  # file, qualified name


class Changes(NamedTuple):
    """first: lines of the corpus that call what changed. called: changed function -> how many of `first` call
    it; missed: those that none calls, and files with changes outside of functions."""

    revision: str
    first: frozenset[CorpusLine]
    called: dict[Function, int]
    missed: tuple[Function, ...]

    @property
    def text(self) -> str:
        """In a line."""
        text = f"since {self.revision}: {len(self.first)} directed runs come first, which call"
        text += f" {len(self.called)} of {len(self.called) + len(self.missed)} changes"
        missed = [f"{file}: {name}" for file, name in self.missed]
        more = f" and {len(missed) - 5} more" if len(missed) > 5 else ""
        return text + (f"; none calls {', '.join(missed[:5])}{more}" if missed else "")

    @property
    def unseen(self) -> str:
        """How many of the changes no directed run calls, such as "1 of 3 changes"; "" for none."""
        missed = len(self.missed)
        return f"{missed} of {missed + len(self.called)} changes" if missed else ""

    def among(self, called: Sequence[Sequence[str]]) -> dict[Function, list[int]]:
        """The changed functions among those that commands call, and the numbers of the commands."""
        wanted, found = {*self.called, *self.missed}, dict[Function, list[int]]()
        for at, of_command in enumerate(called):
            for function in dict.fromkeys(_functions(of_command)):
                if function in wanted:
                    found.setdefault(function, []).append(at)
        return found


def changes(
    system: Any,
    revision: str,
    lines: Sequence[CorpusLine],
    found: Callable[[CorpusLine], None] | None = None,
) -> Changes:
    """Look for lines that call what changed in the checkout of `system`, the shortest first.

    found: is given each of them as soon as it is found. Raises ValueError where git cannot tell.
    """
    wanted = {*changed_functions(system.root, revision)}
    called: Counter[Function] = Counter()
    first = set()
    for line in _in_turns(lines):
        open_ = {function for function in wanted if called[function] < ENOUGH}
        if not open_:
            break
        try:
            check_fits(system, line.geometry, line.commands)
            calls = open_ & {*_functions(chain(*system.called(line.geometry, line.commands)))}
        except UnusableImplementation:
            continue
        called.update(calls)
        if calls:
            first.add(line)
            if found is not None:
                found(line)
    missed = tuple(sorted(wanted - called.keys()))
    return Changes(revision, frozenset(first), dict(called), missed)


def _in_turns(lines: Iterable[CorpusLine]) -> list[CorpusLine]:
    """The shortest of each kind first: by machine, traces of faults and ways to situations."""
    turns: Counter[tuple[str, bool]] = Counter()
    placed = []
    for line in sorted(lines, key=lambda line: len(line.commands)):
        kind = line.machine, line.origin == FIXTURE
        turns[kind] += 1
        placed.append((turns[kind], line))
    return [line for _, line in sorted(placed, key=lambda each: each[0])]


def new_fault(system: Any, base: Any, line: CorpusLine) -> Run | None:
    """A line of the corpus on `system`, where it violates a clause and `base` conforms up to that command.

    Without a base, traces of known faults show nothing new.
    """
    run = replay(system, Trace(line.geometry, line.mode, line.commands))
    if run.violation is None or (base is None and line.origin == FIXTURE):
        return None
    ends = replace(run.trace, commands=run.trace.commands[: run.violation.step + 1])
    try:
        known = base is not None and replay(base, ends).violation is not None
    except UnusableImplementation:  # no witness
        known = True
    return None if known else with_calls(system, replace(run, trace=ends))


def _functions(called: Iterable[str]) -> Iterator[Function]:
    for text in called:
        file, _, names = text.partition(": ")
        yield from ((file, name) for name in names.split(", "))


def changed_functions(root: Path, revision: str) -> Iterator[Function]:
    """The functions under `root` that changed since `revision`. Raises ValueError where git cannot tell."""
    plain = ("-U0", "--relative", "--no-ext-diff", "--no-color", "--no-prefix")
    diff = _git(root, "diff", *plain, revision, "--", "*.py")
    for part in re.split(r"^diff --git ", diff, flags=re.MULTILINE)[1:]:
        name = re.search(r"^\+\+\+ (.*?)\t?$", part, re.MULTILINE)
        if name is None or not (root / name[1]).is_file():
            continue  # renamed alone, or deleted
        changed: set[int] = set()
        for at, count in re.findall(r"^@@ \S+ \+(\d+)(?:,(\d+))? @@", part, re.MULTILINE):
            changed |= {*range(int(at), int(at) + max(1, int(count or 1)))}
        yield from _of_lines(root, name[1], changed)
    for file in _git(root, "ls-files", "--others", "--exclude-standard", "--", "*.py").splitlines():
        yield from _of_lines(root, file, None)


def edited_files(root: Path) -> list[str]:
    """The Python files under `root` with changes that are not committed; none where git cannot tell."""
    with suppress(ValueError):
        return _git(root, "diff", "--relative", "--name-only", "HEAD", "--", "*.py").splitlines()
    return []


def _of_lines(root: Path, file: str, changed: set[int] | None) -> Iterator[Function]:
    """The functions of a file that have one of these lines; all of them for None."""
    text = (root / file).read_bytes()
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        yield file, "cannot be parsed"
        return
    outside = {at for at, line in enumerate(text.splitlines(), 1) if line.strip()} & {
        *(changed or ())
    }
    for name, lines in _defined(tree, ""):
        if changed is None or changed.intersection(lines):
            yield file, name
        outside.difference_update(lines)
    if outside:
        yield file, "outside of functions"


def _defined(tree: ast.AST, inside: str) -> Iterator[tuple[str, range]]:
    """The outermost functions, and methods of classes, with their lines."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            yield inside + node.name, range(first, (node.end_lineno or first) + 1)
        else:
            yield from _defined(
                node, f"{inside}{node.name}." if isinstance(node, ast.ClassDef) else inside
            )


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise ValueError(f"git: {error.strerror}") from None
    if done.returncode:
        words = done.stderr.strip().splitlines() or ["git failed"]
        raise ValueError(words[0].removeprefix("fatal: "))
    return done.stdout
