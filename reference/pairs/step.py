"""One command on a pair, with what its clauses ask about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from reference.blocks.clauses import BlockStep
from reference.blocks.facts import Table
from reference.failures import AtBlock, AtNamed, AtServer, Failure, failure
from reference.standstill_detector import Standstill
from reference.pairs.pair_record import PairRecord
from reference.pairs.commands import PairCommand
from reference.pairs.config import DECODE, PREFILL, SERVERS, PairConfig
from reference.pairs.facts import PairFacts, Promise, ReaderState
from reference.recurrent_states import misread, stamp_after


@dataclass(eq=False)
class PairStep:
    """A command on a pair, and its state before and after it.

    before, after: the facts of the pair.
    refused: the command changed nothing.
    sides: the step of each server, by its name.
    record: the record of the run, after the command.
    """

    config: PairConfig
    command: PairCommand
    refused: bool
    before: PairFacts
    after: PairFacts
    sides: Mapping[str, BlockStep]
    record: PairRecord

    @property
    def standstill(self) -> Standstill | None:
        """The standstill of the pair, with every timeout passed in between."""
        return None if self.refused else self.record.progress.standstill

    @property
    def in_time(self) -> Standstill | None:
        """The standstill of the pair while the clock stood still."""
        return None if self.refused else self.record.progress.in_time

    @property
    def unanswered(self) -> dict[str, str]:
        """The status of each request that has no answer."""
        return {
            name: f"at {server} {fact.status}"
            for server in SERVERS
            for name, fact in self.after.of(server).requests.items()
        }

    @property
    def room(self) -> str:
        """The free blocks, in words."""
        free = (f"{server} has {len(self.after.of(server).free)} blocks free" for server in SERVERS)
        return ", ".join(free)

    def parts_needed(self) -> Iterator[Promise]:
        """Yield promises that a request reads, or may yet be told to."""
        for promise in self.after.promises:
            if self.record.is_needed(self.after, promise):
                yield promise

    def lost_kv(self) -> Iterator[Failure]:
        """Yield blocks of promises that are free or were written."""
        was = self.before.prefill
        now = self.after.prefill
        before = {promise.request for promise in self.before.promises}
        for promise in self.parts_needed():
            for group, row in enumerate(promise.blocks):
                for block in filter(None, row):
                    if not now.refs[block]:
                        yield self._lost_block(promise, group, block, "it is free")
                    if promise.request in before and was.memory[block] != now.memory[block]:
                        yield self._lost_block(promise, group, block, "it was written")

    def _lost_block(self, promise: Promise, group: int, block: int, how: str) -> Failure:
        readers = ", ".join(reader.request for reader in self.after.readers_of(promise.request))
        keep = f"P keeps block {block} (group {group}) of {promise.request}"
        places = AtBlock(block), AtNamed("request", promise.request)
        at_server = (AtServer(PREFILL, place) for place in places)
        return failure(f"{keep} for {readers or 'whoever is to read it'}", how, *at_server)

    @property
    def excused_requests(self) -> set[str]:
        """Requests of P whose KV only a lease frees: the client has gone, or the network has failed."""
        return self.record.dropped | self.record.faulted

    def arrivals(self) -> Iterator[tuple[str, int]]:
        """Yield the requests of D whose KV has arrived with this command, and their computed tokens."""
        waited = {reader.request for reader in self.before.readers if reader.state is ReaderState.WAITS}
        for reader in self.after.readers:
            fact = self.after.decode.requests.get(reader.request)
            if reader.request in waited and reader.state is ReaderState.READ and fact is not None:
                yield reader.request, fact.computed

    def wrongly_sent(self) -> Iterator[Failure]:
        """Yield positions that D counts as computed and that hold other KV."""
        side = self.sides[DECODE]
        texts = self.record.texts[DECODE]
        for name, computed in self.arrivals():
            bearer = texts.bearers.get(name)
            if bearer is None:
                continue
            stamps = bearer.stamps
            tables = self.after.decode.requests[name].tables
            end = min(computed, len(stamps))
            misread = side.misread(name, tables, stamps, end, end)
            if misread is None:
                misread = next(_wrong_states(side, name, tables, stamps, end), None)
            if misread is not None:
                places = (AtServer(DECODE, place) for place in misread.at)
                expected = f"D counts {computed} tokens of {name} as sent by P: {misread.expected}"
                yield failure(expected, misread.observed, *places)


def _wrong_states(
    side: BlockStep, name: str, tables: Table, stamps: Sequence[int], end: int
) -> Iterator[Failure]:
    """Yield recurrent groups in which no block of a request has the state after the first `end` tokens."""
    if not end:
        return
    for group in side.config.recurrent:
        blocks = [block for block in tables[group] if block]
        held = [side.after.memory[block] for block in blocks]
        wrong = [
            (misread(parts, stamp_after(stamps, end), stamps) if owner == group else "is none")
            for owner, parts in held
        ]
        if None not in wrong:
            expected = f"{name} finds the state after its first {end} tokens in group {group}"
            each = (f"that of block {block}: {what}" for block, what in zip(blocks, wrong))
            yield failure(expected, ", ".join(each) or "its table has no block", *map(AtBlock, blocks))
