"""Hints about what a trace file may have at a path. Messages of msgspec name only the path and the fault."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

from msgspec import inspect as types

_PART = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")


def unknown_field(kind: Any, data: bytes, path: str, field: str) -> str:
    """Return the message for an unknown field: the nearest name, and all fields of the object at `path`."""
    struct = _struct_type(_type_at(kind, data, path))
    if struct is None:
        return "unknown field"
    names = [field.encode_name for field in struct.fields]
    if struct.tag_field is not None:
        names.insert(0, struct.tag_field)
    of_tag = f" of {struct.tag}" if struct.tag is not None else ""
    return f"unknown field{_suggestion(field, names) or '.'} The fields{of_tag}: {', '.join(map(str, names))}"


def missing_field(kind: Any, data: bytes, path: str, field: str) -> str:
    """Return the message for a missing field: what is expected there."""
    kind_at_path = _type_at(kind, data, path)
    if commands := _command_names(kind_at_path, field):
        return f"is missing; the commands: {', '.join(commands)}"
    struct = _struct_type(kind_at_path)
    known = {field.encode_name: field.type for field in struct.fields} if struct is not None else {}
    wanted = " or ".join(dict.fromkeys(_value_names(known[field]))) if field in known else ""
    return f"is missing: {wanted}" if wanted else "is missing"


def wrong_value(kind: Any, data: bytes, path: str, value: str) -> str:
    """Return the message for a value that is not valid at `path`: the nearest valid one, or else all. A
    wrong name of a command gets the names of commands."""
    parent, _, field = path.rpartition(".")
    if commands := _command_names(_place_at(kind, data, parent)[0], field):
        all_of_them = f". The commands: {', '.join(commands)}"
        return f"no command is called {value!r:.40}{_suggestion(value, commands) or all_of_them}"
    kind_at_path = _type_at(kind, data, path)
    values = [*_value_names(kind_at_path)] if kind_at_path is not None else []
    all_of_them = f"; one of {', '.join(values)}" if values else ""
    return f"{value!r:.40} is no value here{_suggestion(value, values) or all_of_them}"


def _command_names(kind: types.Type | None, field: str) -> list[str]:
    """Return the names of commands, where the field names a command."""
    structs = [member for member in _members(kind) if isinstance(member, types.StructType)]
    return [str(struct.tag) for struct in structs if struct.tag is not None and struct.tag_field == field]


def _suggestion(name: str, names: list[Any]) -> str:
    """Return the nearest name as the end of a message; "" where none is near."""
    close = get_close_matches(name, [str(known_name) for known_name in names], 1)
    return f"; did you mean {close[0]}?" if close else ""


def _type_at(kind: Any, data: bytes, path: str) -> types.Type | None:
    """Return the type at a path; None where it is unknown. Among several kinds of objects, the one
    whose tag the file has."""
    kind_at_path, raw = _place_at(kind, data, path)
    structs = [
        member
        for member in _members(kind_at_path)
        if isinstance(member, types.StructType)
        and isinstance(raw, dict)
        and member.tag is not None
        and raw.get(str(member.tag_field)) == member.tag
    ]
    return structs[0] if structs else kind_at_path


def _place_at(kind: Any, data: bytes, path: str) -> tuple[types.Type | None, Any]:
    """Return the type and the value at a path of a document; (None, None) where the format has no such
    place."""
    kind_at_path: types.Type | None = types.type_info(kind)
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError):  # behind the fault that is reported it may be anything
        raw = None
    for name, index in _PART.findall(path.removeprefix("$")):
        fields = raw if isinstance(raw, dict) else {}
        structs = [
            member
            for member in _members(kind_at_path)
            if isinstance(member, types.StructType)
            and member.tag in (None, fields.get(str(member.tag_field)))
        ]
        lists = [member for member in _members(kind_at_path) if isinstance(member, types.ListType)]
        if name and structs and isinstance(raw, dict):
            kind_at_path = next(
                (field.type for field in structs[0].fields if field.encode_name == name), None
            )
            raw = raw.get(name)
        elif index and lists and isinstance(raw, list):
            kind_at_path = lists[0].item_type
            raw = raw[int(index)]
        else:
            return None, None
    return kind_at_path, raw


def _struct_type(kind: types.Type | None) -> types.StructType | None:
    """Return the one kind of object that a value may be."""
    structs = [member for member in _members(kind) if isinstance(member, types.StructType)]
    return structs[0] if len(structs) == 1 else None


def _members(kind: types.Type | None) -> Iterator[types.Type]:
    if isinstance(kind, types.Metadata):
        kind = kind.type
    if isinstance(kind, types.UnionType):
        for each in kind.types:
            yield from _members(each)
    elif kind is not None:
        yield kind


def _value_names(kind: types.Type) -> Iterator[str]:
    """Yield the values that a type takes, such as "free", "faithful"; for objects their fields."""
    for each in _members(kind):
        if isinstance(each, types.EnumType):
            yield from (str(member.value) for member in each.cls)
        elif isinstance(each, types.LiteralType):
            yield from map(str, each.values)
        elif isinstance(each, types.StructType):
            yield f"an object with {' or '.join(field.encode_name for field in each.fields)}"
        elif name := _PLAIN.get(type(each)):
            yield name


_PLAIN: dict[type[types.Type], str] = {
    types.IntType: "a whole number",
    types.StrType: "a text",
    types.BoolType: "true or false",
    types.NoneType: "null",
    types.ListType: "a list",
    types.DictType: "an object",
}
