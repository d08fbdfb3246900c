"""Requests, sessions, and what a session keeps of its turns."""

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
    """The KV that a session keeps between turns. While lent to a request it goes on naming its row. state:
    a slot of recurrent state, with the one after state_len tokens."""

    row: int
    cursors: RowCursors[int] = ZERO
    state: int | None = None
    state_len: int = 0


@dataclass(slots=True, eq=False)
class KVSession:
    """A streaming session. history: tokens of its finished turns."""

    name: str
    history: list[int] = field(default_factory=list)
    slot: Slot | None = None
    turn: KVRequest | None = None
    closing: bool = False


@dataclass(slots=True, eq=False)
class KVRequest:
    """A turn of a session, or (session None) an ordinary request.

    text: tokens of its input (`origin` of them) and of its outputs so far.
    started: it has extended since it was submitted. row None: it holds no KV.
    prefix: int64 [R], the radix tree's slots that its admission has found, until a row names them.
    in_flight: verify rounds whose results are to come, the oldest first. All that they allocate counts as
    committed; the device knows what it has accepted. state: its slot of recurrent state, with the one after
    state_len tokens. buffers: more slots, the one that is written next first, each with how many tokens the
    state in it is after that is kept for the tree; 0: it has none yet.
    """

    name: str
    session: KVSession | None
    serial: int
    text: list[int]
    origin: int
    phase: RequestPhase = RequestPhase.QUEUED
    started: bool = False
    row: int | None = None
    cursors: RowCursors[int] = ZERO
    prefix: Tensor | None = None
    in_flight: list[Draft] = field(default_factory=list)
    state: int | None = None
    state_len: int = 0
    buffers: list[tuple[int, int]] = field(default_factory=list)

    @property
    def settled(self) -> int:
        """Tokens that are committed by results that are there."""
        return self.cursors.kv_committed_len - sum(draft.allocate for draft in self.in_flight)

    @property
    def rejected(self) -> int:
        """How far kv_committed_len is past what the device has computed."""
        return sum(draft.allocate - draft.accept for draft in self.in_flight)

    def sample(self, count: int) -> None:
        """Append the next `count` tokens, as the deterministic sampler yields them."""
        length = len(self.text)
        self.text.extend(token_id(self.serial, p) for p in range(length, length + count))


Holders = Sequence[KVRequest | Slot]
