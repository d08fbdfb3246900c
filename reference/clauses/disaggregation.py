"""Clauses on KV that a prefill server hands to a decode server (PD-1, PD-6): for a pair, and for a
server that only prefills."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Protocol

from reference.clauses.registry import Clause, register
from reference.failures import Failure

HANDED_OVER: dict[str, Clause] = {}
clause = partial(register, HANDED_OVER, rule="pairs.pair_record")


class HandsOver(Protocol):
    """A step of a prefill server, a decode server, or a pair of them."""

    def parts_needed(self) -> Iterator[object]:
        """Yield what the prefill server must still keep for its peer."""
        ...

    def lost_kv(self) -> Iterator[Failure]:
        """Yield what it must keep and has freed or overwritten."""
        ...

    def arrivals(self) -> Iterator[object]:
        """Yield what the decode server counts as sent, or will get."""
        ...

    def wrongly_sent(self) -> Iterator[Failure]:
        """Yield parts of it with another request's KV."""
        ...


@clause(
    "PD-1",
    "what was promised is kept",
    "From its answer on until every request that was given it has read it or ended, what P has promised is"
    " neither free nor written; nor is what it sends until it is read.",
    why=("D reads when it likes. A block that was given away before holds another request's KV."),
    source="vllm#43509; sglang#38961",
    scope=(
        "Not for a reader that was given up, nor for an answer that the proxy dropped. With late clients or"
        " servers the promise ends with a lease that nobody renews."
    ),
    trigger=lambda step: any(True for _ in step.parts_needed()),
)
def _promise_is_kept(step: HandsOver) -> Failure | None:
    return next(step.lost_kv(), None)


@clause(
    "PD-6",
    "only what was sent is valid",
    "When D counts KV of its peer as computed, each position of it that the next position's query can see"
    " holds KV of the request's own text, in every group, and a recurrent group has the state after exactly"
    " these positions. P hands in each page that D expects once, in order.",
    why=(
        "Both servers compute offsets, clipped windows and blocks of unequal sizes. What the peer never wrote"
        " is read as KV, and nothing crashes."
    ),
    source="vllm#48758",
    scope="When D no longer waits for it. HIT-1 and READ-3 see what a batch then reads.",
    trigger=lambda step: any(True for _ in step.arrivals()),
)
def _only_sent_kv_is_valid(step: HandsOver) -> Failure | None:
    return next(step.wrongly_sent(), None)
