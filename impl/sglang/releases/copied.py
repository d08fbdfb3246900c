"""What the adapter copies of SGLang's scheduler, and whether a tree has the same.

A rule is copied where the scheduler's own function needs a whole server. Its fingerprint is the statements of
that function that move what is specified; copied.txt has those of all releases (`python -m ci.sketches`). A
tree with another statement may do what the driver does not play: a check says so, and is incomplete.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_name("copied.txt")
_RESULTS = (
    "managers/scheduler_components/batch_result_processor.py",
    "managers/scheduler_output_processor_mixin.py",
)
_SIMPLE = (ast.Assign, ast.AugAssign, ast.Expr, ast.Return, ast.Assert)


class CopiedRule(NamedTuple):
    """A rule that the driver copies.

    files: where releases have it; functions: patterns of its methods. moves: names, one of which a statement
    has that counts. copy: where the copy is, and why it is none of the tree's own.
    """

    files: tuple[str, ...]
    functions: tuple[str, ...]
    moves: tuple[str, ...]
    copy: str


RULES = {
    "results of a verify round": CopiedRule(
        _RESULTS,
        ("_resolve_spec_*tok*",),
        ("kv_committed_len",),
        "commit and skipped of releases: the function asks a draft worker and a reporter of metrics",
    ),
    "results of a decode batch": CopiedRule(
        _RESULTS,
        ("process_batch_result_decode", "_handle_finish_state_updated_req"),
        ("release_kv_cache", "free_group_", "kv_committed_len", "kv_allocated_len"),
        "Ends._end, Results.process: the function streams outputs and logprobs",
    ),
    "results of a prefill": CopiedRule(
        _RESULTS,
        ("process_batch_result_prefill",),
        (
            "release_kv_cache",
            "free_group_",
            "cache_unfinished_req",
            "checkpoint_kv_cache",
            "inflight_middle_chunks",
            "is_chunked -= 1",
        ),
        "Prefills._settled, Results.process: the function streams outputs and logprobs",
    ),
    "a chunk that goes on": CopiedRule(
        ("managers/schedule_policy.py",),
        ("add_chunked_req",),
        ("set_extend_input_len", "set_extend_range", "extend_end =", "fill_ids =", "fill_len ="),
        "set_chunk of releases: the function counts a budget of tokens",
    ),
    "an aborted chunk": CopiedRule(
        ("managers/scheduler.py",),
        ("process_pending_chunked_abort", "_process_pending_chunked_abort"),
        ("release_kv_cache", "free_", "cache_unfinished_req"),
        "prefilled of releases: the function answers a client",
    ),
}


def statements(root: Path, rule: CopiedRule) -> Iterator[str]:
    """The statements of a rule that move what is specified, in the files under `root`."""
    for name in rule.files:
        file = root / "sglang/srt" / name
        if not file.is_file():
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and any(
                fnmatchcase(node.name, pattern) for pattern in rule.functions
            ):
                yield from _moving(node, rule.moves)


def differences(root: Path) -> dict[str, list[str]]:
    """Rule -> statements of the tree under `root` that no release has; rules without any are left out."""
    found: dict[str, list[str]] = {}
    for name, rule in RULES.items():
        known = read()[name]
        if new := [text for text in dict.fromkeys(statements(root, rule)) if text not in known]:
            found[name] = new
    return found


def doubts(root: Path) -> tuple[str, ...]:
    """For each copied rule that the tree under `root` has otherwise, a sentence that says so."""
    return tuple(
        f"the adapter plays {rule} as releases have them, and this tree has `{texts[0]:.100}`"
        for rule, texts in differences(root).items()
    )


@lru_cache(maxsize=1)
def read() -> dict[str, set[str]]:
    """Rule -> its statements in all releases."""
    known: dict[str, set[str]] = {name: set() for name in RULES}
    for line in FILE.read_text(encoding="utf-8").splitlines():
        name, _, text = line.partition(" | ")
        known[name].add(text)
    return known


def written(roots: list[Path]) -> str:
    """The statements of all rules in the releases under `roots`, as text."""
    lines = {
        f"{name} | {text}"
        for name, rule in RULES.items()
        for root in roots
        for text in statements(root, rule)
    }
    return "".join(f"{line}\n" for line in sorted(lines))


def _moving(function: ast.FunctionDef, moves: tuple[str, ...]) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, _SIMPLE):
            text = " ".join(ast.unparse(node).split())
            if any(name in text for name in moves):
                yield text
