"""Commands to a radix tree with a host tier: of requests, of the scheduler's loop, of the copy engine,
and of the threads that talk to a storage behind it.

Match, Unlock, Insert, Evict are as without a host tier, Copy and Complete as of vLLM's connector. A command
that does not apply is refused and changes nothing, so that any part of a trace means something.

A thread of the storage runs when a command lets it: it takes its next operation and goes on to its first call
of the backend; then, command by command, through that call to the next, or to the end of the operation. So a
slow backend is one whose command comes late; a full one, or one that has lost pages, does less of a call.

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
    """Forget the prefix cache; running: what runs gives its blocks back and starts again."""

    running: bool = False


@dataclass(frozen=True, slots=True)
class Copy:
    """The oldest transfer that has not moved its KV moves it now. load: of loads, else of stores."""

    load: bool = False


@dataclass(frozen=True, slots=True)
class Complete:
    """The oldest transfer completes; the engine learns of it with its next batch. load: of loads, else of
    stores."""

    load: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    """Match, and what has KV on the host alone is loaded back: device slots are taken for it, a load is
    queued, and `holder` locks all of it."""

    holder: str
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class Send:
    """Send the queued operations to the copy engine as one transfer. load: queued loads, else stores."""

    load: bool = False


@dataclass(frozen=True, slots=True)
class Poll:
    """The scheduler sends queued stores and takes note of what has completed."""


ALL = -1  # pages: as many as there are


@dataclass(frozen=True, slots=True)
class Prefetch:
    """A request that waits asks the storage for what neither tier has. Match or Load of its prompt admits it,
    Abort gives it up."""

    holder: str
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class Query:
    """The thread that asks the storage for pages goes on. pages: that the backend finds at most, -1 for
    all."""

    pages: int = ALL


@dataclass(frozen=True, slots=True)
class Fetch:
    """The thread that reads pages into host memory goes on. pages: as above. Of vLLM's connector: the oldest
    job that reads chunks from the storage is done; behind so many a file is too short, and the job fails."""

    pages: int = ALL


@dataclass(frozen=True, slots=True)
class Backup:
    """The thread that writes pages to the storage goes on. pages: as above. Of vLLM's connector: the oldest
    job that writes chunks to it is done, and fails behind so many."""

    pages: int = ALL


@dataclass(frozen=True, slots=True)
class Await:
    """A request comes that another server computes, or decodes. resumable: it is a turn of the session of
    that name, which keeps its KV until the next; the prompt goes on behind what was said in it."""

    holder: str
    prompt: Prompt
    resumable: bool = False


@dataclass(frozen=True, slots=True)
class Greet:
    """The peer answers: a Poll may take slots, or send. prefix: tokens, whole pages, that a decode server
    has already."""

    holder: str
    prefix: int = 0


@dataclass(frozen=True, slots=True)
class Arrive:
    """The prefill server has written all KV, and writes no more. A Poll lets the request decode. On a prefill
    server: what it has handed in is read."""

    holder: str


@dataclass(frozen=True, slots=True)
class FailPeer:
    """The receiver or sender reports a failure; what is under way may still be written."""

    holder: str


@dataclass(frozen=True, slots=True)
class Expire:
    """The prefill servers of requests that were given up are gone, and write no more."""


@dataclass(frozen=True, slots=True)
class LastToken:
    """A request has its last token. Its KV goes into the tree, or stays with its session."""

    holder: str


TierCommand = Union[
    Match, Load, Insert, Unlock, Evict, Send, Copy, Complete, Poll, ResetCache, Prefetch, Query, Fetch,
    Backup, Abort, Await, Greet, Arrive, FailPeer, Expire, Decode, Retract, LastToken, Close, Extend,
]  # fmt: skip
StorageCommand = Prefetch | Query | Fetch | Backup
PrefillCommand = Extend
DecodeCommand = Await | Greet | Arrive | FailPeer | Expire | Decode | Retract | LastToken | Close
TIER_COMMANDS: tuple[type, ...] = get_args(TierCommand)
