"""Changes in a checkout since a git revision, and the lines of the corpus that call them.

A function counts as changed where its syntax tree differs: comments, docstrings and annotations do not count.
What differs outside of functions is the file's.
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
from stateful_tests.check.bases import Base, root_of
from stateful_tests.check.corpus import FIXTURE, CorpusLine
from stateful_tests.check.tree_history import git, new_files
from stateful_tests.check.way_map import NOTHING, OUTSIDE, Function, WayMap, functions_of
from stateful_tests.lockstep.lockstep import check_fits, replay, with_calls
from stateful_tests.lockstep.results import Run

ENOUGH = 60  # lines that call a function, before others are looked for
PATIENCE = 150  # lines in which a function is looked for that no run is known to call


class Changes(NamedTuple):
    """Changes in a checkout since `revision`; "" where its files differ from the base's.

    first: lines of the corpus that call what changed. called: changed function -> how many of `first` call
    it; 0 of one that other runs call. missed: those that nothing calls. ignored: those in files that kvspec
    does not load.
    """

    revision: str
    first: frozenset[CorpusLine]
    called: dict[Function, int]
    missed: tuple[Function, ...]
    ignored: tuple[Function, ...] = ()

    @property
    def text(self) -> str:
        """In a line."""
        text = f"since {self.revision}: {len(self.first)} directed runs come first, which call"
        text += f" {len(self.called)} of {len(self.called) + len(self.missed)} changes"
        text += f"; none calls {named(self.missed)}" if self.missed else ""
        if not (self.called or self.missed):
            text = f"since {self.revision}: no function that kvspec drives changed"
        return text + (f"; kvspec does not load {named(self.ignored, 2)}" if self.ignored else "")

    def also_called(self, functions: Collection[Function]) -> Changes:
        """The changes, with `functions` counted as called, for other runs call them."""
        found = dict.fromkeys((each for each in self.missed if each in functions), 0)
        missed = tuple(each for each in self.missed if each not in functions)
        return self._replace(called=self.called | found, missed=missed)

    def among(self, called: Sequence[Sequence[str]]) -> dict[Function, list[int]]:
        """The changed functions among those that commands call, and the numbers of the commands."""
        wanted, found = {*self.called, *self.missed}, dict[Function, list[int]]()
        for at, of_command in enumerate(called):
            for function in dict.fromkeys(functions_of(of_command)):
                if function in wanted:
                    found.setdefault(function, []).append(at)
        return found


def named(functions: Sequence[Function], most: int = 5) -> str:
    """Functions as text, `most` of them by name."""
    names = ", ".join(f"{file}: {name}" for file, name in functions[:most])
    return names + (f" and {len(functions) - most} more" if len(functions) > most else "")


def changes(
    system: AnySystem,
    revision: str,
    lines: Sequence[CorpusLine],
    found: Callable[[CorpusLine], None] | None = None,
    of: WayMap = NOTHING,
    way: str = "",
) -> Changes:
    """Look for lines that call what changed in the checkout of `system`, the shortest first.

    found: is given each of them as soon as it is found. of: what runs of the engine's releases call, and
    so which files are loaded. way: the one in which the system is driven. Raises ValueError
    where git cannot tell.
    """
    checkout = cast(WorkerSystem, system)
    assert checkout.root is not None
    changed = sorted({*changed_functions(checkout.root, revision)})
    ignored = tuple(each for each in changed if of.files and not of.loads(each))
    loaded = {
        each for each in changed if each[1] == OUTSIDE and way in of.functions.get(each, {way})
    }
    wanted = {each for each in changed if each not in ignored and each not in loaded}
    called: Counter[Function] = Counter()
    first = set()
    for at, line in enumerate(_in_turns(lines)):
        open_ = {function for function in wanted if called[function] < ENOUGH}
        if of.files and at >= PATIENCE:
            open_ = {each for each in open_ if not called[each] and of.runs(each, way)}
        if not open_:
            break
        try:
            check_fits(system, line.geometry, line.commands)
            calls = open_ & {*functions_of(chain(*checkout.called(line.geometry, line.commands)))}
        except UnusableImplementation:
            continue
        called.update(calls)
        if calls:
            first.add(line)
            if found is not None:
                found(line)
    missed = tuple(sorted(wanted - called.keys()))
    return Changes(revision, frozenset(first), dict(called), missed, ignored)


def _in_turns(lines: Iterable[CorpusLine]) -> list[CorpusLine]:
    """The shortest of each kind first: by machine, traces of faults and ways to situations."""
    turns: Counter[tuple[str, bool]] = Counter()
    placed = []
    for line in sorted(lines, key=lambda line: len(line.commands)):
        kind = line.machine, line.origin == FIXTURE
        turns[kind] += 1
        placed.append((turns[kind], line))
    return [line for _, line in sorted(placed, key=lambda each: each[0])]


def new_fault(system: AnySystem, base: AnySystem | None, line: CorpusLine) -> Run | None:
    """A line of the corpus on `system`, where it violates a clause and `base` conforms up to that command.

    Without a base, traces of known faults show nothing new.
    """
    try:
        run = replay(system, line.trace)
    except (
        UnusableImplementation
    ):  # it cannot be driven through the line, which the plan leaves out as well
        return None
    if run.violation is None or (base is None and line.origin == FIXTURE):
        return None
    ends = replace(run.trace, commands=run.trace.commands[: run.violation.step + 1])
    try:
        known = base is not None and replay(base, ends).violation is not None
    except UnusableImplementation:  # no witness
        known = True
    return None if known else with_calls(system, replace(run, trace=ends))


def changed_functions(root: Path, revision: str) -> Iterator[Function]:
    """The functions under `root` that changed since `revision`. Raises ValueError where git cannot tell."""
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
        yield from ((name, function) for function in _differing(before, file.read_bytes()))


def beside(base: Base, system: AnySystem, called: Iterable[Function]) -> Changes:
    """The functions that differ between a checkout and its base, in the files of those that are called: what
    changed where no history tells. Nothing where one of the two is no folder of files."""
    here, there = root_of(system), root_of(base.system)
    found: list[Function] = []
    if here is None or there is None or here == there:
        return Changes("", frozenset(), {}, ())
    for name in sorted({file for file, _ in called}):
        mine, its = here / name, there / name
        before = its.read_text(encoding="utf-8", errors="replace") if its.is_file() else ""
        if mine.is_file():
            found += ((name, function) for function in _differing(before, mine.read_bytes()))
    return Changes("", frozenset(), dict.fromkeys(found, 0), ())


def _differing(before: str, after: bytes) -> Iterator[str]:
    """The functions of a file that were not so before; `OUTSIDE` where the rest differs."""
    try:
        now = _parts(ast.parse(after))
    except (SyntaxError, ValueError):
        yield "cannot be parsed"
        return
    try:
        was = _parts(ast.parse(before))
    except (SyntaxError, ValueError):
        was = {}
    for name, text in now.items():
        if text != was.get(name, ""):
            yield name


def _parts(tree: ast.Module) -> dict[str, str]:
    """The outermost functions and methods of a module, and the rest of it, each as its syntax tree in text:
    without docstrings, and without annotations of functions."""
    _Bare().visit(tree)
    parts: dict[str, str] = {}
    for name, node in _defined(tree, ""):
        parts[name] = parts.get(name, "") + ast.dump(node)
    _WithoutFunctions().visit(tree)
    return parts | {OUTSIDE: ast.dump(tree) if tree.body else ""}


class _Bare(ast.NodeTransformer):
    """Removes what changes nothing when the code runs."""

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
        """Removed."""

    def visit_AsyncFunctionDef(self, _: ast.AsyncFunctionDef) -> None:
        """Removed."""


def _defined(tree: ast.AST, inside: str) -> Iterator[tuple[str, ast.AST]]:
    """The outermost functions, and methods of classes."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield inside + node.name, node
        else:
            yield from _defined(
                node, f"{inside}{node.name}." if isinstance(node, ast.ClassDef) else inside
            )
