"""Slots of either tier: how they are called, their places, their stamps, and the two ends of a transfer."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from reference.failures import AtSlot
from reference.tiers.facts import Slots, TierFacts, TierPart, TierTransfer

Slot = tuple[bool, str, int]  # on the host, pool, slot


def host_slots(slots: Slots) -> Iterator[Slot]:
    """Yield the host slots of these pools."""
    for pool, pool_slots in slots.items():
        for slot in pool_slots:
            yield True, pool, slot


def stamp_in_slot(facts: TierFacts, slot: Slot) -> int:
    """Return the stamp in a slot, 0 for none."""
    host, pool, at = slot
    return (facts.host_memory if host else facts.memory)[pool][at]


def source(job: TierTransfer, part: TierPart) -> Slot:
    """Return the slot that a transfer reads."""
    return (True, part.pool, part.host) if job.load else (False, part.pool, part.device)


def target(job: TierTransfer, part: TierPart) -> Slot:
    """Return the slot that a transfer writes."""
    return (False, part.pool, part.device) if job.load else (True, part.pool, part.host)


@cache
def slot_name(slot: Slot) -> str:
    """Return the name of a slot, such as "host swa slot 5"."""
    return f"{'host' if slot[0] else 'device'} {slot[1]} slot {slot[2]}"


@cache
def at_slot(slot: Slot) -> AtSlot:
    """Return a slot as the place of a failure."""
    host, pool, number = slot
    return AtSlot(pool, number, host)
