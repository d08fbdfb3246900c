"""The explanation of a pair states facts of its blocks, tables and requests, and of the network between."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ci.explain import block_places
from ci.explain.fact_history import Past
from ci.explain.places import Fact
from reference.failures import AtCount, AtNamed, AtServer, Failure, Place
from reference.pairs.config import DECODE, SERVERS
from stateful_tests.lockstep.run_moments import EngineMoment, PairMoment


def on_server(moment: PairMoment, server: str) -> EngineMoment:
    """Return one server at that moment, as an engine."""
    sides = moment.step.sides if moment.step is not None else {}
    return EngineMoment(moment.facts.of(server), sides.get(server))


def place_name(place: Place, m: PairMoment) -> str:
    match place:
        case AtServer(server, inner):
            name = block_places.place_name(inner, on_server(m, server))
            return f"{name} of {server}" if name else ""
        case AtCount(who) | AtNamed(_, who):
            return who
    return ""


def facts_at(place: Place, m: PairMoment) -> list[Fact]:
    """Return the facts about a place, as in ci.explain.places."""
    match place:
        case AtServer(server, inner):
            return block_places.facts_at(inner, on_server(m, server))
        case AtNamed("request", name):
            facts_found = (block_places.facts_at(place, on_server(m, server)) for server in SERVERS)
            states = [reader.state.value for reader in m.facts.readers if reader.request == name]
            return [*next(filter(None, facts_found), []), *(Fact("", state) for state in states[:1])]
    return []


def events(past: Past[PairMoment]) -> list[str]:
    """Return events that the facts of one moment do not show: the last writer of a block, and what a
    query sees."""
    places = [place for place in past.violation.failure.at if isinstance(place, AtServer)]
    if not places:
        return []
    server = places[0].server
    inner = tuple(place.place for place in places if place.server == server)
    stake = block_places.blocks_of(inner, on_server(past.now, server))
    sent = [_last_transfers(past, block) for block in sorted(stake)] if server == DECODE else []
    if any(sent):
        return [text for text in sent if text]
    return block_places.events(_server_past(past, server, inner))


def _server_past(past: Past[PairMoment], server: str, places: tuple[Place, ...]) -> Past[EngineMoment]:
    """Return the past of one server."""
    history = tuple(on_server(moment, server) for moment in past.moments)
    failure = past.violation.failure
    server_failure = Failure(failure.expected, failure.observed, lambda: places, failure.head)
    return Past(past.run, replace(past.violation, failure=server_failure), history)


def _last_transfers(past: Past[PairMoment], block: int) -> str:
    """Return the transfers that moved bytes into a block of D, and when; all of the last command that
    moved some."""
    moves_by_block: dict[int, list[str]] = {}
    copied: set[int] = set()
    for index, moment in enumerate(past.moments, past.run.history_start):
        for job in moment.facts.transfers:
            if not job.copied or job.number in copied:
                continue
            copied.add(job.number)
            sources = dict.fromkeys(
                str(source) for _, target, source in job.moves if target == block
            )
            if sources:
                names = " and ".join(sources)
                moves_by_block.setdefault(index, []).append(
                    f"transfer {job.number} moved block {names} of P into block {block} of D"
                )
    if not moves_by_block:
        return ""
    last = max(moves_by_block)
    return f"{' and '.join(moves_by_block[last])} in {past.command(last)}"


def wire(moment: PairMoment) -> Iterator[str]:
    """Return each message and transfer between the servers in words."""
    facts = moment.facts
    for promise in facts.promises:
        if promise.held:
            readers = [
                f"{reader.request} {reader.state.value}" for reader in facts.readers_of(promise.request)
            ]
            yield f"P keeps {promise.request} for D: {', '.join(readers) or 'nobody was told yet'}"
    for job in facts.transfers:
        reached = {"failed": job.failed, "ended": job.over, "has moved": job.copied, "waits": True}
        state = next(words for words, holds in reached.items() if holds)
        moves = ", ".join(f"{source} to {target}" for _, target, source in job.moves)
        yield f"transfer {job.number} for {job.reader or 'nobody'} ({state}): blocks {moves}"
    for message in facts.messages:
        verb = "renews" if message.renews else "no more need of"
        yield f"message to {message.to}: {verb} {' '.join(message.requests)}"
    yield from (f"{server} waits for a handshake" for server in facts.handshakes)
    yield f"{facts.clock:g} s"
