"""The clause on promises whose lease has ended (PD-3). PD-1, PD-6: reference.clauses.disaggregation."""

from __future__ import annotations

from reference.failures import AtCount, AtServer, Failure, failure
from reference.pairs.clauses.registry import clause
from reference.pairs.config import PREFILL
from reference.pairs.step import PairStep


@clause(
    "PD-3",
    "a lease ends",
    "What nobody renews is free once its lease has ended and P has scheduled twice since.",
    why="A decode server that dies would take the memory of its peer with it, request by request.",
    source="vllm _reap_expired_send_leases",
    scope="A heartbeat renews a lease when P next schedules. Where nobody is late, a request of D that waits"
    " for the KV renews it too.",
    concerns="outcomes, choices and order",
    trigger=lambda step: any(lease.rounds for lease in step.record.leases.values()),
)
def _lease_ends(step: PairStep) -> Failure | None:
    for promise in step.after.promises:
        lease = step.record.leases.get(promise.request)
        if promise.held and lease is not None and lease.rounds > 2:
            expected = f"P gives back what {promise.request} left: its lease ended at {lease.ends:g} s"
            observed = f"it is kept at {step.after.clock:g} s"
            return failure(expected, observed, AtServer(PREFILL, AtCount(promise.request, "lease")))
    return None
