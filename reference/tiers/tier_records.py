"""Records of a second tier that the clauses read: a step of either engine makes them from its own facts.

Host memory of vLLM's connector is made of chunks, each a list of slots; of SGLang's tree it is slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from reference.failures import Failure, Place


class HostUnit(NamedTuple):
    """A chunk or a slot of host memory.

    called: its name.
    at: its place.
    owners: number of keys or nodes that have it.
    free: how often the free list has it.
    moving: a transfer in flight uses it.
    owned: its owners in words.
    """

    called: str
    at: Place
    owners: int
    free: int
    moving: bool
    owned: str


class KeptCopy(NamedTuple):
    """KV that was copied to either tier.

    holds: its required content, in words.
    wanted, found: stamps, slot by slot.
    slot: name of the slot at an index.
    at: its place.
    missing: the fault of an empty slot.
    another: of a slot with another stamp.
    """

    holds: str
    wanted: Sequence[int]
    found: Sequence[int]
    slot: Callable[[int], str]
    at: Callable[[int], Place]
    missing: str
    another: str = "KV of another token"


class Count(NamedTuple):
    """A pin or lock count.

    wanted, got: the two values in words.
    """

    called: str
    at: Place
    wanted: str
    got: str


class Source(NamedTuple):
    """A source that a transfer has still to read.

    before, now: its content before the command and now.
    owned: why its owner does not keep it any more; "" where it does, or need not.
    """

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
    def kept_copy_counts(self) -> tuple[int, int]:
        """Numbers of copies before the command, and now."""
        ...

    def rooms(self) -> Iterator[HostUnit]: ...

    def copies(self) -> Iterator[KeptCopy]: ...

    def pins(self) -> Iterator[Count]: ...

    def sources(self) -> Iterator[Source]: ...

    def taken_destinations(self) -> Iterator[Failure]:
        """Yield destinations of transfers that have another owner."""
        ...

    def leftovers(self) -> Iterator[Failure]:
        """Yield what is kept for transfers and requests that are over."""
        ...

    @property
    def clauses_reached(self) -> frozenset[str]:
        """Clauses of a second tier that could fail at this step."""
        ...
