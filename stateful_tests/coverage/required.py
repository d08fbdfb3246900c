"""Which situations a check must reach: those that the explorer has reached in small scopes.

`situations.json` beside this module has them, each with the scopes that reach it (made by `kvspec
explore --situations`); by hand exemptions with their reasons, and situations that no scope reaches.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from impl.adapter import Capabilities
from reference.commands import COMMANDS, Mode, kind_name
from reference.geometry import preset
from stateful_tests.coverage.rule_cases import IN_FLIGHT
from stateful_tests.coverage.scopes import SCOPES, Scope
from stateful_tests.generate.run_profile import MACHINES, RunProfile
from stateful_tests.lockstep.results import MachineResult

FILE = Path(__file__).with_name("situations.json")


class SituationsError(Exception):
    """A file of situations that cannot be used: one line says where and why."""


class Known(msgspec.Struct, forbid_unknown_fields=True):
    """What the file has. exempt: situation -> why no check need reach it; situations: -> scopes with it.
    beyond: what a check must reach though no scope is large enough for it -> scopes of the same kind."""

    exempt: dict[str, str]
    situations: dict[str, list[str]]
    beyond: dict[str, list[str]] = {}

    @property
    def required(self) -> dict[str, list[str]]:
        """All that a check must reach but for the exempt."""
        return self.situations | self.beyond

    def taken(self, scope: str, reached: Iterable[str]) -> Known:
        """The same with what a scope reaches now, without scopes that are no more."""
        scopes = {text: {*names} - {scope} for text, names in self.situations.items()}
        for text in reached:
            scopes.setdefault(text, set()).add(scope)
        known = {text: [name for name in SCOPES if name in scopes[text]] for text in sorted(scopes)}
        return Known(self.exempt, {text: names for text, names in known.items() if names}, self.beyond)


def load(path: Path = FILE) -> Known:
    """The situations in a file. Raises SituationsError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Known)
    except OSError as error:
        raise SituationsError(f"{path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SituationsError(f"{path}: {error}") from error


def dump(known: Known) -> str:
    """A file's text: a line for each situation."""
    parts = []
    sections = ("exempt", known.exempt), ("beyond", known.beyond), ("situations", known.situations)
    for name, entries in sections:
        lines = ",\n".join(f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in entries.items())
        parts.append(f'  "{name}": {{\n{lines}\n  }}' if lines else f'  "{name}": {{}}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


@dataclass(slots=True)
class Coverage:
    """Situations of a check. reached, missing: of those that it had to reach; exempt: with reasons;
    left_out: why -> those that the system, or the machines that were run, cannot have."""

    reached: list[str] = field(default_factory=list)
    missing: list[Wanted] = field(default_factory=list)
    exempt: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, list[str]] = field(default_factory=dict)


class _World(NamedTuple):
    """What decides which situations a run can have."""

    tree: bool
    window: bool
    mode: Mode


# What a situation speaks of that only another command brings about: a session has turns and a slot, and a
# commit that a turn resumes from.
_BY: dict[str, str] = {
    r"^abort.* slot|(?<!no )slot|\bturn|session[ _]clos|commit \w+ its key|from R|deferred": "Open",
    "waits after a retract": "Retract",
    "closing": "Close",
    "deferred": "Close",
    "slot wiped": "Abort",
    "turn without a slot": "Abort",
    IN_FLIGHT: "Launch",
    "full KV alone|that is read": "UnlockSwa",
}


_KINDS = {kind_name(kind): kind.__name__ for kind in COMMANDS}


class Wanted(NamedTuple):
    """A situation, and what a run must be like to meet it, as far as its scopes and words tell: in one of
    these worlds, with these commands, with tails."""

    text: str
    worlds: list[_World]
    commands: list[str]
    tails: bool

    @classmethod
    def of(cls, text: str, scopes: Iterable[str]) -> Wanted:
        spoken_of = [command for words, command in _BY.items() if re.search(words, text)]
        return cls(
            text, [_world(SCOPES[name]) for name in scopes if name in SCOPES],
            [_KINDS[text.partition(",")[0]], *spoken_of], "of the last window alone" in text,
        )  # fmt: skip

    def fits(self, machine: MachineResult, profile: RunProfile) -> bool:
        """Whether a run of this profile may meet it."""
        enough = profile.disabled.isdisjoint(self.commands) and self.tails <= profile.tails
        return enough and _driven(machine) in self.worlds


def coverage(
    met: Mapping[str, int],
    machines: Iterable[MachineResult],
    capabilities: Capabilities,
    known: Known,
) -> Coverage:
    """What the runs of some machines have reached of what they can have."""
    driven: dict[_World, set[str]] = {}
    for m in machines:
        driven.setdefault(_driven(m), set()).update(
            kind_name(kind) for kind in MACHINES[m.name] if kind.__name__ in capabilities.commands
        )
    found = Coverage()
    for text, scopes in known.required.items():
        wanted = Wanted.of(text, scopes)
        why = _impossible(wanted, driven, capabilities)
        if why:
            found.left_out.setdefault(why, []).append(text)
        elif text in known.exempt:
            found.exempt[text] = known.exempt[text]
        elif met.get(text):
            found.reached.append(text)
        else:
            found.missing.append(wanted)
    return found


def elsewhere(scope: Scope) -> list[str]:
    """Situations of scopes with a tree, a window and a mode like this one's."""
    like = {name for name, other in SCOPES.items() if _world(other) == _world(scope)}
    return [text for text, scopes in load().situations.items() if like.intersection(scopes)]


def _world(scope: Scope) -> _World:
    return _World(scope.geometry.tree, scope.geometry.window is not None, scope.mode)


def _driven(machine: MachineResult) -> _World:
    return _World(machine.name != "sessions", preset(machine.preset).window is not None, machine.mode)


def _impossible(wanted: Wanted, driven: Mapping[_World, set[str]], capabilities: Capabilities) -> str:
    """Why runs in the worlds that were driven cannot have a situation; empty if they can."""
    kind = wanted.text.partition(",")[0]
    if not any(kind in kinds for kinds in driven.values()):
        return f"no {kind} was driven"
    for command in wanted.commands:
        if command not in capabilities.commands:
            return f"{command} is not offered"
    if wanted.tails and not capabilities.swa_tail:
        return "no lane receives its tail"
    if any(kind in driven.get(world, ()) for world in wanted.worlds):
        return ""
    if not wanted.worlds:
        return "known in a scope that is no more"
    w = wanted.worlds[0]
    sizes = f"{'a' if w.tree else 'no'} radix tree and {'a' if w.window else 'no'} window"
    return f"known with {sizes} in {w.mode.value} mode"
