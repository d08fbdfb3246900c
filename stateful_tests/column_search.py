"""The search of scopes without a radix tree: a level at a time, on columns of packed states.

What a command does comes from `unit_rules`, so from `model.step`; here it is done to all units of a shape at
once. A unit is a word: its shape and its lengths in bits; it gets a number when it is first met. A state is a
key: the numbers of its units, sessions and then ordinary requests, each sorted; it gets a number in the same
way, so states are in the order in which they are found. Many states ask the same about some of their units:
such a question has a number too, and is answered once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

from reference import model
from reference.commands import Command, Done
from stateful_tests.arrays import NumpyArrays
from stateful_tests.exploration import Exploration, Search, explored, memory
from stateful_tests.numbered import Answers, Numbered
from stateful_tests.quotient import Quotient, spoken
from stateful_tests.scopes import Scope
from stateful_tests.situations import situation
from stateful_tests.unit_rules import UnitRules
from stateful_tests.units import SHAPE_BITS, Units


class ColumnSearch(Search):
    """All states of a scope.

    starts: where each depth begins among the states, and where the last one that is expanded ends. rules:
    those of another search of the scope, already traced.
    """

    def __init__(self, scope: Scope, arrays: Any = None, rules: UnitRules | None = None) -> None:
        self.scope = scope
        self.arrays = arrays = arrays or NumpyArrays()
        self.rules = rules or UnitRules(scope)
        self.units = Units(self.rules, arrays)
        self.slots = scope.sessions + scope.ordinary
        self.kinds = (range(scope.sessions), range(scope.sessions, self.slots))
        self.bits = min(31, 63 // self.slots)
        self.mask = (1 << self.bits) - 1
        self.quotient = Quotient(scope)
        g = scope.geometry
        self.totals = (g.full_pages, g.swa_pages, g.rows)
        self.seen = Numbered(arrays)  # not where a state is a unit: its number does
        self.answers = [Answers(arrays, width, self.bits) for width in range(1, min(3, self.slots))]
        self.starts = [0, 1]
        self._memory = memory()
        self._transitions = 0
        self._situations: Counter[str] = Counter()
        self._nobody: dict[int, tuple[Counter[str], int, list[tuple[bool, int]]]] = {}

    @property
    def states(self) -> int:
        return len(self.seen if self.slots > 1 else self.units)

    def keys(self, start: int, stop: int) -> Any:
        """Of some states."""
        return self.seen.words[start:stop] if self.slots > 1 else self.arrays.arange(stop - start) + start

    @property
    def levels(self) -> list[Any]:
        """Keys by depth."""
        return [self.keys(*ends) for ends in pairwise(self.starts)]

    @property
    def transitions(self) -> int:
        return self._counted()[0]

    @property
    def situations(self) -> Counter[str]:
        """How often each was met."""
        return self._counted()[1]

    def _counted(self) -> tuple[int, Counter[str]]:
        for answers in self.answers:
            answers.count(self._met)
        return self._transitions, self._situations

    def _met(self, text: str, done: bool, times: int) -> None:
        self._situations[text] += times
        self._transitions += times * done

    def count_from(self, transitions: int, situations: Mapping[str, int]) -> None:
        """Forget what was counted; what was before is given."""
        self._counted()
        self._transitions, self._situations = transitions, Counter(situations)

    def result(self, stopped: str) -> Exploration:
        """What there is to tell."""
        return explored(
            self.scope, f"columns, by {self.arrays.name}", states=self.states, expanded=self.expanded,
            transitions=self.transitions, depth=len(self.starts) - 2 + (self.starts[-1] < self.states),
            stopped=stopped, seconds=self.seconds, had_mb=self._memory, situations=self.situations,
        )  # fmt: skip

    @property
    def depth(self) -> int:
        return len(self.starts) - 1 - (self.expanded < self.starts[-1])

    def advance(self, most: int | None = None) -> None:
        start = self.expanded
        if start == self.starts[-1]:
            self.starts.append(self.states)
        stop = min(start + min(self.arrays.chunk, most or self.arrays.chunk), self.starts[-1])
        found = [targets for _, targets in self.targets(self.keys(start, stop))]
        if self.slots > 1:
            self.seen.numbers(self.arrays.cat(found))
        self.expanded = stop

    # From states to those they lead to.

    def targets(self, keys: Any) -> Iterator[tuple[Any, Any]]:
        """(place in `keys`, key it leads to), for every command that is carried out; some at a time.

        Counts transitions and situations. A target may be there once for several commands; what leaves the
        state as it is may be left out.
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
        if not asked:
            return
        arrays, owned = self.arrays, self.units.owned
        tables = []  # numbers of the units, and what the others leave
        for slots, places in asked:
            numbers = self._ordered(slots, [columns[slot][places] for slot in slots])
            others = [part[places] + sum(own[n] for n in numbers) for part, own in zip(left, owned)]
            tables.append((numbers, others))
        width = len(asked[0][0])
        if width == self.slots:  # no two states ask the same
            ((slots, places),) = asked
            rows, news = self._results(*tables[0], lambda text, done, row: self._met(text, done, len(row)))
            source = places[rows]
            yield source, self._replaced(columns, source, dict(zip(slots, news)))
            return
        answers = self.answers[width - 1]
        questions = answers.questions.numbers(arrays.cat([self._question(*table) for table in tables]))
        if len(answers.questions) > len(answers.asked):
            self._answer(answers)
        answers.asked += arrays.counts(questions, len(answers.asked))
        for slots, places in asked:
            here, questions = questions[: len(places)], questions[len(places) :]
            many = answers.many[here]
            ends = arrays.cumsum(many)
            source = arrays.repeat(places, many)
            which = arrays.repeat(answers.begin[here] - ends + many, many) + arrays.arange(len(source))
            new = {slot: column[which] for slot, column in zip(slots, answers.news)}
            yield source, self._replaced(columns, source, new)

    def _question(self, numbers: list[Any], left: list[Any]) -> Any:
        """A word for some units and what the others leave."""
        assert len(numbers) * self.bits + sum(map(int.bit_length, self.totals)) < 64, "too much for a word"
        word = self.arrays.full(len(numbers[0]), 0)
        for number in numbers:
            word = (word << self.bits) | number
        for part, total in zip(left, self.totals):
            word = (word << total.bit_length()) | self.arrays.cast(part, self.arrays.large)
        return word

    def _asked(self, word: Any, width: int) -> tuple[list[Any], list[Any]]:
        """The units, and what the others leave, of a word."""
        bits = [self.bits] * width + [total.bit_length() for total in self.totals]
        parts = []
        for many in reversed(bits):
            parts.append(word & ((1 << many) - 1))
            word = word >> many
        parts.reverse()
        return parts[:width], [self.arrays.cast(part, self.arrays.small) for part in parts[width:]]

    def _answer(self, answers: Answers) -> None:
        """The questions that are new."""
        first = len(answers.asked)
        words = answers.questions.words[first:]
        width = len(answers.news)
        rows, news = self._results(
            *self._asked(words, width), lambda text, done, row: answers.told.append((text, done, row + first))
        )
        answers.add(rows, news, len(words))

    def _ordered(self, slots: tuple[int, ...], numbers: list[Any]) -> list[Any]:
        """Two units of a kind by their words: fewer pairs of shapes. Slots are sorted afterwards anyway."""
        if len(slots) < 2 or (slots[0] < self.scope.sessions <= slots[1]):
            return numbers
        one, two = numbers
        keep = self.arrays.cast(self.units.words[one] >= self.units.words[two], self.arrays.large)
        first = one * keep + two * (1 - keep)
        return [first, one + two - first]

    def _results(
        self, numbers: list[Any], left: list[Any], tell: Callable[[str, bool, Any], None]
    ) -> tuple[Any, list[Any]]:
        """(row, numbers of the units afterwards) for the commands that are carried out; some equal ones once.

        numbers, left: a table of units and what the others leave. tell: called with each situation, whether
        it is of a transition, and its rows.
        """
        arrays, units = self.arrays, self.units
        width = len(numbers)
        code = arrays.full(len(numbers[0]), 0)
        for column in numbers:
            code = (code << SHAPE_BITS) + units.shape[column]
        rows_found: list[Any] = [arrays.full(0, 0)]
        words_found: list[list[Any]] = [[arrays.full(0, 0)] for _ in numbers]
        for shapes in arrays.unique(code).tolist():
            index = arrays.nonzero(code == shapes)
            known = [units.shapes[shapes >> SHAPE_BITS], units.shapes[shapes & ((1 << SHAPE_BITS) - 1)]]
            case = self.rules.case(tuple(s for s in known[2 - width :] if s is not None))
            words = [units.words[column[index]] for column in numbers]
            rows = units.rows(index, words[0], words[-1], [column[index] for column in left])
            for templates, places in case.commands.results(rows):
                part = rows if isinstance(places, slice) else rows.part(places, len(places))
                for template in templates:
                    if (refused := template.refused) is not None:
                        tell(refused, False, part.column("row"))
                        continue
                    looped = part
                    for loop in template.loops:
                        looped = looped.looped(loop)
                    if not looped.size:
                        continue
                    for result, hit in template.results.results(looped):
                        row = looped.column("row")[hit]
                        tell(result.situation, result.units is not None, row)
                        if result.units is None:
                            continue
                        after = [units.word(looped, hit, len(row), *new) for new in zip("ab", result.units)]
                        if template.loops:  # often the next number of a loop changes nothing
                            firsts = arrays.firsts(row, *after)
                            row, *after = (column[firsts] for column in (row, *after))
                        rows_found.append(row)
                        for words_of, word in zip(words_found, after):
                            words_of.append(word)
        return arrays.cat(rows_found), [units.numbers(arrays.cat(words)) for words in words_found]

    def _replaced(self, columns: list[Any], source: Any, new: dict[int, Any]) -> Any:
        """Keys of the states at `source` with other units in some slots."""
        assert len(self.units) <= 1 << self.bits, "more units than a key can name"
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
                self._met(text, False, times * len(index))
            self._transitions += transitions * len(index)
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
        transitions, situations = self.transitions, self.situations.copy()
        keys = [key]
        depths = [depth for depth, level in enumerate(self.levels) if self.arrays.any(level == key)]
        for level in reversed(self.levels[: depths[0] if depths else None]):
            keys.append(self._leads_to(level, keys[-1]))
        self.count_from(transitions, situations)
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
