"""A trace to start from, and the page beside it: what its steps do, a recipe, every command, every size."""

from __future__ import annotations

import inspect
import json
import textwrap
import tomllib
from dataclasses import MISSING, Field, fields
from functools import cache
from typing import Any

import msgspec

from ci import TEMPLATES
from impl.adapter import Capabilities
from impl.system_spec import SystemSpec
from reference.commands import kind_name
from reference.system_kinds import BLOCKS, KINDS, PAIRS, Kind
from reference.model import SPEC_VERSION
from stateful_tests.lockstep.run_results import Trace
from stateful_tests.traces.trace_files import loads
from stateful_tests.traces.notation import format_command
from stateful_tests.traces.schema import FORMAT, FORMATS, VERSION, in_words


class TraceSkeleton(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of new_trace.toml, which documents each field."""

    story: str
    sizes: str
    steps: list[tuple[str, str]]
    recipe: list[str]
    title: str = ""


# Whose recipes a variant has.
_BASE = {
    "overlap": "blocks",
    "overlap_offload": "offload",
    "overlap_images": "images",
    "pairs_first_token": "pairs",
}


@cache
def skeletons() -> dict[str, TraceSkeleton]:
    """Return the skeletons by kind, and by variants of it. Raises msgspec.ValidationError for a file
    that is wrong."""
    text = (TEMPLATES / "new_trace.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), dict[str, TraceSkeleton])


def skeleton_for(spec: SystemSpec, kind: Kind) -> str:
    """Return the name of the skeleton for a system: that of its kind, or of a variant."""
    if kind is PAIRS and spec.engine == "lmdeploy":
        return "pairs_first_token"
    if kind is not BLOCKS:
        return kind.name
    variants = []
    if spec.engine == "lmdeploy" or "async" in spec.ways:
        variants.append("overlap")
    variants += [way for way in ("offload", "images") if way in spec.ways]
    return "_".join(variants) or kind.name


def skeleton_trace(name: str, kind: Kind) -> Trace:
    """Return the trace of a skeleton."""
    skeleton = skeletons()[name]
    head: dict[str, object] = {
        "format": FORMAT,
        "version": VERSION,
        "spec": SPEC_VERSION,
        "kind": kind.name,
    }
    head[FORMATS[kind.name].field] = json.loads(skeleton.sizes)
    if kind.modelled:
        head["mode"] = "faithful"
    steps = [json.loads(step) for step, _ in skeleton.steps]
    text = json.dumps(head | {"origin": "hand-written", "story": skeleton.story, "steps": steps})
    return loads(text.encode(), f"new_trace.toml: {name}")


def recipe_of(name: str) -> list[str]:
    """Return the lines of a skeleton's recipe."""
    return skeletons()[_BASE.get(name, name)].recipe


def page_beside(name: str, trace: Trace, can: Capabilities, file: str, options: str) -> str:
    """Return the page that goes with a trace, as Markdown: JSON has no comments.

    can: the system's capabilities.
    """
    kind = can.system_kind
    skeleton = skeletons()[name]
    steps = [
        f"| {index} | `{format_command(command)}` | {about} |"
        for index, (command, (_, about)) in enumerate(zip(trace.commands, skeleton.steps))
    ]
    recipe = [f"{index}. {line}" for index, line in enumerate(recipe_of(name), 1)]
    commands = [
        f"| `{kind_name(command)}` | {in_words(command)} | {_command_text(command)} |"
        for command in kind.commands
        if command.__name__ in can.commands
    ]
    others = [f"`{kind_name(command)}`" for command in kind.commands if command.__name__ not in can.commands]
    refused = [f"Other systems of this kind also have {', '.join(others)}.", ""] if others else []
    sizes = _sizes_text(kind.config)
    names = ", ".join(f"`{_with_default(field)}`" for field in fields(kind.config))
    return "\n".join([
        f"# {file}: a trace by hand", "",
        skeleton.story, "",
        f"    kvspec replay {file} {options}", "",
        "It conforms as it is. Change it into the story of your bug.", "",
        "## Its steps", "", "| step | as a report prints it | what it does |", "|---|---|---|", *steps, "",
        "## Recipe", "", *recipe, "",
        "## Commands", "", "| `do` | fields | what it does |", "|---|---|---|", *commands, "",
        *refused,
        "## Sizes", "", f"Fields, with their defaults: {names}.", "", sizes, "",
    ])  # fmt: skip


def _with_default(field: Field[Any]) -> str:
    """Return the name of a field, with its default if it has one."""
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return field.name if default is MISSING else f"{field.name} {json.dumps(default, default=repr)}"


def _sizes_text(config: type) -> str:
    """Return the docstring of a configuration, and a line for each field that has a comment `#:` above it."""
    lines = [textwrap.dedent(" " * 4 + (config.__doc__ or "")).strip(), ""]
    comment: list[str] = []
    for line in map(str.strip, inspect.getsource(config).splitlines()):
        if line.startswith("#: "):
            comment.append(line.removeprefix("#: "))
            continue
        if comment:
            lines.append(f"{line.partition(':')[0]}: {' '.join(comment)}")
        comment = []
    return "\n".join(lines).strip()


def _command_text(command: type) -> str:
    return " ".join((command.__doc__ or "").split()).replace("|", "\\|")


def recipes() -> str:
    """Return the recipes by kind, as Markdown, for fixtures/README.md."""
    assert KINDS.keys() | _BASE.keys() <= skeletons().keys()
    parts = []
    for skeleton in skeletons().values():
        if skeleton.title:
            lines = (f"{index}. {line}" for index, line in enumerate(skeleton.recipe, 1))
            parts += [f"**{skeleton.title}**", "", *lines, ""]
    return "\n".join(parts)
