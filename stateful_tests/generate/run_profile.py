"""What a run is like: which commands, how many names, how long prompts; and sizes that no preset has."""

from __future__ import annotations

from dataclasses import dataclass, replace

from impl.adapter import Capabilities
from reference.commands import COMMANDS, TREE_COMMANDS, CheckBusy, CheckIdle
from reference.geometry import Geometry
from stateful_tests.generate.choice_source import ChoiceSource, once_in, pick

SESSIONS = ("s1", "s2", "s3")

REQUESTS = ("r1", "r2", "r3", "r4")

LOCK_HOLDERS = ("h1", "h2", "h3")

TEXTS = "abc"

# What is driven, by name: sessions and requests without a radix tree, the tree by itself, both together.
MACHINES: dict[str, tuple[type, ...]] = {
    "sessions": tuple(c for c in COMMANDS if c not in TREE_COMMANDS),
    "tree": (*TREE_COMMANDS, CheckBusy, CheckIdle),
    "both": COMMANDS,
}


@dataclass(frozen=True, slots=True)
class RunProfile:
    """What a run is like: some commands are off, few or many names, short or long prompts.

    off: names of command classes that this run does not use. invalid: once in how many commands the
    generator stops caring whether a command applies. long: prompts of half a row instead of a page.
    sessions, requests: names in use; few make long conversations, many make crowds.
    loved: command classes that this run uses four times as much. ahead: slots are allocated far past
    the commit and, in free mode, sweeps are driven with all of them. gather: requests wait for each
    other, so that batches are large.
    """

    off: frozenset[str] = frozenset()
    invalid: int = 12
    long: bool = False
    sessions: tuple[str, ...] = SESSIONS
    requests: tuple[str, ...] = REQUESTS
    loved: frozenset[str] = frozenset()
    ahead: bool = False
    gather: bool = False
    machine: str = "sessions"
    lock_holders: tuple[str, ...] = LOCK_HOLDERS
    texts: str = TEXTS
    own: bool = False


# Without these nothing ever runs.
_ESSENTIAL = {"Open", "Submit", "Admit", "Extend", "Insert"}


def draw_geometry(source: ChoiceSource, like: Geometry) -> Geometry:
    """Sizes that no preset has, with a window and a radix tree if `like` has one."""
    page_size = pick(source, (1, 2, 3, 4, 5, 8, 16))
    window = None if like.window is None else 1 + source.upto(4 * page_size - 1)
    width = page_size * (3 + source.upto(4)) + source.upto(page_size)
    pages = -(-width // page_size)
    full = pages + source.upto(2 * pages)
    swa = 0 if window is None else 2 + source.upto(full - 2)
    return Geometry(page_size, window, full, swa, 1 + source.upto(4), width, like.tree)


def draw_profile(source: ChoiceSource, capabilities: Capabilities, machine: str = "sessions") -> RunProfile:
    """RunProfile for one run of a machine, within what the system can do."""
    kinds = {c.__name__ for c in MACHINES[machine]}
    off = {name for name in sorted((capabilities.commands & kinds) - _ESSENTIAL) if once_in(source, 6)}
    if not capabilities.mixed_decode or once_in(source, 3):
        off.add(pick(source, ("Decode", "SpecDecode")))
    if {"Decode", "SpecDecode"} <= off:
        off.discard("Decode")
    ahead = once_in(source, 2)
    if ahead:
        off -= {"SpecDecode", "EvictSwa", "Finish"}
        if not capabilities.mixed_decode:
            off.add("Decode")
    off |= {c.__name__ for c in COMMANDS} - (capabilities.commands & kinds)
    profile = RunProfile(
        frozenset(off),
        pick(source, (6, 12, 30)),
        once_in(source, 3) and not ahead,
        SESSIONS[: 1 + source.upto(len(SESSIONS) - 1)],
        REQUESTS[: 1 + source.upto(len(REQUESTS) - 1)],
        frozenset(pick(source, MACHINES[machine]).__name__ for _ in range(source.upto(3))),
        ahead,
        once_in(source, 4),
        machine,
    )
    if machine == "sessions":
        return profile
    crowd = 1 + source.upto(len(LOCK_HOLDERS) - 1)
    if machine == "both":  # whoever stays takes room from the others
        crowd = min(crowd, source.upto(2))
        profile = replace(profile, sessions=profile.sessions[:2])
    texts = TEXTS[: 1 + source.upto(len(TEXTS) - 1)]
    return replace(profile, lock_holders=LOCK_HOLDERS[:crowd], texts=texts, own=once_in(source, 4))
