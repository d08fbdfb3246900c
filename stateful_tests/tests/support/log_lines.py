"""Events of a server's log in words: the fields of `impl.sglang.server.events` by their names.

    submit c1.1 of c1: tokens 3, new 3
    admit c1.1 of c1: prefix 0, C0
    extend: c1.1 tokens 2 C2 A2
    step 4: batch 1, sessions 1, full 27, swa 28, rows 3; c1.1 C5 A5 E1
    release c1.1 of c1: reason FINISH_LENGTH, inserts, outputs 3, counted 3, before C5 A5 E1, after C5 A5 E1

First the name of the event and who it is about. Then fields; one that is missing is 0, empty, false or null,
and `no` after a name says null, for a list `empty` that it is there. C, A, E and R are cursors; those that
are missing are 0. Behind semicolons stand entries: of a batch by their request; `session` and `request` of
a snapshot; `owner`, `node`, `held`, `tracked` and `states` of pages.
"""

import re
from collections.abc import Iterable
from copy import deepcopy
from typing import Any, get_args, get_origin, get_type_hints

from impl.sglang.server.events import (
    Cells, Event, RequestState, SessionState, ShownStates, TierHeader, WatchHeader,
)  # fmt: skip
from stateful_tests.tests.support.log_changes import CURSORS

EVENTS = {str(kind.__struct_config__.tag): kind for kind in get_args(Event)}
# Fields that stand before the colon.
_ABOUT = {
    "open": ("session",), "close": ("session",), "closed": ("session",), "submit": ("request", "session"),
    "requeue": ("request",), "admit": ("request", "session"), "evict_swa": ("request",),
    "insert": ("request",), "release": ("request", "session"), "step": ("number",), "failed": ("where",),
}  # fmt: skip
Fields = dict[str, Any]
JsonLine = list[Any]
# Entries: of what type each field is.
_LANES: dict[str, Fields] = {
    "extend": {"request": str, "prefix": int, "tokens": int, "cursors": Cells},
    "result": {"request": str, "outputs": int, "cursors": Cells, "ids": list[int]},
    "step": {"request": str, "cursors": Cells},
}
_OWNER: Fields = {"row": int, "cursors": Cells, "slots": list[int]}
_NODE: Fields = {
    "path": list[int], "slots": list[int], "swa_slots": list[int], "full_locks": int, "swa_locks": int,
}  # fmt: skip
_WORD = re.compile(r'"[^"]*"|[^\s,]+')
_CURSOR = re.compile(r"([CAER])(\d+)")


class LogLineError(ValueError):
    """A line that is no event: the line, and why."""


def event(line: str) -> JsonLine:
    """Return the event that a line says, as it stands in a log. Raises LogLineError."""
    try:
        return _event(line)
    except (KeyError, IndexError, ValueError) as error:
        raise LogLineError(f"{line!r}: {error}") from None


def events(text: str) -> list[JsonLine]:
    """Return the events of a text, a line each."""
    return [event(line) for line in text.splitlines() if line.strip()]


def spoilt(log: list[JsonLine], changes: str) -> list[JsonLine]:
    """Return a copy of a log with changes, each with the number of its line: `9 C3 A3 E3; 11 c1.1
    tokens 2`."""
    copy = deepcopy(log)
    for change in filter(None, changes.split("; ")):
        number, _, words = change.partition(" ")
        copy[int(number) - 1] = change_line(copy[int(number) - 1], words)
    return copy


def header_fields(text: str) -> Fields:
    """Fields of a log's header: `window no, full_tokens 8, tree; tier full_tokens 32, states 8`."""
    plain, _, tier = text.partition("; tier ")
    values = _read(_words(plain), get_type_hints(WatchHeader))
    return values | {"tier": _read(_words(tier), get_type_hints(TierHeader))} if tier else values


def change_line(was: JsonLine, change: str) -> JsonLine:
    """Return an event with other fields, in the words of a line: `full 28`, `c1.1 C3 A3`, `session
    c1 tokens 6`."""
    tag, *values = deepcopy(was)
    types = _types(tag)
    fields = dict(zip(types, [*values, *map(_missing, [*types.values()][len(values) :])]))
    words = _words(change)
    if words[0].split()[0] in types or _CURSOR.fullmatch(words[0]):
        fields |= _read(words, types)
    else:
        _enter(tag, fields, words, instead=True)
    return [tag, *fields.values()]


def _event(line: str) -> JsonLine:
    head, *entries = line.split(";")
    about, _, body = head.partition(":")
    tag, *names = about.split()
    if tag not in EVENTS:
        raise ValueError(f"no event is called {tag!r}; one of {', '.join(EVENTS)}")
    types = _types(tag)
    fields = {name: _missing(hint) for name, hint in types.items()}
    names = [name for name in names if name != "of"]
    for name, word in zip(_ABOUT.get(tag, ()), names, strict=False):
        fields[name] = _value([word], types[name])
    if tag in _LANES and tag != "step":
        entries = [body, *entries]
    else:
        fields |= _read(_words(body), types)
    for entry in entries:
        _enter(tag, fields, _words(entry))
    return [tag, *fields.values()]


def _types(tag: str) -> Fields:
    kind = EVENTS[tag]
    hints = get_type_hints(kind)
    return {name: hints[name] for name in kind.__struct_fields__}


def _words(text: str) -> list[str]:
    return _WORD.findall(text)


def _missing(hint: Any) -> Any:
    """Return the value of a field that a line does not state."""
    if _optional(hint):
        return None
    if hint == Cells:
        return [0, 0, 0, 0]
    origin = get_origin(hint) or hint
    return origin() if isinstance(origin, type) and origin is not ShownStates else None


def _read(words: Iterable[str], types: Fields) -> Fields:
    """Fields by their names, each with the words behind it."""
    values: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word in types:
            name = word
            values[name] = []
        elif _CURSOR.fullmatch(word) and not _takes_cursors(name, types):
            name = "cursors"
            values[name] = [word]
        elif name:
            values[name].append(word)
        else:
            raise ValueError(f"{word!r} is no field; one of {', '.join(types)}")
    return {name: _value(parts, types[name]) for name, parts in values.items()}


def _takes_cursors(name: str, types: Fields) -> bool:
    return name in types and Cells in (types[name], *get_args(types[name]))


def _value(words: list[str], hint: Any) -> Any:
    """Read the words of a field of this type."""
    if words == ["no"]:
        return False if hint is bool else None
    [kind] = (
        [each for each in get_args(hint) if each is not type(None)] if _optional(hint) else [hint]
    )
    if kind is bool:
        if words:
            raise ValueError(f"{' '.join(words)!r} behind a flag")
        return True
    if kind == Cells:
        numbers = dict(re.findall(_CURSOR, word)[0] for word in words)
        return [int(numbers.get(name, 0)) for name in CURSORS]
    if get_origin(kind) is list:
        listed = [] if words == ["empty"] else words
        item_type = get_args(kind)[0]
        return [int(word) if item_type is int else word for word in listed]
    [word] = words
    return kind(word) if kind in (int, float) else word.strip('"')


def _optional(hint: Any) -> bool:
    return type(None) in get_args(hint)


def _enter(tag: str, fields: Fields, words: list[str], instead: bool = False) -> None:
    """An entry of a batch, a snapshot or pages.

    instead: of the one that has its name.
    """
    if tag in _LANES:
        _enter_lane(tag, fields["lanes"], words, instead)
    elif tag == "snapshot":
        kind, name, *more_words = words
        state: Any = {"session": SessionState, "request": RequestState}[kind]
        _enter_state(fields[f"{kind}s"], kind, name, _read(more_words, get_type_hints(state)), state)
    elif tag == "pages":
        _enter_page(fields, words)
    else:
        raise ValueError(f"{tag} has no entries: {' '.join(words)}")


def _enter_lane(tag: str, lanes: list[Any], words: list[str], instead: bool) -> None:
    request, *more_words = words
    types = _LANES[tag]
    values = {name: _missing(hint) for name, hint in types.items()} | {"request": request}
    places = [at for at, lane in enumerate(lanes) if instead and lane[0] == request] or [len(lanes)]
    for lane in lanes[places[0] : places[0] + 1]:
        values = dict(zip(types, [request, lane[1:]] if tag == "step" else lane))
    values |= _read(more_words, types)
    lane = [request, *values["cursors"]] if tag == "step" else list(values.values())
    lanes[places[0] : places[0] + 1] = [lane]


def _enter_state(states: list[Fields], kind: str, name: str, values: Fields, state: Any) -> None:
    """One of a snapshot. Fields that have no default are written out."""
    found = next((each for each in states if each[kind] == name), None)
    if found is None:
        needed = state.__struct_fields__[: -len(state.__struct_defaults__)]
        hints = get_type_hints(state)
        found = {each: _missing(hints[each]) for each in needed} | {kind: name}
        states.append(found)
    found |= values


def _enter_page(fields: Fields, words: list[str]) -> None:
    kind, *more_words = words
    if kind == "owner":
        name, *said = more_words
        was = dict(zip(_OWNER, fields["owners"].get(name, (0, [0, 0, 0, 0], []))))
        fields["owners"][name] = list((was | _read(said, _OWNER)).values())
    elif kind == "node":
        nothing = {name: _missing(hint) for name, hint in _NODE.items()}
        fields["nodes"] = [*(fields["nodes"] or []), list((nothing | _read(more_words, _NODE)).values())]
    else:
        states = fields["states"] = fields["states"] or {
            "free": [],
            "held": {},
            "tracked": {},
            "nodes": [],
        }
        if kind == "states":
            types: Fields = {"free": list[int], "nodes": list[str]}
            said = _read(more_words, types)
            states["free"] = said.get("free", states["free"])
            named = said.get("nodes", states["nodes"])
            states["nodes"] = [None if each in ("-", None) else int(each) for each in named]
        else:
            name, *numbers = more_words
            states[kind][name] = [int(number) for number in numbers]
