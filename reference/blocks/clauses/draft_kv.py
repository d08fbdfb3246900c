"""Clauses on the KV that a drafter (EAGLE, MTP) has in addition to the target model's (DRAFT)."""

from __future__ import annotations

from collections.abc import Sequence

from reference.blocks.clauses.step import NOT_WRITTEN, BlockStep, clause
from reference.failures import AtTable, Failure, failure


@clause(
    "DRAFT-1",
    "a drafter reads its own KV",
    "A drafter finds KV of its own at each position before a batch entry that it sees: computed from its"
    " request's text up to the next token.",
    why="A drafter that reads other KV proposes tokens that the target model rejects. Answers stay right, and"
    " take longer.",
    needs=("drafter",),
    rule="blocks.request_texts",
    source="vllm find_longest_cache_hit (drop_eagle_block), prepare_next_token_ids_padded",
    scope="A session's last token goes when its next turn begins. KV that was computed with it stays:"
    " upstream keeps it (\"Resident KV can retain a discarded streaming token's hash\").",
    trigger=lambda s: any(n.lane.draft is not None and n.lane.draft.found for n in s.lanes),
)
def _drafter_reads(step: BlockStep) -> Failure | None:
    for note in step.lanes:
        use = note.lane.draft
        if use is None:
            continue
        name = note.lane.request
        for position, stamp in enumerate(use.found, use.first):
            # a drafter computes its KV at a position with the token after it
            if stamp == note.stamps[position + 1] or stamp in note.discarded:
                continue
            entry, block = _block_at(step, use.group, note.lane.tables, position)
            expected = (
                f"the drafter of {name} finds its KV at position {position} in group {use.group}"
            )
            if stamp == NOT_WRITTEN:
                observed = f"block {block} holds none of it there"
            else:
                observed = f"block {block} holds KV of another text or next token there"
            place = AtTable(name, use.group, entry, position, note.lane.start)
            return failure(expected, observed, place)
    return None


def _block_at(
    step: BlockStep, group: int, tables: Sequence[Sequence[int]], position: int
) -> tuple[int, int]:
    """Return the entry of a group's table that has a position, and the block there: 0, the null block, also
    past the end of the table."""
    entry, _ = step.config.groups[group].slot_of(position)
    table = tables[group]
    return entry, table[entry] if entry < len(table) else 0


@clause(
    "DRAFT-2",
    "slots ahead are there",
    "A drafter writes only into blocks of its request's table, in the slots ahead of the batch too.",
    why="The request that has the block would draft from KV of another text.",
    needs=("drafter",),
    rule="blocks.facts",
    source="vllm num_lookahead_tokens",
    trigger=lambda s: any(
        n.lane.draft is not None and n.lane.draft.end > n.lane.start + len(n.lane.tokens)
        for n in s.lanes
    ),
)
def _drafter_writes(step: BlockStep) -> Failure | None:
    for lane in step.after.lanes:
        use = lane.draft
        if use is None:
            continue
        for position in range(lane.start, use.end):
            entry, block = _block_at(step, use.group, lane.tables, position)
            if block:
                continue
            is_past_end = entry >= len(lane.tables[use.group])
            problem = "is past its end" if is_past_end else "is the null block"
            return failure(
                f"the drafter of {lane.request} has a block for position {position} in group {use.group}",
                f"entry {entry} of its table {problem}",
                AtTable(lane.request, use.group, entry, position),
            )
    return None
