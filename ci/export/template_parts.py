"""Parts of exported tests: a template, for their releases, without what they do not use.

A test stands by itself, or imports what it needs from one module beside it and others.
"""

import ast
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ci import templates
from ci.export.helper_inlining import inline_helpers
from ci.export.specialised_scaffold import fill_lines, decide_branches
from impl.sglang.parts import namespaces
from impl.sglang.process.system import SGLangSystem
from impl.sglang.releases.catalogue import ALIKE, TABLE
from impl.sglang.releases.v0_5_10_to_14 import Release0510
from impl.sglang.tiers.system import TierSystem
from reference.geometry import PRESETS, Geometry

_IMPORTS = re.compile(r"(^from sglang.*\n)+", re.MULTILINE)
_SAME_MODULE = re.compile(r"^(from (\S+) import .*)\nfrom \2 import (.*)\n", re.MULTILINE)


_STAND_INS = ("Server", "Engine", "ConnectedEngine")
SHARED = "stand_in_server"  # the module that the tests of one folder import


def server(geometry: Geometry, code: str, more: Sequence[str] = ()) -> str:
    """Return the line that makes a server of these sizes for `code`.

    more: further arguments.
    """
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
    sizes_text = ", ".join(f"{name}={size}" for name, size in sizes.items() if size)
    variables = {name: value for name, value in geometry.settings if name != namespaces.SETTING}
    settings = "".join(f'\n        "{name}": "{value}",' for name, value in variables.items())
    if settings:
        sizes_text += f",\n    settings={{{settings}\n    }},"
    if more:
        sizes_text += "".join(f",\n    {each}" for each in more) + ","
    fits_one_line = len(sizes_text) < 80 and not settings and not more
    return f"server = Server({sizes_text})" if fits_one_line else f"server = Server(\n    {sizes_text}\n)"


def definitions(
    code: str,
    geometry: Geometry,
    system: SGLangSystem | TierSystem,
    versions: set[str],
    *,
    sessions: bool,
) -> str:
    """Return the definitions that `code` needs, for a server of this kind and geometry, on each of the
    releases."""
    arguments = _arguments(code)
    source = _render(
        system, versions, [geometry] * 3, paged=geometry.page_size > 1, sessions=sessions,
        plain=re.search(r"server\.request\((?!.*session=)", code) is not None,
        rewinds="drop_previous_output" in code, spec="spec=True" in code,
        decodes="DECODE" in code or "decode(" in code, lock_holders="compute(" in code, late="late=" in code,
        mixed="mix_with_running(" in code, host=isinstance(system, TierSystem), bigram=geometry.bigram,
        namespaces=namespaces.SETTING in dict(geometry.settings), settings="settings=" in code,
        checks="memory_checks(" in code or isinstance(system, TierSystem), parameters=", ".join(arguments),
    )  # fmt: skip
    facts = {
        "window is not None": geometry.window is not None,
        "tree": bool(geometry.tree),
        "page_size > 1": geometry.page_size > 1,
        "spec": "spec=True" in code,
    }
    nothing = {"swa_tokens": None, "window": None, "tree": False, "spec": False}
    absent = {name: value for name, value in nothing.items() if name not in arguments}
    of_server = {
        "server.page_size == 1": geometry.page_size == 1,
        "server.window is None": geometry.window is None,
        "server.window is not None": geometry.window is not None,
        "server.window": geometry.window,
    }
    by_function: dict[str, dict[str, Any]] = {"": of_server, "Server.__init__": facts}
    if "evicted=" not in code:
        by_function["compute"] = {"evicted": 0}
    source = decide_branches(source, by_function, {"Server.__init__": absent})
    needed = used_definitions(fill_lines(source), f"unittest\n{code}")
    return inline_helpers(needed, code)


def _arguments(code: str) -> list[str]:
    """Return the names of the arguments of a test's server."""
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    server_call = next(call for call in calls if ast.unparse(call.func) == "Server")
    return [keyword.arg for keyword in server_call.keywords if keyword.arg is not None]


def head_of(needed: str) -> tuple[str, str]:
    """Return the imports of a test, which stand above it, and its definitions, which stand below."""
    tree = ast.parse(needed)
    lines = needed.split("\n")
    last = 0
    for node in tree.body:
        if not isinstance(node, (ast.Import, ast.ImportFrom, ast.Try)):
            break
        last = node.end_lineno or node.lineno
    return "\n".join(lines[:last]), "\n".join(lines[last:]).strip()


def shared_definitions(system: SGLangSystem | TierSystem, versions: set[str]) -> str:
    """Return all definitions, for servers of any size, on these releases and those that are like them."""
    source, names = _whole_template(system, versions)
    about = textwrap.fill(f"Made by kvspec, for sglang {', '.join(_versions_alike(versions))}.", 100)
    head = f'"""What the tests beside share: a server of SGLang\'s own classes.\n\n{about}\n"""'
    return "\n\n".join([head, used_definitions(fill_lines(source), "\n".join(names))]) + "\n"


def imports(code: str, system: SGLangSystem | TierSystem, versions: set[str]) -> str:
    """Return the imports that `code` needs: of the release, and of the shared module."""
    source, names = _whole_template(system, versions)
    names_used = _used_names(ast.parse(code))
    lines = [used_definitions(source, "\n".join(["unittest", *names_used.difference(names)]))]
    imported_names = ", ".join(sorted(name for name in names_used.intersection(names) if "." not in name))
    wrapped = textwrap.fill(imported_names, 100, initial_indent="    ", subsequent_indent="    ")
    if len(imported_names) > 76:
        imported_names = f"(\n{wrapped},\n)"
    return "\n\n".join([*lines, f"from {SHARED} import {imported_names}"])


def _versions_alike(versions: set[str]) -> tuple[str, ...]:
    return next(versions_alike for versions_alike in ALIKE if versions <= {*versions_alike})


def _whole_template(system: SGLangSystem | TierSystem, versions: set[str]) -> tuple[str, list[str]]:
    """Return the template for everything that a test may do, and the names of its functions, classes
    and methods."""
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
        "settings",
        "checks",
    )
    host = isinstance(system, TierSystem)
    sizes = replace(PRESETS["page1"], tree=True)
    servers = [replace(sizes, tree=False), replace(sizes, window=None, swa_pages=0), sizes]
    parameters = (
        "page_size, rows, width, full_tokens, swa_tokens=None, window=None, tree=False, spec=False,"
        "\n        settings=(), bigram=False,"
    )
    if host:
        parameters += " host=None, policy=None,"
    source = _render(
        system, {*_versions_alike(versions)}, servers, host=host, parameters=parameters,
        **dict.fromkeys(features, True),
    )  # fmt: skip
    names = re.findall(r"^(?:def|class) (\w+)", source, re.MULTILINE)
    return source, [
        *names,
        *(f"server.{m}" for m in re.findall(r"^    def (\w+)", source, re.MULTILINE)),
    ]


def _render(
    system: SGLangSystem | TierSystem,
    versions: set[str],
    servers: Sequence[Geometry],
    *,
    parameters: str,
    **features: bool,
) -> str:
    """Render the template.

    servers: sizes with chunks alone, with a tree, and with a tree and a window.
    parameters: those of the server.
    """
    order = list(TABLE)
    kind = system.kind
    sorted_kinds = [TABLE[version] for version in sorted(versions, key=order.index)]
    oldest = sorted_kinds[0]
    newest = sorted_kinds[-1]

    def order_reached(version: str) -> set[bool]:
        return {order.index(v) >= order.index(version) for v in versions}

    unified = "False", "tree and window is not None", "tree", "True"  # each for one more of these
    return templates(escape=False).get_template("exported_test.py.j2").render(
        features, parameters=parameters, overlap=system.overlap, groups=kind.groups_prefill, core=kind.core,
        oldest=oldest, newest=newest, held=newest.in_record(),
        spec_module=Path(newest.spec_file).stem,
        imported=lambda what: _import_of_name(what, oldest, newest),
        unified="True" if features["host"] else unified[sum(map(kind.is_unified, servers))],
        across=lambda version: len(order_reached(version)) == 2,
        since=lambda version: order_reached(version) == {True},
    )  # fmt: skip


def _import_of_name(name: str, oldest: type[Release0510], newest: type[Release0510]) -> str:
    """Return the lines that import a name of the newest release, or where that fails, of the oldest."""
    lines = _import_lines(name, newest)
    older = _import_lines(name, oldest)
    if lines == older:
        return "\n".join(lines)
    since = next(version for version, kind in TABLE.items() if _import_lines(name, kind) == lines)
    tried, instead = (textwrap.indent("\n".join(each), "    ") for each in (lines, older))
    return f"\ntry:\n{tried}\nexcept ImportError:  # before {since}\n{instead}"


def _import_lines(what: str, kind: type[Release0510]) -> list[str]:
    """Return the imports of one release. Each object has one name in the template, whatever a release
    calls it."""
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


def used_definitions(source: str, code: str) -> str:
    """Return `source` without definitions, and methods of the stand-in server or engine, that `code`
    does not reach."""
    units = list(_template_units(ast.parse(source)))
    wanted = _used_names(ast.parse(code))
    unseen = units
    while more := [u for u in unseen if u.binds & wanted]:
        unseen = [u for u in unseen if not u.binds & wanted]
        wanted |= set().union(*(u.uses for u in more))
    lines: list[str | None] = list(source.split("\n"))
    for unit in unseen:
        lines[unit.first - 1 : unit.last] = [None] * (unit.last - unit.first + 1)
    text = "\n".join(line for line in lines if line is not None)
    while (merged := _SAME_MODULE.sub(_joined_imports, text)) != text:
        text = merged
    text = _IMPORTS.sub(lambda run: "".join(sorted(run.group().splitlines(keepends=True))), text)
    text = re.sub(r"\n{3,}(try:|NEW_NAMES|VOCABULARY)", r"\n\n\1", text)
    return re.sub(r"\n{4,}", "\n\n\n", text).strip()


def _joined_imports(match: re.Match[str]) -> str:
    """Return two imports from one module as one line, or two where one would be too long."""
    one, _, more = match.groups()
    return f"{one}, {more}\n" if len(one) + len(more) <= 106 else match.group()


def _template_units(tree: ast.Module) -> Iterator[_Unit]:
    for node in tree.body:
        last = node.end_lineno or node.lineno
        if isinstance(node, ast.ClassDef) and node.name in _STAND_INS:
            methods = [
                m for m in node.body if isinstance(m, ast.FunctionDef) and m.name != "__init__"
            ]
            for method in methods:
                end = method.end_lineno or method.lineno
                yield _Unit(method.lineno - 1, end, {f"server.{method.name}"}, _used_names(method))
            last = methods[0].lineno - 2
            node.body = [member for member in node.body if member not in methods]
        yield _Unit(node.lineno, last, _bound_names(node), _used_names(node))


def _used_names(tree: ast.AST) -> set[str]:
    """Return names, and attributes of the server or engine."""
    nodes = list(ast.walk(tree))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return names | {
        f"server.{node.attr}"
        for node in nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("server", "engine", "self")
    }


def _bound_names(node: ast.stmt) -> set[str]:
    """Return the names that a statement at the top of a file defines."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {alias.asname or alias.name for alias in node.names}
    if isinstance(node, ast.Try):
        return set().union(*map(_bound_names, node.body))
    targets = node.targets if isinstance(node, ast.Assign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}
