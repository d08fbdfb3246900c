"""A fault in the code of one function of a release that this process has loaded, and out of it again."""

import ast
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any


def replace_once(path: Path, old: str, new: str) -> str:
    """Return the text of a file with `new` in the one place of `old`."""
    source = path.read_text(encoding="utf-8")
    assert source.count(old) == 1, f"{old!r} is in {source.count(old)} places of {path}"
    return source.replace(old, new)


@contextmanager
def patch_function(path: Path, module: str, old: str, new: str) -> Iterator[None]:
    """Put the fault into the function that it is in, for the time of a block."""
    source = path.read_text(encoding="utf-8")
    around = _around(source, source.index(old))
    code: Any = compile(_alone(replace_once(path, old, new), around, new.count("\n") - old.count("\n")),
                        str(path), "exec", dont_inherit=True)  # fmt: skip
    function: Any = importlib.import_module(module)
    for node in around:
        code = next(c for c in code.co_consts if getattr(c, "co_name", None) == node.name)
        function = vars(function)[node.name]
    function = getattr(function, "_function", getattr(function, "__func__", function))
    right = function.__code__
    function.__code__ = code
    yield
    function.__code__ = right


def _around(source: str, at: int) -> list[Any]:
    """Return the class and the function that a place of a file is in."""
    line = source.count("\n", 0, at + len(source[at:]) - len(source[at:].lstrip("\n "))) + 1
    found: list[Any] = []
    nodes: list[Any] = list(_parsed(source).body)
    while node := next((n for n in nodes if isinstance(n, _SCOPES)
                        and n.lineno <= line <= (n.end_lineno or 0)), None):  # fmt: skip
        found.append(node)
        nodes = node.body if isinstance(node, ast.ClassDef) else []
    return found


_SCOPES = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_parsed = lru_cache(maxsize=16)(ast.parse)


def _alone(source: str, around: list[Any], more: int) -> str:
    """Return the text of a function in its classes, on the lines that it has in the file: a whole
    file takes ten times as long to compile.

    more: lines that the function has more than `around` says.
    """
    *classes, function = around
    first = min([function.lineno, *(each.lineno for each in function.decorator_list)])
    future = "from __future__ import annotations"
    heads = [future] if f"\n{future}" in source else []
    heads += [f"{' ' * each.col_offset}class {each.name}:" for each in classes]
    empty = [""] * (first - 1 - len(heads))
    lines = source.split("\n")[first - 1 : function.end_lineno + more]
    return "\n".join([*empty, *heads, *lines, ""])
