"""Clauses on the KV that a drafter (EAGLE, MTP) keeps beside the target model's (DRAFT)."""

from __future__ import annotations

from reference.blocks.clauses.step import NOT_WRITTEN, BlockStep, clause
from reference.failures import AtTable, Failure, failure


@clause(
    "DRAFT-1",
    "a drafter reads its own KV",
    "A drafter finds KV of its own at each position before a batch entry that it sees: computed from its"
    " request's text up to the next token.",
    why="It drafts what the target model rejects. Answers are right, and slower.",
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
        for position, value in enumerate(use.found, use.first):
            if value == note.stamps[position + 1] or value in note.discarded:
                continue
            size = step.config.groups[use.group].block_size
            at = position // size
            row = note.lane.tables[use.group]
            block = row[at] if at < len(row) else 0
            want = f"the drafter of {name} finds its KV at position {position} in group {use.group}"
            got = f"block {block} holds none of it there"
            if value != NOT_WRITTEN:
                got = f"block {block} holds KV of another text or next token there"
            return failure(want, got, AtTable(name, use.group, at, position, note.lane.start))
    return None


@clause(
    "DRAFT-2",
    "slots ahead are there",
    "A drafter writes only into blocks of its request's table, in the slots ahead of the batch too.",
    why="Whoever holds the block drafts from what was written there.",
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
        size = step.config.groups[use.group].block_size
        row = lane.tables[use.group]
        for position in range(lane.start, use.end):
            at = position // size
            if at >= len(row) or not row[at]:
                got = "is the null block" if at < len(row) else "is past its end"
                where = f"position {position} in group {use.group}"
                want = f"the drafter of {lane.request} has a block for {where}"
                place = AtTable(lane.request, use.group, at, position)
                return failure(want, f"entry {at} of its table {got}", place)
    return None
