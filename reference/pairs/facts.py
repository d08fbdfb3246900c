"""Facts of a pair after a command: those of each server, what was promised to whom, what is under way."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from reference.blocks.facts import BlockFacts, Table
from reference.pairs.config import PREFILL, SERVERS


class Promise(NamedTuple):
    """An answer of P that names blocks for D to read.

    request: P's request.
    blocks: block tables, one for each group.
    at: when it was given (seconds).
    held: P still keeps the blocks.
    """

    request: str
    blocks: Table
    at: float
    held: bool


class ReaderState(StrEnum):
    """The state of a D request with respect to the KV that P has promised it."""

    GIVEN = "has P's answer and has asked for nothing"
    WAITS = "waits for KV of P"
    READ = "waits for nothing of P"
    LINGERS = "was given up while KV was under way"
    GONE = "is gone"


class PairReader(NamedTuple):
    """A request of D that was given a promise.

    of: P's request.
    """

    request: str
    of: str
    state: ReaderState


# group, block of D, block of P
BlockMove = tuple[int, int, int]


class PairTransfer(NamedTuple):
    """A transfer between the servers that the network has, or whose end D has yet to notice.

    reader: D's request.
    moves: (group, block of D, block of P).
    copied: its bytes have moved.
    over: it has ended.
    failed: it ended with an error.
    """

    number: int
    reader: str
    moves: tuple[BlockMove, ...]
    copied: bool
    over: bool
    failed: bool


class PairMessage(NamedTuple):
    """A message under way.

    renews: it is a heartbeat; otherwise it says that KV was read.
    requests: the requests of P that it names.
    """

    to: str
    renews: bool
    requests: tuple[str, ...]


class PairFacts(NamedTuple):
    """A pair at rest after a command."""

    #: facts of each server
    prefill: BlockFacts
    decode: BlockFacts
    promises: tuple[Promise, ...] = ()
    readers: tuple[PairReader, ...] = ()
    transfers: tuple[PairTransfer, ...] = ()
    #: messages on the wire, in the order of sending
    messages: tuple[PairMessage, ...] = ()
    #: server names, one for each handshake that the server waits for
    handshakes: tuple[str, ...] = ()
    #: seconds since the start
    clock: float = 0.0
    #: servers whose loop does not run because it has nothing to do
    idle: tuple[str, ...] = SERVERS
    #: entries of the connectors' tables, in words
    records: tuple[str, ...] = ()

    def of(self, server: str) -> BlockFacts:
        """Return the facts of a server."""
        return self.prefill if server == PREFILL else self.decode

    @property
    def under_way(self) -> tuple[PairTransfer, ...]:
        """Transfers that have not ended."""
        return tuple(job for job in self.transfers if not job.over)

    @property
    def network_rests(self) -> bool:
        """No transfer, no message and no handshake is under way."""
        return not (self.under_way or self.messages or self.handshakes)

    def readers_of(self, request: str) -> tuple[PairReader, ...]:
        """Return the requests of D that were given the answer to a request of P."""
        return tuple(reader for reader in self.readers if reader.of == request)

    def transfers_of(self, reader: str) -> tuple[PairTransfer, ...]:
        """Return the transfers for a request of D."""
        return tuple(job for job in self.transfers if job.reader == reader)
