"""Records of a second tier that the clauses read: a step of either engine makes them from its own facts.

Host memory of vLLM's connector is made of chunks, each a list of slots; of SGLang's tree it is slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from reference.failures import Failure, Place


class HostUnit(NamedTuple):
    """A chunk or a slot of host memory. owners: keys or nodes that have it; free: times in the free list;
    moving: a transfer in flight uses it."""

    called: str
    at: Place
    owners: int
    free: int
    moving: bool
    owned: str


class KeptCopy(NamedTuple):
    """KV that was copied to either tier. holds: what it has to be, in words; wanted, found: stamps, slot by
    slot. slot: how the one at an index is called; at: its place; missing: what is wrong with one that holds
    none; another: with one that holds another."""

    holds: str
    wanted: Sequence[int]
    found: Sequence[int]
    slot: Callable[[int], str]
    at: Callable[[int], Place]
    missing: str
    another: str = "KV of another token"


class Count(NamedTuple):
    """How often something is pinned or locked. wanted, got: in words where they differ."""

    called: str
    at: Place
    wanted: str
    got: str


class Source(NamedTuple):
    """A source that a transfer has still to read. owned: why its owner keeps it no more, "" where it does
    or need not."""

    transfer: str
    called: str
    at: Place
    before: object
    now: object
    owned: str = ""


class HasTier(Protocol):
    """A step of an engine with a second tier."""

    @property
    def resets_tier(self) -> bool: ...

    @property
    def kept_copies(self) -> tuple[int, int]:
        """How many copies there were before the command, and are now."""
        ...

    def rooms(self) -> Iterator[HostUnit]: ...

    def copies(self) -> Iterator[KeptCopy]: ...

    def pins(self) -> Iterator[Count]: ...

    def sources(self) -> Iterator[Source]: ...

    def taken(self) -> Iterator[Failure]:
        """Destinations of transfers that somebody else has."""
        ...

    def left_over(self) -> Iterator[Failure]:
        """Yield what is kept for transfers and requests that are over."""
        ...

    @property
    def reached(self) -> frozenset[str]:
        """Clauses of a second tier that could break at this step."""
        ...
