"""The failure of a clause: expected, observed, and the places that it is about.

`because`, the marks of the step table and exported tests are made from these places. They read no prose.
A place names one thing of a run. Page, row and block numbers are the run's own: an export that runs elsewhere
names the owner and the positions instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

TreePath = tuple[int, ...]  # the tokens (bigrams) from the root to the end of a tree node


class AtPage(NamedTuple):
    """A physical page of a pool ("full" or "swa")."""

    pool: str
    page: int


class AtRow(NamedTuple):
    """A row of req_to_token."""

    row: int


class AtCursor(NamedTuple):
    """A field of Cursors.

    owner: "r1" or "slot of s1".
    must: the value it has to have now (tokens).
    """

    owner: str
    field: str
    must: int | None = None


class AtPosition(NamedTuple):
    """A position of a row (tokens), or of a lock owner's prefix, as attention reads it in a pool.

    must: the token whose KV must be there, as a stamp.
    """

    owner: str
    pool: str
    position: int
    must: int | None = None


class AtNode(NamedTuple):
    """A tree node, by the path to its end.

    pool: pool of the lock count.
    must: its expected value.
    """

    path: TreePath
    pool: str = "full"
    must: int | None = None


class AtTreePage(NamedTuple):
    """The page of the tree that ends at `path`.

    start: its first position (tokens).
    """

    path: TreePath
    start: int


class AtLock(NamedTuple):
    """The tree lock of an owner, such as "s1"."""

    owner: str


class AtNamed(NamedTuple):
    """A request, a session or a session's slot by name.

    kind: "request", "session" or "slot".
    """

    kind: str
    name: str


class AtEntry(NamedTuple):
    """The full-to-SWA mapping entry of a full slot."""

    slot: int


class AtState(NamedTuple):
    """A slot of recurrent state."""

    slot: int


class AtCounter(NamedTuple):
    """A number of a memory check's report, or a counter of the radix tree ("evictable", "protected").

    pool: "full", "swa" or "rows".
    name: such as "session_held".
    must: its value by the reference (tokens).
    """

    pool: str
    name: str
    must: int | None = None


class AtText(NamedTuple):
    """The token history of a session or request.

    at: the first position that differs (tokens).
    must: the token that has to be there.
    """

    owner: str
    at: int | None = None
    must: int | None = None


class AtBlock(NamedTuple):
    """A block of an engine that schedules by itself."""

    block: int


class AtChunk(NamedTuple):
    """A chunk of host memory.

    slot: the wrong slot (tokens from the chunk's first).
    """

    chunk: int
    slot: int | None = None


class AtSlot(NamedTuple):
    """A slot of a pool ("full" or "swa"), on the host or on the device."""

    pool: str
    slot: int
    host: bool


class AtTreeNode(NamedTuple):
    """A node of a tree with a host tier, by its number.

    pool, host: its KV there.
    """

    node: int
    pool: str = "full"
    host: bool = False


class AtTransfer(NamedTuple):
    """A transfer between tiers, by its number."""

    job: int


class AtTable(NamedTuple):
    """The place of a block in a request's table.

    at: index in the table (blocks).
    position: position read or written there (tokens).
    query: the position whose token sees it.
    """

    request: str
    group: int
    at: int
    position: int | None = None
    query: int | None = None


class AtCount(NamedTuple):
    """A number that an engine which schedules by itself shows.

    owner: name of a request, or "batch", "manager", "cache", "host", "tree".
    name: such as "start" or "computed".
    must: the expected value, or the bound.
    group: layer group of the table.
    """

    owner: str
    name: str
    must: int | None = None
    group: int | None = None


class AtServer(NamedTuple):
    """A place of one server of a pair, P or D."""

    server: str
    place: Place


Place = (
    AtPage | AtRow | AtCursor | AtPosition | AtNode | AtTreePage | AtLock
    | AtNamed | AtEntry | AtCounter | AtText | AtBlock | AtChunk | AtTable | AtCount | AtSlot | AtTreeNode
    | AtTransfer | AtState | AtServer
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Failure:
    """A clause that does not hold.

    expected, observed: one line each.
    head: what the command does wrong, where the places do not show it, such as "ends the turn at target
        38".
    find: computes the places. Only an explanation, a page or an export calls it, so that a search for
        places costs a check nothing.
    """

    expected: str
    observed: str
    find: Callable[[], Iterable[Place]] | None = field(default=None, compare=False, repr=False)
    head: str = field(default="", compare=False, repr=False)

    @property
    def at(self) -> tuple[Place, ...]:
        """The places, the main one first; empty where the facts are too odd to find them."""
        try:
            return tuple(self.find()) if self.find is not None else ()
        except (LookupError, AssertionError, StopIteration, TypeError, ValueError):
            return ()

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the places themselves: `find` is a closure, and cannot cross a process."""
        return _rebuilt, (self.expected, self.observed, self.at, self.head)


def _rebuilt(expected: str, observed: str, places: tuple[Place, ...], head: str) -> Failure:
    return failure(expected, observed, *places, head=head)


def failure(expected: str, observed: str, *at: Place, head: str = "") -> Failure:
    """Return a Failure whose places are known at once."""
    return Failure(expected, observed, (lambda: at) if at else None, head)


def count_text(count: int, noun: str, more: str = "s") -> str:
    """Return a number with its noun, such as "1 page", "2 pages".

    more: ending of the plural.
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{more}"
