"""Requests, sessions, and the slots in which sessions keep KV between turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from impl.lazy import Tensor
from impl.torch_kv.cursors import ZERO, RowCursors
from impl.vocabulary import RequestPhase
from reference.commands import Draft
from reference.token_ids import token_id


@dataclass(slots=True, eq=False)
class Slot:
    """The KV that a session keeps between turns. It still names its row while a request borrows it.

    state: slot of the recurrent state after state_len tokens.
    """

    row: int
    cursors: RowCursors[int] = ZERO
    state: int | None = None
    state_len: int = 0


@dataclass(slots=True, eq=False)
class KVSession:
    """A streaming session.

    history: tokens of its finished turns.
    """

    name: str
    history: list[int] = field(default_factory=list)
    slot: Slot | None = None
    turn: KVRequest | None = None
    closing: bool = False


@dataclass(slots=True, eq=False)
class KVRequest:
    """A turn of a session, or (session None) an ordinary request."""

    name: str
    session: KVSession | None
    serial: int
    #: tokens of its input (the first `origin`) and of its outputs so far
    text: list[int]
    origin: int
    phase: RequestPhase = RequestPhase.QUEUED
    #: it has extended since it was submitted
    started: bool = False
    #: None while it holds no KV
    row: int | None = None
    cursors: RowCursors[int] = ZERO
    #: int64 [R], the radix tree's slots that its admission has matched, until its row names them
    prefix: Tensor | None = None
    #: verify rounds without results, the oldest first. All tokens that they allocate count as
    #: committed.
    in_flight: list[Draft] = field(default_factory=list)
    #: slot of the recurrent state after state_len tokens
    state: int | None = None
    state_len: int = 0
    #: slots of states that are kept for the tree, the next one to write first; each with the number
    #: of tokens before its state, 0 if it has none
    buffers: list[tuple[int, int]] = field(default_factory=list)

    @property
    def settled(self) -> int:
        """Number of tokens that results have committed."""
        return self.cursors.kv_committed_len - sum(draft.allocate for draft in self.in_flight)

    @property
    def rejected(self) -> int:
        """Number of drafts in flight that count as committed and are rejected."""
        return sum(draft.allocate - draft.accept for draft in self.in_flight)

    def sample(self, count: int) -> None:
        """Append the next `count` tokens of the deterministic sampler."""
        length = len(self.text)
        self.text.extend(token_id(self.serial, p) for p in range(length, length + count))


Holders = Sequence[KVRequest | Slot]
