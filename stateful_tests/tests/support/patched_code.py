"""A fault in the code of one function of a release that this process has loaded, and out of it again."""

import ast
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def replaced(path: Path, old: str, new: str) -> str:
    """The text of a file with `new` in the one place of `old`."""
    source = path.read_text(encoding="utf-8")
    assert source.count(old) == 1, f"{old!r} is in {source.count(old)} places of {path}"
    return source.replace(old, new)


@contextmanager
def patched(path: Path, module: str, old: str, new: str) -> Iterator[None]:
    """With the fault, in the function that it is in."""
    code: Any = compile(replaced(path, old, new), str(path), "exec", dont_inherit=True)
    function: Any = importlib.import_module(module)
    source = path.read_text(encoding="utf-8")
    for name in _around(source, source.index(old)):
        code = next(c for c in code.co_consts if getattr(c, "co_name", None) == name)
        function = vars(function)[name]
    function = getattr(function, "_function", getattr(function, "__func__", function))
    right, function.__code__ = function.__code__, code
    yield
    function.__code__ = right


def _around(source: str, at: int) -> list[str]:
    """The class and the function that a place of a file is in."""
    line, names = (
        source.count("\n", 0, at + len(source[at:]) - len(source[at:].lstrip("\n "))) + 1,
        [],
    )
    nodes: list[Any] = list(ast.parse(source).body)
    while found := next((n for n in nodes if isinstance(n, ast.ClassDef | ast.FunctionDef)
                         and n.lineno <= line <= (n.end_lineno or 0)), None):  # fmt: skip
        names.append(found.name)
        nodes = found.body if isinstance(found, ast.ClassDef) else []
    return names
