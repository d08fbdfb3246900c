"""What an exported test is made of: a template, for its sizes and releases, less what it does not use."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ci import TEMPLATES
from impl.sglang.process.system import SGLangSystem
from impl.sglang.releases.catalogue import TABLE
from reference.geometry import Geometry

_ENVIRONMENT = Environment(
    loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    autoescape=False,
)  # fmt: skip

_IMPORTS = re.compile(r"(^from sglang.*\n)+", re.MULTILINE)
_SAME_MODULE = re.compile(r"^(from (\S+) import .*)\nfrom \2 import (.*)\n", re.MULTILINE)


def definitions(
    code: str, geometry: Geometry, system: SGLangSystem, versions: set[str], *, sessions: bool
) -> str:  # fmt: skip
    """The definitions that `code` needs, for a server of this kind and geometry, on each of the releases."""
    order, page, kind = list(TABLE), geometry.page_size, system.kind

    def reached(version: str) -> set[bool]:
        return {order.index(v) >= order.index(version) for v in versions}

    source = _ENVIRONMENT.get_template("exported_test.py.j2").render(
        tree=geometry.tree, swa=geometry.window is not None, paged=page > 1, sessions=sessions,
        plain=re.search(r"server\.request\((?!.*session=)", code) is not None,
        rewinds="drop_previous_output" in code, spec="spec=True" in code,
        decodes="DECODE" in code or "decode(" in code, lock_holders="compute(" in code, page_size=page,
        window=geometry.window, rows=geometry.rows, width=geometry.width,
        late="late=" in code, overlap=system.overlap, groups=kind.groups_prefill,
        unified=kind.is_unified(geometry), core=kind.core, full_tokens=geometry.full_pages * page,
        swa_tokens=None if geometry.window is None else geometry.swa_pages * page,
        across=lambda version: len(reached(version)) == 2, since=lambda version: reached(version) == {True},
    )  # fmt: skip
    return _used(source, code)


class _Unit(NamedTuple):
    """A statement at the top of the template, or a method of its Server."""

    first: int  # line
    last: int
    binds: set[str]
    uses: set[str]


def _used(source: str, code: str) -> str:
    """`source` without the definitions, and methods of the Server, that nothing leads to from `code`."""
    units = list(_units(ast.parse(source)))
    wanted = _names(ast.parse(code)) | {"unittest"}
    unseen = units
    while more := [u for u in unseen if u.binds & wanted]:
        unseen = [u for u in unseen if not u.binds & wanted]
        wanted |= set().union(*(u.uses for u in more))
    lines: list[str | None] = list(source.split("\n"))
    for unit in unseen:
        lines[unit.first - 1 : unit.last] = [None] * (unit.last - unit.first + 1)
    text = "\n".join(line for line in lines if line is not None)
    while (merged := _SAME_MODULE.sub(r"\1, \3\n", text)) != text:
        text = merged
    text = _IMPORTS.sub(lambda run: "".join(sorted(run.group().splitlines(keepends=True))), text)
    text = re.sub(r"\n{3,}(try:|NEW_NAMES|VOCABULARY)", r"\n\n\1", text)
    return re.sub(r"\n{4,}", "\n\n\n", text).strip()


def _units(tree: ast.Module) -> Iterator[_Unit]:
    for node in tree.body:
        last = node.end_lineno or node.lineno
        if isinstance(node, ast.ClassDef) and node.name == "Server":
            methods = [m for m in node.body if isinstance(m, ast.FunctionDef) and m.name != "__init__"]
            for method in methods:
                end = method.end_lineno or method.lineno
                yield _Unit(method.lineno - 1, end, {f"server.{method.name}"}, _names(method))
            last = methods[0].lineno - 2
            node.body = [member for member in node.body if member not in methods]
        yield _Unit(node.lineno, last, _bound(node), _names(node))


def _names(tree: ast.AST) -> set[str]:
    """Names, and attributes of the server."""
    nodes = list(ast.walk(tree))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return names | {
        f"server.{node.attr}"
        for node in nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("server", "self")
    }


def _bound(node: ast.stmt) -> set[str]:
    """The names that a statement at the top of a file defines."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {alias.asname or alias.name for alias in node.names}
    if isinstance(node, ast.Try):
        return set().union(*map(_bound, node.body))
    targets = node.targets if isinstance(node, ast.Assign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}
