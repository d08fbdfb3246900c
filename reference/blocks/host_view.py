"""The host memory of a connector that offloads blocks, in the form that the clauses of a second tier
(reference/tiers) read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from reference.blocks.commands import EngineCommand, NewWeights, ResetConnector
from reference.blocks.config import EngineConfig, LayerGroup
from reference.blocks.facts import (
    BlockFacts, HostKey, Lane, Part, StorageJob, Transfer,
)  # fmt: skip
from reference.failures import AtBlock, AtChunk, AtCount, AtTable, Failure, count_text, failure
from reference.memoization import memoized
from reference.recurrent_states import EMPTY, PARTS
from reference.tiers.tier_records import KeptCopy, Count, HostUnit, Source


class HostView:
    """The part of a BlockStep about host memory and transfers: a `HasTier` (reference.tiers.tier_records)."""

    config: EngineConfig
    command: EngineCommand
    refused: bool
    before: BlockFacts
    after: BlockFacts
    entries: dict[int, list[tuple[str, int, int]]]
    in_use: frozenset[int]

    @property
    def resets_tier(self) -> bool:
        """Whether the command has emptied host memory."""
        if isinstance(self.command, NewWeights):
            return self.after.reset
        if self.config.simple:  # this reset fails while KV moves
            return isinstance(self.command, ResetConnector) and self.after.reset
        return isinstance(self.command, ResetConnector) and not self.refused

    @property
    def kept_copy_counts(self) -> tuple[int, int]:
        """The numbers of chunks that host memory kept before and after the command."""
        return _kept_chunk_count(self.before), _kept_chunk_count(self.after)

    @memoized
    def clauses_reached(self) -> frozenset[str]:
        """Return the clauses of a second tier that could fail at this step."""
        before = self.before
        after = self.after
        blocks = {
            "HOST-1": after.host is not None and bool(after.host.free),
            "HOST-2": after.host is not None
            and (bool(after.host.stored) or any(key.pins >= 0 for key in after.host.keys)),
            "HOST-3": any(job.load for job in after.transfers) or bool(_storage_jobs(after)),
            "XFER-1": any(not job.copied and job.parts for job in after.transfers)
            or any(not job.load and not job.done for job in _storage_jobs(after)),
            "XFER-2": any(job.load and not job.completed for job in after.transfers)
            or any(job.load and not job.done for job in _storage_jobs(after)),
            "XFER-3": bool(before.kept) or (bool(before.transfers) and not after.transfers),
        }
        return frozenset(name for name, could in blocks.items() if could)

    def rooms(self) -> Iterator[HostUnit]:
        """Yield the chunks of host memory."""
        if (host := self.after.host) is None:
            return
        keys_by_chunk = Counter(key.chunk for key in host.keys)
        free = Counter(host.free)
        moving = {chunk for job in host.transfers for _, _, chunk, _ in job.parts}
        moving |= {chunk for job in host.jobs for chunk in job.chunks}
        for chunk in range(host.chunks):
            owned = (
                "1 hash names it"
                if keys_by_chunk[chunk] == 1
                else f"{keys_by_chunk[chunk]} hashes name it"
            )
            # a block of a pool may also have the hash of its first part
            owners = min(keys_by_chunk[chunk], 1) if self.config.simple else keys_by_chunk[chunk]
            yield HostUnit(
                f"chunk {chunk}", AtChunk(chunk), owners, free[chunk], chunk in moving, owned
            )

    def copies(self) -> Iterator[KeptCopy]:
        """Yield the blocks that were copied to host memory, in chunks that no store still writes."""
        host = self.after.host
        if host is None:
            return
        copies = [(key, host.memory[key.chunk]) for key in host.keys if key.pins >= 0]
        copies += [(HostKey(STORED, chunk.group, chunk.stamps, 0), chunk.memory) for chunk in host.stored]
        for key, memory in copies:
            for index in range(self.config.chunk_blocks):
                if (copy := self._stored_block(key, index, memory)) is not None:
                    yield copy

    def _stored_block(
        self, key: HostKey, index: int, memory: tuple[tuple[int, tuple[int, ...]], ...]
    ) -> KeptCopy | None:
        """Return the block at `index` of a chunk, None for a block that was not stored because no hit needs
        its window or state.

        memory: the content of the chunk.
        """
        layers = self.config.groups[key.group]
        start = index * layers.block_size
        group, slots = memory[index]
        if group < 0 and (layers.window is not None or layers.state):
            return None
        wanted = key.stamps[start : start + layers.block_size]
        if layers.state:
            return self._stored_state(key, wanted[-1], slots if group == key.group else ())
        holds = f"it must hold KV of the tokens that its hash in group {key.group} names"
        return KeptCopy(
            holds=holds,
            wanted=wanted,
            found=slots[: len(wanted)] if group == key.group else (0,) * len(wanted),
            slot=lambda at: f"slot {start + at} of {_chunk_name(key)}",
            at=lambda at: _chunk_place(key, start + at),
            missing="nothing of this group",
        )

    def _stored_state(self, key: HostKey, wanted: int, parts: tuple[int, ...]) -> KeptCopy:
        """Return the copy of a recurrent state.

        wanted: stamp after its last token.
        parts: stamps of its parts.
        """
        return KeptCopy(
            holds=f"it must hold the state that its hash in group {key.group} is of",
            wanted=(wanted,) * len(PARTS),
            found=(*parts, *[EMPTY] * len(PARTS))[: len(PARTS)],
            slot=lambda _: _chunk_name(key),
            at=lambda _: _chunk_place(key),
            missing="no state of this group",
            another="the state after other tokens",
        )

    def pins(self) -> Iterator[Count]:
        """Yield the pin count of each chunk, with the expected count from its transfers."""
        host = self.after.host
        if host is None:
            return
        for key in host.keys:
            loads, stores = self._count_users(key)
            wanted = _pin_text(-1 if stores else loads)
            yield Count(
                f"chunk {key.chunk}", AtChunk(key.chunk), wanted, _pin_text(key.pins)
            )

    def _count_users(self, key: HostKey) -> tuple[int, int]:
        """Count the loads and the stores in flight that use the chunk of `key`."""
        using = [
            job
            for job in self.after.transfers
            if not job.stale and any(chunk == key.chunk for _, _, chunk, _ in job.parts)
        ]
        loads = sum(job.load for job in using)
        stores = len(using) - loads
        for storing in _storage_jobs(self.after):
            if key.chunk in storing.chunks:
                if not storing.load:
                    loads += 1
                stores += storing.load
        return loads, stores

    def sources(self) -> Iterator[Source]:
        """Yield the sources that transfers from before this command have not read yet."""
        started = {job.job for job in self.before.transfers}
        for job in self.after.transfers:
            if job.copied or job.job not in started:
                continue
            for part in job.parts:
                _, block, chunk, _ = part
                called = f"chunk {chunk}" if job.load else f"block {block}"
                place = AtChunk(chunk) if job.load else AtBlock(block)
                was = self._transfer_source(self.before, job, part)
                now = self._transfer_source(self.after, job, part)
                yield Source(f"transfer {job.job}", called, place, was, now)
        yield from self._storage_write_sources()

    def _storage_write_sources(self) -> Iterator[Source]:
        """Yield the chunks that storage jobs from before this command have not written yet."""
        jobs_before = {job.job for job in _storage_jobs(self.before)}
        before = self.before.host
        after = self.after.host
        if before is None or after is None:
            return
        for job in after.jobs:
            if job.load or job.done or job.job not in jobs_before:
                continue
            for chunk in job.chunks:
                was = before.memory[chunk]
                now = after.memory[chunk]
                yield Source(f"storage job {job.job}", f"chunk {chunk}", AtChunk(chunk), was, now)

    def _transfer_source(self, facts: BlockFacts, job: Transfer, part: Part) -> tuple[int, tuple[int, ...]]:
        """Return the group of a transfer's source and its stamps: those of the tokens under the block's
        hash, or of the state."""
        group, block, chunk, index = part
        assert facts.host is not None and self.after.host is not None
        if job.load:
            return facts.host.memory[chunk][index]
        layers = self.config.groups[group]
        owner, slots = facts.memory[block]
        covered = next((len(k.stamps) for k in self.after.host.keys if k.chunk == chunk), None)
        if layers.state:
            return owner, slots[: len(PARTS)]
        if covered is None:
            return owner, slots
        return owner, slots[: covered - index * layers.block_size]

    def taken_destinations(self) -> Iterator[Failure]:
        """Yield the blocks that a load writes while another request holds them, computes with them or has
        them in flight."""
        loads_wait = self.after.host is not None and self.after.host.loads_wait
        for job in self.after.transfers:
            if not job.load or job.completed:
                continue
            for group, block, _, _ in job.parts:
                at_block = AtBlock(block)
                holders = {name for name, _, _ in self.entries.get(block, ())}
                if len(holders) != 1:
                    holder_names = " and ".join(sorted(holders)) or "nobody"
                    expected = f"block {block} is held for transfer {job.job} alone"
                    yield failure(expected, f"{holder_names} holds it", at_block)
                for lane in self.after.lanes:
                    place = _use_place(lane, self.config.groups[group], group, block)
                    if place is not None:
                        expected = f"{lane.request} waits for transfer {job.job}"
                        yield failure(expected, f"it computes with block {block}", place)
                if block in self.in_use and not loads_wait:
                    expected = f"no step in flight uses block {block}, for transfer {job.job} writes it"
                    yield failure(expected, "one does", at_block)

        yield from self._storage_read_conflicts()

    def _storage_read_conflicts(self) -> Iterator[Failure]:
        """Yield the chunks that a storage job reads into while a transfer uses them."""
        for job in _storage_jobs(self.after):
            if not job.load or job.done:
                continue
            for chunk in job.chunks:
                for other in self.after.transfers:
                    used = any(chunk == part[2] for part in other.parts)
                    if used and not other.copied:
                        expected = f"chunk {chunk} is used by storage job {job.job} alone"
                        yield failure(expected, f"transfer {other.job} uses it", AtChunk(chunk))

    def leftovers(self) -> Iterator[Failure]:
        """Yield the records and blocks that are kept for transfers and requests that have ended."""
        facts = self.after
        if facts.host is not None and facts.host.records:
            observed = ", ".join(facts.host.records)
            yield failure("no record of what is gone", observed, AtCount("host", "records", 0))
        if facts.kept and not facts.transfers and not facts.steps_in_flight:
            blocks = " ".join(map(str, facts.kept))
            places = (AtBlock(block) for block in facts.kept)
            expected = "blocks are kept for what is in flight"
            yield failure(expected, f"nothing is; blocks {blocks} are kept", *places)


STORED = -1  # in the place of a chunk number: a file of the storage


def _storage_jobs(facts: BlockFacts) -> tuple[StorageJob, ...]:
    return facts.host.jobs if facts.host is not None else ()


def _chunk_name(key: HostKey) -> str:
    return "a file of the storage" if key.chunk == STORED else f"chunk {key.chunk}"


def _chunk_place(key: HostKey, slot: int | None = None) -> AtChunk | AtCount:
    return AtCount("storage", "files") if key.chunk == STORED else AtChunk(key.chunk, slot)


def _kept_chunk_count(facts: BlockFacts) -> int:
    return 0 if facts.host is None else len(facts.host.keys)


def _pin_text(pins: int) -> str:
    return "being written" if pins == -1 else f"pinned {count_text(pins, 'time')}"


def window_start(layers: LayerGroup, query: int) -> int:
    """Return the first position that a query at `query` sees."""
    return 0 if layers.window is None else max(0, query - layers.window + 1)


def _use_place(
    lane: Lane, layers: LayerGroup, group: int, block: int
) -> AtTable | AtBlock | None:
    """Return the place where a batch entry uses a block: its table entry, or the block itself if the table
    lacks it. None if the entry does not use the block. In a recurrent group an entry uses only the blocks of
    its states."""
    start = window_start(layers, lane.start)
    size = layers.block_size
    row = lane.tables[group]
    end = -(-(lane.start + len(lane.tokens)) // size)
    used = {*row} if layers.ring else {*row[start // size : end]}
    if layers.state:
        used = {at for use in lane.states for at in (use.block, *(to for to, _ in use.writes))}
    if block not in used:
        return None
    return AtTable(lane.request, group, row.index(block)) if block in row else AtBlock(block)
