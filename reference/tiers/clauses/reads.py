"""Clauses on what forward passes read, and on the tree that they match in (LOAD, TREE, CHK)."""

from __future__ import annotations

from reference.commands import Evict
from reference.failures import AtCount, AtSlot, AtTreeNode, Failure, failure
from reference.tiers.clauses.registry import clause
from reference.tiers.step import TierStep


@clause(
    "LOAD-1",
    "a forward pass reads its own text",
    "A forward pass finds KV of its request's text at every position of its prefix, in the SWA pool at every"
    " position of its window, and the state after its prefix: what was on the host has been loaded before.",
    why="It is the tier's purpose.",
    rule="tiers.facts",
    source="as READ-1, READ-2; sglang LayerDoneCounter",
    scope="Trees with a host tier.",
    trigger=lambda s: bool(s.after.reads),
)
def _pass_reads_own_text(step: TierStep) -> Failure | None:
    for read in step.after.reads:
        if read.found != read.wanted:
            what = f"{read.pool} KV at position {read.position}"
            if read.pool == "state":
                what = f"state after token {read.position + 1}"
            expected = f"{read.holder} finds its own {what}"
            if read.slot <= 0 and read.pool != "full":
                return failure(
                    expected, "it has no slot there", AtCount(read.holder, "position", read.position)
                )
            got = "KV of another token" if read.found else "nothing"
            return failure(
                expected, f"slot {read.slot} holds {got}", AtSlot(read.pool, read.slot, host=False)
            )
    return None


@clause(
    "TREE-16",
    "device KV continues device KV",
    "A node with full KV on the device has a parent with full KV on the device, or the root. No two nodes or"
    " requests have one device slot, and none has a free one.",
    why="A prefix is read from its first token on.",
    rule="tiers.facts",
    source="sglang FullComponent.acquire_component_lock",
    scope="Trees with a host tier.",
    trigger=lambda s: any(not node.device["full"] for node in s.after.nodes),
)
def _device_kv_is_contiguous(step: TierStep) -> Failure | None:
    for node in step.after.nodes:
        parent = step.nodes.get(node.parent)
        if node.device["full"] and parent is not None and not parent.device["full"]:
            want = f"the parent of node {node.node}, node {parent.node}, has KV on the device"
            return failure(want, "it has none", AtTreeNode(node.node), AtTreeNode(parent.node))
    for host, pool, slot in {**step.owners, **step.holders}:
        if not host and step.is_shared((host, pool, slot)):
            got = f"{' and '.join(step.who_has((host, pool, slot)))} have it"
            return failure(
                f"device {pool} slot {slot} has one owner", got, AtSlot(pool, slot, host=False)
            )
    return None


@clause(
    "TREE-17",
    "what counts as evictable can be evicted",
    "An Evict frees as many tokens of each pool as were asked for, or as many as counted as evictable.",
    why="Admission promises room that is not there: the server stops at an allocation.",
    rule="tiers.facts",
    source="as TREE-10; sglang evictable_size",
    scope="Trees with a host tier.",
    trigger=lambda s: (
        isinstance(s.command, Evict) and not s.refused and s.before.evictable["full"] > 0
    ),
)
def _evictable_count_is_reachable(step: TierStep) -> Failure | None:
    if not isinstance(step.command, Evict) or step.refused:
        return None
    asked_for = {"full": step.command.full, "swa": step.command.swa, "state": step.command.states}
    for pool, asked_count in asked_for.items():
        if pool not in step.config.pools:
            continue
        count = step.before.evictable[pool]
        freed = len(step.after.free[pool]) - len(step.before.free[pool])
        if freed < min(asked_count, count):
            what = "states" if pool == "state" else f"{pool} tokens"
            want = f"{min(asked_count, count)} of {count} evictable {what} are freed"
            return failure(want, f"{freed} are", AtCount("tree", f"{pool} evictable", count))
    return None


@clause(
    "CHK-4",
    "the release's own check passes at rest",
    "While no transfer is in flight the tree's own check finds nothing wrong.",
    why="It is the release's own statement of what must hold.",
    rule="tiers.facts",
    source="sglang UnifiedRadixCache.sanity_check",
    scope="Trees with a host tier.",
    concerns="outcomes, choices and order",
    trigger=lambda s: not s.after.transfers and bool(s.after.nodes),
)
def _own_check_passes(step: TierStep) -> Failure | None:
    if step.after.complaint:
        return failure(
            "the tree's own check passes", step.after.complaint, AtCount("tree", "check")
        )
    return None
