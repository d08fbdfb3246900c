"""Host memory that a connector offloads blocks to, as the clauses of a second tier (reference/tiers) see
it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from reference.blocks.commands import EngineCommand, NewWeights, ResetConnector
from reference.blocks.config import EngineConfig, LayerGroup
from reference.blocks.facts import BlockFacts, HostFacts, HostKey, Lane, Part, Transfer
from reference.failures import AtBlock, AtChunk, AtCount, AtTable, Failure, counted, failure
from reference.remembered import remembered
from reference.states import EMPTY, PARTS
from reference.tiers.records import KeptCopy, Count, HostUnit, Source


class HostView:
    """The part of a BlockStep that is about host memory and transfers."""

    config: EngineConfig
    command: EngineCommand
    refused: bool
    before: BlockFacts
    after: BlockFacts
    entries: dict[int, list[tuple[str, int, int]]]
    in_use: frozenset[int]

    @property
    def resets_tier(self) -> bool:
        if isinstance(self.command, NewWeights):
            return self.after.reset
        return isinstance(self.command, ResetConnector) and not self.refused

    @property
    def kept_copies(self) -> tuple[int, int]:
        before, now = (
            len(facts.host.keys) if facts.host else 0 for facts in (self.before, self.after)
        )
        return before, now

    @remembered
    def reached(self) -> frozenset[str]:
        """Clauses of a second tier that could break at this step."""
        before, after = self.before, self.after
        found = {
            "HOST-1": after.host is not None and bool(after.host.free),
            "HOST-2": after.host is not None and any(key.pins >= 0 for key in after.host.keys),
            "HOST-3": any(job.load for job in after.transfers),
            "XFER-1": any(not job.copied and job.parts for job in after.transfers),
            "XFER-2": any(job.load and not job.completed for job in after.transfers),
            "XFER-3": bool(before.kept) or (bool(before.transfers) and not after.transfers),
        }
        return frozenset(name for name, could in found.items() if could)

    def rooms(self) -> Iterator[HostUnit]:
        if (host := self.after.host) is None:
            return
        kept = Counter(key.chunk for key in host.keys)
        free = Counter(host.free)
        moving = {part[2] for job in host.transfers for part in job.parts}
        for chunk in range(host.chunks):
            owned = "1 hash names it" if kept[chunk] == 1 else f"{kept[chunk]} hashes name it"
            yield HostUnit(
                f"chunk {chunk}", AtChunk(chunk), kept[chunk], free[chunk], chunk in moving, owned
            )

    def copies(self) -> Iterator[KeptCopy]:
        host = self.after.host
        if host is None:
            return
        for key in host.keys:
            for index in range(self.config.chunk_blocks if key.pins >= 0 else 0):
                if (copy := self._block(key, index, host)) is not None:
                    yield copy

    def _block(self, key: HostKey, index: int, host: HostFacts) -> KeptCopy | None:
        """A block of a chunk; None for one that was left out, as no hit needs its window or state."""
        layers = self.config.groups[key.group]
        start = index * layers.block_size
        group, slots = host.memory[key.chunk][index]
        if group < 0 and (layers.window is not None or layers.state):
            return None
        wanted = key.stamps[start : start + layers.block_size]
        if layers.state:
            return self._state(key, wanted[-1], slots if group == key.group else ())
        holds = f"it must hold KV of the tokens that its hash in group {key.group} names"
        return KeptCopy(
            holds,
            wanted,
            slots[: len(wanted)] if group == key.group else (0,) * len(wanted),
            lambda at: f"slot {start + at} of chunk {key.chunk}",
            lambda at: AtChunk(key.chunk, start + at),
            "nothing of this group",
        )

    def _state(self, key: HostKey, wanted: int, parts: tuple[int, ...]) -> KeptCopy:
        """A block with the state after its last token."""
        return KeptCopy(
            f"it must hold the state that its hash in group {key.group} is of",
            (wanted,) * len(PARTS),
            (*parts, *[EMPTY] * len(PARTS))[: len(PARTS)],
            lambda _: f"chunk {key.chunk}",
            lambda _: AtChunk(key.chunk),
            "no state of this group",
            "the state after other tokens",
        )

    def pins(self) -> Iterator[Count]:
        host = self.after.host
        words = {-1: "being written"}
        if host is None:
            return
        for key in host.keys:
            loads, stores = self._users(key)
            want = -1 if stores else loads
            wanted, got = (
                words.get(count, f"pinned {counted(count, 'time')}") for count in (want, key.pins)
            )
            yield Count(f"chunk {key.chunk}", AtChunk(key.chunk), wanted, got)

    def _users(self, key: HostKey) -> tuple[int, int]:
        """Loads and stores in flight of the chunk that is kept under `key`."""
        jobs = [job for job in self.after.transfers if not job.stale]
        using = [job.load for job in jobs if any(part[2] == key.chunk for part in job.parts)]
        return sum(using), len(using) - sum(using)

    def sources(self) -> Iterator[Source]:
        before = {job.job for job in self.before.transfers}
        for job in self.after.transfers:
            if job.copied or job.job not in before:
                continue
            for part in job.parts:
                called = f"chunk {part[2]}" if job.load else f"block {part[1]}"
                at = AtChunk(part[2]) if job.load else AtBlock(part[1])
                was, now = (self._source(facts, job, part) for facts in (self.before, self.after))
                yield Source(f"transfer {job.job}", called, at, was, now)

    def _source(self, facts: BlockFacts, job: Transfer, part: Part) -> tuple[int, tuple[int, ...]]:
        """Return what a job reads: the slots of the tokens that the block's hash covers, or the state."""
        group, block, chunk, index = part
        assert facts.host is not None and self.after.host is not None
        if job.load:
            return facts.host.memory[chunk][index]
        layers = self.config.groups[group]
        owner, slots = facts.memory[block]
        named = next((len(k.stamps) for k in self.after.host.keys if k.chunk == chunk), None)
        if layers.state:
            return owner, slots[: len(PARTS)]
        return owner, slots if named is None else slots[: named - index * layers.block_size]

    def taken(self) -> Iterator[Failure]:
        for job in self.after.transfers:
            if not job.load or job.completed:
                continue
            for group, block, _, _ in job.parts:
                where = AtBlock(block)
                named = self.entries.get(block, ())
                if len(names := {name for name, _, _ in named}) != 1:
                    who = " and ".join(sorted(names)) or "nobody"
                    want = f"block {block} is held for transfer {job.job} alone"
                    yield failure(want, f"{who} holds it", where)
                for lane in self.after.lanes:
                    if (
                        place := _read_or_written(lane, self.config.groups[group], group, block)
                    ) is not None:
                        want = f"{lane.request} waits for transfer {job.job}"
                        yield failure(want, f"it computes with block {block}", place)
                if block in self.in_use:
                    want = f"no step in flight uses block {block}, for transfer {job.job} writes it"
                    yield failure(want, "one does", where)

    def left_over(self) -> Iterator[Failure]:
        facts = self.after
        if facts.host is not None and facts.host.records:
            got = ", ".join(facts.host.records)
            yield failure("no record of what is gone", got, AtCount("host", "records", 0))
        if facts.kept and not facts.transfers and not facts.steps_in_flight:
            blocks = " ".join(map(str, facts.kept))
            at = (AtBlock(block) for block in facts.kept)
            want = "blocks are kept for what is in flight"
            yield failure(want, f"nothing is; blocks {blocks} are kept", *at)


def window_start(layers: LayerGroup, query: int) -> int:
    """The first position that a query at `query` sees."""
    return 0 if layers.window is None else max(0, query - layers.window + 1)


def _read_or_written(
    lane: Lane, layers: LayerGroup, group: int, block: int
) -> AtTable | AtBlock | None:
    """Return the place at which a batch entry uses a block: its table, or a block that the table lacks;
    else None. Of recurrent groups it uses the blocks of its states alone."""
    start = window_start(layers, lane.start)
    size = layers.block_size
    row = lane.tables[group]
    end = -(-(lane.start + len(lane.tokens)) // size)
    used = {*row[start // size : end]}
    if layers.state:
        used = {at for use in lane.states for at in (use.block, *(to for to, _ in use.writes))}
    if block not in used:
        return None
    return AtTable(lane.request, group, row.index(block)) if block in row else AtBlock(block)
