"""What adapters read of a release's objects, by their own syntax trees, and what tables of the API have."""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

from impl.loading import probe

OPTIONAL = ("optional", "either")  # read what a release may lack


def names_in_tables(table: str) -> set[str]:
    """Return the names in uses of a table: of classes, members and parameters."""
    uses = [use for line in probe.entries(table) for use in line.uses]
    nodes = [node for use in uses for node in ast.walk(use)]
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    names |= {node.id for node in nodes if isinstance(node, ast.Name)}
    return names | {str(node.arg) for node in nodes if isinstance(node, ast.keyword)}


def defined_names(files: Iterable[Path]) -> set[str]:
    """Methods and fields of the classes in these files."""
    names = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                for member in node.body:
                    if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
                        names.add(member.name)
                    elif isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
                        names.add(member.target.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id == "self":
                    names.add(node.attr)
    return names


def attributes(files: Iterable[Path]) -> dict[str, str]:
    """Return the attributes that the code in these files reads of others than `self`, and where it
    first does."""
    attributes_found: dict[str, str] = {}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                if not (isinstance(node.value, ast.Name) and node.value.id == "self"):
                    attributes_found.setdefault(node.attr, f"{file.name}:{node.lineno}")
    return attributes_found


def calls(files: Iterable[Path], *functions: str) -> Iterator[tuple[str, ast.Call]]:
    """Calls of these functions, each with the line of its text."""
    for file in files:
        text = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                if node.func.id in functions:
                    yield f"{file.name}: {ast.unparse(node)}", node
