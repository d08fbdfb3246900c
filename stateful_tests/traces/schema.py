"""The structs of the trace format, version 2: what may stand in a file, and within which bounds.

The structs of commands are made from the dataclasses in `reference.commands`: a new command needs no line
here. `FORMATS` has an entry for each kind of system. `files` reads and writes them; `fixtures/README.md` is
the contract, the JSON Schema comes from here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import MISSING, Field, asdict, fields, is_dataclass
from functools import cache
from typing import (
    TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Protocol, Union, get_args, get_origin, get_type_hints,
)  # fmt: skip

from msgspec import UNSET, Meta, Struct, UnsetType, defstruct, structs

from reference.commands import Choice, Mode, Prompt, Reason, kind_name, prompt_of, prompt_text
from reference.geometry import LIMITS, SETTING, Geometry
from reference.system_kinds import BLOCKS, JUDGED_KINDS, KINDS, ROWS, Kind

FORMAT = "kvspec-trace"
VERSION = 2  # of a trace; version 1, without a kind, is read as well
MAX_BYTES = 16 << 20
MAX_STEPS = 100_000
MAX_LANES = 256
MAX_LENGTH = LIMITS["width"]

_END = r"(?![\s\S])"  # `$` would let a line end through
_PLAIN = r"^[^\u0000-\u001f\u007f-\u009f]*" + _END  # nothing that a terminal obeys
_PROSE = r"^[^\u0000-\u0009\u000b-\u001f\u007f-\u009f]*" + _END

Name = Annotated[str, Meta(min_length=1, max_length=32, pattern=r"^[A-Za-z0-9_.-]+" + _END)]
# Negative lengths are part of the vocabulary: the rules refuse them, and a trace must be able to say so.
Length = Annotated[int, Meta(ge=-MAX_LENGTH, le=MAX_LENGTH)]
Cursor = Annotated[int, Meta(ge=0, le=MAX_LENGTH)]
SettingName = Annotated[str, Meta(pattern=f"^{SETTING[0]}{_END}")]
SettingValue = Annotated[str, Meta(pattern=f"^{SETTING[1]}{_END}")]
# "a8b4": 8 tokens of the shared text a, then the next 4 of b. Lengths below 1 are sayable here too.
PromptText = Annotated[str, Meta(max_length=64, pattern=r"^([a-zA-Z](0|-?[1-9][0-9]{0,3}))*" + _END)]
_BUG = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.+-]+" + _END)]
_CLAUSE = Annotated[str, Meta(max_length=16, pattern=r"^[A-Z]+(-[0-9]+)?" + _END)]


class _Struct(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The base of all parts of a file."""


class Form(NamedTuple):
    """The form of a vocabulary type in a file: the type there, and the conversions in both directions."""

    type: Any
    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


_AS_THEY_ARE: dict[Any, Any] = {
    str: Name,
    str | None: Name | None,
    int: Length,
    int | None: Cursor | None,
    bool: bool,
}


@cache  # one struct for each dataclass: the schema calls them by their names
def _form_of_hint(hint: Any) -> Form:
    """Return the form of a field, by its type hint."""
    if hint == Prompt:
        return Form(PromptText, prompt_text, prompt_of)
    if get_origin(hint) is tuple:
        item = _form_of_hint(get_args(hint)[0])
        kind = Annotated[list[item.type], Meta(max_length=MAX_LANES)]  # type: ignore[name-defined]
        return Form(
            kind, lambda values: [*map(item.write, values)], lambda values: (*map(item.read, values),)
        )
    if isinstance(hint, type) and is_dataclass(hint):
        return record(hint, f"{hint.__name__}Body", _Struct)
    return Form(_AS_THEY_ARE[hint], lambda value: value, lambda value: value)


def record(dataclass_type: Any, name: str, base: type[Struct], **options: Any) -> Form:
    """Return the form of a dataclass: a struct with the same fields and defaults."""
    hints = get_type_hints(dataclass_type)
    forms = {field.name: _form_of_hint(hints[field.name]) for field in fields(dataclass_type)}
    members = [
        (
            f.name,
            forms[f.name].type,
            *(() if f.default is MISSING else (forms[f.name].write(f.default),)),
        )
        for f in fields(dataclass_type)
    ]
    struct = defstruct(name, members, bases=(base,), module=__name__, frozen=True, **options)
    return Form(
        struct,
        lambda value: struct(
            **{name: form.write(getattr(value, name)) for name, form in forms.items()}
        ),
        lambda body: dataclass_type(**{name: form.read(getattr(body, name)) for name, form in forms.items()}),
    )


def in_words(kind: Any) -> str:
    """Return the fields of a command in a file as text, such as "`request`, `in_flight` (default 0)"."""
    hints = get_type_hints(kind)
    return ", ".join(_field_in_words(field, hints[field.name]) for field in fields(kind))


def _field_in_words(field: Field[Any], hint: Any) -> str:
    name = f"`{field.name}`"
    notes = ""
    if get_origin(hint) is tuple and hint != Prompt:
        item = get_args(hint)[0]
        notes = ": a list of numbers" if item is int else ": a list of names"
        if is_dataclass(item):
            notes = f": a list of {{{', '.join(_field_in_words(f, f.type) for f in fields(item))}}}"
    elif hint == str | None:
        notes = " or `null`"
    if field.default is not MISSING:
        default = _form_of_hint(hint).write(field.default) if hint == Prompt else field.default
        notes += f" (default `{json.dumps(default)}`)"
    return name + notes


CHOICES = _form_of_hint(tuple[Choice, ...])
if TYPE_CHECKING:
    Choices = list[Any]
else:
    Choices = CHOICES.type


class Expect(_Struct, frozen=True):
    """A stated outcome that is more than "done": done with choices, or refused for a reason."""

    done: Choices | UnsetType = UNSET
    refused: Reason | UnsetType = UNSET

    def __post_init__(self) -> None:
        if (self.done is UNSET) == (self.refused is UNSET):
            raise ValueError("expected one of `done` and `refused`")


class TraceStep(_Struct, frozen=True, tag_field="do", kw_only=True):
    """One command, and its outcome where one is stated."""

    expect: Literal["done"] | Expect | UnsetType = UNSET


STEPS = {
    command: record(command, f"{command.__name__}Step", TraceStep, tag=kind_name(command))
    for command in dict.fromkeys(command for kind in KINDS.values() for command in kind.commands)
}
COMMAND_OF = {form.type: command for command, form in STEPS.items()}


class GeometryBody(_Struct, frozen=True):
    """Sizes (reference.geometry.Geometry); how they must fit together is checked there."""

    page_size: Annotated[int, Meta(ge=1, le=LIMITS["page_size"])]
    window: Annotated[int, Meta(ge=1, le=LIMITS["window"])] | None
    full_pages: Annotated[int, Meta(ge=1, le=LIMITS["full_pages"])]
    swa_pages: Annotated[int, Meta(ge=0, le=LIMITS["swa_pages"])]
    rows: Annotated[int, Meta(ge=1, le=LIMITS["rows"])]
    width: Annotated[int, Meta(ge=1, le=LIMITS["width"])]
    tree: bool = False
    bigram: bool = False
    states: Annotated[int, Meta(ge=0, le=LIMITS["states"])] = 0
    tracks: bool = False
    lazy: bool = False
    settings: Annotated[dict[SettingName, SettingValue], Meta(max_length=16)] = {}


def _geometry_body(geometry: Geometry) -> GeometryBody:
    return GeometryBody(**asdict(geometry) | {"settings": dict(geometry.settings)})


def _geometry(body: GeometryBody) -> Geometry:
    return Geometry(**structs.asdict(body) | {"settings": tuple(sorted(body.settings.items()))})


class TraceBody(Protocol):
    """The file of a trace, whatever its kind."""

    spec: str
    kind: str
    origin: str
    steps: list[TraceStep]
    clause: str | None
    story: str


class TraceFormat(NamedTuple):
    """The format of a kind's traces.

    struct: type of a whole file.
    step: type of one of its steps.
    field: name of the field with its sizes.
    sizes: their form.
    """

    struct: type[Struct]
    step: Any
    field: str
    sizes: Form


def _trace_format(kind: Kind, prefix: str, says: str, field: str, sizes: Form) -> TraceFormat:
    """Return the format of a kind. Only traces of a kind with a reference model have a mode, and may
    name a bug."""
    modelled = kind.modelled
    step = Union[tuple(STEPS[command].type for command in kind.commands)]  # type: ignore[valid-type]
    members: list[Any] = [
        ("format", Literal["kvspec-trace"]),
        ("version", Literal[2]),
        ("spec", Annotated[str, Meta(min_length=1, max_length=32, pattern=_PLAIN)]),
        ("kind", Literal[kind.name]),
        (field, sizes.type),
        *([("mode", Mode)] if modelled else []),
        ("origin", Annotated[str, Meta(min_length=1, max_length=100, pattern=_PLAIN)]),
        ("steps", Annotated[list[step], Meta(max_length=MAX_STEPS)]),  # type: ignore[valid-type]
        *([("bug", _BUG | None, None)] if modelled else []),
        ("clause", _CLAUSE | None, None),
        ("story", Annotated[str, Meta(max_length=4000, pattern=_PROSE)], ""),
    ]
    struct = defstruct(
        f"{prefix}TraceFile", members, module=__name__, namespace={"__doc__": says}, frozen=True,
        forbid_unknown_fields=True,
    )  # fmt: skip
    return TraceFormat(struct, step, field, sizes)


def _config_format(kind: Kind, prefix: str) -> Form:
    return record(kind.config, f"{prefix}ConfigBody", _Struct)


def _judged_format(kind: Kind) -> TraceFormat:
    prefix = kind.config.__name__.removesuffix("Config")
    return _trace_format(kind, prefix, f"The same of {kind.noun}.", "config", _config_format(kind, prefix))


# The formats by kind. Those of the first two have words and names of their own in the schema.
FORMATS: dict[str, TraceFormat] = {
    ROWS.name: _trace_format(
        ROWS, "", "A whole file, fields in the order in which they are written.",
        "geometry", Form(GeometryBody, _geometry_body, _geometry)),
    BLOCKS.name: _trace_format(
        BLOCKS, "Engine",
        "The same of an engine that schedules by itself: what it is configured with, instead of sizes and\n"
        "    mode.", "config", _config_format(BLOCKS, "")),
    **{kind.name: _judged_format(kind) for kind in JUDGED_KINDS if kind is not BLOCKS},
}  # fmt: skip
