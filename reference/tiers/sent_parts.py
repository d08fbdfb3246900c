"""Parts of requests that a prefill server hands in to be sent to a decode server (PD)."""

from __future__ import annotations

from collections.abc import Iterator

from reference.failures import AtCount, Failure, Place, failure
from reference.tiers.facts import METADATA, TierFacts, TierRequest, TierRequestState, TierSend
from reference.tiers.slot_owners import SlotOwners
from reference.tiers.slots import at_slot, slot_name


class SentParts(SlotOwners):
    """The part of a TierStep for KV sent to decode servers: a `HandsOver`
    (reference.clauses.disaggregation)."""

    before: TierFacts

    def parts_needed(self) -> Iterator[TierSend]:
        """Yield parts that were handed in to be sent and are not read yet."""
        yield from self.after.sends

    def arrivals(self) -> Iterator[TierSend | TierRequest]:
        """Yield parts that this command handed in, and requests whose last part was handed in."""
        yield from self._parts_handed_in()
        for request in self.after.requests:
            if request.due < 0 or request.state == TierRequestState.SENDS:
                yield request

    def _parts_handed_in(self) -> list[TierSend]:
        """Return the parts that this command handed in."""
        known = {send.job for send in self.before.sends}
        return [send for send in self.after.sends if send.job not in known]

    def lost_kv(self) -> Iterator[Failure]:
        """Yield slots of parts not read yet that are free, or were written."""
        was = {send.job: send.found for send in self.before.sends}
        for send in self.after.sends:
            at_first = was.get(send.job, send.found)
            for at, slot in enumerate(send.slots):
                want = f"{_part_slot_text(send, at)} stays as it is until it is read for {send.name}"
                if self._is_free(send.pool, slot):
                    yield failure(want, "it is free", _slot_place(send, slot))
                elif at < len(send.found) and send.found[at] != at_first[at]:
                    yield failure(want, "it was written", _slot_place(send, slot))

    def _is_free(self, pool: str, slot: int) -> bool:
        if pool == METADATA:
            return slot in self.after.free_first
        return bool(self.free[False, pool, slot])

    def wrongly_sent(self) -> Iterator[Failure]:
        """Yield parts with other KV than their position has, and requests of which too little or too
        much was handed in."""
        for send in self._parts_handed_in():
            for index, (found, wanted) in enumerate(zip(send.found, send.wanted, strict=True)):
                if found != wanted:
                    slot = send.slots[index]
                    place = _part_place(send, index)
                    expected = f"{_part_slot_text(send, index)} is sent as {place} of {send.name}"
                    observed = "KV of another token" if found else "nothing"
                    if send.pool == METADATA:
                        observed = "what another request left" if found else "nothing"
                    yield failure(expected, f"it holds {observed}", _slot_place(send, slot))
        for request in self.after.requests:
            if request.due < 0 or (request.due and request.state == TierRequestState.SENDS):
                expected = f"each page that the decode server of {request.name} expects is handed in once"
                more = "too few" if request.due > 0 else "too many"
                observed = f"{abs(request.due)} {more}"
                yield failure(expected, observed, AtCount(request.name, "pages to send"))


def _part_slot_text(send: TierSend, index: int) -> str:
    """Return the name of a part's slot at an index, such as "device full slot 5"."""
    if send.pool == METADATA:
        return f"row {send.slots[index]} of metadata"
    return slot_name((False, send.pool, send.slots[index]))


def _part_place(send: TierSend, index: int) -> str:
    return METADATA if send.pool == METADATA else f"position {send.position + index}"


def _slot_place(send: TierSend, slot: int) -> Place:
    if send.pool == METADATA:
        return AtCount(send.name, "row of metadata", slot)
    return at_slot((False, send.pool, slot))
