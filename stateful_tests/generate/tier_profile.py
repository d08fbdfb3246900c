"""The profile of a run of a tree with a host tier, or of a server with one role."""

from __future__ import annotations

from dataclasses import dataclass

from impl.choices import Choices, pick

NAMES = tuple(f"h{number}" for number in range(1, 9))


@dataclass(frozen=True, slots=True)
class TierProfile:
    """The profile of one run (swarm testing). Weights are of the kinds of commands, 0 stands for never."""

    #: holders at a time
    names: tuple[str, ...]
    #: texts with which prompts begin
    texts: str
    #: longest prompt (pages)
    longest: int
    match: int
    insert: int
    unlock: int
    evict: int
    send: int
    poll: int
    copy: int
    complete: int
    reset: int
    #: one in so many matches loads nothing back
    loads: int
    #: one in so many inserts goes on
    chunks: int
    #: one in so many prompts is for a node of the tree: to load it, or to split it
    aims: int
    #: weights of commands of a storage
    prefetch: int
    threads: int
    abort: int
    #: one in so many calls of the storage's backend does only a part
    short: int
    #: weight of the commands that bring pages back from the storage
    cycle: int
    #: requests at a time of a server with one role
    requests: tuple[str, ...]


def draw_tier_profile(source: Choices) -> TierProfile:
    """Draw a profile for one run."""
    return TierProfile(
        names=NAMES[: 1 + source.upto(5)], texts="abc"[: 1 + source.upto(2)], longest=4 + source.upto(12),
        match=6 + source.upto(12), insert=6 + source.upto(12), unlock=pick(source, (0, 3, 6)),
        evict=pick(source, (3, 9, 18)), send=pick(source, (0, 3, 9)), poll=pick(source, (1, 3, 15)),
        copy=pick(source, (0, 3, 9)), complete=pick(source, (2, 9, 24)), reset=pick(source, (0, 0, 0, 3)),
        loads=pick(source, (2, 8, 20)), chunks=pick(source, (1, 2, 4)), aims=pick(source, (1, 2, 2, 6)),
        prefetch=pick(source, (6, 12, 24)), threads=pick(source, (4, 12, 24)),
        abort=pick(source, (0, 1, 4)), short=pick(source, (4, 12, 100)),
        requests=NAMES[: 2 + source.upto(5)], cycle=pick(source, (0, 80, 160)),
    )  # fmt: skip
