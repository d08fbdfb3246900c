"""The state of an engine by hand: texts, tables, contents and host memory, and the facts that follow.

What is not stated is derived, so that it fits: contents from what ran, ref counts and the free queue from
tables, the cache's map from hashes.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain

from reference.blocks.commands import Add, More, client_tokens
from reference.blocks.config import EngineConfig
from reference.blocks.facts import (
    BlockFacts, HostFacts, HostKey, Lane, Output, Published, RequestFact, StateUse, StorageJob, StoredChunk,
    Table, Transfer, chained,
)  # fmt: skip
from reference.blocks.request_texts import RequestTexts
from stateful_tests.tests.vllm.image_scenes import encoder_of
from stateful_tests.tests.vllm.storage_statements import pins_by


@dataclass
class EngineByHand:
    """The state of an engine after the lines so far.

    texts: of each request with what was sampled for it.
    given: with what its client got.
    waiting: tokens of a next turn, until the one before ends.
    keys, chunks, transfers: of host memory.
    kept, pinned: blocks.
    images: that are kept, each with who needs it.
    left: the stamp of the token that a next turn has dropped.
    lost: blocks that a load within a step has not brought.
    storage_jobs, files: of the storage behind host memory.
    lanes, outputs: of the last command.
    batch: tokens that its results have.
    spoilt: changes of its facts.
    """

    config: EngineConfig
    texts: dict[str, list[int]] = field(default_factory=dict)
    given: dict[str, list[int]] = field(default_factory=dict)
    requests: dict[str, RequestFact] = field(default_factory=dict)
    hashes: list[Published] = field(default_factory=list)
    batches: deque[dict[str, tuple[int, ...]]] = field(default_factory=deque)
    waiting: dict[str, list[int]] = field(default_factory=dict)
    serial: int = 0
    keys: dict[int, tuple[int, ...]] = field(default_factory=dict)
    chunks: dict[int, list[tuple[int, tuple[int, ...]]]] = field(default_factory=dict)
    transfers: dict[int, Transfer] = field(default_factory=dict)
    kept: tuple[int, ...] = ()
    pinned: tuple[tuple[str, int], ...] = ()
    images: dict[str, tuple[str, ...]] = field(default_factory=dict)
    left: int = 0
    lost: tuple[int, ...] = ()
    storage_jobs: dict[int, StorageJob] = field(default_factory=dict)
    files: list[StoredChunk] = field(default_factory=list)
    lanes: list[Lane] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    batch: dict[str, tuple[int, ...]] = field(default_factory=dict)
    spoilt: list[Callable[[BlockFacts], BlockFacts]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.memory: list[tuple[int, tuple[int, ...]]] = [(-1, ())] * (self.config.blocks + 1)
        self.expected = RequestTexts(self.config)
        self.before = self.facts()

    def send(self, command: object) -> None:
        """Note the text of a request, or of a next turn."""
        if not isinstance(command, Add | More):
            return
        self.serial += 1
        tokens = client_tokens(command.prompt, command.tokens, self.serial)
        name = command.request
        if isinstance(command, Add):
            self.texts[name] = list(tokens)
            self.given[name] = list(tokens)
            empty = ((),) * len(self.config.groups)
            self.requests[name] = RequestFact("WAITING", tuple(tokens), 0, empty)
        else:
            self.waiting[name] = tokens

    def facts(self) -> BlockFacts:
        """Return the facts that follow from what was stated so far."""
        facts = {name: self._request_fact(name) for name in self.requests}
        held = Counter(
            chain.from_iterable(table for fact in facts.values() for table in fact.tables)
        )
        held.update([*self.kept, *(block for _, block in self.pinned)])
        held[0] = 0
        refs = tuple(held[block] for block in range(self.config.blocks + 1))
        free = tuple(block for block, count in enumerate(refs) if block and not count)
        return BlockFacts(
            refs, free, tuple(self.memory), tuple(self.hashes),
            mapped=Counter(published.block for published in self.hashes), requests=facts,
            lanes=tuple(self.lanes), outputs=tuple(self.outputs),
            steps_in_flight=len(self.batches), kept=self.kept, pinned=self.pinned,
            host=self._host() if self.config.connects else None,
            encoder=encoder_of(self.config.encoder_cache, self.images) if self.config.encodes else None,
        )  # fmt: skip

    def _host(self) -> HostFacts:
        """Host memory: pins and the free list follow from transfers and hashes."""
        jobs = [job for job in self.transfers.values() if not job.stale]
        moving = [(job.load, chunk) for job in jobs for chunk in {part[2] for part in job.parts}]
        by_storage = pins_by(self.storage_jobs.values())
        pins = {chunk: by_storage.get(chunk, 0) for chunk in self.keys}
        for chunk in self.keys:
            pins[chunk] += moving.count((True, chunk))
            if (False, chunk) in moving:
                pins[chunk] = -1
        used = {*self.keys, *by_storage, *(chunk for _, chunk in moving)}
        count = self.config.host_chunks
        nothing = [(-1, ())] * self.config.chunk_blocks
        return HostFacts(
            count,
            tuple(chunk for chunk in range(count) if chunk not in used),
            tuple(tuple(self.chunks.get(chunk, nothing)) for chunk in range(count)),
            tuple(HostKey(chunk, 0, stamps, pins[chunk]) for chunk, stamps in self.keys.items()),
            tuple(self.transfers.values()),
            lost=self.lost,
            jobs=tuple(self.storage_jobs.values()),
            stored=tuple(self.files),
        )

    def _request_fact(self, name: str) -> RequestFact:
        """Return the fact of a request, with the text that its client has."""
        return self.requests[name]._replace(tokens=tuple(self.given[name]))

    def spoil(self, **changes: Callable[[BlockFacts], object]) -> None:
        """Give the facts after this command other values in these fields."""

        def change_facts(facts: BlockFacts) -> BlockFacts:
            return facts._replace(**{name: change(facts) for name, change in changes.items()})

        self.spoilt.append(change_facts)

    def stamps(self, name: str, tokens: list[int] | None = None) -> list[int]:
        """Return the stamps of these tokens, or of its text, as a request computes them."""
        bearer = self.expected.bearers.get(name)
        origin = bearer.source.origin if bearer is not None else 0
        return chained(self.texts[name] if tokens is None else tokens, origin)

    def tables(self, text: str) -> Table:
        """Return the block tables of a text such as "1 2 | 3"."""
        return tuple(tuple(map(int, table.split())) for table in text.split("|"))

    def write(self, block: int, group: int, offset: int, stamp: int) -> None:
        owner, slots = self.memory[block]
        if owner != group:
            slots = (0,) * self.config.groups[group].block_size
        self.memory[block] = group, (*slots[:offset], stamp, *slots[offset + 1 :])

    def use(
        self, group: int, table: tuple[int, ...], stamps: list[int], start: int, end: int
    ) -> StateUse:
        """Have an entry go on from the state that is due, in the block of its last token."""
        block = table[(end - 1) // self.config.groups[group].block_size]
        found = (stamps[start - 1],) * 2 if start else (0, 0)
        self.memory[block] = group, (stamps[end - 1],) * 2
        return StateUse(group, block if start else -1, found, ((block, stamps[end - 1]),))

    def fill(self, tables: Table, stamps: list[int], start: int, end: int) -> None:
        """Write KV of these positions, wherever a table has a block for them."""
        for group, table in enumerate(tables):
            layers = self.config.groups[group]
            if layers.state:
                continue
            for position in range(start, end):
                at, offset = layers.slot_of(position)
                if at < len(table) and table[at]:
                    self.write(table[at], group, offset, stamps[position])
