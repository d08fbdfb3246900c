"""Commands to a radix tree with a host tier: of requests, of the scheduler's loop, of the copy engine,
and of the threads that talk to a storage behind it.

Match, Unlock, Insert, Evict are as without a host tier, Copy and Complete as of vLLM's connector. A command
that does not apply is refused and changes nothing, so that a trace still has a meaning when commands are left
out of it.

A thread of the storage runs when a command lets it. The first command takes it into the first call of the
backend for its next operation. Each further command takes it through that call, into the next one or to the
end of the operation. A backend is slow where its command comes late. A backend that is full or has lost pages
does less of a call. Only Tick lets time pass.

A server that only decodes takes requests in place of Match, Load and Insert, and so does one that only
prefills: Extend is then a round of its loop with a batch, Poll a round without.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Union, get_args

from reference.commands import (
    Abort, Close, Decode, Evict, Extend, Insert, Match, Prompt, Retract, Unlock,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ResetCache:
    """Empty the prefix cache. running: running requests give their blocks back and start again."""

    running: bool = False


@dataclass(frozen=True, slots=True)
class Copy:
    """The oldest load, or store, that has not moved its KV moves it. load: a load; otherwise a store."""

    load: bool = False


@dataclass(frozen=True, slots=True)
class Complete:
    """The oldest transfer completes; the engine learns of it with its next batch. load: of the loads,
    otherwise of the stores."""

    load: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    """Match a prompt and load back the part whose KV only the host has: device slots are allocated, a
    load is queued, and `holder` locks the whole prefix."""

    holder: str
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class Send:
    """Send the queued operations to the copy engine as one transfer. load: queued loads, otherwise
    stores."""

    load: bool = False


@dataclass(frozen=True, slots=True)
class Poll:
    """The scheduler sends queued stores and notes completed transfers."""


@dataclass(frozen=True, slots=True)
class Prefetch:
    """A waiting request asks the storage for KV that neither tier has. Match or Load of its prompt
    admits it, Abort ends it."""

    holder: str
    prompt: Prompt


ALL = -1  # for `pages`: no limit


@dataclass(frozen=True, slots=True)
class Query:
    """The thread that asks the storage for pages proceeds. pages: the most that the backend finds, ALL for
    no limit."""

    pages: int = ALL


@dataclass(frozen=True, slots=True)
class Fetch:
    """The thread that reads pages into host memory proceeds. pages: the most that it reads. With vLLM's
    connector the oldest job that reads chunks from the storage is done. Where a file is too short after so
    many, the job fails."""

    pages: int = ALL


@dataclass(frozen=True, slots=True)
class Backup:
    """The thread that writes pages to the storage proceeds. pages: the most that it writes. With vLLM's
    connector the oldest job that writes chunks is done, and fails after so many."""

    pages: int = ALL


@dataclass(frozen=True, slots=True)
class Await:
    """A request arrives that another server prefills, or decodes. resumable: it is a turn of the
    session of that name, which keeps its KV until the next; the prompt continues that turn's text."""

    holder: str
    prompt: Prompt
    resumable: bool = False


@dataclass(frozen=True, slots=True)
class Greet:
    """The peer answers, so that a Poll may allocate slots, or send. prefix: tokens, whole pages, that a
    decode server already has."""

    holder: str
    prefix: int = 0


@dataclass(frozen=True, slots=True)
class Arrive:
    """The prefill server has written all KV and writes no more. A Poll lets the request decode. On a
    prefill server: its parts were read."""

    holder: str


@dataclass(frozen=True, slots=True)
class FailPeer:
    """The receiver or sender reports a failure; KV under way may still be written."""

    holder: str


@dataclass(frozen=True, slots=True)
class Expire:
    """The prefill servers of aborted requests have gone, and write no more."""


@dataclass(frozen=True, slots=True)
class LastToken:
    """A request gets its last token. Its KV is inserted into the tree, or stays with its session."""

    holder: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passes (seconds). In a pair where nobody is late, it passes once everybody has done what was
    due. With a host tier: for requests that wait for the storage (timeout)."""

    seconds: int = 1


@dataclass(frozen=True, slots=True)
class Reattach:
    """An operator detaches the storage, which ends its threads, and attaches it again. No request is
    there."""


TierCommand = Union[
    Match, Load, Insert, Unlock, Evict, Send, Copy, Complete, Poll, ResetCache, Prefetch, Query, Fetch,
    Backup, Abort, Await, Greet, Arrive, FailPeer, Expire, Decode, Retract, LastToken, Close, Extend,
    Tick, Reattach,
]  # fmt: skip
StorageCommand = Prefetch | Query | Fetch | Backup | Tick | Reattach
PrefillCommand = Extend
DecodeCommand = Await | Greet | Arrive | FailPeer | Expire | Decode | Retract | LastToken | Close
TIER_COMMANDS: tuple[type, ...] = get_args(TierCommand)
