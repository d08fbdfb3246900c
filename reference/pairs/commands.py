"""Commands of clients, a proxy, two servers and a network.

A pair decides nothing of that: when a handshake runs, bytes move, a message arrives or a second passes is a
command of the trace. A command that does not apply is refused and changes nothing, so that any part of a
trace means something. Servers are called P and D. A name is used once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Union, get_args

from reference.commands import Prompt
from reference.tiers.commands import Tick


@dataclass(frozen=True, slots=True)
class Prefill:
    """The proxy sends a prompt to P, for one token. P then keeps its KV for D to read."""

    request: str
    tokens: int = 0
    prompt: Prompt = ()
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Forward:
    """The proxy sends the prompt of P's request `of` to D, with P's answer; with push it does so before
    P answers."""

    request: str
    of: str
    max_tokens: int = 1
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Drop:
    """The proxy will not forward the answer to P's request, because its client has gone."""

    request: str


@dataclass(frozen=True, slots=True)
class Serve:
    """A client sends a request to one server, which serves it alone."""

    server: str
    request: str
    max_tokens: int
    tokens: int = 0
    prompt: Prompt = ()
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Cancel:
    """A client of a server, or the proxy, aborts a request."""

    server: str
    request: str


@dataclass(frozen=True, slots=True)
class Forget:
    """A server empties its prefix cache. running: running requests start again."""

    server: str
    running: bool = False


@dataclass(frozen=True, slots=True)
class Advance:
    """The loop of a server takes a half step: it takes the results that are due, or it schedules a
    batch and runs the model.

    accept, stop: as in Schedule.
    drafts: as in Update.
    """

    server: str
    accept: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    drafts: int = 16


@dataclass(frozen=True, slots=True)
class Write:
    """The thread of a server that writes KV to its peer gets a turn (push)."""

    server: str


@dataclass(frozen=True, slots=True)
class Shake:
    """The oldest handshake that a server has begun ends. fails: the peer does not answer."""

    server: str
    fails: bool = False


@dataclass(frozen=True, slots=True)
class Move:
    """A transfer moves its bytes. at: index among those that have not moved, the oldest first."""

    at: int = 0


@dataclass(frozen=True, slots=True)
class Land:
    """A transfer ends well, and its message to the peer is sent. at: index among those under way."""

    at: int = 0


@dataclass(frozen=True, slots=True)
class Lose:
    """A transfer fails. at: index among those under way."""

    at: int = 0


@dataclass(frozen=True, slots=True)
class Deliver:
    """The oldest message to a server arrives."""

    server: str


@dataclass(frozen=True, slots=True)
class CopyHost:
    """The oldest load of a server from its host memory, or store to it, that has not moved its KV moves
    it. load: a load; otherwise a store."""

    server: str
    load: bool = False


@dataclass(frozen=True, slots=True)
class CompleteHost:
    """The oldest transfer between a server and its host memory completes. load: of the loads, otherwise of
    the stores."""

    server: str
    load: bool = False


@dataclass(frozen=True, slots=True)
class ResetHost:
    """A server empties its host memory."""

    server: str


PairCommand = Union[
    Prefill, Forward, Drop, Serve, Cancel, Forget, Advance, Write, Shake, Move, Land, Lose, Deliver, Tick,
    CopyHost, CompleteHost, ResetHost,
]  # fmt: skip
PAIR_COMMANDS: tuple[type, ...] = get_args(PairCommand)
HOST_COMMANDS = CopyHost, CompleteHost, ResetHost
