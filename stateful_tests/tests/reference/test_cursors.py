"""The arithmetic of the cursors: every small case by hand. Proofs and contracts: test_proofs.py."""

from __future__ import annotations

import itertools

import pytest

from reference.cursors import cut, in_order, owed_full, owed_swa, resume, sweep, window_live
from reference.ledger import Cursors, full_pages, swa_pages


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
