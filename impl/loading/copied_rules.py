"""Rules of a scheduler that an adapter copies, and whether a tree has the same.

A rule is copied where the scheduler's own function needs a whole server. Its fingerprint is the statements of
that function that move what is specified; an engine's copied.txt has those of all releases
(`python -m ci.sketches`). A tree with another statement may do what the driver does not play: a check says
so, and is incomplete.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from impl.loading.probe import python_of

_SIMPLE = (ast.Assign, ast.AugAssign, ast.Expr, ast.Return, ast.Assert)


class CopiedRule(NamedTuple):
    """A rule that the driver copies.

    files: files of a release that contain it.
    functions: patterns of the names of its functions.
    moves: names; a statement counts if it contains one of them.
    copy: where the copy is, and why the driver does not run the tree's own function.
    """

    files: tuple[str, ...]
    functions: tuple[str, ...]
    moves: tuple[str, ...]
    copy: str


class CopiedRules(NamedTuple):
    """The rules that the adapter of an engine copies, by name.

    file: the statements of all releases.
    """

    rules: Mapping[str, CopiedRule]
    file: Path

    def differences(self, root: Path) -> dict[str, list[str]]:
        """Return, for each rule, the statements of the tree under `root` that no release has; rules without
        any are left out."""
        differing: dict[str, list[str]] = {}
        known = _read_statements(self.file)
        for name, rule in self.rules.items():
            texts = dict.fromkeys(statements(root, rule))
            if new := [text for text in texts if (name, text) not in known]:
                differing[name] = new
        return differing

    def doubts(self, root: Path) -> tuple[str, ...]:
        """Return for each copied rule that the tree under `root` has otherwise, a sentence that says so."""
        return tuple(
            f"the adapter plays {rule} as releases have them, and this tree has `{texts[0]:.100}`"
            for rule, texts in self.differences(root).items()
        )

    def rules_text(self, roots: Iterable[Path]) -> str:
        """Return the statements of all rules in the releases under `roots`, as text."""
        lines = {
            f"{name} | {text}"
            for root in roots
            for name, rule in self.rules.items()
            for text in statements(root, rule)
        }
        return "".join(f"{line}\n" for line in sorted(lines))


def statements(root: Path, rule: CopiedRule) -> Iterator[str]:
    """Yield the statements of a rule that move what is specified, in the files under `root`."""
    for name in rule.files:
        file = root / name
        if file.is_file():
            with python_of(root, name):
                found = _moving_statements(file.read_text(encoding="utf-8"), rule.functions, rule.moves)
            yield from found


@lru_cache(maxsize=256)  # most files of another tree are the same
def _moving_statements(text: str, functions: tuple[str, ...], moves: tuple[str, ...]) -> tuple[str, ...]:
    """Return the statements that contain one of `moves`, in the functions of a text with these names."""
    return tuple(
        statement
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef)
        and any(fnmatchcase(node.name, pattern) for pattern in functions)
        for statement in _statements_with(node, moves)
    )


@lru_cache(maxsize=4)
def _read_statements(file: Path) -> set[tuple[str, str]]:
    """Return the statements of all releases with their rules."""
    parts = [line.partition(" | ") for line in file.read_text(encoding="utf-8").splitlines()]
    return {(name, text) for name, _, text in parts}


def _statements_with(function: ast.FunctionDef, moves: tuple[str, ...]) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, _SIMPLE):
            text = " ".join(ast.unparse(node).split())
            if any(name in text for name in moves):
                yield text
