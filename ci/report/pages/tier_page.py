"""The page of a tree with a host tier: nodes with their slots on both tiers, the pools, what moves."""

from itertools import pairwise

from reference.tiers.config import TierConfig
from ci import Data
from ci.report import text_output
from reference.failures import AtSlot, AtTreeNode
from reference.prefix_cache import path_text
from reference.tiers.facts import (
    METADATA,
    TierFacts,
    TierNode,
    TierOperation,
    TierRequest,
    TierSend,
    TierTransfer,
)
from stateful_tests.lockstep.run_moments import TierMoment
from stateful_tests.lockstep.run_results import Run
from stateful_tests.traces.notation import format_command, format_outcome

HUES = 6
MAX_STEPS = 200  # a page of a long trace shows its end
Stake = tuple[set[tuple[bool, str, int]], set[int]]  # slots and nodes that a failure is about


def states(run: Run) -> list[Data]:
    """Return the data of the page, a step each, with nodes in the place of an engine's requests."""
    history = run.moments(TierMoment)
    first_step = max(run.history_start, len(run.rows) - MAX_STEPS - 1)
    pairs = enumerate(pairwise(history), run.history_start + 1)
    return [_state(run, at, was, now) for at, (was, now) in pairs if at > first_step]


def _state(run: Run, step_index: int, was: TierMoment, now: TierMoment) -> Data:
    """Return the template's data of the step `step_index`: the tree, both tiers, and the transfers under
    way."""
    row = run.rows[step_index]
    facts = now.facts
    config = run.trace.sizes(TierConfig)
    violation = run.violation if run.violation is not None and run.violation.step == step_index else None
    places = violation.failure.at if violation is not None else ()
    stake = (
        {(p.host, p.pool, p.slot) for p in places if isinstance(p, AtSlot)},
        {p.node for p in places if isinstance(p, AtTreeNode)},
    )
    page = config.page_size
    device_slots = range(page, (config.full_pages + 1) * page)
    pool = _pool_slots(device_slots, facts, was.facts, stake, host=False)
    return {
        "step": step_index, "command": format_command(row.command), "outcome": format_outcome(row.outcome),
        "violates": violation is not None, "changes": list(row.tree),
        "requests": [_node_row(node, was.facts, stake) for node in facts.nodes],
        "pool": pool, "free": sorted(facts.free["full"]), "in_flight": 0,
        "host": _pool_slots(
            range(config.host_slots("full")), facts, was.facts, stake, host=True
        ),
        "moving": [
            *map(_transfer_text, facts.transfers), *map(_operation_text, facts.operations),
            *map(_request_text, facts.requests), *map(_sent_parts_text, facts.sends),
        ],
    }  # fmt: skip


def _node_row(node: TierNode, was: TierFacts, stake: Stake) -> Data:
    """Return a node: its slots by tier and pool, its locks and marks."""
    before = next((n for n in was.nodes if n.node == node.node), None)
    groups = []
    for host, slots in ((False, node.device), (True, node.host)):
        for pool, own in slots.items():
            counted = (node.pins if host else node.locks)[pool]
            slots_before: tuple[int, ...] = ()
            if before is not None:
                slots_before = (before.host if host else before.device)[pool]
            cells = [{
                "number": node.start + i, "tags": [str(slot)], "hue": f"o{node.node % HUES}", "hash": False,
                "wrong": (host, pool, slot) in stake[0] or node.node in stake[1],
                "changed": slot not in slots_before, "title": f"position {node.start + i}",
            } for i, slot in enumerate(own)]  # fmt: skip
            locked = f", locked {counted} times" if counted else ""
            groups.append(
                {"title": f"{'host' if host else 'device'} {pool}{locked}", "cells": cells}
            )
    marks = [
        f"waits for {what} of node {at}"
        for what, at in (("the store", node.storing), ("the load", node.loading))
        if at >= 0
    ]
    parent = f"under node {node.parent}" if node.parent else "under the root"
    return {
        "name": f"node {node.node}",
        "hue": f"o{node.node % HUES}",
        "status": parent,
        "sure": None,
        "ran": ", ".join(marks),
        "tokens": len(node.stamps),
        "computed": path_text(node.stamps),
        "groups": groups,
    }


def _pool_slots(
    slots: range, facts: TierFacts, was: TierFacts, stake: Stake, *, host: bool
) -> list[Data]:
    """Return slots of full KV, and the nodes that have them.

    host: they are in host memory, otherwise on the device.
    """
    owners = _slot_owners(facts, host)
    before = _slot_owners(was, host)
    memory = (facts.host_memory if host else facts.memory)["full"]
    return [
        {
            "number": slot,
            "tags": [str(owners[slot])] if slot in owners else [],
            "hash": False,
            "wrong": (host, "full", slot) in stake[0],
            "changed": owners.get(slot) != before.get(slot),
            "hue": f"o{owners[slot] % HUES}" if slot in owners else "free",
            "title": f"slot {slot}: {path_text((memory[slot],)) if memory[slot] else 'nothing'}",
        }
        for slot in slots
    ]


def _slot_owners(facts: TierFacts, host: bool) -> dict[int, int]:
    """Return the node that has each slot of full KV on a tier."""
    return {
        slot: node.node
        for node in facts.nodes
        for slot in (node.host if host else node.device)["full"]
    }


def _transfer_text(job: TierTransfer) -> str:
    """Return a transfer in flight, in words."""
    reached = {"completed": job.completed, "copied": job.copied, "sent": job.sent, "queued": True}
    state = next(word for word, holds in reached.items() if holds)
    parts = ", ".join(f"{part.pool} {part.device}:{part.host}" for part in job.parts)
    return f"{job.label} ({state}), device:host {parts}"


def _operation_text(operation: TierOperation) -> str:
    """Return an operation of the storage, in words."""
    slots = ", ".join(f"{pool} {slot}" for pool, own in operation.slots.items() for slot in own)
    return f"{operation.label} ({operation.state}), host {slots or 'nothing yet'}"


def _request_text(request: TierRequest) -> str:
    """Return a request of a server with one role, in words."""
    own = ", ".join(f"{pool} {slot}" for pool, slots in request.slots.items() for slot in slots)
    to_write = sum(map(len, request.writing.values()))
    more = f"; {to_write} slots are still to be written" if to_write else ""
    return f"{request.name} ({request.state}), device {own or 'nothing'}{more}"


def _sent_parts_text(send: TierSend) -> str:
    """Describe the parts that a server has handed in to be sent."""
    slots = ", ".join(map(str, send.slots))
    sent = f"row {slots} of metadata" if send.pool == METADATA else f"device {send.pool} {slots}"
    return f"{sent}: to be read for {send.name}, from position {send.position} on"


def content(data: Data, run: Run) -> Data:
    """Return the values for the template besides the head of every page."""
    steps = states(run)
    names = list(dict.fromkeys(request["name"] for step in steps for request in step["requests"]))
    rows = []
    for step in steps:
        request_by_name = {request["name"]: request for request in step["requests"]}
        cells = [_node_cell(request_by_name[name]) if name in request_by_name else "" for name in names]
        cells.append(str(len(step["free"])))
        rows.append({"step": step["step"], "what": step["command"], "cells": cells})
    return {
        "steps": steps,
        "left_out": len(run.rows) - len(steps),
        "start": max(0, len(steps) - 1),
        "step_table": {"columns": [*names, "free"], "rows": rows},
        "story_open": True,
        "windows": False,
        "sizes": dict.fromkeys(
            text_output.sizes(text_output.sizes_of_trace(data["trace"])).split(", "), True
        ),
        "tree": True,
    }


def _node_cell(node: Data) -> str:
    """Return the tiers on which a node has KV, by pool."""
    titles = [group["title"].partition(",")[0] for group in node["groups"] if group["cells"]]
    return f"{node['computed']}: {', '.join(titles) or 'nothing'}"
