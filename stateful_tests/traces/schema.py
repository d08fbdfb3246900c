"""The structs of the trace format, version 1: what may stand in a file, and within which bounds.

`traces` reads and writes them; `fixtures/README.md` is the contract, the JSON Schema comes from here.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from reference.commands import Mode, Reason
from reference.geometry import LIMITS

FORMAT = "kvspec-trace"
LOG_FORMAT = "kvspec-log"
LOG_IGNORED = "log"  # the key of a log's line under which a server writes what it likes
VERSION = 1  # of both
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
# "a8b4": 8 tokens of the shared text a, then the next 4 of b. Lengths below 1 are sayable here too.
Prompt = Annotated[str, Meta(max_length=64, pattern=r"^([a-z](0|-?[1-9][0-9]{0,3}))*" + _END)]


class _Struct(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What all parts of a file share."""


class ChoiceBody(_Struct, frozen=True):
    """What a system chose for one request (reference.commands.Choice)."""

    request: Name
    swa_evicted_seqlen: Cursor | None = None
    kv_allocated_len: Cursor | None = None
    after: bool = False


class Expect(_Struct, frozen=True):
    """A stated outcome that is more than "done": done with choices, or refused for a reason."""

    done: Annotated[list[ChoiceBody], Meta(max_length=MAX_LANES)] | UnsetType = UNSET
    refused: Reason | UnsetType = UNSET

    def __post_init__(self) -> None:
        if (self.done is UNSET) == (self.refused is UNSET):
            raise ValueError("expected one of `done` and `refused`")


class Step(_Struct, frozen=True, tag_field="do", kw_only=True):
    """One command, and its outcome where one is stated."""

    expect: Literal["done"] | Expect | UnsetType = UNSET


class ChunkBody(_Struct, frozen=True):
    """One lane of extend."""

    request: Name
    tokens: Length


class DraftBody(_Struct, frozen=True):
    """One lane of spec_decode."""

    request: Name
    allocate: Length
    accept: Length


class OpenStep(Step, frozen=True, tag="open"):
    """Open a session."""

    session: Name


class SubmitStep(Step, frozen=True, tag="submit"):
    """A turn arrives, or an ordinary request (session null)."""

    request: Name
    session: Name | None
    tokens: Length
    rewind: Length = 0
    prompt: Prompt = ""


class AdmitStep(Step, frozen=True, tag="admit"):
    """A queued request is matched with its prefix."""

    request: Name


class ExtendStep(Step, frozen=True, tag="extend"):
    """Prefill a batch of chunks."""

    lanes: Annotated[list[ChunkBody], Meta(max_length=MAX_LANES)]


class DecodeStep(Step, frozen=True, tag="decode"):
    """One token for each request of a batch."""

    requests: Annotated[list[Name], Meta(max_length=MAX_LANES)]


class SpecDecodeStep(Step, frozen=True, tag="spec_decode"):
    """A verify round for a batch."""

    lanes: Annotated[list[DraftBody], Meta(max_length=MAX_LANES)]


class EvictSwaStep(Step, frozen=True, tag="evict_swa"):
    """The window sweep for one request."""

    request: Name
    length: Length


class FinishStep(Step, frozen=True, tag="finish"):
    """A turn ends."""

    request: Name
    finished_len: Length


class RetractStep(Step, frozen=True, tag="retract"):
    """A running request goes back to the queue."""

    request: Name
    in_flight: Length = 0


class AbortStep(Step, frozen=True, tag="abort"):
    """A request is given up."""

    request: Name
    marked: bool = False


class CloseStep(Step, frozen=True, tag="close"):
    """Close a session."""

    session: Name


class MatchStep(Step, frozen=True, tag="match"):
    """A lock holder locks what the radix tree has of a prompt."""

    holder: Name
    prompt: Prompt


class UnlockStep(Step, frozen=True, tag="unlock"):
    """A lock holder lets its lock go."""

    holder: Name


class InsertStep(Step, frozen=True, tag="insert"):
    """A lock holder hands the whole pages of a prompt to the radix tree."""

    holder: Name
    prompt: Prompt
    evicted: Length = 0
    chunked: bool = False


class EvictStep(Step, frozen=True, tag="evict"):
    """Memory pressure on the radix tree."""

    full: Length
    swa: Length = 0


class CheckBusyStep(Step, frozen=True, tag="check_busy"):
    """The memory check between two steps."""

    level: Length = 1


class CheckIdleStep(Step, frozen=True, tag="check_idle"):
    """The memory check of an idle server."""


AnyStep = (
    OpenStep | SubmitStep | AdmitStep | ExtendStep | DecodeStep | SpecDecodeStep
    | EvictSwaStep | FinishStep | RetractStep | AbortStep | CloseStep | CheckBusyStep
    | CheckIdleStep | MatchStep | UnlockStep | InsertStep | EvictStep
)  # fmt: skip


class GeometryBody(_Struct, frozen=True):
    """Sizes (reference.geometry.Geometry); how they must fit together is checked there."""

    page_size: Annotated[int, Meta(ge=1, le=LIMITS["page_size"])]
    window: Annotated[int, Meta(ge=1, le=LIMITS["window"])] | None
    full_pages: Annotated[int, Meta(ge=1, le=LIMITS["full_pages"])]
    swa_pages: Annotated[int, Meta(ge=0, le=LIMITS["swa_pages"])]
    rows: Annotated[int, Meta(ge=1, le=LIMITS["rows"])]
    width: Annotated[int, Meta(ge=1, le=LIMITS["width"])]
    tree: bool = False


class TraceFile(Struct, frozen=True, forbid_unknown_fields=True):
    """A whole file, fields in the order in which they are written."""

    format: Literal["kvspec-trace"]
    version: Literal[1]
    spec: Annotated[str, Meta(min_length=1, max_length=32, pattern=_PLAIN)]
    geometry: GeometryBody
    mode: Mode
    origin: Annotated[str, Meta(min_length=1, max_length=100, pattern=_PLAIN)]
    steps: Annotated[list[AnyStep], Meta(max_length=MAX_STEPS)]
    bug: Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.+-]+" + _END)] | None = None
    clause: Annotated[str, Meta(max_length=16, pattern=r"^[A-Z]+(-[0-9]+)?" + _END)] | None = None
    story: Annotated[str, Meta(max_length=4000, pattern=_PROSE)] = ""


class LogHeader(Struct, frozen=True, forbid_unknown_fields=True):
    """The first line of a server's log in JSON Lines; every other line is a step."""

    format: str
    version: int
    geometry: GeometryBody
    mode: Mode = Mode.FAITHFUL
