"""A release that calls a thing by another name than the code here: `renamed` of its class.

Its objects also answer to the name that the code here has. Hooks and exported tests are given its own.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from impl.adapter import UnusableImplementation
from impl.sglang.releases.api import renamed, uses
from impl.sglang.releases.catalogue import TABLE
from impl.sglang.releases.v0_5_10_to_14 import Release0510


def called(name: str, release: type[Release0510]) -> str:
    """What a release calls `Class.member`, or a function or a class of a module."""
    return renamed(name, release.renamed)


def alias(release: type[Release0510]) -> None:
    """Have what the release has renamed answer to the old name as well, in its modules that are loaded here.

    Raises UnusableImplementation where something else has that name.
    """
    for name, new in release.renamed.items():
        kind, _, old = name.rpartition(".")
        for file in dict.fromkeys(file for file, _ in _uses(name, release)):
            stem = file.removesuffix(".py").removesuffix("/__init__")
            module = importlib.import_module(f"sglang.srt.{stem.replace('/', '.')}")
            owner = getattr(module, called(kind, release)) if kind else module
            if kind and not isinstance(owner, type):
                continue
            if old in vars(owner):
                raise UnusableImplementation(
                    f"sglang {release.version}: {name} is there; by its class it is called {new}"
                )
            setattr(owner, old, _property(new) if kind else getattr(owner, new))


def _property(new: str) -> property:
    def put(this: Any, value: Any) -> None:
        setattr(this, new, value)

    return property(attrgetter(new), put)


def in_code(text: str, release: type[Release0510]) -> str:
    """Lines of Python that use a release, with the names that it has."""
    for name, new in release.renamed.items():
        kind, _, old = name.rpartition(".")
        is_call = any(isinstance(use, ast.Call) for _, use in _uses(name, release))
        then = r"(?=\()" if is_call else r"\b(?!\()"
        text = re.sub(rf"\.{old}{then}" if kind else rf"\b{old}\b", f".{new}" if kind else new, text)
    return text


def _uses(name: str, release: type[Release0510]) -> Iterator[tuple[str, ast.expr]]:
    """Files and uses of a name."""
    for file, use in uses(release, list(TABLE)):
        if ast.unparse(use.func if isinstance(use, ast.Call) else use) == name:
            yield file, use
