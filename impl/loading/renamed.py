"""Names that a release has changed: "Class.member", or the name of a function or class -> what it calls that.

The code here, and the tables of the API, have the old names. Objects of the release answer to both; exported
tests are written with its own.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any

from impl.adapter import UnusableImplementation


def in_uses(text: str, names: Mapping[str, str]) -> str:
    """Return uses of a table of the API, by the names that the release has."""
    members_first = sorted(names.items(), key=lambda each: "." not in each[0])
    for name, new in members_first:
        kind, _, member = name.rpartition(".")
        found = rf"\b{kind}\.{member}\b" if kind else rf"(?<![.\w]){name}\b"
        text = re.sub(found, f"{kind}.{new}" if kind else new, text)
    return text


def name_of(use: ast.expr) -> str:
    """Return the "Class.member", or name, of a use."""
    return ast.unparse(use.func if isinstance(use, ast.Call) else use)


def alias(module: Any, name: str, names: Mapping[str, str]) -> None:
    """Have what this module, or a class in it, calls otherwise answer to `name`. A module that is not loaded
    stays as it is. Raises UnusableImplementation where something else has that name."""
    kind, _, old = name.rpartition(".")
    owner = getattr(module, in_uses(kind, names)) if kind else module
    new = names[name]
    if kind and not isinstance(owner, type):
        return
    if old in vars(owner):
        raise UnusableImplementation(
            f"{module.__name__}: {name} is there; it should be called {new}"
        )
    setattr(owner, old, _property(new) if kind else getattr(owner, new))


def _property(new: str) -> property:
    def put(this: Any, value: Any) -> None:
        setattr(this, new, value)

    return property(attrgetter(new), put)


def in_code(text: str, names: Mapping[str, str], uses: Iterable[ast.expr]) -> str:
    """Return lines of Python that use a release, with the names that it has.

    uses: the table's.
    """
    calls = {name_of(use) for use in uses if isinstance(use, ast.Call)}
    for name, new in names.items():
        kind, _, old = name.rpartition(".")
        then = r"(?=\()" if name in calls else r"\b(?!\()"
        text = re.sub(
            rf"\.{old}{then}" if kind else rf"\b{old}\b", f".{new}" if kind else new, text
        )
    return text
