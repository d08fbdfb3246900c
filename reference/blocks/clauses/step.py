"""One command on a block-pool engine, with what its clauses ask about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from reference.blocks.commands import Add, EngineCommand
from reference.blocks.config import EngineConfig
from reference.blocks.facts import BlockFacts, Memory, Table
from reference.blocks.host_view import HostView, window_start
from reference.blocks.request_texts import Bearer, LaneNote, OutputNote
from reference.clauses.registry import Clause, register
from reference.clauses.progress import Admission
from reference.commands import Reason, prompt_len
from reference.failures import AtTable, Failure, count_text, failure
from reference.standstill_detector import Standstill
from reference.memoization import memoized
from reference.kv_sources import KvSource
from reference.recurrent_states import chained

__all__ = ["REGISTERED", "BlockStep", "clause", "window_start"]
REGISTERED: dict[str, Clause] = {}
clause = partial(register, REGISTERED)
IN_FLIGHT = "what is in flight"
# what is read where a table ends; where a slot has no KV of this group
NO_BLOCK = -1
NOT_WRITTEN = 0
OUTSIDE = -1, 0  # group and index of a block outside of tables


@dataclass(eq=False)
class BlockStep(HostView):
    """A command on an engine, and the state before and after it."""

    config: EngineConfig
    command: EngineCommand
    #: the command changed nothing
    refused: bool
    #: the engine's facts
    before: BlockFacts
    after: BlockFacts
    #: batch entries and outputs, each with its expectation
    lanes: list[LaneNote]
    outputs: list[OutputNote]
    #: requests and sessions after the command, by name
    bearers: dict[str, Bearer]
    #: blocks that steps in flight write or copy
    in_use: frozenset[int] = frozenset()
    #: see RequestTexts
    standstill: Standstill | None = None
    kv_sources: tuple[KvSource, ...] = ()
    #: the reason for the refusal
    reason: Reason | None = None

    @memoized
    def entries(self) -> dict[int, list[tuple[str, int, int]]]:
        """Return the table entries of each block: (request, group, index in the table), without the null
        block.

        A block that is pinned, or kept for a step or a transfer in flight, has an entry of group -1.
        """
        entries_by_block: dict[int, list[tuple[str, int, int]]] = {}
        for name, fact in self.after.requests.items():
            for group, blocks in enumerate(fact.tables):
                for index, block in enumerate(blocks):
                    if block:
                        entries_by_block.setdefault(block, []).append((name, group, index))
        outside = *((IN_FLIGHT, block) for block in self.after.kept), *self.after.pinned
        for name, block in outside:
            entries_by_block.setdefault(block, []).append((name, *OUTSIDE))
        return entries_by_block

    @memoized
    def awaited_blocks(self) -> frozenset[int]:
        """Blocks whose load within a step has failed. A block stays here until the engine is notified,
        and then until the requests that hold it have computed it."""
        if self.after.host is None or not self.config.sync_loads:
            return frozenset()
        size = self.config.groups[0].block_size
        again = {
            block
            for fact in self.after.requests.values()
            for index, block in enumerate(fact.tables[0])
            if (index + 1) * size > fact.computed
        }
        return frozenset(again.union(self.after.host.lost))

    @property
    def unanswered(self) -> dict[str, str]:
        """The status of each request that is not between turns."""
        return {
            name: fact.status
            for name, fact in self.after.requests.items()
            if name not in self.bearers or not self.bearers[name].idle
        }

    @property
    def room(self) -> str:
        """The free blocks, in words."""
        return f"{count_text(len(self.after.free), 'block')} free"

    @property
    def admission(self) -> Admission | None:
        """Return the engine's decision on a request: a pool holds any text of max_model_len
        (EngineConfig)."""
        command = self.command
        most = self.config.max_model_len
        refused = self.refused and self.reason is Reason.BAD_LENGTH
        if not isinstance(command, Add) or (self.refused and not refused):
            return None
        length = prompt_len(command.prompt) + command.tokens
        sane = length >= 1 <= command.max_tokens and all(piece.tokens for piece in command.prompt)
        never = f"its prompt leaves no output in {most} tokens" if length >= most else ""
        fits = sane and self.config.has_room_for(length + command.max_tokens)
        return Admission(command.request, never, fits, refused)

    def held_its_text(self, block: int) -> bool:
        """Return whether the block's content before the command matched its hashes."""
        owner, slots = self.before.memory[block]
        return all(
            (owner, slots[: len(entry.stamps)]) == (entry.group, entry.stamps)
            for entry in self.before.published
            if entry.block == block
        )

    def held_tables(self) -> Iterator[tuple[str, Bearer, Table]]:
        """Return requests with KV, and the cache manager's tables of each."""
        for name, bearer in self.bearers.items():
            fact = self.after.requests.get(name)
            if bearer.computed is not None and fact is not None and fact.status != "SWAPPED":
                yield name, bearer, fact.tables

    def reads(
        self, tables: Table, group: int, start: int, end: int, memory: Memory | None = None
    ) -> list[int]:
        """Return the stamps that queries from `start` to `end` read through a table of this group.

        memory: that of the blocks which the tables name; by default the device's.
        """
        layers = self.config.groups[group]
        row = tables[group]
        if memory is None:
            memory = self.after.memory
        stamps = []
        for position in range(start, end):
            entry, offset = layers.slot_of(position)
            if entry >= len(row):
                stamps.append(NO_BLOCK)
                continue
            owner, slots = memory[row[entry]]
            stamps.append(slots[offset] if owner == group and row[entry] else NOT_WRITTEN)
        return stamps

    def misread(
        self, name: str, tables: Table, stamps: list[int], first_query: int, end: int
    ) -> Failure | None:
        """Return the failure where a group reads other KV than the text's, from the window of
        `first_query` to `end`."""
        for group, layers in enumerate(self.config.groups):
            if layers.state:  # STA-1, STA-2
                continue
            start = layers.first_kept(window_start(layers, first_query), end)
            read = self.reads(tables, group, start, end)
            if read != stamps[start:end]:
                first_wrong = next(
                    i
                    for i, value in enumerate(read)
                    if [value] != stamps[start + i : start + i + 1]
                )
                expected = f"{name} must find its own KV at position {start + first_wrong} in group {group}"
                position = start + first_wrong
                entry, _ = layers.slot_of(position)
                place = AtTable(name, group, entry, position, max(first_query, position))
                read_kv = self._describe_read(name, tables, group, position, read[first_wrong])
                return failure(expected, read_kv, place)
        return None

    def _describe_read(self, name: str, tables: Table, group: int, position: int, value: int) -> str:
        entry, _ = self.config.groups[group].slot_of(position)
        if value == NO_BLOCK:
            return f"its table ends before entry {entry}"
        block = tables[group][entry]
        if not block:
            return f"entry {entry} of its table is the null block"
        if value == NOT_WRITTEN:
            return f"block {block} holds nothing of this group there"
        if (source := self._foreign_source(name, position, value)) is not None:
            own_source = self.bearers[name].source
            return f"block {block} holds KV of {source} there, and {name} has {own_source}"
        return f"block {block} holds KV of another token there"

    def _foreign_source(self, name: str, position: int, value: int) -> KvSource | None:
        """Return the other source under which the same text has this stamp."""
        text = self.bearers[name].text[: position + 1] if name in self.bearers else []
        for source in self.kv_sources:
            if len(text) > position and chained(text, source.origin)[-1] == value:
                return source
        return None
