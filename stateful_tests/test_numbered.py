"""Words by number against a dictionary: growth, words with one hash, the end of the table; and columns."""

from __future__ import annotations

import random

import pytest

from stateful_tests.arrays import NumpyArrays, TorchArrays
from stateful_tests.numbered import Numbered

ARRAYS = NumpyArrays()
by_each = pytest.mark.parametrize("arrays", [ARRAYS, TorchArrays("cpu")], ids=["numpy", "torch"])


@by_each
def test_numbers_are_those_of_a_dictionary(arrays: NumpyArrays) -> None:
    """New words of a call are numbered by size; the table grows four times and more, also in one call."""
    draw, found, due = random.Random(0), Numbered(arrays), {0: 0}
    for size in (1, 1000, 20, 3000, 30_000, 7, 10_000):
        words = [draw.choice((draw.randrange(40_000), draw.randrange(1 << 63))) for _ in range(size)]
        for word in sorted({*words} - due.keys()):
            due[word] = len(due)
        for _ in range(2):
            assert found.numbers(arrays.column(words)).tolist() == [due[word] for word in words]
            assert found.words.tolist() == list(due)
    assert len(found.table) >= 16 * (1 << 12)
    assert len(found.table) >= 3 * len(found)


def test_words_with_one_hash_have_numbers_of_their_own() -> None:
    """They fill the end of the table, and go on at its beginning."""
    found = Numbered(ARRAYS)
    words = ARRAYS.arange(1 << 16) + 1
    last = words[found._hash(words) == len(found.table) - 1]
    assert len(last) > 8
    for part in (last[:3], last[3:], last):
        numbers = found.numbers(part)
        assert (found.words[numbers] == part).all()
    assert found.words.tolist() == [0, *last.tolist()]
    numbers = found.numbers(words[:1000])
    assert (found.words[numbers] == words[:1000]).all()


@by_each
def test_rows_are_spread_over_their_numbers(arrays: NumpyArrays) -> None:
    start, stop = arrays.column([2, 5, 7, 0]), arrays.column([4, 5, 6, 1])
    rows, numbers = arrays.spread(start, stop, 4)
    assert (rows.tolist(), numbers.tolist()) == ([0, 0, 3], [2, 3, 0])


@by_each
def test_rows_like_the_one_before_are_left_out(arrays: NumpyArrays) -> None:
    columns = [arrays.column(values) for values in ([1, 1, 1, 2], [1, 0, 0, 0])]
    assert arrays.firsts(*columns).tolist() == [0, 1, 3]
