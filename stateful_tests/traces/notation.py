"""Commands in words: `describe` writes "extend r1 +4", `parse` reads it back; `say` tells an outcome."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from reference.commands import (
    Abort, Admit, Broken, CheckBusy, CheckIdle, Choice, Chunk, Close, Command, Decode, Done, Draft, Evict,
    EvictSwa, Extend, Finish, Insert, Match, Open, Outcome, Refused, Retract, SpecDecode, Submit, Unlock,
)  # fmt: skip
from stateful_tests.traces import files as traces


class WordingError(ValueError):
    """A line that is no command: one line that says what would be."""


def describe(command: Command) -> str:
    """A command in readable form, such as "extend r1 +4"."""
    match command:
        case Open(session) | Close(session):
            rest = session
        case Submit(request, session, tokens, rewind, prompt):
            whose = f"in {session}" if session is not None else "(no session)"
            said = [traces.prompt_text(prompt)] if prompt else []
            said += [f"{tokens:+}"] if tokens or not prompt else []
            rest = " ".join([request, whose, *said]) + (f" rewind {rewind}" if rewind else "")
        case Extend(lanes):
            rest = ", ".join(f"{lane.request} {lane.tokens:+}" for lane in lanes) or "(no lanes)"
        case Decode(requests):
            rest = ", ".join(requests) or "(no lanes)"
        case SpecDecode(drafts):
            rest = ", ".join(f"{d.request} {d.allocate:+} accept {d.accept}" for d in drafts) or "(no lanes)"
        case EvictSwa(request, length):
            rest = f"{request} at length {length}"
        case Finish(request, finished_len):
            rest = f"{request} keep {finished_len}"
        case Retract(request, in_flight):
            rest = request + (f" losing {in_flight}" if in_flight else "")
        case Abort(request, marked):
            rest = request + (" (marked)" if marked else "")
        case CheckBusy(level):
            rest = f"level {level}"
        case CheckIdle():
            rest = ""
        case Match(holder, prompt):
            rest = f"{holder} {traces.prompt_text(prompt) or '(empty)'}"
        case Unlock(holder):
            rest = holder
        case Insert(holder, prompt, evicted, chunked):
            rest = f"{holder} {traces.prompt_text(prompt) or '(empty)'}"
            rest += (f" SWA from {evicted}" if evicted else "") + (" (goes on)" if chunked else "")
        case Evict(full, swa):
            rest = f"full {full}" + (f" swa {swa}" if swa else "")
        case _:
            rest = command.request
    return f"{traces.tag(command)} {rest}".rstrip()


_NAME = r"[A-Za-z0-9_.-]+"
_PROMPT = r"(?:[a-z]-?[0-9]{1,5})+"
_LENGTH = r"[+-]?[0-9]{1,5}"


class _Form(NamedTuple):
    """How a command is typed: as told to people, as a pattern of what follows its name, and what it makes."""

    usage: str
    pattern: str
    make: Callable[[dict[str, str]], Command]


def _length(text: str | None, default: int = 0) -> int:
    return default if text is None else int(text)


def _lanes(text: str) -> list[list[str]]:
    """The words of each lane; none of "(no lanes)"."""
    return [] if text.startswith("(") else [lane.split() for lane in text.split(",")]


def _batch(lane: str) -> str:
    """A pattern: lanes that a comma stands between, or none."""
    return rf"(?P<lanes>{lane}(?:\s*,\s*{lane})*|\(no lanes\))"


_HOLDER = rf"(?P<holder>{_NAME})"
_OF_PROMPT = rf"(?P<prompt>{_PROMPT}|\(empty\))"
_REQUEST = rf"(?P<request>{_NAME})"
_SESSION = rf"(?P<session>{_NAME})"

_FORMS: dict[str, _Form] = {
    "open": _Form("SESSION", _SESSION, lambda m: Open(m["session"])),
    "submit": _Form(
        "REQUEST in SESSION +TOKENS, or (no session); a shared prompt such as a8b4 before +TOKENS; rewind N",
        rf"{_REQUEST} (?:in {_SESSION}|\(no session\))"
        rf"(?: (?P<prompt>{_PROMPT})(?P<tokens> {_LENGTH})?|(?P<alone> {_LENGTH}))"
        rf"(?: rewind (?P<rewind>{_LENGTH}))?",
        lambda m: Submit(
            m["request"], m["session"], _length(m["tokens"] or m["alone"]), _length(m["rewind"]),
            traces.prompt_of(m["prompt"] or ""),
        ),
    ),
    "admit": _Form("REQUEST", _REQUEST, lambda m: Admit(m["request"])),
    "extend": _Form(
        "REQUEST +TOKENS, ...", _batch(rf"{_NAME} {_LENGTH}"),
        lambda m: Extend(tuple(Chunk(name, int(tokens)) for name, tokens in _lanes(m["lanes"]))),
    ),
    "decode": _Form("REQUEST, ...", _batch(_NAME), lambda m: Decode(tuple(n for [n] in _lanes(m["lanes"])))),
    "spec_decode": _Form(
        "REQUEST +TOKENS accept N, ...", _batch(rf"{_NAME} {_LENGTH} accept {_LENGTH}"),
        lambda m: SpecDecode(tuple(Draft(n, int(a), int(c)) for n, a, _, c in _lanes(m["lanes"]))),
    ),
    "evict_swa": _Form(
        "REQUEST at length N", rf"{_REQUEST} at length (?P<length>{_LENGTH})",
        lambda m: EvictSwa(m["request"], int(m["length"])),
    ),
    "finish": _Form(
        "REQUEST keep N", rf"{_REQUEST} keep (?P<keep>{_LENGTH})",
        lambda m: Finish(m["request"], int(m["keep"])),
    ),
    "retract": _Form(
        "REQUEST [losing 1]", rf"{_REQUEST}(?: losing (?P<losing>{_LENGTH}))?",
        lambda m: Retract(m["request"], _length(m["losing"])),
    ),
    "abort": _Form(
        "REQUEST [(marked)]", rf"{_REQUEST}(?P<marked> \(marked\))?",
        lambda m: Abort(m["request"], m["marked"] is not None),
    ),
    "close": _Form("SESSION", _SESSION, lambda m: Close(m["session"])),
    "check_busy": _Form(
        "[level 0, 1 or 2]", rf"(?:level (?P<level>{_LENGTH}))?", lambda m: CheckBusy(_length(m["level"], 1))
    ),
    "check_idle": _Form("", "", lambda _: CheckIdle()),
    "match": _Form(
        "GUEST a8b4", rf"{_HOLDER} {_OF_PROMPT}",
        lambda m: Match(m["holder"], traces.prompt_of(m["prompt"])),
    ),
    "unlock": _Form("GUEST", _HOLDER, lambda m: Unlock(m["holder"])),
    "insert": _Form(
        "GUEST a12 [SWA from N] [(goes on)]",
        rf"{_HOLDER} {_OF_PROMPT}(?: SWA from (?P<evicted>{_LENGTH}))?(?P<chunked> \(goes on\))?",
        lambda m: Insert(
            m["holder"], traces.prompt_of(m["prompt"]), _length(m["evicted"]), m["chunked"] is not None
        ),
    ),
    "evict": _Form(
        "full N [swa N]", rf"full (?P<full>{_LENGTH})(?: swa (?P<swa>{_LENGTH}))?",
        lambda m: Evict(int(m["full"]), _length(m["swa"])),
    ),
}  # fmt: skip
USAGES = tuple(f"{name} {form.usage}".rstrip() for name, form in _FORMS.items())


def parse(line: str) -> Command:
    """The command that `line` describes; blanks count once. Raises WordingError."""
    words = " ".join(line.split())
    name, _, rest = words.partition(" ")
    form = _FORMS.get(name)
    if form is None:
        raise WordingError(f"{name!r:.40} is no command; commands: {', '.join(_FORMS)}")
    found = re.fullmatch(form.pattern, rest, re.ASCII)
    if found is None:
        raise WordingError(f"expected: {f'{name} {form.usage}'.rstrip()}; got {words!r:.80}")
    command = form.make(found.groupdict())
    try:
        traces.check_command(command)
    except traces.TraceError as error:
        raise WordingError(f"{words:.80}: {error.path.removeprefix('$.')}: {error.reason}") from None
    return command


def say(outcome: Outcome) -> str:
    """An outcome in readable form."""
    match outcome:
        case Done(choices, _, freed):
            gave = f"; freed full {freed.full} swa {freed.swa}" if freed is not None else ""
            return "done" + gave + "".join(f"; {_choice(choice)}" for choice in choices)
        case Refused(reason):
            return f"refused: {reason.value}"
        case Broken(error):
            return f"broken: {error}"


def _choice(choice: Choice) -> str:
    named = ("swa_evicted_seqlen", "kv_allocated_len")
    chosen = [f"{n} {getattr(choice, n)}" for n in named if getattr(choice, n) is not None]
    when = " after the forward pass" if choice.after else ""
    return f"{choice.request} chose {', '.join(chosen) or 'the default'}{when}"
