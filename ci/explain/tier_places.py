"""Facts about the slots, nodes and transfers of a tree with a host tier."""

from __future__ import annotations

from ci.explain.fact_history import Past
from ci.explain.places import Fact
from reference.failures import AtCount, AtSlot, AtTransfer, AtTreeNode, Place
from reference.tiers.facts import TierFacts, TierTransfer
from stateful_tests.lockstep.run_moments import TierMoment


def place_name(place: Place, m: TierMoment) -> str:
    del m
    match place:
        case AtSlot(pool, slot, host):
            return f"{_tier_name(host)} {pool} slot {slot}"
        case AtTreeNode(node):
            return f"node {node}"
        case AtTransfer(job):
            return f"transfer {job}"
        case AtCount(who):
            return who
    return ""


def facts_at(place: Place, m: TierMoment) -> list[Fact]:
    """Return the facts about a place, as in ci.explain.places. A slot is free, a node's, or a transfer's. A
    node has KV, locks and marks."""
    facts = m.facts
    match place:
        case AtSlot(pool, slot, host):
            return _slot_facts(facts, pool, slot, host)
        case AtTreeNode(node):
            return _node_facts(facts, node)
        case AtTransfer(job):
            transfers = [
                Fact("", _progress_text(transfer)) for transfer in facts.transfers if transfer.job == job
            ]
            operations = [
                Fact("", f"is at: {op.state}") for op in facts.operations if op.job == job
            ]
            return transfers + operations
    return []


def _progress_text(transfer: TierTransfer) -> str:
    """Return the progress of a transfer, in words."""
    if transfer.completed:
        return "has completed"
    return "has copied" if transfer.copied else "waits"


def _tier_name(host: bool) -> str:
    return "host" if host else "device"


def _slot_facts(facts: TierFacts, pool: str, slot: int, host: bool) -> list[Fact]:
    """Return the facts about a slot: whether it is free, the nodes and requests that have it, the transfers
    that read or write it.

    host: a slot of host memory, otherwise of the device.
    """
    free = (facts.host_free if host else facts.free).get(pool, ())
    about_slot = [Fact("", "is free", "was free")] if slot in free else []
    for node in facts.nodes:
        if slot in (node.host if host else node.device).get(pool, ()):
            about_slot.append(Fact(f"node {node.node}", "has it"))
    if not host:
        for request in facts.requests:
            if slot in request.slots.get(pool, ()):
                about_slot.append(Fact(request.name, "has it"))
            if slot in request.writing.get(pool, ()):
                about_slot.append(Fact(f"the prefill server of {request.name}", "writes it"))
        for send in facts.sends:
            if send.pool == pool and slot in send.slots:
                about_slot.append(Fact(f"the decode server of {send.name}", "reads it"))
    for job in facts.transfers:
        if any(
            (part.host if host else part.device) == slot and part.pool == pool for part in job.parts
        ):
            verb = "writes" if job.load != host else "reads"
            about_slot.append(Fact(job.label, f"{verb} it"))
    if host:
        about_slot += _storage_facts(facts, pool, slot)
    return about_slot


def _storage_facts(facts: TierFacts, pool: str, slot: int) -> list[Fact]:
    """Return the operations of a storage that concern a host slot."""
    about_slot = []
    for op in facts.operations:
        if slot in op.moving.get(pool, ()):
            about_slot.append(
                Fact(op.label, "is to write it to the storage" if op.back else "writes it")
            )
        elif slot in op.slots.get(pool, ()) and not op.back:
            about_slot.append(Fact(op.label, "has it"))
    if slot in facts.returned.get(pool, ()):
        about_slot.append(Fact("", "waits to be freed"))
    return about_slot


def _node_facts(facts: TierFacts, number: int) -> list[Fact]:
    for node in facts.nodes:
        if node.node == number:
            has = [
                name
                for host, slots in ((False, node.device), (True, node.host))
                for name in (f"{_tier_name(host)} {pool}" for pool, pool_slots in slots.items() if pool_slots)
            ]
            about_node = [Fact("", f"has {' and '.join(has)} KV" if has else "has no KV")]
            users = [user.name for user in facts.users if user.node == number]
            return about_node + [Fact(name, "has locked it") for name in dict.fromkeys(users)]
    return [Fact("", "is not in the tree")]


def events(past: Past[TierMoment]) -> list[str]:
    """Return events that the facts of one moment do not show: since when a node is as it is after a
    split."""
    texts = []
    for place in past.violation.failure.at[:1]:
        if isinstance(place, AtTreeNode):
            start = next((n.start for n in past.now.facts.nodes if n.node == place.node), None)
            for step, moment in reversed(list(enumerate(past.moments, past.run.history_start))):
                was = next((n.start for n in moment.facts.nodes if n.node == place.node), start)
                if was != start:
                    now = f"{past.command(step + 1)} split node {place.node}"
                    texts.append(f"{now}: it began at {was} and begins at {start}")
                    break
    return texts
