"""Commands in words: `format_command` writes "extend r1 +4", `parse` reads it back.

A command's notation is a row of parts in NOTATION; both directions are made from it. A new command needs no
line here, but for entries or for better words than the names of its fields.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any, NamedTuple, get_type_hints

from reference.blocks.commands import Add, More, Schedule
from reference.commands import (
    Broken, CheckBusy, Choice, Chunk, Decode, Done, Draft, EvictSwa, Extend, Finish,
    Insert, Launch, Match, Outcome, Prompt, Refused, Retract, SpecDecode, Submit, kind_name, prompt_of,
    prompt_text,
)  # fmt: skip
from reference.system_kinds import KINDS, ROWS, AnyCommand, Kind
from reference.pairs.commands import Advance, Forward, Prefill, Serve
from reference.tiers.commands import Await
from stateful_tests.traces.trace_files import TraceError, check_command

_NAME = r"[A-Za-z0-9_.-]+"
_PROMPT = r"(?:[a-zA-Z]-?[0-9]{1,5})+"
_LENGTH = r"[+-]?[0-9]{1,5}"


class NotationError(ValueError):
    """A line that is no command: one line that says what would be."""


class NotationPart(NamedTuple):
    """A part of a command: its usage for people, its pattern, and how it is written and read.

    usage and pattern begin with the blank before the part.

    write: "" where it is left out.
    read: makes the values of fields from the groups of the pattern.
    """

    usage: str
    pattern: str
    write: Callable[[Any], str]
    read: Callable[[dict[str, str | None]], dict[str, Any]]


def _name(field: str) -> NotationPart:
    return NotationPart(
        f" {field.upper()}",
        rf" (?P<{field}>{_NAME})",
        lambda command: f" {getattr(command, field)}",
        lambda found: {field: found[field]},
    )


def _word(field: str) -> NotationPart:
    """Return the part for the name of a field, and a name."""
    name = _name(field)
    return name._replace(
        usage=f" {field}{name.usage}",
        pattern=f" {field}{name.pattern}",
        write=lambda command: f" {field}{name.write(command)}",
    )


def _number(
    field: str, word: str, *, default: int | None = None, always: bool = False
) -> NotationPart:
    """Return the part for a word and a number; without the two it is the default, which is not written
    unless `always`."""
    pattern = rf" {word} (?P<{field}>{_LENGTH})"
    usage = f" {word} N"

    def write(command: Any) -> str:
        value = getattr(command, field)
        return "" if value == default and not always else f" {word} {value}"

    def read(values: dict[str, str | None]) -> dict[str, Any]:
        text = values[field]
        return {} if text is None else {field: int(text)}

    if default is None:
        return NotationPart(usage, pattern, write, read)
    return NotationPart(f" [{usage[1:]}]", f"(?:{pattern})?", write, read)


def _flag(field: str, words: str) -> NotationPart:
    return NotationPart(
        f" [{words}]",
        rf"(?P<{field}> {re.escape(words)})?",
        lambda command: f" {words}" if getattr(command, field) else "",
        lambda found: {field: found[field] is not None},
    )


def _field_part(field: str) -> NotationPart:
    """Return the part for the field and a name; nothing where the name is empty."""
    return NotationPart(
        f" [{field} NAME]",
        rf"(?: {field} (?P<{field}>{_NAME}))?",
        lambda command: f" {field} {value}" if (value := getattr(command, field)) else "",
        lambda found: {field: found[field] or ""},
    )


def _lanes(
    field: str, usage: str, lane: str, write: Callable[[Any], str], read: Callable[..., Any]
) -> NotationPart:
    """Return the part for the entries of a batch, between commas.

    read: makes an entry of its words, without those of the notation.
    """
    return NotationPart(
        f" {usage}, ...",
        rf" (?P<{field}>{lane}(?:\s*,\s*{lane})*|\(no lanes\))",
        lambda command: " " + (", ".join(map(write, getattr(command, field))) or "(no lanes)"),
        lambda found: {field: tuple(read(*lane.split()) for lane in _parse_list(found[field] or ""))},
    )


def _parse_list(text: str) -> Sequence[str]:
    return () if text.startswith("(") else text.split(",")


_OF_PROMPT = NotationPart(
    " a8b4",
    rf" (?P<prompt>{_PROMPT}|\(empty\))",
    lambda command: f" {prompt_text(command.prompt) or '(empty)'}",
    lambda found: {"prompt": prompt_of(found["prompt"] or "")},
)
_OF_SESSION = NotationPart(
    " in SESSION or (no session)",
    rf" (?:in (?P<session>{_NAME})|\(no session\))",
    lambda command: " (no session)" if command.session is None else f" in {command.session}",
    lambda found: {"session": found["session"]},
)


def _input(command: Submit | Add | More | Prefill | Serve) -> str:
    shared = f" {prompt_text(command.prompt)}" if command.prompt else ""
    return shared + (f" {command.tokens:+}" if command.tokens or not shared else "")


_INPUT = NotationPart(
    " [a8b4] +TOKENS",
    rf"(?: (?P<prompt>{_PROMPT})(?: (?P<tokens>{_LENGTH}))?| (?P<alone>{_LENGTH}))",
    _input,
    lambda found: {
        "tokens": int(found["tokens"] or found["alone"] or 0),
        "prompt": prompt_of(found["prompt"] or ""),
    },
)
_REQUEST = _name("request")
_HOLDER = _name("holder")


def _listing(field: str, of: Callable[[str], Any]) -> NotationPart:
    """Return the part for a word and values; nothing where there are none."""

    def write(command: Any) -> str:
        values = getattr(command, field)
        return "".join(f" {part}" for part in (field, *values)) if values else ""

    return NotationPart(
        f" [{field} ...]",
        rf"(?: {field}(?P<{field}>(?: {_LENGTH if of is int else _NAME})+))?",
        write,
        lambda found: {field: tuple(map(of, (found[field] or "").split()))},
    )


def _plain(kind: Any) -> tuple[NotationPart, ...]:
    """Return the notation of a command that names its fields: names, numbers, flags and a prompt."""
    hints = get_type_hints(kind)
    parts: dict[Any, Callable[[Field[Any]], NotationPart]] = {
        str: lambda f: _name(f.name),
        int: lambda f: _number(f.name, f.name, default=None if f.default is MISSING else f.default),
        bool: lambda f: _flag(f.name, f"({f.name})"),
        Prompt: lambda _: _OF_PROMPT,
    }
    return tuple(parts[hints[f.name]](f) for f in fields(kind))


_DRAFTS = _lanes(
    "lanes",
    "REQUEST +TOKENS accept N",
    rf"{_NAME} {_LENGTH} accept {_LENGTH}",
    lambda lane: f"{lane.request} {lane.allocate:+} accept {lane.accept}",
    lambda name, tokens, _, accept: Draft(name, int(tokens), int(accept)),
)
_IN_OTHER_WORDS: dict[type, tuple[NotationPart, ...]] = {
    Submit: (_REQUEST, _OF_SESSION, _INPUT, _number("rewind", "rewind", default=0), _field_part("answers")),
    Extend: (_lanes(
        "lanes", "REQUEST +TOKENS [tail]", rf"{_NAME} {_LENGTH}(?: tail)?",
        lambda lane: f"{lane.request} {lane.tokens:+}" + (" tail" if lane.tail else ""),
        lambda name, tokens, *tail: Chunk(name, int(tokens), bool(tail)),
    ),),
    Decode: (_lanes("requests", "REQUEST", _NAME, str, str),),
    SpecDecode: (_DRAFTS,),
    Launch: (_DRAFTS,),
    EvictSwa: (_REQUEST, _number("length", "at length")),
    Finish: (_REQUEST, _number("finished_len", "keep")),
    Retract: (_REQUEST, _number("in_flight", "losing", default=0)),
    CheckBusy: (_number("level", "level", default=1, always=True),),
    Add: (
        _REQUEST, _INPUT, _number("max_tokens", "for"), _number("priority", "priority", default=0),
        _flag("resumable", "(session)"), _number("remote", "remote", default=0), _field_part("adapter"),
        _field_part("salt"), _number("children", "children", default=0),
    ),
    More: (_REQUEST, _INPUT, _number("max_tokens", "for")),
    Schedule: (_listing("accept", int), _listing("stop", str)),
    Prefill: (_REQUEST, _INPUT, _number("priority", "priority", default=0)),
    Forward: (
        _REQUEST, _word("of"), _number("max_tokens", "for", default=1, always=True),
        _number("priority", "priority", default=0),
    ),
    Serve: (
        _name("server"), _REQUEST, _INPUT, _number("max_tokens", "for"),
        _number("priority", "priority", default=0),
    ),
    Advance: (
        _name("server"), _listing("accept", int), _number("drafts", "drafts", default=16),
        _listing("stop", str),
    ),
    Match: (_HOLDER, _OF_PROMPT, _flag("full_only", "(full KV alone)")),
    Await: (_HOLDER, _OF_PROMPT, _flag("resumable", "(session)")),
    Insert: (_HOLDER, _OF_PROMPT, _number("evicted", "SWA from", default=0), _flag("chunked", "(goes on)")),
}  # fmt: skip
# The commands of each kind of system by their names.
COMMANDS_OF: dict[str, dict[str, type]] = {
    kind.name: {kind_name(command): command for command in kind.commands} for kind in KINDS.values()
}
NOTATION = {
    command: _IN_OTHER_WORDS.get(command) or _plain(command)
    for named in COMMANDS_OF.values()
    for command in named.values()
}
USAGES = {
    name: name + "".join(part.usage for part in NOTATION[kind])
    for name, kind in COMMANDS_OF[ROWS.name].items()
}


def format_command(command: AnyCommand) -> str:
    """Return a command in readable form, such as "extend r1 +4"."""
    kind = type(command)
    return kind_name(kind) + "".join(part.write(command) for part in NOTATION[kind])


def parse(line: str, kind_of_system: Kind = ROWS) -> Any:
    """Return the command of such a system that `line` stands for; runs of blanks count as one. Raises
    NotationError."""
    kinds = COMMANDS_OF[kind_of_system.name]
    words = " ".join(line.split())
    name, blank, rest = words.partition(" ")
    if name not in kinds:
        raise NotationError(f"{name!r:.40} is no command; commands: {', '.join(kinds)}")
    kind = kinds[name]
    match = re.fullmatch("".join(part.pattern for part in NOTATION[kind]), blank + rest, re.ASCII)
    if match is None:
        usage = name + "".join(part.usage for part in NOTATION[kind])
        raise NotationError(f"expected: {usage}; got {words!r:.80}")
    values: dict[str, Any] = {}
    for part in NOTATION[kind]:
        values |= part.read(match.groupdict())
    command = kind(**values)
    try:
        check_command(command, kind_of_system)
    except TraceError as error:
        raise NotationError(
            f"{words:.80}: {error.path.removeprefix('$.')}: {error.reason}"
        ) from None
    return command


def format_outcome(outcome: Outcome) -> str:
    """Return an outcome in readable form."""
    match outcome:
        case Done(choices, _, freed):
            gave = f"; freed full {freed.full} swa {freed.swa}" if freed is not None else ""
            gave += f" states {freed.states}" if freed is not None and freed.states else ""
            return "done" + gave + "".join(f"; {_choice(choice)}" for choice in choices)
        case Refused(reason):
            return f"refused: {reason.value}"
        case Broken(error):
            return f"broken: {error}"


def _choice(choice: Choice) -> str:
    fields = ("kv_committed_len", "swa_evicted_seqlen", "kv_allocated_len")
    chosen = [f"{n} {getattr(choice, n)}" for n in fields if getattr(choice, n) is not None]
    when = " after the forward pass" if choice.after else ""
    return f"{choice.request} chose {', '.join(chosen) or 'the default'}{when}"
