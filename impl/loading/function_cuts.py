"""Functions cut out of a release's files, where the rest of a file is a server that nobody needs.

A large file is parsed once: the product is cached beside the file's bytecode.
"""

from __future__ import annotations

import __future__
import ast
import builtins
import contextlib
import dis
import hashlib
import importlib.util
import marshal
import os
import sys
import tempfile
import types
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef


def cut(path: Path, names: frozenset[str], env: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """Return functions (`name`, or `Class.name`) cut out of a file and compiled by themselves in `env`.

    The rest of the file is neither imported nor run. Names that the file lacks are left out.
    """
    code, owners = _load_or_make(
        path, "cut", sorted(names), lambda text: _compile_functions(text, path, names)
    )
    scope: dict[str, Any] = dict(env)
    exec(code, scope)  # the release's own code is what is tested
    return {
        name: getattr(scope[owner], name) if owner else scope[name]
        for name, owner in owners.items()
    }


def _compile_functions(
    source: str, path: Path, names: frozenset[str]
) -> tuple[types.CodeType, dict[str, str]]:
    """Return the code of a module with nothing but these functions, and the class of each function, "" for
    none."""
    statements: list[ast.stmt] = []
    owners: dict[str, str] = {}
    for node in ast.parse(source, str(path)).body:
        if isinstance(node, _FUNCTIONS) and node.name in names:
            statements.append(_undecorated(node))
            owners[node.name] = ""
        elif isinstance(node, ast.ClassDef):
            methods = [
                _undecorated(member)
                for member in node.body
                if isinstance(member, _FUNCTIONS) and f"{node.name}.{member.name}" in names
            ]
            if methods:  # in a class of that name, by which a profiler knows them
                node.bases = []
                node.keywords = []
                node.decorator_list = []
                node.body = [*methods]
                statements.append(node)
                owners |= {method.name: node.name for method in methods}
    future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
    module = ast.fix_missing_locations(ast.Module([future, *statements], []))
    return compile(module, str(path), "exec"), owners


# Names by which a function asks the host, or does something to it.
_HOST_NAMES = frozenset(
    {"backends", "cuda", "distributed", "eval", "exec", "get_device_module", "input", "mps", "npu", "open",
     "version", "xpu"}
)  # fmt: skip


def runnable_functions(path: Path, env: Collection[str]) -> frozenset[str]:
    """Return the functions of a file that can run as they are: they need nothing but builtins, names of
    `env` and each other, have no decorator, import nothing, and ask nothing about the host."""
    found: frozenset[str] = _load_or_make(
        path, "plain", sorted(env), lambda text: _runnable(text, path, env)
    )
    return found


def _runnable(source: str, path: Path, env: Collection[str]) -> frozenset[str]:
    """Return the runnable functions of a source text (see `runnable_functions`)."""
    needs: dict[str, set[str]] = {}
    for node in ast.parse(source, str(path)).body:
        if isinstance(node, ast.FunctionDef) and not node.decorator_list:
            alone = ast.Module([node], [])
            flag = __future__.annotations.compiler_flag
            codes = [*_codes(compile(alone, str(path), "exec", flag, dont_inherit=True))]
            steps = [step for code in codes for step in dis.get_instructions(code)]
            named = {name for code in codes for name in code.co_names}
            if not named & _HOST_NAMES and all(step.opname != "IMPORT_NAME" for step in steps):
                loads = {
                    step.argval for step in steps if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")
                }
                needs[node.name] = loads - {*dir(builtins), *env}
    while lacking := [name for name, names in needs.items() if names - needs.keys()]:
        for name in lacking:
            del needs[name]
    return frozenset(needs)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a code object, and all functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _undecorated(function: _Function) -> _Function:
    """Return the function without its decorators."""
    function.decorator_list = []
    return function


_MAKER = Path(__file__).read_bytes() + importlib.util.MAGIC_NUMBER


def _load_or_make(path: Path, kind: str, names: list[str], make: Callable[[str], Any]) -> Any:
    """Return the product of `make` for the text of a file, from the cache if it is there.

    The product is made again after the file, this module or Python has changed. It is not cached where Python
    writes no bytecode, or where the folder cannot be written.

    kind, names: tell the products of one file apart.
    make: returns a product that marshal can write.
    """
    source = path.read_bytes()
    digest = hashlib.sha256(b"\0".join((_MAKER, str(path).encode(), source))).digest()
    key = hashlib.sha256("\0".join((kind, *names)).encode()).hexdigest()[:16]
    file = Path(importlib.util.cache_from_source(str(path), optimization=f"kvspec{key}"))
    with contextlib.suppress(OSError, ValueError, EOFError, TypeError):
        cached = file.read_bytes()
        if cached.startswith(digest):
            return marshal.loads(cached[len(digest) :])
    product = make(source.decode("utf-8"))
    if not sys.dont_write_bytecode:
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as written:
                written.write(digest + marshal.dumps(product))
            os.replace(written.name, file)
    return product
