"""The arithmetic of the cursors: contracts searched symbolically, and every small case by hand.

CrossHair takes about 25 seconds here and is bounded per contract; "not confirmed" within the bound is
not a failure, a counterexample is. What is proved for all integers has an engine of its own.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from reference import cursors
from reference.cursors import cut, in_order, owed_full, owed_swa, resume, sweep, window_live
from reference.ledger import Cursors, full_pages, swa_pages

SOURCE = Path(cursors.__file__)


def crosshair(target: str, seconds: float = 2.5) -> subprocess.CompletedProcess[str]:
    """Check a file, or the function at file:line, each condition for so long at most."""
    pytest.importorskip("crosshair", reason="crosshair-tool is not installed")
    command = [sys.executable, "-m", "crosshair", "check", target, "--per_condition_timeout", str(seconds)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=SOURCE.parents[1])


def test_no_contract_is_refuted() -> None:
    result = crosshair(str(SOURCE), 1)
    assert result.returncode == 0, result.stdout + result.stderr


MUTANTS = {  # a fault, and the contract that must refute it
    "pr22900: E is not capped": (
        "        min(c.swa_evicted_seqlen, target),",
        "        c.swa_evicted_seqlen,",
    ),
    "pr22862-align: floor for ceil": (
        "    return ceil_page(target, page_size), ceil_page(c.kv",
        "    return floor_page(target, page_size), ceil_page(c.kv",
    ),
    "a window too long": (
        "return max(0, position - window)",
        "return max(0, position - window - 1)",
    ),
    "swept pages freed again": (
        "    live = max(target, c.swa_evicted_seqlen, c.cache_protected_len)",
        "    live = max(target, c.cache_protected_len)",
    ),
    "resumed on a dead window": (
        "if window == 0 or window_live(lost_below(c), prefix, window):",
        "if True:",
    ),
}


@pytest.mark.parametrize("fault", MUTANTS)
def test_contracts_refute_faults(fault: str, tmp_path: Path) -> None:
    right, wrong = MUTANTS[fault]
    text = SOURCE.read_text()
    assert text.count(right) == 1
    mutant = tmp_path / "mutant.py"
    mutant.write_text(text.replace(right, wrong))
    line = text[: text.index(right)].count("\n") + 1
    result = crosshair(f"{mutant}:{line}")
    assert result.returncode == 1 and "false when calling" in result.stdout, result.stdout


def small() -> itertools.product:
    """Every (C, A, E) in order up to 9, R 0."""
    return (
        Cursors(c, a, e, 0) for c, a, e in itertools.product(range(10), repeat=3) if c <= a and e <= a
    )


@pytest.mark.parametrize("page_size", [1, 2, 3, 4])
def test_a_cut_owes_exactly_what_it_no_longer_owns(page_size: int) -> None:
    """Owned before = owned after + owed, in both pools, for every small case."""
    for before in small():
        for target in range(before.kv_allocated_len + 2):
            after = cut(before, target)
            assert in_order(after)
            for owed, owned in ((owed_full, full_pages), (owed_swa, swa_pages)):
                low, high = owed(before, target, page_size)
                given_back = set(range(low // page_size, high // page_size))
                kept = set(owned(after, page_size))
                assert kept | given_back == set(owned(before, page_size))
                assert not kept & given_back


@pytest.mark.parametrize("page_size", [1, 2, 3, 4])
@pytest.mark.parametrize("window", [1, 2, 3, 5])
def test_a_sweep_within_the_text_never_loses_a_window(page_size: int, window: int) -> None:
    """The literal prefix min(C, key) is safe when every sweep saw at most the prefix (faithful mode)."""
    for before in small():
        if before.swa_evicted_seqlen:
            continue
        for length in range(before.kv_committed_len + 1):
            swept = sweep(before, length, window, page_size)
            for key in range(length, before.kv_committed_len + 2):
                assert resume(swept, key, window) == min(before.kv_committed_len, key)


def test_a_sweep_past_the_text_can_lose_the_window() -> None:
    """The smallest counterexample: the sweep saw 6 tokens, the turn resumes at 3."""
    swept = sweep(Cursors(3, 6, 0, 0), 6, 2, 1)
    assert swept.swa_evicted_seqlen == 3 and not window_live(3, 3, 2)
    assert resume(swept, 3, 2) == 0
