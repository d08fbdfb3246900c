"""Clauses on what P has promised to keep, and on what D counts as computed (PD-1, PD-3, PD-6)."""

from __future__ import annotations

from reference.failures import AtBlock, AtCount, AtNamed, AtServer, Failure, failure
from reference.pairs.clauses.base import clause
from reference.pairs.config import DECODE, PREFILL
from reference.pairs.facts import Promise
from reference.pairs.step import PairStep


@clause(
    "PD-1",
    "what was promised is kept",
    "From its answer on until every request that was given it has read it or ended, what P has promised is"
    " neither free nor written.",
    why=("D reads when it likes. A block that was given away before holds another request's KV."),
    source="vllm#43509; sglang#38961",
    scope=(
        "Not for a reader that was given up, nor for an answer that the proxy dropped. With late clients or"
        " servers the promise ends with a lease that nobody renews."
    ),
    trigger=lambda step: any(True for _ in step.needed()),
)
def _kept(step: PairStep) -> Failure | None:
    was, now = step.before.prefill, step.after.prefill
    before = {promise.request for promise in step.before.promises}
    for promise in step.needed():
        for group, row in enumerate(promise.blocks):
            for block in filter(None, row):
                if not now.refs[block]:
                    return _lost(step, promise, group, block, "it is free")
                if promise.request in before and was.memory[block] != now.memory[block]:
                    return _lost(step, promise, group, block, "it was written")
    return None


def _lost(step: PairStep, promise: Promise, group: int, block: int, how: str) -> Failure:
    readers = ", ".join(each.request for each in step.after.readers_of(promise.request))
    keep = f"P keeps block {block} (group {group}) of {promise.request}"
    places = AtBlock(block), AtNamed("request", promise.request)
    at = (AtServer(PREFILL, place) for place in places)
    return failure(f"{keep} for {readers or 'whoever is to read it'}", how, *at)


@clause(
    "PD-3",
    "a lease ends",
    "What nobody renews is free once its lease has ended and P has scheduled twice since.",
    why="A decode server that dies would take the memory of its peer with it, request by request.",
    source="vllm _reap_expired_send_leases",
    scope="A heartbeat renews a lease when P next schedules.",
    concerns="outcomes, choices and order",
    trigger=lambda step: any(lease.rounds for lease in step.beside.leases.values()),
)
def _ends(step: PairStep) -> Failure | None:
    for promise in step.after.promises:
        lease = step.beside.leases.get(promise.request)
        if promise.held and lease is not None and lease.rounds > 2:
            want = f"P gives back what {promise.request} left: its lease ended at {lease.ends:g} s"
            got = f"it is kept at {step.after.clock:g} s"
            return failure(want, got, AtServer(PREFILL, AtCount(promise.request, "lease")))
    return None


@clause(
    "PD-6",
    "only what was sent is valid",
    "When D counts KV of its peer as computed, each position of it that the next position's query can see"
    " holds KV of the request's own text, in every group.",
    why=(
        "Both servers compute offsets, clipped windows and blocks of unequal sizes. What the peer never wrote"
        " is read as KV, and nothing crashes."
    ),
    source="vllm#48758",
    scope="When D no longer waits for it. HIT-1 and READ-3 see what a batch then reads.",
    trigger=lambda step: any(True for _ in step.arrived()),
)
def _sent(step: PairStep) -> Failure | None:
    side = step.sides[DECODE]
    texts = step.beside.texts[DECODE]
    for name, computed in step.arrived():
        bearer = texts.bearers.get(name)
        if bearer is None:
            continue
        stamps = bearer.stamps
        tables = step.after.decode.requests[name].tables
        end = min(computed, len(stamps))
        if (found := side.misread(name, tables, stamps, end, end)) is not None:
            places = (AtServer(DECODE, place) for place in found.at)
            want = f"D counts {computed} tokens of {name} as sent by P: {found.expected}"
            return failure(want, found.observed, *places)
    return None
