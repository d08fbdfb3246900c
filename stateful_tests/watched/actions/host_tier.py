"""Actions of a host tier: its clauses (reference.tiers) hold whenever the scheduler has polled its
transfers."""

from __future__ import annotations

from impl.sglang.server import events as log
from reference.tiers.clauses import TierStep, failed_clauses
from reference.tiers.commands import Poll
from stateful_tests.watched.log_follower import LogFollower, Diverged, action
from stateful_tests.watched.log_facts import TierSeen


@action(log.Tiered, compared="nodes, slots, locks, transfers and records: the clauses of tiers")
def on_tiered(follower: LogFollower, event: log.Tiered) -> None:
    """Judge the facts of the host tier with its clauses, and note what they reach. Each clause is reported
    once."""
    if follower.result.ended:  # what two turns write into is not told apart
        return
    if follower.tier is None:
        follower.tier = TierSeen(follower.header)
    tier_seen = follower.tier
    facts = event.facts
    before = tier_seen.facts or facts
    tier_seen.facts = facts
    users = {(user.lock, user.host): user for user in facts.users}
    for number, host, path in event.locked:
        tier_seen.locks.take_lock(users[number, host], {node.node: node for node in path})
    ranges = tier_seen.locks.follow(facts)
    waiting = follower.requests if follower.follows else facts.asked  # else nobody knows
    step = TierStep(
        tier_seen.config,
        Poll(),
        refused=False,
        before=before,
        after=facts,
        ranges=ranges,
        waiting=waiting,
    )
    follower.result.compared += len(facts.nodes)
    follower.result.reach(
        "KV that is only on the host", any(not node.device["full"] for node in facts.nodes)
    )
    states = [node for node in facts.nodes if node.device.get("state")]
    follower.result.states_in_stores = (
        not facts.free.get("state")
        and any(node.storing >= 0 for node in states)
        and all(node.storing >= 0 or node.locks.get("state", True) for node in states)
    )
    for kind, load in (("a load", True), ("a store", False)):
        follower.result.reach(f"{kind} in flight", any(job.load is load for job in facts.transfers))
    follower.result.reach("a page that is stored", bool(facts.stored))
    follower.result.reach(
        "a page that comes from the storage",
        any(not operation.back and any(operation.moving.values()) for operation in facts.operations),
    )
    for clause, failure in failed_clauses(step):
        if clause.id not in tier_seen.broken:
            tier_seen.broken.add(clause.id)
            follower.report(Diverged(clause.id, failure.expected, failure.observed))
