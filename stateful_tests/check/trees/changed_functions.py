"""Changes in a checkout since a git revision, and the lines of the corpus that call them.

A function has changed where its syntax tree differs: comments, docstrings and annotations do not count. A
change outside of functions counts as one of the function OUTSIDE of its file.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import NamedTuple, cast

from impl.adapter import AnySystem, UnusableImplementation
from impl.process.remote_system import WorkerSystem
from impl.process.system_functions import SystemFunction
from reference.failures import count_text
from stateful_tests.check.corpus import FIXTURE, CorpusLine
from stateful_tests.check.trees.base_selection import Base, root_of
from stateful_tests.check.trees.tree_history import git, new_files
from stateful_tests.check.trees.way_map import NOTHING, OUTSIDE, WayMap
from stateful_tests.lockstep.driven_kinds import check_fits
from stateful_tests.lockstep.replays import replay, with_calls
from stateful_tests.lockstep.run_results import Run

ENOUGH_LINES = 60  # lines that call a function: no more are looked for
MOST_TRIES = 150  # lines that are tried for a function that no run of a release is known to call


class Changes(NamedTuple):
    """Changes in a checkout since `revision`; "" where its files differ from the base's.

    first: lines of the corpus that call a changed function.
    called: changed function -> how many of `first` call it; 0 where only other runs do.
    missed: changed functions that nothing calls.
    ignored: changed functions of files that kvspec does not load.
    """

    revision: str
    first: frozenset[CorpusLine]
    called: dict[SystemFunction, int]
    missed: tuple[SystemFunction, ...]
    ignored: tuple[SystemFunction, ...] = ()

    @property
    def text(self) -> str:
        """Return the changes in one line of a report."""
        changed = len(self.called) + len(self.missed)
        if changed:
            text = (
                f"since {self.revision}: {len(self.first)} directed runs come first, which call"
                f" {len(self.called)} of {changed} changes"
            )
        else:
            text = f"since {self.revision}: no function that kvspec drives changed"
        if self.missed:
            text += f"; none calls {function_names_text(self.missed)}"
        if self.ignored:
            text += f"; kvspec does not load {function_names_text(self.ignored, 2)}"
        return text

    @property
    def undriven(self) -> str:
        """Say what changed where kvspec loads none of the changed files; else ""."""
        if self.called or self.missed or not self.ignored:
            return ""
        first_file, *others = dict.fromkeys(file for file, _ in self.ignored)
        more = f" and {count_text(len(others), 'more file')}" if others else ""
        return f"no function that kvspec drives, only {first_file}{more}"

    def also_called(self, functions: Collection[SystemFunction]) -> Changes:
        """Return the changes with `functions` counted as called, by other runs than `first`."""
        calls = dict.fromkeys((function for function in self.missed if function in functions), 0)
        missed = tuple(function for function in self.missed if function not in functions)
        return self._replace(called=self.called | calls, missed=missed)

    def callers(
        self, called: Sequence[Sequence[SystemFunction]]
    ) -> dict[SystemFunction, list[int]]:
        """Map each changed function that a run calls to the numbers of the commands that call it.

        called: the functions that each command calls.
        """
        changed = {*self.called, *self.missed}
        callers: dict[SystemFunction, list[int]] = {}
        for number, functions in enumerate(called):
            for function in dict.fromkeys(functions):
                if function in changed:
                    callers.setdefault(function, []).append(number)
        return callers


def function_names_text(functions: Sequence[SystemFunction], most: int = 5) -> str:
    """Return functions as text: the first `most` by name, and the number of the others."""
    names = ", ".join(map(str, functions[:most]))
    more = len(functions) - most
    return f"{names} and {more} more" if more > 0 else names


def changes(
    system: AnySystem,
    revision: str,
    lines: Sequence[CorpusLine],
    note_line: Callable[[CorpusLine], None] | None = None,
    way_map: WayMap = NOTHING,
    way: str = "",
) -> Changes:
    """Search for lines that call changed functions of `system`'s checkout, the shortest first.

    note_line: called with each of them as soon as it is found.
    way_map: the functions that runs of the engine's releases call, and the files that these load.
    way: the way in which the system is driven.

    Raises ValueError where git cannot tell.
    """
    checkout = cast(WorkerSystem, system)
    assert checkout.root is not None
    changed = sorted({*changed_functions(checkout.root, revision)})
    ignored = tuple(
        _by_relevance([c for c in changed if way_map.files and not way_map.loads(c)], way_map.files)
    )
    # Every run executes code outside of functions when its file is loaded: no line has to be found for it.
    loaded = {
        name for name in changed if name.name == OUTSIDE and way in way_map.functions.get(name, {way})
    }
    wanted = {function for function in changed if function not in ignored and function not in loaded}
    called: Counter[SystemFunction] = Counter()
    calling_lines = set()
    for tried, line in enumerate(_interleave_kinds(lines)):
        sought = {function for function in wanted if called[function] < ENOUGH_LINES}
        if way_map.files and tried >= MOST_TRIES:
            sought = {function for function in sought if not called[function] and way_map.runs(function, way)}
        if not sought:
            break
        try:
            check_fits(system, line.geometry, line.commands)
            calls = sought & {*chain(*checkout.functions_called(line.geometry, line.commands))}
        except UnusableImplementation:
            continue
        called.update(calls)
        if calls:
            calling_lines.add(line)
            if note_line is not None:
                note_line(line)
    missed = tuple(sorted(wanted - called.keys()))
    return Changes(revision, frozenset(calling_lines), dict(called), missed, ignored)


def _by_relevance(functions: Iterable[SystemFunction], driven: Collection[str]) -> list[SystemFunction]:
    """Order functions of files that are not loaded: those of driven files first, then those of files beside
    these, then others, tests last."""
    folders = {Path(file).parent for file in driven}

    def place(function: SystemFunction) -> tuple[bool, bool, bool]:
        file = Path(function.file)
        of_tests = file.name.startswith("test_") or not {"test", "tests"}.isdisjoint(file.parts)
        return of_tests, file.parent not in folders, function.file not in driven

    return sorted(functions, key=place)


def _interleave_kinds(lines: Iterable[CorpusLine]) -> list[CorpusLine]:
    """Order lines so that kinds take turns, each with its shortest line first. Lines are of one kind if they
    have the same machine and are both traces of faults, or both ways to situations."""
    turns: Counter[tuple[str, bool]] = Counter()
    placed = []
    for line in sorted(lines, key=lambda line: len(line.commands)):
        kind = line.machine, line.origin == FIXTURE
        turns[kind] += 1
        placed.append((turns[kind], line))
    return [line for _, line in sorted(placed, key=lambda each: each[0])]


def new_fault(system: AnySystem, base: AnySystem | None, line: CorpusLine) -> Run | None:
    """Replay a line of the corpus. Return the run if it violates a clause on `system` and `base` conforms up
    to that command; else None.

    Without a base, traces of known faults show nothing new.
    """
    try:
        run = replay(system, line.trace)
    except UnusableImplementation:
        # The system cannot be driven through the line; the plan leaves the line out as well.
        return None
    if run.violation is None or (base is None and line.origin == FIXTURE):
        return None
    ends = replace(run.trace, commands=run.trace.commands[: run.violation.step + 1])
    try:
        known = base is not None and replay(base, ends).violation is not None
    except UnusableImplementation:
        known = True  # the base is no witness that the violation is new
    return None if known else with_calls(system, replace(run, trace=ends))


def changed_functions(root: Path, revision: str) -> Iterator[SystemFunction]:
    """Return the functions under `root` that changed since `revision`. Raises ValueError where git
    cannot tell."""
    plain = ("--name-only", "--relative", "--no-ext-diff", "-z")
    names = git(root, "diff", *plain, revision, "--", "*.py").split("\0")
    for name in sorted({*filter(None, names), *new_files(root)}):
        file = root / name
        if not file.is_file():
            continue  # deleted
        try:
            before = git(root, "show", f"{revision}:./{name}")
        except ValueError:
            before = ""  # a new file
        for function in _different_functions(before, file.read_bytes()):
            yield SystemFunction(name, function)


def differences_from_base(base: Base, system: AnySystem, called: Iterable[SystemFunction]) -> Changes:
    """Compare a checkout with its base, where no git history shows the changes: the functions that
    differ, in the files of those in `called`. Nothing differs where one of the two is no folder of
    files."""
    root = root_of(system)
    base_root = root_of(base.system)
    if root is None or base_root is None or root == base_root:
        return Changes("", frozenset(), {}, ())
    different: list[SystemFunction] = []
    for name in sorted({file for file, _ in called}):
        file = root / name
        base_file = base_root / name
        before = ""
        if base_file.is_file():
            before = base_file.read_text(encoding="utf-8", errors="replace")
        if file.is_file() and (after := file.read_bytes()) != before.encode():
            functions = _different_functions(before, after)
            different += (SystemFunction(name, function) for function in functions)
    return Changes("", frozenset(), dict.fromkeys(different, 0), ())


def _different_functions(before: str, after: bytes) -> Iterator[str]:
    """Yield the functions of a file that are new or changed, and OUTSIDE if the rest differs."""
    try:
        now = _function_texts(ast.parse(after))
    except (SyntaxError, ValueError):
        yield "cannot be parsed"
        return
    try:
        was = _function_texts(ast.parse(before))
    except (SyntaxError, ValueError):
        was = {}
    for name, text in now.items():
        if text != was.get(name, ""):
            yield name


def _function_texts(tree: ast.Module) -> dict[str, str]:
    """Map the outermost functions and methods of a module, and OUTSIDE for the rest, to their syntax trees as
    text, without docstrings and annotations of functions. Changes `tree`."""
    _WithoutAnnotations().visit(tree)
    parts: dict[str, str] = {}
    for name, node in _function_definitions(tree, ""):
        parts[name] = parts.get(name, "") + ast.dump(node)
    _WithoutFunctions().visit(tree)
    return parts | {OUTSIDE: ast.dump(tree) if tree.body else ""}


class _WithoutAnnotations(ast.NodeTransformer):
    """Removes docstrings and annotations of functions, which change nothing when the code runs."""

    def visit(self, node: ast.AST) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        if isinstance(node, ast.arg):
            node.annotation = None
        documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            del node.body[0]
        return node


class _WithoutFunctions(ast.NodeTransformer):
    """Removes functions and methods, and leaves the rest of a module."""

    def visit_FunctionDef(self, _: ast.FunctionDef) -> None:
        """Return None, which removes the node."""

    def visit_AsyncFunctionDef(self, _: ast.AsyncFunctionDef) -> None:
        """Return None, which removes the node."""


def _function_definitions(tree: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST]]:
    """Yield the outermost functions, and methods of classes, each with its qualified name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _function_definitions(node, f"{prefix}{node.name}.")
        else:
            yield from _function_definitions(node, prefix)
