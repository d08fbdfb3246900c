"""Which situations the explorer has reached, in which scopes.

`situations.json` beside this module has them, each with the scopes that reach it (made by `kvspec explore
--situations`). What a check must reach stands in `corpus.txt`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from reference.commands import Mode
from stateful_tests.coverage.scopes import SCOPES, Scope

FILE = Path(__file__).with_name("situations.json")


class SituationsError(Exception):
    """A file of situations that cannot be used: one line says where and why."""


class ReachedIn(msgspec.Struct, forbid_unknown_fields=True):
    """What the file has: situation -> scopes that reach it."""

    situations: dict[str, list[str]]

    def taken(self, scope: str, reached: Iterable[str]) -> ReachedIn:
        """The same with what a scope reaches now, without scopes that are no more."""
        scopes = {text: {*names} - {scope} for text, names in self.situations.items()}
        for text in reached:
            scopes.setdefault(text, set()).add(scope)
        reached_in = {text: [name for name in SCOPES if name in scopes[text]] for text in sorted(scopes)}
        return ReachedIn({text: names for text, names in reached_in.items() if names})


def load(path: Path = FILE) -> ReachedIn:
    """The situations in a file. Raises SituationsError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=ReachedIn)
    except OSError as error:
        raise SituationsError(f"{path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SituationsError(f"{path}: {error}") from error


def dump(reached_in: ReachedIn) -> str:
    """A file's text: a line for each situation."""
    lines = ",\n".join(f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in reached_in.situations.items())
    return f'{{\n  "situations": {{\n{lines}\n  }}\n}}\n'


class _World(NamedTuple):
    """What decides which situations a scope can have."""

    tree: bool
    window: bool
    mode: Mode


def reached_by_similar(scope: Scope) -> list[str]:
    """Situations of scopes with a tree, a window and a mode like this one's."""
    like = {name for name, other in SCOPES.items() if _world(other) == _world(scope)}
    return [text for text, scopes in load().situations.items() if like.intersection(scopes)]


def _world(scope: Scope) -> _World:
    return _World(scope.geometry.tree, scope.geometry.window is not None, scope.mode)
