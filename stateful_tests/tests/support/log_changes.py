"""One change to the log of a real scheduler.

A number or a flag is another, a line is left out, two adjacent lines or (level `pages`) two rows are swapped.
"""

from collections.abc import Callable, Iterator
from functools import reduce
from itertools import pairwise
from operator import getitem
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from impl.choices import Choices, RandomChoices, pick
from impl.sglang.server.events import Event
from stateful_tests.watched.log_reader import Line, logs_of
from stateful_tests.watched.validation_results import Validated
from stateful_tests.watched.validator import Validator

FOLDER = Path(__file__).parents[3] / "fixtures" / "watched"
TAIL = 8  # lines at the end of a log stay as they are: nothing follows that would tell
CURSORS = ("C", "A", "E", "R")
# What the elements of a list stand for; [] is an element of a list, or of one of BY_NAMES.
PARTS = {
    "cursors": CURSORS,
    "before": CURSORS,
    "after": CURSORS,
    "extend lanes[]": ("request", "prefix", "tokens", "cursors"),
    "result lanes[]": ("request", "outputs", "cursors", "ids"),
    "step lanes[]": ("request", *CURSORS),
    "pages owners[]": ("row", "cursors", "slots"),
    "pages nodes[]": ("path", "slots", "SWA slots", "full locks", "SWA locks"),
    "pages states tracked[]": ("slot", "tokens"),
}
BY_NAMES = ("pages owners", "pages states held", "pages states tracked")  # dictionaries
Make = Callable[[Choices], list[Line]]  # what stands at a place instead


class Change(NamedTuple):
    """A change of a log.

    at: index of the first line that is not as it was.
    """

    kind: str
    at: int
    lines: list[Line]


class ChangedLog:
    """A log of fixtures/watched.

    begins: the snapshot that it begins with, None for all of it.
    """

    def __init__(self, name: str, begins: int | None = None) -> None:
        (log,) = logs_of([FOLDER / f"{name}.jsonl"])
        self.header = log.header
        self.lines = list(log.lines())
        snapshots = [at for at, line in enumerate(self.lines) if tag(line) == "snapshot"]
        self.lines = self.lines[0 if begins is None else snapshots[begins] :]

    def validate(self, lines: list[Line]) -> Validated:
        """Return what validation finds in these lines."""
        return Validator(self.header).run(lines)

    def changes(self) -> Iterator[Change]:
        """Yield one change of each kind, at a random place of it."""
        places: dict[str, list[tuple[int, int, Make]]] = {}
        for index, line in enumerate(self.lines[:-TAIL]):
            for kind, make in _changes_of(line):
                places.setdefault(kind, []).append((index, 1, make))
        for index, (one, other) in enumerate(pairwise(self.lines[:-TAIL])):
            kind = f"{tag(other)} before {tag(one)}"
            places.setdefault(kind, []).append((index, 2, lambda _, two=(other, one): list(two)))
        for kind, found in sorted(places.items()):
            choices = RandomChoices(kind)
            index, instead_of, make = pick(choices, found)
            after = self.lines[index + instead_of :]
            yield Change(kind, index, [*self.lines[:index], *make(choices), *after])


def tag(line: Line) -> str:
    """Return the kind of a line."""
    return str(type(line.event).__struct_config__.tag)


def _changes_of(line: Line) -> Iterator[tuple[str, Make]]:
    """Return what can be changed in one line."""
    name, *parts = msgspec.json.decode(msgspec.json.encode(line.event))
    fields = line.event.__struct_fields__

    def change_log(*changes: tuple[tuple[Any, ...], Any]) -> list[Line]:
        values = dict(zip(fields, msgspec.json.decode(msgspec.json.encode(parts))))
        for path, value in changes:
            *above, last = path
            reduce(getitem, above, values)[last] = value
        return [line._replace(event=msgspec.convert([name, *values.values()], Event))]

    yield f"{name} left out", lambda _: []
    values = dict(zip(fields, parts))
    for kind, path, value in leaves(values, name):
        yield kind, lambda choices, path=path, value=value: change_log((path, _another(value, choices)))
    for one, other in pairwise(values.get("owners") or ()):
        both = [
            (("owners", to, 2), values["owners"][of][2]) for to, of in ((one, other), (other, one))
        ]
        yield "two rows swapped", lambda _, both=both: change_log(*both)


def _another(value: int | bool, choices: Choices) -> int | bool:
    if isinstance(value, bool):
        return not value
    return value + pick(choices, (1, -1)) if value else 1


def leaves(
    value: Any, name: str, path: tuple[Any, ...] = ()
) -> Iterator[tuple[str, tuple[Any, ...], Any]]:
    """Every number and flag in the values of an event: what it is called, where it stands, what it is."""
    if isinstance(value, int):
        yield name.replace("[]", ""), path, value
    elif isinstance(value, dict):
        for key, part in value.items():
            nested = f"{name}[]" if name in BY_NAMES else f"{name} {key}"
            yield from leaves(part, nested, (*path, key))
    elif isinstance(value, list):
        parts = PARTS.get(name) or PARTS.get(name.rpartition(" ")[2])
        for at, part in enumerate(value):
            nested = f"{name}[]" if isinstance(part, list | dict) else name
            yield from leaves(part, f"{name} {parts[at]}" if parts else nested, (*path, at))
