"""Traces as files: JSON, header first, version 2. `fixtures/README.md` is the contract.

A file is data from a stranger. It is measured before it is read, parsed straight into typed
structs, and every way it can be wrong comes out as one line that names the file and the field.
"""

from __future__ import annotations

import codecs
import errno
import json
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, UnsetType

from reference.commands import Done, Mode, Outcome, Refused
from reference.commands import prompt_of as prompt_of
from reference.commands import prompt_text as prompt_text
from reference.geometry import GeometryError
from reference.system_kinds import (
    BLOCKS, KINDS, ROWS, TIERS, AnyCommand, AnyConfig, Kind, kind_of_config,
)  # fmt: skip
from reference.model import SPEC_VERSION
from stateful_tests.lockstep.run_results import Trace
from stateful_tests.traces import format_hints
from stateful_tests.traces.schema import (
    CHOICES, COMMAND_OF, FORMAT, FORMATS, MAX_BYTES, STEPS, VERSION, Expect, TraceBody, TraceFormat,
    TraceStep,
)  # fmt: skip

FIXTURES = Path(__file__).parents[2] / "fixtures"
SCHEMA_PATH = FIXTURES / "trace.schema.json"


class TraceError(ValueError):
    """A trace that cannot be used: one line with the file, the JSON path and the reason."""

    def __init__(self, name: object, path: str, reason: str) -> None:
        self.name = _one_line(name, 200)
        self.path = _one_line(path, 200)
        self.reason = _one_line(reason, 300)
        super().__init__(": ".join(part for part in (self.name, self.path, self.reason) if part))


def _one_line(text: object, limit: int) -> str:
    line = "".join(c if c.isprintable() else "?" for c in str(text)[: limit + 1])
    return line if len(line) <= limit else line[: limit - 3] + "..."


class _Header(Struct):
    """The fields that identify a file; the rest is skipped unread."""

    format: Any = None
    version: Any = None
    kind: Any = None
    engine: Any = None  # of version 1


_HEADER = msgspec.json.Decoder(_Header)
_DECODERS = {name: msgspec.json.Decoder(each.struct) for name, each in FORMATS.items()}
# A trace of version 1 has an engine in the place of a kind, and none where it gives each batch.
_KINDS_BY_ENGINE = {None: ROWS, "vllm": BLOCKS, "sglang": TIERS}


def load(path: str | os.PathLike[str]) -> Trace:
    """Read a trace. Raises TraceError, whatever is wrong with the file."""
    return loads(read(path), os.fspath(path))


def shipped_path(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Return the path of a file: `@NAME` is the fixture of that name, in a clone and in an installation
    alike."""
    name = os.fspath(path).removeprefix("@")
    if name == os.fspath(path) or os.path.lexists(path):
        return path
    files = {
        p.name.partition(".json")[0]: p for p in FIXTURES.rglob("*.json*") if p.parent != FIXTURES
    }
    if name not in files:
        close = " or @".join(_nearest_names(name, files))
        hint = f"did you mean @{close}?" if close else "`kvspec bugs WORD` names those of a bug"
        raise FileNotFoundError(
            errno.ENOENT, f"no fixture has that name; {hint} (they lie in {FIXTURES})"
        )
    return files[name]


def _nearest_names(name: str, names: Iterable[str]) -> list[str]:
    """Return up to three names with a similar spelling or, where there is none, with the most words in
    common."""
    if close := get_close_matches(name, names, 2):
        return close
    words = {*re.split(r"[^a-z]+", name)} - {"a", "an", "the", "of", "is", ""}
    shared = {known_name: len(words & {*known_name.split("_")}) for known_name in names}
    best = max(shared.values(), default=0)
    return sorted((each for each, count in shared.items() if count == best > 0), key=len)[:3]


def read(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a file, or the beginning of one that is too large. Raises TraceError."""
    try:
        path = shipped_path(path)
        # Checked before opening: a pipe would block, a device would never end.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise TraceError(path, "", "not a regular file")
        with open(path, "rb") as file:
            return file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # a path may hold what no path holds
        if isinstance(error, TraceError):
            raise
        raise TraceError(path, "", getattr(error, "strerror", None) or str(error)) from None


def loads(data: bytes, name: str) -> Trace:
    """Parse a trace; `name` is what errors call it. Raises TraceError."""
    if len(data) > MAX_BYTES:
        raise TraceError(name, "", f"larger than {MAX_BYTES >> 20} MiB")
    if data.startswith(codecs.BOM_UTF8):
        raise TraceError(name, "", "starts with a byte order mark; save it as plain UTF-8")
    if data.startswith(b"\x1f\x8b"):
        raise TraceError(name, "", "is packed with gzip; a trace is JSON")
    if not data.strip():
        raise TraceError(name, "", "is empty")
    with _one_line_errors(data, name, FORMATS[ROWS.name].struct):
        header = _HEADER.decode(data)
        _check_header(header, name)
        kind = _kind_of_file(header, name)
    with _one_line_errors(data, name, FORMATS[kind.name].struct):
        written = data if header.version == VERSION else _upgrade(data, kind)
        file: Any = _DECODERS[kind.name].decode(written)
        _reject_repeated_keys(data, name)
    return _parse_trace(file, FORMATS[kind.name], name)


def is_old(data: bytes) -> bool:
    """Return whether a valid trace file is of an older version than the one that is written."""
    return bool(_HEADER.decode(data).version != VERSION)


def _kind_of_file(header: _Header, name: str) -> Kind:
    if header.version == VERSION:
        if not isinstance(header.kind, str) or header.kind not in KINDS:
            raise TraceError(name, "$.kind", f"must be one of {', '.join(KINDS)}")
        return KINDS[header.kind]
    if not isinstance(header.engine, str | None) or header.engine not in _KINDS_BY_ENGINE:
        raise TraceError(name, "$.engine", "must be vllm or sglang in a trace of version 1")
    return _KINDS_BY_ENGINE[header.engine]


def _upgrade(data: bytes, kind: Kind) -> bytes:
    """Return a trace of version 1 in version 2, which states its kind instead of its engine."""
    file = json.loads(data)
    file.pop("engine", None)
    return json.dumps(file | {"version": VERSION, "kind": kind.name}).encode()


@contextmanager
def _one_line_errors(data: bytes, name: str, kind: Any) -> Iterator[None]:
    """Raise any fault of this JSON as a TraceError.

    kind: the expected kind of file.
    """
    try:
        data.decode("utf-8")
        yield
    except UnicodeDecodeError as error:
        raise TraceError(name, "", f"is not UTF-8 (byte {error.start})") from None
    except RecursionError:
        raise TraceError(name, "", "is nested too deeply") from None
    except msgspec.ValidationError as error:
        raise TraceError(name, *_explain_message(str(error), kind, data)) from None
    except (msgspec.DecodeError, ValueError) as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(name, "", f"is not JSON: {_error_position(str(error), data)}") from None


def loads_as(kind: Any, data: bytes, name: str) -> Any:
    """Parse one JSON object as a struct of `kind`. Raises TraceError."""
    with _one_line_errors(data, name, kind):
        _reject_repeated_keys(data, name)
        return msgspec.json.decode(data, type=kind)


def _check_header(header: _Header, name: str) -> None:
    if header.format != FORMAT:
        raise TraceError(name, "$.format", f'must be "{FORMAT}": this is no trace of kvspec')
    if type(header.version) is not int:
        raise TraceError(name, "$.version", "must be a whole number")
    if header.version not in (1, VERSION):
        known = "newer than" if header.version > VERSION else "not what"
        raise TraceError(
            name, "$.version", f"{header.version} is {known} this kvspec reads (1, {VERSION})"
        )


def _reject_repeated_keys(data: bytes, name: str) -> None:
    """Raise TraceError for a file with equal keys: JSON parsers disagree on which of them counts."""

    def pairs(items: list[tuple[str, Any]]) -> None:
        if len({key for key, _ in items}) != len(items):
            keys = [key for key, _ in items]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise TraceError(name, "", f"the key {twice!r} is given twice in one object")

    json.loads(data, object_pairs_hook=pairs)


def _explain_message(message: str, kind: Any, data: bytes) -> tuple[str, str]:
    """Split a message of msgspec into the path of the field and a reason in plain words that says what would
    do."""
    message = message.replace(" - at `key` in `$", " - at `$")
    split = message.rfind(" - at `$")
    if split >= 0:
        reason = message[:split]
        path = message[split + 7 : -1]
    else:
        reason = message
        path = "$"
    if field := re.fullmatch(r"Object contains unknown field `(.*)`", reason, re.DOTALL):
        return f"{path}.{field[1]}", format_hints.unknown_field(kind, data, path, field[1])
    if field := re.fullmatch(r"Object missing required field `(.*)`", reason, re.DOTALL):
        return f"{path}.{field[1]}", format_hints.missing_field(kind, data, path, field[1])
    if value := re.fullmatch(r"Invalid (?:enum )?value '(.*)'", reason, re.DOTALL):
        return path, format_hints.wrong_value(kind, data, path, value[1])
    if "matching regex" in reason and path.endswith(".prompt"):
        return path, "must be texts (a to z), images (A to Z) and their lengths, such as a8b4"
    if "matching regex" in reason:
        is_name = path.endswith((".session", ".request", ".holder"))
        name = "; a name has A-Z a-z 0-9 _ . - alone" if is_name else ""
        return path, f"contains a character that is not allowed here{name}"
    return path, reason[:1].lower() + reason[1:].replace("`", "")


def _error_position(message: str, data: bytes) -> str:
    match = re.search(r" ?\(byte (\d+)\)", message)
    if match is None:
        return "it ends too early" if "truncated" in message else message
    offset = min(int(match[1]), len(data))
    line = data.count(b"\n", 0, offset) + 1
    column = offset - (data.rfind(b"\n", 0, offset) + 1) + 1
    return message.removeprefix("JSON is malformed: ").replace(
        match[0], f" at line {line} column {column}"
    )


def step_of(step: TraceStep) -> tuple[AnyCommand, Outcome | None]:
    """Return the command of a step, and its outcome where one is stated."""
    command: AnyCommand = STEPS[COMMAND_OF[type(step)]].read(step)
    return command, None if isinstance(step.expect, UnsetType) else _parse_outcome(step.expect)


def check_command(command: AnyCommand, kind: Kind) -> None:
    """Raise TraceError for a command that the format cannot hold."""
    loads_as(FORMATS[kind.name].step, _json_line(_step_struct(command, None)).encode(), "command")


def _parse_sizes(body: Any, form: TraceFormat, name: str) -> AnyConfig:
    """Return the sizes in a header. Raises TraceError where they do not fit together."""
    try:
        sizes: AnyConfig = form.sizes.read(body)
        return sizes
    except GeometryError as error:
        raise TraceError(name, f"$.{form.field}.{error.field}", error.reason) from None


def _parse_trace(file: TraceBody, form: TraceFormat, name: str) -> Trace:
    steps = [step_of(step) for step in file.steps]
    return Trace(
        geometry=_parse_sizes(getattr(file, form.field), form, name),
        mode=getattr(file, "mode", Mode.FAITHFUL),
        commands=tuple(command for command, _ in steps),
        origin=file.origin,
        bug=getattr(file, "bug", None),
        clause=file.clause,
        story=file.story,
        expected=tuple(
            (index, outcome) for index, (_, outcome) in enumerate(steps) if outcome is not None
        ),
    )


def _parse_outcome(expect: str | Expect) -> Outcome:
    if isinstance(expect, str):
        return Done()
    if not isinstance(expect.refused, UnsetType):
        return Refused(expect.refused)
    assert not isinstance(expect.done, UnsetType)
    return Done(CHOICES.read(expect.done))


def _step_struct(command: AnyCommand, outcome: Outcome | None) -> TraceStep:
    step: TraceStep = STEPS[type(command)].write(command)
    return step if outcome is None else msgspec.structs.replace(step, expect=_expect_struct(outcome))


def _expect_struct(outcome: Outcome) -> str | Expect:
    if isinstance(outcome, Refused):
        return Expect(refused=outcome.reason)
    if isinstance(outcome, Done):
        return Expect(done=CHOICES.write(outcome.choices)) if outcome.choices else "done"
    raise TraceError("trace", "$.steps", "a stated outcome is done or refused, never broken")


def dump(trace: Trace) -> str:
    """Return the text of a trace's file: header, then one step per line. Equal traces give equal text.

    Raises TraceError for a trace that the format cannot hold, such as a name of 40 characters.
    """
    stated = dict(trace.expected)
    kind = kind_of_config(trace.geometry)
    form = FORMATS[kind.name]
    values = {
        "format": FORMAT, "version": VERSION, "spec": SPEC_VERSION, "kind": kind.name,
        form.field: form.sizes.write(trace.geometry), "mode": trace.mode, "origin": trace.origin,
        "bug": trace.bug, "clause": trace.clause, "story": trace.story,
    }  # fmt: skip
    header = {name: values[name] for name in form.struct.__struct_fields__ if name != "steps"}
    try:
        lines = [f'  "{key}": {_json_line(value)},' for key, value in header.items()]
        steps = [f"    {_json_line(_step_struct(c, stated.get(i)))}" for i, c in enumerate(trace.commands)]
    except (UnicodeEncodeError, OverflowError) as error:
        raise TraceError("trace", "$", f"cannot be written: {error}") from None
    body = ["[", ",\n".join(steps), "  ]"] if steps else ["[]"]
    text = "\n".join(["{", *lines, '  "steps": ' + body[0], *body[1:], "}", ""])
    loads(text.encode(), "trace")  # what is written can be read
    return text


def _json_line(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=0).decode()


def save(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a trace, whole or not at all; makes the folder. Raises TraceError, OSError."""
    write_atomically(path, dump(trace))


def write_atomically(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file so that a reader sees the old content or the new, never a part; makes the folder.

    What is no regular file (a pipe, a device) is written to as it is. An OSError names the file.
    """
    target = Path(path).resolve()
    data = content.encode() if isinstance(content, str) else content
    scratch = ""
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(data)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:100]}.")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(scratch, 0o644)
        os.replace(scratch, target)
    except BaseException as error:
        if scratch:
            Path(scratch).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise type(error)(error.errno, error.strerror, os.fspath(path)) from None
        raise


def schema() -> dict[str, Any]:
    """Return the JSON Schema of a trace file, generated from the structs above."""
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "kvspec trace, version 2",
    }
    files = [form.struct for form in FORMATS.values()]
    kinds, definitions = msgspec.json.schema_components(files, ref_template="#/$defs/{name}")
    document: dict[str, Any] = {"anyOf": list(kinds), "$defs": definitions}
    document["$defs"]["Expect"] |= {"minProperties": 1, "maxProperties": 1}  # what __post_init__ checks
    for name in ("Mode", "Reason"):  # explained where they are defined, in words that may change
        document["$defs"][name].pop("description", None)
    return head | document


def schema_text() -> str:
    """Return the content of `fixtures/trace.schema.json`."""
    return json.dumps(schema(), indent=2) + "\n"
