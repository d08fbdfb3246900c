"""Transfers between the tiers while they are in flight (XFER)."""

from __future__ import annotations

from reference.failures import AtTransfer, AtTreeNode, Failure, failure
from reference.tiers.clauses.registry import clause
from reference.tiers.tier_records import HasTier
from reference.tiers.slots import target
from reference.tiers.step import TierStep


@clause(
    "XFER-1",
    "a source stays until it is read",
    "Nobody writes what a transfer in flight has not read yet: device slots of a store, host slots of a load."
    " A source in a tree keeps its one owner until the transfer has read it.",
    why="The copy would be of another text than its hash or node names.",
    needs=("tier",),
    rule="tiers.facts",
    source="vllm#42761, vllm#29870, sglang#26728",
    scope="vLLM may free a block of a store; who takes it waits for the store first.",
    trigger=lambda s: "XFER-1" in s.clauses_reached,
)
def _source_stays(step: HasTier) -> Failure | None:
    for source in step.sources():
        want = f"{source.called} stays as it is until {source.transfer} has read it"
        if source.owned:
            return failure(want, source.owned, source.at)
        if source.before != source.now:
            return failure(want, "it was written", source.at)
    return None


@clause(
    "XFER-2",
    "a destination is its transfer's",
    "What a load in flight writes is not free and belongs to one request, one node, or the load alone. In a"
    " tree the same holds for the host slots that a store writes. Nobody computes with it before the load"
    " completes, and no step in flight writes or copies it. What another server writes stays its request's,"
    " even of an aborted one.",
    why="An owner loses its KV when the transfer arrives; an early reader reads what is not there. A step"
    " that was scheduled earlier may write after the load.",
    needs=("tier",),
    rule="tiers.facts",
    source="vllm Scheduler._update_waiting_for_remote_kv; sglang HybridCacheController.load,"
    " DecodeTransferQueue._defer_release",
    trigger=lambda s: "XFER-2" in s.clauses_reached,
)
def _destination_is_exclusive(step: HasTier) -> Failure | None:
    return next(step.taken_destinations(), None)


@clause(
    "XFER-3",
    "nothing is kept for what is over",
    "There are records only of requests that exist and of transfers in flight; blocks, slots, rows, marks and"
    " pins are kept only for requests, and for steps and transfers in flight.",
    why="A stale record leaks memory, and meets the next request of that name.",
    needs=("tier",),
    rule="tiers.facts",
    source="vllm OffloadingConnectorScheduler._req_status; sglang ongoing_write_through, ongoing_load_back",
    trigger=lambda s: "XFER-3" in s.clauses_reached,
)
def _no_stale_records(step: HasTier) -> Failure | None:
    return next(step.leftovers(), None)


@clause(
    "XFER-4",
    "a store's nodes bear its mark",
    "Nodes whose host slots an unacknowledged store writes bear its mark, and its record names exactly the"
    " nodes with that mark, however they were split. Each record has its transfer.",
    why="A node that nobody names is never published, or is published before its KV has arrived.",
    rule="tiers.facts",
    source="sglang mark_write_through_pending, _replace_pending_write_through_node",
    scope="A tree with its core in Rust tells no marks: those of its records are taken.",
    trigger=lambda s: any(not record.load for record in s.after.records),
)
def _stored_nodes_are_marked(step: TierStep) -> Failure | None:
    ack_by_node = {
        node: record.ack
        for record in step.after.records
        if not record.load
        for node in record.nodes
    }
    written: dict[int, int] = {}
    for job, part in step.moving(lambda job: not job.load):
        written |= dict.fromkeys(step.owners.get(target(job, part), ()), job.job)
    for node in step.after.nodes:
        place = AtTreeNode(node.node, "full", host=True)
        mark = ack_by_node.get(node.node, -1)
        both = mark, node.storing
        if node.storing != mark:
            expected, observed = (f"marked for the store of {n}" if n != -1 else "not marked" for n in both)
            return failure(
                f"node {node.node} is {expected}, as the records name it", f"it is {observed}", place
            )
        if node.node in written and node.node not in ack_by_node:
            expected = f"a record names node {node.node}, which store {written[node.node]} writes"
            return failure(expected, "none does", place, AtTransfer(written[node.node]))
    if gone := sorted({*ack_by_node} - {*step.nodes}):
        return failure(
            "records name nodes of the tree", f"node {gone[0]} is gone", AtTreeNode(gone[0])
        )
    acks = {(job.load, ack) for job in step.after.transfers for ack in job.acks}
    for record in step.after.records:
        if (record.load, record.ack) not in acks:
            what = f"the {'load' if record.load else 'store'} of node {record.ack}"
            return failure(
                f"{what} is in flight, for it has a record", "it is not", AtTreeNode(record.ack)
            )
    return None
