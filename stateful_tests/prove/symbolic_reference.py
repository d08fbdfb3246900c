"""The reference's own modules, instrumented: the text of their files, run on symbolic integers.

Builtins that want numbers come from `integers`. Stand-ins answer what a rule asks of the pools and of the
radix tree, and its calls of the arithmetic are noted. `edits` changes the text: a fault to be refuted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import reference
from stateful_tests.prove.integers import BUILTINS, Int
from stateful_tests.prove.path_exploration import Bool

HOME = Path(*reference.__path__)
RULES = tuple(f"reference.rules.{path.stem}" for path in sorted(HOME.glob("rules/[a-z]*.py")))
# What computes with lengths. The vocabulary, the tree and the clauses stay as they are.
MODULES = (
    "reference.cursors", "reference.ledger", "reference.prefix_cache", "reference.handover", *RULES,
    "reference.model",
)  # fmt: skip
Edits = Mapping[str, Sequence[tuple[str, str]]]  # module: (text, what it is replaced by), each found once


class SymbolicReference:
    """The modules by their last names: cursors, ledger, ... Those that they import are the genuine ones.

    calls: name and arguments of every call from a rule into the arithmetic. room: pages that the last rule
    asked for. A caller empties both. Whether the pages are there is not asked: more moves are looked at, not
    fewer. A radix tree has a prefix of R tokens, and takes a prompt over or does not.
    """

    cursors: Any
    ledger: Any
    handover: Any
    evict_swa: Any
    model: Any

    def __init__(self, edits: Edits | None = None) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.room: Any = None
        self._edits = edits or {}
        if unknown := sorted(self._edits.keys() - {*MODULES}):
            raise ValueError(f"{', '.join(unknown)}: is none of the modules that are edited here")
        self._modules: dict[str, ModuleType] = {}
        for name in MODULES:
            self.load(name)

    def load(self, name: str) -> ModuleType:
        """A module, loaded from its text once."""
        if name in self._modules:
            return self._modules[name]
        import_module(name)  # dataclasses look their module up where all are
        module = self._modules[name] = ModuleType(name)
        module.__dict__["__builtins__"] = {**BUILTINS, "__import__": self._import}
        text = edited(name, self._edits.get(name, ()))
        exec(compile(text, str(source(name)), "exec"), module.__dict__)
        if name in RULES or name == "reference.handover":
            self._instrument(vars(module))
        setattr(self, name.rpartition(".")[2], module)
        return module

    def _import(self, name: str, *more: Any, **named: Any) -> Any:
        return self.load(name) if name in MODULES else __import__(name, *more, **named)

    def _instrument(self, names: dict[str, Any]) -> None:
        stand_ins: dict[str, Callable[..., Any]] = {
            "free": lambda _: SimpleNamespace(rows=2),
            "with_room": self._asked,
            "matched": lambda state, *_: (state, Int.of("R")),
            "text_tokens": lambda *_: (),
            "tree_key": lambda *_: (),
            "_hand_over": lambda state, *_, **__: state._replace() if Bool.unknown("taken") else state,
        }
        for name, value in names.items():
            if name in stand_ins:
                names[name] = stand_ins[name]
            elif isinstance(value, FunctionType) and value.__module__ == "reference.cursors":
                names[name] = self._noted(name, value)

    def _asked(self, state: Any, pages: Any, *_: Any) -> Any:
        self.room = pages
        return state

    def _noted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.calls.append((name, arguments))
            return function(*arguments)

        return call


def source(name: str) -> Path:
    """The file of a module in this checkout or installation."""
    spec = find_spec(name)
    assert spec is not None and spec.origin is not None, name
    return Path(spec.origin)


def edited(name: str, edits: Sequence[tuple[str, str]] = ()) -> str:
    """The text of a module after `edits`."""
    text = source(name).read_text(encoding="utf-8")
    for right, wrong in edits:
        if text.count(right) != 1:
            raise ValueError(f"{name}: {text.count(right)} places for the edit {right!r:.60}")
        text = text.replace(right, wrong)
    return text
