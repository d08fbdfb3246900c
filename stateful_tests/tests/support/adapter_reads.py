"""What adapters read of a release's objects, by their own syntax trees, and what tables of the API have."""

import ast
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

from impl.loading import probe

OPTIONAL = ("optional", "first_attribute")  # read what a release may lack


@lru_cache(maxsize=256)  # the files of an engine; each is asked about several times
def _nodes(file: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))


def names_in_tables(table: str) -> set[str]:
    """Return the names in uses of a table: of classes, members and parameters."""
    uses = [use for line in probe.entries(table) for use in line.uses]
    nodes = [node for use in uses for node in ast.walk(use)]
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    names |= {node.id for node in nodes if isinstance(node, ast.Name)}
    return names | {str(node.arg) for node in nodes if isinstance(node, ast.keyword)}


def defined_names(files: Iterable[Path]) -> set[str]:
    """Classes, functions and values of these files, and the members of their classes."""
    names = set()
    for file in files:
        for node in _nodes(file):
            if isinstance(node, ast.Module | ast.ClassDef):
                names |= {name for member in node.body for name in _defined_by(member)}
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id == "self":
                    names.add(node.attr)
    return names


def _defined_by(statement: ast.stmt) -> set[str]:
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Assign(targets=targets) | ast.AnnAssign(target=ast.Name() as targets):
            targets_found = targets if isinstance(targets, list) else [targets]
            return {target.id for target in targets_found if isinstance(target, ast.Name)}
    return set()


def enumeration_members(files: Iterable[Path]) -> set[str]:
    """The members of the enumerations in these files."""
    names = set()
    for file in files:
        for node in _nodes(file):
            if isinstance(node, ast.ClassDef) and "Enum" in "".join(map(ast.unparse, node.bases)):
                names |= {name for member in node.body for name in _defined_by(member)}
    return names


def texts(files: Iterable[Path]) -> set[str]:
    """The texts in the code of these files."""
    return {
        node.value
        for file in files
        for node in _nodes(file)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def attributes(files: Iterable[Path]) -> dict[str, str]:
    """Return the attributes that the code in these files reads of others than `self`, and where it
    first does."""
    attributes_found: dict[str, str] = {}
    for file in files:
        for node in _nodes(file):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                if not (isinstance(node.value, ast.Name) and node.value.id == "self"):
                    attributes_found.setdefault(node.attr, f"{file.name}:{node.lineno}")
    return attributes_found


def calls(files: Iterable[Path], *functions: str) -> Iterator[tuple[str, ast.Call]]:
    """Calls of these functions, each with the line of its text."""
    for file in files:
        for node in _nodes(file):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                if node.func.id in functions:
                    yield f"{file.name}: {ast.unparse(node)}", node
