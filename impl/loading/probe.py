"""Names that an adapter uses of a checkout, looked up in its files before any of them runs.

A table of the API has a line for each name. The line says since which release, from which release to which
a file of the package has the name, and how it is used. Uses are Python with `_` for any value, and `;`
between two. A call that the files could not take is missing as much as a name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase as fnmatch
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from impl.adapter import UnusableImplementation
from impl.loading.isolation import Bookkeeping

Names = dict[str, ast.AST]  # of a module, or of a class


class ApiLine(NamedTuple):
    """A line of the table: what releases from `since` on, before `before`, have in `file`.

    by: which part of the adapter uses it.
    fact: which fact of the API it is of.
    """

    since: str
    before: str  # "..." stands for none
    file: str
    uses: tuple[ast.expr, ...]
    by: str = ""
    fact: str = ""


class Missing(NamedTuple):
    """A name that is not there, as a clause of a sentence, the file where it was looked for, and which part
    of the adapter uses it."""

    what: str
    file: str
    by: str = ""


def missing_text(missing: Iterable[Missing]) -> str:
    """Name everything that is missing in one line, by file."""
    by_file: dict[str, dict[str, None]] = {}
    for what, file, _ in missing:
        by_file.setdefault(file, {})[what] = None
    return "; ".join(f"{file}: {', '.join(whats)}" for file, whats in by_file.items())


def entries(table: str, by: str = "", fact: str = "") -> Iterator[ApiLine]:
    """Yield the lines of a table. A line such as [chunks] names the fact of the lines below it."""
    for line in table.strip().splitlines():
        if line.startswith("["):
            fact = line.strip("[]")
            continue
        where, _, uses = line.partition(" | ")
        since, before, file = where.split()
        parsed = [ast.parse(use.strip(), mode="eval").body for use in uses.split(";")]
        yield ApiLine(since, before, file, tuple(parsed), by, fact)


class Checkout:
    """The files of a package under `root`; each is read once, and none of it is run.

    below: the folder that the entries' files are in.
    modules: which of it is loaded.
    """

    def __init__(
        self, root: Path, below: str, modules: Bookkeeping, table: Sequence[ApiLine]
    ) -> None:
        self._root = root
        self._below = below
        self._modules_of = modules
        self._table = table
        self._modules: dict[str, Names | None] = {}
        self._known: dict[tuple[str, str], str | None] = {}
        self._classes: dict[ast.ClassDef, Names] = {}

    def missing(self, version: str, order: list[str], fact: str | None = None) -> list[Missing]:
        """Return the names that a release of that version has and these files lack; `order`: all versions.

        fact: of that fact alone.
        """
        return self.missing_names(self._of_version(version, order, fact))

    def missing_names(self, entries: Iterable[ApiLine]) -> list[Missing]:
        """Return the names of some lines that these files lack."""
        found = []
        for entry in entries:
            for use in entry.uses:
                if (why := self._why_not(entry.file, use)) is not None:
                    found.append(Missing(why, f"{self._below}/{entry.file}", entry.by))
        return found

    def uses(self, version: str, order: list[str], fact: str) -> set[tuple[str, str]]:
        """Return the uses of a fact in a release of that version: file and use, as text."""
        lines = self._of_version(version, order, fact)
        return {(line.file, ast.unparse(use)) for line in lines for use in line.uses}

    def can_be_used(self, use: tuple[str, str]) -> bool:
        """Return whether the files can be used so."""
        file, text = use
        return self._why_not(file, ast.parse(text, mode="eval").body) is None

    def _of_version(self, version: str, order: list[str], fact: str | None) -> Iterator[ApiLine]:
        at = order.index(version)
        for line in self._table:
            ended = line.before != "..." and order.index(line.before) <= at
            if order.index(line.since) <= at and not ended and fact in (None, line.fact):
                yield line

    def _why_not(self, file: str, use: ast.expr) -> str | None:
        """Return why a use is not possible, None if it is; each is looked up once."""
        key = file, ast.unparse(use)
        if key not in self._known:
            self._known[key] = self._missing_reason(file, use)
        return self._known[key]

    def module(self, file: str) -> Names | None:
        """Return the names of a file; None if there is no such file. Raises UnusableImplementation for a
        file that is no Python: that is an error of the checkout, not another release."""
        if file not in self._modules:
            path = self._root / self._below / file
            try:
                with python_of(self._root, f"{self._below}/{file}"):
                    self._modules[file] = _parse_names(path.read_text(encoding="utf-8"))
            except OSError:
                self._modules[file] = None
        return self._modules[file]

    def _missing_reason(self, file: str, use: ast.expr) -> str | None:
        """Return why a use is not possible, None if it is."""
        module = self.module(file)
        if module is None:
            there = (self._root / self._below / file).exists()
            return "it cannot be read" if there else "there is no such file"
        if isinstance(use, ast.Compare):
            return self._lacks_text(module, use)
        call = use if isinstance(use, ast.Call) else None
        name = ast.unparse(use if call is None else call.func)
        first, _, member = name.partition(".")
        node = self._find(module, first)
        if node is None:
            return f"there is no {first}"
        if isinstance(node, ast.ClassDef) and (member or call):
            members = self._members(module, node)
            if member and member not in members:
                return f"{first} has no {member}"
            node = members.get(member) if member else members.get("__init__", node)
        if call is None or not isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        ):
            return None
        if isinstance(node, ast.ClassDef):
            parameters = _fields(node)
        else:
            parameters = _parameters(node, method=bool(member) or node.name == "__init__")
        return parameters and parameters.refuse(
            name, len(call.args), [str(k.arg) for k in call.keywords]
        )

    def _lacks_text(self, module: Names, use: ast.Compare) -> str | None:
        """Return why the code lacks the text that `"x += 1" in "Class.method"` wants, or has what `not in`
        excludes. The text is as `ast.unparse` writes it; a method may be a pattern of shells."""
        name = ast.literal_eval(use.comparators[0])
        text = ast.literal_eval(use.left)
        first, _, method = name.partition(".")
        node = self._find(module, first)
        if method and isinstance(node, ast.ClassDef):
            members = self._members(module, node)
            node = next((members[member] for member in members if fnmatch(member, method)), None)
        if node is None:
            return f"there is no {name}"
        wanted = isinstance(use.ops[0], ast.In)
        if (text in ast.unparse(node)) is wanted:
            return None
        return f"{name} does not say {text!r}" if wanted else f"{name} says {text!r}"

    def _find(self, module: Names, name: str) -> ast.AST | None:
        """Return what a module calls `name`; an import is followed, one of a module that is not loaded is
        None."""
        node = module.get(name)
        package = self._modules_of.package
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(
            f"{package}."
        ):
            return node
        assert node.module is not None
        if not self._modules_of.is_real(node.module):
            return None
        below = self._below.replace("/", ".") + "."
        stem = node.module.removeprefix(below).replace(".", "/")
        [original] = [alias.name for alias in node.names if (alias.asname or alias.name) == name]
        for file in (f"{stem}.py", f"{stem}/__init__.py"):
            if (other := self.module(file)) is not None and node.module.startswith(below):
                return self._find(other, original)
        return node

    def _members(self, module: Names, node: ast.ClassDef) -> Names:
        """Return the methods and fields of a class, those of its bases first."""
        if node in self._classes:
            return self._classes[node]
        members: Names = {}
        for base in node.bases:
            found = self._find(module, base.id) if isinstance(base, ast.Name) else None
            if isinstance(found, ast.ClassDef) and found is not node:
                members |= self._members(self._home(found) or module, found)
        members = _self_attributes(node) | members
        for statement in node.body:
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                members[statement.name] = statement
            for target in _targets(statement):
                members[target] = statement
        self._classes[node] = members
        return members

    def _home(self, node: ast.ClassDef) -> Names | None:
        return next((m for m in self._modules.values() if m and m.get(node.name) is node), None)


@contextmanager
def python_of(root: Path, file: str) -> Iterator[None]:
    """Raise UnusableImplementation, with file and line, where a block that parses a file under `root` finds
    no Python."""
    try:
        yield
    except (SyntaxError, ValueError) as error:
        at = ""
        why = str(error)
        if isinstance(error, SyntaxError):
            at = f":{error.lineno}"
            why = error.msg
        says = f"{file}{at}: {type(error).__name__}: {why}"
        raise UnusableImplementation(f"{root}: {says}. Nothing was driven") from error


@lru_cache(maxsize=128)
def _parse_names(text: str) -> Names:
    """Return the names that a module defines or imports, also under an `if` or `try`."""
    names: Names = {}
    waiting: list[ast.stmt] = list(ast.parse(text).body)
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names[node.name] = node
        elif isinstance(node, ast.ImportFrom | ast.Import):
            for name in (alias.asname or alias.name for alias in node.names):
                # else for a type checker
                if not isinstance(names.get(name), ast.FunctionDef | ast.ClassDef):
                    names[name] = node
        elif isinstance(node, ast.If | ast.Try):
            waiting += [*node.body, *node.orelse]
        names |= dict.fromkeys(_targets(node), node)
    return names


@lru_cache(maxsize=1024)
def _self_attributes(node: ast.ClassDef) -> Names:
    """Return the attributes `self.NAME` that methods of a class set, each with its first place."""
    attributes = []
    waiting = [*node.body]
    for statement in waiting:  # statements alone: a file has ten times as many expressions
        for name in ("body", "orelse", "handlers", "finalbody", "cases"):
            waiting += getattr(statement, name, ())
        targets = [*getattr(statement, "targets", ()), getattr(statement, "target", None)]
        targets += [item.optional_vars for item in getattr(statement, "items", ())]
        for target in filter(None, targets):
            attributes += [n for n in ast.walk(target) if isinstance(n, ast.Attribute)]
    stores = [n for n in attributes if isinstance(n.ctx, ast.Store)]
    mine = [n for n in stores if isinstance(n.value, ast.Name) and n.value.id == "self"]
    return {store.attr: store for store in reversed(mine)}


def _targets(node: ast.stmt) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else []
    targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
    return [target.id for target in targets if isinstance(target, ast.Name)]


class _Parameters(NamedTuple):
    positional: list[str]
    required: set[str]
    keywords: set[str]
    more: bool  # *args
    any_keyword: bool  # **kwargs

    def refuse(self, name: str, arguments: int, keywords: list[str]) -> str | None:
        """Say why a call is not possible."""
        if arguments > len(self.positional) and not self.more:
            return f"{name} takes {len(self.positional)} arguments, not {arguments}"
        for keyword in keywords:
            if keyword not in self.keywords and not self.any_keyword:
                return f"{name} takes no {keyword}"
        for parameter in [*self.positional, *sorted(self.keywords)]:
            if parameter in self.required - {*self.positional[:arguments], *keywords}:
                return f"{name} wants a {parameter}, which the adapter does not give"
        return None


def _parameters(
    node: ast.FunctionDef | ast.AsyncFunctionDef, *, method: bool
) -> _Parameters | None:
    if any("property" in ast.unparse(d) for d in node.decorator_list):
        return None
    args = node.args
    static = any(ast.unparse(d) == "staticmethod" for d in node.decorator_list)
    names = [a.arg for a in (*args.posonlyargs, *args.args)][method and not static :]
    required = set(names[: len(names) - len(args.defaults)] if args.defaults else names)
    kwonly = {a.arg for a in args.kwonlyargs}
    required |= {
        a.arg for a, value in zip(args.kwonlyargs, args.kw_defaults, strict=True) if value is None
    }
    return _Parameters(
        names, required, {*names} | kwonly, args.vararg is not None, args.kwarg is not None
    )


def _fields(node: ast.ClassDef) -> _Parameters | None:
    """Return the parameters of a dataclass or named tuple; None for a class that inherits its own."""
    markers = [ast.unparse(part) for part in (*node.decorator_list, *node.bases)]
    if not any("dataclass" in part or "NamedTuple" in part for part in markers):
        return None
    fields = [s for s in node.body if isinstance(s, ast.AnnAssign)]
    fields = [s for s in fields if "ClassVar" not in ast.unparse(s.annotation)]
    names = [name for field in fields for name in _targets(field)]
    required = {name for field in fields if field.value is None for name in _targets(field)}
    bases = {"NamedTuple", "Protocol", "ABC", "object"}
    inherits = any(ast.unparse(base).rpartition(".")[2] not in bases for base in node.bases)
    return _Parameters(names, required, {*names}, inherits, inherits)
