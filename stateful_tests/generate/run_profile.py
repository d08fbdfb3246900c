"""The profile of a run (its commands, names and lengths) and sizes that no preset has."""

from __future__ import annotations

from dataclasses import dataclass, replace

from impl.adapter import Capabilities
from reference.commands import COMMANDS, TREE_COMMANDS, CheckBusy, CheckIdle
from reference.geometry import Geometry
from impl.choices import Choices, once_in, pick

SESSIONS = ("s1", "s2", "s3")
REQUESTS = ("r1", "r2", "r3", "r4")
LOCK_HOLDERS = ("h1", "h2", "h3")
TEXTS = "abc"

_INVALID_RATES = (6, 12, 30)
# What is driven, by name: sessions and requests without a radix tree, the tree by itself, both together.
MACHINES: dict[str, tuple[type, ...]] = {
    "sessions": tuple(c for c in COMMANDS if c not in TREE_COMMANDS),
    "tree": (*TREE_COMMANDS, CheckBusy, CheckIdle),
    "both": COMMANDS,
}


@dataclass(frozen=True, slots=True)
class RunProfile:
    """The profile of one run (swarm testing)."""

    machine: str = "sessions"
    #: names of command classes that the run leaves out, or draws four times as often
    disabled: frozenset[str] = frozenset()
    boosted: frozenset[str] = frozenset()
    #: one command in so many ignores its precondition
    invalid_rate: int = 12
    #: prompts of half a row instead of a page
    long_prompts: bool = False
    #: prompts end with unique tokens
    own_tokens: bool = False
    #: names in use; few make long conversations, many make crowds
    sessions: tuple[str, ...] = SESSIONS
    requests: tuple[str, ...] = REQUESTS
    lock_holders: tuple[str, ...] = LOCK_HOLDERS
    texts: str = TEXTS
    #: slots are allocated far past the commit and, in free mode, window evictions are driven with
    #: all of them
    allocate_ahead: bool = False
    #: requests wait for each other, so that batches are large
    synchronise: bool = False
    #: prefill batches include requests that decode
    mixed: bool = False
    #: KV of prompts is received, with SWA KV only of the last window
    tails: bool = False
    #: running requests stay until others run as well
    crowd: bool = False
    #: a command that frees something is often followed by another of its kind
    again: bool = False
    #: a prompt is answered by the text that it ends with, so that equal prompts have equal answers,
    #: and a longer prompt meets an answer
    alike: bool = False

    @property
    def impatient(self) -> bool:
        """Whether clients send turns while one runs, abort and close in any phase (many commands are
        invalid)."""
        return self.invalid_rate == min(_INVALID_RATES)


# Without these nothing ever runs.
_ESSENTIAL = {"Open", "Submit", "Admit", "Extend", "Insert"}
LATE = {"Launch", "Settle"}


def draw_geometry(source: Choices, like: Geometry) -> Geometry:
    """Draw sizes that no preset has, with a window, a radix tree and recurrent state if `like` has
    them."""
    few: tuple[int, ...] = (1, 2, 3, 4) if like.tracks else (1,)
    if like.lazy:
        few = (1, 2, 3, 4, 6, 8)
    page_size = pick(source, few if like.states else (1, 2, 3, 4, 5, 8, 16))
    window = None if like.window is None else 1 + source.upto(4 * page_size - 1)
    width = page_size * (3 + source.upto(4)) + source.upto(page_size)
    pages = -(-width // page_size)
    full = pages + source.upto(2 * pages)
    swa = 0 if window is None else 2 + source.upto(full - 2)
    rows = 1 + source.upto(4)
    of_request = 1 + 2 * like.tracks + like.lazy
    states = rows * of_request + source.upto(4) if like.states else 0
    return Geometry(
        page_size=page_size,
        window=window,
        full_pages=full,
        swa_pages=swa,
        rows=rows,
        width=width,
        tree=like.tree,
        states=states,
        tracks=like.tracks,
        lazy=like.lazy,
    )


def with_settings(source: Choices, sizes: Geometry, capabilities: Capabilities) -> Geometry:
    """Draw each of the system's settings, its default or one of its values, and a tree of bigrams once
    in four times."""
    if sizes.tree and capabilities.bigram and not sizes.states:
        sizes = replace(sizes, bigram=once_in(source, 4))
    drawn = (
        (name, pick(source, ("", *values)))
        for name, values in sorted(capabilities.settings.items())
    )
    return replace(sizes, settings=tuple((name, value) for name, value in drawn if value))


def draw_profile(
    source: Choices, capabilities: Capabilities, machine: str = "sessions"
) -> RunProfile:
    """Draw a profile for one run of a machine, within what the system can do."""
    kinds = {c.__name__ for c in MACHINES[machine]}
    may_be_left_out = sorted((capabilities.commands & kinds) - _ESSENTIAL - LATE)
    disabled = {name for name in may_be_left_out if once_in(source, 6)}
    if not capabilities.mixed_decode or once_in(source, 3):
        disabled.add(pick(source, ("Decode", "SpecDecode")))
    if {"Decode", "SpecDecode"} <= disabled:
        disabled.discard("Decode")
    ahead = once_in(source, 2)
    if ahead:
        disabled -= {"SpecDecode", "EvictSwa", "Finish"}
        if not capabilities.mixed_decode:
            disabled.add("Decode")
    disabled |= {c.__name__ for c in COMMANDS} - (capabilities.commands & kinds)
    boostable = [kind for kind in MACHINES[machine] if kind.__name__ not in LATE]
    tails = capabilities.swa_tail and once_in(source, 4)
    profile = RunProfile(
        machine,
        invalid_rate=pick(source, _INVALID_RATES),
        long_prompts=(once_in(source, 3) and not ahead) or tails,
        sessions=SESSIONS[: 1 + source.upto(len(SESSIONS) - 1)],
        requests=REQUESTS[: 1 + source.upto(len(REQUESTS) - 1)],
        boosted=frozenset(pick(source, boostable).__name__ for _ in range(source.upto(3))),
        allocate_ahead=ahead,
    )
    how = source.upto(3)  # of four runs one is synchronised, and one has results in flight
    if how != 0 or (not capabilities.mixed_decode and "SpecDecode" in disabled):
        disabled |= LATE
    mixed = capabilities.mixed_batches and "Decode" not in disabled and once_in(source, 3)
    profile = replace(
        profile,
        disabled=frozenset(disabled),
        requests=REQUESTS[: max(len(profile.requests), 3 if mixed else 1)],
        synchronise=how == 3,
        mixed=mixed,
        tails=tails,
        crowd=once_in(source, 2),
        again=once_in(source, 3),
    )
    if machine == "sessions":
        return profile
    crowd = 1 + source.upto(len(LOCK_HOLDERS) - 1)
    if machine == "both":  # whoever stays takes room from the others
        crowd = min(crowd, source.upto(2))
        profile = replace(profile, sessions=profile.sessions[:2])
    texts = TEXTS[: 1 + source.upto(len(TEXTS) - 1)]
    return replace(
        profile,
        lock_holders=LOCK_HOLDERS[:crowd],
        texts=texts,
        own_tokens=once_in(source, 4),
        alike=capabilities.answers and once_in(source, 3),
    )
