"""Words of 64 bits by number, and questions by number with their answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_ODD = 0x1E3779B97F4A7C15  # for hashes


class Numbered:
    """Words by number, in the order in which they were met; 0 is the word 0.

    Open addressing: a word is at the place in the table that its hash says, or at the next free one. At most
    a third of the table is in use.
    """

    def __init__(self, arrays: Any) -> None:
        self.arrays = arrays
        self.words = arrays.full(1, 0)
        self.table = arrays.cast(arrays.full(1 << 12, 0), arrays.table)  # numbers; 0 is free

    def __len__(self) -> int:
        return len(self.words)

    def numbers(self, words: Any) -> Any:
        """The numbers of words, new ones too: those of one call in the order of the words."""
        numbers, missing = self._found(words)
        if len(missing):
            self.add(self.arrays.unique(words[missing]))
            numbers[missing], _ = self._found(words[missing])
        return numbers

    def _found(self, words: Any) -> tuple[Any, Any]:
        """The number of each word, and the places of those that have none."""
        arrays = self.arrays
        at = self._hash(words)
        numbers = arrays.cast(self.table[at], arrays.large)
        other = arrays.nonzero(self.words[numbers] != words)
        at, missing = at[other], [other[:0]]
        while len(other):
            free = numbers[other] == 0
            missing.append(other[arrays.nonzero(free)])
            taken = arrays.nonzero(~free)
            other, at = other[taken], (at[taken] + 1) & (len(self.table) - 1)
            numbers[other] = here = arrays.cast(self.table[at], arrays.large)
            still = arrays.nonzero(self.words[here] != words[other])
            other, at = other[still], at[still]
        return numbers, arrays.cat(missing)

    def _hash(self, words: Any) -> Any:
        """Products wrap around; their upper bits are as good as random."""
        return ((words * _ODD) >> 30) & (len(self.table) - 1)

    def add(self, words: Any) -> None:
        """New words, in this order."""
        arrays, first = self.arrays, len(self.words)
        self.words = arrays.cat([self.words, words])
        size = len(self.table)
        while size < 3 * len(self.words):
            size *= 2
        if size > len(self.table):
            self.table = arrays.cast(arrays.full(size, 0), arrays.table)
            words, first = self.words[1:], 1
        at, numbers = self._hash(words), arrays.cast(arrays.arange(len(words)) + first, arrays.table)
        while len(at):
            free = arrays.nonzero(self.table[at] == 0)
            self.table[at[free]] = numbers[free]
            still = arrays.nonzero(self.table[at] != numbers)
            at, numbers = (at[still] + 1) & (size - 1), numbers[still]


class Answers:
    """Questions by number, and what the answers to them are, one after the other.

    news: the columns of the answers; begin, many: where those to a question are, and how many. told: what
    is to be counted, and of which questions, each as often as it is. asked: how often each question was asked
    since `count`. bits: of a number among the answers.
    """

    def __init__(self, arrays: Any, width: int, bits: int) -> None:
        self.arrays, self.bits = arrays, bits
        self.questions = Numbered(arrays)
        self.asked = self.begin = self.many = arrays.full(1, 0)
        self.news = [arrays.full(0, 0)] * width
        self.told: list[tuple[str, bool, Any]] = []

    def add(self, rows: Any, news: list[Any], size: int) -> None:
        """The answers to the next `size` questions, in columns. rows: the question of each, from 0."""
        assert size < 1 << (63 - self.bits * len(news)), "too many for a word"
        arrays, bits, words = self.arrays, self.bits, rows
        for column in news:
            words = (words << bits) | column
        words = arrays.unique(words)
        many = arrays.counts(words >> (bits * len(news)), size)
        begin = arrays.cumsum(many) - many + len(self.news[0])
        for at in reversed(range(len(news))):
            self.news[at] = arrays.cat([self.news[at], words & ((1 << bits) - 1)])
            words = words >> bits
        self.begin, self.many = arrays.cat([self.begin, begin]), arrays.cat([self.many, many])
        self.asked = arrays.cat([self.asked, arrays.full(size, 0)])

    def count(self, met: Callable[[str, bool, int], None]) -> None:
        """Say how often each thing was told."""
        for text, done, questions in self.told:
            met(text, done, int(self.asked[questions].sum()))
        self.asked = self.arrays.full(len(self.asked), 0)
