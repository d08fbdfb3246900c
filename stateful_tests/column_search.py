"""The search of scopes without a radix tree: a level at a time, on columns of packed states.

What a command does comes from `unit_rules`, so from `model.step`; here it is done to all units of a shape at
once. A unit is a word: its shape and its lengths in bits; it gets a number when it is first met. A state is a
key: the numbers of its units, sessions and then ordinary requests, each sorted. What is seen is a sorted
column, so a state takes 16 bytes (there, and in its level) and what is expanded together a few dozen MB.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from reference import model
from reference.commands import Command, Done
from stateful_tests.arrays import NumpyArrays
from stateful_tests.exploration import MEMORY_MB, Exploration, Progress, explored, memory
from stateful_tests.quotient import Quotient, spoken
from stateful_tests.scopes import Scope
from stateful_tests.situations import situation
from stateful_tests.unit_rules import FREE, UnitRules
from stateful_tests.units import SHAPE_BITS, Units


class ColumnSearch:
    """Breadth first over all states.

    levels: keys by depth; the last one is expanded up to `at`, and what that led to is in `found`.
    """

    def __init__(self, scope: Scope, arrays: Any = None) -> None:
        self.scope = scope
        self.arrays = arrays = arrays or NumpyArrays()
        self.rules = UnitRules(scope)
        self.units = Units(self.rules, arrays)
        self.slots = scope.sessions + scope.ordinary
        self.kinds = (range(scope.sessions), range(scope.sessions, self.slots))
        self.bits = min(31, 63 // self.slots)
        self.mask = (1 << self.bits) - 1
        self.quotient = Quotient(scope)
        g = scope.geometry
        self.totals = (g.full_pages, g.swa_pages, g.rows)
        self.levels = [arrays.full(1, 0)]
        self.seen, self.found, self.at = self.levels[0], arrays.full(0, 0), 0
        self.transitions = 0
        self.situations: Counter[str] = Counter()
        self.seconds = 0.0
        self._memory = memory()
        self._nobody: dict[int, tuple[Counter[str], int, list[tuple[bool, int]]]] = {}

    @property
    def states(self) -> int:
        return len(self.seen) + len(self.found)

    def run(
        self,
        *,
        states: int | None = None,
        depth: int | None = None,
        memory_mb: float = MEMORY_MB,
        progress: Progress | None = None,
        pause: Callable[[], bool] = lambda: False,
    ) -> str:
        """Go on until nothing is left, or to a bound; says which. pause: asked every few thousand states."""
        began = time.monotonic()
        try:
            while True:
                here = len(self.levels) - (self.at < len(self.levels[-1]))
                if len(self.found) or self.at < len(self.levels[-1]):
                    if depth is not None and here >= depth:
                        return f"depth {depth}"
                    if states is not None and self.states >= states:
                        return f"{states} states"
                if pause():
                    return "paused"
                if memory() > memory_mb:
                    return f"{memory_mb:g} MB of memory"
                if progress is not None:
                    where = f"{self.scope.name}, depth {here}, {self.states} states"
                    progress(f"{where}, {self.states - self.expanded} waiting", self.transitions, 0)
                if not self.advance(None if states is None else states - self.states):
                    return "fixed point"
        finally:
            self.seconds += time.monotonic() - began

    def result(self, stopped: str) -> Exploration:
        """What there is to tell."""
        return explored(
            self.scope, f"columns, by {self.arrays.name}", states=self.states, expanded=self.expanded,
            transitions=self.transitions, depth=len(self.levels) - 1 + bool(len(self.found)), stopped=stopped,
            seconds=self.seconds, had_mb=self._memory, situations=self.situations,
        )  # fmt: skip

    @property
    def expanded(self) -> int:
        return len(self.seen) - len(self.levels[-1]) + self.at

    def advance(self, most: int | None = None) -> bool:
        """Expand some more states. False: there are none."""
        arrays, level = self.arrays, self.levels[-1]
        if self.at == len(level):
            if not len(self.found):
                return False
            self.seen = arrays.inserted(self.seen, arrays.above(self.seen, self.found), self.found)
            level = self.found
            self.levels.append(level)
            self.found, self.at = arrays.full(0, 0), 0
        size = min(arrays.chunk, most or arrays.chunk)
        keys = level[self.at : self.at + size]
        targets = arrays.unique(arrays.cat([targets for _, targets in self.targets(keys)]))
        for known in (self.seen, self.found):
            targets = targets[arrays.nonzero(~arrays.places(known, targets)[1])]
        self.found = arrays.inserted(self.found, arrays.above(self.found, targets), targets)
        self.at += len(keys)
        return True

    # From states to those they lead to.

    def targets(self, keys: Any) -> Iterator[tuple[Any, Any]]:
        """(place in `keys`, key it leads to), for every command that is carried out; some at a time.

        Counts transitions and situations. What leaves the state as it is may be left out.
        """
        arrays, units = self.arrays, self.units
        columns = [(keys >> (self.bits * slot)) & self.mask for slot in range(self.slots)]
        left = [total - sum(map(own.__getitem__, columns)) for total, own in zip(self.totals, units.owned)]
        yield arrays.full(0, 0), arrays.full(0, 0)
        yield from self._come(len(keys), columns)
        alone = []
        for kind in self.kinds:
            for slot in kind:
                asked = columns[slot] != 0
                if slot > kind.start:
                    asked &= columns[slot] != columns[slot - 1]
                alone.append(((slot,), arrays.nonzero(asked)))
        yield from self._about(columns, left, alone)
        if self.scope.batches:
            yield from self._about(columns, left, self._pairs(columns))

    def _pairs(self, columns: list[Any]) -> list[tuple[tuple[int, ...], Any]]:
        """Who makes a batch: pairs of slots, and in which states. Equal pairs once."""
        pairs: list[tuple[int, int]] = []
        found: list[tuple[tuple[int, ...], Any]] = []
        sessions = self.scope.sessions
        for b in range(self.slots):
            for a in range(b):
                pairs.append((a, b))
        for a, b in sorted(pairs):
            asked = (self.units.batched[columns[a]] & self.units.batched[columns[b]]) != 0
            for c, d in sorted(pairs):
                if (c, d) < (a, b) and (c < sessions) + (d < sessions) == (a < sessions) + (b < sessions):
                    asked &= ~((columns[c] == columns[a]) & (columns[d] == columns[b]))
            found.append(((a, b), self.arrays.nonzero(asked)))
        return found

    def _about(
        self, columns: list[Any], left: list[Any], asked: list[tuple[tuple[int, ...], Any]]
    ) -> Iterator[tuple[Any, Any]]:
        """What commands about some units lead to. asked: slots of the units, and places of the states."""
        arrays, owned = self.arrays, self.units.owned
        asked = [(slots, places) for slots, places in asked if len(places)]
        if not asked:
            return
        tables = []  # numbers of the units, and what the others leave
        for slots, places in asked:
            numbers = self._ordered(slots, [columns[slot][places] for slot in slots])
            others = [part[places] + sum(own[n] for n in numbers) for part, own in zip(left, owned)]
            tables.append([*numbers, *others])
        table = [arrays.cat(parts) for parts in zip(*tables)]
        inverse = weights = None
        if len(asked[0][0]) < self.slots:  # else no two states ask the same
            key = table[0]
            for column in table[1:]:
                key = key * (1 << 9) + column if column.dtype == arrays.small else key * (1 << 24) + column
            values, inverse = arrays.unique_of(key)
            weights = arrays.counts(inverse, len(values))
            first = arrays.full(len(values), 0)
            first[inverse] = arrays.arange(len(inverse))
            table = [column[first] for column in table]
        rows, news = self._results(table, weights)
        if not len(rows):
            return
        if inverse is None:
            ((slots, places),) = asked
            source = places[rows]
            yield source, self._replaced(columns, source, dict(zip(slots, news)))
            return
        order = arrays.order(rows)
        counts = arrays.counts(rows, len(table[0]))
        starts = arrays.cumsum(counts) - counts
        begin = 0
        for slots, places in asked:
            row = inverse[begin : begin + len(places)]
            begin += len(places)
            many = counts[row]
            ends = arrays.cumsum(many)
            source = arrays.repeat(places, many)
            which = order[arrays.repeat(starts[row] - (ends - many), many) + arrays.arange(len(source))]
            new = {slot: column[which] for slot, column in zip(slots, news)}
            yield source, self._replaced(columns, source, new)

    def _ordered(self, slots: tuple[int, ...], numbers: list[Any]) -> list[Any]:
        """Two units of a kind by their words: fewer pairs of shapes. Slots are sorted afterwards anyway."""
        if len(slots) < 2 or (slots[0] < self.scope.sessions <= slots[1]):
            return numbers
        one, two = numbers
        keep = self.arrays.cast(self.units.words[one] >= self.units.words[two], self.arrays.large)
        first = one * keep + two * (1 - keep)
        return [first, one + two - first]

    def _results(self, table: list[Any], weights: Any) -> tuple[Any, list[Any]]:
        """(row of the table, numbers of the units afterwards) for each command that is carried out."""
        arrays, units = self.arrays, self.units
        width = len(table) - len(FREE)
        numbers, left = table[:width], table[width:]
        code = units.shape[numbers[0]]
        if width == 2:
            code = code * (1 << SHAPE_BITS) + units.shape[numbers[1]]
        rows_found: list[Any] = [arrays.full(0, 0)]
        words_found: list[list[Any]] = [[arrays.full(0, 0)] for _ in numbers]
        for shapes in arrays.unique(code).tolist():
            index = arrays.nonzero(code == shapes)
            known = [units.shapes[shapes >> SHAPE_BITS], units.shapes[shapes & ((1 << SHAPE_BITS) - 1)]]
            case = self.rules.case(tuple(s for s in known[2 - width :] if s is not None))
            words = [units.words[column[index]] for column in numbers]
            rows = units.rows(words[0], case, words[-1], [column[index] for column in left])
            for templates, part in case.commands.results(rows):
                for template in templates:
                    looped = part
                    for loop in template.loops:
                        looped = looped.looped(loop)
                    if not looped.size:
                        continue
                    for result, hit in template.results.results(looped):
                        row = index[hit.column("row")] if result.units or weights is not None else None
                        times = hit.size if weights is None else int(weights[row].sum())
                        self.situations[result.situation] += times
                        if result.units is None:
                            continue
                        self.transitions += times
                        rows_found.append(row)
                        for tag, new, words_of in zip("ab", result.units, words_found):
                            words_of.append(units.word(hit, tag, new))
        return arrays.cat(rows_found), [units.numbers(arrays.cat(words)) for words in words_found]

    def _replaced(self, columns: list[Any], source: Any, new: dict[int, Any]) -> Any:
        """Keys of the states at `source` with other units in some slots."""
        made = None
        for kind in self.kinds:
            if not any(slot in new for slot in kind):
                continue
            units = [new[slot] if slot in new else columns[slot][source] for slot in kind]
            for end in range(len(units) - 1, 0, -1):  # bubble sort, the largest first
                for at in range(end):
                    one, two = units[at], units[at + 1]
                    units[at], units[at + 1] = self.arrays.maximum(one, two), self.arrays.minimum(one, two)
            for slot, unit in zip(kind, units):
                part = unit << (self.bits * slot)
                made = part if made is None else made | part
        for slot in range(self.slots):
            if not any(slot in kind and other in kind for kind in self.kinds for other in new):
                made = made | (columns[slot][source] << (self.bits * slot))
        return made

    def _come(self, size: int, columns: list[Any]) -> Iterator[tuple[Any, Any]]:
        """Commands about nobody: who comes. They ask how many there are; a memory check, where they are."""
        arrays = self.arrays
        code = arrays.full(size, 0)
        for column in columns:
            here = self.units.shape[column] if self.scope.checks else (column != 0)
            code = code * (1 << SHAPE_BITS) + arrays.cast(here, arrays.large)
        for known in arrays.unique(code).tolist():
            index = arrays.nonzero(code == known)
            situations, transitions, come = self._of_nobody(known, [int(c[index[0]]) for c in columns])
            for text, times in situations.items():
                self.situations[text] += times * len(index)
            self.transitions += transitions * len(index)
            for session, number in come:
                slot = self.kinds[not session][-1]
                unit = arrays.full(len(index), number)
                yield index, self._replaced(columns, index, {slot: unit})

    def _of_nobody(self, code: int, numbers: list[int]) -> tuple[Counter[str], int, list[tuple[bool, int]]]:
        """Situations, commands carried out, who comes (whether a session, unit): by stepping one state."""
        if code not in self._nobody:
            key = self._key([self.units.unit(n) for n in numbers if n])
            situations, transitions, come = Counter[str](), 0, []
            state = self.quotient.state(key)
            for command in self.quotient.about(key, ()):
                now, outcome = model.step(state, command)
                situations[situation(state, command, outcome, now)] += 1
                if not isinstance(outcome, Done):
                    continue
                transitions += 1
                for one in now.sessions:
                    if one not in state.sessions:
                        unit = self.quotient.session_unit(one, None)
                        come.append((True, self.units.number(True, unit)))
                for other in now.requests:
                    if other not in state.requests:
                        unit = self.quotient.request_unit(other)
                        come.append((False, self.units.number(False, unit)))
            self._nobody[code] = situations, transitions, come
        return self._nobody[code]

    def nobody(self) -> list[tuple[int, tuple[Counter[str], int, list[tuple[bool, int]]]]]:
        """(code of who is there, what commands about nobody do), for all that was met."""
        return list(self._nobody.items())

    # One state.

    def path(self, key: int) -> tuple[Command, ...]:
        """The shortest way to a state that was found, in names that stay what they are.

        Nothing was kept for this: each level is expanded once more, for one that leads to the state.
        """
        arrays, counted = self.arrays, (self.transitions, self.situations.copy())
        keys = [key]
        target = arrays.full(1, key)
        depths = [d for d, level in enumerate(self.levels) if arrays.any(arrays.places(level, target)[1])]
        for level in reversed(self.levels[: depths[0] if depths else None]):
            keys.append(self._leads_to(level, keys[-1]))
        self.transitions, self.situations = counted
        q, state, said = self.quotient, self.quotient.initial, list[Command]()
        for here, there in pairwise(map(self.quotient_key, reversed(keys))):
            steps = ((command, model.step(q.state(here), command)[0]) for command in q.commands(here))
            command = spoken(next(c for c, now in steps if q.key(now) == there), q.renaming(state), state)
            said.append(command)
            state, _ = model.step(state, command)
        return tuple(said)

    def _leads_to(self, level: Any, key: int) -> int:
        """The first state of a level that leads to another."""
        for start in range(0, len(level), self.arrays.chunk):
            keys = level[start : start + self.arrays.chunk]
            for source, targets in self.targets(keys):
                found = self.arrays.nonzero(targets == key)
                if len(found):
                    return int(keys[source[found[0]]])
        raise AssertionError("a state that nothing leads to")

    def _key(self, units: list[tuple[bool, Any]]) -> int:
        """The key of some units in `quotient`."""
        numbers: list[list[int]] = [[], [], []]
        for session, unit in units:
            numbers[not session].append(self.quotient.number(unit))
        return self.quotient.pack([sorted(group, reverse=True) for group in numbers], 0)

    def quotient_key(self, key: int) -> int:
        """The key in `quotient` of one of the keys here."""
        numbers = [(key >> (self.bits * slot)) & self.mask for slot in range(self.slots)]
        return self._key([self.units.unit(n) for n in numbers if n])
