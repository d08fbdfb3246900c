"""The structs of the trace format, version 2: what may stand in a file, and within which bounds.

The structs of commands are made from the dataclasses in `reference.commands`: a new command needs no line
here. `files` reads and writes them; `fixtures/README.md` is the contract, the JSON Schema comes from here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import (
    TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints,
)  # fmt: skip

from msgspec import UNSET, Meta, Struct, UnsetType, defstruct

from reference.blocks.commands import ENGINE_COMMANDS
from reference.blocks.config import EngineConfig
from reference.commands import (
    COMMANDS, Choice, Mode, Prompt, Reason, kind_name, prompt_of, prompt_text,
)  # fmt: skip
from reference.geometry import LIMITS, SETTING
from reference.pairs.commands import PAIR_COMMANDS
from reference.pairs.config import PairConfig
from reference.tiers.commands import TIER_COMMANDS
from reference.tiers.config import TierConfig

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
PromptText = Annotated[str, Meta(max_length=64, pattern=r"^([a-z](0|-?[1-9][0-9]{0,3}))*" + _END)]


class _Struct(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What all parts of a file share."""


class Form(NamedTuple):
    """How a type of the vocabulary stands in a file: the type there, and the ways there and back."""

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
def _form(hint: Any) -> Form:
    """The form of a field, by its type hint."""
    if hint == Prompt:
        return Form(PromptText, prompt_text, prompt_of)
    if get_origin(hint) is tuple:
        of = _form(get_args(hint)[0])
        kind = Annotated[list[of.type], Meta(max_length=MAX_LANES)]  # type: ignore[name-defined]
        return Form(
            kind, lambda values: [*map(of.write, values)], lambda values: (*map(of.read, values),)
        )
    if isinstance(hint, type) and is_dataclass(hint):
        return record(hint, f"{hint.__name__}Body", _Struct)
    return Form(_AS_THEY_ARE[hint], lambda value: value, lambda value: value)


def record(of: Any, name: str, base: type[Struct], **options: Any) -> Form:
    """The form of a dataclass: a struct with the same fields and defaults."""
    hints = get_type_hints(of)
    forms = {field.name: _form(hints[field.name]) for field in fields(of)}
    members = [
        (
            f.name,
            forms[f.name].type,
            *(() if f.default is MISSING else (forms[f.name].write(f.default),)),
        )
        for f in fields(of)
    ]
    struct = defstruct(name, members, bases=(base,), module=__name__, frozen=True, **options)
    return Form(
        struct,
        lambda value: struct(
            **{name: form.write(getattr(value, name)) for name, form in forms.items()}
        ),
        lambda body: of(**{name: form.read(getattr(body, name)) for name, form in forms.items()}),
    )


def in_words(kind: Any) -> str:
    """The fields of a command in a file, such as "`request`, `in_flight` (default 0)"."""
    hints = get_type_hints(kind)
    return ", ".join(_field_in_words(field, hints[field.name]) for field in fields(kind))


def _field_in_words(field: Field[Any], hint: Any) -> str:
    name, notes = f"`{field.name}`", ""
    if get_origin(hint) is tuple and hint != Prompt:
        of = get_args(hint)[0]
        notes = ": a list of numbers" if of is int else ": a list of names"
        if is_dataclass(of):
            notes = f": a list of {{{', '.join(_field_in_words(f, f.type) for f in fields(of))}}}"
    elif hint == str | None:
        notes = " or `null`"
    if field.default is not MISSING:
        default = _form(hint).write(field.default) if hint == Prompt else field.default
        notes += f" (default `{json.dumps(default)}`)"
    return name + notes


CHOICES = _form(tuple[Choice, ...])
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
    kind: record(kind, f"{kind.__name__}Step", TraceStep, tag=kind_name(kind))
    for kind in dict.fromkeys((*COMMANDS, *ENGINE_COMMANDS, *TIER_COMMANDS, *PAIR_COMMANDS))
}
COMMAND_OF = {form.type: kind for kind, form in STEPS.items()}
CONFIG = record(EngineConfig, "ConfigBody", _Struct)
TIER_CONFIG = record(TierConfig, "TierConfigBody", _Struct)
PAIR_CONFIG = record(PairConfig, "PairConfigBody", _Struct)
if TYPE_CHECKING:
    AnyStep = TraceStep
    EngineStep = TraceStep
    TierStep = TraceStep
    PairStep = TraceStep
    ConfigBody = Any
    TierConfigBody = Any
    PairConfigBody = Any
else:
    AnyStep = Union[tuple(STEPS[kind].type for kind in COMMANDS)]
    EngineStep = Union[tuple(STEPS[kind].type for kind in ENGINE_COMMANDS)]
    TierStep = Union[tuple(STEPS[kind].type for kind in TIER_COMMANDS)]
    PairStep = Union[tuple(STEPS[kind].type for kind in PAIR_COMMANDS)]
    ConfigBody = CONFIG.type
    TierConfigBody = TIER_CONFIG.type
    PairConfigBody = PAIR_CONFIG.type


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
    settings: Annotated[dict[SettingName, SettingValue], Meta(max_length=16)] = {}


class TraceFile(Struct, frozen=True, forbid_unknown_fields=True):
    """A whole file, fields in the order in which they are written."""

    format: Literal["kvspec-trace"]
    version: Literal[2]
    spec: Annotated[str, Meta(min_length=1, max_length=32, pattern=_PLAIN)]
    kind: Literal["rows"]
    geometry: GeometryBody
    mode: Mode
    origin: Annotated[str, Meta(min_length=1, max_length=100, pattern=_PLAIN)]
    steps: Annotated[list[AnyStep], Meta(max_length=MAX_STEPS)]
    bug: (
        Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.+-]+" + _END)]
        | None
    ) = None
    clause: Annotated[str, Meta(max_length=16, pattern=r"^[A-Z]+(-[0-9]+)?" + _END)] | None = None
    story: Annotated[str, Meta(max_length=4000, pattern=_PROSE)] = ""


class EngineTraceFile(Struct, frozen=True, forbid_unknown_fields=True):
    """The same of an engine that schedules by itself: what it is configured with, instead of sizes and
    mode."""

    format: Literal["kvspec-trace"]
    version: Literal[2]
    spec: Annotated[str, Meta(min_length=1, max_length=32, pattern=_PLAIN)]
    kind: Literal["blocks"]
    config: ConfigBody
    origin: Annotated[str, Meta(min_length=1, max_length=100, pattern=_PLAIN)]
    steps: Annotated[list[EngineStep], Meta(max_length=MAX_STEPS)]
    clause: Annotated[str, Meta(max_length=16, pattern=r"^[A-Z]+(-[0-9]+)?" + _END)] | None = None
    story: Annotated[str, Meta(max_length=4000, pattern=_PROSE)] = ""


class TierTraceFile(Struct, frozen=True, forbid_unknown_fields=True):
    """The same of a tree with a host tier."""

    format: Literal["kvspec-trace"]
    version: Literal[2]
    spec: Annotated[str, Meta(min_length=1, max_length=32, pattern=_PLAIN)]
    kind: Literal["tiers"]
    config: TierConfigBody
    origin: Annotated[str, Meta(min_length=1, max_length=100, pattern=_PLAIN)]
    steps: Annotated[list[TierStep], Meta(max_length=MAX_STEPS)]
    clause: Annotated[str, Meta(max_length=16, pattern=r"^[A-Z]+(-[0-9]+)?" + _END)] | None = None
    story: Annotated[str, Meta(max_length=4000, pattern=_PROSE)] = ""


class PairTraceFile(Struct, frozen=True, forbid_unknown_fields=True):
    """The same of two servers and a network."""

    format: Literal["kvspec-trace"]
    version: Literal[2]
    spec: Annotated[str, Meta(min_length=1, max_length=32, pattern=_PLAIN)]
    kind: Literal["pairs"]
    config: PairConfigBody
    origin: Annotated[str, Meta(min_length=1, max_length=100, pattern=_PLAIN)]
    steps: Annotated[list[PairStep], Meta(max_length=MAX_STEPS)]
    clause: Annotated[str, Meta(max_length=16, pattern=r"^[A-Z]+(-[0-9]+)?" + _END)] | None = None
    story: Annotated[str, Meta(max_length=4000, pattern=_PROSE)] = ""
