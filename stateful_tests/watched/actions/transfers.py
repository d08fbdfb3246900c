"""Actions of a server of a pair: its own side of each transfer. Its batches are not replayed.

A room is open from the first KV that the prefill server sends, or the decode server names, until that has
arrived or is given back. Pages are compared in logs of level `pages` alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from impl.sglang.server import events as log
from stateful_tests.watched import deviations
from stateful_tests.watched.log_follower import LogFollower, Diverged, action
from stateful_tests.watched.log_facts import Crossing

_UNDER_WAY = "bootstrapping", "waiting", "transferring"


@action(log.Queued)
def queued(beside: LogFollower, e: log.Queued) -> None:
    beside.step.at = e.at
    beside.transfers.ask(e.room, Crossing(e.request, e.tokens))


@action(log.KVSent, compared="tokens that it sends: each once, and at the end all")
def sent(beside: LogFollower, e: log.KVSent) -> None:
    crossing = beside.transfers.open(e.room, e.request, e.start)
    beside.result.compared += 1
    if e.start != crossing.end:
        said = f"{e.request}: sends [{e.start}, {e.end})"
        beside.report(Diverged("PD-6", f"{e.request}: sends from {crossing.end} on", said))
    elif e.last and e.end < crossing.tokens:
        said = f"{e.request}: the last part ends at {e.end}"
        beside.report(Diverged("PD-6", f"{e.request}: sends all {crossing.tokens} tokens", said))
    crossing.goes_on(e.end, e.pages, last=e.last)
    beside.result.reach("a prompt that is sent in parts", crossing.parts == 2)


@action(log.KVNamed)
def named(beside: LogFollower, e: log.KVNamed) -> None:
    crossing = beside.transfers.open(e.room, e.request, e.start)
    crossing.goes_on(e.end, e.pages, last=True)
    beside.result.reach("a prefix that the decode server has", e.start > 0)


@action(log.KVArrived, compared="pages: those that were named")
def arrived(beside: LogFollower, e: log.KVArrived) -> None:
    crossing = beside.transfers.rooms.get(e.room)
    if crossing is not None:
        _still_has(beside, "XFER-2", crossing, e.pages)
        crossing.is_open, crossing.arrived = False, True


@action(log.KVGivenBack, compared="the transfer is over; pages: those that were sent or named")
def given_back(beside: LogFollower, e: log.KVGivenBack) -> None:
    crossing = beside.transfers.rooms.get(e.room)
    if crossing is None:
        return
    prefill = beside.header.role == "prefill"
    clause = "PD-1" if prefill else "XFER-2"
    beside.result.compared += 1
    beside.result.reach("a transfer that fails", e.status == "failed")
    if e.status in _UNDER_WAY:
        want = f"{e.request}: keeps {crossing.span} until the transfer is over"
        beside.report(Diverged(clause, want, f"gives it back, and the room is {e.status}"))
    elif e.status != "failed":
        _still_has(beside, clause, crossing, e.pages)
    crossing.is_open, crossing.status = False, e.status


@action(
    log.Rested,
    compared="memory, rows and rooms: nothing is kept, at two rests in a row, for requests that have ended",
)
def rested(beside: LogFollower, e: log.Rested) -> None:
    beside.step.at = e.at
    beside.result.compared += 1
    seen: dict[str, tuple[str, str, Crossing | None]] = {}
    transfers = beside.transfers
    if e.tokens > 0:
        seen[f"keeps {e.tokens} tokens"] = "PD-2", "tokens", None
    for what, much in e.kept.items():
        seen[f"keeps {what}: {much}"] = "PD-5", what, None
    for table, rooms in e.rooms.items():
        for room in rooms:
            crossing = transfers.rooms.get(room)
            if crossing is not None and table != _BY_A_THREAD:  # else the peer was first
                seen[f"{table} has the room of {crossing.request}"] = "PD-5", table, crossing
    for says, (clause, what, crossing) in seen.items():
        if says in transfers.kept and says not in transfers.told:
            transfers.told.add(says)
            known = None
            if crossing is None or crossing.status != "success":  # none of them ends so
                sent = crossing is not None and crossing.parts > 0
                known = deviations.kept_for_a_peer(beside.header, what, sent=sent)
            beside.report(Diverged(clause, "keeps nothing of requests that have ended", says, known=known))
    transfers.kept = {*seen}


# Rooms that a thread takes out, once what it still writes for them has left.
_BY_A_THREAD = "_deferred_ack_targets"


def _still_has(beside: LogFollower, clause: str, crossing: Crossing, pages: list[int] | None) -> None:
    """The pages of a request are those that cross."""
    if pages is None or crossing.pages is None:
        return
    beside.result.compared += len(pages)
    for at, (want, got) in enumerate(zip(crossing.pages, pages)):
        if want != got:
            position = crossing.start + at * beside.header.page_size
            wanted = f"{crossing.request}: page {want} at position {position}, which crosses"
            known = deviations.replaced_before_sent(beside.header)
            beside.report(Diverged(clause, wanted, f"page {got} is there", known=known))
            return


def joined(prefill: LogFollower, decode: LogFollower) -> Iterator[Diverged]:
    """Compare both logs of a pair, room by room: what the decode server counts as received, the prefill
    server has sent."""
    for room, there in decode.transfers.rooms.items():
        here = prefill.transfers.rooms.get(room)
        if here is None or not there.arrived or here.request != there.request:
            continue
        decode.result.compared += 1
        if not here.is_sent:
            yield Diverged("PD-6", f"{there.request}: the peer has sent all", "it has not")
        elif here.span != there.span:
            want = f"{there.request}: {there.span}, which the decode server has named"
            yield Diverged("PD-6", want, f"the prefill server has sent {here.span}")
