"""Parts of exported tests: a template, for their releases, without what they do not use.

A test stands by itself, or imports what it needs from one module beside it and others.
"""

import ast
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ci import templates
from impl.sglang.parts import namespaces
from impl.sglang.process.system import SGLangSystem
from impl.sglang.releases.catalogue import ALIKE, TABLE
from impl.sglang.releases.v0_5_10_to_14 import Release0510
from impl.sglang.tiers.system import TierSystem
from reference.geometry import PRESETS, Geometry

_IMPORTS = re.compile(r"(^from sglang.*\n)+", re.MULTILINE)
_SAME_MODULE = re.compile(r"^(from (\S+) import .*)\nfrom \2 import (.*)\n", re.MULTILINE)


SHARED = "stand_in_server"  # the module that the tests of one folder import


def server(geometry: Geometry, code: str, more: Sequence[str] = ()) -> str:
    """The line that makes a server of these sizes for `code`. more: further arguments."""
    page = geometry.page_size
    sizes = {
        "page_size": page,
        "rows": geometry.rows,
        "width": geometry.width,
        "full_tokens": geometry.full_pages * page,
        "swa_tokens": geometry.swa_pages * page,
        "window": geometry.window,
        "tree": geometry.tree,
        "bigram": geometry.bigram,
        "spec": "spec=True" in code,
    }
    given = ", ".join(f"{name}={size}" for name, size in sizes.items() if size)
    variables = {name: value for name, value in geometry.settings if name != namespaces.SETTING}
    settings = "".join(f'\n        "{name}": "{value}",' for name, value in variables.items())
    if settings:
        given += f",\n    settings={{{settings}\n    }},"
    if more:
        given += "".join(f",\n    {each}" for each in more) + ","
    one = len(given) < 80 and not settings and not more
    return f"server = Server({given})" if one else f"server = Server(\n    {given}\n)"


def definitions(
    code: str,
    geometry: Geometry,
    system: SGLangSystem | TierSystem,
    versions: set[str],
    *,
    sessions: bool,
) -> str:
    """The definitions that `code` needs, for a server of this kind and geometry, on each of the releases."""
    source = _rendered(
        system, versions, paged=geometry.page_size > 1, sessions=sessions,
        plain=re.search(r"server\.request\((?!.*session=)", code) is not None,
        rewinds="drop_previous_output" in code, spec="spec=True" in code,
        decodes="DECODE" in code or "decode(" in code, lock_holders="compute(" in code, late="late=" in code,
        mixed="mix_with_running(" in code, host=isinstance(system, TierSystem), bigram=geometry.bigram,
        namespaces=namespaces.SETTING in dict(geometry.settings),
    )  # fmt: skip
    return _used(source, f"unittest\n{code}")


def shared(system: SGLangSystem | TierSystem, versions: set[str]) -> str:
    """All definitions, for servers of any size, on these releases and those that are like them."""
    source, names = _whole(system, versions)
    about = textwrap.fill(f"Made by kvspec, for sglang {', '.join(_alike(versions))}.", 100)
    head = f'"""What the tests beside share: a server of SGLang\'s own classes.\n\n{about}\n"""'
    return "\n\n".join([head, _used(source, "\n".join(names))]) + "\n"


def imports(code: str, system: SGLangSystem | TierSystem, versions: set[str]) -> str:
    """Return the imports that `code` needs: of the release, and of the shared module."""
    source, names = _whole(system, versions)
    used = _names(ast.parse(code))
    lines = [_used(source, "\n".join(["unittest", *used.difference(names)]))]
    made = ", ".join(sorted(name for name in used.intersection(names) if "." not in name))
    wrapped = textwrap.fill(made, 100, initial_indent="    ", subsequent_indent="    ")
    made = f"(\n{wrapped},\n)" if len(made) > 76 else made
    return "\n\n".join([*lines, f"from {SHARED} import {made}"])


def _alike(versions: set[str]) -> tuple[str, ...]:
    return next(alike for alike in ALIKE if versions <= {*alike})


def _whole(system: SGLangSystem | TierSystem, versions: set[str]) -> tuple[str, list[str]]:
    """The template for all that a test may do, and the names of its functions, classes and methods."""
    features = (
        "paged",
        "sessions",
        "plain",
        "rewinds",
        "spec",
        "decodes",
        "lock_holders",
        "late",
        "mixed",
        "bigram",
        "namespaces",
    )
    host = isinstance(system, TierSystem)
    source = _rendered(system, {*_alike(versions)}, host=host, **dict.fromkeys(features, True))
    names = re.findall(r"^(?:def|class) (\w+)", source, re.MULTILINE)
    return source, [
        *names,
        *(f"server.{m}" for m in re.findall(r"^    def (\w+)", source, re.MULTILINE)),
    ]


def _rendered(system: SGLangSystem | TierSystem, versions: set[str], **features: bool) -> str:
    order = list(TABLE)
    kind = system.kind
    sizes = replace(PRESETS["page1"], tree=True)
    sorted_kinds = [TABLE[version] for version in sorted(versions, key=order.index)]
    oldest, newest = sorted_kinds[0], sorted_kinds[-1]

    def reached(version: str) -> set[bool]:
        return {order.index(v) >= order.index(version) for v in versions}

    servers = replace(sizes, tree=False), replace(sizes, window=None, swa_pages=0), sizes
    unified = "False", "tree and window is not None", "tree", "True"  # each for one more of these
    return templates(escape=False).get_template("exported_test.py.j2").render(
        features, overlap=system.overlap, groups=kind.groups_prefill, core=kind.core,
        oldest=oldest, newest=newest, held=newest.in_record(),
        spec_module=Path(newest.spec_file).stem,
        imported=lambda what: _imported(what, oldest, newest),
        unified="True" if features["host"] else unified[sum(map(kind.is_unified, servers))],
        across=lambda version: len(reached(version)) == 2, since=lambda version: reached(version) == {True},
    )  # fmt: skip


def _imported(what: str, oldest: type[Release0510], newest: type[Release0510]) -> str:
    """The lines that import something of the newest release, or where that fails, of the oldest."""
    lines = _import_lines(what, newest)
    older = _import_lines(what, oldest)
    if lines == older:
        return "\n".join(lines)
    since = next(version for version, kind in TABLE.items() if _import_lines(what, kind) == lines)
    tried, instead = (textwrap.indent("\n".join(each), "    ") for each in (lines, older))
    return f"\ntry:\n{tried}\nexcept ImportError:  # before {since}\n{instead}"


def _import_lines(what: str, kind: type[Release0510]) -> list[str]:
    """The imports of one release. Each object has one name in the template, whatever a release calls it."""
    package, _, paged = kind.paged_allocator.rpartition(".")
    objects = {
        "sessions": [
            (kind.session_controller, "SessionController", "SessionController"),
            (*kind.session_cache, "StreamingSession"),
        ],
        "paged": [(package, paged, "paged")],
        "swa": [(kind.swa_allocators, "SWATokenToKVPoolAllocator", "SWATokenToKVPoolAllocator")],
        "checks": [(*each, each[1]) for each in (kind.checker, kind.observer) if each is not None],
    }
    return [
        f"from {module} import {name}" + (f" as {here}" if name != here else "")
        for module, name, here in objects[what]
    ]


class _Unit(NamedTuple):
    """A statement at the top of the template, or a method of its Server."""

    first: int  # line
    last: int
    binds: set[str]
    uses: set[str]


def _used(source: str, code: str) -> str:
    """`source` without the definitions, and methods of the Server, that nothing leads to from `code`."""
    units = list(_units(ast.parse(source)))
    wanted = _names(ast.parse(code))
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
            methods = [
                m for m in node.body if isinstance(m, ast.FunctionDef) and m.name != "__init__"
            ]
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
