"""Actions of a server of a pair: its own side of each transfer. Its batches are not replayed.

A room is open from the first KV that the prefill server sends, or the decode server names, until that has
arrived or is given back. Pages are compared only in logs of level `pages`.
"""

from __future__ import annotations

from collections.abc import Iterator

from impl.sglang.server import events as log
from stateful_tests.watched import deviations
from stateful_tests.watched.log_follower import LogFollower, Diverged, action
from stateful_tests.watched.log_facts import Crossing

_UNDER_WAY = "bootstrapping", "waiting", "transferring"


@action(log.Queued)
def on_queued(follower: LogFollower, event: log.Queued) -> None:
    follower.step.at = event.at
    follower.transfers.add_room(event.room, Crossing(event.request, event.tokens))


@action(log.KVSent, compared="tokens that it sends: each once, and at the end all")
def on_sent(follower: LogFollower, event: log.KVSent) -> None:
    crossing = follower.transfers.open(event.room, event.request, event.start)
    follower.result.compared += 1
    if event.start != crossing.end:
        observed = f"{event.request}: sends [{event.start}, {event.end})"
        follower.report(Diverged("PD-6", f"{event.request}: sends from {crossing.end} on", observed))
    elif event.last and event.end < crossing.tokens:
        observed = f"{event.request}: the last part ends at {event.end}"
        follower.report(Diverged("PD-6", f"{event.request}: sends all {crossing.tokens} tokens", observed))
    crossing.add_part(event.end, event.pages, last=event.last)
    follower.result.reach("a prompt that is sent in parts", crossing.parts == 2)


@action(log.KVNamed)
def on_named(follower: LogFollower, event: log.KVNamed) -> None:
    crossing = follower.transfers.open(event.room, event.request, event.start)
    crossing.add_part(event.end, event.pages, last=True)
    follower.result.reach("a prefix that the decode server has", event.start > 0)


@action(log.KVArrived, compared="pages: those that were named")
def on_arrived(follower: LogFollower, event: log.KVArrived) -> None:
    crossing = follower.transfers.rooms.get(event.room)
    if crossing is not None:
        _check_pages_held(follower, "XFER-2", crossing, event.pages)
        crossing.is_open = False
        crossing.arrived = True


@action(log.KVGivenBack, compared="the transfer is over; pages: those that were sent or named")
def on_given_back(follower: LogFollower, event: log.KVGivenBack) -> None:
    crossing = follower.transfers.rooms.get(event.room)
    if crossing is None:
        return
    prefill = follower.header.role == "prefill"
    clause = "PD-1" if prefill else "XFER-2"
    follower.result.compared += 1
    follower.result.reach("a transfer that fails", event.status == "failed")
    if event.status in _UNDER_WAY:
        expected = f"{event.request}: keeps {crossing.span} until the transfer is over"
        follower.report(Diverged(clause, expected, f"gives it back, and the room is {event.status}"))
    elif event.status != "failed":
        _check_pages_held(follower, clause, crossing, event.pages)
    crossing.is_open = False
    crossing.status = event.status


@action(
    log.Rested,
    compared="memory, rows and rooms: nothing is kept, at two rests in a row, for requests that have ended",
)
def on_rested(follower: LogFollower, event: log.Rested) -> None:
    """Report what a server at rest keeps of requests that have ended, if it kept the same at its rest
    before."""
    follower.step.at = event.at
    follower.result.compared += 1
    faults_seen: dict[str, tuple[str, str, Crossing | None]] = {}
    transfers = follower.transfers
    if event.tokens > 0:
        faults_seen[f"keeps {event.tokens} tokens"] = "PD-2", "tokens", None
    for part, much in event.kept.items():
        faults_seen[f"keeps {part}: {much}"] = "PD-5", part, None
    for table, rooms in event.rooms.items():
        for room in rooms:
            crossing = transfers.rooms.get(room)
            if crossing is not None and table != _BY_A_THREAD:  # a thread takes those out later
                faults_seen[f"{table} has the room of {crossing.request}"] = "PD-5", table, crossing
    for says, (clause, part, crossing) in faults_seen.items():
        if says in transfers.kept and says not in transfers.reported:
            transfers.reported.add(says)
            known = None
            if crossing is None or crossing.status != "success":  # no known fault keeps the room of one
                sent = crossing is not None and crossing.parts > 0
                known = deviations.fault_of_kept_tokens(follower.header, part, sent=sent)
            follower.report(Diverged(clause, "keeps nothing of requests that have ended", says, known=known))
    transfers.kept = {*faults_seen}


# Rooms that a thread takes out, once what it still writes for them has left.
_BY_A_THREAD = "_deferred_ack_targets"


def _check_pages_held(
    follower: LogFollower, clause: str, crossing: Crossing, pages: list[int] | None
) -> None:
    """Compare the pages of a request with those that are transferred, as far as both are known."""
    if pages is None or crossing.pages is None:
        return
    follower.result.compared += len(pages)
    for index, (sent_page, held_page) in enumerate(zip(crossing.pages, pages, strict=False)):
        if sent_page != held_page:
            position = crossing.start + index * follower.header.page_size
            expected = f"{crossing.request}: page {sent_page} at position {position}, which crosses"
            known = deviations.fault_of_replaced_page(follower.header)
            follower.report(Diverged(clause, expected, f"page {held_page} is there", known=known))
            return


def compare_pair_logs(prefill: LogFollower, decode: LogFollower) -> Iterator[Diverged]:
    """Compare both logs of a pair, room by room: whatever the decode server counts as received, the
    prefill server has sent."""
    for room, received in decode.transfers.rooms.items():
        sent = prefill.transfers.rooms.get(room)
        if sent is None or not received.arrived or sent.request != received.request:
            continue
        decode.result.compared += 1
        if not sent.is_sent:
            yield Diverged("PD-6", f"{received.request}: the peer has sent all", "it has not")
        elif sent.span != received.span:
            expected = f"{received.request}: {received.span}, which the decode server has named"
            yield Diverged("PD-6", expected, f"the prefill server has sent {sent.span}")
