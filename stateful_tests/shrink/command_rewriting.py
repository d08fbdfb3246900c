"""Commands with other names, texts or numbers: what the passes of shrinking have in common."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

from reference.commands import Piece, Submit
from reference.system_kinds import AnyCommand

Commands = tuple[AnyCommand, ...]


def with_changes(command: AnyCommand, **changes: Any) -> AnyCommand:
    """Return the command with some of its fields changed."""
    rewritten: Any = command
    made: AnyCommand = replace(rewritten, **changes)
    return made


# The attributes in which commands and batch entries name somebody, and what the names become.
_NAMING = {
    "request": "r",
    "of": "r",
    "requests": "r",
    "lanes": "r",
    "session": "s",
    "holder": "h",
    "stop": "r",
}


def with_names_in_order(commands: Commands) -> Commands:
    """Return the commands with names in the order of appearance: sessions s1, requests r1, lock owners
    h1, texts a, and so on."""
    names: dict[str, str] = {}
    counts = dict.fromkeys("rsh", 0)
    letters: dict[str, str] = {}
    for command in commands:
        for attribute, letter in _NAMING.items():
            for name in names_in_attribute(getattr(command, attribute, None)):
                if name not in names:
                    counts[letter] += 1
                    names[name] = f"{letter}{counts[letter]}"
        for piece in getattr(command, "prompt", ()):
            letters.setdefault(piece.text, chr(ord("a") + len(letters) % 26))
        if answers := getattr(command, "answers", ""):
            letters.setdefault(answers, chr(ord("a") + len(letters) % 26))
    return tuple(with_texts(with_names(command, names), letters) for command in commands)


def lives_apart(commands: Commands) -> Commands:
    """Give each life of a request a name of its own, so that a change to one leaves the others alone."""
    names_in_use = set().union(*map(names_in, commands))
    names_seen: set[str] = set()
    names: dict[str, str] = {}
    apart = []
    for command in commands:
        if isinstance(command, Submit):
            name = command.request
            if name in names_seen:
                names[name] = next(
                    n for i in range(len(names_in_use) + 1) if (n := f"r{i + 1}") not in names_in_use
                )
                names_in_use.add(names[name])
            names_seen.add(name)
        apart.append(with_names(command, names))
    return tuple(apart)


def names_in_attribute(value: Any) -> list[str]:
    """Return the names in an attribute: one, or those of a batch, or of its entries."""
    if isinstance(value, tuple):
        return [str(getattr(lane, "request", lane)) for lane in value]
    return [] if value is None else [value]


def names_in(command: AnyCommand) -> set[str]:
    """Return the sessions, requests and lock owners that a command names."""
    return {name for attribute in _NAMING for name in names_in_attribute(getattr(command, attribute, None))}


def texts_in(command: AnyCommand) -> set[str]:
    """Return the shared texts that a command's prompt names, and the one that answers it."""
    answers = {getattr(command, "answers", "")} - {""}
    return {piece.text for piece in getattr(command, "prompt", ())} | answers


def with_names(command: AnyCommand, names: dict[str, str]) -> AnyCommand:
    """Return the command with other names for its holders; names that are not given stay."""
    changes: dict[str, Any] = {}
    for attribute in _NAMING:
        value: Any = getattr(command, attribute, None)
        if attribute == "lanes" and value is not None:
            changes[attribute] = tuple(
                replace(n, request=names.get(n.request, n.request)) for n in value
            )
        elif isinstance(value, tuple):
            changes[attribute] = tuple(names.get(n, n) for n in value)
        elif value is not None:
            changes[attribute] = names.get(value, value)
    return with_changes(command, **changes)


def with_texts(command: AnyCommand, letters: dict[str, str]) -> AnyCommand:
    """Return the command with other letters for the texts of its prompt and of its answer."""
    if not hasattr(command, "prompt"):
        return command
    changes: dict[str, Any] = {
        "prompt": tuple(Piece(letters.get(p.text, p.text), p.tokens) for p in command.prompt)
    }
    if isinstance(command, Submit):
        changes["answers"] = letters.get(command.answers, command.answers)
    return with_changes(command, **changes)


Path = tuple[str] | tuple[str, int, str]


def numbers(command: AnyCommand) -> Iterator[tuple[Path, int]]:
    """Return paths and values of the whole numbers in a command, flags included."""
    for field in fields(command):
        value: Any = getattr(command, field.name)
        if isinstance(value, int):
            if value:
                yield (field.name,), int(value)
        elif isinstance(value, tuple):
            for index, lane in enumerate(value):
                if is_dataclass(lane):
                    for inner in fields(lane):
                        number = getattr(lane, inner.name)
                        if isinstance(number, int) and number:
                            yield (field.name, index, inner.name), int(number)


def with_number(command: AnyCommand, path: Path, number: int) -> AnyCommand:
    """Return the command with one number replaced; a flag stays a flag."""
    if len(path) == 1:
        return with_changes(command, **_replace_number(command, path[0], number))
    name, index, inner = path
    old = getattr(command, name)
    lane = replace(old[index], **_replace_number(old[index], inner, number))
    return with_changes(command, **{name: (*old[:index], lane, *old[index + 1 :])})


def _replace_number(command: Any, field: str, number: int) -> dict[str, int]:
    return {field: bool(number) if isinstance(getattr(command, field), bool) else number}


def with_scaled_lengths(commands: Commands, size: int, was: int) -> Commands:
    """Return the commands with lengths for pages of `was` tokens converted to pages of `size`."""
    fitted = []
    for command in commands:
        for path, value in list(numbers(command)):
            command = with_number(command, path, -(-value * size // was))
        fitted.append(command)
    return tuple(fitted)


def all_less(command: AnyCommand, less: int, low: int, high: int) -> AnyCommand:
    """Return the command with all its numbers from `low` to `high` smaller by `less`."""
    for path, value in list(numbers(command)):
        if low <= value <= high:
            command = with_number(command, path, value - less)
    return command
