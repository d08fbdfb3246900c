"""The reference's own modules, loaded once more so that their arithmetic runs on symbolic integers.

The text is that of the files in reference/. Its functions get the builtins of `symbolic`, where `range`
and `len` take symbolic integers, and see each other's second copies. `edits` changes the text on the way:
a fault to be refuted.
"""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import reference
from stateful_tests import symbolic

# What computes with lengths. The vocabulary, the tree and the clauses stay as they are.
MODULES = ("reference.cursors", "reference.ledger", "reference.caching", "reference.model")
Edits = Mapping[str, Sequence[tuple[str, str]]]  # module: (text, what it is replaced by), each found once


class SymbolicReference:
    """The modules of the reference on symbolic integers, by their last names: cursors, ledger, ..."""

    cursors: Any
    ledger: Any
    caching: Any
    model: Any

    def __init__(self, edits: Edits | None = None) -> None:
        self._builtins = {**symbolic.BUILTINS, "__import__": self._import}
        self._modules: dict[str, ModuleType] = {}
        for name in MODULES:
            text = edited(name, (edits or {}).get(name, ()))
            setattr(self, name.rpartition(".")[2], self.load(name, text))

    def load(self, name: str, text: str) -> ModuleType:
        """A module made from `text` that sees these copies where it imports the reference."""
        if name in MODULES:
            import_module(name)  # dataclasses look their module up where all are
        module = ModuleType(name)
        module.__dict__["__builtins__"] = self._builtins
        exec(compile(text, str(source(name)), "exec"), module.__dict__)
        self._modules[name] = module
        return module

    def _import(self, name: str, *more: Any, **named: Any) -> Any:
        return self._modules.get(name) or builtins.__import__(name, *more, **named)


def source(name: str) -> Path:
    """The file of a module in this checkout or installation."""
    return Path(*reference.__path__).parent.joinpath(*name.split(".")).with_suffix(".py")


def edited(name: str, edits: Sequence[tuple[str, str]] = ()) -> str:
    """The text of a module after `edits`."""
    text = source(name).read_text(encoding="utf-8")
    for right, wrong in edits:
        if text.count(right) != 1:
            raise ValueError(f"{name}: {text.count(right)} places for the edit {right!r:.60}")
        text = text.replace(right, wrong)
    return text
