"""Changes of facts in words: of named tuples with pools, lists and other named tuples in them.

    host_free full 5 0                     a pool of a field; "-" is empty, other pools stay
    host_memory full 1=other               what one slot holds
    node 3: host full 1 swa 3, storing 7   fields of a record
    new record: load, ack 3, nodes 3       one more record; fields that are missing have their default
    no record 1                            a record less

Flags stand alone, or with `no` behind them. A record is called by its number or name; where it has none, by
its place, from 1 on. Tokens have names: those of a text by letter and position (a0), others as given.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

_WORD = re.compile(r'"[^"]*"|\S+')


class RecordWordsError(ValueError):
    """A line that changes nothing: the line, and why."""


@dataclass(frozen=True)
class RecordKind:
    """Records of one kind.

    field: where they stand.
    key: the field that names one, "" for its place.
    """

    type: Any
    field: str
    key: str = ""


@dataclass(frozen=True)
class Notation:
    """A notation of records in words.

    kinds: of records, by their word.
    tokens: by name.
    values: those of other types, by name.
    """

    kinds: Mapping[str, RecordKind]
    tokens: Mapping[str, int] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)

    def change_facts(self, facts: Any, line: str) -> Any:
        """Return the facts with what a line says. Raises RecordWordsError."""
        try:
            return self._change_facts(facts, line)
        except (KeyError, IndexError, StopIteration, TypeError, ValueError) as error:
            raise RecordWordsError(f"{line!r}: {error or type(error).__name__}") from None

    def _change_facts(self, facts: Any, line: str) -> Any:
        head, colon, said = line.partition(": ")
        words = head.split()
        if words[0] == "new":
            kind = self.kinds[words[1]]
            blank = _blank(kind.type)
            record = kind.type(**{**blank, **self._fields(said, kind.type, blank)})
            return facts._replace(**{kind.field: (*getattr(facts, kind.field), record)})
        if words[0] == "no" and words[1] in self.kinds:
            kind, at, rest = self._record(facts, words[1:])
            del rest[at]
            return facts._replace(**{kind.field: tuple(rest)})
        if words[0] in self.kinds and colon:
            kind, at, rest = self._record(facts, words)
            rest[at] = rest[at]._replace(**self._fields(said, kind.type, rest[at]._asdict()))
            return facts._replace(**{kind.field: tuple(rest)})
        return facts._replace(**self._fields(line, type(facts), facts._asdict()))

    def _record(self, facts: Any, words: list[str]) -> tuple[RecordKind, int, list[Any]]:
        """Return a record that is there: its kind, its place among the others, and all of them."""
        kind = self.kinds[words[0]]
        name = " ".join(words[1:])
        records = [*getattr(facts, kind.field)]
        if not kind.key:
            return kind, int(name) - 1, records
        names = [str(getattr(record, kind.key)) for record in records]
        return kind, names.index(name), records

    def _fields(self, said: str, of: Any, was: Mapping[str, Any]) -> dict[str, Any]:
        hints = get_type_hints(of)
        values = {}
        for part in said.split(", "):
            name, *words = (word.strip('"') for word in _WORD.findall(part))
            if name not in hints:
                raise ValueError(f"{name!r} is no field; one of {', '.join(hints)}")
            values[name] = self._value(words, hints[name], was[name])
        return values

    def _value(self, words: list[str], hint: Any, was: Any) -> Any:
        """Read the words of a field of this type."""
        if get_origin(hint) is UnionType:
            if words == ["no"]:
                return None
            [hint] = (each for each in get_args(hint) if each is not type(None))
        if hint is bool:
            return words != ["no"]
        if hint in (int, str):
            text = " ".join(words)
            return text if hint is str else self._number(text)
        if isinstance(hint, type) and issubclass(hint, float | StrEnum):
            return hint(words[0])
        if words and words[0] in self.values:
            return self.values[words[0]]
        if words == ["none"]:
            return get_origin(hint)()
        if get_origin(hint) is dict:
            return {**(was or {}), **self._pools(words, get_args(hint)[1], was or {})}
        [of, _] = get_args(hint)
        if of in (int, str):
            return self._parse_list(words, was) if of is int else tuple(w for w in words if w != "-")
        return tuple(self._part(of, word) for word in words if word != "-")

    def _part(self, of: Any, word: str) -> Any:
        """Return a part of a transfer, `full:3>2`: between these slots of a pool."""
        pool, slots = word.split(":")
        return of(pool, *map(int, slots.split(">")))

    def _pools(self, words: list[str], of: Any, was: Mapping[str, Any]) -> dict[str, Any]:
        slots_by_pool: dict[str, list[str]] = {}
        pool = ""
        for word in words:
            if re.fullmatch(r"full|swa|state", word):
                pool = word
                slots_by_pool[pool] = []
            elif pool:
                slots_by_pool[pool].append(word)
            else:
                raise ValueError(f"{word!r} stands before the name of a pool")
        counts = of is int
        return {
            pool: self._number(values[0]) if counts else self._parse_list(values, was.get(pool, ()))
            for pool, values in slots_by_pool.items()
        }

    def _parse_list(self, words: list[str], was: Any) -> tuple[int, ...]:
        """Numbers and tokens; with `at=token` what was there, but for that place."""
        if any("=" in word for word in words):
            slots = list(was)
            for word in words:
                at, _, token = word.partition("=")
                slots[int(at)] = self._number(token)
            return tuple(slots)
        return tuple(self._number(word) for word in words if word != "-")

    def _number(self, word: str) -> int:
        return self.tokens[word] if word in self.tokens else int(word)


def _blank(of: Any) -> dict[str, Any]:
    """Return a record that says nothing: defaults, and empty or zero what has none."""
    hints = get_type_hints(of)
    return {name: of._field_defaults.get(name, _nothing(hint)) for name, hint in hints.items()}


def _nothing(hint: Any) -> Any:
    origin = get_origin(hint) or hint
    if origin is UnionType or issubclass(origin, StrEnum):
        return None
    return origin()
