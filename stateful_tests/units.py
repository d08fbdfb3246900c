"""Units by number: a unit is a word, its shape and lengths in bits, numbered when it is first met."""

from __future__ import annotations

from functools import reduce
from operator import or_
from types import SimpleNamespace
from typing import Any

from reference import ledger
from stateful_tests import quotient
from stateful_tests.numbered import Numbered
from stateful_tests.traced import Rows
from stateful_tests.unit_rules import FREE, New, Shape, UnitRules

SHAPE_BITS = 6
_MODULES = SimpleNamespace(quotient=quotient, ledger=ledger)


class Units(Numbered):
    """Every unit that was met, by number; 0 is none. batched: whether it has cursors, as a batch needs."""

    def __init__(self, rules: UnitRules, arrays: Any) -> None:
        super().__init__(arrays)
        self.rules = rules
        self.shapes: list[Shape | None] = [None]
        self.bits = rules.most.bit_length()
        self.mask = (1 << self.bits) - 1
        self.shifts = [SHAPE_BITS + self.bits * at for at in range(len(rules.lengths))]
        assert self.shifts[-1] + self.bits < 64, "rows too long for a word"
        self.shape = self.batched = arrays.cast(self.words, arrays.small)
        self.owned = [self.shape for _ in FREE]
        self._packed: dict[tuple[str, New], tuple[int, int, list[tuple[int, int, int]]]] = {}

    def shape_number(self, shape: Shape) -> int:
        """The number of a shape in words."""
        if shape not in self.shapes:
            self.shapes.append(shape)
            assert len(self.shapes) <= 1 << SHAPE_BITS
        return self.shapes.index(shape)

    def add(self, words: Any) -> None:
        """New units, in this order."""
        super().add(words)
        arrays, rules, size = self.arrays, self.rules, len(words)
        shape = arrays.cast(words & ((1 << SHAPE_BITS) - 1), arrays.small)
        owned = [arrays.cast(arrays.full(size, 0), arrays.small) for _ in FREE]
        batched = owned[0] + 0
        for number, known in enumerate(self.shapes):
            if known is None or not len(index := arrays.nonzero(shape == number)):
                continue
            rows = self.rows(index, words[index])
            for column, place in zip(owned, rules.owned(known)):
                column[index] = rows.get(place)
            batched[index] = int(known.cursors)
        self.shape = arrays.cat([self.shape, shape])
        self.owned = [arrays.cat([column, more]) for column, more in zip(self.owned, owned)]
        self.batched = arrays.cat([self.batched, batched])

    def rows(self, index: Any, words: Any, second: Any = None, left: Any = None) -> Rows:
        """A table of units, and what the others leave. index: their rows in a larger table. second: the
        other units of batches."""
        shifts = dict(zip(self.rules.lengths, self.shifts))

        def fetch(name: str) -> Any:
            tag, _, length = name.partition(".")
            if not length:
                return index if name == "row" else left[FREE.index(name)]
            whole = words if tag == "a" else second
            if length == "word":
                return whole
            return self.arrays.cast((whole >> shifts[length]) & self.mask, self.arrays.small)

        return Rows(self.arrays, self.rules.terms, fetch, len(words))

    def word(self, rows: Rows, index: Any, size: int, tag: str, new: New | None) -> Any:
        """The words of units afterwards, from those before. index: of the rows, so many."""
        arrays, terms = self.arrays, self.rules.terms
        if new is None:
            return arrays.full(size, 0)
        found = self._packed.get((tag, new))
        if found is None:
            shape, places = new
            keep, fixed, changed = 0, self.shape_number(shape), []
            for name, place, shift in zip(self.rules.lengths, places, self.shifts):
                how, value = terms.ops[place][:2]
                if how == "number":
                    assert 0 <= value <= self.rules.most
                    fixed |= value << shift
                elif (how, value) == ("name", f"{tag}.{name}"):
                    keep |= self.mask << shift
                else:
                    low, high = terms.bounds[place]
                    beyond = 0 if 0 <= low <= high <= self.mask else ~(self.mask << shift)
                    changed.append((place, shift, beyond))
            found = self._packed[tag, new] = keep, fixed, changed
        keep, fixed, changed = found
        word = (rows.column(f"{tag}.word")[index] & keep) | fixed
        wrong = []
        for place, shift, beyond in changed:
            length = rows.shifted(place, shift)[index]
            word |= length
            if beyond:
                wrong.append(length & beyond)
        assert not wrong or not arrays.any(reduce(or_, wrong)), "beyond its bits"
        return word

    def unit(self, number: int) -> tuple[bool, Any]:
        """(whether it is a session, the quotient.Unit) of a number."""
        word = int(self.words[number])
        shape = self.shapes[word & ((1 << SHAPE_BITS) - 1)]
        assert shape is not None
        lengths = [(word >> shift) & self.mask for shift in self.shifts]
        return shape.session, self.rules.unit(shape, lengths, _MODULES)

    def number(self, session: bool, unit: Any) -> int:
        """The number of a quotient.Unit."""
        shape, lengths = self.rules.lengths_of(unit, session)
        word = self.shape_number(shape)
        for length, shift in zip(lengths, self.shifts):
            word |= length << shift
        return int(self.numbers(self.arrays.column([word]))[0])
