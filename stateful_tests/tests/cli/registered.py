"""The classes and fields of the newest releases, as driven.toml asks for them."""

from __future__ import annotations

import ast
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from impl.loading.fetch import cache_folder
from impl.loading.wheel_parts import unpack_parts


def folders(engine: str, table: dict[str, Any]) -> list[Path]:
    """Return the folder of the release, and one of the files that no adapter reads:
    `table["more"]`, fetched once. Raises UnusableImplementation and OSError without an index."""
    release = table["release"]
    beginnings = tuple(table.get("more", ()))
    folders_found = [cache_folder() / f"{engine}-{release}"]
    if beginnings:
        folders_found.append(more := cache_folder() / f"configs-{engine}-{release}")
        if not more.is_dir():
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=more.parent) as work:
                unpack_parts(
                    f"{engine}=={release}",
                    Path(work) / "unpacked",
                    lambda path: path.as_posix().startswith(beginnings),
                )
                (Path(work) / "unpacked").rename(more)
    return folders_found


def names(table: dict[str, Any], roots: Iterable[Path]) -> set[str]:
    """Return all names that `found` and `fields` of a table find below the folders."""
    roots = list(roots)
    names_found = {
        name
        for files, pattern in table.get("found", ())
        for root in roots
        for file in root.glob(files)
        for name in re.findall(pattern, file.read_text(encoding="utf-8"), re.MULTILINE)
    }
    for files, kind in table.get("fields", ()):
        for file in (file for root in roots for file in root.glob(files)):
            names_found |= set(_fields(file.read_text(encoding="utf-8"), kind))
    return names_found


def _fields(text: str, kind: str) -> Iterator[str]:
    """Yield the fields of a class with their defaults, such as "CacheConfig.block_size=16": what
    its body declares, and without that what its constructor takes."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef) and node.name == kind:
            declared = list(_declarations(node))
            for name, default in declared or _parameters_taken(node):
                if not name.startswith("_") and not name.isupper():
                    yield f"{kind}.{name}" + (f"={_report_text(default)}" if default else "")


def _declarations(node: ast.ClassDef) -> Iterator[tuple[str, ast.expr | None]]:
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id, statement.value


def _parameters_taken(node: ast.ClassDef) -> Iterator[tuple[str, ast.expr | None]]:
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            plain = [*statement.args.posonlyargs, *statement.args.args][1:]
            missing = [None] * (len(plain) - len(statement.args.defaults))
            yield from zip(
                (argument.arg for argument in plain), [*missing, *statement.args.defaults], strict=True
            )
            keywords = (argument.arg for argument in statement.args.kwonlyargs)
            yield from zip(keywords, statement.args.kw_defaults, strict=True)


def _report_text(default: ast.expr) -> str:
    """Return a default; of `field(default=..)` and `field(default_factory=..)` what it says."""
    arguments = {}
    if isinstance(default, ast.Call):
        arguments = {word.arg: ast.unparse(word.value) for word in default.keywords}
    if "default" in arguments:
        return arguments["default"]
    return f"{arguments['default_factory']}()" if "default_factory" in arguments else ast.unparse(default)
