"""The radix tree of the reference by example. What holds in every state: test_rules.py and the clauses."""

from __future__ import annotations

import pytest

from reference.commands import Freed
from reference.tree import (
    Insertion, Key, Sizes, Tree, evict, full_locked, insert, lock, match, nodes, sizes, swa_locked, unlock,
    usable,
)  # fmt: skip

ALL = 10**6


def text(letters: str) -> Key:
    return tuple(map(ord, letters))


def drawn(tree: Tree) -> dict[str, str]:
    """path -> "live" or "dead", with what locks pin of it."""
    found = {}
    for placed in nodes(tree):
        said = "live" if placed.node.live else "dead"
        said += " full" * full_locked(tree, placed) + " swa" * swa_locked(tree, placed)
        start = "".join(map(chr, placed.path[: placed.start]))
        found[f"{start}|{''.join(map(chr, placed.node.key))}"] = said
    return found


def grown(page_size: int, window: int | None, *keys: str) -> Tree:
    tree = Tree(page_size, window)
    for key in keys:
        tree, _ = insert(tree, text(key), 0)
    return tree


# Insert.


def test_an_insert_shares_what_is_there_and_adopts_the_rest() -> None:
    tree = grown(1, 8, "abcd")
    tree, done = insert(tree, text("abxy"), 0)
    assert done == Insertion(matched=2, end=4)
    assert drawn(tree) == {"|ab": "live", "ab|cd": "live", "ab|xy": "live"}
    tree, done = insert(tree, text("abc"), 0)
    assert done == Insertion(matched=3, end=3)


def test_only_whole_pages_are_cached() -> None:
    tree, done = insert(Tree(4, 8), text("abcdefg"), 0)
    assert done == Insertion(matched=0, end=4)
    tree, done = insert(tree, text("abcx"), 0)
    assert done == Insertion(matched=0, end=4), "pages that differ in one token share nothing"


@pytest.mark.parametrize(
    ("evicted", "expected"),
    [
        (0, {"|abcdef": "live", "abcdef|gh": "live"}),
        (4, {"|abcd": "dead", "abcd|ef": "live", "abcdef|gh": "live"}),
        (3, {"|abcd": "dead", "abcd|ef": "live", "abcdef|gh": "live"}),  # half a page is no page
        (6, {"|abcdef": "dead", "abcdef|gh": "live"}),
        (8, {"|abcdefgh": "dead"}),  # the third case of #22470: nothing of it has SWA KV
    ],
)
def test_the_cases_of_an_insert_by_evicted_length(evicted: int, expected: dict[str, str]) -> None:
    tree, _ = insert(Tree(2, 2), text("abcdefgh"), evicted)
    assert drawn(tree) == expected


@pytest.mark.parametrize(
    ("page_size", "window", "tail"), [(1, 3, 3), (2, 3, 4), (4, 3, 4), (4, 4, 4), (4, 5, 8), (4, 100, 12)]
)
def test_a_fresh_leaf_is_capped_at_one_window(page_size: int, window: int, tail: int) -> None:
    """#26919: a lock then pins one window of whole pages, and full KV of all."""
    tree = grown(page_size, window, "abcdefghijkl")
    tree = lock(tree, "r1", text("abcdefghijkl"))
    assert sizes(tree) == Sizes(0, 12, 12 - tail, tail)


def test_a_tombstone_is_recovered_by_who_brings_swa() -> None:
    tree, _ = insert(Tree(1, 2), text("abcdef"), 6)
    assert usable(tree, text("abcdef")) == 0
    part, done = insert(tree, text("abcdef"), 3)
    assert done == Insertion(6, 6, ((3, 6),))
    assert drawn(part) == {"|abc": "dead", "abc|def": "live"}
    locked = lock(tree, "r1", text("abcdef"))
    assert insert(locked, text("abcdef"), 3)[1] == Insertion(6, 6), "a lock reads through its full slots"


def test_a_refused_recovery_leaves_its_inserter_nothing_to_read() -> None:
    """Why insert is for requests that have ended: one that goes on needs its own pages here."""
    tree, _ = insert(Tree(1, 1), text("ab"), 1)
    tree = lock(tree, "r1", text("ab"))
    tree, done = insert(tree, text("a"), 0)
    assert done == Insertion(matched=1, end=1), "its pages are duplicates"
    assert usable(tree, text("a")) == 0


# Match and lock.


def test_a_match_needs_a_window_of_live_swa_behind_it() -> None:
    tree, _ = insert(Tree(1, 3), text("abcdefgh"), 4)
    assert drawn(tree) == {"|abcd": "dead", "abcd|e": "live", "abcde|fgh": "live"}
    assert match(tree, text("abcdefgh"))[1] == 8
    assert match(tree, text("abcdefg"))[1] == 7
    assert match(tree, text("abcdef"))[1] == 0, "its window reaches into the tombstone"
    assert match(grown(1, 3, "abcdefgh"), text("ab"))[1] == 2, "no tombstone up to the root"


def test_a_lock_pins_nodes_until_a_window_is_covered() -> None:
    tree = grown(1, 3, "abcdefgh", "abcdefghijk")
    tree = lock(tree, "r1", text("abcdefghijk"))
    assert drawn(tree) == {
        "|abcde": "live full", "abcde|fgh": "live full", "abcdefgh|ijk": "live full swa",
    }  # fmt: skip
    tree, _ = match(tree, text("abcdefghi"))
    tree = lock(tree, "r2", text("abcdefghi"))
    assert drawn(tree)["abcdefgh|i"] == "live full swa"
    assert drawn(tree)["abcde|fgh"] == "live full swa"
    assert drawn(unlock(tree, "r1")) == {
        "|abcde": "live full", "abcde|fgh": "live full swa", "abcdefgh|i": "live full swa",
        "abcdefghi|jk": "live",
    }  # fmt: skip


# Evict.


def test_full_pressure_deletes_the_oldest_leaf_and_never_a_locked_one() -> None:
    tree = grown(1, 8, "abcd", "abxy", "zz")
    tree, _ = match(tree, text("abcd"))
    tree, freed = evict(tree, 1, 0)
    assert freed == Freed(2, 2)
    assert set(drawn(tree)) == {"|ab", "ab|cd", "|zz"}
    tree = lock(tree, "r1", text("zz"))
    tree, freed = evict(tree, ALL, 0)
    assert freed == Freed(4, 4)
    assert drawn(tree) == {"|zz": "live full swa"}


def test_swa_pressure_leaves_tombstones_and_takes_leaves() -> None:
    tree = grown(1, 2, "abcdef")
    tree, freed = evict(tree, 0, 1)
    assert freed == Freed(0, 4)
    assert drawn(tree) == {"|abcd": "dead", "abcd|ef": "live"}
    tree, freed = evict(tree, 0, 1)
    assert freed == Freed(6, 2), "a tombstone that nothing hangs on goes too"
    assert drawn(tree) == {}


def test_a_match_refreshes_swa_inside_its_window_alone() -> None:
    """#26615: what lies before the window was read by full attention, and by nobody else."""
    tree = grown(1, 2, "abcdef", "pq")
    tree, _ = match(tree, text("abcdef"))
    tree, _ = evict(tree, 0, 1)
    assert drawn(tree)["|abcd"] == "dead" and "|pq" in drawn(tree)
    tree, _ = evict(tree, 0, 1)
    assert "|pq" not in drawn(tree) and drawn(tree)["abcd|ef"] == "live"


def test_an_insert_is_the_first_use_of_all_that_it_brings() -> None:
    """Also of what is outside of its window: that does not go before what was there already."""
    tree = grown(1, 2, "xy", "abc")
    assert drawn(tree) == {"|a": "live", "a|bc": "live", "|xy": "live"}
    tree, _ = evict(tree, 0, 1)
    assert drawn(tree) == {"|a": "live", "a|bc": "live"}
