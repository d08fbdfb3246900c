"""Clauses on what is left when both servers are idle, and on waits for a timeout (PD-2, PD-4, PD-5)."""

from __future__ import annotations

from reference.failures import AtCount, AtNamed, AtServer, Failure, count_text, failure
from reference.standstill_detector import FOR_EVER
from reference.pairs.clauses.registry import clause
from reference.pairs.config import PREFILL
from reference.pairs.step import PairStep


@clause(
    "PD-2",
    "nobody waits for the lease",
    "When nobody will read any more, all messages have arrived and both servers have nothing to do,"
    " P keeps nothing for its peer.",
    why="The lease is for crashes. A sender that always waits for it serves with a part of its memory.",
    source="vllm#41269, vllm#43509",
    scope=(
        "Not after a failure of the network, and not for an answer that the proxy has dropped: nobody tells"
        " P of these."
    ),
    concerns="outcomes, choices and order",
    trigger=lambda step: bool(step.after.promises) and step.record.is_quiet(step.after),
)
def _keeps_nothing_for_lease(step: PairStep) -> Failure | None:
    if step.refused or not step.record.is_quiet(step.after):
        return None
    for promise in step.after.promises:
        if promise.held and promise.request not in step.excused_requests:
            readers = step.after.readers_of(promise.request)
            states = " and ".join(f"{reader.request} {reader.state.value}" for reader in readers)
            gives = f"P gives back what {promise.request} left"
            expected = f"{gives}, because nobody will read it any more: {states}"
            place = AtServer(PREFILL, AtNamed("request", promise.request))
            return failure(expected, "P keeps it until the lease ends", place)
    return None


@clause(
    "PD-4",
    "nobody waits for a timeout",
    "While a request has no answer and nothing has failed, the pair does not come into the same state again"
    " and again with the clock standing still: no wait depends on a message that never comes.",
    why="A timeout ends such a wait, so it looks like a slow server.",
    source="vllm#43509; sglang#37103",
    scope=(
        "Not after a failure of the network, and not while P keeps what the proxy has dropped: only the"
        " lease gives that back. PRO-1 has waits that no timeout ends."
    ),
    concerns="outcomes, choices and order",
    decision=f"As PRO-1: the state was seen {FOR_EVER} times.",
    assumption="As PRO-1.",
    trigger=lambda step: step.in_time is not None and not step.in_time.runs,
)
def _no_wait_for_timeout(step: PairStep) -> Failure | None:
    standstill = step.in_time
    if standstill is None or standstill.ran or standstill.times < FOR_EVER:
        return None
    if step.record.faulted:
        return None
    if any(p.held and p.request in step.record.dropped for p in step.after.promises):
        return None
    waiting = ", ".join(f"{name} {state}" for name, state in step.unanswered.items())
    calls = count_text(standstill.turns, "call")
    return failure(
        "somebody who waits must get further without a timeout: nothing has failed",
        f"{calls} of the schedulers later nothing has run and nothing has changed; {step.room}; {waiting}",
        AtCount("batch", "stall"),
        *(AtNamed("request", name) for name in step.unanswered),
    )


@clause(
    "PD-5",
    "no record of what is gone",
    "When nobody has anything to do and P keeps nothing for its peer, the tables of both connectors are"
    " empty: requests, transfers, leases, heartbeats, notifications, failures.",
    why="A record that stays meets the next request of that name, or grows until the server starts anew.",
    source="vllm NixlBaseConnectorWorker, NixlBaseConnectorScheduler",
    concerns="outcomes, choices and order",
    trigger=lambda step: bool(step.after.readers) and step.record.is_quiet(step.after),
)
def _no_record_left(step: PairStep) -> Failure | None:
    if step.refused or not step.after.records or not step.record.is_quiet(step.after):
        return None
    if any(promise.held for promise in step.after.promises):
        return None
    records = ", ".join(step.after.records)
    return failure("no record of what is gone", records, AtCount("pair", "records", 0))
