"""Live requests and holders of locks, with what a server keeps beside the release's own `req`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from impl.lazy import torch

from impl.sglang.parts import namespaces
from impl.sglang.releases.v0_5_10_to_14 import Release0510
from impl.vocabulary import RequestPhase


@dataclass(slots=True)
class Result:
    """The tokens that a launched batch samples for one request: one for a prefill, one or more for a decode
    round.

    visible: the view counts its tokens. The result of a Launch becomes visible when it is settled.
    drafted: slots that a Launch allocates.
    batch: the decode batch that was launched.
    batch_index: position of the request in that batch.
    """

    tokens: list[int]
    prefill: bool = False
    visible: bool = True
    drafted: int = 0
    batch: Any = None
    batch_index: int = 0


@dataclass(slots=True)
class LiveRequest:
    """A live request: the release's own `req`, and what only the scheduler and the client know.

    history: leading input tokens that come from the session's earlier turns.
    locked: the request waits with a locked prefix of the radix tree; once it has a row, the release locks.
    session_had_no_slot: its session kept nothing when it got its row. From 0.5.22 on the session's slot then
    belongs to this turn alone.
    in_namespace: its prompt carries a namespace key, so the release sees exchanged token ids (namespaces.py).
    last_result_len: outputs of the result that was processed last.
    pending: results of launched batches that are not processed yet, the oldest first.
    """

    release: Release0510
    name: str
    session: str | None
    serial: int
    req: Any
    history: int
    phase: RequestPhase = RequestPhase.QUEUED
    started: bool = False
    locked: bool = False
    session_had_no_slot: bool = False
    in_namespace: bool = False
    last_result_len: int = 1
    pending: list[Result] = field(default_factory=list)

    @property
    def origin(self) -> int:
        return len(self.req.origin_input_ids)

    @property
    def output(self) -> int:
        return len(self.req.output_ids) + sum(len(result.tokens) for result in self.pending)

    @property
    def unsettled_results(self) -> list[Result]:
        """Results of a Launch that no Settle has made visible."""
        return [result for result in self.pending if not result.visible]

    @property
    def visible_output(self) -> int:
        """Output tokens that the view shows."""
        return self.output - sum(len(result.tokens) for result in self.unsettled_results)

    @property
    def processed_len(self) -> int:
        """Tokens that it has computed, as far as their results are processed."""
        return self.origin + max(len(self.req.output_ids) - 1, 0)

    @property
    def text(self) -> list[int]:
        pending_tokens = [token for result in self.pending for token in result.tokens]
        tokens = [*self.req.origin_input_ids, *self.req.output_ids, *pending_tokens]
        return self.exchange_tokens(tokens)

    def exchange_tokens(self, tokens: list[int]) -> list[int]:
        """Translate token ids of the specification to those of the release, or back."""
        return namespaces.exchange_texts(tokens) if self.in_namespace else tokens

    @property
    def fill(self) -> int:
        """Tokens of input and output."""
        return self.origin + self.output

    @property
    def prefix(self) -> int:
        """Tokens that the next chunk finds in the cache, as the release computed it."""
        return self.release.prefix(self.req)


@dataclass(slots=True)
class LockHolder:
    """A holder of a lock on the radix tree.

    req: the release's own request.
    tokens: tokens of the locked prefix.
    slots: full slots of the locked prefix.
    """

    req: Any
    tokens: list[int]
    slots: torch.Tensor
