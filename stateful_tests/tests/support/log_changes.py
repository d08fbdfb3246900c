"""One change to the log of a real scheduler: is it noticed, by which clause, after how many events?

    python -m stateful_tests.tests.support.log_changes [PLACES]

changes one number by one, leaves one event out, swaps two adjacent lines, and swaps two rows (level `pages`),
at so many random places of each kind in each log of fixtures/watched, and prints what share was noticed.

These can never be noticed, for the changed log is that of another server that conforms:

* `release limit`, where the request ended before its limit, and `evict_swa length`, where E stays allowed.
* `drop admit`: the scheduler looked at the request again, and shows the same.
* `release after C`: the known fault `last-token` of the release shows just that.
* `insert cursors E` and `evict_swa cursors E` inside of what is the tree's, where nothing follows that has E.
* `release outputs` at level `lengths` under overlap: whether another round was in flight is not in the log.
* Two adjacent lines of requests that have nothing to do with each other, in either order.
"""

import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from impl.sglang.server.events import Event
from stateful_tests.watched.reader import Line, WatchLog, logs_of
from stateful_tests.watched.validator import Validator

FIXTURES = Path(__file__).parents[3] / "fixtures" / "watched"
CURSORS = ("C", "A", "E", "R")
TAIL = 8  # nothing comes after the last events that would tell
Place = Callable[[dict[str, Any]], tuple[Any, Any]]  # of a line's values: what holds the number, and where


class Change(NamedTuple):
    """line: index of the event; place: of a number in it, None to leave the event out."""

    line: int
    place: Place | None


class Seen(NamedTuple):
    """after: events until something was found, or a gap; None if nothing was."""

    clause: str
    after: int | None


class ChangedLog:
    """A log whose events can be changed one at a time."""

    def __init__(self, path: Path) -> None:
        self.log: WatchLog = logs_of([path])[0]
        self.lines: list[Line] = list(self.log.lines())

    def kinds(self) -> dict[str, list[Change]]:
        """Every place where something can be changed, by what that is."""
        found: dict[str, list[Change]] = {}
        for at, line in enumerate(self.lines[:-TAIL]):
            event = str(type(line.event).__struct_config__.tag)
            found.setdefault(f"drop {event}", []).append(Change(at, None))
            for name, place in _numbers(_values(line.event), event):
                found.setdefault(f"{event} {name}", []).append(Change(at, place))
        return found

    def swaps(self) -> list[tuple[int, Event]]:
        """Steps at which two rows have each other's slots."""
        found = []
        for at, line in enumerate(self.lines):
            owners = _values(line.event).get("owners") or {}
            for one, other in zip(list(owners), list(owners)[1:]):
                values = _values(line.event)
                mine, others = values["owners"][one], values["owners"][other]
                mine[2], others[2] = others[2], mine[2]
                found.append((at, _event(values)))
        return found

    def swapped(self, at: int) -> Seen:
        """What becomes of a line and the next in each other's place."""
        lines = [*self.lines[:at], self.lines[at + 1], self.lines[at], *self.lines[at + 2 :]]
        return self._seen(lines, at)

    def adjacent(self) -> dict[str, list[int]]:
        """Every place where two adjacent lines can be swapped, by what they are."""
        found: dict[str, list[int]] = {}
        tags = [str(type(line.event).__struct_config__.tag) for line in self.lines]
        for at, (one, other) in enumerate(pairwise(tags[: 1 - TAIL])):
            found.setdefault(f"swap {one} {other}", []).append(at)
        return found

    def changed(self, change: Change, by: int) -> Seen:
        """What becomes of a change."""
        if change.place is None:
            return self._seen([*self.lines[: change.line], *self.lines[change.line + 1 :]], change.line)
        values = _values(self.lines[change.line].event)
        where, at = change.place(values)
        where[at] = where[at] + by if where[at] else 1
        return self.replaced(change.line, _event(values))

    def replaced(self, at: int, event: Event) -> Seen:
        """What becomes of another event at that place."""
        line = self.lines[at]._replace(event=event)
        return self._seen([*self.lines[:at], line, *self.lines[at + 1 :]], at)

    def _seen(self, lines: list[Line], at: int) -> Seen:
        validator = Validator(self.log.header)
        for number, line in enumerate(lines):
            validator.read(line)
            if found := validator.result.found:
                return Seen(found[0].clause, number - at)
            if validator.result.skipped:
                return Seen("a gap", number - at)
        return Seen("", None)


def _values(event: Event) -> dict[str, Any]:
    name, *values = msgspec.json.decode(msgspec.json.encode(event))
    return {"event": name, **dict(zip(event.__struct_fields__, values))}


def _event(values: dict[str, Any]) -> Event:
    return msgspec.convert(list(values.values()), Event)


def _numbers(values: dict[str, Any], event: str) -> Iterator[tuple[str, Place]]:
    """Every number of an event that is no token id, by what it says."""
    for field, value in values.items():
        if isinstance(value, int) and not isinstance(value, bool):
            yield field, lambda v, field=field: (v, field)
        elif field in ("cursors", "before", "after") and value:
            for i, name in enumerate(CURSORS):
                yield f"{field} {name}", lambda v, field=field, i=i: (v[field], i)
        elif field == "lanes":
            for lane, parts in enumerate(value):
                for at, part in enumerate(parts):
                    if isinstance(part, int) and event == "step":
                        yield CURSORS[at - 1], lambda v, lane=lane, at=at: (v["lanes"][lane], at)
                    elif isinstance(part, int):
                        name = "outputs" if event == "result" else ("prefix", "tokens")[at - 1]
                        yield name, lambda v, lane=lane, at=at: (v["lanes"][lane], at)
                    elif isinstance(part, list) and at == {"extend": 3, "result": 2}[event]:
                        for i, cursor in enumerate(CURSORS):
                            yield cursor, lambda v, lane=lane, at=at, i=i: (v["lanes"][lane][at], i)


def measured(path: Path, places: int, kinds: str = ".*") -> Iterator[tuple[str, Counter[str], list[int]]]:
    """For each kind of change, how often each clause saw it first, and after how many events, at so many
    places. kinds: a pattern of those to try."""
    log = ChangedLog(path)
    tries: dict[str, Callable[[random.Random], Seen]] = {
        kind: lambda rng, found=found: log.changed(rng.choice(found), rng.choice((1, -1)))
        for kind, found in sorted(log.kinds().items())
    }
    for kind, at in sorted(log.adjacent().items()):
        tries[kind] = lambda rng, at=at: log.swapped(rng.choice(at))
    if swaps := log.swaps():
        tries["two rows swapped"] = lambda rng: log.replaced(*rng.choice(swaps))
    for kind, attempt in tries.items():
        if not re.fullmatch(kinds, kind):
            continue
        rng = random.Random(kind)
        seen = [attempt(rng) for _ in range(places)]
        after = sorted(each.after for each in seen if each.after is not None)
        yield kind, Counter(each.clause for each in seen if each.clause), after


def main(places: int) -> None:
    """Print the table."""
    for path in sorted(FIXTURES.glob("*.jsonl")):
        print(path.stem)
        for kind, clauses, after in measured(path, places):
            told = f", after {after[len(after) // 2]} events, {after[-1]} at most" if after else ""
            by = " ".join(f"{clause} {count}" for clause, count in clauses.most_common())
            print(f"  {kind:22} {len(after):3} of {places} noticed{told}; {by}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
