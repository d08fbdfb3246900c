"""Names that adapters use of releases, by the syntax trees of the adapters (`impl.loading.used_names`)."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import impl
from impl.engines import PACKS
from impl.loading.used_names import PLAIN
from impl.system_spec import EngineName

# Parts of an adapter that only one way uses: a piece of the file's path -> the way.
_WAYS = {
    "sglang/tiers/": "hicache",
    "vllm/pair/": "pair",
    "vllm/images": "images",
    "vllm/offload.py": "offload",
    "vllm/bare_connectors.py": "offload",
    "vllm/runner_v2.py": "v2",
    "vllm/states_v2.py": "v2",
}
# What serve-check and the watcher use decides nothing, nor what tests in upstream's shape load besides.
_APART = "sglang/server/", "vllm/testing.py"
# Objects of ours that raise where a release asks for what they have not been given.
_STAND_INS = {"Bag", "Questions", "Values", "UNSET"}
_QUESTIONS = "is_", "use_", "uses_"  # as Questions has them, which answers no instead
# Calls whose keywords are names of the release.
_GIVE = {"bare", "dict", "accepted_arguments", "update", "_make_object"}
_WORD = re.compile(r"[A-Za-z_]\w{2,}")


def names_given_to_releases(
    engine: EngineName, defaulted: Collection[str] = ()
) -> dict[str, frozenset[str]]:
    """Return name -> the ways in which the adapter gives it to a release; none for a name that it
    reads.

    defaulted: names that the release reads with a default (`names_with_defaults`). A stand-in cannot refuse
        their successors, nor those of a question, which it answers no.
    """
    ways_by_name: dict[str, frozenset[str]] = {}
    for file, tree in _adapter_files(engine):
        way = next((way for piece, way in _WAYS.items() if piece in file.as_posix()), PLAIN)
        for name in _names_read(tree):
            ways_by_name.setdefault(name, frozenset())
        of_stand_ins = (
            name
            for name, kind in _names_of_stand_ins(tree)
            if name in defaulted or (kind == "Questions" and name.startswith(_QUESTIONS))
        )
        for name in (*_names_given(tree), *of_stand_ins):
            ways_by_name[name] = ways_by_name.get(name, frozenset()) | {way}
    return ways_by_name


def names_with_defaults(files: Iterable[Path]) -> set[str]:
    """Return the attributes that the code in these files reads with a default."""
    trees = (ast.parse(file.read_text(encoding="utf-8")) for file in files if file.is_file())
    names = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        match node:
            case ast.Call(func=ast.Name("getattr"), args=[_, ast.Constant(str(name)), _]):
                names.add(name)
            case ast.Call(func=ast.Name("hasattr"), args=[_, ast.Constant(str(name))]):
                names.add(name)
    return names


def _names_of_stand_ins(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the attributes that stand-ins are made with, and the class of the stand-in."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (kind := ast.unparse(node.func)) in _STAND_INS:
            yield from ((keyword.arg, kind) for keyword in node.keywords if keyword.arg)


def _adapter_files(engine: EngineName) -> Iterator[tuple[Path, ast.Module]]:
    folder = PACKS[engine].rpartition(".")[2]
    for file in sorted((Path(impl.__file__).parent / folder).rglob("*.py")):
        if not any(piece in file.as_posix() for piece in _APART):
            yield file, ast.parse(file.read_text(encoding="utf-8"))


def _names_read(tree: ast.Module) -> Iterator[str]:
    """Return names of attributes and arguments, and texts that may be names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if re.fullmatch(r"[\w.]+", node.value):  # also "Class.member"
                yield from _WORD.findall(node.value)


def _names_given(tree: ast.Module) -> Iterator[str]:
    """Return names that are stored in objects of others or given by keys of dictionaries. A class named as a
    mixin is a base of a class of the release: what it stores is as well."""
    aside = {id(node) for declared in ast.walk(tree) if _declares(declared) for node in ast.walk(declared)}
    for node in ast.walk(tree):
        if id(node) in aside:
            continue
        match node:
            case ast.Attribute(value=owner, attr=name, ctx=ast.Store() | ast.Del()):
                if not (isinstance(owner, ast.Name) and owner.id == "self"):
                    yield name
            case ast.ClassDef(name=name) if name.endswith("Mixin"):
                yield from _stored_names(node)
            case ast.Dict(keys=keys):
                yield from filter(None, map(_name_in, keys))
            case ast.Subscript(slice=ast.Constant(value=str(name)), ctx=ast.Store()):
                yield name
            case ast.Call(func=function, args=arguments, keywords=keywords):
                called = ast.unparse(function).rpartition(".")[2]
                if called in _GIVE:
                    yield from (keyword.arg for keyword in keywords if keyword.arg)
                if called in ("setattr", "delattr"):
                    yield from filter(None, map(_name_in, arguments[1:2]))


def _stored_names(node: ast.ClassDef) -> Iterator[str]:
    for child in ast.walk(node):
        if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store):
            yield child.attr


def _declares(node: ast.AST) -> bool:
    """Return whether a statement declares the attributes of stand-ins."""
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    return any(isinstance(target, ast.Name) and target.id in _STAND_INS for target in targets)


def _name_in(node: ast.AST | None) -> str:
    """Return the name that a constant is; "" for anything else."""
    if (
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and _WORD.fullmatch(node.value)
    ):
        return node.value
    return ""
