"""Modules loaded once more from their files, so that their arithmetic runs on stand-ins for integers.

The functions of a second copy get other builtins (`range` and `len` want numbers, `min` and `max` would ask
for the truth of a comparison), and see each other's second copies. `edited` changes the text on the way: a
fault to be found.
"""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import reference


class SecondCopy:
    """Modules by their last names: cursors, ledger, ... Those that they import are shared with the first."""

    cursors: Any
    ledger: Any
    prefix_cache: Any
    model: Any

    def __init__(self, own: Mapping[str, Any]) -> None:
        self._own = own
        self._modules: dict[str, ModuleType] = {}

    def load(self, name: str, text: str | None = None, **own: Any) -> ModuleType:
        """A module from `text` (its file's, by default) that sees the copies so far. own: builtins."""
        import_module(name)  # dataclasses look their module up where all are
        module = ModuleType(name)
        builtin = {**vars(builtins), **self._own, **own, "__import__": self._import}
        module.__dict__["__builtins__"] = builtin
        exec(compile(edited(name) if text is None else text, str(source(name)), "exec"), module.__dict__)
        self._modules[name] = module
        setattr(self, name.rpartition(".")[2], module)
        return module

    def _import(self, name: str, *more: Any, **named: Any) -> Any:
        copied = self._modules.get(name)
        if copied is not None:
            return copied
        found = builtins.__import__(name, *more, **named)
        parts = (more[2] if len(more) > 2 else None) or ()
        wanted = {part: self._modules.get(f"{name}.{part}") for part in parts}
        if any(wanted.values()):
            return SimpleNamespace(**{part: copy or getattr(found, part) for part, copy in wanted.items()})
        return found


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
